"""Messages between an adapter and its parser processes. A process answers a `ParseJob` before it receives the next."""

from __future__ import annotations

import msgspec

from sie_contracts.media.documents import MAX_BYTES, DocumentFile
from sie_contracts.wire.child_frames import ChildFrames, Hello, Unusable

MAX_JOB_BYTES = MAX_BYTES + 4096
MAX_ANSWER_BYTES = 64 << 20


class ParseJob(msgspec.Struct, frozen=True, tag=True):
    number: int
    document: DocumentFile


class Parsed(msgspec.Struct, frozen=True, tag=True):
    """Content of a document. `tree`: the document in the JSON of docling. `pages`: the number of pages, 0 for a format
    without pages. `is_complete`: False if some pages could not be read.
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
