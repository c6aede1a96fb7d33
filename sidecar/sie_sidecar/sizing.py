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
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from sie_contracts.batch_times import AHEAD_SHARE, BatchTimes

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
    found = full
    asked = 0.0
    for cost, left_s, _ in sorted(asking, key=lambda ask: ask.left_s):
        wanted = times.tokens(SHARE * left_s)
        if wanted >= found:
            break  # the others have more time
        asked += cost
        smallest = max(wanted, times.efficient(full, MAX_LOSS * asked / full))
        if smallest < found and times.seconds(smallest) <= left_s:
            found = smallest
    return found


class Ahead:
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
