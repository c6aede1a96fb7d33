"""Process that reads untrusted files, one after the other. Its standard input is a socket to its parent.

    limits ──► imports ──► Hello ──► job ──► answer or Unusable ──► job ... the parent has ended ──► end

The parent passes none of its own environment variables, so the process has no secrets. The process ends when the parent
ends: on Linux the kernel kills the process, and on every system its next read of the socket fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sie_contracts.errors import InvalidInput
from sie_contracts.media.media import cause_of, fault
from sie_contracts.wire.child_frames import ChildFrames, Hello, Unusable
from sie_contracts.wire.ipc import FrameError, receive_frame

_PR_SET_PDEATHSIG = 1


def serve(
    frames: ChildFrames[Any, Any], max_job_bytes: int, max_answer_bytes: int, make: Callable[[], Callable[[Any], Any]]
) -> None:
    """Read job frames from the parent and send the answer of each job, until the parent ends. `sys.argv`: the parent's
    process id, and the memory limit in bytes.

    `make` is called once, after the limits are set. It returns the function that answers a job. For an unusable file,
    the returned function raises an error built by `media.fault`, and the parent gets an Unusable. `max_job_bytes`:
    limit for a job frame. `max_answer_bytes`: limit for an answer; a larger answer is replaced by an Unusable.
    """

    def answered(job: Any) -> tuple[bytes, bytes]:
        try:
            parts = frames.frame(answer(job))
            size = len(parts[1])
            if size > max_answer_bytes:
                message = f"the content of the file takes {size} bytes, at most {max_answer_bytes} are allowed"
                raise fault("too_large", message)
        except InvalidInput as error:
            raised = type(error.__cause__).__name__ if error.__cause__ else ""
            return frames.frame(Unusable(job.number, *cause_of(error), raised[:100]))
        return parts

    parent, memory_bytes = int(sys.argv[1]), int(sys.argv[2])
    _limit(memory_bytes)
    _die_with(parent)
    answer = make()
    _silence()
    # FrameError: the parent has sent an incomplete or too large frame. EOFError and OSError: the parent has ended.
    with socket.socket(fileno=0) as connection, contextlib.suppress(EOFError, FrameError, OSError):
        _send(connection, frames.frame(Hello(os.getpid())))
        while True:  # without variables, because they would keep the job and its answer in memory until the next job
            _send(connection, answered(frames.job(receive_frame(connection, max_job_bytes))))


def _send(connection: socket.socket, parts: tuple[bytes, bytes]) -> None:
    for part in parts:
        connection.sendall(part)


def _limit(memory_bytes: int) -> None:
    """Forbid core dumps. On Linux, also limit this process's address space, and make the kernel kill this process first
    if the machine runs out of memory.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would contain input of clients
    if sys.platform.startswith("linux"):  # other systems refuse or ignore RLIMIT_AS
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        with contextlib.suppress(OSError):  # 1000 is the highest score: the kernel kills this process before others
            Path("/proc/self/oom_score_adj").write_text("1000")


def _die_with(parent: int) -> None:
    """On Linux, make the kernel kill this process when the thread that started this process ends. End this process now
    if the parent has already ended. `parent`: process id. Call this before the first file is read: a process that hangs
    while it reads a file would not notice a closed socket.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended
        os._exit(1)


def _silence() -> None:
    """Redirect standard output and error to /dev/null: libraries may print parts of a client's file."""
    null_file = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_file, 1)
    os.dup2(null_file, 2)
    os.close(null_file)
