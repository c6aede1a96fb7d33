"""Worker process that turns image files into pixels and sound files into features. See `sie_runtime.confined`."""

from __future__ import annotations

from sie_runtime import confined
from sie_sidecar.prepare import images
from sie_sidecar.prepare.media_frames import (
    FRAMES,
    MAX_ANSWER_BYTES,
    MAX_JOB_BYTES,
    ImageJob,
    Job,
    PreparedFile,
    PreparedImage,
    SoundFeatures,
)


def _answer(job: Job) -> PreparedFile:
    if isinstance(job, ImageJob):
        image = images.prepare(job.data, job.recipe)
        return PreparedImage(job.number, *image.size, *image.upright, image.animated, image.digest(), image.pixels)
    # imported only for sounds, because a process that decodes only images needs neither numpy nor libsndfile
    from sie_sidecar.prepare import sounds

    sound = sounds.prepare(job.data, job.recipe, job.from_s)
    return SoundFeatures(job.number, *sound.shape, sound.seconds, sound.digest(), sound.values.tobytes())


if __name__ == "__main__":
    confined.serve(FRAMES, MAX_JOB_BYTES, MAX_ANSWER_BYTES, lambda: _answer)
