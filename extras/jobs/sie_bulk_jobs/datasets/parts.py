"""Encodes parts (output files of jobs), and reads their descriptions. A part stores a shard: the answers to a range of
rows.

parquet  one row for each line; outputs of a failed row are null. The key `sie` of the metadata has `About` as JSON.
jsonl    one object for each line, with the same names and the model's fingerprint; outputs of a failed row are absent.
npy      an uncompressed `.npz`: an array for each column. `dense` is [lines, width] with zeros where `failed` is true.
         A column NAME of arrays of any length is stored as `NAME`, the joined arrays of all lines, and `NAME_rows`:
         the positions in `NAME` at which the lines begin, and the end of the last line. Texts, copied columns and
         extractions are in `rows.jsonl`, `About` in `about.json`. These two are JSON, because a pickle could run code.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from sie_bulk_jobs.datasets import tables
from sie_bulk_jobs.datasets.answers import About, Array, Shard, kept_json, most_frequent
from sie_contracts.api.jobs import OutputFormat

SUFFIX: dict[OutputFormat, str] = {"parquet": ".parquet", "jsonl": ".jsonl", "npy": ".npz"}
MIN_DIGITS = 5
ROWS, ABOUT = "rows.jsonl", "about.json"
CODE_POINT_BYTES = 4  # bytes of a character in a NumPy array of texts
_PIECE_ROWS = 256
# exceptions of zipfile, pyarrow and msgspec for an object that is no part; RuntimeError includes RecursionError
_FAULTS = (ValueError, OSError, EOFError, LookupError, RuntimeError, zipfile.BadZipFile, zlib.error)


class PartFault(ValueError):
    """Error for bytes that are not a part (an output file of a job)."""


def part_name(number: int, count: int, format: OutputFormat) -> str:
    """Return the name of the output file `number` (from 0) of `count` files."""
    digits = max(MIN_DIGITS, len(str(count - 1)))
    return f"part-{number:0{digits}d}{SUFFIX[format]}"


def id_bytes(shard: Shard, format: OutputFormat) -> int:
    """Return the number of bytes of all ids in a part of the format npy, in which each id is as wide as the longest id;
    0 for other formats.
    """
    return CODE_POINT_BYTES * max(map(len, shard.ids), default=0) * len(shard.ids) if format == "npy" else 0


def encode(shard: Shard, format: OutputFormat) -> bytes:
    """Encode a shard (answers to a range of rows). For equal shards, all processes with the same version of SIE return
    equal bytes.
    """
    if format == "parquet":
        return tables.encode(shard)
    return b"".join(_lines(shard, has_arrays=True)) if format == "jsonl" else _npz(shard)


def inspect(data: bytes, format: OutputFormat) -> About:
    """Return the description of the shard that is stored in an output file. For JSON Lines, `job`, `shard`, `model`,
    `reused` and `lines` are empty or 0, because the file does not have them. Raises PartFault.
    """
    try:
        if format == "parquet":
            return tables.inspect(data)
        if format == "jsonl":
            return _counted(data)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return msgspec.json.decode(archive.read(ABOUT), type=About)
    except PartFault:
        raise
    except _FAULTS as error:
        raise PartFault(f"the object is not an output file of a job in the format {format}") from error


def _lines(shard: Shard, *, has_arrays: bool) -> Iterator[bytes]:
    import orjson

    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    rows = []
    for at, own in enumerate(shard.ids):
        error = shard.errors[at]
        row: dict[str, Any] = {"id": own}
        # msgspec encodes these values, because orjson supports neither integers above 64 bits nor bytes.
        for name, values in shard.copied.items():
            row[name] = orjson.Fragment(kept_json(values[at]))
        if shard.chunks and (chunk := shard.chunks[at]) is not None:
            row |= chunk.columns
        if error is not None:
            row["error"] = {"code": error.code, "message": error.message}
        row["tokens"], row["truncated"] = int(shard.tokens[at]), bool(shard.truncated[at])
        row["fingerprint"] = shard.about.fingerprint
        if error is None:
            row |= {name: values[at] for name, values in shard.extracted.items()}
            if has_arrays:
                row |= _arrays(shard, at)
        rows.append(orjson.dumps(row, option=option))
        if len(rows) == _PIECE_ROWS:
            yield b"".join(rows)
            rows = []
    yield b"".join(rows)


def _arrays(shard: Shard, at: int) -> dict[str, Any]:
    arrays_by_name: dict[str, Any] = {} if shard.dense is None else {"dense": _exact(shard.dense[at])}
    arrays_by_name |= {name: values[at] for name, values in shard.numbers.items()}
    for name, arrays in shard.ragged.items():
        array = arrays[at]
        arrays_by_name[name] = None if array is None else _exact(array)
    return arrays_by_name


def _exact(array: Array) -> Array:
    """Convert float16 to float64, so that JSON has the exact value."""
    return np.ascontiguousarray(array, np.float64 if array.dtype == np.float16 else None)


class Outcome(msgspec.Struct, frozen=True):
    """Id, number of tokens and error of one row, without the values that the model computed."""

    id: str
    tokens: int
    error: dict[str, str] | None = None


def outcomes(data: bytes, format: OutputFormat) -> list[Outcome]:
    """Return the Outcome of each row of a part (output file), in the order of the rows. Raises PartFault."""
    try:
        if format == "parquet":
            lines = [msgspec.convert({"fingerprint": "", **row}, _Line) for row in tables.outcomes(data)]
        else:
            if format == "npy":
                with zipfile.ZipFile(io.BytesIO(data)) as archive:
                    data = archive.read(ROWS)
            lines = [_line.decode(line) for line in io.BytesIO(data)]
        return [Outcome(line.id, line.of_row, line.error) for line in lines if line.begins_row]
    except _FAULTS as error:
        raise PartFault(f"the object is not an output file of a job in the format {format}") from error


class _Line(msgspec.Struct):
    """Line of a part (output file), with only the columns that `outcomes` and `_counted` read. Only lines of chunks
    have `row_tokens`. In a line without `row_tokens`, `chunk` is a column that was copied from the input.
    """

    id: str
    tokens: int
    fingerprint: str
    error: dict[str, str] | None = None
    row_tokens: int | None = None
    chunk: Any = None

    @property
    def begins_row(self) -> bool:
        return self.row_tokens is None or self.chunk == 0

    @property
    def of_row(self) -> int:
        """Return the number of tokens of the whole row."""
        return self.tokens if self.row_tokens is None else self.row_tokens


_line = msgspec.json.Decoder(_Line)


def _counted(data: bytes) -> About:
    rows = tokens = 0
    fingerprint = ""
    codes = Counter[str]()
    if data and not data.endswith(b"\n"):
        raise PartFault("the last line is not complete")
    for text in io.BytesIO(data):
        line = _line.decode(text)
        fingerprint = line.fingerprint
        if line.begins_row:
            rows, tokens = rows + 1, tokens + line.of_row
        if line.error is not None:
            codes[line.error["code"]] += 1
    return About("", 0, "", fingerprint, rows, codes.total(), 0, tokens, most_frequent(codes))


def _npz(shard: Shard) -> bytes:
    arrays: dict[str, Array] = {
        "ids": np.array(shard.ids, np.str_),
        "failed": ~shard.answered,
        "tokens": shard.tokens,
        "truncated": shard.truncated,
        **shard.numbers,
    }
    if shard.dense is not None:
        arrays["dense"] = shard.dense
    for name, values in shard.ragged.items():
        there = [value for value in values if value is not None]
        arrays[name] = np.concatenate(there)
        lengths = [0 if value is None else len(value) for value in values]
        arrays[f"{name}_rows"] = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int64)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    with zipfile.ZipFile(file, "a") as archive:
        for name, data in (
            (ROWS, b"".join(_lines(shard, has_arrays=False))),
            (ABOUT, msgspec.json.encode(shard.about)),
        ):
            archive.writestr(zipfile.ZipInfo(name), data)
    return file.getvalue()
