"""Reads inputs that are too large for a message from the payload store. The bytes in memory are limited. A separate
task reads the inputs of each work item, so that other work does not wait.

    delivery with the key of an object ──► reserve memory ──► read the object, with retries until the request's
    deadline ──► whole work item
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from sie_contracts.errors import UNDECODABLE, InternalFailure, QueueUnavailable, ResourceExhausted
from sie_contracts.wire import messages
from sie_contracts.wire.messages import WorkItem
from sie_sidecar.in_flight import InFlight
from sie_store.object_stores import StoreError
from sie_store.payloads import PayloadMissing, PayloadStore

# maximum bytes of inputs in memory. An input larger than this is read only while no other input is in memory
MAX_BYTES = 512 << 20
ATTEMPT_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
# the request fails after this many attempts that do not find the object; a shared folder may show a new file late
MAX_MISSES = 3
_logger = logging.getLogger("sie.sidecar.fetching")


class PayloadFetching:
    """Reads inputs from the payload store. `held_bytes`: bytes of inputs in memory now."""

    def __init__(self, store: PayloadStore, clock: Callable[[], float], max_bytes: int = MAX_BYTES) -> None:
        self.held_bytes = 0
        self._store = store
        self._clock = clock
        self._max_bytes = max_bytes
        self._freed = asyncio.Event()
        self._turn = asyncio.Lock()  # held while an item waits for memory, so that smaller items do not overtake it

    async def fetch(self, flight: InFlight) -> None:
        """Read the inputs and the query of `flight`. They stay in memory until `let_go`. Raises QueueUnavailable,
        ResourceExhausted, InternalFailure.
        """
        try:
            await self._fetch(flight)
        except BaseException:
            self.let_go(flight)
            raise

    async def _fetch(self, flight: InFlight) -> None:
        item, pause_s, misses = flight.item, FIRST_PAUSE_S, 0
        while not flight.settled:
            try:
                left_s = flight.deadline_s - self._clock()
                if not flight.payload_bytes:
                    size = await self._store.size(item.payload, max(0.05, min(ATTEMPT_S, left_s)))
                    await self._reserve_memory(flight, size)
                left_s = flight.deadline_s - self._clock()
                data = await self._store.get(item.payload, max(0.05, min(ATTEMPT_S, left_s)))
                flight.item = _whole(item, data)
                return
            except StoreError as error:
                misses += isinstance(error, PayloadMissing)
                if misses >= MAX_MISSES or self._clock() + pause_s >= flight.deadline_s:
                    _logger.error(
                        "request %s: its inputs could not be read from the payload store: %s", item.request, error
                    )
                    raise QueueUnavailable(
                        "the inputs of this request could not be read from the payload store: try again later"
                    ) from error
            await asyncio.sleep(pause_s)  # no busy loop while the store is unreachable
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _reserve_memory(self, flight: InFlight, size: int) -> None:
        try:
            async with asyncio.timeout(max(0.0, flight.deadline_s - self._clock())), self._turn:
                while self.held_bytes and self.held_bytes + size > self._max_bytes:
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError as error:
            raise ResourceExhausted(
                "the worker's memory for large inputs was in use by other requests until the deadline: try again"
            ) from error
        flight.payload_bytes = size
        self.held_bytes += size

    def let_go(self, flight: InFlight) -> None:
        """Drop the inputs of `flight`, and free their memory. The work item must not run after this call."""
        if flight.payload_bytes:
            flight.item = msgspec.structs.replace(flight.item, inputs=(), query=None)
            self.held_bytes -= flight.payload_bytes
            flight.payload_bytes = 0
            self._freed.set()


def _whole(item: WorkItem, data: bytes) -> WorkItem:
    try:
        payload = messages.decode_payload(data)
    except UNDECODABLE as error:
        raise InternalFailure("the stored inputs of this request cannot be read") from error
    if len(payload.inputs) != item.count:
        raise InternalFailure(f"{len(payload.inputs)} inputs are stored for a chunk of {item.count} inputs")
    return msgspec.structs.replace(item, inputs=payload.inputs, query=payload.query)
