"""Family of Docling: the package docling extracts the text, the Markdown and the tree of a document, without a model.

    files ──► processes that parse (`parsers`) ──► text, Markdown, tree ──► `data` of each input

A batch of documents uses no device thread: a document may need a CPU core for a minute, but it does not need the
device. Only the parser processes import docling.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import torch
from tokenizers import Tokenizer, models

from sie_adapter.engine.device import Compute, memory, usable_cores
from sie_adapter.families.extraction import ExtractOptions, Result
from sie_contracts.errors import UNDECODABLE, InternalFailure, InvalidInput, ResourceExhausted, SIEError
from sie_contracts.media.documents import DocumentFile, DocumentLimits
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import load_failed
from sie_contracts.wire.ipc import Rows
from sie_models_readers.documents.parser_frames import Parsed, ParseJob
from sie_models_readers.documents.parsers import ParserNotStarted, Parsers
from sie_models_readers.written import IsGone

_HOST = torch.device("cpu")
_OBJECT_BYTES = 8  # memory of a tree as Python objects, per byte of its JSON; measured for many short paragraphs


class DoclingModel:
    """Parser processes of one model, at most one for each core. `reading` returns an object for each batch; several
    threads may use different objects at once.

    A result is `{"data": {text, markdown, document, format, pages, page_starts, is_complete}}`. If the parameter `tree`
    is false, a result has no `document`. The result is an InvalidInput if an input has no document or asks for `ocr`,
    or if the document is refused: the reason is then `invalid_media`, and the message is `document: ` and the cause.
    The text of an input is ignored.
    """

    rows: ClassVar[dict[str, Rows]] = {"extract": Rows("raw", documents=DocumentLimits(), writes=True)}
    precision, attention = "float32", "none"
    memory_bytes = 0

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        """Start the first parser process. Raises ModelLoadFailed."""
        self.max_tokens = entry.max_tokens
        # the sidecar needs a tokenizer for every model; this model reads no texts, so any text becomes one token
        self.tokenizer: bytes = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")).to_str().encode()  # noqa: S106
        try:
            self._parsers = Parsers(usable_cores())
        except ParserNotStarted as error:
            raise load_failed("UNKNOWN", f"{entry.id}: no parser process could start: {error}") from error
        weakref.finalize(self, self._parsers.close)

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        """Return an empty string, because the model has no files of its own."""
        return ""

    @property
    def pids(self) -> tuple[int, ...]:
        return self._parsers.pids

    def reading(self, read: object, is_gone: IsGone) -> DoclingCall:
        """Return the parser of one batch of documents. `is_gone` returns True once no client waits for the results."""
        return DoclingCall(self._parsers, is_gone)


class DoclingCall:
    rows = DoclingModel.rows

    def __init__(self, parsers: Parsers, is_gone: IsGone) -> None:
        self._parsers = parsers
        self._is_gone = is_gone

    def extract(
        self, texts: Sequence[str], options: Sequence[ExtractOptions], documents: Sequence[DocumentFile | None]
    ) -> list[Result]:
        """Return the content of each document, or its error. Raises InternalFailure with the reason `cancelled` if no
        client waits any more.
        """
        refused = [_refusal(document, option) for document, option in zip(documents, options, strict=True)]
        parseable = [
            ParseJob(0, document, has_tree=option.parameters.get("tree") is not False)
            for document, option, error in zip(documents, options, refused, strict=True)
            if document is not None and error is None
        ]
        parsed = iter(self._parsers.parse(parseable, self._is_gone))
        return [error if error is not None else _result(next(parsed)) for error in refused]


def _refusal(document: DocumentFile | None, options: ExtractOptions) -> InvalidInput | None:
    if document is None:
        message = "document: the model reads a document, and the input has none"
        return InvalidInput(message, reason="unsupported_modality", param="document")
    if options.parameters.get("ocr"):
        return InvalidInput(
            "ocr: not supported: the model reads only the text that a file contains, not text in images",
            reason="unknown_option",
            param="ocr",
        )
    return None


def _result(parsed: Parsed | SIEError) -> Result:
    if isinstance(parsed, InvalidInput):
        return InvalidInput(f"document: {parsed.message}", reason=parsed.reason, param="document")
    if isinstance(parsed, SIEError):
        return parsed
    if parsed.tree and memory(_HOST, _OBJECT_BYTES * len(parsed.tree)).percent > 100:
        return ResourceExhausted(
            "the machine has too little memory for the tree of the document: set the option tree to false"
        )
    try:
        tree = {"document": msgspec.json.decode(parsed.tree)} if parsed.tree else {}
    except UNDECODABLE:
        return InternalFailure("the tree of the document is not JSON")
    return {
        "data": {
            "text": parsed.text,
            "markdown": parsed.markdown,
            **tree,
            "format": parsed.format,
            "pages": parsed.pages,
            "page_starts": parsed.page_starts,
            "is_complete": parsed.is_complete,
        }
    }
