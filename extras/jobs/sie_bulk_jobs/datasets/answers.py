"""A shard in memory: the answers to the rows of a span (a range of rows), as columns. The output formats store these
columns.

The columns have the same names as in the API: `dense`, with `dense_scale` and `dense_offset` for integer vectors,
`sparse_indices` and `sparse_values`, `multivector` with scale and offset of each vector, `score`, and the lists of an
extraction. A row with an error has no values in these columns.

The output has one line for each row of the input, or one line for each chunk if the text of the row is split into
chunks. A line of a chunk has the columns `chunk`, `start`, `end`, `text` and `row_tokens`, and for a document `page`
and `heading`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie_bulk_jobs.datasets.outlines import Outline, Section
from sie_bulk_jobs.datasets.rows import InputRow
from sie_bulk_jobs.records import MAX_CODES
from sie_contracts.errors import ErrorInfo
from sie_contracts.wire import chunk_tables

Array = NDArray[Any]
EXTRACTED = ("entities", "relations", "classifications", "objects", "data")
OTHER = "OTHER"  # key for the sum of the counts of rare error codes


class About(msgspec.Struct, frozen=True, omit_defaults=True):
    """Description of a shard: the job, the number of the shard, the model, and counts of the shard's rows. `failed`:
    rows with an error. `reused`: rows whose answer was copied from the cache or from an equal row. `tokens`: tokens of
    all rows. `codes`: error code -> number of rows. `lines`: number of lines of the output if rows have chunks;
    otherwise 0, because each row has one line.
    """

    job: str
    shard: int
    model: str
    fingerprint: str
    rows: int = 0
    failed: int = 0
    reused: int = 0
    tokens: int = 0
    codes: dict[str, int] = {}
    lines: int = 0


@dataclass(frozen=True)
class RowAnswer:
    """Answer of a model to one row. `arrays`: output arrays by name, such as `dense`, `dense.scale` or
    `sparse.indices`. A row with chunks also has the array `chunks`. `messages.Ok` describes the names.
    """

    error: ErrorInfo | None = None
    tokens: int = 0
    truncated: bool = False
    arrays: dict[str, Array] = field(default_factory=dict)
    score: float | None = None
    data: dict[str, Any] | None = None


class RowChunk(NamedTuple):
    """Chunk of a row's text. `chunk`: number of the chunk, from 0. `start`, `end`: positions in the text, counted in
    code points. `row_tokens`: tokens of the whole row. `section`: page and heading at `start`; None if the row has no
    document.
    """

    chunk: int
    start: int
    end: int
    text: str
    row_tokens: int
    section: Section | None = None

    @property
    def columns(self) -> dict[str, Any]:
        columns = self._asdict()
        section: Section | None = columns.pop("section")
        return columns if section is None else columns | section._asdict()


class OutputLine(NamedTuple):
    """Line of the output: the answer to a row, or to one chunk of a row."""

    row: InputRow
    answer: RowAnswer
    chunk: RowChunk | None = None

    @property
    def unique_id(self) -> str:
        """Return the id of the row, followed by # and the number of the chunk if the line has a chunk, for example
        `doc#2`. This id is unique in the output.
        """
        return self.row.id if self.chunk is None else f"{self.row.id}#{self.chunk.chunk}"


def lines_of(rows: Sequence[InputRow], answers: Sequence[RowAnswer]) -> list[OutputLine]:
    """Return the lines of the output. A row with an error has one line without a chunk."""
    lines = []
    for row, answer in zip(rows, answers, strict=True):
        if chunk_tables.TABLE not in answer.arrays:
            lines.append(OutputLine(row, answer))
            continue
        whole = row.text or ""
        outline = None if row.page_starts is None else Outline.parsed(whole, row.page_starts)
        for number, (start, end, tokens, arrays) in enumerate(chunk_tables.split(answer.arrays)):
            text = whole[start:end]
            section = None if outline is None else outline.at(end - len(text.lstrip()))
            chunk = RowChunk(number, start, end, text, answer.tokens, section)
            lines.append(OutputLine(row, RowAnswer(None, tokens, answer.truncated, arrays), chunk))
    return lines


@dataclass(frozen=True)
class Shard:
    """Answers to the rows of a span (a range of rows), as lines of the output. `chunks`: chunk of each line; empty if
    no row has chunks. `dense`: [lines, width], zeros for a row with an error. `ragged`: column -> for each line an
    array of any length, or None. `numbers`: column -> float32 [lines], NaN for a line without a number.
    """

    about: About
    ids: list[str]
    copied: dict[str, list[Any]]
    errors: list[ErrorInfo | None]
    tokens: NDArray[np.int32]
    truncated: NDArray[np.bool_]
    dense: Array | None = None
    numbers: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    ragged: dict[str, list[Array | None]] = field(default_factory=dict)
    extracted: dict[str, list[Any]] = field(default_factory=dict)
    chunks: list[RowChunk | None] = field(default_factory=list)

    @property
    def answered(self) -> NDArray[np.bool_]:
        return np.array([error is None for error in self.errors], bool)


def shard_of(about: About, rows: Sequence[InputRow], answers: Sequence[RowAnswer], keep: Sequence[str] = ()) -> Shard:
    """Return the shard of rows and their answers. `keep`: names of the input columns that are copied to the output.
    Raises ValueError if vectors of one output differ in width or type.
    """
    lines = lines_of(rows, answers)
    chunks = [line.chunk for line in lines] if any(line.chunk is not None for line in lines) else []
    errors = [answer.error for answer in answers if answer.error is not None]
    about = msgspec.structs.replace(
        about,
        rows=len(rows),
        failed=len(errors),
        tokens=sum(answer.tokens for answer in answers),
        codes=most_frequent(Counter(error.code for error in errors)),
        lines=len(chunks),
    )
    rows, answers = [line.row for line in lines], [line.answer for line in lines]
    names = {name for answer in answers for name in answer.arrays}
    good = [answer for answer in answers if answer.error is None]
    extracted = {name: [_data_value(answer, name) for answer in answers] for name in EXTRACTED}
    numbers: dict[str, NDArray[np.float32]] = {
        _column(name): _numbers(answers, lambda answer, name=name: answer.arrays.get(name))  # type: ignore[misc]
        for name in ("dense.scale", "dense.offset")
        if name in names
    }
    if any(answer.score is not None for answer in good):
        numbers["score"] = _numbers(answers, lambda answer: answer.score)
    ragged = ("sparse.indices", "sparse.values", "multivector", "multivector.scale", "multivector.offset")
    return Shard(
        about,
        [row.id for row in rows],
        {name: [row.copied.get(name) for row in rows] for name in keep},
        [answer.error for answer in answers],
        np.array([answer.tokens for answer in answers], np.int32),
        np.array([answer.truncated for answer in answers], bool),
        _stacked(answers) if "dense" in names else None,
        numbers,
        {_column(name): _ragged(answers, name) for name in ragged if name in names},
        {name: values for name, values in extracted.items() if any(value is not None for value in values)},
        chunks,
    )


def most_frequent(counts: Counter[str]) -> dict[str, int]:
    """Return the MAX_CODES highest counts, and the sum of all other counts as OTHER."""
    ordered = counts.most_common()
    frequent = dict(ordered[:MAX_CODES])
    if rest := sum(count for _, count in ordered[MAX_CODES:]):
        frequent[OTHER] = frequent.get(OTHER, 0) + rest
    return frequent


_json_encoder = msgspec.json.Encoder(enc_hook=str)


def kept_json(value: Any) -> bytes:
    """Encode a value of a copied column or of an extraction as JSON: bytes as base64, times in ISO 8601, and a value
    that msgspec does not support as its `str`.
    """
    return _json_encoder.encode(value)


def _column(name: str) -> str:
    return name.replace(".", "_")


def _data_value(answer: RowAnswer, name: str) -> Any:
    return None if answer.error is not None or answer.data is None else answer.data.get(name)


def _numbers(answers: Sequence[RowAnswer], value: Callable[[RowAnswer], Any]) -> NDArray[np.float32]:
    numbers = np.full(len(answers), np.nan, np.float32)
    for at, answer in enumerate(answers):
        if answer.error is None and (number := value(answer)) is not None:
            numbers[at] = np.asarray(number).reshape(-1)[0]
    return numbers


def _stacked(answers: Sequence[RowAnswer]) -> Array:
    arrays = [answer.arrays["dense"] for answer in answers if answer.error is None]
    if len({(array.shape, array.dtype) for array in arrays}) != 1:
        raise ValueError("dense: vectors of one output file have different widths or types")
    vectors = np.zeros((len(answers), arrays[0].size), arrays[0].dtype)
    vectors[[answer.error is None for answer in answers]] = arrays
    return vectors


def _ragged(answers: Sequence[RowAnswer], name: str) -> list[Array | None]:
    arrays = [None if answer.error is not None else answer.arrays.get(name) for answer in answers]
    if len({(array.shape[1:], array.dtype) for array in arrays if array is not None}) > 1:
        raise ValueError(f"{name}: vectors of one output file have different widths or types")
    return arrays
