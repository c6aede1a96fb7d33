"""Which pools a worker serves. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sie_contracts.errors import InvalidInput, PoolNotFound
from sie_contracts.messages import Heartbeat

PATH = "/v1/pools/assignments"


def assigned(worker: str, workers: Iterable[Heartbeat], reserved: Mapping[str, str]) -> tuple[str, ...]:
    """The pools of `worker`: the reservation that has it, else its own. `reserved`: worker to reservation.

    Raises InvalidInput without a name, and PoolNotFound for a worker that no heartbeat has named: what it serves is not known yet, which is
    not the same as nothing.
    """
    if not worker:
        raise InvalidInput("worker: a worker's id is needed", param="worker")
    own = next((beat.pool for beat in workers if beat.worker == worker), None)
    if own is None:
        raise PoolNotFound(f"no worker {worker[:70]!r} has been heard of", param="worker")
    return (reserved.get(worker, own),)
