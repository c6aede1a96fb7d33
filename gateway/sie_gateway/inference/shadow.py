"""Shadow traffic: the gateway copies a share of the requests of an alias to a second model, after the results of the
requests have arrived. The gateway measures the results of a copy, and discards them.

    request answered, in the configured share ──► few copies run, the lane is not busy, the model exists?
        yes ──► copy runs at the priority `bulk` ──► results are compared, then discarded
        no ───► no copy: counted with the reason

A lane is a pool, a machine profile and a bundle. No request waits for a copy or is billed for it, and no client sees
the failure of a copy. If no worker has loaded the second model, at most one copy at a time makes a worker load it. Such
a copy runs only if a worker of the lane has memory for one more model of the usual size and so unloads no other model.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from sie_contracts.errors import CONFIG_CHANGED, InvalidInput, ModelLoading, PayloadTooLarge, SIEError
from sie_contracts.models.aliases import Alias
from sie_contracts.models.catalogue import Catalogue, Resolved
from sie_contracts.wire.heartbeats import Heartbeat
from sie_contracts.wire.messages import PRIORITIES, Failed, Ok
from sie_contracts.wire.topology import Lane
from sie_gateway.admission.admission import Admission
from sie_gateway.admission.grant import Grant
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.inference.call import Call, EntryChanged
from sie_gateway.inference.reply import array_of
from sie_gateway.inference.results import UNMERGED, InferRequest, RequestResult
from sie_gateway.metrics import Metrics
from sie_runtime.http.asgi import uuid7
from sie_runtime.ranks import spearman

MAX_IN_FLIGHT = 4  # largest number of copies that a gateway runs at the same time
MAX_ITEMS = 64  # largest number of inputs in a copy; further inputs of the request are omitted
# largest number of values (numbers in vectors) in the reply to a copied request: the reply stays in memory until the
# copy has run
MAX_VALUES = 1 << 20
# Largest number of bytes of the inputs of a copied request, and of its body. The copies need a limit of their own,
# because the gateway's limit on the memory of request bodies does not count them.
MAX_BYTES = 4 << 20
BUDGET_S = 30.0  # seconds until the deadline of a copy
LOADED_S = 0.25  # seconds of wait above which a lane is too busy for copies
PAUSE_S, SHORT_PAUSE_S = 60.0, 5.0  # seconds without copies after a permanent failure, and after a temporary one
KEY = "_shadow"  # API key of all copies: in the queue, all copies together get the share of one key
_ROUNDING = 1e-6  # added to share * number of requests, because a rounding error may make this product too small
_COMPARED = ("float32", "float16")
_logger = logging.getLogger("sie.gateway.shadow")

Result = Literal["done", "failed", "busy", "loaded", "cold", "paused", "large", "unsuited"]


class Mean:
    """Mean of the added values. `value` is None before the first value was added."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, value: float) -> None:
        self._sum += value
        self._count += 1

    @property
    def value(self) -> float | None:
        return self._sum / self._count if self._count else None


@dataclass
class ShadowStatistics:
    """Measurements of the shadow of one alias since the start of this gateway. Prometheus metrics are less exact: above
    a certain number of aliases, all further aliases have the same label.
    """

    model: str
    answered: int = 0  # answered requests of the alias; the configured share of them is copied
    copies: Counter[Result] = field(default_factory=Counter)
    cosine: Mean = field(default_factory=Mean)
    rank: Mean = field(default_factory=Mean)
    served_ms: Mean = field(default_factory=Mean)
    shadow_ms: Mean = field(default_factory=Mean)

    def as_map(self) -> dict[str, Any]:
        return {
            "copies": dict(self.copies),
            "cosine": self.cosine.value,
            "rank": self.rank.value,
            "served_ms": self.served_ms.value,
            "shadow_ms": self.shadow_ms.value,
        }


class Shadows:
    """Copies requests of aliases to their shadows (second models). `after` returns at once and never raises."""

    def __init__(
        self,
        catalogue: Callable[[], Catalogue],
        fleet: Fleet,
        admission: Admission,
        metrics: Metrics,
        run: Callable[[Call, InferRequest], Awaitable[RequestResult]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._catalogue = catalogue
        self._fleet = fleet
        self._admission = admission
        self._metrics = metrics
        self._run = run
        self._clock = clock
        self._figures: dict[str, ShadowStatistics] = {}  # id of an alias -> statistics of its shadow
        self._paused_s: dict[str, float] = {}  # model -> time until which it gets no copies
        self._opening: set[str] = set()  # models with a running copy that were not loaded when it began
        self._tasks: set[asyncio.Task[None]] = set()

    def after(self, call: Call, finished: RequestResult) -> None:
        """Count an answered request of an alias, and copy the request if it is in the configured share."""
        if finished.request.operation in ("tokenize", "decode") or call.grant.key == KEY:
            return
        try:
            self._after(call, finished)
        except Exception:  # an error of a copy must not fail the reply
            _logger.exception(
                "a request of alias %s could not be copied to its shadow model", finished.request.resolved.alias
            )

    def figures(self, alias: str, model: str) -> ShadowStatistics:
        """Return the measurements of the alias's shadow. They start at zero if the shadow model changes."""
        figures = self._figures.get(alias)
        if figures is None or figures.model != model:
            figures = self._figures[alias] = ShadowStatistics(model)
        return figures

    def drop_deleted(self) -> None:
        """Remove the measurements of aliases that the catalogue does not have any more."""
        aliases = self._catalogue().aliases
        self._figures = {alias: figures for alias, figures in self._figures.items() if alias in aliases}

    def _after(self, call: Call, finished: RequestResult) -> None:
        resolved = finished.request.resolved
        self._metrics.alias_requests.labels(resolved.alias, resolved.canonical).inc()
        alias = self._catalogue().aliases.get(resolved.alias)
        if (
            alias is None
            or alias.shadow is None
            or all(isinstance(outcome, Failed) for _, outcome in finished.outcomes)
        ):
            return
        figures = self.figures(alias.id, alias.shadow.model)
        before = figures.answered
        figures.answered += 1
        due, was_due = (math.floor(alias.shadow.share * count + _ROUNDING) for count in (before + 1, before))
        if due > was_due:
            self._copy(call, finished, alias, figures)

    def _copy(self, call: Call, finished: RequestResult, alias: Alias, figures: ShadowStatistics) -> None:
        """Start a copy, or count the reason why the request is not copied. `figures` count the copy, even if the alias
        gets another shadow model while the copy runs.
        """
        request = finished.request
        try:
            resolved = self._catalogue().resolve(figures.model, follow=False)
            pool = request.lane.pool
            lane = self._fleet.lane(resolved, pool=pool, machine_profile="", known_pools=(pool,))
        except SIEError:
            # the model was removed, or no lane of this pool serves the model, so every copy would fail
            self._count(alias, figures, "unsuited")
            return
        if request.operation not in resolved.entry.tasks or resolved.canonical == request.resolved.canonical:
            self._count(alias, figures, "unsuited")
            return
        refused = "large" if _is_large(call, finished) else self._refused(finished, resolved, lane)
        if refused is not None:
            self._count(alias, figures, refused)
            return
        if not self._fleet.hosts(lane, resolved.residency):
            self._opening.add(resolved.residency)
        # Of the client's headers, the copy uses only x-sie-on-item-error. It does not use the client's API key, time
        # budget and machine profile.
        headers = {"x-sie-pool": lane.pool, "x-sie-priority": "bulk", "x-sie-cache": "no-store"}
        headers |= {name: value for name, value in call.headers.items() if name == "x-sie-on-item-error"}
        own = Call(uuid7(), self._clock(), headers, grant=Grant(KEY, name=KEY), budget_s=BUDGET_S)
        copied = msgspec.structs.replace(
            request, resolved=resolved, items=request.items[:MAX_ITEMS], priority="bulk", options=UNMERGED
        )
        task = asyncio.get_running_loop().create_task(
            self._measured(own, copied, finished, alias, figures), name="shadow"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _refused(self, finished: RequestResult, resolved: Resolved, lane: Lane) -> Result | None:
        if self._clock() < self._paused_s.get(resolved.canonical, 0.0):
            return "paused"
        if len(self._tasks) >= MAX_IN_FLIGHT:
            return "busy"
        is_cold = not self._fleet.hosts(lane, resolved.residency)
        if is_cold and (resolved.residency in self._opening or not any(map(_has_room, self._fleet.of_lane(lane)))):
            return "cold"
        return "loaded" if any(self._is_loaded(candidate) for candidate in {lane, finished.request.lane}) else None

    def _is_loaded(self, lane: Lane) -> bool:
        """Return True if the lane (pool, machine profile and bundle) is too busy for copies: its work waits for more
        than LOADED_S seconds, or its wait is unknown, for example because the lane has no worker.
        """
        waits_s = [self._admission.expected_s(lane, priority) for priority in PRIORITIES]
        return any(each_s is None or each_s > LOADED_S for each_s in waits_s)

    async def _measured(
        self, call: Call, request: InferRequest, finished: RequestResult, alias: Alias, figures: ShadowStatistics
    ) -> None:
        """Run a copy and measure its results. Catches and records every error."""
        canonical = request.resolved.canonical
        result: Result = "failed"
        try:
            copied = await self._run(call, request)
            first = copied.outcomes[0][1]
            if all(isinstance(outcome, Failed) for _, outcome in copied.outcomes) and isinstance(first, Failed):
                raise SIEError.from_info(first.error)
            self._compare(finished, copied, alias, figures)
            result = "done"
        except (InvalidInput, PayloadTooLarge):  # the second model does not support this request
            result = "unsuited"
        except SIEError as error:
            result = "cold" if isinstance(error, ModelLoading) else "failed"
            self._pause(alias, canonical, error.code, SHORT_PAUSE_S if error.retryable else PAUSE_S)
        except EntryChanged:  # unlike a client's request, a copy is not run again with the new entry
            self._pause(alias, canonical, CONFIG_CHANGED, SHORT_PAUSE_S)
        except Exception as error:  # outermost handler of the task; no client waits for it
            _logger.exception("a copy of a request of alias %s to model %s failed", alias.id, canonical)
            self._pause(alias, canonical, type(error).__name__, PAUSE_S)
        finally:
            self._opening.discard(request.resolved.residency)
            self._count(alias, figures, result)

    def _pause(self, alias: Alias, canonical: str, why: str, pause_s: float) -> None:
        self._paused_s = {name: until_s for name, until_s in self._paused_s.items() if until_s > self._clock()}
        self._paused_s[canonical] = self._clock() + pause_s
        _logger.warning("model %s gets no shadow traffic of alias %s for %g s: %s", canonical, alias.id, pause_s, why)

    def _count(self, alias: Alias, figures: ShadowStatistics, result: Result) -> None:
        self._metrics.shadows.labels(alias.id, figures.model, result).inc()
        figures.copies[result] += 1

    def _compare(self, finished: RequestResult, copied: RequestResult, alias: Alias, figures: ShadowStatistics) -> None:
        names = alias.id, figures.model
        sides = ("served", finished, figures.served_ms), ("shadow", copied, figures.shadow_ms)
        # a request with cached answers says nothing about the time of its model, so the times are not compared
        for side, values, mean in () if finished.cached_items else sides:
            self._metrics.shadow_seconds.labels(*names, side).observe(values.waited_ms / 1000)
            mean.add(values.waited_ms)
        for value in cosines(finished, copied):
            self._metrics.shadow_cosine.labels(*names).observe(value)
            figures.cosine.add(value)
        if (agreement := rank_agreement(finished, copied)) is not None:
            self._metrics.shadow_rank.labels(*names).observe(agreement)
            figures.rank.add(agreement)

    async def close(self) -> None:
        """Cancel the running copies. Cancelled copies withdraw their work from the queue."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_large(call: Call, finished: RequestResult) -> bool:
    """Return True if body, inputs or reply are too large to copy: they stay in memory until the copy has run."""
    if finished.values > MAX_VALUES or len(call.body) > MAX_BYTES:
        return True
    request = finished.request
    return sum(item.size for item in (*request.items, *filter(None, (request.query,)))) > MAX_BYTES


def _has_room(beat: Heartbeat) -> bool:
    """Return True if a worker has memory for one more model of the usual size, without unloading a model."""
    held = sum(status.state in ("loaded", "loading", "unloading") for status in beat.models)
    return held == 0 or held < beat.slots


def cosines(finished: RequestResult, copied: RequestResult) -> list[float]:
    """Return the cosine of the two dense vectors of each input, if both vectors are floats of the same width. Inputs
    with chunks are omitted, because the two models may split them at different places.
    """
    runs = [result.request.options.run for result in (finished, copied)]
    if any("dense" not in run.outputs or run.dtype not in _COMPARED for run in runs):
        return []
    values = []
    for pair in zip(finished.outcomes, copied.outcomes, strict=False):
        vectors = [
            array_of(result, outcome, "dense").astype(np.float32) for result, outcome in pair if isinstance(outcome, Ok)
        ]
        if len(vectors) == 2 and vectors[0].ndim == 1 and vectors[0].shape == vectors[1].shape:
            norm = float(np.linalg.norm(vectors[0]) * np.linalg.norm(vectors[1]))
            if norm > 0:
                values.append(float(vectors[0] @ vectors[1]) / norm)
    return values


def rank_agreement(finished: RequestResult, copied: RequestResult) -> float | None:
    """Return Spearman's correlation between the scores that the two models gave the documents; None if fewer than three
    documents have both scores.
    """
    pairs = [
        (first.score, two.score)
        for (_, first), (_, two) in zip(finished.outcomes, copied.outcomes, strict=False)
        if isinstance(first, Ok) and isinstance(two, Ok) and first.score is not None and two.score is not None
    ]
    return spearman(*map(np.asarray, zip(*pairs, strict=True))) if len(pairs) > 2 else None
