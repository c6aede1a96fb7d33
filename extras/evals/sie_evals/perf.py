"""Speed of a source at each level of load: items per second, latency by percentile, errors, and use of devices.

texts of the task ──► requests ──► warm-up │ measured seconds ──► LoadPoint of each source and level
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import numpy as np

from sie_cli.refusal import CommandRefused
from sie_evals.labelled import FactTask
from sie_evals.load import NOBODY, DeviceUsage, LoadLevel, LoadReply, LoadRequest, Send, WorkerWatch
from sie_evals.mteb_tasks import Mteb
from sie_evals.sources import EvalSource
from sie_evals.tasks import Retrieval, Similarity, Task, Texts

PERCENTILES = (50, 90, 99)
# CPU use of this process, in cores; above it, the throughput may be limited by this process instead of by the source
CLIENT_LIMIT = 0.8


@dataclass(frozen=True)
class LoadPlan:
    """Plan of the load on each source. The levels run one after the other, each for `warm_up_s` seconds that are not
    measured, then for `seconds` seconds. `batch`: texts per request.
    """

    levels: Sequence[LoadLevel]
    seconds: float
    warm_up_s: float
    batch: int = 1


@dataclass(frozen=True)
class LoadPoint:
    """Result of one source at one level of load, over `seconds`. `latencies_ms`: latencies of the answered requests,
    ascending. `items`: number of texts answered. `client_cores`: CPU use of this process, in cores; None if the source
    computes in this process.
    """

    source: str
    level: LoadLevel
    seconds: float
    items: int
    latencies_ms: Sequence[float]
    client_cores: float | None
    tokens: int | None = None
    errors: Mapping[str, int] = field(default_factory=dict)
    stages_ms: Mapping[str, float] = field(default_factory=dict)
    device: DeviceUsage = field(default_factory=DeviceUsage)

    @property
    def scores(self) -> dict[str, float]:
        """Metrics by name; latencies are NaN if no request was answered."""
        metrics = {"items_per_s": self.items / self.seconds}
        if self.tokens is not None:
            metrics["tokens_per_s"] = self.tokens / self.seconds
        own = self.latencies_ms or [float("nan")]
        return metrics | {f"p{percentile}_ms": float(np.percentile(own, percentile)) for percentile in PERCENTILES}

    @property
    def is_limited_by_client(self) -> bool:
        return self.client_cores is not None and self.client_cores > CLIENT_LIMIT

    @property
    def lost_its_server(self) -> bool:
        return bool(self.errors.get(NOBODY))


def texts_of(task: Task) -> list[str]:
    """Return all texts of the task, shuffled, so that lengths are mixed. The order is the same in each run. Raises
    CommandRefused if the task has no texts.
    """
    match task:
        case Similarity():
            texts = [*task.left, *task.right]
        case Retrieval():
            texts = [*task.corpus.values(), *task.queries.values()]
        case Texts() | Mteb():
            texts = list(task.texts)
        case FactTask():
            texts = [text.text for text in task.texts]
    if not texts:
        raise CommandRefused(f"{task.name} has no texts, so there is nothing to send: name a task with texts")
    return [texts[place] for place in np.random.default_rng(0).permutation(len(texts))]


def requests_of(task: Task, batch: int) -> Iterator[LoadRequest]:
    """Yield requests without end, each with `batch` texts. The first text of a request is also its query."""
    texts = itertools.cycle(texts_of(task))
    while True:
        query = next(texts)
        yield LoadRequest([query, *itertools.islice(texts, batch - 1)], query)


def measure(
    task: Task,
    sources: Sequence[EvalSource],
    plan: LoadPlan,
    watches: Mapping[str, WorkerWatch],
    advance: Callable[[], None],
) -> Iterator[list[LoadPoint]]:
    """Yield, for each level, a list with one point per source. `watches`: source name -> watch of the source's devices.
    `advance`: called after each point. If a source cannot connect to its server, the measurement ends after this level.
    """
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            sends = [(source, runner.run(stack.enter_async_context(source.sender()))) for source in sources]
            for level in plan.levels:
                points = []
                for source, send in sends:
                    requests = requests_of(task, plan.batch)
                    points.append(runner.run(_point(source, send, requests, level, plan, watches.get(source.name))))
                    advance()
                yield points
                if any(source.lost_its_server for source in points):
                    return
        finally:
            runner.run(stack.aclose())


async def _point(
    source: EvalSource,
    send: Send,
    requests: Iterator[LoadRequest],
    level: LoadLevel,
    plan: LoadPlan,
    watch: WorkerWatch | None,
) -> LoadPoint:
    start_s = time.perf_counter() + plan.warm_up_s
    end_s = start_s + plan.seconds
    watching = asyncio.create_task(watch.run(start_s, end_s)) if watch else None
    used = asyncio.create_task(_used_cores(start_s, end_s))
    try:
        calls = await level.run(send, requests, end_s)
    except ExceptionGroup as group:  # if the source refuses requests, each client's task raises the same error
        raise group.exceptions[0] from group
    client_cores = await used
    # The throughput counts answers that arrive between `start_s` and `end_s`. Latencies and errors count requests that
    # are due in this time, even if the answer comes after `end_s`, so that a stall near `end_s` is included.
    due = [call for call in calls if start_s <= call.due_s < end_s]
    ended = [call for call in calls if start_s <= call.ended_s < end_s and not call.code]
    tokens = [call.answer.tokens for call in ended]
    return LoadPoint(
        source.name,
        level,
        end_s - start_s,
        sum(call.items for call in ended),
        sorted(1e3 * call.latency_s for call in due if not call.code),
        None if source.is_here else client_cores,
        sum(count or 0 for count in tokens) if tokens and None not in tokens else None,
        dict(Counter(call.code for call in due if call.code)),
        _means([call.answer for call in due if not call.code]),
        await watching if watching else DeviceUsage(),
    )


async def _used_cores(start_s: float, end_s: float) -> float:
    """Return the mean CPU use of this process from `start_s` to `end_s`, in cores."""
    await asyncio.sleep(max(0.0, start_s - time.perf_counter()))
    before, began_s = time.process_time(), time.perf_counter()
    await asyncio.sleep(max(0.0, end_s - time.perf_counter()))
    return (time.process_time() - before) / (time.perf_counter() - began_s)


def _means(answers: Sequence[LoadReply]) -> dict[str, float]:
    names = dict.fromkeys(name for answer in answers for name in answer.stages)
    return {name: sum(answer.stages.get(name, 0.0) for answer in answers) / len(answers) for name in names}
