"""Frames (`u32 big-endian length + msgpack`) between a process and a child process that reads untrusted files.

The child sends `Hello` when it is ready. The parent sends one job at a time and waits for the answer. A malicious file
may take control of the child, so the parent checks each message of the child and executes no code from it.
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
    """Message of a child that has finished its imports and set its resource limits."""

    pid: int


class Unusable(msgspec.Struct, frozen=True, tag=True):
    """Answer to a job whose file cannot be used. `message` is for the client; `raised`: exception type, for the log."""

    number: int
    cause: Cause
    message: Annotated[str, msgspec.Meta(max_length=400)]
    raised: Annotated[str, msgspec.Meta(max_length=100)]


class ChildFrames(Generic[J, A]):
    """Encoder and decoder for the messages of one kind of child. `jobs`, `answers`: a struct, or a union of structs."""

    def __init__(self, jobs: Any, answers: Any) -> None:
        self._jobs: msgspec.msgpack.Decoder[J] = msgspec.msgpack.Decoder(jobs)
        self._answers: msgspec.msgpack.Decoder[A] = msgspec.msgpack.Decoder(answers)

    def frame(self, message: J | A) -> tuple[bytes, bytes]:
        """Return a frame as (header, body). They are not joined, because that would copy the whole file in the body."""
        body = _encode(message)
        return _HEADER.pack(len(body)), body

    def job(self, body: bytes | bytearray) -> J:
        """Decode a job that the parent sent. Raises an exception of `errors.UNDECODABLE`."""
        return self._jobs.decode(body)

    def answer(self, body: bytes | bytearray) -> A:
        """Decode an answer that the child sent. Raises an exception of `errors.UNDECODABLE`."""
        return self._answers.decode(body)
