"""Choice of the next batch and of its size, from arguments only (waiting work, time, limits): no clock, I/O or random
numbers.

 tokenised work items (`Queued`) ──add──► Waiting ──next_batch(now, device)──► Batch | WaitUntil | None

A batch has work items with equal keys only. It is sealed, and then sent, when it is full (tokens or work items), when
its oldest work item has waited for `BatchLimits.wait_s` seconds, if it is the turn of bulk work, or at once if the
device is idle and no more work is expected. While the device is busy, a batch grows until LEAD_S before the device is
free. If a full batch takes too long for a deadline, only its first work items run.

Order: interactive work comes first, but after `bulk_max_overtakes` interactive batches in a row, a bulk batch is sent
if bulk work waits. Within a priority, the model with the oldest work item comes first if a batch of it is ready. Within
a model, its keys (LoRA, operation and so on) take turns, so that much work of one key does not block the others.

These rules limit every wait. A work item that has waited for `wait_s` and is the oldest of its priority is in one of
the next K batches of its priority, where K is the number of keys of its model that have work. Batches of the other
priority come between these K batches. So with k = `bulk_max_overtakes` above 0, an interactive work item runs within
the next K + ceil(K / k) batches, and a bulk work item within the next K (k + 1) batches.

The size of a batch is the largest number of work items with which no work item misses its deadline:

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

A batch that finds all lanes of the device idle leaves an equal share of the work to each other lane, if it ends
SHARED_S sooner: one batch with the work of all clients would keep one lane busy, and all clients would send their next
requests when it ends.

A batch that is sent while another batch runs waits at the device. It is sealed only LEAD_S before the device is free,
so that work items that arrive until then join it. Sealed earlier, it would be smaller, and a work item that arrives
meanwhile would wait for two batches, and then for its own batch.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Generic, NamedTuple, TypeVar

from sie_contracts.models.costs import BatchTimes
from sie_contracts.settings import Settings

# A device has lanes, and each lane runs one batch at a time. The worker pulls deliveries until the waiting work fills
# this number of batches for each lane.
READY_PER_LANE = 2
TIMES_OVER = 20  # the time of a model's next batch is predicted from this number of its last batches
# maximum number of models whose batch times are stored; for each further model, the times of the model that was added
# first are removed
MAX_TIMES = 1024
# A model with padding runs work items of similar length together. They are chosen from the oldest LOOK_AHEAD *
# `BatchLimits.requests` work items of a queue.
LOOK_AHEAD = 4
_COST = operator.attrgetter("cost")


class BatchKey(NamedTuple):
    """Properties shared by all work items of one forward pass. Output options are not among them, because they are
    applied to each item after the pass. `padded`: the model pads rows to the longest row of the batch, so items of
    similar length should run together.
    """

    residency: str
    revision: str
    operation: str
    pooling: str
    lora: str
    padded: bool = False


NO_KEY = BatchKey("", "", "", "", "")  # key of a work item that is not tokenised yet


@dataclass(frozen=True)
class BatchLimits:
    """Limits of a batch. `cost`: tokens. `requests`: work items. `wait_s`: seconds that its oldest work item may wait.
    `media_bytes`: bytes of pixels and audio features. `bulk_max_overtakes`: maximum number of interactive batches in a
    row while bulk work waits. `reorder_s`: for a model with padding, a work item may overtake work items that arrived
    at most this number of seconds earlier.
    """

    cost: int
    requests: int
    wait_s: float
    bulk_max_overtakes: int = 4
    reorder_s: float = 0.25
    # less than 128 MiB, which is the limit for one frame to the adapter
    media_bytes: int = 96 << 20


@dataclass(frozen=True)
class DeviceLoad:
    """Load of a device. `sent`: batches at its adapter, at most `depth`; `lanes` batches run at a time.
    `more_expected`: more deliveries are on their way or being tokenised, so an idle device may wait for them, at most
    `BatchLimits.wait_s`. `busy_s`: predicted seconds until a batch that is sent now begins to run.
    """

    sent: int
    lanes: int
    depth: int
    more_expected: bool
    busy_s: float = 0.0


@dataclass(eq=False, kw_only=True)
class Queued:
    """Tokenised work item, as `Waiting` sees it. `cost`: its tokens. `time_cost`: its computing time, as the number
    of tokens of short texts that take the same time; 0 means equal to `cost`. `arrived_s`: time of its arrival in the
    queue. `alone`: the message was delivered before and may have crashed an adapter, so the work item runs in its own
    batch. `due_s`: end of the request's time limit. `budget_s`: seconds from its publication to this time.
    `media_bytes`: size of its pixels and audio features. `writes`: it generates text token by token, and uses no lane
    of the device (`ipc.Rows.writes`).
    """

    key: BatchKey = NO_KEY
    cost: int = 0
    arrived_s: float = 0.0
    bulk: bool = False
    alone: bool = False
    due_s: float = math.inf
    budget_s: float = math.inf
    time_cost: float = 0.0
    media_bytes: int = 0
    writes: bool = False


T = TypeVar("T", bound=Queued)


@dataclass(frozen=True)
class Batch(Generic[T]):
    """Work items with one key, the cheapest first. Only a batch of a single work item may exceed `BatchLimits.cost`.
    `time_cost`: sum of `Queued.time_cost`. `writes`: the batch generates text token by token, so that it uses no lane
    of the device.
    """

    key: BatchKey
    entries: tuple[T, ...]
    cost: int
    time_cost: float
    writes: bool


def batch_of(entries: Sequence[T]) -> Batch[T]:
    """Return the batch of these work items, at least one, in their order."""
    cost, time_cost = 0, 0.0
    for entry in entries:
        cost += entry.cost
        time_cost += entry.time_cost or entry.cost
    # `writes` is equal for all: work items that generate text wait in a separate queue
    return Batch(entries[0].key, tuple(entries), cost, time_cost, entries[0].writes)


@dataclass(frozen=True)
class WaitUntil:
    """Result of `next_batch`: send nothing before `until_s`, unless a work item arrives or a batch ends."""

    until_s: float


@dataclass(eq=False)
class _KeyQueue(Generic[T]):
    """Waiting work items of one key, in the order of arrival. `cost`: their tokens."""

    key: BatchKey
    entries: deque[T] = field(default_factory=deque)
    cost: int = 0
    alone: int = 0  # number of work items that must run in a batch of their own
    shares: int = 0  # number of idle lanes that still get an equal share of the work, at once

    @property
    def head_s(self) -> float:
        return self.entries[0].arrived_s

    def is_full(self, limits: BatchLimits) -> bool:
        """Return True if the next batch cannot become larger: it is full, or a work item must run alone."""
        return self.alone > 0 or self.cost >= limits.cost or len(self.entries) >= limits.requests

    def pop_batch(self, limits: BatchLimits, begins_s: float, times: BatchTimes) -> list[T]:
        """Remove the work items of the next batch, which begins to run at `begins_s`, and return them in the order of
        arrival. The oldest work item is always one of them. A work item that is larger than a batch runs alone.
        """
        head = self.entries[0]
        indexes = self._alike(limits) if self.key.padded and not head.alone else self._first(limits)
        if len(indexes) > 1:  # if deadlines require a smaller batch, it has only the first of these indexes
            indexes = sorted(indexes[: fitting(self._asks(indexes, begins_s), times)])
        entries: list[T] = []
        passed: list[T] = []
        for index in range(indexes[-1] + 1):
            entry = self.entries.popleft()
            if index == indexes[len(entries)]:
                entries.append(entry)
                self.cost -= entry.cost
                self.alone -= entry.alone
            else:
                passed.append(entry)
        self.entries.extendleft(reversed(passed))
        return entries

    def is_urgent(self) -> bool:
        """Return True if a work item has little time, so that it could be late behind a batch of unknown length."""
        return any(entry.budget_s <= UNKNOWN_S for entry in self.entries)

    def _asks(self, indexes: Sequence[int], begins_s: float) -> list[Ask]:
        entries = map(self.entries.__getitem__, indexes)
        return [Ask(entry.time_cost or entry.cost, entry.due_s - begins_s, entry.budget_s) for entry in entries]

    def remove(self, entry: T) -> None:
        del self.entries[next(index for index, queued in enumerate(self.entries) if queued is entry)]
        self.cost -= entry.cost
        self.alone -= entry.alone

    def _first(self, limits: BatchLimits) -> list[int]:
        cost = number = size = 0
        for entry in self.entries:
            cost, size = cost + entry.cost, size + entry.media_bytes
            is_over = number >= limits.requests or cost > limits.cost or size > limits.media_bytes
            if number and (entry.alone or is_over):
                break
            number += 1
            if entry.alone:
                break
        return list(range(number))

    def _alike(self, limits: BatchLimits) -> list[int]:
        """Return the indexes of the oldest work item and of the work items that join it until the batch is full. Work
        items that join arrived within `reorder_s` after the oldest item. Items of the most similar length join first.
        """
        head = self.entries[0]
        near = []
        for index, entry in enumerate(islice(self.entries, 1, LOOK_AHEAD * limits.requests), 1):
            if entry.alone or entry.arrived_s > head.arrived_s + limits.reorder_s:
                break
            near.append((abs(entry.cost - head.cost), index, entry.cost, entry.media_bytes))
        indexes, cost, size = [0], head.cost, head.media_bytes
        for _, index, entry_cost, entry_bytes in sorted(near):
            if len(indexes) >= limits.requests:
                break
            if cost + entry_cost <= limits.cost and size + entry_bytes <= limits.media_bytes:
                indexes.append(index)
                cost, size = cost + entry_cost, size + entry_bytes
        return indexes


@dataclass(eq=False)
class _ModelLine(Generic[T]):
    """Queues of one residency (a model with one set of load options), by key. The queue from which the last batch was
    taken is at the end of the dict.
    """

    name: str
    head_s: float = math.inf  # arrival time of the oldest work item
    push_number: int = 0
    queues: dict[BatchKey, _KeyQueue[T]] = field(default_factory=dict)


class _PriorityLine(Generic[T]):
    """Work items of one priority. In the heap `_heads`, only a model's newest entry is valid; older entries of the
    model are ignored when they are popped.
    """

    def __init__(self) -> None:
        self.models: dict[str, _ModelLine[T]] = {}
        self._heads: list[tuple[float, int, _ModelLine[T]]] = []
        self._push_numbers = count(1)

    def queues(self) -> Iterator[_KeyQueue[T]]:
        return (queue for model in self.models.values() for queue in model.queues.values())

    def oldest(self) -> _ModelLine[T] | None:
        """Return the model with the oldest work item. None if no work item waits."""
        while self._heads:
            _, push_number, model = self._heads[0]
            if push_number == model.push_number:
                return model
            heapq.heappop(self._heads)
        return None

    def head_s(self) -> float:
        """Return the arrival time of the oldest work item; infinity if no work item waits."""
        model = self.oldest()
        return math.inf if model is None else model.head_s

    def pick(self, now_s: float, limits: BatchLimits, *, idle: bool) -> _KeyQueue[T] | None:
        """Return the queue from which the next batch is taken. None if no queue is ready."""
        model = self.oldest()
        if model is None:
            return None
        for queue in model.queues.values():
            if idle or queue.shares or queue.is_full(limits) or now_s >= queue.head_s + limits.wait_s:
                return queue
        # the oldest work item has not waited for `wait_s` yet, so no other work item has: only full queues are ready
        full = (queue for queue in self.queues() if queue.is_full(limits))
        return min(full, key=lambda queue: queue.head_s, default=None)

    def pick_oldest(self) -> _KeyQueue[T]:
        """Return the queue with the oldest work item, even if it is not ready."""
        model = self.oldest()
        assert model is not None
        return min(model.queues.values(), key=lambda queue: queue.head_s)

    def remove(self, entry: T) -> None:
        model = self.models[entry.key.residency]
        queue = model.queues[entry.key]
        queue.remove(entry)
        if not queue.entries:
            del model.queues[entry.key]
        if not model.queues:
            del self.models[model.name]
            model.push_number = 0
        elif entry.arrived_s == model.head_s:
            self.enter(model, min(queue.head_s for queue in model.queues.values()))

    def enter(self, model: _ModelLine[T], head_s: float) -> None:
        """Push a model on the heap by its oldest work item's arrival. At equal times, the earlier push comes first."""
        model.head_s, model.push_number = head_s, next(self._push_numbers)
        heapq.heappush(self._heads, (model.head_s, model.push_number, model))


class Waiting(Generic[T]):
    """Tokenised work items that wait for the device, by priority, model and key."""

    def __init__(self) -> None:
        # [0]: interactive work items, [1]: bulk work items
        self.lines: tuple[_PriorityLine[T], _PriorityLine[T]] = (_PriorityLine(), _PriorityLine())
        self.overtakes = 0  # number of interactive batches in a row that were sent while bulk work waited
        # measured times of batches, by residency (a model with one set of load options)
        self._times: dict[str, BatchTimes] = {}

    def times_of(self, residency: str) -> BatchTimes:
        """Return the measured times of the batches of a residency. Their size is `Batch.time_cost`."""
        if (times := self._times.get(residency)) is None:
            if len(self._times) >= MAX_TIMES:
                del self._times[next(iter(self._times))]
            times = self._times[residency] = BatchTimes(TIMES_OVER)
        return times

    def add(self, entry: T, *, back: bool = False) -> None:
        """Add a work item behind all work items of its key. `back`: the work item was accepted earlier and returns, so
        insert it by its time of arrival.
        """
        line = self.lines[entry.bulk]
        model = line.models.get(entry.key.residency)
        if model is None:
            model = line.models[entry.key.residency] = _ModelLine(entry.key.residency)
        queue = model.queues.get(entry.key)
        if queue is None:
            queue = model.queues[entry.key] = _KeyQueue(entry.key)
        index = len(queue.entries)
        if back:
            index = next(
                (index for index, queued in enumerate(queue.entries) if queued.arrived_s > entry.arrived_s), index
            )
        queue.entries.insert(index, entry)
        queue.cost += entry.cost
        queue.alone += entry.alone
        if entry.arrived_s < model.head_s:
            line.enter(model, entry.arrived_s)

    def remove(self, entry: T) -> None:
        self.lines[entry.bulk].remove(entry)

    def __len__(self) -> int:
        return sum(len(queue.entries) for line in self.lines for queue in line.queues())

    def __iter__(self) -> Iterator[T]:
        return (entry for line in self.lines for queue in line.queues() for entry in queue.entries)

    def seal(
        self, queue: _KeyQueue[T], now_s: float, limits: BatchLimits, device: DeviceLoad
    ) -> Batch[T] | WaitUntil | None:
        """Seal and return the next batch of `queue`. While every lane of the device is busy, work items can join the
        batch until LEAD_S before a lane is free: return WaitUntil with this time. Return None if a batch of the model
        was never measured and a work item is urgent: it waits for the end of a batch.
        """
        begins_s, times = now_s + device.busy_s, self.times_of(queue.key.residency)
        if device.sent >= device.lanes:
            # the times are compared, not the durations: their rounding could ask for a wait of nothing, again and again
            if begins_s - LEAD_S > now_s:
                return WaitUntil(begins_s - LEAD_S)
            if not times.is_known and queue.is_urgent():
                return None
        elif device.sent == 0 and not queue.is_full(limits):
            time_cost = sum([entry.time_cost or entry.cost for entry in queue.entries])
            saved_s = times.seconds(time_cost) - times.seconds(time_cost / device.lanes)
            queue.shares = device.lanes if saved_s > SHARED_S else 0
        if queue.shares:
            limits = replace(limits, cost=min(limits.cost, math.ceil(queue.cost / queue.shares)))
            queue.shares -= 1
        bulk = queue.entries[0].bulk
        line = self.lines[bulk]
        entries = sorted(queue.pop_batch(limits, begins_s, times), key=_COST)
        model = line.models[queue.key.residency]
        del model.queues[queue.key]
        if queue.entries:
            model.queues[queue.key] = queue  # moves the queue to the end, so that the model's other keys come first
        if model.queues:
            line.enter(model, min(queue.head_s for queue in model.queues.values()))
        else:
            del line.models[model.name]
            model.push_number = 0
        self.overtakes = 0 if bulk else self.overtakes + bool(self.lines[True].models)
        return batch_of(entries)


def next_batch(
    waiting: Waiting[T], now_s: float, limits: BatchLimits, device: DeviceLoad
) -> Batch[T] | WaitUntil | None:
    """Return the batch to send now; WaitUntil if a batch is due later; None if nothing can be sent before a batch ends
    or a work item arrives.
    """
    interactive, bulk = waiting.lines
    if device.sent >= device.depth or not (interactive.models or bulk.models):
        return None
    idle = device.sent == 0 and not device.more_expected
    first = interactive.pick(now_s, limits, idle=idle)
    if first is None:
        second = bulk.pick(now_s, limits, idle=idle)
        if second is not None:
            return waiting.seal(second, now_s, limits, device)
        return WaitUntil(min(interactive.head_s(), bulk.head_s()) + limits.wait_s)
    if not bulk.models:
        return waiting.seal(first, now_s, limits, device)
    # if bulk work may not be overtaken, the priority with the older work item comes first
    if limits.bulk_max_overtakes == 0:
        second = bulk.pick(now_s, limits, idle=idle)
        if second is not None and bulk.head_s() < interactive.head_s():
            first = second
        return waiting.seal(first, now_s, limits, device)
    if waiting.overtakes < limits.bulk_max_overtakes:
        return waiting.seal(first, now_s, limits, device)
    return waiting.seal(bulk.pick(now_s, limits, idle=idle) or bulk.pick_oldest(), now_s, limits, device)


class Load(NamedTuple):
    """Work that is not at a device yet: `cost` tokens in `items` work items. `lanes`: number of batches that the
    devices for this work can run at the same time.
    """

    cost: int
    items: int
    lanes: int


def credit(load: Load, mean_cost: float, limits: BatchLimits, consumers: int = 1) -> int:
    """Return how many more deliveries (of `mean_cost` tokens each) may be pulled, until READY_PER_LANE full batches
    wait for each lane of the device: the share of one of `consumers` active consumers, at least one delivery.
    """
    cost_left = READY_PER_LANE * load.lanes * limits.cost - load.cost
    items_left = READY_PER_LANE * load.lanes * limits.requests - load.items
    if cost_left <= 0 or items_left <= 0:
        return 0
    deliveries = max(1, min(int(cost_left / max(1.0, mean_cost)), items_left))
    return max(1, deliveries // max(1, consumers))


# part of a work item's remaining time that its batch may take; a second batch of that length fits into the rest
SHARE = 0.4
# A smaller batch ends sooner, but the device computes fewer tokens per second. If all work items of a full batch are
# urgent, the smaller batch may lose at most this part of the tokens per second. If only a part x of the tokens is
# urgent, the smaller batch may lose at most x * MAX_LOSS.
MAX_LOSS = 0.5
# a batch is sealed this number of seconds before the device is predicted to be free, so that the device stays busy
LEAD_S = 0.003
# seconds by which a batch must end sooner, if it is to leave a share of its work to other lanes: more than a further
# batch costs
SHARED_S = 0.01
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
