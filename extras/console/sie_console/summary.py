"""Summary of the cluster for the page at `/`. All open pages share one summary. A summary that takes longer to build is
rebuilt less often, so that the builds take at most a fixed part of a CPU core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from sie_console.api import ClusterFinding
from sie_contracts.api.operations import ClusterInfo, ModelSummary, WorkerInfo
from sie_contracts.wire.heartbeats import Heartbeat, ModelStatus
from sie_contracts.wire.records import Placement
from sie_contracts.wire.topology import Lane
from sie_gateway.fleet.lag import Labels
from sie_gateway.fleet.planner import ModelBacklog, in_order, model_of
from sie_gateway.fleet.pool_rules import HIDDEN
from sie_gateway.operations.status import of_pool

COST_SHARE = 0.002  # largest share of one CPU core's time for the builds of one summary
MAX_SHOWN = 50  # largest number of workers, and largest number of models, on the page
T = TypeVar("T")


class CachedSummary(Generic[T]):
    """Cache of the result of `build`. The cache calls `build` so rarely that the calls take at most the share
    COST_SHARE of a CPU core.
    """

    def __init__(self, build: Callable[[], T]) -> None:
        self._build = build
        self._last: list[T] = []
        self.until_s = 0.0

    def __call__(self) -> T:
        if not self._last or time.monotonic() >= self.until_s:
            began_s = time.thread_time()
            self._last = [self._build()]
            self.until_s = time.monotonic() + (time.thread_time() - began_s) / COST_SHARE
        return self._last[0]


@dataclass(frozen=True)
class ClusterSummary:
    """Workers and models of the cluster, in the order in which the page shows them. `failures`: model -> error of a
    failed load. `findings`: faults of loads and clocks.
    """

    cluster: ClusterInfo
    workers: Sequence[WorkerInfo]
    models: Sequence[ModelSummary]
    failures: Mapping[str, str]
    in_flight: int
    findings: Sequence[ClusterFinding]

    def shown(self, text: str, dead_letters: int, visible: Callable[[str], bool]) -> dict[str, Any]:
        """Return fields of a ClusterView, with at most MAX_SHOWN workers and MAX_SHOWN models. Leave out models without
        `text` in their name. `visible` returns False for a pool whose name the credential may not read.
        """
        matching = [entry for entry in self.models if text in entry.name.lower()] if text else self.models
        models = matching[:MAX_SHOWN]
        return {
            "cluster": self.cluster,
            "counts": {
                "workers": len(self.workers),
                "models": len(matching),
                "in_flight": self.in_flight,
                "dead_letters": dead_letters,
            },
            "workers": [of_pool(entry, visible) for entry in self.workers[:MAX_SHOWN]],
            "models": models,
            "failures": {model.name: self.failures[model.name] for model in models if model.name in self.failures},
        }


class Waitings:
    """Waiting messages by model and lane (pool, machine profile and bundle), summed over the priorities."""

    def __init__(self, waiting_by_labels: Mapping[Labels, ModelBacklog]) -> None:
        self._found: dict[tuple[str, ...], list[ModelBacklog]] = {}
        for (*model_and_lane, _priority), waiting in waiting_by_labels.items():
            self._found.setdefault(tuple(model_and_lane), []).append(waiting)

    def of_model(self, model: str, lane: Lane) -> ModelBacklog:
        entries = self._found.get((model, lane.pool, lane.machine_profile, lane.bundle), ())
        return ModelBacklog(
            sum(entry.count for entry in entries), max((entry.oldest_s for entry in entries), default=0.0)
        )


@dataclass(frozen=True)
class LaneTable:
    """Models of a lane with the workers that host them, one row for each model. Models with waiting work come first."""

    lane: Lane
    age_s: float
    workers: int
    rows: Sequence[Mapping[str, Any]]

    @classmethod
    def from_table(
        cls, table: Placement, lane: Lane, beats: Sequence[Heartbeat], waiting: Waitings, now_s: float
    ) -> LaneTable:
        """Build the rows from the placement of a lane, the heartbeats of its healthy workers and waiting messages."""
        reports: dict[tuple[str, str], list[ModelStatus]] = {}  # (worker, model) -> statuses of the model's profiles
        for beat in beats:
            for status in in_order(beat.models):
                reports.setdefault((beat.worker, model_of(status)), []).append(status)
        rows = list[dict[str, Any]]()
        for model, hosts in table.hosts.items():
            statuses = {host: reports.get((host, model), []) for host in hosts}
            reported = [status for profiles in statuses.values() for status in profiles]
            raised_s, queued = table.raised_s.get(model), waiting.of_model(model, lane)
            rows.append(
                {
                    "model": model,
                    "hosts": {host: profiles[-1].state if profiles else "-" for host, profiles in statuses.items()},
                    "memory_bytes": sum(status.memory_bytes for status in reported),
                    "tokens_per_s": round(sum(status.cost_rate for status in reported), 1),
                    "waiting": queued.count,
                    "oldest_s": round(queued.oldest_s, 3),
                    "raised_s": None if raised_s is None else round(max(0.0, now_s - raised_s), 1),
                }
            )
        rows.sort(key=lambda row: (-row["waiting"], -row["tokens_per_s"], row["model"]))
        return cls(lane, round(max(0.0, now_s - table.at_s), 1), len(beats), rows)

    def shown(self, text: str, visible: Callable[[str], bool]) -> dict[str, Any]:
        """Return the table, with at most MAX_SHOWN models that have `text` in their name. `visible`: see `of_pool`."""
        rows = [row for row in self.rows if text in row["model"].lower()] if text else self.rows
        return {
            "lane": str(self.lane if visible(self.lane.pool) else replace(self.lane, pool=HIDDEN)),
            "age_s": self.age_s,
            "workers": self.workers,
            "models": len(rows),
            "shown": rows[:MAX_SHOWN],
        }
