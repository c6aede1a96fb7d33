"""Whether the workers that somebody looks at are there: asked each second, while a page is open.

A killed worker's heartbeats are missed only after SIE_HEARTBEAT_TIMEOUT_MS, but the broker knows at once that nobody
listens on its subject any more. This is for people: where work goes is the fleet's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from sie_broker import BrokerError, Bus, NoResponder
from sie_contracts import topology
from sie_runtime.process import Stop

EVERY_S = 1.0
MAX_ASKED = 16  # in one round, the others take turns: each question costs 0.1 ms
LOOKED_S = 5.0  # after the last look nobody is asked any more
HEARD_S = 0.5  # the broker says within this time that nobody listens; who listens says nothing


class Pulse:
    """`gone`: workers that were looked for and are not connected. `run` belongs to one task."""

    def __init__(self, bus: Bus, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._clock = clock
        self._until_s = 0.0
        self._wanted: tuple[str, ...] = ()
        self._next = 0
        self.gone: frozenset[str] = frozenset()

    def look(self, workers: Iterable[str]) -> None:
        """Somebody looks at these, which listen while they are connected."""
        self._wanted = tuple(sorted(workers))
        self._until_s = self._clock() + LOOKED_S

    async def run(self, stop: Stop) -> None:
        """Look for them each EVERY_S until `stop`, while somebody looks."""
        while not await stop.wait_for(EVERY_S):
            wanted = self._wanted if self._clock() < self._until_s else ()
            first = self._next % max(1, len(wanted))
            asked = (wanted[first:] + wanted[:first])[:MAX_ASKED]
            self._next = first + len(asked)
            is_gone = await asyncio.gather(*(self._is_gone(worker) for worker in asked))
            found = {worker for worker, gone in zip(asked, is_gone, strict=True) if gone}
            self.gone = frozenset(found | (self.gone & set(wanted).difference(asked)))

    async def _is_gone(self, worker: str) -> bool:
        try:
            await self._bus.request(topology.assigned_subject(worker), b"", HEARD_S)
        except NoResponder:
            return True
        except BrokerError:  # it is heard, or the broker is away, which others report
            return False
        return False
