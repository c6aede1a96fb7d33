"""Messages between the sidecar and a media worker process: a job, then its reply, one job at a time."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sie_contracts.media.images import MAX_RESULT_BYTES, Recipe, Size
from sie_contracts.media.sounds import MAX_FEATURE_BYTES, Shape, SoundRecipe
from sie_contracts.wire.child_frames import ChildFrames, Hello, Unusable

MAX_FILE_BYTES = 128 << 20
MAX_JOB_BYTES = MAX_FILE_BYTES + 4096
MAX_ANSWER_BYTES = max(MAX_RESULT_BYTES, MAX_FEATURE_BYTES) + 4096

_Edge = Annotated[int, msgspec.Meta(ge=1)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class ImageJob(msgspec.Struct, frozen=True, tag=True):
    """Job to decode an image file, as the client sent it."""

    number: int
    recipe: Recipe
    data: bytes


class SoundJob(msgspec.Struct, frozen=True, tag=True):
    """Job to decode a sound file, as the client sent it. With `from_s`, only the part from this second on is read, at
    most MAX_SECONDS seconds.
    """

    number: int
    recipe: SoundRecipe
    data: bytes
    from_s: float | None = None


class PreparedImage(msgspec.Struct, frozen=True, tag=True):
    """Decoded image, the reply to an ImageJob. `pixels`: uint8 [height, width, 3]. `upright`: size after EXIF
    rotation. `digest`: SHA-256 of size and pixels. `animated`: the file has further images, which were not read.
    """

    number: int
    height: _Edge
    width: _Edge
    upright_height: _Edge
    upright_width: _Edge
    animated: bool
    digest: _Digest
    pixels: bytes

    @property
    def upright(self) -> Size:
        return Size(self.upright_height, self.upright_width)


class SoundFeatures(msgspec.Struct, frozen=True, tag=True):
    """Features of a sound, the reply to a SoundJob. `features`: float32 [views, frames, bins], little-endian; a view
    is the spectrum of the whole sound or of a part of it. `digest`: SHA-256 of shape and features. `seconds`: length of
    the file.
    """

    number: int
    views: _Edge
    frames: _Edge
    bins: _Edge
    seconds: Annotated[float, msgspec.Meta(gt=0)]
    digest: _Digest
    features: bytes

    @property
    def shape(self) -> Shape:
        return Shape(self.views, self.frames, self.bins)


Job = ImageJob | SoundJob
PreparedFile = PreparedImage | SoundFeatures
Answer = Hello | PreparedFile | Unusable

FRAMES: ChildFrames[Job, Answer] = ChildFrames(Job, Answer)
