"""First stage of a worker: it decodes deliveries to work items, and gathers work items that arrive together in groups,
which are tokenised together. It drops cancelled work items.

    delivery ──► lease ──► InFlight ──► gathered ──► groups that can be tokenised in one call (`groups`)
                   └──► message delivered again after its lease ended, work item still in flight: renew the lease
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from sie_broker import CoreMessage, Delivery
from sie_contracts.errors import UNDECODABLE, InternalFailure
from sie_contracts.wire import messages
from sie_runtime.clock import BrokerClock
from sie_sidecar import spans
from sie_sidecar.batch import BatchLimits, Quantum
from sie_sidecar.dispatch import DeviceQueues
from sie_sidecar.in_flight import InFlight, Inventory
from sie_sidecar.metrics import SidecarMetrics
from sie_sidecar.settle import Leases, Settle

if TYPE_CHECKING:
    from sie_runtime.spans import Tracer

CHARACTERS_PER_TOKEN = 4  # a gateway estimates the tokens of a text as its characters divided by this number
# a work item counts as late only after its time limit plus the possible error of the broker's clock plus these seconds
LATE_S = 0.25
_logger = logging.getLogger("sie.sidecar.intake")


class WorkIntake:
    """Accepts deliveries of the broker, and gathers work items for tokenising."""

    def __init__(
        self,
        leases: Leases,
        inventory: Inventory,
        queues: DeviceQueues,
        settle: Settle,
        broker_clock: BrokerClock,
        quantum: Quantum,
        metrics: SidecarMetrics,
        tracer: Tracer | None,
    ) -> None:
        self._leases = leases
        self._inventory = inventory
        self._queues = queues
        self._settle = settle
        self._broker_clock = broker_clock
        self._quantum = quantum
        self._metrics = metrics
        self._tracer = tracer
        self._limits = queues.limits
        self.arrived: list[InFlight] = []  # accepted work items that are not gathered yet
        self._arrival = asyncio.Event()

    def accept(self, delivery: Delivery) -> InFlight | None:
        """Return the work item of a delivery; None if the message cannot be decoded or the item is in flight here."""
        now_s = time.monotonic()
        self._metrics.deliveries.labels("true" if delivery.delivered > 1 else "false").inc()
        lease = self._leases.hold(delivery)
        if lease is None:
            # not logged at INFO: after a restart of the broker, every work item in flight here is delivered again
            _logger.debug(
                "a work item in flight here was delivered again (delivery %d): its lease had ended and is renewed",
                delivery.delivered,
            )
            return None
        try:
            item = messages.decode_work(delivery.data)
        except UNDECODABLE as error:
            _logger.error("a message could not be decoded as a work item and becomes a dead letter: %s", error)
            self._settle.bury(lease, InternalFailure("not a work item", reason="undecodable"))
            return None
        # the time limit counts from the publication of the message, also after a redelivery; while the clock of the
        # broker is not measured, from now
        left_s, doubt_s, margin_s = item.budget_ms / 1000, 0.0, self._broker_clock.margin_s
        if math.isfinite(margin_s):
            left_s -= self._broker_clock.now_s() - delivery.sent_s
            doubt_s = margin_s + LATE_S
        span = spans.of_work(self._tracer, delivery, item) if self._tracer is not None else None
        flight = InFlight(
            lease,
            item,
            now_s,
            now_s + left_s + doubt_s,
            span=span,
            due_s=now_s + left_s,
            budget_s=item.budget_ms / 1000,
            bulk=item.priority == "bulk",
        )
        self._inventory.add(flight)
        self.arrived.append(flight)
        self._arrival.set()
        return flight

    async def on_cancel(self, message: CoreMessage) -> None:
        """Decode a gateway's message about cancelled requests, and drop their work items."""
        try:
            notice = messages.decode_cancel(message.data)
        except UNDECODABLE as error:
            _logger.error("a message about cancelled requests was ignored, because it could not be decoded: %s", error)
        else:
            self.cancel(notice.requests)

    def cancel(self, requests: Collection[str]) -> None:
        """Drop the work items of these requests. A running work item is dropped only if it generates text."""
        dropped = [
            flight
            for flight in self._inventory
            if flight.item.request in requests
            and flight.stage != "settled"
            and (flight.stage != "running" or self._queues.queue_of(flight).abandon(flight))
        ]
        for flight in dropped:
            if flight.hosted is not None:
                self._queues.queue_of(flight).withdraw(flight)
            self._settle.cancel(flight)
        if dropped:
            self._queues.wake()

    def gathering(self) -> tuple[float | None, float]:
        """Return two values in seconds: the median time of recent work items from delivery to answer (None before
        the first answer), and the time for which the sidecar gathers deliveries now.
        """
        return self._quantum.p50_s, self._quantum.seconds(time.monotonic())

    async def next(self, is_tokenising: Callable[[], bool], more_expected: Callable[[], bool]) -> list[InFlight]:
        """Wait for a delivery, then a short time for more deliveries. Return the work items that are not settled. The
        wait ends when the work items fill a batch, or when two conditions hold: no earlier work is being tokenised
        (`is_tokenising`), and the broker will send no more messages now (`more_expected` is false).
        """
        await self._arrival.wait()
        began_s = last_s = time.monotonic()
        while (left_s := self._quantum.until_s(began_s, last_s) - time.monotonic()) > 0 and self._is_more_coming(
            is_tokenising, more_expected
        ):
            self._arrival.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._arrival.wait()
            except TimeoutError:
                break
            last_s = time.monotonic()
        self._arrival.clear()
        arrived, self.arrived = [flight for flight in self.arrived if not flight.settled], []
        if arrived:  # empty if all work items were cancelled
            self._metrics.gathered.observe(len(arrived))
        return arrived

    def groups(self, flights: Sequence[InFlight]) -> list[list[InFlight]]:
        """Return the work items in groups. Each group can be tokenised in one call. With several devices, a group fits
        into one batch, because each group can run on another device.
        """
        groups: dict[tuple[str | int, ...], list[InFlight]] = defaultdict(list)
        for flight in flights:
            item, options = flight.item, flight.item.options
            cut = (options.truncate, options.max_tokens, options.document_tokens)
            groups[item.model, item.profile, item.config_revision, item.operation, options.lora, *cut].append(flight)
        if len(self._queues.all) == 1:
            return list(groups.values())
        return [part for group in groups.values() for part in batch_parts(group, self._limits)]

    def _is_more_coming(self, is_tokenising: Callable[[], bool], more_expected: Callable[[], bool]) -> bool:
        """Return True if waiting is useful: the gathered work items do not fill a batch, and the broker has more
        messages to send or the tokeniser is busy with earlier work.
        """
        cost, pending = 0, dict[str, int]()
        for flight in self.arrived:
            cost += flight.item.cost
            pending[flight.lease.delivery.consumer] = flight.lease.delivery.pending
        if len(self.arrived) >= self._limits.requests or cost >= self._limits.cost:
            return False
        return is_tokenising() or (any(pending.values()) and more_expected())


def batch_parts(group: list[InFlight], limits: BatchLimits) -> list[list[InFlight]]:
    """Split a group into parts that each fit into one batch, by the costs that the gateway has estimated. A work item
    that is larger than a batch is a part of its own.
    """
    parts: list[list[InFlight]] = []
    cost = 0
    for flight in group:
        if not parts or len(parts[-1]) >= limits.requests or cost + flight.item.cost > limits.cost:
            parts.append([])
            cost = 0
        parts[-1].append(flight)
        cost += flight.item.cost
    return parts
