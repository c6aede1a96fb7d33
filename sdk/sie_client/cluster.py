"""Plans for models, health, capacity and pools. A plan is a generator without I/O that yields requests, see `core`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar, cast
from urllib.parse import urlencode

import numpy as np

from sie_client import verbs
from sie_client.core import CONTROL_S, Pause, Plan, Session, delete_call, json_call, quoted, reading
from sie_client.errors import PoolNotFoundError, SIEError, invalid
from sie_client.types import Capacity, Item, Pool

T = TypeVar("T")
RENEW_EVERY_S = 60.0
LEASE_S = 1200.0
CLOSE_S = 5.0  # seconds that the deletion of a pool may take at the end of a `with client.reserve()` block
_logger = logging.getLogger("sie_client")
_DOT = bytes.fromhex(  # PNG file with one pixel
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63606060000000040001f61738550000000049454e44"
    "ae426082"
)
_SILENCE = np.zeros(800, np.int16)
_SMALLEST: dict[str, Item] = {
    "text": {"text": "."},
    "image": {"images": [_DOT]},
    "audio": {"audio": {"data": _SILENCE, "sample_rate": 8000}},
    "document": {"document": {"data": b".", "format": "md"}},
}


def _field(reply: Any, name: str, kind: type[T]) -> T:
    """Return a field of a reply. Raises ServerError if the field is missing or has another type."""
    with reading({}):
        value = reply.get(name) if isinstance(reply, dict) else None
        if not isinstance(value, kind):
            raise TypeError(f"{name}: expected {kind.__name__}, got {type(value).__name__}")
        return value


def list_models(filters: Mapping[str, Any], session: Session) -> Plan[list[dict[str, Any]]]:
    query = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in filters.items()
        if value is not None
    }
    reply = yield from json_call("GET", "/v1/models" + (f"?{urlencode(query)}" if query else ""), session)
    return _field(reply, "data", list)


def _described(path: str, session: Session, name: str, kind: type[object] = str) -> Plan[dict[str, Any]]:
    """Send a GET, and return the reply. Raises ServerError if its field `name` is missing or not of type `kind`."""
    reply: dict[str, Any] = yield from json_call("GET", path, session)
    _field(reply, name, kind)
    return reply


def get_model(model: str, session: Session) -> Plan[dict[str, Any]]:
    return _described(f"/v1/models/{quoted(model, 'model')}", session, "name")


def health(session: Session) -> Plan[dict[str, Any]]:
    return _described("/health", session, "status")


def whoami(options: Mapping[str, Any], session: Session) -> Plan[dict[str, Any]]:
    return _described("/v1/whoami", session.for_call(options)[0], "name")


def capacity(gpu: str | None, session: Session) -> Plan[Capacity]:
    """Return the healthy workers of the machine profile `gpu`; for None, all healthy workers."""
    reply = yield from json_call("GET", "/health", session)
    machine_profile = None if gpu is None else gpu.strip().lower()
    workers = [
        worker
        for worker in _field(reply, "workers", list)
        if machine_profile in (None, _field(worker, "gpu", str).lower())
    ]
    return {
        "worker_count": len(workers),
        "gpu_count": sum(_field(worker, "gpu_count", int) for worker in workers),
        "workers": workers,
    }


def scaling(lane: str, session: Session) -> Plan[dict[str, Any]]:
    return _described(f"/v1/scaling/{quoted(lane, 'lane')}", session, "wanted_replicas", int)


def warmed(model: str, options: Mapping[str, Any], session: Session) -> Plan[dict[str, Any]]:
    """Send the smallest input that the model accepts, so that a worker loads the model. Return the model's description.
    Raises the errors of `core.call`, and InvalidInputError if the client can build no input that the model accepts.
    """
    session, params = session.for_call({"wait_for_capacity": True, **options})
    info = yield from get_model(model, session)
    inputs, tasks = _field(info, "inputs", list), _field(info, "tasks", list)
    item = next((smallest for name, smallest in _SMALLEST.items() if name in inputs), None)
    if item is None:
        listed = ", ".join(map(str, inputs))
        raise invalid(f"{model}: its inputs are {listed}; the client can build no test input of these kinds")
    if "encode" in tasks:
        yield from verbs.encode(model, [item], params, session)
    elif "score" in tasks:
        yield from verbs.score(model, item, [item], params, session)
    else:
        yield from verbs.extract(model, [item], {"labels": ["."], **params}, session)
    return (yield from get_model(model, session))


def _pool(reply: Any) -> Pool:
    _field(reply, "name", str)
    _field(reply, "spec", dict)
    _field(reply, "status", dict)
    return cast(Pool, reply)


def create_pool(name: str, gpus: Mapping[str, int], options: Mapping[str, Any], session: Session) -> Plan[Pool]:
    body = {key: value for key, value in options.items() if value is not None}
    return _pool((yield from json_call("POST", "/v1/pools", session, {"name": name, "gpus": dict(gpus), **body})))


def list_pools(session: Session) -> Plan[list[Pool]]:
    return [_pool(pool) for pool in _field((yield from json_call("GET", "/v1/pools", session)), "pools", list)]


def get_pool(name: str, session: Session) -> Plan[Pool]:
    return _pool((yield from json_call("GET", f"/v1/pools/{quoted(name, 'name')}", session)))


def renew_pool(name: str, session: Session) -> Plan[float]:
    """Return the end of the renewed lease in seconds since 1970; infinity for a pool without a lease."""
    reply = yield from json_call("POST", f"/v1/pools/{quoted(name, 'name')}/renew", session)
    if isinstance(reply, dict) and reply.get("expires_at", 0) is None:
        return math.inf
    expires_at = reply.get("expires_at") if isinstance(reply, dict) else None
    return float(expires_at) if isinstance(expires_at, int) else _field(reply, "expires_at", float)


def delete_pool(name: str, session: Session, within_s: float = CONTROL_S) -> Plan[None]:
    yield from delete_call(f"/v1/pools/{quoted(name, 'name')}", session, within_s)


def released(name: str, session: Session) -> Plan[None]:
    """Delete a pool with one attempt. A failure is only logged, because the pool also ends when its lease ends."""
    session, _ = session.for_call({"wait_for_capacity": False})
    try:
        yield from delete_pool(name, session, CLOSE_S)
    except PoolNotFoundError:
        pass
    except SIEError as error:
        _logger.warning("pool %s could not be deleted; it ends when its lease ends: %s", name, error)


def renewed(name: str, gpus: Mapping[str, int], options: Mapping[str, Any], session: Session) -> Plan[NoReturn]:
    """Renew the lease of a reservation until the driver stops this plan. If the lease has ended, create the reservation
    again. If a renewal fails, the next `Pause` has the error, and the driver logs the error.
    """
    session, _ = session.for_call({"wait_for_capacity": False})
    lease_s = float(options.get("ttl_seconds") or LEASE_S)
    cause = ""
    while True:
        yield Pause(min(RENEW_EVERY_S, lease_s / 4), cause, lease_s)
        cause = ""
        try:
            try:
                yield from renew_pool(name, session)
            except PoolNotFoundError:
                yield from create_pool(name, gpus, options, session)
        except SIEError as error:
            cause = f"renewal of pool {name}: {error}"
