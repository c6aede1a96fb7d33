"""Vectors as an Arrow stream: one row per input, in order, with columns for each output and its scales.

    id · dense · dense_scale · dense_offset · sparse_indices · sparse_values · multivector · multivector_scale ·
    multivector_offset · error

A dense vector is a fixed-size list. A multivector is a list of fixed-size lists, one per token. If an input failed, its
outputs are null and `error` has the reason. Rows are built while the stream is sent, about BATCH_BYTES at a time.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import nanoarrow as na
import numpy as np
from nanoarrow.ipc import StreamWriter

from sie_contracts import arrays
from sie_contracts.errors import SIEError
from sie_contracts.wire.messages import Failed, Ok, RunOptions
from sie_gateway.inference import reply
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.reply import Placed, array_of

BATCH_BYTES = 1 << 20  # approximate bytes of vectors in one record batch of the stream
_TYPES = {"<f4": na.float32, "<f2": na.float16, "|i1": na.int8, "|u1": na.uint8, "<i4": na.int32}


class ArrowRows:
    """Arrow stream of one reply, in pieces. Each iteration builds the stream again, so several iterations may run at
    once.
    """

    def __init__(self, items: Sequence[RequestItem], outcomes: Sequence[Placed], run: RunOptions) -> None:
        """At least one of the outcomes must be an Ok."""
        self._items = items
        self._outcomes = outcomes
        self._run = run
        value = next(outcome for _, outcome in outcomes if isinstance(outcome, Ok))
        # width of a vector for each output: number of values, or of bytes if bits are packed
        self._widths = {name: value.outputs[name].shape[-1] for name in run.outputs if name != "sparse"}
        size = sum(len(result.block) for result in {id(result): result for result, _ in outcomes}.values())
        self._step = max(1, len(items) * BATCH_BYTES // max(size, BATCH_BYTES))

    def __iter__(self) -> Iterator[bytes]:
        sink = io.BytesIO()
        with StreamWriter.from_writable(sink) as writer:
            for start in range(0, len(self._items), self._step):
                writer.write_array(self._batch(start, start + self._step))
                yield sink.getvalue()
                sink.seek(0)
                sink.truncate()
        yield sink.getvalue()

    def _batch(self, start: int, stop: int) -> Any:
        items, outcomes = self._items[start:stop], self._outcomes[start:stop]
        columns: dict[str, Any] = {"id": na.c_array([item.id for item in items], na.string())}
        for output in self._run.outputs:
            columns |= self._columns(output, outcomes)
        columns["error"] = _errors(outcomes)
        schema = na.struct({name: na.Schema(column.schema) for name, column in columns.items()}, nullable=False)
        return na.c_array_from_buffers(schema, len(items), [None], children=list(columns.values()))

    def _columns(self, output: str, outcomes: Sequence[Placed]) -> dict[str, Any]:
        if output == "sparse":
            return {
                f"sparse_{part}": _lists(_rows(outcomes, f"sparse.{part}"), dtype)
                for part, dtype in (("indices", "<i4"), ("values", "<f2" if self._run.dtype == "float16" else "<f4"))
            }
        width, dtype = self._widths[output], reply.WIRE_DTYPES[self._run.dtype]
        rows = _rows(outcomes, output)
        extras = {
            f"{output}_{name}": _rows(outcomes, f"{output}.{name}") for name in reply.EXTRAS.get(self._run.dtype, ())
        }
        if output == "dense":
            columns = {name: _column(na.float32(), values) for name, values in extras.items()}
            return {output: _vectors(rows, dtype, width), **columns}
        columns = {name: _lists(values, "<f4") for name, values in extras.items()}
        return {output: _matrices(rows, dtype, width), **columns}


Rows = list[arrays.Array | None]


def _rows(outcomes: Iterable[Placed], name: str) -> Rows:
    """Return one array per input, or None if the input failed."""
    return [array_of(result, outcome, name) if isinstance(outcome, Ok) else None for result, outcome in outcomes]


def _valid(rows: Sequence[Any]) -> tuple[Any, int]:
    """Return the validity bitmap of an Arrow array (None if no row is null) and the number of nulls."""
    nulls = sum(row is None for row in rows)
    return (np.packbits([row is not None for row in rows], bitorder="little") if nulls else None), nulls


def _joined(rows: Rows, dtype: str, fill: int = 0) -> arrays.Array:
    pieces = [np.zeros(fill, dtype) if row is None else row.reshape(-1) for row in rows]
    return np.concatenate(pieces).astype(dtype, copy=False) if pieces else np.zeros(0, dtype)


def _numbers(values: arrays.Array) -> Any:
    return na.c_array_from_buffers(_TYPES[values.dtype.str](), len(values), [None, values])


def _column(kind: Any, rows: Rows) -> Any:
    valid, nulls = _valid(rows)
    return na.c_array_from_buffers(kind, len(rows), [valid, _joined(rows, "<f4", 1)], null_count=nulls)


def _vectors(rows: Rows, dtype: str, width: int) -> Any:
    valid, nulls = _valid(rows)
    child = _numbers(_joined(rows, dtype, width))
    kind = na.fixed_size_list(na.Schema(child.schema), width)
    return na.c_array_from_buffers(kind, len(rows), [valid], null_count=nulls, children=[child])


def _offsets(counts: Sequence[int]) -> arrays.Array:
    return np.concatenate([[0], np.cumsum(counts)]).astype("<i4")


def _lists(rows: Rows, dtype: str) -> Any:
    valid, nulls = _valid(rows)
    child = _numbers(_joined(rows, dtype))
    offsets = _offsets([0 if row is None else row.size for row in rows])
    return na.c_array_from_buffers(
        na.list_(na.Schema(child.schema)), len(rows), [valid, offsets], null_count=nulls, children=[child]
    )


def _matrices(rows: Rows, dtype: str, width: int) -> Any:
    valid, nulls = _valid(rows)
    values = _numbers(_joined(rows, dtype))
    counts = [0 if row is None else len(row) for row in rows]
    child = na.c_array_from_buffers(
        na.fixed_size_list(na.Schema(values.schema), width), sum(counts), [None], children=[values]
    )
    kind = na.list_(na.Schema(child.schema))
    return na.c_array_from_buffers(kind, len(rows), [valid, _offsets(counts)], null_count=nulls, children=[child])


def _errors(outcomes: Sequence[Placed]) -> Any:
    errors = [SIEError.from_info(outcome.error) if isinstance(outcome, Failed) else None for _, outcome in outcomes]
    valid, nulls = _valid(errors)
    texts = ("code", "message", "reason")
    children = [
        na.c_array([getattr(error, name) if error else None for error in errors], na.string()) for name in texts
    ]
    children.append(na.c_array([error.retryable if error else None for error in errors], na.bool_()))
    schema = na.struct({**{name: na.string() for name in texts}, "retryable": na.bool_()})
    return na.c_array_from_buffers(schema, len(errors), [valid], null_count=nulls, children=children)
