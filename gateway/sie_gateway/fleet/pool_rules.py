"""Pure functions that change the record of all reservations (pools that clients create), and that build the API's Pool
objects.

A function that changes the record takes the present record and returns a new record. So compare-and-set can call the
function again after a conflict. Times are seconds of the broker's clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sie_contracts.api import operations as api
from sie_contracts.errors import PoolConflict, PoolNotFound, PoolOperationForbidden, QueueUnavailable
from sie_contracts.wire import topology
from sie_contracts.wire.heartbeats import Heartbeat
from sie_contracts.wire.records import Reservation, Reservations, ReservationSpec
from sie_gateway.admission.grant import Grant

MAX_RESERVATIONS_OF_A_KEY = 16
# reasons why a reservation is not active, shown after its name
HELD_BACK = "it would take the last worker of a bundle from all other clients, which requires the scope admin"
TOO_FEW = "fewer workers are free than it requests"
HIDDEN = "reserved"  # shown in place of the name of a reservation that the client may not see
ON_THEIR_WAY = "the workers assigned to it do not serve it yet"


def shown(name: str) -> str:
    """Return the name of a pool as clients see it: the default pool is shown as `default`."""
    return "default" if name == topology.DEFAULT_POOL else name


def not_found(name: str) -> PoolNotFound:
    return PoolNotFound(f"there is no pool {shown(name)[:70]!r}, or its lease has ended", param="name")


def created(record: Reservations, spec: ReservationSpec, grant: Grant, now_s: float) -> Reservations:
    """Return the record with a reservation of this spec. If this key already has a reservation of this name, replace
    its spec and renew its lease.

    Raises PoolConflict if another key has a reservation of this name, QueueUnavailable while an earlier reservation of
    this name is being removed, PoolOperationForbidden if all keys together, or this key, have too many reservations.
    """
    name = spec.name
    present = record.pools.get(name)
    if present is not None and not grant.owns(present.owner):
        # the error shows only that the name is taken, because the reservation of another key is private
        raise PoolConflict(f"name: {name!r} is taken by a reservation of another key", param="name")
    if name in record.ended or (present is not None and now_s >= present.expires_s):
        raise QueueUnavailable(f"an earlier pool {name!r} is being removed: try again")
    if present is None and len(record.pools) >= topology.MAX_RESERVATIONS:
        raise PoolOperationForbidden(
            f"the limit is {topology.MAX_RESERVATIONS} reservations of all keys together: delete one"
        )
    own = sum(reservation.owner == grant.key for reservation in record.pools.values())
    if present is None and grant.key and own >= MAX_RESERVATIONS_OF_A_KEY:
        raise PoolOperationForbidden(
            f"this key has {own} reservations, the limit is {MAX_RESERVATIONS_OF_A_KEY}: delete one"
        )
    if present is None:
        present = Reservation(spec, now_s, now_s, owner=grant.key)
    # only a key with the scope `admin` may reserve the last worker of a bundle (`takes_last`); if a key without this
    # scope changes the spec, the permission ends
    takes_last = "admin" in grant.scopes or (present.takes_last and present.spec == spec)
    return _with(record, msgspec.structs.replace(present, spec=spec, renewed_s=now_s, takes_last=takes_last))


def renewed(record: Reservations, name: str, grant: Grant, now_s: float) -> Reservations:
    """Return the record with a renewed lease. Raises PoolNotFound, also for a reservation of another key."""
    present = live(record, name, grant, now_s)
    return _with(record, msgspec.structs.replace(present, renewed_s=max(now_s, present.renewed_s)))


def deleted(record: Reservations, name: str, grant: Grant, now_s: float) -> Reservations:
    """Return the record after the end of a reservation. Raises PoolNotFound, also for a reservation of another key."""
    live(record, name, grant, now_s)
    return without(record, name, now_s)


def expired(record: Reservations, name: str, over_s: float, now_s: float) -> Reservations:
    """Return the record without the reservation if its lease ended at or before `over_s`, otherwise unchanged."""
    present = record.pools.get(name)
    return without(record, name, now_s) if present is not None and over_s >= present.expires_s else record


def without(record: Reservations, name: str, ended_s: float | None) -> Reservations:
    """Return the record without a reservation. `ended_s`: time of the end, which stays in the record until the stream
    of the reservation is removed; None if no stream must be removed.
    """
    pools = {pool: reservation for pool, reservation in record.pools.items() if pool != name}
    return Reservations(pools, record.ended if ended_s is None else {**record.ended, name: ended_s})


def removed(record: Reservations, name: str) -> Reservations:
    """Return the record without an ended reservation whose stream was removed. Clients may use the name again."""
    return Reservations(record.pools, {pool: at_s for pool, at_s in record.ended.items() if pool != name})


def live(record: Reservations, name: str, grant: Grant, now_s: float) -> Reservation:
    """Return the reservation `name`. Raises PoolNotFound if it does not exist, if its lease has ended, or if this
    credential may not change it.
    """
    present = record.pools.get(name)
    if present is None or now_s >= present.expires_s or not grant.owns(present.owner):
        raise not_found(name)
    return present


def _with(record: Reservations, reservation: Reservation) -> Reservations:
    return msgspec.structs.replace(record, pools={**record.pools, reservation.spec.name: reservation})


def own_pool(name: str, workers: Sequence[Heartbeat]) -> api.Pool:
    """Return the Pool object of a pool that is not a reservation."""
    status = api.PoolStatus(state="active", assigned_workers=list(map(_worker, workers)))
    return api.Pool(name=shown(name), spec=api.PoolSpec(name=shown(name), gpus={}), status=status)


def reserved_pool(reservation: Reservation, workers: Sequence[Heartbeat], pending_reason: str) -> api.Pool:
    """Return the Pool object of a reservation. `pending_reason`: reason why the reservation is not active, or empty."""
    spec = msgspec.convert(reservation.spec, api.PoolSpec, from_attributes=True)
    spec = msgspec.structs.replace(
        spec,
        bundle=spec.bundle or None,
        ttl_seconds=reservation.spec.ttl_seconds,  # the integer of the record, because `convert` returns a float
    )
    status = api.PoolStatus(
        state="pending" if pending_reason else "active",
        assigned_workers=list(map(_worker, workers)),
        created_at=reservation.created_s,
        last_renewed=reservation.renewed_s,
        expires_at=reservation.expires_s,
        reason=pending_reason or msgspec.UNSET,
    )
    return api.Pool(name=reservation.spec.name, spec=spec, status=status)


def _worker(beat: Heartbeat) -> api.PoolWorker:
    return api.PoolWorker(name=beat.worker, gpu=beat.machine_profile)
