"""Handlers of `/v1/pools`. They check the bodies of requests, then call `PoolDirectory`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from msgspec import UNSET, Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from sie_broker import BrokerError
from sie_contracts.api.operations import (
    MAX_GPUS,
    MAX_MINIMUM_WORKERS,
    MAX_PINNED,
    MAX_TTL_S,
    TTL_S,
    Assignment,
    PoolDeleted,
    PoolRenewed,
    Pools,
)
from sie_contracts.errors import InvalidInput, PayloadTooLarge, PoolNotFound, PoolOperationForbidden, QueueUnavailable
from sie_contracts.models.alias_checks import resolve_all
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.option_values import bad, integer
from sie_contracts.wire import messages, topology
from sie_contracts.wire.records import ReservationSpec
from sie_gateway.admission.grant import WORKERS_NAME
from sie_gateway.fleet import assignments
from sie_gateway.fleet.pool_rules import not_found
from sie_gateway.operations.handlers import call_of, converted, json_of, json_response

if TYPE_CHECKING:
    from sie_gateway.state import Gateway

MAX_PROFILES = 64
MAX_BODY_BYTES = 64 << 10
# largest number of bytes of a stored reservation: all reservations are one value, which must fit into a NATS message
MAX_SPEC_BYTES = 8 << 10
T = TypeVar("T")
_logger = logging.getLogger("sie.gateway.pools")


class _PoolBody(Struct, forbid_unknown_fields=True):
    """Fields of `PoolRequest`; each may be null. `parse_spec` checks the fields of type Any and the upper limits: its
    errors have specific codes, reasons and params.
    """

    name: Any = None
    gpus: Any = None
    gpu_caps: Any = None
    queue_pool: Literal["default", "_default"] | None = None
    bundle: str | None = None
    minimum_worker_count: Annotated[int, Meta(ge=0)] | None = None
    ttl_seconds: Annotated[int, Meta(ge=1)] | None = None
    pinned_models: Any = None


def parse_spec(raw: Mapping[str, Any], profiles: Collection[str], catalogue: Catalogue) -> ReservationSpec:
    """Read a reservation from a decoded body. `profiles`: existing machine profiles. Raises InvalidInput, which names
    the field, PoolOperationForbidden above a limit, ModelNotFound for an unknown pinned model, and PayloadTooLarge.
    """
    body = converted(raw, _PoolBody)
    name = _name(body.name)
    gpus = _counts(body.gpus, "gpus", profiles)
    if not gpus:
        raise InvalidInput.at("gpus", "expected a count for at least one machine profile, got none")
    caps = _counts(body.gpu_caps, "gpu_caps", profiles)
    for profile, cap in caps.items():
        if cap < gpus.get(profile, 0):
            raise InvalidInput.at(f"gpu_caps.{profile}", f"expected at least {gpus[profile]} (see gpus), got {cap}")
    bundle = body.bundle or ""
    bundles = {*catalogue.bundles, assignments.DEFAULT_BUNDLE}
    if bundle and bundle not in bundles:
        raise InvalidInput.at("bundle", f"expected one of {', '.join(sorted(bundles))}, got {bundle[:60]!r}")
    minimum = body.minimum_worker_count or 0
    if minimum > MAX_MINIMUM_WORKERS:
        raise PoolOperationForbidden(
            f"minimum_worker_count: at most {MAX_MINIMUM_WORKERS} are allowed, got {minimum}",
            param="minimum_worker_count",
        )
    ttl_s = body.ttl_seconds or TTL_S
    if ttl_s > MAX_TTL_S:
        raise PoolOperationForbidden(f"ttl_seconds: at most {MAX_TTL_S} are allowed, got {ttl_s}", param="ttl_seconds")
    pinned = body.pinned_models or []
    if not isinstance(pinned, list) or not all(isinstance(model, str) for model in pinned) or len(pinned) > MAX_PINNED:
        raise bad("pinned_models", pinned, f"a list of at most {MAX_PINNED} strings")
    models = tuple(dict.fromkeys(resolved.residency for model in pinned for resolved in resolve_all(catalogue, model)))
    spec = ReservationSpec(name, gpus, bundle, minimum, ttl_s, caps, models)
    if len(messages.encode(spec)) > MAX_SPEC_BYTES:
        message = f"body: the reservation takes more than {MAX_SPEC_BYTES} bytes: name fewer machine profiles or models"
        raise PayloadTooLarge(message, param="body", extras={"limit": MAX_SPEC_BYTES})
    return spec


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise bad("name", value, "a string", "pool_name")
    try:
        name = topology.pool_name(value)
    except ValueError:
        raise InvalidInput.at("name", "expected 1 to 63 letters, digits, _ or -", reason="pool_name") from None
    if name == "assignments":  # /v1/pools/assignments is another route
        raise InvalidInput.at("name", f"{name!r} cannot be the name of a pool, choose another name", reason="pool_name")
    return name


def _counts(counts: object, field: str, profiles: Collection[str]) -> dict[str, int]:
    """Return machine profile -> checked number of GPUs. A name that is not in `profiles` stands for the profile with
    this name and the suffix `-spot`. Raises InvalidInput if `profiles` has neither.
    """
    if counts is None:
        return {}
    if not isinstance(counts, dict) or len(counts) > MAX_PROFILES:
        raise bad(field, counts, "a map of counts by machine profile")
    parsed: dict[str, int] = {}
    for key, count in counts.items():
        profile = key.strip().lower()
        profile = profile if profile in profiles else f"{profile}-spot"
        path = f"{field}.{key[:60]}"
        if profile not in profiles:
            raise InvalidInput.at(
                path,
                f"no such machine profile; there are {', '.join(sorted(profiles))}",
                reason="gpu_not_configured",
                extras={"status": "gpu_not_configured", "gpu": key[:60], "configured_gpu_types": sorted(profiles)},
            )
        if profile in parsed:
            raise InvalidInput.at(path, f"the machine profile {profile} has two counts")
        parsed[profile] = integer(path, count, f"a whole number from 1 to {MAX_GPUS}", 1, MAX_GPUS)
    return dict(sorted(parsed.items()))


async def _written(work: Awaitable[T]) -> T:
    """Return the result of a change of the pools. Raises QueueUnavailable if the broker does not store the change."""
    try:
        return await work
    except BrokerError as error:
        _logger.warning("the broker did not store a change of a pool: %s", error)
        raise QueueUnavailable("the broker did not store the change of the pool: try again") from error


def _named(request: Request) -> str:
    name = request.path_params["name"]
    try:
        return topology.pool_name(name)
    except ValueError:
        raise not_found(name) from None


def _profiles(gateway: Gateway) -> set[str]:
    """Return the machine profiles in SIE_GATEWAY_CONFIGURED_GPUS; if it is empty, those of the workers and of this
    gateway.
    """
    settings = gateway.settings
    if settings.gateway_configured_gpus:
        return {profile.strip().lower() for profile in settings.gateway_configured_gpus}
    return {settings.profile, *(beat.machine_profile for beat, _ in gateway.fleet.workers())}


async def create(gateway: Gateway, request: Request) -> Response:
    """Create a reservation. If the caller already has a reservation of this name, change and renew this reservation."""
    catalogue = gateway.inference.catalogue
    spec = parse_spec(await json_of(request), _profiles(gateway), catalogue)
    grant = call_of(request).grant
    await _written(gateway.pools.create(spec, grant))
    return json_response(gateway.pools.pool(spec.name, grant), 201)


async def pools(gateway: Gateway, request: Request) -> Response:
    return json_response(Pools(pools=gateway.pools.pools(call_of(request).grant)))


async def assignment(gateway: Gateway, request: Request) -> Response:
    worker, grant = request.query_params.get("worker", ""), call_of(request).grant
    served = gateway.pools.assigned(worker)
    if grant.name != WORKERS_NAME and not all(map(gateway.pools.visible(grant), served)):
        raise PoolNotFound(
            "this worker serves a reservation of another API key, so its pools are not shown", param="worker"
        )
    pinned = gateway.pools.pinned(served)
    return json_response(Assignment(worker=worker, pools=list(served), pinned_models=pinned or UNSET))


async def pool(gateway: Gateway, request: Request) -> Response:
    return json_response(gateway.pools.pool(_named(request), call_of(request).grant))


async def delete(gateway: Gateway, request: Request) -> Response:
    await _written(gateway.pools.delete(_named(request), call_of(request).grant))
    return json_response(PoolDeleted(message="Pool deleted"))


async def renew(gateway: Gateway, request: Request) -> Response:
    renewed = await _written(gateway.pools.renew(_named(request), call_of(request).grant))
    return json_response(PoolRenewed(message="Pool renewed", expires_at=None if renewed is None else renewed.expires_s))
