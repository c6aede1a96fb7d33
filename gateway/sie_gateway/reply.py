"""Results become a response: negotiation, slots, timing, headers. Both formats carry the same values."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson

from sie_contracts import arrays
from sie_contracts.errors import AllItemsFailed, ErrorInfo, SIEError
from sie_contracts.messages import Failed, Ok, WorkResult
from sie_gateway.body import Item

MSGPACK_TYPES = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
_DENSE_DTYPES = {"<f4": "float32", "<f2": "float16", "|i1": "int8", "|u1": "uint8"}


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


def encode_slots(
    items: Sequence[Item], results: Sequence[WorkResult], places: Sequence[Sequence[int]]
) -> tuple[list[dict[str, Any]], list[Failed | None]]:
    """One slot per input, in order, and the failure of each or None. `places` gives the input positions of each result's outcomes."""
    slots: list[dict[str, Any]] = [{} for _ in items]
    failures: list[Failed | None] = [None] * len(items)
    for result, positions in zip(results, places, strict=True):
        for position, outcome in zip(positions, result.outcomes, strict=True):
            item = items[position]
            slot = slots[position]
            if item.id is not None:
                slot["id"] = item.id
            if item.metadata is not None:
                slot["metadata"] = item.metadata
            if isinstance(outcome, Failed):
                failures[position] = outcome
                slot["error"] = slot_error(outcome.error)
                continue
            values = array_of(result, outcome, "dense")
            slot["dense"] = {"dims": values.shape[0], "dtype": _DENSE_DTYPES[values.dtype.str], "values": values}
    return slots, failures


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
    # waiting for the broker, for a load and for the device are one stage: the queue
    queue = max(0.0, wait_ms - worker) + (stages.load_ms + stages.device_wait_ms if stages else 0.0)
    rest = max(0.0, total_ms - queue - preprocess - batch - inference - post)
    values = {
        "queue_time": queue, "preprocess_time": preprocess, "batch_wait_time": batch, "inference_time": inference,
        "postprocess_time": post, "unattributed_time": rest, "total_time": total_ms, "queue_ms": queue + batch,
        "tokenization_ms": preprocess, "inference_ms": inference, "postprocessing_ms": post, "unattributed_ms": rest, "total_ms": total_ms,
    }  # fmt: skip
    return {name: round(value, 3) for name, value in values.items()}


def timing_headers(values: Mapping[str, float]) -> dict[str, str]:
    names = {
        "X-Queue-Time": "queue_time", "X-Tokenization-Time": "preprocess_time", "X-Inference-Time": "inference_time",
        "X-Postprocessing-Time": "postprocess_time", "X-Total-Time": "total_time", "X-Batch-Wait-Time": "batch_wait_time",
    }  # fmt: skip
    return {header: f"{values[name]:.2f}" for header, name in names.items()}
