"""Between the sidecar and its media workers, over a pair of sockets: frames of `u32 big-endian length + msgpack`, one
`Job` and one answer at a time. A worker says `Hello` once it is ready. What it says is data of a process that may have
been taken over by a file: it is checked, never executed.
"""

from __future__ import annotations

import struct
from typing import Annotated, NamedTuple

import msgspec

from sie_contracts.images import MAX_RESULT_BYTES, Recipe, Size
from sie_contracts.media import Cause
from sie_contracts.sounds import MAX_FEATURE_BYTES, Shape, SoundRecipe

MAX_FILE_BYTES = 128 << 20
MAX_JOB_BYTES = MAX_FILE_BYTES + 4096
MAX_ANSWER_BYTES = max(MAX_RESULT_BYTES, MAX_FEATURE_BYTES) + 4096

_Edge = Annotated[int, msgspec.Meta(ge=1)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_HEADER = struct.Struct(">I")


class ImageJob(msgspec.Struct, frozen=True, tag=True):
    """One image file, as a client sent it."""

    number: int
    recipe: Recipe
    data: bytes


class SoundJob(msgspec.Struct, frozen=True, tag=True):
    """One sound file, as a client sent it."""

    number: int
    recipe: SoundRecipe
    data: bytes


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The worker has done its imports and has its limits."""

    pid: int


class MadeImage(msgspec.Struct, frozen=True, tag=True):
    """`pixels`: uint8 [height, width, 3]. `digest`: of them and their size."""

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
    """`features`: float32 [views, frames, bins], little-endian. `digest`: of them and their shape. `seconds`: of the
    file.
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


class Unusable(msgspec.Struct, frozen=True, tag=True):
    """`what` is for the client. `raised`: the type of the exception, for the log."""

    number: int
    cause: Cause
    what: Annotated[str, msgspec.Meta(max_length=400)]
    raised: Annotated[str, msgspec.Meta(max_length=100)]


class Prepared(NamedTuple):
    """`pixels`: uint8 [height, width, 3], row by row. `upright`: the size of the file's image as a person sees it.
    `digest`: SHA-256 of pixels and size. `animated`: the file has more images, which were not read.
    """

    pixels: bytes
    height: int
    width: int
    upright: Size
    digest: bytes
    animated: bool = False


class Heard(NamedTuple):
    """`features`: float32 [views, frames, bins], little-endian. `digest`: SHA-256 of features and shape. `seconds`: of
    the file.
    """

    features: bytes
    shape: Shape
    digest: bytes
    seconds: float


Job = ImageJob | SoundJob
Made = MadeImage | MadeSound
Answer = Hello | Made | Unusable

_encode = msgspec.msgpack.Encoder().encode
_jobs: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def frame(message: Job | Answer) -> tuple[bytes, bytes]:
    """Header and body: together they would be one more copy of a file."""
    body = _encode(message)
    return _HEADER.pack(len(body)), body


def job(body: bytes | bytearray) -> Job:
    """Raises msgspec.DecodeError."""
    return _jobs.decode(body)


def answer(body: bytes | bytearray) -> Answer:
    """Raises msgspec.DecodeError; a text that is not UTF-8 is one too."""
    try:
        return _answers.decode(body)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
