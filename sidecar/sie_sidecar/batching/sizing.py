"""How many jobs a batch may hold, so that it does not make late what is in it. Pure: times and costs come in, a number
goes out.

    jobs of a full batch, each with the time that it has left ──┐
    what batches of this model took (`BatchTimes`) ─────────────┴──► how many of them run now, the first of them always

A batch may take SHARE of the time that a job in it has left: the rest is for what the prediction misses. Jobs that have
enough time for the full batch change nothing. A smaller batch costs all others, since each batch has a fixed part, so
two rules bound what one job may cost:

* Jobs that are x of the cost of the full batch cut at most x / 2 of its tokens a second, and so at most half of them in
  all.
* A job that would be late in the smaller batch as well is not considered.

A batch that is sent while another one runs waits at the device, and what arrives meanwhile waits for both before its
own batch runs: three batches. So where a budget is shorter than that and what the prediction misses, it `binds`: a
batch is sealed no sooner than LEAD_S before the device is free.
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

SHARE = 0.4  # of the time that a job has left: about two batches fit into it
MAX_LOSS = 0.5  # of the tokens a second of a full batch, where all jobs in it ask for a smaller one
LEAD_S = 0.01  # long enough to have the next batch at the device when the one that runs ends
# a job with no more time than this asks for a small batch while nobody knows how long a full one takes
UNKNOWN_S = 10.0


class Ask(NamedTuple):
    """A job: its cost in tokens of short texts (`costs`), the seconds from the begin of the batch to its deadline, and
    those that it had when it was published.
    """

    cost: float
    left_s: float
    budget_s: float


def fitting(asks: Sequence[Ask], times: BatchTimes) -> int:
    """How many of these jobs, which a full batch would hold, run in the next batch: the first so many, at least one.
    They are in the order in which a smaller batch would take them.
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
    """Whether a batch, of these jobs or as the last ones were, takes so much of a budget that what arrives after it was
    sealed would be late: more than AHEAD_SHARE. While nothing is known of the model, whether any has little time.
    """
    if not times.is_known:
        return any(ask.budget_s <= UNKNOWN_S for ask in asks)
    batch_s = max(times.mean_s, times.seconds(sum(ask.cost for ask in asks)))
    return any(AHEAD_SHARE * ask.budget_s < batch_s for ask in asks)


def _cost(asking: Sequence[Ask], full: float, times: BatchTimes) -> float:
    """The smallest batch that jobs ask for, may ask for, and would be in time in."""
    smallest_cost = full
    asking_cost = 0.0
    for cost, left_s, _ in sorted(asking, key=lambda ask: ask.left_s):
        fitting_cost = times.tokens(SHARE * left_s)
        if fitting_cost >= smallest_cost:
            break  # the others have more time
        asking_cost += cost
        smallest = max(fitting_cost, times.efficient(full, MAX_LOSS * asking_cost / full))
        if smallest < smallest_cost and times.seconds(smallest) <= left_s:
            smallest_cost = smallest
    return smallest_cost


class DeviceForecast:
    """When a device of `lanes` is free of the batches that were sent to it, as predicted. Pure: the caller has the
    clock. A batch has a number that no other one at the device has.
    """

    def __init__(self) -> None:
        self._sent: dict[int, float] = {}  # what each takes
        self._free_s = 0.0

    def sent(self, batch: int, seconds: float, now_s: float, lanes: int) -> None:
        """A batch was sent that is thought to take so long."""
        self._free_s = max(now_s, self._free_s) + seconds / lanes
        self._sent[batch] = seconds

    def ended(self, batch: int, now_s: float, lanes: int) -> None:
        """One of them is done, or failed: the next one begins now."""
        if self._sent.pop(batch, None) is not None:
            self._free_s = now_s + sum(self._sent.values()) / lanes

    def busy_s(self, now_s: float, lanes: int) -> float:
        """Seconds until a batch that is sent now would begin."""
        return max(0.0, self._free_s - now_s) if len(self._sent) >= lanes else 0.0


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
    """Build the quantum from the settings."""
    return Quantum(
        settings.adaptive_min_quantum_ms / 1000,
        settings.adaptive_max_quantum_ms / 1000,
        settings.adaptive_target_p50_ms / 1000,
    )


MEMORY_S = 10.0  # busy seconds after which a batch counts 1/e


class Rate:
    """Tokens a second, over the time in which at least one batch is at the adapter, so several lanes and batches sent
    ahead count once.

    Tokens and busy time fade together, which weighs a batch by the time it took. It is the rate of batches as they are
    formed now: small ones, of an idle worker, make it lower than what the device can do.
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
        """0 until a batch has ended."""
        return self._tokens / self._busy_s if self._tokens and self._busy_s else 0.0

    def sent(self, now_s: float) -> None:
        """A batch is at the adapter from now on."""
        if self._running == 0:
            self._since_s = now_s
        self._running += 1

    def ended(self, tokens: int, now_s: float) -> None:
        """A batch of so many tokens is done; 0 if it failed: its time was spent all the same."""
        spent_s = now_s - self._since_s
        decay = math.exp(-spent_s / MEMORY_S)
        self._tokens = self._tokens * decay + tokens
        self._busy_s = self._busy_s * decay + spent_s
        self._since_s = now_s
        self._running -= 1
