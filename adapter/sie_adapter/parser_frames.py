"""Between an adapter and its processes that parse documents, over a pair of sockets: frames of `u32 big-endian length +
msgpack`, one `ParseJob` and one answer at a time. What such a process says is data of one that may have been taken over
by a file: it is checked, never executed.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec

from sie_contracts.documents import MAX_BYTES, Document
from sie_contracts.media import Cause

MAX_JOB_BYTES = MAX_BYTES + 4096
MAX_ANSWER_BYTES = 64 << 20
_HEADER = struct.Struct(">I")


class ParseJob(msgspec.Struct, frozen=True, tag=True):
    """One document."""

    number: int
    document: Document


class ParserReady(msgspec.Struct, frozen=True, tag=True):
    """The process has done its imports and has its limits."""

    pid: int


class Parsed(msgspec.Struct, frozen=True, tag=True):
    """`tree`: the document as docling has it, JSON. `pages`: 0 where the format has none. `is_complete`: false if some
    pages could not be read.
    """

    number: int
    format: str
    text: str
    markdown: str
    tree: bytes
    pages: int
    is_complete: bool


class Unparsable(msgspec.Struct, frozen=True, tag=True):
    """`what` is for the client. `raised`: the type of the exception, for the log."""

    number: int
    cause: Cause
    what: Annotated[str, msgspec.Meta(max_length=400)]
    raised: Annotated[str, msgspec.Meta(max_length=100)]


Answer = ParserReady | Parsed | Unparsable
_encode = msgspec.msgpack.Encoder().encode
_jobs: msgspec.msgpack.Decoder[ParseJob] = msgspec.msgpack.Decoder(ParseJob)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def frame(message: ParseJob | Answer) -> tuple[bytes, bytes]:
    """Header and body: together they would be one more copy of a file."""
    body = _encode(message)
    return _HEADER.pack(len(body)), body


def job(body: bytes | bytearray) -> ParseJob:
    """Raises msgspec.DecodeError."""
    return _jobs.decode(body)


def answer(body: bytes | bytearray) -> Answer:
    """Raises msgspec.DecodeError; a text that is not UTF-8 is one too."""
    try:
        return _answers.decode(body)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
