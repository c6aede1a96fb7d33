"""Overview of the cluster for the page: workers, models, queues, findings, and the placement of models.

While a page is open, `WorkerProbe` checks every second whether the shown workers are connected, at most MAX_ASKED at a
time. The probe sends a request to each worker's subject. If the subject has no subscriber, the broker reports this at
once. Heartbeats show a lost worker only after SIE_HEARTBEAT_TIMEOUT_MS. Only pages use the result; routing does not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

import sie_contracts
from sie_broker import BrokerError, Bus, NoResponder
from sie_console.findings import (
    MAX_FINDINGS,
    WINDOW_S,
    QueueTrend,
    of_clocks,
    of_loads,
    of_plugins,
    of_queues,
    of_refusals,
    of_workers,
)
from sie_console.history import LogTail, RequestHistory
from sie_console.summary import MAX_SHOWN, CachedSummary, ClusterSummary, LaneTable, Waitings
from sie_contracts.wire import topology
from sie_gateway.admission.grant import Grant
from sie_gateway.fleet.lag import Lag
from sie_gateway.fleet.placement import Placer
from sie_gateway.operations.status import ClusterStatus, failures, of_pool
from sie_gateway.plugin import PluginContext, Service
from sie_runtime.process import Stop, Tasks

EVERY_S = 1.0
# largest number of workers that the probe checks every EVERY_S seconds, because a check takes 0.1 ms of CPU
MAX_ASKED = 16
# seconds after the last request of a page during which the probe still checks the workers on that page
LOOKED_S = 5.0
# seconds for which a check waits for the broker's report that a worker is gone; a connected worker sends no reply
HEARD_S = 0.5


class WorkerProbe:
    """Probe that checks which workers are connected to the broker. `gone`: workers that were not connected at the last
    check. One task calls `run`.
    """

    def __init__(self, bus: Bus, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._clock = clock
        self._until_s = 0.0
        self._wanted: tuple[str, ...] = ()
        self._next = 0
        self.gone: frozenset[str] = frozenset()

    def watch(self, workers: Iterable[str]) -> None:
        """Set the workers that `run` checks: the workers that the page at `/` shows now, in any browser."""
        self._wanted = tuple(sorted(workers))
        self._until_s = self._clock() + LOOKED_S

    async def run(self, stop: Stop) -> None:
        """Check the watched workers every EVERY_S seconds, until LOOKED_S seconds after the last `watch`."""
        while not await stop.wait_for(EVERY_S):
            workers = self._wanted if self._clock() < self._until_s else ()
            first = self._next % max(1, len(workers))
            checked = (workers[first:] + workers[:first])[:MAX_ASKED]
            self._next = first + len(checked)
            is_gone = await asyncio.gather(*(self._is_gone(worker) for worker in checked))
            missing = {worker for worker, is_missing in zip(checked, is_gone, strict=True) if is_missing}
            self.gone = frozenset(missing | (self.gone & set(workers).difference(checked)))

    async def _is_gone(self, worker: str) -> bool:
        try:
            await self._bus.request(topology.assigned_subject(worker), b"", HEARD_S)
        except NoResponder:
            return True
        # a time-out means that the worker is subscribed and connected; other modules report an unreachable broker
        except BrokerError:
            return False
        return False


QUEUES_EVERY_S = 5.0


class Overview(Service):
    """Data of the page in one gateway. `data_dir`: data folder if `sie serve` runs this gateway."""

    def __init__(self, status: ClusterStatus, placer: Placer, lag: Lag, bus: Bus, data_dir: Path | None = None) -> None:
        self._status = status
        self._placer = placer
        self._lag = lag
        self._data_dir = data_dir
        self.history = RequestHistory()
        self.log = LogTail()
        self.probe = WorkerProbe(bus)
        self._trend = QueueTrend(QUEUES_EVERY_S)
        self._glance = CachedSummary(self._summarise)
        self._placed = CachedSummary(self._lane_tables)

    @classmethod
    def build(cls, context: PluginContext) -> Overview:
        """Build the overview, which hears of the gateway's requests."""
        overview = cls(context.status, context.placer, context.lag, context.broker, context.data_dir)
        context.listeners.admitted.append(overview.log.admitted)
        context.listeners.ended.append(overview.history.ended)
        return overview

    def start(self, tasks: Tasks, stop: Stop) -> None:
        tasks.start(self._run(stop), "overview")
        tasks.start(self.probe.run(stop), "worker probe")

    async def _run(self, stop: Stop) -> None:
        """Store log lines, and sample the lengths of the queues every QUEUES_EVERY_S seconds."""
        with self.log.listening():
            while not await stop.wait_for(QUEUES_EVERY_S):
                queues = self._status.queues()
                self._trend.sample(queues[0] if queues else None)

    def _summarise(self) -> ClusterSummary:
        workers, cluster, models = self._status.view()
        missing = self.probe.gone
        models.sort(key=lambda model: (-model.total_queue_depth, model.state == "available", model.name))
        infos = [
            msgspec.structs.replace(worker.info, healthy=False, reason="it is not connected to the broker")
            if worker.info.name in missing
            else worker.info
            for worker in workers
        ]
        infos.sort(key=lambda info: (info.healthy, -info.queue_depth, info.name))
        cluster = msgspec.structs.replace(cluster, worker_count=sum(info.healthy for info in infos))
        healthy = [worker for worker in workers if worker.info.healthy]
        clocks = {worker.info.name: worker.clock_ahead_s for worker in healthy if worker.clock_ahead_s is not None}
        findings = [*of_loads((worker.info.name, worker.failures) for worker in workers), *of_clocks(clocks)]
        in_flight = sum(info.queue_depth for info in infos)
        return ClusterSummary(cluster, infos, models, failures(workers), in_flight, findings[:MAX_FINDINGS])

    def shown(self, text: str, grant: Grant) -> dict[str, Any]:
        """Return the data of the page at `/` for a credential: counts, at most MAX_SHOWN workers, and at most MAX_SHOWN
        models with `text` in their name. Unhealthy workers come first, then busy workers. Models with queued work come
        first.
        """
        glance, queues, visible = self._glance(), self._status.queues(), self._status.visible(grant)
        self.probe.watch(info.name for info in glance.workers[:MAX_SHOWN] if self._placer.fleet.listens(info.name))
        lanes = queues[0] if queues else []
        refused = of_refusals(*self.history.counted(WINDOW_S), has_loads=bool(glance.failures))
        findings = [
            *of_plugins(self._status.plugin_faults),
            *of_workers([of_pool(info, visible) for info in glance.workers]),
            *of_queues(lanes, glance.workers, self._trend, visible),
            *refused,
            *glance.findings,
        ]
        return {
            "version": sie_contracts.__version__,
            **glance.shown(text.lower(), self._status.dead_letters, visible),
            "queues": [of_pool(entry, visible) for entry in lanes] if queues else None,
            "findings": findings[:MAX_FINDINGS],
            **({"data_dir": str(self._data_dir)} if self._data_dir is not None else {}),
        }

    def placed(self, text: str, grant: Grant) -> dict[str, Any]:
        """Return the workers that host each model, by lane (pool, machine profile and bundle). A lane has at most
        MAX_SHOWN models, all with `text` in their name. Models with waiting messages come first.
        """
        visible = self._status.visible(grant)
        return {"lanes": [lane.shown(text.lower(), visible) for lane in self._placed()]}

    def _lane_tables(self) -> list[LaneTable]:
        waiting = Waitings(self._lag.models)
        lanes, now_s = self._placer.fleet.lanes(), self._placer.now_s()
        return [
            LaneTable.from_table(table, lane, lanes.get(lane, []), waiting, now_s)
            for lane, table in sorted(self._placer.tables().items(), key=lambda item: str(item[0]))
        ]
