"""What a worker has taken in and not settled, and what it comes to. State of the worker's loop: no I/O.

delivery ──► add ──► known (hosting counts it) ──► count (what waits for the device) ──► remove
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from sie_sidecar.held import Held
from sie_sidecar.lease import Lease


class Inventory:
    """Every work item from its delivery until it is let go. `on_less` is called when less waits for the device."""

    def __init__(self, on_less: Callable[[], None], clock: Callable[[], float]) -> None:
        self._on_less = on_less
        self._clock = clock
        self._all: dict[Lease, Held] = {}
        self._loads = ([0, 0], [0, 0])  # cost and work items, interactive and bulk, of what is not at the device yet
        self._coming: Counter[str] = Counter()  # deliveries of each model of which hosting does not know yet

    def __iter__(self) -> Iterator[Held]:
        """In the order of delivery; what changes meanwhile changes nothing here."""
        return iter(list(self._all.values()))

    def add(self, held: Held) -> None:
        self._all[held.lease] = held
        held.coming = True
        self._coming[held.item.model] += 1
        self.count(held, max(1, held.item.cost))

    def remove(self, held: Held) -> None:
        self._all.pop(held.lease, None)

    def is_coming(self, model: str) -> bool:
        """Whether something of it was delivered that hosting does not count yet."""
        return model in self._coming

    def known(self, held: Held) -> None:
        """Hosting counts it from now on, or it is gone."""
        if held.coming:
            held.coming = False
            self._coming[held.item.model] -= 1
            if not self._coming[held.item.model]:
                del self._coming[held.item.model]

    def count(self, held: Held, cost: int) -> None:
        """So many of its tokens wait for the device; 0 once it is there, or over."""
        if cost < held.counted:
            self._on_less()
        load = self._loads[held.item.priority == "bulk"]
        load[0] += cost - held.counted
        load[1] += (cost > 0) - (held.counted > 0)
        held.counted = cost

    def load(self, *, bulk: bool) -> tuple[int, int]:
        """The tokens and the work items that wait for the device, those of bulk work only if asked for."""
        (cost, items), (bulk_cost, bulk_items) = self._loads
        return cost + bulk * bulk_cost, items + bulk * bulk_items

    def ages(self) -> tuple[int, dict[str, float]]:
        """Of all of it: its tokens, as estimated until it is tokenised, and for each model the seconds since the oldest
        was delivered.
        """
        cost, oldest_s = 0, dict[str, float]()
        now_s = self._clock()
        for held in self._all.values():
            cost += sum(row.cost for row in held.rows) or held.item.cost
            if held.hosted is not None:
                oldest_s[held.hosted.name] = max(oldest_s.get(held.hosted.name, 0.0), now_s - held.received_s)
        return cost, oldest_s

    def pending_inputs(self) -> dict[str, int]:
        """Inputs that are held and not answered, by model."""
        counts: Counter[str] = Counter()
        for held in self._all.values():
            if held.hosted is not None and not held.settled:
                counts[held.hosted.name] += held.item.count or len(held.item.inputs)
        return counts
