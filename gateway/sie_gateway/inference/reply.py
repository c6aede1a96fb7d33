"""Encoding of results as the body of a reply, in JSON or msgpack: one entry (slot) per input. Large bodies are written
in pieces. Both formats have the same values.
"""

from __future__ import annotations

import base64
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import orjson

from sie_contracts import arrays
from sie_contracts.errors import ErrorInfo, InternalFailure, SIEError
from sie_contracts.models.entries import ModelEntry
from sie_contracts.wire import chunk_tables
from sie_contracts.wire.messages import Failed, Ok, Outcome, RunOptions, WorkResult
from sie_runtime.http.asgi import Body, accept_weights
from sie_runtime.http.routes import ARROW, RAW

if TYPE_CHECKING:
    from sie_gateway.inference.body import RequestItem

MSGPACK_TYPES = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
# dtype -> additional fields of a vector, from which a client computes the original values
EXTRAS = {"int8": ("scale",), "uint8": ("scale", "offset")}
WIRE_DTYPES = {"float32": "<f4", "float16": "<f2", "int8": "|i1", "uint8": "|u1", "binary": "|u1", "ubinary": "|u1"}
PIECE_VALUES = 50_000  # values (numbers) in one piece of a body; writing a piece as JSON takes about 5 ms
_EXTRACTED = ("entities", "relations", "classifications", "objects")


Format = Literal["json", "msgpack", "raw", "arrow"]
Row = Callable[[Any], Any]
Piece = bytes | memoryview
Placed = tuple[WorkResult, Outcome]  # (result of a chunk, outcome of one of its inputs)
# Function that builds the last entry of a reply's map, such as the timings. Argument: seconds that the other
# entries took to write. For msgpack, the function must return exactly one entry.
Late = Callable[[float], Mapping[str, Any]]


def requested_format(accept: str, *, body_is_msgpack: bool = False, raw: bool = False, msgpack: bool = True) -> Format:
    """Return the format of a successful reply: the offered format that Accept prefers, or JSON if Accept names no
    offered format. If Accept is missing or has only wildcards, return the format of the request's body. `raw`: the
    route also offers raw bytes and Arrow. `msgpack`: the route also offers msgpack.
    """
    own: Format = "msgpack" if body_is_msgpack else "json"
    if accept in ("", "*/*"):
        return own
    weights = accept_weights(accept)
    json = weights.get("application/json", 0.0)
    packed = max((weights[name] for name in MSGPACK_TYPES if name in weights), default=0.0)
    if msgpack and packed > 0 and packed >= json:
        return "msgpack"
    if raw:
        weight, name = max((weights.get(name, 0.0), name) for name in (RAW, ARROW))
        if weight > 0 and weight >= json:
            return "raw" if name == RAW else "arrow"
    if json > 0:
        return "json"
    return own if set(weights) <= {"*/*", "application/*"} else "json"


def _json_default(value: Any) -> Any:
    if isinstance(value, bytes | memoryview):
        return base64.b64encode(value).decode("ascii")
    raise TypeError(f"{type(value).__name__} cannot be encoded as JSON")


_msgpack = msgspec.msgpack.Encoder(
    enc_hook=lambda value: arrays.pack(value) if isinstance(value, np.ndarray) else value
)


def encode(body: Mapping[str, Any], *, msgpack: bool) -> tuple[bytes, str]:
    """Return the encoded body of a reply and its content type. `body` may contain numpy arrays anywhere."""
    if msgpack:
        return _msgpack.encode(body), "application/msgpack"
    return _json(body), "application/json"


class Streamed:
    """Body in pieces. Each iteration builds all pieces again. `pieces` yields all pieces except the last. `last`
    returns the last piece. The argument of `last`: seconds in which the other pieces were built, without the time in
    which the client reads them.
    """

    def __init__(self, pieces: Callable[[], Iterator[Piece]], last: Callable[[float], bytes]) -> None:
        self._pieces = pieces
        self._last = last

    def __iter__(self) -> Iterator[Piece]:
        pieces, spent_s = self._pieces(), 0.0
        while True:
            began_s = time.perf_counter()
            piece = next(pieces, None)
            spent_s += time.perf_counter() - began_s
            if piece is None:
                break
            yield piece
        yield self._last(spent_s)


def _slices(values: Sequence[Any], numbers: int, row: Row | None) -> Iterator[Sequence[Any]]:
    """Yield parts of `values` that have about PIECE_VALUES numbers each. `numbers`: count of the numbers in all values.
    `row` renders each value.
    """
    step = max(1, PIECE_VALUES * len(values) // max(1, numbers))
    for start in range(0, len(values), step):
        part = values[start : start + step]
        yield part if row is None else list(map(row, part))


def body_of(
    body: dict[str, Any], values: int, late: Late, *, msgpack: bool, name: str = "items", row: Row | None = None
) -> tuple[Body, str]:
    """Return an encoded body and its content type. `values`: count of the numbers in the body. Above PIECE_VALUES, the
    list in the field `name` is encoded in pieces. A single encoding of a large body would block the event loop for up
    to 600 ms, and occupy memory for the whole encoding. `row` renders each element of the list just before its piece is
    written. `late` builds the entry that is written last.
    """
    if name not in body or values <= PIECE_VALUES:
        began_s = time.perf_counter()
        whole = body if row is None else {**body, name: list(map(row, body[name]))}
        data, content_type = encode(whole, msgpack=msgpack)
        own, _ = encode(late(time.perf_counter() - began_s), msgpack=msgpack)
        # the first byte of a msgpack map of at most 15 entries contains their number: add one for the entry of `late`
        parts = (bytes([data[0] + 1]), memoryview(data)[1:]) if msgpack else (memoryview(data)[:-1], b",")
        return b"".join((*parts, own[1:])), content_type
    began_s = time.perf_counter()
    items = body[name]
    rest, content_type = encode({key: value for key, value in body.items() if key != name}, msgpack=msgpack)
    rest_s = time.perf_counter() - began_s
    if msgpack:
        # the first byte counts the entries of the map: add the array and the entry of `late`; 0xdd begins an array
        head = bytes([rest[0] + 2]) + rest[1:] + _msgpack.encode(name) + b"\xdd" + len(items).to_bytes(4, "big")

        def pieces() -> Iterator[bytes]:
            yield head
            for part in _slices(items, values, row):
                yield b"".join(map(_msgpack.encode, part))

        return Streamed(pieces, lambda spent_s: _msgpack.encode(late(rest_s + spent_s))[1:]), content_type

    def after(spent_s: float) -> bytes:
        return b"]," + rest[1:-1] + b"," + _json(late(rest_s + spent_s))[1:]

    return listed(items, values, f'{{"{name}":['.encode(), after, row), content_type


def _listed(values: Sequence[Any], numbers: int, before: bytes, row: Row | None) -> Iterator[Piece]:
    """Yield the JSON of a list without its last bracket, in pieces. The first piece begins with `before`."""
    for rows in _slices(values, numbers, row):
        if numbers <= PIECE_VALUES or not any(map(_is_wide, rows)):
            yield b"".join((before, memoryview(_json(rows))[1:-1]))
            before = b","
            continue
        for wide in rows:
            yield before
            yield from _parts(wide)
            before = b","


def _is_wide(value: Any) -> bool:
    """Return True if the value contains a matrix or a list with more than PIECE_VALUES numbers."""
    if isinstance(value, np.ndarray):
        return value.ndim == 2 and value.size > PIECE_VALUES
    if isinstance(value, list):
        return _numbers(value) > PIECE_VALUES
    return isinstance(value, dict) and any(map(_is_wide, value.values()))


def _numbers(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.size
    parts = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return sum(map(_numbers, parts))


def _parts(value: Any) -> Iterator[Piece]:
    """Yield the JSON of a value in pieces. A wide matrix is split between rows."""
    if not _is_wide(value):
        yield _json(value)
    elif isinstance(value, dict):
        before = b"{"
        for name, entry in value.items():
            yield before + _json(name) + b":"
            yield from _parts(entry)
            before = b","
        yield b"}"
    else:
        yield from _listed(value, _numbers(value), b"[", None)
        yield b"]"


def listed(
    values: Sequence[Any],
    numbers: int,
    before: bytes = b"[",
    after: bytes | Callable[[float], bytes] = b"]",
    row: Row | None = None,
) -> Body:
    """Return JSON: the text `before`, the list `values`, and the text `after`. `numbers`: count of all numbers in the
    values; above PIECE_VALUES, the JSON is in pieces. Values may contain numpy arrays. `row` renders each value just
    before it is written. If `after` is a function, its argument is the seconds that the values took to write.
    """

    def end(spent_s: float) -> bytes:
        return (b"" if len(values) else before) + (after if isinstance(after, bytes) else after(spent_s))

    body = Streamed(lambda: _listed(values, numbers, before, row), end)
    return body if numbers > PIECE_VALUES else b"".join(body)


def chained(parts: Sequence[Body], last: Callable[[float], bytes]) -> Body:
    """Join the bodies `parts` and the end `last`. The result is in pieces if any of the bodies is in pieces.
    `last` gets the seconds in which the bodies were written.
    """

    def pieces() -> Iterator[Piece]:
        for part in parts:
            yield from (part,) if isinstance(part, bytes) else part

    body = Streamed(pieces, last)
    return b"".join(body) if all(isinstance(part, bytes) for part in parts) else body


def _json(value: Any) -> bytes:
    return orjson.dumps(value, default=_json_default, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def slot_error(info: ErrorInfo) -> dict[str, Any]:
    """Return the error of one input as a map. The map takes the place of the input's value in the reply."""
    error = SIEError.from_info(info)
    error_map: dict[str, Any] = {"code": error.code, "message": error.message, "retryable": error.retryable}
    if error.reason:
        error_map["reason"] = error.reason
    if error.retryable:
        error_map["retry_after_s"] = error.retry_after_s
    return {**error_map, **error.extras}


def array_of(result: WorkResult, outcome: Ok, name: str) -> arrays.Array:
    """Return one output of an input as a view of the bytes in the worker's result. Raises ValueError for an array
    outside these bytes and for a dtype of Python objects. The faster `numpy.ndarray` makes neither check.
    """
    piece = outcome.outputs[name]
    return np.frombuffer(result.block, dtype=piece.dtype, count=math.prod(piece.shape), offset=piece.offset).reshape(
        piece.shape
    )


def _packed_of(result: WorkResult, outcome: Ok, name: str) -> dict[bytes, Any]:
    """Return one output of an input in its msgpack form, as a view of the bytes of the result. No numpy array is
    built for this, because the array would take longer to build than the rest of the reply.
    """
    piece = outcome.outputs[name]
    size = math.prod(piece.shape) * int(piece.dtype[2:])
    return arrays.packed(piece.dtype, piece.shape, memoryview(result.block)[piece.offset : piece.offset + size])


def _exact_array_of(result: WorkResult, outcome: Ok, name: str) -> arrays.Array:
    """Return one output for JSON. A float16 array becomes a float64 array, because orjson rounds a float16 to fewer
    digits, but writes a float64 exactly.
    """
    return _exact(array_of(result, outcome, name))


def _exact(values: arrays.Array) -> arrays.Array:
    return values.astype(np.float64) if values.dtype == np.float16 else values


class Joined:
    """One output (such as `dense`) of all inputs, concatenated, as views of the bytes of the workers' results. If the
    outputs of several inputs are adjacent in a result, they share one view.
    """

    def __init__(self, values: Sequence[tuple[WorkResult, Ok]], name: str) -> None:
        self._pieces: list[memoryview] = []
        self.nbytes = start = end = 0
        before: WorkResult | None = None
        for result, outcome in values:
            piece = outcome.outputs[name]
            size = math.prod(piece.shape) * np.dtype(piece.dtype).itemsize
            if result is before and piece.offset == end:
                self._pieces.pop()
            else:
                before, start = result, piece.offset
            end = piece.offset + size
            self._pieces.append(memoryview(result.block)[start:end])
            self.nbytes += size

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self._pieces)


def _echo(item: RequestItem) -> dict[str, Any]:
    slot: dict[str, Any] = {} if item.id is None else {"id": item.id}
    if item.metadata is not None:
        slot["metadata"] = item.metadata
    return slot


def _usage(outcome: Outcome) -> dict[str, Any]:
    """Return the tokens of one input. The tokens of all inputs add up to the usage of the request in the reply."""
    tokens, is_cut = (outcome.tokens, outcome.truncated) if isinstance(outcome, Ok) else (0, False)
    return {"prompt_tokens": tokens, "total_tokens": tokens, "truncated": is_cut}


def encode_slots(
    items: Sequence[RequestItem], outcomes: Sequence[Placed], entry: ModelEntry, run: RunOptions, *, msgpack: bool
) -> list[dict[str, Any]]:
    """Return one slot per input, in order. A slot has the requested outputs, or the error of the input."""
    read: Callable[[WorkResult, Ok, str], Any] = array_of
    if msgpack:
        read = _packed_of
    elif run.dtype == "float16":
        read = _exact_array_of
    slots = []
    for item, (result, outcome) in zip(items, outcomes, strict=True):
        slot = {} if item.id is None and item.metadata is None else _echo(item)
        slots.append(slot)
        if isinstance(outcome, Failed):
            slot["error"] = slot_error(outcome.error)
            slot["usage"] = _usage(outcome)
            continue
        if item.chunks is None:
            own = result, outcome
            slot |= _outputs(entry, run, functools.partial(read, *own), functools.partial(array_of, *own))
        else:
            slot["chunks"] = _chunk_slots(entry, run, result, outcome, exact=not msgpack)
        tokens = outcome.tokens
        slot["usage"] = {"prompt_tokens": tokens, "total_tokens": tokens, "truncated": outcome.truncated}
    return slots


def _outputs(
    entry: ModelEntry, run: RunOptions, read: Callable[[str], Any], array: Callable[[str], arrays.Array]
) -> dict[str, Any]:
    """Return the requested outputs of one input or chunk. `read` takes the name of an output and returns the value to
    put into the reply. `array` takes the same name and returns the output as a numpy array.
    """
    token_dims = run.dimensions or entry.outputs.get("multivector", 0)
    dense_dims = run.muvera.width(token_dims) if run.muvera else run.dimensions or entry.outputs.get("dense", 0)
    extras = EXTRAS.get(run.dtype, ())
    outputs: dict[str, Any] = {}
    for name in run.outputs:
        if name == "dense":
            outputs["dense"] = dense = {"dims": dense_dims, "dtype": run.dtype, "values": read("dense")}
            for key in extras:
                dense[key] = float(array(f"dense.{key}")[0])
            if run.muvera:
                dense["source"] = "muvera"
        elif name == "multivector":
            outputs["multivector"] = {
                "token_dims": token_dims,
                "num_tokens": len(array("multivector")),
                "dtype": run.dtype,
                "values": read("multivector"),
            }
            outputs["multivector"] |= {key: read(f"multivector.{key}") for key in extras}
        else:
            dtype = "float16" if run.dtype == "float16" else "float32"
            indices, values = read("sparse.indices"), read("sparse.values")
            outputs["sparse"] = {"dims": entry.outputs["sparse"], "dtype": dtype, "indices": indices, "values": values}
    return outputs


def _chunk_slots(
    entry: ModelEntry, run: RunOptions, result: WorkResult, outcome: Ok, *, exact: bool
) -> list[dict[str, Any]]:
    """Return a slot for each chunk of an input: its span, its tokens, its outputs. With `exact`, float16 values become
    float64 (see `_exact_array_of`). Raises InternalFailure if the worker is too old to return vectors of chunks.
    """
    if chunk_tables.TABLE not in outcome.outputs:
        raise chunks_missing()
    arrays_by_name = {name: array_of(result, outcome, name) for name in outcome.outputs}
    slots = []
    for chunk in chunk_tables.split(arrays_by_name):
        array = chunk.arrays.__getitem__

        def read(name: str, array: Callable[[str], arrays.Array] = array) -> arrays.Array:
            return _exact(array(name)) if exact else array(name)

        slots.append(
            {"start": chunk.start, "end": chunk.end, "tokens": chunk.tokens, **_outputs(entry, run, read, array)}
        )
    return slots


def chunks_missing() -> InternalFailure:
    """Return the error for an input if the client requested vectors of chunks, but the worker's result has none."""
    return InternalFailure("the worker is older than the gateway and does not support chunks", reason="not_chunked")


def score_entries(items: Sequence[RequestItem], outcomes: Sequence[Placed]) -> list[dict[str, Any]]:
    """Return one entry per input. The entries are in descending order of the score. Inputs with equal scores are in the
    order of the request, and failed inputs are last. The first entry has the rank 0.
    """
    entries: list[tuple[float, int, dict[str, Any]]] = []
    for index, (item, (_, outcome)) in enumerate(zip(items, outcomes, strict=True)):
        entry = _echo(item)
        entry.pop("id", None)
        score = outcome.score if isinstance(outcome, Ok) else None
        entry = {"item_id": f"item-{index}" if item.id is None else item.id, "score": score, **entry}
        if isinstance(outcome, Failed):
            entry["error"] = slot_error(outcome.error)
        entry["usage"] = _usage(outcome)
        entries.append((math.inf if score is None else -score, index, entry))
    entries.sort(key=lambda row: row[:2])
    return [{**entry, "rank": rank} for rank, (_, _, entry) in enumerate(entries)]


def extract_slot(index: int, item: RequestItem, outcome: Outcome) -> dict[str, Any]:
    """Return the slot (entry in the reply) of one input. The slot has all keys, even if no entity was found."""
    data = outcome.data or {} if isinstance(outcome, Ok) else {}
    slot: dict[str, Any] = {"id": f"item-{index}", **_echo(item), **{name: data.get(name, []) for name in _EXTRACTED}}
    slot["entities"] = [{"start": None, "end": None, "bbox": None, **entity} for entity in slot["entities"]]
    slot["data"] = data.get("data", {})
    if isinstance(outcome, Failed):
        slot["error"] = slot_error(outcome.error)
    slot["usage"] = _usage(outcome)
    return slot
