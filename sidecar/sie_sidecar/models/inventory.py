"""All work items in flight, what they cost, and what they keep: credit, and the models that must not be evicted. State
of the worker's loop: no I/O.

delivery ──► add ──► keep_model (from now on hosting counts it) ──► count (what waits for the device) ──► let_model_go
──► remove
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from sie_sidecar.device.in_flight import InFlight
from sie_sidecar.intake.leases import Lease
from sie_sidecar.models.hosting import Hosting
from sie_sidecar.models.models import ModelState


class Inventory:
    """Every work item from its delivery until it is removed."""

    def __init__(
        self,
        hosting: Hosting,
        on_less: Callable[[], None],
        on_free: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """`on_less` is called when less waits for the device, `on_free` with a consumer whose item kept others back."""
        self._hosting = hosting
        self._on_less = on_less
        self._on_free = on_free
        self._clock = clock
        self._all: dict[Lease, InFlight] = {}
        self._loads = ([0, 0], [0, 0])  # cost and work items, interactive and bulk, of what is not at the device yet
        self._coming: Counter[str] = Counter()  # deliveries of each model of which hosting does not know yet

    def __iter__(self) -> Iterator[InFlight]:
        """In the order of delivery; what changes meanwhile changes nothing here."""
        return iter(list(self._all.values()))

    def add(self, flight: InFlight) -> None:
        self._all[flight.lease] = flight
        self._coming[flight.item.model] += 1
        self.count(flight, max(1, flight.item.cost))

    def is_coming(self, model: str) -> bool:
        """Whether something of it was delivered that hosting does not count yet."""
        return model in self._coming

    def keep_model(self, flight: InFlight, hosted: ModelState) -> None:
        """It needs this model, which must not be evicted from now on."""
        flight.hosted, flight.entry = hosted, hosted.resolved.entry
        self._hosting.take(hosted)
        self._arrived(flight)
        hosted.came_in(flight.item.cost, flight.received_s)

    def _arrived(self, flight: InFlight) -> None:
        self._coming[flight.item.model] -= 1
        if not self._coming[flight.item.model]:
            del self._coming[flight.item.model]

    def let_model_go(self, flight: InFlight) -> None:
        """It needs its model no more."""
        if flight.hosted is not None:
            self._hosting.let_go(flight.hosted)
            if flight.hosted.state != "loaded":  # its load failed: the next one to wait for it may come
                self._on_free(flight.lease.delivery.consumer)
            flight.hosted = None

    def remove(self, flight: InFlight) -> None:
        """It is settled, and its message with it."""
        if flight.span is not None:
            flight.span.end()
        del self._all[flight.lease]
        if flight.entry is None:
            self._arrived(flight)
            # it stood for others that its model's load would have served
            self._on_free(flight.lease.delivery.consumer)
        self.let_model_go(flight)

    def made_room(self, flight: InFlight) -> None:
        """It is not written any more: one more of its consumer may come."""
        self._on_free(flight.lease.delivery.consumer)

    def count(self, flight: InFlight, cost: int) -> None:
        """So many of its tokens wait for the device; 0 once it is there, or over."""
        if cost < flight.counted:
            self._on_less()
        load = self._loads[flight.item.priority == "bulk"]
        load[0] += cost - flight.counted
        load[1] += (cost > 0) - (flight.counted > 0)
        flight.counted = cost

    def load(self, *, bulk: bool) -> tuple[int, int]:
        """The tokens and the work items that wait for the device, those of bulk work only if asked for."""
        (cost, items), (bulk_cost, bulk_items) = self._loads
        return cost + bulk * bulk_cost, items + bulk * bulk_items

    def ages(self) -> tuple[int, dict[str, float]]:
        """Sum the tokens of all work, estimated until it is tokenised, and give for each model the seconds since its
        oldest delivery.
        """
        cost, oldest_s = 0, dict[str, float]()
        now_s = self._clock()
        for flight in self._all.values():
            cost += sum(row.cost for row in flight.rows) or flight.item.cost
            if flight.hosted is not None:
                oldest_s[flight.hosted.name] = max(oldest_s.get(flight.hosted.name, 0.0), now_s - flight.received_s)
        return cost, oldest_s

    def pending_inputs(self) -> dict[str, int]:
        """Inputs that are in flight and not answered, by model."""
        counts: Counter[str] = Counter()
        for flight in self._all.values():
            if flight.hosted is not None and not flight.settled:
                counts[flight.hosted.name] += flight.item.count or len(flight.item.inputs)
        return counts
