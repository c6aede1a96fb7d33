"""Payload store for inputs that are too large for a message. If a chunk (part of a request) is too large, the gateway
writes its inputs to the store, and sends a message with their key. The gateway removes old payloads.

    chunk too large for a message ──► inputs and query ──put──► key ──► message with the key, without inputs and query
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from sie_contracts.errors import QueueUnavailable
from sie_contracts.settings import SettingError, Settings
from sie_contracts.wire import messages
from sie_contracts.wire.messages import Payload, WorkItem
from sie_gateway.metrics import Metrics
from sie_runtime.process import Stop, Trouble
from sie_store.object_stores import StoreError, StoreFull
from sie_store.payloads import PayloadStore

_logger = logging.getLogger("sie.gateway.queue")
TTL_MARGIN_S = 3600
PUT_TIMEOUT_S = 30.0
SWEEP_TIMEOUT_S = 120.0
LONGEST_PAUSE_S = 600.0


def life_s(settings: Settings, max_age_s: float) -> int:
    """Return the seconds for which a payload is stored: SIE_PAYLOAD_TTL_S, or if unset, TTL_MARGIN_S more than
    `max_age_s`. `max_age_s`: longest life of a message with the payload's key. Raises SettingError if SIE_PAYLOAD_TTL_S
    is not longer than `max_age_s`.
    """
    ttl_s = settings.payload_ttl_s
    if ttl_s is None:
        return int(max_age_s) + TTL_MARGIN_S
    if ttl_s <= max_age_s:
        message = (
            f"got {ttl_s}, but a message may be delivered again for {max_age_s:.0f} s, and its inputs must be stored "
            "for longer: set a larger value"
        )
        raise SettingError("SIE_PAYLOAD_TTL_S", message)
    return ttl_s


@dataclass(eq=False)
class Offload:
    """Writes large inputs to the payload store and removes old payloads. `wall_clock`: seconds since 1970."""

    store: PayloadStore
    life_s: int
    metrics: Metrics
    wall_clock: Callable[[], float] = time.time

    async def stored(self, item: WorkItem, timeout_s: float) -> WorkItem:
        """Store inputs and query of a work item. Return the item with their key. Raises QueueUnavailable."""
        data = await asyncio.to_thread(messages.encode_in_pieces, Payload(item.inputs, item.query))
        try:
            key = await self.store.put(data, period=int(self.wall_clock() // self.life_s), timeout_s=timeout_s)
        except StoreError as error:
            _logger.warning("request %s: %d bytes of input could not be stored: %s", item.request, len(data), error)
            if isinstance(error, StoreFull):
                message = "the payload store, where large inputs are stored, is full: send fewer items in a request"
                raise QueueUnavailable(message, reason="store_full") from error
            raise QueueUnavailable("large inputs could not be written to the payload store: try again later") from error
        self.metrics.payload_offloads.inc()
        return msgspec.structs.replace(item, inputs=(), query=None, payload=key, count=len(item.inputs))

    async def sweep(self) -> int:
        """Remove old payloads, whose messages have all expired, and return their number. One call removes a limited
        number of payloads. Several gateways may call this method at the same time. Raises StoreError.
        """
        return await self.store.sweep(older_than_s=self.life_s, now_s=self.wall_clock(), timeout_s=SWEEP_TIMEOUT_S)

    async def run(self, stop: Stop) -> None:
        """Call `sweep` at least ten times in a payload's life. Random pauses keep gateways from sweeping together."""
        trouble = Trouble(_logger, "old payloads cannot be removed from the payload store")
        pause_s = min(LONGEST_PAUSE_S, self.life_s / 10)
        while not await stop.wait_for(pause_s * random.uniform(0.5, 1.0)):  # noqa: S311 not secret
            with trouble.logged(StoreError):
                if removed := await self.sweep():
                    _logger.info(
                        "%d payloads older than %d s were removed from the payload store", removed, self.life_s
                    )
