"""Messages between an adapter and its parser processes: one `ParseJob` and one answer at a time."""

from __future__ import annotations

import msgspec

from sie_contracts.media.documents import MAX_BYTES, DocumentFile
from sie_contracts.wire.child_frames import ChildFrames, Hello, Unusable

MAX_JOB_BYTES = MAX_BYTES + 4096
MAX_ANSWER_BYTES = 64 << 20


class ParseJob(msgspec.Struct, frozen=True, tag=True):
    """One document."""

    number: int
    document: DocumentFile


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


Answer = Hello | Parsed | Unusable
_FRAMES: ChildFrames[ParseJob, Answer] = ChildFrames(ParseJob, Answer)
frame, job, answer = _FRAMES.frame, _FRAMES.job, _FRAMES.answer
