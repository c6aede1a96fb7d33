"""Plan of a job: the spans of its input. A span is a range of rows that can be read separately.

    folder ──listed──► objects by name ──┬─ jsonl, csv ── bytes are read once ─┐
                                         ├─ parquet ───── only the footer ─────┼──► spans of an object, or Broken
                                         └─ images ────── consecutive names ───┘

An object that cannot be read is an entry (Broken) of the plan; the other objects are still planned. The planning stops
if a store does not reply, or if the input has no object, too many objects or too many spans.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sie_bulk_jobs.datasets import footers, sizes
from sie_bulk_jobs.datasets.fields import fields
from sie_bulk_jobs.datasets.formats import format_of, is_hidden, is_packed
from sie_bulk_jobs.datasets.objects import ObjectEntry, find, pieces, tag_of, whole
from sie_bulk_jobs.datasets.places import Place
from sie_bulk_jobs.datasets.scan import BOM, Cut, Cutter, Scanner
from sie_bulk_jobs.datasets.templates import columns, reads_images
from sie_bulk_jobs.records import RowSpan
from sie_contracts.api.jobs import MAX_SHARD_ROWS, InputFormat, JobInput
from sie_contracts.errors import UNDECODABLE, ErrorInfo, InvalidInput
from sie_store.object_stores import within

# largest number of objects that a job reads below a folder: the job sorts their names in memory
MAX_OBJECTS = 1_000_000
MAX_SPANS = 100_000  # largest number of spans (ranges of rows) of a job, because each has a record in memory
TOO_MANY = "too_many_items"  # reason in the error for too many objects or spans
MAX_HEADER_BYTES = 64 << 10  # largest number of bytes of the first row of a CSV object
SPAN_BYTES = 32 << 20  # largest number of bytes of text in a span of more than one row
MAX_SPAN_BYTES = 64 << 20  # largest number of bytes of one row, or of all images in one span
MAX_COLUMNS_SHOWN = 50
SAMPLE_ROWS, SAMPLE_BYTES = 1000, 1 << 20  # rows and bytes of the largest `_JsonSample`
LISTED_AT_ONCE = 1000


@dataclass(frozen=True)
class Broken:
    """Object that cannot be read, so the plan has no spans of the object. `error`: the reason."""

    source: str
    error: ErrorInfo


Planned = list[RowSpan] | Broken


async def plan(
    place: Place,
    source: JobInput,
    shard_rows: int,
    *,
    text_bytes: int | None = None,
) -> AsyncIterator[Planned]:
    """Yield the spans of each object, or a Broken for an object that cannot be read, in the order of the objects'
    names. A span of images may have several objects. A span has at most `shard_rows` rows and `text_bytes` bytes of
    text (by default SPAN_BYTES); a row with more text is a span of its own. Raises StoreError, and InvalidInput if the
    input has no object, too many objects or too many spans.
    """
    count = 0
    rows = min(shard_rows, sizes.MAX_SPAN_VALUES // (1 + len(columns(source))))
    most = _Most(rows, min(SPAN_BYTES, text_bytes or SPAN_BYTES))
    async for planned in _planned_objects(place, source, most):
        if isinstance(planned, list):
            count += len(planned)
            _check_count(count, shard_rows)
        yield planned


class _Most(NamedTuple):
    rows: int
    bytes: int


def _check_count(spans: int, shard_rows: int) -> None:
    if spans > MAX_SPANS:
        raise InvalidInput.at(
            "shard_rows",
            f"the input makes more than {MAX_SPANS} shards of at most {shard_rows} rows. Use up to "
            f"{MAX_SHARD_ROWS} rows in a shard, fewer and larger objects, or several jobs",
            reason=TOO_MANY,
        )


async def _planned_objects(place: Place, source: JobInput, most: _Most) -> AsyncIterator[Planned]:
    names = columns(source)
    if not place.is_folder:
        yield await _planned(place, place.label or place.name, source, names, most)
        return
    is_empty = True
    if reads_images(source):
        files = await images(place)
        for run in await asyncio.to_thread(lambda: list(_runs(files, most.rows))):
            is_empty = False
            yield [run]
    else:
        for source_object in await inputs(place, source):
            planned = await _planned(place, source_object.source, source, names, most)
            # Some tools write an empty object for a folder. `find` reports this object as missing, because the listing
            # leaves out the slash at the end of its name.
            if isinstance(planned, Broken) and planned.error.reason == "input_missing" and not source_object.size:
                continue
            is_empty = False
            yield planned
    if is_empty:
        raise InvalidInput.at("input.url", "the folder has no file that the job can read", reason="input_missing")


async def inputs(place: Place, source: JobInput) -> list[ObjectEntry]:
    """Return the objects that a job reads, sorted by name. Raises InvalidInput, StoreError."""
    if not place.is_folder:
        return [await find(place, place.label or place.name)]
    if reads_images(source):
        return await images(place)
    return await place.patience.repeated(lambda: _listed(place, lambda name: _is_input(name, source.format)))


def _is_input(name: str, input_format: InputFormat | None) -> bool:
    own = format_of(name)
    return input_format is not None or (own is not None and own != "images") or is_packed(name)


async def images(place: Place, after: str = "", most: int | None = None) -> list[ObjectEntry]:
    """Return the images below a folder, sorted by name, from the first name after `after` on. With `most`, return only
    the first `most` images. Raises InvalidInput, StoreError.
    """
    return await place.patience.repeated(lambda: _listed(place, lambda name: format_of(name) == "images", after, most))


async def _listed(
    place: Place, is_wanted: Callable[[str], bool], after: str = "", most: int | None = None
) -> list[ObjectEntry]:
    """Return the objects below a folder that `is_wanted` accepts, sorted by name, from the first name after `after` on.
    With `most`, return only the first `most` objects. Raises InvalidInput for more than MAX_OBJECTS objects, and
    StoreError.
    """
    import obstore

    objects: list[ObjectEntry] = []
    limit = MAX_OBJECTS if most is None else most
    pages = aiter(
        obstore.list(
            place.store,
            place.folder.rstrip("/") or None,
            offset=place.folder + after if after else None,
            chunk_size=LISTED_AT_ONCE,
        )
    )
    while (page := await within(place.patience.stall_s, anext(pages, None))) is not None:
        for entry in page:
            name = entry["path"].removeprefix(place.folder)
            if name > after and not is_hidden(name) and is_wanted(name):
                objects.append(ObjectEntry(name, entry["size"], tag_of(place, entry)))
        if most is None and len(objects) > limit:
            raise InvalidInput.at("input.url", f"the folder has more than {limit} objects", reason=TOO_MANY)
        if most is not None and len(objects) >= limit + LISTED_AT_ONCE:
            # A bucket lists objects in the order of names, so its listing can stop here. A disk lists in no order.
            objects = heapq.nsmallest(limit, objects, key=_name)
            if place.root is None:
                break
    return (await asyncio.to_thread(sorted, objects, key=_name))[:limit]


def _name(entry: ObjectEntry) -> str:
    return entry.source


async def _planned(place: Place, name: str, source: JobInput, names: dict[str, str], most: _Most) -> Planned:
    try:
        entry = await find(place, name)
        kind = source.format or format_of(name)
        if kind is None:
            raise InvalidInput(
                f"{name}: its name has no suffix of a known format: set input.format, or use .jsonl, .csv, .parquet or "
                "the suffix of an image format",
                reason="unsupported_format",
                param="input.format",
            )
        if kind == "images":
            if not reads_images(source):
                raise InvalidInput(f"{name}: an image has no columns for input.text", param="input.format")
            return list(_runs([entry], most.rows))
        if reads_images(source):
            message = f"{name} is not an image: set input.text to a template that names its columns"
            raise InvalidInput(message, param="input.text")
        if kind == "parquet":
            footer = await place.patience.repeated(lambda: asyncio.to_thread(footers.footer, place, entry, names))
            _check_columns(name, names, footer.columns)
            cuts = itertools.islice(footers.cuts(footer.groups, most.rows, most.bytes), MAX_SPANS + 1)
            return [_span(entry, kind, cut) for cut in cuts]
        return await _scanned(place, entry, kind, names, most)
    except InvalidInput as error:
        if error.reason == TOO_MANY:  # the error concerns the whole job, so the planning stops
            raise
        return Broken(name, error.info())


def _span(entry: ObjectEntry, kind: str, cut: Cut, header: str = "") -> RowSpan:
    return RowSpan(entry.source, kind, cut.first, cut.rows, cut.start, cut.end, tag=entry.tag, header=header)


def _check_columns(source: str, params: dict[str, str], there: Iterable[str]) -> None:
    there = list(there)
    for column, times in Counter(there).items():
        if times > 1:
            message = f"{source}: {times} columns have the name {column[:64]!r}: name each column differently"
            raise InvalidInput(message, reason="schema", param="input.url")
    for column, param in params.items():
        if column not in there:
            shown = ", ".join(name[:64] for name in there[:MAX_COLUMNS_SHOWN])
            raise InvalidInput.at(param, f"{source} has no column {column!r}; it has {shown}")


def check_file(path: Path, source: JobInput) -> None:
    """Raise InvalidInput, with the same message as `plan`, if a local file lacks a column that the job reads, has two
    columns of one name, or is CSV without a valid first row. Read only the beginning of the file, or the footer of
    Parquet. Other faults raise no error.
    """
    kind = source.format or format_of(path.name)
    names = columns(source)
    if kind is None or kind == "images" or reads_images(source):
        return
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        with contextlib.suppress(pa.ArrowException, UnicodeDecodeError):
            _check_columns(path.name, names, pq.read_schema(path).names)
        return
    with path.open("rb") as file:
        head = file.read(SAMPLE_BYTES)
    is_whole = len(head) < SAMPLE_BYTES
    head = head.removeprefix(BOM)
    if kind == "csv":
        line, _ = _first_row(path.name, head[:MAX_HEADER_BYTES], 0, is_whole=is_whole and len(head) <= MAX_HEADER_BYTES)
        _check_columns(path.name, names, fields(line.encode()) or ())
    elif there := _JsonSample.parse(head, names, is_whole=is_whole).columns:
        _check_columns(path.name, _needed(names), there)


def _needed(names: dict[str, str]) -> dict[str, str]:
    """Return the columns that rows of JSON Lines must have: all columns that the job reads, except those that it only
    copies to the output.
    """
    return {name: param for name, param in names.items() if param != "input.keep"}


async def _scanned(place: Place, entry: ObjectEntry, kind: str, names: dict[str, str], most: _Most) -> list[RowSpan]:
    has_mark = await whole(place, entry, 0, min(len(BOM), entry.size)) == BOM
    begin = len(BOM) if has_mark else 0
    header = ""
    if kind == "csv":
        head = await whole(place, entry, begin, min(entry.size, begin + MAX_HEADER_BYTES))
        header, begin = _first_row(entry.source, head, begin, is_whole=begin + len(head) == entry.size)
        _check_columns(entry.source, names, fields(header.encode()) or ())
    else:
        data = await whole(place, entry, begin, min(entry.size, begin + SAMPLE_BYTES))
        sample = await asyncio.to_thread(_JsonSample.parse, data, names, is_whole=begin + len(data) == entry.size)
        if sample.columns:
            _check_columns(entry.source, _needed(names), sample.columns)
        # Later rows may have more values than the rows of the sample, so half of the limit stays free.
        most = most._replace(rows=max(1, min(most.rows, sizes.MAX_SPAN_VALUES // 2 // max(1, sample.values))))
    spans: list[RowSpan] = []
    scanner = Scanner(is_quoted=kind == "csv", at=begin)
    cutter = Cutter(most.rows, most.bytes)

    def feed(piece: bytes) -> None:
        for starts, ends in scanner.feed(piece):
            for cut in cutter.feed(starts, ends):
                spans.append(_span(entry, kind, cut, header))
                _check_count(len(spans), most.rows)

    async for piece in pieces(place, entry, begin, entry.size):
        await asyncio.to_thread(feed, piece)
    last = (*cutter.feed(*scanner.end()), *cutter.end())
    return [*spans, *(_span(entry, kind, cut, header) for cut in last)]


class _JsonSample(NamedTuple):
    """First rows of a JSON Lines object. `columns`: names of all columns in these rows. If none of these rows has
    a column that the job needs, its name is probably misspelt, so the plan has a `Broken` for the object. `values`:
    largest number of values that one row has in the columns of the job, at most MAX_ROW_VALUES.
    """

    columns: list[str]
    values: int

    @classmethod
    def parse(cls, data: bytes, names: Collection[str], *, is_whole: bool) -> _JsonSample:
        lines = data.split(b"\n")
        if not is_whole:
            lines.pop()  # the last line may be incomplete
        names_of_columns: dict[str, None] = {}
        most = 0
        for line in lines[:SAMPLE_ROWS]:
            # an invalid row is skipped here; the job reports the error when it reads this row
            with contextlib.suppress(*UNDECODABLE):
                row = sizes.columns_of(line)
                names_of_columns |= dict.fromkeys(row)
                most = max(most, sum(sizes.values_of(row[name]) for name in names if name in row))
        return cls(list(names_of_columns), min(most, sizes.MAX_ROW_VALUES))


def _first_row(name: str, head: bytes, begin: int, *, is_whole: bool) -> tuple[str, int]:
    """Return the first row of `head`, and the position of the next row in the object. `begin`: position of `head` in
    the object. `is_whole`: whether `head` ends at the end of the object. Raises InvalidInput.
    """
    scanner = Scanner(is_quoted=True, at=begin)
    rows = [*scanner.feed(head), *([scanner.end()] if is_whole else [])]
    for starts, ends in rows:
        if len(starts):
            line = head[int(starts[0]) - begin : int(ends[0]) - begin].rstrip(b"\r\n")
            if fields(line) is None:
                break
            return line.decode("utf-8"), int(ends[0])
    raise InvalidInput(
        f"{name}: expected the names of columns in a first line of at most {MAX_HEADER_BYTES} bytes",
        reason="malformed",
        param="input.url",
    )


def _runs(files: list[ObjectEntry], shard_rows: int) -> Iterable[RowSpan]:
    """Yield spans of consecutive images, in the order of their names."""
    first, after = 0, ""
    run: list[ObjectEntry] = []
    size = 0
    for image in files:
        if run and (len(run) == shard_rows or size + image.size > MAX_SPAN_BYTES):
            yield RowSpan("", "images", first, len(run), after=after, tag=tag_of_run(run))
            first, after, run, size = first + len(run), run[-1].source, [], 0
        run.append(image)
        size += image.size
    if run:
        yield RowSpan("", "images", first, len(run), after=after, tag=tag_of_run(run))


def tag_of_run(run: Iterable[ObjectEntry]) -> str:
    """Return the tag of a span of images: a digest of their names and tags."""
    digest = hashlib.sha256()
    for image in run:
        digest.update(f"{image.source}\0{image.tag}\0".encode())
    return digest.hexdigest()
