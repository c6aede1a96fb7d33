"""Size of a batch: the largest number of work items (tokenised) with which no work item misses its deadline. The
functions have no clock: times are arguments.

    entries of a full batch, each with its remaining time ──┐
    measured times of batches of this model (`BatchTimes`) ─┴──► number of entries that run now, at least one

A batch may take SHARE of the remaining time of each work item; the rest of that time is reserved for wrong predictions.
The budget of a work item is the whole time from its publication to its deadline. If the full batch takes at most SHARE
of the budget of a work item, this work item is not urgent: it does not make the batch smaller. A small batch is slower
per token, because each batch also takes a fixed time. So two rules limit how much urgent work items may slow down the
others:

* Urgent entries with a share x of the tokens of the full batch may lower the device's tokens per second by at most
  x / 2. So all entries together lower the tokens per second by at most half.
* An entry that would be late even in the smaller batch does not make the batch smaller.

A batch that is sent while another batch runs waits at the device. It is sealed only LEAD_S before the device is free,
so that work items that arrive until then join it. Sealed earlier, it would be smaller, and a work item that arrives
meanwhile would wait for two batches, and then for its own batch.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from sie_contracts.models.costs import BatchTimes
from sie_contracts.settings import Settings

# part of a work item's remaining time that its batch may take; a second batch of that length fits into the rest
SHARE = 0.4
# A smaller batch ends sooner, but the device computes fewer tokens per second. If all work items of a full batch are
# urgent, the smaller batch may lose at most this part of the tokens per second. If only a part x of the tokens is
# urgent, the smaller batch may lose at most x * MAX_LOSS.
MAX_LOSS = 0.5
# a batch is sealed this number of seconds before the device is predicted to be free, so that the device stays busy
LEAD_S = 0.003
# seconds of budget below which a work item counts as urgent while the time of a full batch is unknown
UNKNOWN_S = 10.0


class Ask(NamedTuple):
    """Times of a work item. `cost`: its computing time, as the number of tokens of short texts that take the same time.
    `left_s`: seconds from the start of the batch to the item's deadline. `budget_s`: seconds from the item's
    publication to its deadline.
    """

    cost: float
    left_s: float
    budget_s: float


def fitting(asks: Sequence[Ask], times: BatchTimes) -> int:
    """Return how many of `asks` run in the next batch, counted from the first, at least one. `asks`: work items of a
    full batch.
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


def _cost(asking: Sequence[Ask], full: float, times: BatchTimes) -> float:
    """Return the largest cost of a batch with which the urgent work items (`asking`) are in time. `full`: cost of the
    full batch. MAX_LOSS limits how small the batch may become. A work item that would be late even in the smaller batch
    does not make the batch smaller.
    """
    smallest_cost = full
    asking_cost = 0.0
    for cost, left_s, _ in sorted(asking, key=lambda ask: ask.left_s):
        fitting_cost = times.tokens(SHARE * left_s)
        if fitting_cost >= smallest_cost:
            break  # the work items are sorted: all further work items have more time
        asking_cost += cost
        smallest = max(fitting_cost, times.efficient(full, MAX_LOSS * asking_cost / full))
        if smallest < smallest_cost and times.seconds(smallest) <= left_s:
            smallest_cost = smallest
    return smallest_cost


class DeviceForecast:
    """Forecast of the time at which a device has finished the batches at its adapter. `batch`: number that identifies a
    batch.
    """

    def __init__(self) -> None:
        self._sent: dict[int, float] = {}  # by number of a batch at the device: its predicted seconds
        self._free_s = 0.0

    def sent(self, batch: int, seconds: float, now_s: float, lanes: int) -> None:
        """Add a batch that takes about `seconds`."""
        self._free_s = max(now_s, self._free_s) + seconds / lanes
        self._sent[batch] = seconds

    def ended(self, batch: int, now_s: float, lanes: int) -> None:
        """Remove a batch that has ended or failed. The forecast assumes that the other batches begin now."""
        if self._sent.pop(batch, None) is not None:
            self._free_s = now_s + sum(self._sent.values()) / lanes

    def busy_s(self, now_s: float, lanes: int) -> float:
        """Return the seconds until a batch would begin to run if it were sent now."""
        return max(0.0, self._free_s - now_s) if len(self._sent) >= lanes else 0.0


WINDOW = 128  # number of last answers from which `Quantum.p50_s`, the median time to answer, is computed
WINDOW_S = 10.0  # an answer that is more than this number of seconds old does not count in `Quantum.p50_s`
EVERY = 16  # number of answers after which `Quantum.p50_s` is computed again, because the computation takes long


class Quantum:
    """Quantum: seconds for which the sidecar gathers deliveries before it tokenises them together. Without recent
    answers, the quantum is `shortest_s`. The further the median time from delivery to answer is below `target_p50_s`,
    the closer the quantum is to `longest_s`.
    """

    def __init__(self, shortest_s: float, longest_s: float, target_p50_s: float) -> None:
        self.shortest_s = shortest_s
        self._longest_s = longest_s
        self._target_p50_s = target_p50_s
        self._answers: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._since = 0
        self.p50_s: float | None = None

    def answered(self, at_worker_s: float, now_s: float) -> None:
        """Record the seconds from delivery to answer of one work item."""
        if self._answers and now_s - self._answers[-1][0] > WINDOW_S:
            self._answers.clear()
            self.p50_s = None
        self._answers.append((now_s, at_worker_s))
        self._since += 1
        if self.p50_s is None or self._since >= EVERY:
            self._since = 0
            self.p50_s = statistics.median(taken_s for at_s, taken_s in self._answers if now_s - at_s <= WINDOW_S)

    def seconds(self, now_s: float) -> float:
        """Return the quantum at this time, in seconds."""
        if self.p50_s is None or now_s - self._answers[-1][0] > WINDOW_S:
            return self.shortest_s
        headroom = max(0.0, 1.0 - self.p50_s / self._target_p50_s)
        return self.shortest_s + headroom * (self._longest_s - self.shortest_s)

    def until_s(self, began_s: float, last_s: float) -> float:
        """Return the time at which gathering ends, if it began at `began_s` and the last delivery came at `last_s`."""
        return min(began_s + self.seconds(last_s), last_s + self.shortest_s)


def quantum_of(settings: Settings) -> Quantum:
    return Quantum(
        settings.adaptive_min_quantum_ms / 1000,
        settings.adaptive_max_quantum_ms / 1000,
        settings.adaptive_target_p50_ms / 1000,
    )


MEMORY_S = 10.0  # time constant: after these seconds of busy time, a batch has 1/e of its weight in the rate


class Rate:
    """Tokens per second while at least one batch is at the adapter. Time with several batches counts once. Old batches
    have less weight. With little work, batches are small, so the rate is lower than what the device could reach.
    """

    def __init__(self) -> None:
        self._running = 0
        self._since_s = 0.0
        self._tokens = 0.0
        self._busy_s = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second; 0 before a batch has ended."""
        return self._tokens / self._busy_s if self._tokens and self._busy_s else 0.0

    def sent(self, now_s: float) -> None:
        if self._running == 0:
            self._since_s = now_s
        self._running += 1

    def ended(self, tokens: int, now_s: float) -> None:
        """Record the end of a batch. `tokens`: its tokens; 0 if it failed, but its time counts even then."""
        spent_s = now_s - self._since_s
        decay = math.exp(-spent_s / MEMORY_S)
        self._tokens = self._tokens * decay + tokens
        self._busy_s = self._busy_s * decay + spent_s
        self._since_s = now_s
        self._running -= 1
