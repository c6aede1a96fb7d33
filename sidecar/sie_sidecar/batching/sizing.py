"""Size of a batch: the largest number of entries with which no entry becomes late. The functions are pure: times and
costs are arguments, the result is a number.

    entries of a full batch, each with its remaining time ──┐
    times of batches of this model (`BatchTimes`) ──────────────┴──► number of entries that run now, at least the first

A batch may take the part SHARE of an entry's remaining time; the other part is for errors of the prediction. Entries
with enough time for the full batch do not change its size. A smaller batch costs all other entries time, because each
batch has a fixed time. So two rules limit the effect of one entry:

* Entries with a share x of the cost of the full batch reduce its tokens per second by at most x / 2. So all entries
  together reduce them by at most half.
* An entry that would be late in the smaller batch as well is not considered.

A batch that is sent while another one runs waits at the device. An entry that arrives in this time waits for both
batches before its own batch runs: three batches. If a budget is shorter than three batches with a margin for errors, it
`binds`: a batch is then sealed at most LEAD_S before the device is free.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from sie_contracts.models.costs import AHEAD_SHARE, BatchTimes
from sie_contracts.settings import Settings

SHARE = 0.4  # part of an entry's remaining time that a batch may take: about two batches fit into the remaining time
MAX_LOSS = 0.5  # greatest loss of tokens per second, if all entries of the full batch need a smaller one
LEAD_S = 0.01  # seconds; enough time to have the next batch at the device when the running batch ends
# seconds: while the time of a full batch is unknown, an entry with a shorter budget gets a small batch
UNKNOWN_S = 10.0


class Ask(NamedTuple):
    """Needs of an entry: its cost in tokens of short texts (`costs`), the seconds from the start of the batch to its
    deadline, and the seconds of budget that it had when it was published.
    """

    cost: float
    left_s: float
    budget_s: float


def fitting(asks: Sequence[Ask], times: BatchTimes) -> int:
    """Return the number of entries that run in the next batch: the first ones of these, at least one. Together, the
    given entries fill a batch. They are sorted so that a smaller batch has the first ones.
    """
    if len(asks) < 2:
        return len(asks)
    if not times.is_growth_known and min(ask.budget_s for ask in asks) > UNKNOWN_S:
        return len(asks)
    if not times.is_known:
        return 1
    ends = list(itertools.accumulate(ask.cost for ask in asks))
    full_s = times.seconds(ends[-1])
    asking = [ask for ask in asks if SHARE * ask.budget_s < full_s and times.seconds(ask.cost) <= ask.left_s]
    return max(1, bisect_right(ends, _cost(asking, ends[-1], times))) if asking else len(asks)


def binds(asks: Sequence[Ask], times: BatchTimes) -> bool:
    """Return True if a batch takes more than AHEAD_SHARE of an entry's budget, so that entries that arrive after it was
    sealed would be late. The batch is formed from these entries, or it is the mean of the last batches. While no times
    are known, return True if any entry has a short budget.
    """
    if not times.is_known:
        return any(ask.budget_s <= UNKNOWN_S for ask in asks)
    batch_s = max(times.mean_s, times.seconds(sum(ask.cost for ask in asks)))
    return any(AHEAD_SHARE * ask.budget_s < batch_s for ask in asks)


def _cost(asking: Sequence[Ask], full: float, times: BatchTimes) -> float:
    """Return the cost of the smallest batch that entries need, that they are allowed to need, and in which they would
    be in time.
    """
    smallest_cost = full
    asking_cost = 0.0
    for cost, left_s, _ in sorted(asking, key=lambda ask: ask.left_s):
        fitting_cost = times.tokens(SHARE * left_s)
        if fitting_cost >= smallest_cost:
            break  # later entries have more time
        asking_cost += cost
        smallest = max(fitting_cost, times.efficient(full, MAX_LOSS * asking_cost / full))
        if smallest < smallest_cost and times.seconds(smallest) <= left_s:
            smallest_cost = smallest
    return smallest_cost


class DeviceForecast:
    """Forecast of the time when a device of `lanes` lanes has finished the batches that were sent to it. The class has
    no clock: times are arguments. Each batch at the device has a unique number.
    """

    def __init__(self) -> None:
        self._sent: dict[int, float] = {}  # predicted seconds by batch
        self._free_s = 0.0

    def sent(self, batch: int, seconds: float, now_s: float, lanes: int) -> None:
        """Add a batch that was sent, with its predicted time."""
        self._free_s = max(now_s, self._free_s) + seconds / lanes
        self._sent[batch] = seconds

    def ended(self, batch: int, now_s: float, lanes: int) -> None:
        """Remove a batch that has ended or failed: the next batch begins now."""
        if self._sent.pop(batch, None) is not None:
            self._free_s = now_s + sum(self._sent.values()) / lanes

    def busy_s(self, now_s: float, lanes: int) -> float:
        """Return the seconds until a batch that is sent now would begin."""
        return max(0.0, self._free_s - now_s) if len(self._sent) >= lanes else 0.0


WINDOW = 128  # number of answers from which the median is computed
WINDOW_S = 10.0  # seconds; older answers do not count
EVERY = 16  # answers between two computations of the median


class Quantum:
    """Time for which deliveries are gathered, between `shortest_s` and `longest_s`. If the median time at the worker is
    `target_p50_s` or more, it is `shortest_s`. It grows with the distance of the median below the target. Without
    recent answers it is `shortest_s`.
    """

    def __init__(self, shortest_s: float, longest_s: float, target_p50_s: float) -> None:
        self.shortest_s = shortest_s
        self._longest_s = longest_s
        self._target_p50_s = target_p50_s
        self._answers: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._since = 0
        self.p50_s: float | None = None

    def answered(self, at_worker_s: float, now_s: float) -> None:
        """Record the time from delivery to answer of one work item."""
        if self._answers and now_s - self._answers[-1][0] > WINDOW_S:
            self._answers.clear()
            self.p50_s = None
        self._answers.append((now_s, at_worker_s))
        self._since += 1
        if self.p50_s is None or self._since >= EVERY:
            self._since = 0
            self.p50_s = statistics.median(taken_s for at_s, taken_s in self._answers if now_s - at_s <= WINDOW_S)

    def seconds(self, now_s: float) -> float:
        """Return the quantum at this time."""
        if self.p50_s is None or now_s - self._answers[-1][0] > WINDOW_S:
            return self.shortest_s
        headroom = max(0.0, 1.0 - self.p50_s / self._target_p50_s)
        return self.shortest_s + headroom * (self._longest_s - self.shortest_s)

    def until_s(self, began_s: float, last_s: float) -> float:
        """Return the time when a gathering ends that began at `began_s` and had its last delivery at `last_s`, even if
        more deliveries are expected.
        """
        return min(began_s + self.seconds(last_s), last_s + self.shortest_s)


def quantum_of(settings: Settings) -> Quantum:
    """Build the quantum from the settings."""
    return Quantum(
        settings.adaptive_min_quantum_ms / 1000,
        settings.adaptive_max_quantum_ms / 1000,
        settings.adaptive_target_p50_ms / 1000,
    )


MEMORY_S = 10.0  # seconds of busy time after which the weight of a batch is 1/e


class Rate:
    """Tokens per second, while at least one batch is at the adapter. If batches overlap, in several lanes or because
    they were sent early, the time counts once.

    The weights of tokens and busy time decrease together, so a batch counts by its time. The rate is measured with
    batches as they are formed now: an idle worker forms small ones, and its rate is lower than the device allows.
    """

    def __init__(self) -> None:
        self._running = 0
        self._since_s = 0.0
        self._tokens = 0.0
        self._busy_s = 0.0

    @property
    def running(self) -> int:
        return self._running

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second; 0 until a batch has ended."""
        return self._tokens / self._busy_s if self._tokens and self._busy_s else 0.0

    def sent(self, now_s: float) -> None:
        """Record that a batch is at the adapter."""
        if self._running == 0:
            self._since_s = now_s
        self._running += 1

    def ended(self, tokens: int, now_s: float) -> None:
        """Record the end of a batch, with its tokens. For a failed batch 0 tokens are recorded, but its time counts."""
        spent_s = now_s - self._since_s
        decay = math.exp(-spent_s / MEMORY_S)
        self._tokens = self._tokens * decay + tokens
        self._busy_s = self._busy_s * decay + spent_s
        self._since_s = now_s
        self._running -= 1
