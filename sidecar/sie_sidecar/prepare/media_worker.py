"""Worker process that turns image files into pixels and sound files into features, one file after the other. Its
standard input is a socket to the sidecar.

    set limits ──► Hello ──► Job ──► PreparedFile or Unusable ──► Job ... until the sidecar has ended

The process has no secrets, because it does not get the sidecar's environment. It always ends when the sidecar ends: on
Linux the kernel kills it, and on every system its socket is then closed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys

from sie_contracts.errors import InvalidInput
from sie_contracts.media.media import cause_of
from sie_contracts.wire.child_frames import Hello, Unusable
from sie_contracts.wire.ipc import FrameError, receive_frame
from sie_runtime import confined
from sie_sidecar.prepare import images, media_frames


def main() -> None:
    """Run the worker. Arguments: process id of the sidecar, and bytes of memory that this process may use."""
    parent, memory_bytes = int(sys.argv[1]), int(sys.argv[2])
    confined.limit(memory_bytes)
    confined.die_with(parent)
    # these exceptions mean that the sidecar has ended, and then the worker ends too
    with socket.socket(fileno=0) as sidecar, contextlib.suppress(EOFError, FrameError, OSError):
        _send(sidecar, media_frames.frame(Hello(os.getpid())))
        confined.silence()
        while True:
            _send(sidecar, _answer(media_frames.job(receive_frame(sidecar, media_frames.MAX_JOB_BYTES))))


def _answer(job: media_frames.Job) -> tuple[bytes, bytes]:
    try:
        reply = _image(job) if isinstance(job, media_frames.ImageJob) else _sound(job)
        return media_frames.frame(reply)
    except InvalidInput as error:
        raised = type(error.__cause__).__name__ if error.__cause__ else ""
        return media_frames.frame(Unusable(job.number, *cause_of(error), raised))


def _image(job: media_frames.ImageJob) -> media_frames.PreparedImage:
    image = images.prepare(job.data, job.recipe)
    return media_frames.PreparedImage(
        job.number, *image.size, *image.upright, image.animated, image.digest(), image.pixels
    )


def _sound(job: media_frames.SoundJob) -> media_frames.SoundFeatures:
    # imported only for sounds: a worker without sounds needs neither numpy nor libsndfile
    from sie_sidecar.prepare import sounds

    sound = sounds.prepare(job.data, job.recipe, job.from_s)
    return media_frames.SoundFeatures(job.number, *sound.shape, sound.seconds, sound.digest(), sound.values.tobytes())


def _send(sidecar: socket.socket, parts: tuple[bytes, bytes]) -> None:
    for part in parts:
        sidecar.sendall(part)


if __name__ == "__main__":
    main()
