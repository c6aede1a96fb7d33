"""Parts (output files of a job) in Parquet. Each part stores one shard, the answers to a range of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sie_bulk_jobs.datasets.answers import About, Array, RowChunk, Shard, kept_json

if TYPE_CHECKING:
    import pyarrow as pa

KEY = b"sie"  # key of the shard's description (`About`) in the metadata of the file
ROWS_OF_GROUP = 10_000
# largest depth of nested lists; deeper lists are written as JSON. Each list has two levels in Parquet, and readers of
# Parquet allow 100 levels.
MAX_NESTING = 30


def encode(shard: Shard) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    answered = shard.answered
    columns: dict[str, pa.Array] = {"id": pa.array(shard.ids, pa.string())}
    columns |= {name: _inferred(values) for name, values in shard.copied.items()}
    if shard.chunks:
        columns |= _chunk_columns(shard.chunks)
    if shard.dense is not None:
        columns["dense"] = _fixed(shard.dense, ~answered)
    for name, numbers in shard.numbers.items():
        columns[name] = pa.array(numbers, pa.float32(), mask=np.isnan(numbers))
    for name, arrays in shard.ragged.items():
        columns[name] = _lists(arrays)
    for name, values in shard.extracted.items():
        columns[name] = _as_json(values)
    errors = [None if error is None else {"code": error.code, "message": error.message} for error in shard.errors]
    columns["error"] = pa.array(errors, pa.struct([("code", pa.string()), ("message", pa.string())]))
    columns["tokens"] = pa.array(shard.tokens)
    columns["truncated"] = pa.array(shard.truncated)
    table = pa.table(columns).replace_schema_metadata({KEY: msgspec.json.encode(shard.about)})
    sink = pa.BufferOutputStream()
    texts = ["id", *shard.copied, *shard.extracted]
    # only texts get dictionaries and statistics: for vectors they take time, and no reader needs them
    parquet.write_table(
        table,
        sink,
        row_group_size=ROWS_OF_GROUP,
        compression="zstd",
        compression_level=1,
        use_dictionary=texts,
        write_statistics=texts,
        write_page_checksum=True,
    )
    return bytes(sink.getvalue())


def inspect(data: bytes) -> About:
    """Return the description of the shard from the metadata of its output file. Raises ValueError, OSError."""
    import pyarrow as pa
    from pyarrow import parquet

    metadata = parquet.read_metadata(pa.BufferReader(data))
    about = msgspec.json.decode((metadata.metadata or {}).get(KEY, b""), type=About)
    if metadata.num_rows != (expected := about.lines or about.rows):
        raise ValueError(f"the file has {metadata.num_rows} rows, its metadata says {expected}")
    return about


def outcomes(data: bytes) -> list[dict[str, Any]]:
    """Return a dict for each line of a part (output file), with the columns id, tokens and error. If the part has
    chunks, the dict also has the columns chunk and row_tokens. Raises ValueError, OSError.
    """
    import pyarrow as pa
    from pyarrow import parquet

    names = ["id", "tokens", "error", *(("chunk", "row_tokens") if inspect(data).lines else ())]
    rows: list[dict[str, Any]] = parquet.read_table(pa.BufferReader(data), columns=names).to_pylist()
    return rows


def _chunk_columns(chunks: list[RowChunk | None]) -> dict[str, pa.Array]:
    """Build the columns of chunks. A row with an error has null in these columns."""
    import pyarrow as pa

    columns = [{} if chunk is None else chunk.columns for chunk in chunks]
    names = max(columns, key=len)
    texts = ("text", "heading")
    return {
        name: pa.array([of_chunk.get(name) for of_chunk in columns], pa.string() if name in texts else pa.int32())
        for name in names
    }


def _inferred(values: list[Any]) -> pa.Array:
    """Return an array whose type Arrow infers from the values. If the values have several types, or if `_is_flat` is
    False for their type, the array has the values as JSON texts. If all values are None, the type is null, which every
    reader accepts.
    """
    import pyarrow as pa

    try:
        array = pa.array(values, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return _as_json(values)
    return array if _is_flat(array.type) else _as_json(values)


def _is_flat(kind: pa.DataType) -> bool:
    """Return whether values of an Arrow type are stored with this type, and not as JSON. Structs are stored as JSON,
    because Parquet cannot store an empty struct. Deeply nested lists are stored as JSON, because readers of Parquet
    refuse them.
    """
    import pyarrow as pa

    for _ in range(MAX_NESTING):
        if not pa.types.is_list(kind):
            return not pa.types.is_struct(kind)
        kind = kind.value_type
    return False


def _as_json(values: list[Any]) -> pa.Array:
    import pyarrow as pa

    return pa.array([None if value is None else kept_json(value).decode() for value in values], pa.string())


def _fixed(matrix: Array, absent: Array | None = None) -> pa.Array:
    """Return a matrix [rows, width] as a column of fixed-length lists. `absent`: bool [rows], true for null rows."""
    import pyarrow as pa

    flat = pa.array(np.ascontiguousarray(matrix).reshape(-1))
    mask = None if absent is None else pa.array(absent)
    return pa.FixedSizeListArray.from_arrays(flat, matrix.shape[1], mask=mask)


def _lists(arrays: list[Array | None]) -> pa.Array:
    """Return a column of lists. `arrays`: an array [n] or [n, width] for each line; None becomes null."""
    import pyarrow as pa

    flat = np.concatenate([array for array in arrays if array is not None])
    values = pa.array(flat) if flat.ndim == 1 else _fixed(flat)
    ends = np.cumsum([0 if array is None else len(array) for array in arrays], dtype=np.int64)
    offsets = pa.array(np.concatenate(([0], ends)).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, values, mask=pa.array([array is None for array in arrays]))
