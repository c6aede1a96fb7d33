"""Messages between an adapter and its parser processes. A process sends each answer before it receives the next job."""

from __future__ import annotations

import msgspec

from sie_contracts.media.documents import MAX_BYTES, DocumentFile
from sie_contracts.wire.child_frames import ChildFrames, Hello, Unusable

MAX_JOB_BYTES = MAX_BYTES + 4096
MAX_ANSWER_BYTES = 64 << 20


class ParseJob(msgspec.Struct, frozen=True, tag=True):
    """Document to parse. `number`: set when the job is sent; the answer has the same number. `has_tree`: True if the
    answer needs docling's JSON.
    """

    number: int
    document: DocumentFile
    has_tree: bool = True


class Parsed(msgspec.Struct, frozen=True, tag=True):
    """Content of a document. `tree`: the document in the JSON of docling; empty without `has_tree`. `pages`: the number
    of pages, 0 for a format without pages. `is_complete`: False if some pages could not be read. `page_starts`: for
    each page with text, the index of its first code point in the Markdown, and its number; empty if unknown.
    """

    number: int
    format: str
    text: str
    markdown: str
    tree: bytes
    pages: int
    is_complete: bool
    page_starts: tuple[tuple[int, int], ...] = ()


Answer = Hello | Parsed | Unusable
FRAMES: ChildFrames[ParseJob, Answer] = ChildFrames(ParseJob, Answer)
