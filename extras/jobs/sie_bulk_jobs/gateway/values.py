"""Answers to the rows of a shard (rows that are answered and written together). Equal inputs are computed once.

inputs ──digest──► unique inputs ──► cache ──► groups by query and length ──► JobClient ──► RowAnswer of each input

Documents are parsed to Markdown before their chunks are encoded: rows with files ──► one request to the parser for each
distinct file ──► rows with text and pages, or an error.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from sie_bulk_jobs.datasets.answers import RowAnswer
from sie_bulk_jobs.datasets.rows import InputRow
from sie_bulk_jobs.gateway.client import Halted, JobClient
from sie_contracts.errors import ErrorInfo, InternalFailure, InvalidInput, SIEError
from sie_contracts.wire import chunk_tables
from sie_contracts.wire.messages import Failed, Ok, Operation
from sie_gateway.inference.answers import digests_of
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.chunk_fields import MAX_TEXT
from sie_gateway.inference.images import read_document
from sie_gateway.inference.reply import Placed, array_of, chunks_missing
from sie_gateway.inference.results import InferRequest
from sie_runtime.process import task_group

MODEL_CHANGED = "MODEL_CHANGED"
GROUP_ITEMS = 256  # largest number of inputs in a request of a job
GROUP_BYTES = 256 << 10  # largest number of bytes of text in a request of a job, about 65,000 tokens
GROUP_FILES = 16  # largest number of files in a request of a job
SHARD_BYTES = 256 << 20  # expected number of bytes of the answers of a full shard
TEXT_TOKENS, IMAGE_TOKENS = 512, 1024  # assumed number of tokens of a text, and of an image
TOKEN_BYTES = 4  # assumed bytes of text for one token
CODE_POINT_BYTES = 4  # largest number of bytes of a code point in memory
DOCUMENT_PARAMS = {"tree": False}  # no document tree, because a tree has many times the bytes of the text
DOCUMENTS_AT_ONCE = 16  # largest number of requests at a time: a whole reply is in memory until its text is checked
_DOCUMENTS = "input.documents"
_SIZES = {"float32": 4, "float16": 2}


class ModelInput(NamedTuple):
    """Input of the model from one row. `query`: query to score the document against; None for other operations."""

    item: RequestItem
    query: str | None = None

    @property
    def digest(self) -> bytes:
        """Return the digest of the input. The cache of answers uses this digest as key."""
        (digest,) = digests_of((self.item,), self.query_item)
        return digest

    @property
    def query_item(self) -> RequestItem | None:
        return None if self.query is None else RequestItem(self.query)


class Bounds(NamedTuple):
    """Limits of a shard: rows, and bytes of text. `text_bytes` is None if there is no limit."""

    rows: int
    text_bytes: int | None


def bounds(understood: InferRequest, *, has_images: bool, chunk_tokens: int = 0) -> Bounds:
    """Return the limits of a shard whose answers have about SHARD_BYTES. The answers stay in memory until the shard is
    written.

    If the output has a vector for each token or for each `chunk_tokens` tokens, also limit the bytes of texts: token
    vectors are about a hundred times larger than their text.
    """
    run, outputs = understood.options.run, understood.resolved.entry.outputs
    tokens = IMAGE_TOKENS if has_images else min(TEXT_TOKENS, understood.resolved.entry.max_tokens)
    size = _SIZES.get(run.dtype, 1)
    of_token = of_row = 0
    for output in run.outputs:
        width = outputs.get(output, 0)
        if output == "multivector":
            of_token += width * size
        elif output == "sparse":  # an answer has four bytes of index and four of weight for each token of the text
            of_row += 8 * tokens
        elif run.muvera is not None:
            of_row += run.muvera.width(outputs.get("multivector", 0)) * size
        else:
            of_row += (run.dimensions or width) * size
    if chunk_tokens:
        of_row, of_token = 0, of_token + max(1, of_row // chunk_tokens)
    rows = SHARD_BYTES // max(1, of_row + of_token * tokens)
    text_bytes = SHARD_BYTES // of_token * TOKEN_BYTES if of_token and not has_images else None
    return Bounds(max(1, rows), text_bytes)


def document_bounds(understood: InferRequest, chunk_tokens: int) -> Bounds:
    """Return the limits of a shard of documents. The text of a document is unknown before the parser has run, so each
    document counts as a text of MAX_TEXT code points, the longest text that can be split into chunks.
    """
    fit = bounds(understood, has_images=False, chunk_tokens=chunk_tokens)
    longest = MAX_TEXT * CODE_POINT_BYTES
    rows = min(SHARD_BYTES // longest, (fit.text_bytes or SHARD_BYTES) // MAX_TEXT)
    return Bounds(max(1, rows), None)


@dataclass(eq=False)
class RowValues:
    """Computation of the answers to the inputs of one job. `spec`: name of the model with its profile. `fingerprint`:
    fingerprint of the model in all earlier answers of the job; empty before the first answer.
    """

    client: JobClient
    spec: str
    operation: Operation
    params: Mapping[str, Any]
    fingerprint: str

    async def answers_of(
        self, inputs: Sequence[ModelInput], on_done: Callable[[Sequence[int], Sequence[RowAnswer]], None]
    ) -> list[RowAnswer]:
        """Return the answer to each input. After each request, call `on_done(indexes, answers)` for the inputs of this
        request. Raises SIEError for an error that every input would get; Halted if the model has changed, or if the
        job's credential is no longer valid.
        """
        answers: list[RowAnswer | None] = [None] * len(inputs)

        async def compute_group(places: Sequence[int]) -> None:
            values = await self._compute([inputs[place] for place in places])
            for place, value in zip(places, values, strict=True):
                answers[place] = value
            on_done(places, values)

        groups = await asyncio.to_thread(grouped, inputs)
        async with task_group(SIEError, Halted) as tasks:
            for places in groups:
                tasks.create_task(compute_group(places))
        return [value for value in answers if value is not None]

    async def _compute(self, inputs: Sequence[ModelInput]) -> list[RowAnswer]:
        items = [entry.item for entry in inputs]
        outcomes = await self.client.outcomes(self.spec, self.operation, self.params, items, inputs[0].query_item)
        for result, outcome in outcomes:
            if isinstance(outcome, Ok):
                self.check(result.fingerprint)
        values = [value_of(placed) for placed in outcomes]
        return [
            RowAnswer(error=chunks_missing().info())
            if item.chunks is not None and value.error is None and chunk_tables.TABLE not in value.arrays
            else value
            for item, value in zip(items, values, strict=True)
        ]

    def check(self, fingerprint: str) -> None:
        """Raise Halted if the fingerprint differs from that of the job's first answer."""
        if not self.fingerprint:
            self.fingerprint = fingerprint
        elif fingerprint and fingerprint != self.fingerprint:
            message = (
                f"{self.spec} changed while the job ran: earlier answers have fingerprint {self.fingerprint}, and new "
                f"answers have {fingerprint}. Roll the model back and resume the job, or start another job"
            )
            raise Halted(ErrorInfo(MODEL_CHANGED, message))


def value_of(placed: Placed) -> RowAnswer:
    """Copy the data of an outcome. The data is a view of the worker's message, which can be freed after the copy."""
    result, outcome = placed
    if isinstance(outcome, Failed):
        return RowAnswer(error=outcome.error)
    assert isinstance(outcome, Ok)
    arrays = {name: array_of(result, outcome, name).copy() for name in outcome.outputs}
    return RowAnswer(None, outcome.tokens, outcome.truncated, arrays, outcome.score, outcome.data)


def grouped(inputs: Sequence[ModelInput]) -> list[list[int]]:
    """Group inputs into requests. Return the indexes of the inputs of each request. Inputs of a request have the same
    query and similar lengths, so that batches need little padding. The longest inputs are first, so that no long input
    delays the end of the shard.
    """
    by_query: dict[str | None, list[int]] = defaultdict(list)
    for place, entry in enumerate(inputs):
        by_query[entry.query].append(place)
    groups: list[list[int]] = []
    for places in by_query.values():
        places.sort(key=lambda place: -inputs[place].item.size)
        group: list[int] = []
        size = files = 0
        for place in places:
            item = inputs[place].item
            text_bytes = item.size - item.file_bytes
            if group and (
                len(group) == GROUP_ITEMS or size + text_bytes > GROUP_BYTES or files + len(item.files) > GROUP_FILES
            ):
                groups.append(group)
                group, size, files = [], 0, 0
            group.append(place)
            size += text_bytes
            files += len(item.files)
        groups.append(group)
    return groups


class Unique(NamedTuple):
    """Distinct `inputs`, their digests, and for each of the original inputs its index in `inputs` (`places`)."""

    inputs: list[ModelInput]
    digests: list[bytes]
    places: list[int]


def unique(inputs: Sequence[ModelInput]) -> Unique:
    """Remove repeated inputs. The remaining inputs stay in the order of their first occurrence."""
    place_of: dict[bytes, int] = {}  # digest -> index in `once`
    once: list[ModelInput] = []
    places: list[int] = []
    for entry in inputs:
        place = place_of.setdefault(entry.digest, len(once))
        if place == len(once):
            once.append(entry)
        places.append(place)
    return Unique(once, list(place_of), places)


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
        super().__init__(client, spec, "extract", DOCUMENT_PARAMS, fingerprint)
        self._turns = asyncio.Semaphore(DOCUMENTS_AT_ONCE)

    async def parsed(self, rows: Sequence[InputRow]) -> list[InputRow]:
        """Return the rows with the texts of their documents. If a document cannot be parsed, the `fault` of its row has
        the error. Raises Halted, and SIEError for an error that every document would get.
        """
        parsed = list(rows)
        inputs = await asyncio.to_thread(_read_documents, parsed)
        once = await asyncio.to_thread(unique, list(inputs.values()))
        answers = await self.answers_of(once.inputs, lambda places, answers: None)
        for place, unique_place in zip(inputs, once.places, strict=True):
            parsed[place] = _with_text(parsed[place], answers[unique_place])
        return parsed

    async def _compute(self, inputs: Sequence[ModelInput]) -> list[RowAnswer]:
        async with self._turns:
            return [_checked_text(answer) for answer in await super()._compute(inputs)]


def _read_documents(rows: list[InputRow]) -> dict[int, ModelInput]:
    """Return index of a row -> input of the parser. Set the field `fault` of each row without a readable file."""
    inputs: dict[int, ModelInput] = {}
    for place, row in enumerate(rows):
        if row.fault is not None:
            continue
        try:
            document, fault = read_document(row.file, _DOCUMENTS)
        except InvalidInput as error:
            document, fault = None, error.info()
        rows[place] = replace(row, file=None, fault=fault)
        if document is not None:
            inputs[place] = ModelInput(RequestItem(None, modalities=("document",), document=document))
    return inputs


def _checked_text(answer: RowAnswer) -> RowAnswer:
    """Return an answer with only the fields of DocumentReply; an error if its text is missing, empty, or too long."""
    if answer.error is not None:
        return answer
    try:
        reply = msgspec.convert((answer.data or {}).get("data"), DocumentReply)
    except msgspec.ValidationError:
        return RowAnswer(error=InternalFailure("the answer of the parser has no Markdown").info())
    length = len(reply.markdown)
    if length > MAX_TEXT:
        message = f"{_DOCUMENTS}: {length} code points of Markdown, expected at most {MAX_TEXT}"
        return RowAnswer(error=_document_fault(message, "too_long"))
    if not reply.markdown.strip():
        return RowAnswer(
            error=_document_fault(f"{_DOCUMENTS}: the document has no text: it is empty or has only images", "no_text")
        )
    return RowAnswer(data=msgspec.structs.asdict(reply))


def _with_text(row: InputRow, answer: RowAnswer) -> InputRow:
    if answer.error is not None:
        return replace(row, fault=answer.error)
    reply = DocumentReply(**(answer.data or {}))
    return replace(row, text=reply.markdown, page_starts=reply.page_starts)


def _document_fault(message: str, reason: str) -> ErrorInfo:
    return InvalidInput(message, reason=reason, param=_DOCUMENTS).info()
