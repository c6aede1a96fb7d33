"""Read the rows of a job's input from Parquet files. The footer of a file has the positions of its row groups and
columns. So a job reads only the columns that it needs, and only the row groups of a span (a range of rows).

A span has whole row groups, or some rows of one row group. `start` and `end` of a span are numbers of row groups.
`first` is a row number in the whole file; `read` computes its position in the group from the footer, which has the
number of rows of each group.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sie_bulk_jobs.datasets.objects import ObjectEntry, RangeFile
from sie_bulk_jobs.datasets.pages import (
    MAX_BATCH_BYTES,
    MAX_HEADER_BYTES,
    ChunkPages,
    FooterTooLarge,
    PageFault,
    check_footer,
    dictionary_bytes,
)
from sie_bulk_jobs.datasets.places import Place
from sie_bulk_jobs.datasets.scan import Cut
from sie_bulk_jobs.datasets.sizes import MAX_DECODED_BYTES, MAX_SPAN_VALUES, SpanSize
from sie_contracts.errors import InvalidInput

if TYPE_CHECKING:
    from pyarrow import Array, DataType, Field, RecordBatch
    from pyarrow.parquet import ColumnChunkMetaData, ParquetFile, ParquetSchema

BUFFER_BYTES = 8 << 20  # bytes that are buffered while a column of a row group is read
BATCH_ROWS = 1024
MIN_BATCH_ROWS = 64  # with fewer rows in a batch, reading takes much longer, see `_batches`
# Largest number of values of a list column in a row group, if a value has less than one byte on average. A row is
# decoded as a whole, so without this limit one row of a small file could need any amount of memory.
MAX_DENSE_VALUES = 8_000_000
MAX_FOOTER_BYTES = 64 << 20
SMALL_FOOTER_BYTES = 128 << 10  # a footer of at most this size is not checked, because it cannot need much memory


class ParquetGroup(NamedTuple):
    """Row group. `size`: uncompressed bytes of the columns that the job reads, as the footer states them. `values`:
    number of values in these columns.
    """

    rows: int
    size: int
    values: int = 0


class Footer(NamedTuple):
    columns: tuple[str, ...]
    groups: tuple[ParquetGroup, ...]


class _PageFile(RangeFile):
    """File from which pyarrow reads the column chunks in `chunks`. `read` raises InvalidInput if the pages of these
    chunks are malformed, or if the pages of one batch need too much memory.
    """

    chunks: Sequence[ChunkPages] = ()

    def read(self, size: int | None = -1) -> bytes:
        at = self.tell()
        data = super().read(size)
        with self._checking():
            for chunk in self.chunks:
                chunk.note(at, data, self._present)
        if sum(chunk.bytes for chunk in self.chunks) > MAX_BATCH_BYTES:
            raise InvalidInput(
                f"{self._entry.source}: the pages of a few rows are decoded to more than {MAX_BATCH_BYTES} bytes: "
                "write the file with smaller rows or pages",
                reason="too_large",
                param="input.url",
            )
        return data

    def dictionary_bytes(self, column: ColumnChunkMetaData) -> int:
        """Return the number of decoded bytes of the dictionary of a column; 0 if the column has no dictionary."""
        if not column.num_values:
            return 0
        self.seek(_start(column))
        with self._checking():
            return dictionary_bytes(super().read(min(column.total_compressed_size, MAX_HEADER_BYTES)))

    @contextlib.contextmanager
    def _checking(self) -> Iterator[None]:
        try:
            yield
        except PageFault as error:
            raise malformed(self._entry.source) from error

    def _present(self, start: int, end: int) -> bytes:
        return self._fetched(start, min(end, self._entry.size))


class _DataRequested(Exception):
    """Exception that ends a read of `_WithoutData`: pyarrow has requested bytes, after it accepted the metadata."""


class _WithoutData(RangeFile):
    """File without bytes, for a reader that already has the footer. A read raises _DataRequested."""

    def _fetched(self, start: int, end: int) -> bytes:
        raise _DataRequested


def malformed(source: str) -> InvalidInput:
    return InvalidInput(
        f"{source}: the object is no valid Parquet file, or it is encrypted", reason="malformed", param="input.url"
    )


@contextlib.contextmanager
def _reading(source: str) -> Iterator[None]:
    """Convert pyarrow's exceptions into InvalidInput, also UnicodeDecodeError for a column name that is not UTF-8."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise malformed(source) from error


def _opened(file: RangeFile, entry: ObjectEntry) -> ParquetFile:
    file.seek(max(0, entry.size - 8))
    tail = file.read(8)
    size = int.from_bytes(tail[:4], "little")
    if len(tail) < 8 or tail[4:] != b"PAR1" or size > min(entry.size - 8, MAX_FOOTER_BYTES):
        raise malformed(entry.source)
    if size > SMALL_FOOTER_BYTES:
        file.seek(entry.size - 8 - size)
        _check_footer(entry.source, file.read(size + 8))
    file.seek(0)
    with _reading(entry.source):
        return _parquet_file(file)


def _check_footer(source: str, footer: bytes) -> None:
    try:
        check_footer(footer)
    except FooterTooLarge as error:
        raise InvalidInput(
            f"{source}: the footer has too many row groups and columns: write the file with fewer row groups or "
            "columns",
            reason="too_large",
            param="input.url",
        ) from error
    except PageFault as error:
        raise malformed(source) from error


def _parquet_file(file: RangeFile, **more: Any) -> ParquetFile:
    from pyarrow.parquet import ParquetFile

    return ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True, **more)


def _chunks(
    file: ParquetFile, place: Place, entry: ObjectEntry, numbers: Sequence[int], leaves: Collection[int]
) -> Iterator[list[ColumnChunkMetaData]]:
    """Yield the metadata of the leaf columns `leaves`, for each row group in `numbers`. Raises InvalidInput.

    pyarrow (26) ends the process if it reads the metadata of an encrypted or malformed column. So this function first
    starts a reader of the row group. The reader raises an exception for such metadata before it requests a byte. For
    other metadata it requests bytes, and `_WithoutData` raises _DataRequested, which is suppressed.
    """
    from pyarrow.parquet import ParquetFile

    with ParquetFile(_WithoutData(place, entry), metadata=file.metadata, buffer_size=1, pre_buffer=False) as unread:
        for number in numbers:
            batches = unread.reader.iter_batches(1, [number], column_indices=list(leaves), use_threads=False)
            with contextlib.suppress(_DataRequested), _reading(entry.source):
                next(batches, None)
            group = file.metadata.row_group(number)
            yield [group.column(at) for at in leaves]


def _leaves(schema: ParquetSchema, names: Collection[str]) -> dict[int, str]:
    """Return the leaf columns in which a file stores the columns `names`: index of the leaf -> name of the column. The
    path of a leaf column is the column's name, alone or followed by a dot and further names.
    """
    paths = [schema.column(at).path for at in range(len(schema))] if names else []
    below = {f"{name}.": name for name in names}
    return {
        at: name
        for at, path in enumerate(paths)
        for start, name in below.items()
        if path == name or path.startswith(start)
    }


def footer(place: Place, entry: ObjectEntry, names: Collection[str]) -> Footer:
    """Read the footer of a file, with the sizes of the columns `names`. Blocks. Raises InvalidInput, StoreError."""
    with _opened(RangeFile(place, entry), entry) as file, _reading(entry.source):
        columns, schema = tuple(file.schema_arrow.names), file.schema
        leaves = _leaves(schema, names)
        groups = []
        for number, read in enumerate(_chunks(file, place, entry, range(file.num_row_groups), leaves)):
            for column, (at, name) in zip(read, leaves.items(), strict=True):
                if schema.column(at).max_repetition_level > 0:
                    _check_dense(entry.source, name, column.num_values, column.total_uncompressed_size)
            size = sum(column.total_uncompressed_size for column in read)
            rows = file.metadata.row_group(number).num_rows
            groups.append(ParquetGroup(rows, size, sum(column.num_values for column in read)))
        return Footer(columns, tuple(groups))


def _check_dense(source: str, name: str, values: int, size: int) -> None:
    """Raise InvalidInput if a list column has so many values in few bytes that one row may fill the memory."""
    if values > max(MAX_DENSE_VALUES, size):
        raise InvalidInput(
            f"{source}: column {name[:64]!r} has {values} values in {size} bytes of a row group, "
            f"expected at most {MAX_DENSE_VALUES} or one per byte, whichever is more: write smaller row groups",
            reason="too_large",
            param="input.url",
        )


def cuts(groups: Sequence[ParquetGroup], max_rows: int, max_bytes: int) -> Iterator[Cut]:
    """Yield spans of as many whole row groups as the limits allow. A row group above a limit is split into several
    spans with equal numbers of rows. The limit of values is half of MAX_SPAN_VALUES, because only the mean number of
    values per row is known.
    """
    most = ParquetGroup(max_rows, max_bytes, MAX_SPAN_VALUES // 2)
    first = row = start = 0
    whole = ParquetGroup(0, 0)
    for number, group in enumerate(groups):
        joined = ParquetGroup(*map(sum, zip(whole, group, strict=True)))
        if row > first and any(have > limit for have, limit in zip(joined, most, strict=True)):
            yield Cut(first, row - first, start, number)
            first = row
        if row == first:
            start, whole, joined = number, ParquetGroup(0, 0), group
        parts = max(-(-have // limit) for have, limit in zip(group, most, strict=True))
        if parts > 1 and group.rows > 1:
            parts = min(group.rows, parts)
            step = -(-group.rows // parts)
            for begin in range(0, group.rows, step):
                yield Cut(row + begin, min(step, group.rows - begin), number, number + 1)
            row += group.rows
            first, whole = row, ParquetGroup(0, 0)
            continue
        row, whole = row + group.rows, joined
    if row > first:
        yield Cut(first, row - first, start, len(groups))


def read(place: Place, entry: ObjectEntry, cut: Cut, names: Sequence[str], size: SpanSize) -> Iterator[dict[str, Any]]:
    """Yield the columns `names` of each row of a span (a range of rows). Blocks. Raises InvalidInput, StoreError."""
    source = _PageFile(place, entry)
    with _opened(source, entry) as file, _reading(entry.source):
        present = [name for name in names if name in file.schema_arrow.names]
        leaves = _leaves(file.schema, present)
        begin = sum(file.metadata.row_group(number).num_rows for number in range(cut.start))
        skip, count = cut.first - begin, 0
        numbers = range(cut.start, cut.end)
        groups = zip(numbers, _chunks(file, place, entry, numbers, leaves), strict=True)
        for batch in itertools.chain.from_iterable(
            _batches(file, source, number, dict(zip(leaves, columns, strict=True)), present)
            for number, columns in groups
        ):
            part = batch.slice(skip, cut.rows - count)
            skip = max(0, skip - batch.num_rows)
            size.add(sum(map(_values, part.columns)), sum(map(_decoded_bytes, part.columns)))
            yield from _objects(entry.source, _micros(part)) if present else ({} for _ in range(len(part)))
            count += len(part)
            if count == cut.rows:
                break
    if count != cut.rows:
        raise malformed(entry.source)


def _batches(
    file: ParquetFile, source: _PageFile, number: int, chunks: Mapping[int, ColumnChunkMetaData], names: Sequence[str]
) -> Iterator[RecordBatch]:
    """Yield the rows of a row group in batches. On average, a batch has at most MAX_SPAN_VALUES values and
    MAX_DECODED_BYTES bytes. `chunks`: metadata of the leaf columns to read, by index.

    pyarrow copies a value of a dictionary for each row, so a batch has fewer rows if dictionaries are large. If a batch
    could have fewer than MIN_BATCH_ROWS rows, or if a list column has a dictionary, pyarrow is set to return texts as
    dictionary arrays (indices into distinct values). Such an array has the values of all earlier rows of the row group,
    so dictionary arrays are used only in these cases.
    """
    columns, schema = chunks.values(), file.schema
    rows = max(1, file.metadata.row_group(number).num_rows)
    values, size = (
        sum(getattr(column, name) for column in columns) for name in ("num_values", "total_uncompressed_size")
    )
    most = min(BATCH_ROWS, MAX_SPAN_VALUES * rows // max(1, values), MAX_DECODED_BYTES * rows // max(1, size))
    source.chunks = ()
    dictionaries = {
        at: source.dictionary_bytes(column)
        for at, column in chunks.items()
        # the values of all other types have only a few bytes, so pyarrow may copy them for each row
        if schema.column(at).physical_type.endswith("BYTE_ARRAY")
    }
    is_nested = any(size and schema.column(at).max_repetition_level > 0 for at, size in dictionaries.items())
    if is_nested or sum(dictionaries.values()) > MAX_DECODED_BYTES // MIN_BATCH_ROWS:
        compact = [at for at in chunks if schema.column(at).physical_type == "BYTE_ARRAY"]
        paths = [schema.column(at).path for at in compact]
        file = _parquet_file(source, metadata=file.metadata, read_dictionary=paths)
        dictionaries |= dict.fromkeys(compact, 0)
    batch_rows = max(1, min(most, MAX_DECODED_BYTES // max(1, sum(dictionaries.values()))))
    source.chunks = [_pages(column, -(-column.num_values * batch_rows // rows)) for column in columns]
    yield from file.iter_batches(batch_rows, row_groups=[number], columns=names, use_threads=False)


def _pages(column: ColumnChunkMetaData, window: int) -> ChunkPages:
    start = _start(column)
    return ChunkPages(start, start + column.total_compressed_size, column.num_values, window)


def _start(column: ColumnChunkMetaData) -> int:
    """Return the position of the first page of a column."""
    dictionary, data = column.dictionary_page_offset or 0, column.data_page_offset
    return int(dictionary if 0 < dictionary < data else data)


def _objects(source: str, batch: RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch as Python objects. Raises InvalidInput for a value that Python cannot represent."""
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns.append(column.to_pylist())
        except (OverflowError, ValueError) as error:
            raise InvalidInput(
                f"{source}: column {name[:64]!r} has a value that cannot be read, such as a text that is not UTF-8, or "
                "a time before the year 1 or after 9999: write the file without this value",
                reason="malformed",
                param="input.url",
            ) from error
    return (dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True))


def _values(array: Array) -> int:
    """Return the number of Python objects that `to_pylist` creates for an array."""
    import pyarrow as pa

    if isinstance(array, pa.ExtensionArray):
        return _values(array.storage)
    if isinstance(array, pa.DictionaryArray) or not pa.types.is_nested(array.type):
        return len(array)
    return len(array) + sum(map(_values, _children(array)))


def _decoded_bytes(array: Array) -> int:
    """Return the number of bytes of an array's values. A value of a dictionary array counts once for each index that
    refers to it.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(array, pa.ExtensionArray):
        return _decoded_bytes(array.storage)
    if isinstance(array, pa.DictionaryArray):
        lengths = pc.binary_length(array.dictionary.cast(pa.large_binary())).cast(pa.int64())
        return int(pc.sum(lengths.take(array.indices)).as_py() or 0)
    if pa.types.is_nested(array.type):
        return int(array.nbytes) + sum(map(_decoded_bytes, _children(array)))
    return int(array.nbytes)


def _children(array: Array) -> list[Array]:
    import pyarrow as pa

    if isinstance(array, pa.StructArray):
        return list(array.flatten())
    if isinstance(array, pa.MapArray):
        return [array.keys, array.items]
    return [array.flatten()]


def _micros(batch: RecordBatch) -> RecordBatch:
    """Convert times and durations in nanoseconds to microseconds, because Python has no nanoseconds."""
    for at, column in enumerate(batch.schema):
        if (kind := _in_micros(column.type)) != column.type:
            batch = batch.set_column(at, column.name, batch.column(at).cast(kind, safe=False))
    return batch


def _in_micros(kind: DataType) -> DataType:
    """Return `kind` with microseconds in place of nanoseconds, also in types within structs, lists and maps."""
    import pyarrow as pa

    def inner(field: Field) -> Field:
        return field.with_type(_in_micros(field.type))

    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pa.types.is_struct(kind):
        return pa.struct(list(map(inner, kind)))
    if pa.types.is_map(kind):
        return pa.map_(inner(kind.key_field), inner(kind.item_field), kind.keys_sorted)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(inner(kind.value_field), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(inner(kind.value_field))
    return pa.large_list(inner(kind.value_field)) if pa.types.is_large_list(kind) else kind
