"""Between a process and a child of it that reads files of strangers, over a pair of sockets: frames of `u32 big-endian
length + msgpack`, one job and one answer at a time. The child says `Hello` once it is ready. What it says is data of a
process that may have been taken over by a file: it is checked, never executed.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from sie_contracts.media.media import Cause

_HEADER = struct.Struct(">I")
_encode = msgspec.msgpack.Encoder().encode

J = TypeVar("J")
A = TypeVar("A")


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The child has done its imports and has its limits."""

    pid: int


class Unusable(msgspec.Struct, frozen=True, tag=True):
    """`what` is for the client. `raised`: the type of the exception, for the log."""

    number: int
    cause: Cause
    what: Annotated[str, msgspec.Meta(max_length=400)]
    raised: Annotated[str, msgspec.Meta(max_length=100)]


class ChildFrames(Generic[J, A]):
    """Codec for one kind of child. `jobs` and `answers` are the types that may come, or a union of them."""

    def __init__(self, jobs: Any, answers: Any) -> None:
        self._jobs: msgspec.msgpack.Decoder[J] = msgspec.msgpack.Decoder(jobs)
        self._answers: msgspec.msgpack.Decoder[A] = msgspec.msgpack.Decoder(answers)

    def frame(self, message: J | A) -> tuple[bytes, bytes]:
        """Header and body: together they would be one more copy of a file."""
        body = _encode(message)
        return _HEADER.pack(len(body)), body

    def job(self, body: bytes | bytearray) -> J:
        """Raises msgspec.DecodeError."""
        return self._jobs.decode(body)

    def answer(self, body: bytes | bytearray) -> A:
        """Raises msgspec.DecodeError; a text that is not UTF-8 is one too."""
        try:
            return self._answers.decode(body)
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(str(error)) from error
