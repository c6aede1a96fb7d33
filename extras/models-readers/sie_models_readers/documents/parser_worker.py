"""Parser process: it parses documents one after the other for the adapter. See `sie_runtime.confined`."""

from __future__ import annotations

from collections.abc import Callable

from sie_models_readers.documents.parser_frames import FRAMES, MAX_ANSWER_BYTES, MAX_JOB_BYTES, Parsed, ParseJob
from sie_runtime import confined


def main() -> None:
    def docling() -> Callable[[ParseJob], Parsed]:
        # imported here, so that the limits of the process already apply to the import
        from sie_models_readers.documents.docling_parser import DoclingParser

        return DoclingParser().parse

    serve(docling)


def serve(make: Callable[[], Callable[[ParseJob], Parsed]]) -> None:
    confined.serve(FRAMES, MAX_JOB_BYTES, MAX_ANSWER_BYTES, make)


if __name__ == "__main__":
    main()
