"""How long deliveries are gathered before they are tokenised as one call. Pure: the caller has the clock.

    time at the worker of what was answered ──► median ──► quantum, between the two bounds
    deliveries of this gathering, and whether the broker told of more ──► until when it goes on

A gathering lasts while more is on its way: for the quantum at most, and no longer than the shortest quantum without a
delivery, since what the broker told of may have gone to another worker. Where nothing is on its way there is none, so
an idle system waits for nothing.
"""

from __future__ import annotations

import statistics
from collections import deque

from sie_contracts.settings import Settings

WINDOW = 128  # answers whose median counts
WINDOW_S = 10.0  # an older answer says nothing about the load now
EVERY = 16  # answers between two medians


class Quantum:
    """Between `shortest_s` and `longest_s`: the shortest where the median time at the worker is at `target_p50_s` or
    above, and the longer the further it is below. Without answers to judge by it is the shortest.
    """

    def __init__(self, shortest_s: float, longest_s: float, target_p50_s: float) -> None:
        self.shortest_s = shortest_s
        self._longest_s = longest_s
        self._target_p50_s = target_p50_s
        self._answers: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._since = 0
        self.p50_s: float | None = None

    def answered(self, at_worker_s: float, now_s: float) -> None:
        """A work item was answered so long after it was delivered."""
        if self._answers and now_s - self._answers[-1][0] > WINDOW_S:
            self._answers.clear()
            self.p50_s = None
        self._answers.append((now_s, at_worker_s))
        self._since += 1
        if self.p50_s is None or self._since >= EVERY:
            self._since = 0
            self.p50_s = statistics.median(taken_s for at_s, taken_s in self._answers if now_s - at_s <= WINDOW_S)

    def seconds(self, now_s: float) -> float:
        """The quantum now."""
        if self.p50_s is None or now_s - self._answers[-1][0] > WINDOW_S:
            return self.shortest_s
        headroom = max(0.0, 1.0 - self.p50_s / self._target_p50_s)
        return self.shortest_s + headroom * (self._longest_s - self.shortest_s)

    def until_s(self, began_s: float, last_s: float) -> float:
        """When a gathering ends that began at `began_s` and had its last delivery at `last_s`, though
        more is expected.
        """
        return min(began_s + self.seconds(last_s), last_s + self.shortest_s)


def quantum_of(settings: Settings) -> Quantum:
    """As the settings say."""
    return Quantum(
        settings.adaptive_min_quantum_ms / 1000,
        settings.adaptive_max_quantum_ms / 1000,
        settings.adaptive_target_p50_ms / 1000,
    )
