"""Reads the rows of a span (a range of rows of an object), without reading the whole object. A row becomes inputs for
the model, or an error.

span ──► bytes of its lines | columns of its row groups | files of its images ──► columns ──templates──► InputRow
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from sie_bulk_jobs.datasets import footers, sizes
from sie_bulk_jobs.datasets.fields import fields
from sie_bulk_jobs.datasets.objects import ObjectEntry, changed, find, whole
from sie_bulk_jobs.datasets.places import Place
from sie_bulk_jobs.datasets.plans import MAX_SPAN_BYTES, images, tag_of_run
from sie_bulk_jobs.datasets.scan import Cut, rows_of
from sie_bulk_jobs.datasets.sizes import SpanSize
from sie_bulk_jobs.datasets.templates import ColumnFault, columns, plain, templates
from sie_bulk_jobs.records import RowSpan
from sie_contracts.api.jobs import JobInput
from sie_contracts.errors import UNDECODABLE, ErrorInfo, InvalidInput
from sie_store.object_stores import gather

MAX_ID = 1024  # largest number of characters in the id of a row
IMAGES_AT_ONCE = 8
_Columns = Mapping[str, Any] | ErrorInfo


@dataclass(frozen=True)
class InputRow:
    """Row of the input. A row with a `fault` is not sent to a model. `chunks`, `file`: values of the columns that
    `input.chunks` and `input.documents` name, not checked yet. `page_starts`: (position of the first code
    point, number) of each page if the text is the Markdown of a document; otherwise None.
    """

    id: str
    text: str | None = None
    query: str | None = None
    document: str | None = None
    images: tuple[bytes, ...] = ()
    copied: dict[str, Any] = field(default_factory=dict)
    fault: ErrorInfo | None = None
    chunks: Any = None
    file: Any = None
    page_starts: Sequence[tuple[int, int]] | None = None


async def read(
    place: Place,
    span: RowSpan,
    source: JobInput,
    places: Sequence[int] | None = None,
    faults: Mapping[int, ErrorInfo] | None = None,
) -> list[InputRow]:
    """Return the rows of a span (a range of rows of an object) that have the indexes `places`, in order; all
    `span.rows` rows by default. A row in `faults` (index -> error) is not decoded: it gets this error. Raises
    InvalidInput (reasons input_missing, input_changed, malformed, too_large, not_allowed), StoreError.
    """
    chosen = range(span.rows) if places is None else places
    faults = faults or {}
    if span.format == "images":
        return await _images(place, span, chosen, faults)
    entry = await find(place, span.source)
    if entry.tag != span.tag:
        raise changed(span.source)
    names = list(columns(source))
    make = _RowMaker(span, source)
    if span.format == "parquet":
        await place.check(place.key(span.source))

        def rows() -> list[InputRow]:
            return make.all(_decoded(place, entry, span, names, chosen, faults), SpanSize(span))

        return await place.patience.repeated(lambda: asyncio.to_thread(rows))
    if span.end - span.start > MAX_SPAN_BYTES and span.rows == 1:
        return [make(0, _fault("malformed", f"the row has more than {MAX_SPAN_BYTES} bytes"))]
    data = await whole(place, entry, span.start, span.end)
    size = SpanSize(span)
    return await asyncio.to_thread(lambda: make.all(_parsed(data, span, names, size, chosen, faults), size))


def _decoded(
    place: Place,
    entry: ObjectEntry,
    span: RowSpan,
    names: Sequence[str],
    chosen: Sequence[int],
    faults: Mapping[int, ErrorInfo],
) -> Iterator[tuple[int, _Columns]]:
    """Yield the index and the columns of the chosen rows of Parquet. The rows between two rows with a fault are decoded
    together.
    """
    size = SpanSize(span)
    for is_fault, group in itertools.groupby(chosen, faults.__contains__):
        run = list(group)
        if is_fault:
            yield from ((at, faults[at]) for at in run)
            continue
        rows_of_run = set(run)
        cut = Cut(span.first + run[0], run[-1] - run[0] + 1, span.start, span.end)
        for at, row in enumerate(footers.read(place, entry, cut, names, size), run[0]):
            if at in rows_of_run:
                yield at, row


def _parsed(
    data: bytes,
    span: RowSpan,
    names: Sequence[str],
    size: SpanSize,
    chosen: Sequence[int],
    faults: Mapping[int, ErrorInfo],
) -> Iterator[tuple[int, _Columns]]:
    lines = rows_of(data, is_quoted=span.format == "csv")
    if len(lines) != span.rows:
        raise changed(span.source)
    is_csv = span.format == "csv"
    header = (fields(span.header.encode()) or ()) if is_csv else ()
    places = {name: header.index(name) for name in names} if is_csv else {}
    for at in chosen:
        if (fault := faults.get(at)) is not None:
            yield at, fault
        else:
            yield at, _csv(lines[at], places, len(header)) if is_csv else _json(lines[at], names, size)


def _json(line: bytes, names: Sequence[str], size: SpanSize) -> _Columns:
    try:
        raw = sizes.columns_of(line)
        read, values = [name for name in names if name in raw], 0
        for name in read:
            values += sizes.values_of(raw[name])
            if values > sizes.MAX_ROW_VALUES:
                return _fault("too_large", f"column {name!r}: the row has more than {sizes.MAX_ROW_VALUES} values")
        # Only the values inside lists and maps are added here: `_RowMaker` adds 1 for the row and each copied column.
        size.add(values - len(read), 0)
        return {name: sizes.decoded(raw[name]) for name in read}
    except sizes.TooManyValues as error:
        return _fault("too_large", str(error))
    except msgspec.ValidationError:
        return _fault("malformed", "the line is no JSON object")
    except UNDECODABLE:  # the decoder's message may quote the row, so the message is left out
        return _fault("malformed", "the line is no valid JSON")


def _csv(line: bytes, places: Mapping[str, int], width: int) -> _Columns:
    values = fields(line, width)
    if values is None:
        return _fault("malformed", "the row is no valid CSV in UTF-8")
    if len(values) != width:
        more = "more fields than the header, which" if len(values) > width else f"{len(values)} fields, the header"
        return _fault("malformed", f"the row has {more} has {width}")
    return {name: values[place] for name, place in places.items()}


def _fault(reason: str, message: str, param: str = "") -> ErrorInfo:
    return InvalidInput(message, reason=reason, param=param).info()


class _RowMaker:
    """Builder of the rows of a span (a range of rows): fills the job's templates with the values of the columns."""

    def __init__(self, span: RowSpan, source: JobInput) -> None:
        self._span, self._source = span, source
        self._templates = templates(source)
        columns = {"chunks": source.chunks, "documents": source.documents}
        # parameter (chunks or documents) -> name of its column; only null is refused here, other values pass unchecked
        self._unchecked = {name: column for name, column in columns.items() if isinstance(column, str) and column}

    def all(self, rows: Iterable[tuple[int, _Columns]], size: SpanSize) -> list[InputRow]:
        """Return the rows, each given as (index in the span, columns). Raises InvalidInput if all rows together need
        too much memory.
        """
        complete = []
        for at, read_columns in rows:
            row = self(at, read_columns)
            size.add(1 + len(row.copied), _bytes_of(row))
            complete.append(row)
        return complete

    def __call__(self, at: int, row: _Columns) -> InputRow:
        default = f"{self._span.source}#{self._span.first + at}"
        if isinstance(row, ErrorInfo):
            return InputRow(default, copied=dict.fromkeys(self._source.keep), fault=row)
        columns_to_keep = {name: row.get(name) for name in self._source.keep}
        own, texts, param = default, dict[str, str](), "input.id"
        try:
            own = self._id(row, default)
            for name, template in self._templates.items():
                param = f"input.{name}"
                texts[name] = template.text(row)
            param = "input.image"
            files = self._images(row)
            for name, column in self._unchecked.items():
                param = f"input.{name}"
                if row.get(column) is None:
                    raise ColumnFault(f"column {column!r} is null or missing")
        except ColumnFault as error:
            return InputRow(own, copied=columns_to_keep, fault=_fault("schema", str(error), param))
        chunks, file = (row.get(self._unchecked.get(name, "")) for name in ("chunks", "documents"))
        return InputRow(
            own,
            texts.get("text"),
            texts.get("query"),
            texts.get("document"),
            files,
            columns_to_keep,
            chunks=chunks,
            file=file,
        )

    def _id(self, row: Mapping[str, Any], default: str) -> str:
        if not self._source.id:
            return default
        own = plain(row, self._source.id)
        if not own or len(own) > MAX_ID:
            raise ColumnFault(f"column {self._source.id!r} has {len(own)} characters, expected 1 to {MAX_ID}")
        return own

    def _images(self, row: Mapping[str, Any]) -> tuple[bytes, ...]:
        column = self._source.image
        if not column:
            return ()
        value = row.get(column)
        values = value if isinstance(value, list) else [value]
        if value is None or not values:
            raise ColumnFault(f"column {column!r} is {'null' if column in row else 'missing'}")
        return tuple(_image(file, column) for file in values)


def _bytes_of(row: InputRow) -> int:
    """Return the number of bytes of a row's texts and files in memory. Values in lists and maps are not counted, except
    the `data` of a document.
    """
    file = row.file.get("data") if isinstance(row.file, dict) else row.file
    texts = (row.text, row.query, row.document, file, *row.images, *row.copied.values())
    return sum(sys.getsizeof(text) for text in texts if isinstance(text, str | bytes))


def _image(value: Any, column: str) -> bytes:
    """Return an image file from bytes, base64, or a map with `bytes` (Hugging Face). Raises ColumnFault."""
    if isinstance(value, dict):
        value = value.get("bytes")
    if isinstance(value, bytes) and value:
        return value
    if isinstance(value, str) and value:
        head, comma, rest = value.partition(",") if value.startswith("data:") else ("", "", value)
        if not comma or head.endswith(";base64"):
            try:
                if data := base64.b64decode(rest, validate=True):
                    return data
            except (binascii.Error, ValueError):
                pass  # the text is not base64, so the statement below raises ColumnFault
    raise ColumnFault(f"column {column!r} has no image file: expected bytes, a map with bytes, or base64")


async def _images(
    place: Place, span: RowSpan, chosen: Sequence[int], faults: Mapping[int, ErrorInfo]
) -> list[InputRow]:
    if place.is_folder:
        run = await images(place, span.after, span.rows)
    else:
        run = [await find(place, place.label or place.name)]
    if tag_of_run(run) != span.tag:
        raise changed(run[0].source if run else place.folder)

    async def read_image(at: int) -> InputRow:
        entry = run[at]
        if (fault := faults.get(at)) is not None:
            return InputRow(entry.source, fault=fault)
        if entry.size > MAX_SPAN_BYTES:
            return InputRow(
                entry.source, fault=_fault("invalid_media", f"the image has more than {MAX_SPAN_BYTES} bytes")
            )
        try:
            # This read does not check the tag, because some stores (Google's emulator) return other tags in responses
            # than in listings. The comparison with `span.tag` has checked the tags of the listing.
            return InputRow(entry.source, images=(await whole(place, replace(entry, tag="")),))
        except InvalidInput as error:
            if error.reason == "not_allowed":
                return InputRow(entry.source, fault=error.info())
            raise

    return await gather(read_image, chosen, IMAGES_AT_ONCE)
