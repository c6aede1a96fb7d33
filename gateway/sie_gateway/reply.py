"""Results become a response: negotiation, slots, timing, headers. Both formats carry the same values."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson

from sie_contracts import arrays
from sie_contracts.catalogue import ModelEntry
from sie_contracts.errors import AllItemsFailed, ErrorInfo, SIEError
from sie_contracts.messages import Failed, Ok, Outcome, RunOptions, WorkResult
from sie_gateway.body import Item

MSGPACK_TYPES = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
_EXTRAS = {"int8": ("scale",), "uint8": ("scale", "offset")}  # what a client needs beside the values of a dtype
JSON_VALUES = 50_000  # numbers, some 5 ms
_TIMING_HEADERS = (
    ("X-Queue-Time", "queue_time"), ("X-Tokenization-Time", "preprocess_time"), ("X-Inference-Time", "inference_time"),
    ("X-Postprocessing-Time", "postprocess_time"), ("X-Total-Time", "total_time"), ("X-Batch-Wait-Time", "batch_wait_time"),
)  # fmt: skip
_EXTRACTED = ("entities", "relations", "classifications", "objects")


def wants_msgpack(accept: str, body_is_msgpack: bool) -> bool:
    """Whether a success is sent as msgpack. Never fails: what cannot be served is answered in JSON."""
    if not accept:
        return body_is_msgpack
    weights: dict[str, float] = {}
    for part in accept.split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        weight = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "q":
                try:
                    weight = float(value)
                except ValueError:
                    weight = 0.0
        weights[name.lower()] = weight
    msgpack = max((weights[name] for name in MSGPACK_TYPES if name in weights), default=0.0)
    json = weights.get("application/json", 0.0)
    if msgpack > 0 and msgpack >= json:
        return True
    if json > 0:
        return False
    return body_is_msgpack if set(weights) <= {"*/*", "application/*"} else False


def _json_default(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    raise TypeError(f"{type(value).__name__} does not travel")


_msgpack = msgspec.msgpack.Encoder(enc_hook=lambda value: arrays.pack(value) if isinstance(value, np.ndarray) else value)


def encode(body: Mapping[str, Any], *, msgpack: bool) -> tuple[bytes, str]:
    """The bytes of a success and their content type. numpy arrays may stand anywhere in `body`."""
    if msgpack:
        return _msgpack.encode(body), "application/msgpack"
    return orjson.dumps(body, default=_json_default, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS), "application/json"


async def encode_in_turns(body: dict[str, Any], values: int, *, msgpack: bool) -> tuple[bytes, str]:
    """As `encode`, but JSON of many `values` is written piece by piece, with other requests in between: 600 ms of a large one otherwise."""
    items = body.get("items")
    if msgpack or values <= JSON_VALUES or not isinstance(items, list):
        return encode(body, msgpack=msgpack)
    step = max(1, JSON_VALUES * len(items) // values)
    pieces = []
    for start in range(0, len(items), step):
        pieces.append(encode({"": items[start : start + step]}, msgpack=False)[0][5:-2])
        await asyncio.sleep(0)
    rest = encode({name: value for name, value in body.items() if name != "items"}, msgpack=False)[0]
    return b'{"items":[' + b",".join(pieces) + b"]," + rest[1:], "application/json"


def slot_error(info: ErrorInfo) -> dict[str, Any]:
    """An error in the place of a value."""
    error = SIEError.from_info(info)
    found: dict[str, Any] = {"code": error.code, "message": error.message, "retryable": error.retryable}
    if error.reason:
        found["reason"] = error.reason
    if error.retryable:
        found["retry_after_s"] = error.retry_after_s
    return {**found, **error.extras}


def array_of(result: WorkResult, outcome: Ok, name: str) -> arrays.Array:
    """One output as a view on the result's block."""
    piece = outcome.outputs[name]
    return np.frombuffer(result.block, dtype=piece.dtype, count=math.prod(piece.shape), offset=piece.offset).reshape(piece.shape)


def _exact_array_of(result: WorkResult, outcome: Ok, name: str) -> arrays.Array:
    """For JSON, float16 as float64: the shortest digits of that are the exact value, those of a float16 are not."""
    values = array_of(result, outcome, name)
    return values.astype(np.float64) if values.dtype == np.float16 else values


Placed = tuple[WorkResult, Outcome]


def placed(count: int, results: Sequence[WorkResult], places: Sequence[Sequence[int]]) -> list[Placed]:
    """The outcome of each input, in order, with the result it came in. `places` gives the input positions of each result's outcomes."""
    found: list[Any] = [None] * count
    for result, positions in zip(results, places, strict=True):
        for position, outcome in zip(positions, result.outcomes, strict=True):
            found[position] = (result, outcome)
    return found


def failures_of(outcomes: Sequence[Placed]) -> list[Failed | None]:
    """The failure of each input, or None."""
    return [outcome if isinstance(outcome, Failed) else None for _, outcome in outcomes]


def _echo(item: Item) -> dict[str, Any]:
    slot: dict[str, Any] = {} if item.id is None else {"id": item.id}
    if item.metadata is not None:
        slot["metadata"] = item.metadata
    return slot


def encode_slots(
    items: Sequence[Item], outcomes: Sequence[Placed], entry: ModelEntry, run: RunOptions, *, msgpack: bool
) -> list[dict[str, Any]]:
    """One slot per input, in order, each with the outputs that were asked for, or its error."""
    token_dims = run.dimensions or entry.outputs.get("multivector", 0)
    dense_dims = run.muvera.width(token_dims) if run.muvera else run.dimensions or entry.outputs.get("dense", 0)
    read = array_of if msgpack or run.dtype != "float16" else _exact_array_of
    extras = _EXTRAS.get(run.dtype, ())
    slots = []
    for item, (result, outcome) in zip(items, outcomes, strict=True):
        slot = _echo(item)
        slots.append(slot)
        if isinstance(outcome, Failed):
            slot["error"] = slot_error(outcome.error)
            continue
        for name in run.outputs:
            if name == "dense":
                slot["dense"] = dense = {"dims": dense_dims, "dtype": run.dtype, "values": read(result, outcome, "dense")}
                for key in extras:
                    dense[key] = float(read(result, outcome, f"dense.{key}")[0])
                if run.muvera:
                    dense["source"] = "muvera"
            elif name == "multivector":
                values = read(result, outcome, "multivector")
                slot["multivector"] = {"token_dims": token_dims, "num_tokens": len(values), "dtype": run.dtype, "values": values}
                slot["multivector"] |= {key: read(result, outcome, f"multivector.{key}") for key in extras}
            else:
                dtype = "float16" if run.dtype == "float16" else "float32"
                indices, values = read(result, outcome, "sparse.indices"), read(result, outcome, "sparse.values")
                slot["sparse"] = {"dims": entry.outputs["sparse"], "dtype": dtype, "indices": indices, "values": values}
    return slots


def score_entries(items: Sequence[Item], outcomes: Sequence[Placed]) -> list[dict[str, Any]]:
    """One entry per input: by score, ties by position, failed ones last. Ranks are dense and begin at 0."""
    entries: list[tuple[float, int, dict[str, Any]]] = []
    for index, (item, (_, outcome)) in enumerate(zip(items, outcomes, strict=True)):
        entry = _echo(item)
        entry.pop("id", None)
        score = outcome.score if isinstance(outcome, Ok) else None
        entry = {"item_id": f"item-{index}" if item.id is None else item.id, "score": score, **entry}
        if isinstance(outcome, Failed):
            entry["error"] = slot_error(outcome.error)
        entries.append((math.inf if score is None else -score, index, entry))
    entries.sort(key=lambda each: each[:2])
    return [{**entry, "rank": rank} for rank, (_, _, entry) in enumerate(entries)]


def extract_slots(items: Sequence[Item], outcomes: Sequence[Placed]) -> list[dict[str, Any]]:
    """One slot per input, in order, all keys present whatever was found."""
    slots = []
    for index, (item, (_, outcome)) in enumerate(zip(items, outcomes, strict=True)):
        found = outcome.data or {} if isinstance(outcome, Ok) else {}
        slot: dict[str, Any] = {"id": f"item-{index}", **_echo(item), **{name: found.get(name, []) for name in _EXTRACTED}}
        slot["entities"] = [{"start": None, "end": None, "bbox": None, **entity} for entity in slot["entities"]]
        slot["data"] = found.get("data", {})
        if isinstance(outcome, Failed):
            slot["error"] = slot_error(outcome.error)
        slots.append(slot)
    return slots


def failure_of(
    items: Sequence[Item], failures: Sequence[Failed | None], *, any_fails: bool
) -> tuple[SIEError, list[dict[str, Any]]] | None:
    """The error that the whole request ends in, with one entry per failed input: when all failed, or any did and the client asked so."""
    failed = [(index, failure) for index, failure in enumerate(failures) if failure is not None]
    if not failed or (len(failed) < len(items) and not any_fails):
        return None
    listed = [
        {"index": index, **({"id": items[index].id} if items[index].id is not None else {}), **slot_error(failure.error)}
        for index, failure in failed
    ]
    errors = [SIEError.from_info(failure.error) for _, failure in failed]
    if len({error.code for error in errors}) == 1:
        return errors[0], listed
    return AllItemsFailed(f"{len(failed)} of {len(items)} inputs failed, see errors", failures=errors), listed


def timing(*, total_ms: float, wait_ms: float, last: WorkResult | None) -> dict[str, float]:
    """Contiguous stages of the chunk that finished last. `wait_ms` is from publishing to its result's arrival."""
    stages = last.stages if last else None
    preprocess, batch, inference, post, worker = (
        (stages.preprocess_ms, stages.batch_wait_ms, stages.inference_ms, stages.postprocess_ms, stages.worker_ms)
        if stages
        else (0.0,) * 5
    )
    # waiting for the broker, for large inputs, for a load and for the device are one stage: the queue
    queue = max(0.0, wait_ms - worker) + (stages.fetch_ms + stages.load_ms + stages.device_wait_ms if stages else 0.0)
    rest = max(0.0, total_ms - queue - preprocess - batch - inference - post)
    waited, total = round(queue + batch, 3), round(total_ms, 3)
    queue, preprocess, batch, inference, post, rest = (round(value, 3) for value in (queue, preprocess, batch, inference, post, rest))
    return {
        "queue_time": queue, "preprocess_time": preprocess, "batch_wait_time": batch, "inference_time": inference,
        "postprocess_time": post, "unattributed_time": rest, "total_time": total, "queue_ms": waited, "tokenization_ms": preprocess,
        "inference_ms": inference, "postprocessing_ms": post, "unattributed_ms": rest, "total_ms": total,
    }  # fmt: skip


def timing_headers(values: Mapping[str, float]) -> dict[str, str]:
    return {header: f"{values[name]:.2f}" for header, name in _TIMING_HEADERS}
