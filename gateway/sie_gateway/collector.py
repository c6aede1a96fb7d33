"""Metrics whose values are read from the gateway's objects each time Prometheus scrapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

import sie_contracts
from sie_broker import Connection
from sie_gateway.admission.admission import Admission
from sie_gateway.fleet.demand import DemandRecords
from sie_gateway.fleet.lag import Lag
from sie_gateway.inference.handler import Inference
from sie_gateway.inference.results import ResultInbox
from sie_gateway.operations.status import ClusterStatus
from sie_runtime.feed import CatalogueFeed
from sie_runtime.metrics import Scrape, epoch_number


@dataclass(eq=False)
class Live(Collector):
    """Collector that reads metrics from the gateway's objects. Exports no series for workers that have left."""

    broker: Connection
    feed: CatalogueFeed
    status: ClusterStatus
    lag: Lag
    demand: DemandRecords
    inference: Inference
    inbox: ResultInbox
    admission: Admission
    _scrape: Scrape = field(default_factory=lambda: Scrape("gateway"), init=False)

    def collect(self) -> Iterator[Metric]:
        gauge, counter = self._scrape.gauge, self._scrape.counter
        yield gauge("sie_gateway_build_info", {(sie_contracts.__version__,): 1})
        yield from self._workers()
        yield from self._queue()
        demand = {(lane.machine_profile, lane.bundle): 1.0 for lane in self.demand.pending()}
        yield gauge("sie_gateway_pending_demand", demand)
        yield gauge("sie_gateway_nats_connected", self.broker.connected)
        yield gauge("sie_gateway_config_epoch", epoch_number(self.feed.catalogue.epoch))
        yield gauge("sie_gateway_config_behind", self.feed.is_behind)
        yield counter("sie_gateway_config_deltas", self.feed.deltas)
        yield counter("sie_gateway_dlq_events", self.status.dead_letters)
        yield gauge("sie_gateway_websockets", self.status.seats.taken)
        yield gauge("sie_gateway_requests_in_progress", self.inference.slots.used)
        yield gauge("sie_gateway_unfinished_result_bytes", self.inbox.unfinished_bytes)
        yield counter("sie_gateway_reattached", self.inference.away.joined)
        yield counter("sie_gateway_abandoned", self.inference.away.abandoned)
        tokens, items, waiting_bytes = self.admission.occupied()
        yield gauge("sie_gateway_permits_held_tokens", tokens)
        yield gauge("sie_gateway_permits_held_messages", items)
        yield gauge("sie_gateway_waiting_bytes", waiting_bytes)
        yield gauge("sie_gateway_gateways", self.admission.peers.count())
        yield gauge("sie_gateway_qps", self.admission.peers.qps())

    def _workers(self) -> Iterator[Metric]:
        gauge = self._scrape.gauge
        workers = self.status.workers()
        infos = [worker.info for worker in workers]
        healthy = sum(info.healthy for info in infos)
        yield gauge("sie_gateway_workers", {("healthy",): healthy, ("unhealthy",): len(infos) - healthy})
        yield gauge("sie_gateway_worker_queue_depth", {(info.name,): info.queue_depth for info in infos})
        yield gauge("sie_gateway_worker_memory_used_bytes", {(info.name,): info.memory_used_bytes for info in infos})
        hosts: Counter[tuple[str, ...]] = Counter(
            (model,) for info in infos if info.healthy for model in info.loaded_models
        )
        yield gauge("sie_gateway_model_workers", hosts)

    def _queue(self) -> Iterator[Metric]:
        for name, figures in (("queue", self.lag.lanes), ("model_queue", self.lag.models)):
            messages = {labels: float(waiting.count) for labels, waiting in figures.items()}
            oldest_s = {labels: waiting.oldest_s for labels, waiting in figures.items()}
            yield self._scrape.gauge(f"sie_gateway_{name}_messages", messages)
            yield self._scrape.gauge(f"sie_gateway_{name}_oldest_seconds", oldest_s)
