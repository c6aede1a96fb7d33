"""Which work runs next: a pure function of what waits, the time and the limits. No clock, no I/O, no randomness.

    jobs ──add──► Waiting ──next_batch(now, device)──► Batch | Wait(until) | nothing

Jobs share a batch when their keys are equal. A batch is sealed when it is full (cost or requests), when its oldest job has waited its
bound, or at once when the device is idle and nothing more is expected; while the device is busy batches grow. Interactive work goes
first, but may overtake the oldest bulk batch only `bulk_max_overtakes` times. Among keys of a priority the oldest head goes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class BatchKey(NamedTuple):
    """What must be equal for two jobs to run in one forward pass. Output options are not here: they are applied per item."""

    residency: str
    revision: str
    operation: str
    pooling: str
    lora: str


@dataclass(frozen=True)
class Limits:
    """Bounds of a batch: tokens, work items, seconds that the oldest may wait, and overtakes of bulk work."""

    cost: int
    requests: int
    wait_s: float
    bulk_max_overtakes: int = 4


@dataclass(frozen=True)
class Device:
    """`running` batches of `lanes` that can run at once, and `sent` batches out of `depth` that may be sent ahead.

    `more_expected`: deliveries are on their way or not yet tokenised, so an idle device may wait for them, within the bound.
    """

    sent: int
    lanes: int
    depth: int
    more_expected: bool


@dataclass
class Job(Generic[T]):
    """One tokenised work item. `cost` in tokens. `alone`: it was in a batch that killed an adapter and now runs by itself."""

    key: BatchKey
    cost: int
    arrived_s: float
    work: T
    bulk: bool = False
    alone: bool = False


@dataclass(frozen=True)
class Batch(Generic[T]):
    key: BatchKey
    jobs: tuple[Job[T], ...]
    cost: int


@dataclass(frozen=True)
class Wait:
    """Nothing to send before `until_s`, unless something arrives or a batch ends."""

    until_s: float


@dataclass
class _Queue(Generic[T]):
    jobs: deque[Job[T]] = field(default_factory=deque)
    cost: int = 0


class Waiting(Generic[T]):
    """All tokenised jobs that are not sent yet, by priority and key, in order of arrival."""

    def __init__(self) -> None:
        self._queues: tuple[dict[BatchKey, _Queue[T]], dict[BatchKey, _Queue[T]]] = ({}, {})
        self.overtakes = 0  # interactive batches sent since the oldest bulk job became the head

    def add(self, job: Job[T]) -> None:
        queue = self._queues[job.bulk].setdefault(job.key, _Queue())
        queue.jobs.append(job)
        queue.cost += job.cost

    def put_back(self, job: Job[T]) -> None:
        """Return a job that was sent and did not run to its place in the order of arrival."""
        queue = self._queues[job.bulk].setdefault(job.key, _Queue())
        place = next((index for index, other in enumerate(queue.jobs) if other.arrived_s > job.arrived_s), len(queue.jobs))
        queue.jobs.insert(place, job)
        queue.cost += job.cost

    def __len__(self) -> int:
        return sum(len(queue.jobs) for queues in self._queues for queue in queues.values())

    def __iter__(self) -> Iterator[Job[T]]:
        return (job for queues in self._queues for queue in queues.values() for job in queue.jobs)

    @property
    def cost(self) -> int:
        return sum(queue.cost for queues in self._queues for queue in queues.values())

    def oldest(self, *, bulk: bool) -> _Queue[T] | None:
        """The queue whose head has waited longest."""
        queues = self._queues[bulk].values()
        return min(queues, key=lambda queue: queue.jobs[0].arrived_s, default=None)

    def take(self, queue: _Queue[T], count: int) -> tuple[Job[T], ...]:
        jobs = tuple(queue.jobs.popleft() for _ in range(count))
        queue.cost -= sum(job.cost for job in jobs)
        if not queue.jobs:
            del self._queues[jobs[0].bulk][jobs[0].key]
        return jobs

    def remove_all(self) -> list[Job[T]]:
        jobs = list(self)
        for queues in self._queues:
            queues.clear()
        return jobs


def _fill(queue: _Queue[T], limits: Limits) -> tuple[int, bool]:
    """How many jobs from the head fit into one batch, and whether it is then full. At least one: an oversize job runs alone."""
    if queue.jobs[0].alone:
        return 1, True
    cost = count = 0
    for job in queue.jobs:
        if count and (cost + job.cost > limits.cost or count >= limits.requests or job.alone):
            return count, True
        cost += job.cost
        count += 1
    return count, cost >= limits.cost or count >= limits.requests


def next_batch(waiting: Waiting[T], now_s: float, limits: Limits, device: Device) -> Batch[T] | Wait | None:
    """The batch to send now, or until when to wait, or None while nothing can be sent before a batch ends or a job arrives."""
    if device.sent >= device.depth:
        return None
    interactive, bulk = waiting.oldest(bulk=False), waiting.oldest(bulk=True)
    overdue = bulk is not None and waiting.overtakes >= limits.bulk_max_overtakes
    candidates = [queue for queue in ((bulk, interactive) if overdue else (interactive, bulk)) if queue is not None]
    if not limits.bulk_max_overtakes:  # no overtaking either way: first come, first served
        candidates.sort(key=lambda queue: queue.jobs[0].arrived_s)
    until_s: float | None = None
    for queue in candidates:
        count, full = _fill(queue, limits)
        head = queue.jobs[0]
        due_s = head.arrived_s + limits.wait_s
        if full or now_s >= due_s or (device.sent == 0 and not device.more_expected):
            jobs = waiting.take(queue, count)
            if head.bulk:
                waiting.overtakes = 0
            elif bulk is not None:
                waiting.overtakes += 1
            return Batch(head.key, jobs, sum(job.cost for job in jobs))
        until_s = due_s if until_s is None else min(until_s, due_s)
        if overdue:
            break
    return None if until_s is None else Wait(until_s)


def credit(*, held_cost: int, mean_cost: float, limits: Limits, lanes: int) -> int:
    """Deliveries to have outstanding for a hosted model: what two batches per lane can hold beyond what is held; one as a probe if idle."""
    room = 2 * lanes * limits.cost - held_cost
    if room <= 0:
        return 0
    return max(1, min(int(room / max(1.0, mean_cost)), 2 * lanes * limits.requests))
