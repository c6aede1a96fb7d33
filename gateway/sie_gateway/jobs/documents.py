"""Documents of a job, which are parsed to Markdown before their chunks are encoded.

rows with document files ──► one request to the parser per distinct file ──► rows with text and pages, or an error
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from sie_contracts.errors import ErrorInfo, InternalFailure, InvalidInput
from sie_gateway.inference import chunk_fields
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.images import read_document
from sie_gateway.jobs.client import JobClient
from sie_gateway.jobs.values import ModelInput, RowValues, unique
from sie_store.datasets.answers import RowAnswer
from sie_store.datasets.rows import InputRow

PARAMS = {"tree": False}  # no document tree, because a tree has many times the bytes of the text
REQUESTS_AT_ONCE = 16  # largest number of requests at a time: a whole reply is in memory until its text is checked
_FIELD = "input.documents"


class DocumentReply(msgspec.Struct):
    """Fields of the parser's answer that a job reads. `page_starts`: (first code point, page number) of each page."""

    markdown: str
    page_starts: list[tuple[int, int]] = []


class DocumentTexts(RowValues):
    """Texts of the documents of one job, which the parser model computes. When an answer arrives, only the fields of
    DocumentReply are stored. `spec`: name of the parser model, with its profile. `fingerprint`: fingerprint of the
    parser in the job's earlier answers; empty before the first answer.
    """

    def __init__(self, client: JobClient, spec: str, fingerprint: str) -> None:
        super().__init__(client, spec, "extract", PARAMS, fingerprint)
        self._turns = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async def parsed(self, rows: Sequence[InputRow]) -> list[InputRow]:
        """Return the rows with the texts of their documents. If a document cannot be parsed, the `fault` of its row has
        the error. Raises Halted, and SIEError for an error that every document would get.
        """
        parsed = list(rows)
        inputs = await asyncio.to_thread(_read, parsed)
        once = await asyncio.to_thread(unique, list(inputs.values()))
        answers = await self.answers_of(once.inputs, lambda places, answers: None)
        for place, unique_place in zip(inputs, once.places, strict=True):
            parsed[place] = _with_text(parsed[place], answers[unique_place])
        return parsed

    async def _compute(self, inputs: Sequence[ModelInput]) -> list[RowAnswer]:
        async with self._turns:
            return [_checked(answer) for answer in await super()._compute(inputs)]


def _read(rows: list[InputRow]) -> dict[int, ModelInput]:
    """Return index of a row -> input of the parser. Set the field `fault` of each row without a readable file."""
    inputs: dict[int, ModelInput] = {}
    for place, row in enumerate(rows):
        if row.fault is not None:
            continue
        try:
            document, fault = read_document(row.file, _FIELD)
        except InvalidInput as error:
            document, fault = None, error.info()
        rows[place] = replace(row, file=None, fault=fault)
        if document is not None:
            inputs[place] = ModelInput(RequestItem(None, modalities=("document",), document=document))
    return inputs


def _checked(answer: RowAnswer) -> RowAnswer:
    """Return an answer with only the fields of DocumentReply; an error if its text is missing, empty, or too long."""
    if answer.error is not None:
        return answer
    try:
        reply = msgspec.convert((answer.data or {}).get("data"), DocumentReply)
    except msgspec.ValidationError:
        return RowAnswer(error=InternalFailure("the answer of the parser has no Markdown").info())
    length = len(reply.markdown)
    if length > chunk_fields.MAX_TEXT:
        message = f"{_FIELD}: {length} code points of Markdown, expected at most {chunk_fields.MAX_TEXT}"
        return RowAnswer(error=_fault(message, "too_long"))
    if not reply.markdown.strip():
        return RowAnswer(error=_fault(f"{_FIELD}: the document has no text: it is empty or has only images", "no_text"))
    return RowAnswer(data=msgspec.structs.asdict(reply))


def _with_text(row: InputRow, answer: RowAnswer) -> InputRow:
    if answer.error is not None:
        return replace(row, fault=answer.error)
    reply = DocumentReply(**(answer.data or {}))
    return replace(row, text=reply.markdown, page_starts=reply.page_starts)


def _fault(message: str, reason: str) -> ErrorInfo:
    return InvalidInput(message, reason=reason, param=_FIELD).info()
