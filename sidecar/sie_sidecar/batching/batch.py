"""Choice of the next batch: a pure function of the waiting work, the time and the limits, without a clock, I/O or
randomness.

    entries ──add──► Waiting ──next_batch(now, device)──► Batch | Wait(until) | nothing

Entries may be in one batch if their keys are equal. A batch is sealed when it is full (cost or requests), when its
oldest entry has waited for the limit, or at once when the device is idle and no more work is expected. While the device
is busy, batches grow. If the deadlines of its entries allow no full batch, only the first entries run (`sizing`).

Order: interactive work is first, but between two bulk batches there are at most `bulk_max_overtakes` interactive ones.
Within a priority, the model whose oldest entry has waited longest is first. Within a model, its keys (LoRAs,
operations) alternate, so that the backlog of one key does not block the others. Once an entry is due and the oldest of
its priority, it is in one of the next K batches of that priority, where K is the number of keys of its model that have
work. With k overtakes, these are K + ceil(K / k) batches in total for interactive work, and K (k + 1) for bulk work.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Generic, NamedTuple, TypeVar

from sie_contracts.models.costs import BatchTimes
from sie_sidecar.batching.sizing import LEAD_S, Ask, binds, fitting

T = TypeVar("T")

READY_PER_LANE = 2  # full batches that may wait per lane
TIMES_OVER = 20  # number of batches from which the time of a batch of one model is learned
MAX_TIMES = 1024  # largest number of models whose batch times are stored
LOOK_AHEAD = 4  # a model that pads chooses among the entries of this number of batches


class BatchKey(NamedTuple):
    """Properties that entries must have in common to run in one forward pass. Output options are not included: they are
    applied per item.

    `padded`: the model pads the rows of a batch to the longest row, so the entries of a batch should have similar
    costs.
    """

    residency: str
    revision: str
    operation: str
    pooling: str
    lora: str
    padded: bool = False


@dataclass(frozen=True)
class BatchLimits:
    """Limits of a batch: tokens, work items, seconds that the oldest entry may wait, overtakes of bulk work, and bytes
    of pixels and features.

    `reorder_s`: in a model that pads, an entry may overtake an entry of the same key only if it arrived at most this
    number of seconds later.
    """

    cost: int
    requests: int
    wait_s: float
    bulk_max_overtakes: int = 4
    reorder_s: float = 0.25
    # largest number of bytes of media in a batch; a frame to the adapter has at most 128 MiB
    media_bytes: int = 96 << 20


@dataclass(frozen=True)
class DeviceLoad:
    """Load of the device: `sent` batches are at the adapter, of at most `depth`; `lanes` batches can run at the same
    time.

    `more_expected`: deliveries are in transit or not tokenised yet, so an idle device may wait for them within the
    limit. `busy_s`: predicted seconds until a batch that is sent now would begin.
    """

    sent: int
    lanes: int
    depth: int
    more_expected: bool
    busy_s: float = 0.0


@dataclass
class BatchEntry(Generic[T]):
    """Tokenised work item. `cost` is its part of the budget of a batch. `time_cost` is the number of tokens of short
    texts that take as long; 0 means equal to `cost`. `alone`: its message was delivered before, perhaps to a worker
    whose adapter died with it, so it runs in a separate batch. It is due at `deadline_s`, and had `budget_s` seconds
    when it was published. `media_bytes` is the size of its images and sounds. `writes`: its answer is written token by
    token, outside of the lanes of the device (`ipc.Rows.writes`).
    """

    key: BatchKey
    cost: int
    arrived_s: float
    work: T
    bulk: bool = False
    alone: bool = False
    deadline_s: float = math.inf
    budget_s: float = math.inf
    time_cost: float = 0.0
    media_bytes: int = 0
    writes: bool = False


@dataclass(frozen=True)
class Batch(Generic[T]):
    """Entries of one key, the cheapest first. Their cost is within `BatchLimits.cost`, unless the batch is a single
    entry.
    """

    key: BatchKey
    entries: tuple[BatchEntry[T], ...]
    cost: int

    @property
    def writes(self) -> bool:
        """True if the answers are written token by token, outside of the lanes."""
        # the value is equal for all entries of a batch: entries whose answer is written token by token have a separate
        # queue
        return bool(self.entries) and self.entries[0].writes


@dataclass(frozen=True)
class WaitUntil:
    """Result of `next_batch` if no batch is due before `until_s`, unless work arrives or a batch ends."""

    until_s: float


@dataclass(eq=False)
class _KeyQueue(Generic[T]):
    """Entries of one key, in order of arrival."""

    key: BatchKey
    entries: deque[BatchEntry[T]] = field(default_factory=deque)
    cost: int = 0
    alone: int = 0  # number of entries that need a separate batch

    @property
    def head_s(self) -> float:
        return self.entries[0].arrived_s

    def is_ready(self, now_s: float, limits: BatchLimits, *, idle: bool) -> bool:
        return idle or self.is_full(limits) or now_s >= self.head_s + limits.wait_s

    def is_full(self, limits: BatchLimits) -> bool:
        """Return True if a batch of its entries could not grow any more."""
        return self.alone > 0 or self.cost >= limits.cost or len(self.entries) >= limits.requests

    def insert(self, entry: BatchEntry[T], index: int) -> None:
        self.entries.insert(index, entry)
        self.cost += entry.cost
        self.alone += entry.alone

    def pop_batch(self, limits: BatchLimits, begins_s: float, times: BatchTimes) -> list[BatchEntry[T]]:
        """Remove and return the oldest entry and the entries that run with it from `begins_s` on, in order of arrival.
        An oversize entry runs alone.
        """
        indexes = self._together(limits)
        indexes = sorted(indexes[: fitting(self._asks(indexes, begins_s), times)])
        if indexes[-1] == len(indexes) - 1:
            entries = [self.entries.popleft() for _ in indexes]
        else:
            chosen = set(indexes)
            ahead = [self.entries.popleft() for _ in range(indexes[-1] + 1)]
            entries = [ahead[index] for index in indexes]
            self.entries.extendleft(reversed([entry for index, entry in enumerate(ahead) if index not in chosen]))
        self.cost -= sum(entry.cost for entry in entries)
        self.alone -= sum(entry.alone for entry in entries)
        return entries

    def binds(self, limits: BatchLimits, begins_s: float, times: BatchTimes) -> bool:
        """Return True if a deadline limits the time at which the next batch may be sealed."""
        return binds(self._asks(self._together(limits), begins_s), times)

    def _asks(self, indexes: Sequence[int], begins_s: float) -> list[Ask]:
        entries = map(self.entries.__getitem__, indexes)
        return [Ask(entry.time_cost or entry.cost, entry.deadline_s - begins_s, entry.budget_s) for entry in entries]

    def _together(self, limits: BatchLimits) -> list[int]:
        """Return the indices of the oldest entry and of the entries that may run with it. A smaller batch would have
        the first of them.
        """
        if self.entries[0].alone:
            return [0]
        return self._alike(limits) if self.key.padded else self._first(limits)

    def remove(self, entry: BatchEntry[T]) -> None:
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
        return list(range(number))

    def _alike(self, limits: BatchLimits) -> list[int]:
        """Return the index of the first entry, and of entries that arrived soon after it. Entries whose cost is nearest
        to the cost of the first are first.
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


class _ModelLine(Generic[T]):
    """Queues of one residency, in the order in which they are served. `push_number` is the number of its last push to
    the heap of its priority.
    """

    def __init__(self, name: str, head_s: float) -> None:
        self.name = name
        self.head_s = head_s  # arrival time of the oldest entry
        self.push_number = 0
        self.queues: dict[BatchKey, _KeyQueue[T]] = {}

    def pick(self, now_s: float, limits: BatchLimits, *, idle: bool) -> _KeyQueue[T] | None:
        return next((queue for queue in self.queues.values() if queue.is_ready(now_s, limits, idle=idle)), None)


class _PriorityLine(Generic[T]):
    """Entries of one priority. `_heads` is a heap of (head, push number, model). If a push is not the newest of its
    model, it is dropped when it reaches the top of the heap.
    """

    def __init__(self) -> None:
        self.models: dict[str, _ModelLine[T]] = {}
        self._heads: list[tuple[float, int, _ModelLine[T]]] = []
        self._push_numbers = count(1)

    def queues(self) -> Iterator[_KeyQueue[T]]:
        return (queue for model in self.models.values() for queue in model.queues.values())

    def add(self, entry: BatchEntry[T], *, in_order: bool) -> None:
        """Add an entry after all others. Without `in_order`, the entry was removed before: insert it by its time of
        arrival.
        """
        model = self.models.get(entry.key.residency)
        if model is None:
            model = self.models[entry.key.residency] = _ModelLine(entry.key.residency, entry.arrived_s)
            self._enter(model)
        queue = model.queues.get(entry.key)
        if queue is None:
            queue = model.queues[entry.key] = _KeyQueue(entry.key)
        index = len(queue.entries)
        if not in_order:
            index = next(
                (index for index, queued in enumerate(queue.entries) if queued.arrived_s > entry.arrived_s), index
            )
        queue.insert(entry, index)
        if entry.arrived_s < model.head_s:
            model.head_s = entry.arrived_s
            self._enter(model)

    def oldest(self) -> _ModelLine[T] | None:
        """Return the model whose oldest entry has waited longest."""
        while self._heads:
            _, push_number, model = self._heads[0]
            if push_number == model.push_number:
                return model
            heapq.heappop(self._heads)
        return None

    def pick(self, now_s: float, limits: BatchLimits, *, idle: bool) -> _KeyQueue[T] | None:
        """Return the queue from which to send now, or None if no queue is ready."""
        model = self.oldest()
        if model is None:
            return None
        queue = model.pick(now_s, limits, idle=idle)
        if queue is not None:
            return queue
        # no entry has waited for the limit, so all entries arrived within it: only a few keys must be searched
        full = (queue for queue in self.queues() if queue.is_full(limits))
        return min(full, key=lambda queue: queue.head_s, default=None)

    def pick_oldest(self) -> _KeyQueue[T]:
        """Return the queue of the oldest entry, even if it is not ready."""
        model = self.oldest()
        assert model is not None
        return min(model.queues.values(), key=lambda queue: queue.head_s)

    def pop_batch(
        self, queue: _KeyQueue[T], limits: BatchLimits, begins_s: float, times: BatchTimes
    ) -> list[BatchEntry[T]]:
        model = self.models[queue.key.residency]
        entries = queue.pop_batch(limits, begins_s, times)
        del model.queues[queue.key]
        if queue.entries:
            model.queues[queue.key] = queue  # put the queue at the end of the rotation
        self._reorder(model)
        return entries

    def remove(self, entry: BatchEntry[T]) -> None:
        model = self.models[entry.key.residency]
        queue = model.queues[entry.key]
        queue.remove(entry)
        if not queue.entries:
            del model.queues[entry.key]
        if entry.arrived_s == model.head_s or not model.queues:
            self._reorder(model)

    def _reorder(self, model: _ModelLine[T]) -> None:
        """Restore the order of the models after the oldest entry of this model may have been removed."""
        if not model.queues:
            del self.models[model.name]
            model.push_number = 0
            return
        model.head_s = min(queue.head_s for queue in model.queues.values())
        self._enter(model)

    def _enter(self, model: _ModelLine[T]) -> None:
        """Insert a model into the heap by its head. Models with equal heads keep the order of the pushes."""
        model.push_number = next(self._push_numbers)
        heapq.heappush(self._heads, (model.head_s, model.push_number, model))


class Waiting(Generic[T]):
    """Tokenised entries that are not sent yet, by priority, model and key, in order of arrival."""

    def __init__(self) -> None:
        # entries of interactive work, entries of bulk work
        self.lines: tuple[_PriorityLine[T], _PriorityLine[T]] = (_PriorityLine(), _PriorityLine())
        self.overtakes = 0  # interactive batches sent since the last bulk batch while bulk work waited
        self.cost = 0
        self._length = 0
        self._times: dict[str, BatchTimes] = {}  # batch times by residency

    def ran(self, batch: Batch[T], seconds: float) -> None:
        """Record the time that a batch took on the device."""
        self._times_of(batch.key.residency).note(_time_cost(batch), seconds)

    def seconds(self, batch: Batch[T]) -> float:
        """Return the predicted time of a batch in seconds; 0 before its model was measured."""
        return self._times_of(batch.key.residency).seconds(_time_cost(batch))

    def _times_of(self, residency: str) -> BatchTimes:
        if (times := self._times.get(residency)) is None:
            if len(self._times) >= MAX_TIMES:
                del self._times[next(iter(self._times))]
            times = self._times[residency] = BatchTimes(TIMES_OVER)
        return times

    def add(self, entry: BatchEntry[T]) -> None:
        """Add an entry that arrived now, after all other entries."""
        self._add(entry, in_order=True)

    def put_back(self, entry: BatchEntry[T]) -> None:
        """Insert an entry that was sent but did not run, by its time of arrival."""
        self._add(entry, in_order=False)

    def _add(self, entry: BatchEntry[T], *, in_order: bool) -> None:
        self.lines[entry.bulk].add(entry, in_order=in_order)
        self.cost += entry.cost
        self._length += 1

    def remove(self, entry: BatchEntry[T]) -> None:
        """Remove a waiting entry."""
        self.lines[entry.bulk].remove(entry)
        self.cost -= entry.cost
        self._length -= 1

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[BatchEntry[T]]:
        return (entry for line in self.lines for queue in line.queues() for entry in queue.entries)

    def batch_from(
        self, queue: _KeyQueue[T], now_s: float, limits: BatchLimits, device: DeviceLoad
    ) -> Batch[T] | WaitUntil | None:
        """Return the next batch of `queue`. If a budget limits the batch, wait until the device is nearly free, because
        the batch may grow until then.
        """
        begins_s, times = now_s + device.busy_s, self._times_of(queue.key.residency)
        if (
            device.sent >= device.lanes
            and (device.busy_s > LEAD_S or not times.is_known)
            and queue.binds(limits, begins_s, times)
        ):
            return WaitUntil(begins_s - LEAD_S) if times.is_known else None
        return self._seal(queue, limits, begins_s)

    def _seal(self, queue: _KeyQueue[T], limits: BatchLimits, begins_s: float) -> Batch[T]:
        bulk, times = queue.entries[0].bulk, self._times_of(queue.key.residency)
        entries = tuple(
            sorted(self.lines[bulk].pop_batch(queue, limits, begins_s, times), key=lambda entry: entry.cost)
        )
        cost = sum(entry.cost for entry in entries)
        self.cost -= cost
        self._length -= len(entries)
        self.overtakes = 0 if bulk else self.overtakes + bool(self.lines[True].models)
        return Batch(queue.key, entries, cost)


def next_batch(
    waiting: Waiting[T], now_s: float, limits: BatchLimits, device: DeviceLoad
) -> Batch[T] | WaitUntil | None:
    """Return the batch to send now, or the time until which to wait. Return None if no batch can be sent before a batch
    ends or an entry arrives.
    """
    if device.sent >= device.depth or not len(waiting):
        return None
    interactive, bulk = waiting.lines
    idle = device.sent == 0 and not device.more_expected
    heads = [model.head_s for line in waiting.lines if (model := line.oldest()) is not None]
    first = interactive.pick(now_s, limits, idle=idle)
    if first is None:
        second = bulk.pick(now_s, limits, idle=idle)
        return (
            WaitUntil(min(heads) + limits.wait_s)
            if second is None
            else waiting.batch_from(second, now_s, limits, device)
        )
    if not bulk.models:
        return waiting.batch_from(first, now_s, limits, device)
    if limits.bulk_max_overtakes == 0:  # no overtaking: the order is first in, first out
        second = bulk.pick(now_s, limits, idle=idle)
        return waiting.batch_from(first if second is None or heads[0] <= heads[1] else second, now_s, limits, device)
    if waiting.overtakes < limits.bulk_max_overtakes:
        return waiting.batch_from(first, now_s, limits, device)
    return waiting.batch_from(bulk.pick(now_s, limits, idle=idle) or bulk.pick_oldest(), now_s, limits, device)


def _time_cost(batch: Batch[T]) -> float:
    return sum(entry.time_cost or entry.cost for entry in batch.entries)


class Load(NamedTuple):
    """Work that this worker has and that is not at the device yet, in tokens and in work items, and the lanes of the
    device.
    """

    cost: int
    items: int
    lanes: int


def credit(load: Load, mean_cost: float, limits: BatchLimits) -> int:
    """Return the number of deliveries that may be requested from the broker at a time, if each has `mean_cost` tokens.
    READY_PER_LANE full batches per lane must have room for them, in addition to the present work.
    """
    cost_left = READY_PER_LANE * load.lanes * limits.cost - load.cost
    items_left = READY_PER_LANE * load.lanes * limits.requests - load.items
    if cost_left <= 0 or items_left <= 0:
        return 0
    return max(1, min(int(cost_left / max(1.0, mean_cost)), items_left))
