"""Parser process: it parses documents one after the other for the adapter, which is at its standard input.

    limits ──► docling ──► Hello ──► ParseJob ──► Parsed or Unusable ──► ... the adapter has ended ──► end

The adapter starts it without its own environment variables, so the process has no secrets. It ends when the adapter
ends, for any reason.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from typing import Protocol

from sie_adapter.documents import parser_frames
from sie_adapter.documents.parser_frames import MAX_ANSWER_BYTES, Parsed, ParseJob
from sie_contracts.errors import InvalidInput
from sie_contracts.media.media import cause_of
from sie_contracts.wire.child_frames import Hello, Unusable
from sie_contracts.wire.ipc import FrameError, receive_frame
from sie_runtime import confined


class _Parser(Protocol):
    def parse(self, job: ParseJob) -> Parsed:
        """Return the content of one document. Raises InvalidInput for a document that cannot be parsed."""


def main() -> None:
    def docling() -> _Parser:
        # imported here, after the limits of the process are set; the import takes seconds
        from sie_adapter.documents.docling_parser import DoclingParser

        return DoclingParser()

    serve(docling)


def serve(make: Callable[[], _Parser]) -> None:
    """Answer jobs until the adapter has ended. `sys.argv`: the adapter's process id, and the memory limit in bytes."""
    parent, memory_bytes = int(sys.argv[1]), int(sys.argv[2])
    confined.limit(memory_bytes)
    confined.die_with(parent)
    parser = make()
    # the socket raises these exceptions when the adapter has ended
    with socket.socket(fileno=0) as adapter, contextlib.suppress(EOFError, FrameError, OSError):
        _send(adapter, parser_frames.frame(Hello(os.getpid())))
        confined.silence()
        while True:
            job = parser_frames.job(receive_frame(adapter, parser_frames.MAX_JOB_BYTES))
            _send(adapter, _answer(parser, job))


def _answer(parser: _Parser, job: ParseJob) -> tuple[bytes, bytes]:
    try:
        answer = parser_frames.frame(parser.parse(job))
    except InvalidInput as error:
        raised = type(error.__cause__).__name__ if error.__cause__ else ""
        return parser_frames.frame(Unusable(job.number, *cause_of(error), raised[:100]))
    size = len(answer[1])
    if size <= MAX_ANSWER_BYTES:
        return answer
    cause = f"the content of the document takes {size} bytes, at most {MAX_ANSWER_BYTES} are allowed"
    return parser_frames.frame(Unusable(job.number, "too_large", cause, ""))


def _send(adapter: socket.socket, parts: tuple[bytes, bytes]) -> None:
    for part in parts:
        adapter.sendall(part)


if __name__ == "__main__":
    main()
