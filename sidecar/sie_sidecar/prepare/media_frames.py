"""Frames between the sidecar and its media workers: one `Job` and one answer at a time."""

from __future__ import annotations

from typing import Annotated, NamedTuple

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
    """Image file, as a client sent it."""

    number: int
    recipe: Recipe
    data: bytes


class SoundJob(msgspec.Struct, frozen=True, tag=True):
    """A sound file in the form in which a client sent it. With `from_s`, only the part that begins at this time is
    read.
    """

    number: int
    recipe: SoundRecipe
    data: bytes
    from_s: float | None = None


class MadeImage(msgspec.Struct, frozen=True, tag=True):
    """Answer with the `pixels` of an image, uint8 [height, width, 3]. `digest` is of the pixels and their size."""

    number: int
    height: _Edge
    width: _Edge
    upright_height: _Edge
    upright_width: _Edge
    animated: bool
    digest: _Digest
    pixels: bytes

    @property
    def size(self) -> Size:
        return Size(self.height, self.width)

    @property
    def upright(self) -> Size:
        return Size(self.upright_height, self.upright_width)


class MadeSound(msgspec.Struct, frozen=True, tag=True):
    """Answer with the `features` of a sound, float32 [views, frames, bins], little-endian. `digest` is of the features
    and their shape. `seconds` is the length of the file.
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


class PreparedImage(NamedTuple):
    """Decoded image. `pixels`: uint8 [height, width, 3], row by row. `upright`: the size of the file's image after its
    rotation. `digest`: SHA-256 of pixels and size. `animated`: the file has more images, which were not read.
    """

    pixels: bytes
    height: int
    width: int
    upright: Size
    digest: bytes
    animated: bool = False


class SoundFeatures(NamedTuple):
    """Features of a sound. `features`: float32 [views, frames, bins], little-endian. `digest`: SHA-256 of features and
    shape. `seconds`: the length of the file.
    """

    features: bytes
    shape: Shape
    digest: bytes
    seconds: float


Job = ImageJob | SoundJob
Made = MadeImage | MadeSound
Answer = Hello | Made | Unusable

_FRAMES: ChildFrames[Job, Answer] = ChildFrames(Job, Answer)
frame, job, answer = _FRAMES.frame, _FRAMES.job, _FRAMES.answer
