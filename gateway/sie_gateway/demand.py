"""The record that somebody waits for a lane: one key per lane, which counts for DEMAND_LIFE_S and is the same at every
gateway.

Work of a request that ended is withdrawn from the queue, so without this record nobody would start a worker for the
client's next try.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from sie_broker import BrokerError, Store, Write
from sie_broker.record import Bucket
from sie_contracts import messages, records, topology
from sie_contracts.records import Demand
from sie_contracts.topology import Lane
from sie_runtime.failpoints import failpoint
from sie_runtime.process import Stop

DEMAND_LIFE_S = 60.0
AGAIN_S = 5.0  # a record that is younger is not written again
_RETRY_S = 1.0
_logger = logging.getLogger("sie.gateway.demand")


def is_live(at_s: float, now_s: float) -> bool:
    """Whether a record of this time still counts, by the broker's clock. One from a clock ahead of ours
    counts as new.
    """
    return now_s - at_s < DEMAND_LIFE_S


class DemandRecords:
    """`now_s` is the broker's time. One task runs `run`, the only writer of this gateway; `note` never waits."""

    def __init__(self, broker: Store, now_s: Callable[[], float], *, storage: str, replicas: int) -> None:
        self._now_s = now_s
        self._bucket = Bucket(
            broker, topology.DEMAND_BUCKET, storage=storage, replicas=replicas, max_age_s=2 * DEMAND_LIFE_S
        )
        self._noted: dict[Lane, float] = {}  # lanes are those of the catalogue and the machine profiles
        self._written: dict[Lane, float] = {}
        self._wake = asyncio.Event()

    def note(self, lane: Lane) -> None:
        """Somebody waits for this lane now."""
        now_s = self._now_s()
        if not -AGAIN_S < now_s - self._written.get(lane, -1e12) < AGAIN_S:
            self._noted[lane] = now_s
            self._wake.set()

    def forget(self, pool: str) -> None:
        """The pool is there no more. What was written of it goes with its age."""
        for known in (self._noted, self._written):
            for lane in [lane for lane in known if lane.pool == pool]:
                del known[lane]

    def pending(self) -> set[Lane]:
        """Lanes that this gateway noted within the life of a record."""
        now_s = self._now_s()
        return {lane for lane, at_s in {**self._written, **self._noted}.items() if is_live(at_s, now_s)}

    async def run(self, stop: Stop) -> None:
        """Write what is noted until `stop`. What cannot be written stays noted and is tried again."""
        while not await stop.wait_woken(self._wake):
            try:
                await self.write()
            except BrokerError as error:
                _logger.warning("demand is not recorded: %s", error)
                self._wake.set()
                await stop.wait_for(_RETRY_S)

    async def write(self) -> None:
        """Write all that is noted. Raises BrokerError."""
        while self._noted:
            lane, at_s = next(iter(self._noted.items()))
            failpoint("gateway.before_demand")
            await self._bucket.write([Write(topology.lane_key(lane), messages.encode(Demand(at_s)))])
            self._written[lane] = at_s
            if self._noted.get(lane) == at_s:
                del self._noted[lane]

    async def is_wanted(self, lane: Lane) -> bool:
        """Whether any gateway recorded demand that still counts. Raises BrokerError."""
        entry = await self._bucket.get(topology.lane_key(lane))
        if entry is None or entry.value is None:
            return False
        try:
            return is_live(records.decode_demand(entry.value).at_s, self._now_s())
        except msgspec.DecodeError as error:
            _logger.warning("the demand of %s could not be read: %s", lane, error)
            return False
