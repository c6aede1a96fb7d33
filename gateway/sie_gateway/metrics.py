"""Every metric of the gateway, declared once: `Metrics` what is counted where it happens, `Live` what is read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

import sie_contracts
from sie_contracts.runtime.metrics import Names, counter, epoch_number, gauge

if TYPE_CHECKING:
    from sie_gateway.app import Gateway

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_AGREEMENT = (0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999)
_OPERATIONS = ("encode", "score", "extract")


class Metrics:
    """A series whose labels are known from the start is there from the start: what is absent cannot raise an alert."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("sie_gateway_requests", "Requests answered", ["endpoint", "status", "machine_profile"], registry=registry)
        self.latency = Histogram(
            "sie_gateway_request_latency_seconds", "Head received to reply ready", ["endpoint", "machine_profile"], buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self._answered: dict[tuple[str, int, str], tuple[Counter, Histogram]] = {}  # looking one up costs more than counting
        self.rejected = Counter(
            "sie_gateway_rejected_requests", "Refused before queueing", ["machine_profile", "bundle", "reason"], registry=registry
        )
        self.publish = Histogram(
            "sie_gateway_queue_publish_seconds", "Publish to broker ack", ["operation"], buckets=_SECONDS, registry=registry
        )
        self.result_wait = Histogram(
            "sie_gateway_queue_result_wait_seconds", "Publish to last result", ["operation"], buckets=_SECONDS, registry=registry
        )
        for operation in _OPERATIONS:
            self.publish.labels(operation)
            self.result_wait.labels(operation)
        self.ack_failures = Counter(
            "sie_gateway_queue_ack_failures", "Publishes that the broker refused or did not acknowledge, each attempt", registry=registry
        )
        self.outcomes = Counter("sie_gateway_outcomes", "Chunk results by what became of them", ["verdict"], registry=registry)
        self.inbox_dropped = Counter("sie_gateway_inbox_dropped", "Results dropped unread: the inbox was full", registry=registry)
        self.payload_offloads = Counter(
            "sie_gateway_queue_payload_offloads", "Chunks whose inputs went through the payload store", registry=registry
        )
        self.deliveries = Histogram(
            "sie_gateway_chunk_deliveries", "Deliveries that a chunk took", buckets=(1, 2, 3, 4, 5, 10), registry=registry
        )
        self.provisioning = Counter(
            "sie_gateway_provisioning_responses", "Requests told to wait for a worker that starts", registry=registry
        )
        self.alias_requests = Counter(
            "sie_gateway_alias_requests", "Answers by alias and the model that gave them", ["alias", "model"], registry=registry
        )
        self.shadows = Counter(
            "sie_gateway_shadows", "Copies of requests for a shadow by what became of them", ["alias", "model", "result"], registry=registry
        )
        self.shadow_seconds = Histogram(
            "sie_gateway_shadow_seconds", "Publish to last result, of what was served and of its copy", ["alias", "model", "side"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.shadow_cosine = Histogram(
            "sie_gateway_shadow_cosine", "Cosine of a dense vector that was served and that of its copy", ["alias", "model"],
            buckets=_AGREEMENT, registry=registry,
        )  # fmt: skip
        self.shadow_rank = Histogram(
            "sie_gateway_shadow_rank_correlation", "Spearman's correlation of the scores that were served and those of the copy",
            ["alias", "model"], buckets=_AGREEMENT, registry=registry,
        )  # fmt: skip
        self.pool_events = Counter("sie_gateway_pool_events", "What became of reservations", ["event"], registry=registry)
        self.active_lease_gpus = Gauge("sie_gateway_active_lease_gpus", "GPUs that live reservations ask for", registry=registry)

    def answered(self, endpoint: str, status: int, machine_profile: str, seconds: float | None) -> None:
        """Account for a request, once its answer has left. `endpoint` and `machine_profile` come from fixed sets, never from a client.

        `seconds` None: of what lasts for as long as the client likes.
        """
        counted = self._answered.get((endpoint, status, machine_profile))
        if counted is None:
            counted = self.requests.labels(endpoint, str(status), machine_profile), self.latency.labels(endpoint, machine_profile)
            self._answered[endpoint, status, machine_profile] = counted
        counted[0].inc()
        if seconds is not None:
            counted[1].observe(seconds)


class Live(Collector):
    """What the gateway's parts know anyway. Workers that are forgotten and demand that is over leave no series behind."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._models = Names()

    def collect(self) -> Iterator[Metric]:
        gateway, status = self._gateway, self._gateway.status
        yield gauge("sie_gateway_build_info", "1, with the version that runs", {(sie_contracts.__version__,): 1}, ["version"])
        yield from self._workers()
        demand = {(lane.machine_profile, lane.bundle): 1.0 for lane in gateway.demand.pending()}
        yield gauge("sie_gateway_pending_demand", "1 while demand counts", demand, ["machine_profile", "bundle"])
        yield gauge("sie_gateway_nats_connected", "1 while the broker is connected", {(): gateway.broker.connected})
        epoch = {(): epoch_number(gateway.feed.catalogue.epoch)}
        yield gauge("sie_gateway_config_epoch", "Writes of the catalogue that this gateway has seen", epoch)
        behind = {(): float(gateway.feed.is_behind)}
        yield gauge("sie_gateway_config_behind", "1 while the last look at the config service failed: the last catalogue serves", behind)
        yield counter("sie_gateway_config_deltas", "Config deltas by what became of them", gateway.feed.deltas, ["kind", "result"])
        yield counter("sie_gateway_dlq_events", "Work given up in all pools, the same at every gateway", {(): status.dead_letters})
        yield gauge("sie_gateway_websockets", "Websockets that are open", {(): status.looking})
        inference, admission = gateway.inference, gateway.admission
        yield gauge("sie_gateway_requests_in_progress", "Requests now in progress", {(): inference.in_progress})
        unfinished = {(): inference.unfinished_bytes}
        yield gauge("sie_gateway_unfinished_result_bytes", "Held of results of which parts are missing", unfinished)
        yield counter("sie_gateway_reattached", "Clients that came back to a run of theirs", {(): inference.away.joined})
        yield counter("sie_gateway_abandoned", "Runs cancelled because their clients stayed away", {(): inference.away.abandoned})
        tokens, items, waiting_bytes = admission.occupied()
        permits = {("tokens",): tokens, ("messages",): items}
        yield gauge("sie_gateway_permits_held", "What requests of this gateway have in the queue", permits, ["unit"])
        yield gauge("sie_gateway_waiting_bytes", "Inputs that wait in this gateway for their turn", {(): waiting_bytes})
        yield gauge("sie_gateway_gateways", "Gateways that share the windows of keys, this one included", {(): admission.peers.count()})
        yield gauge("sie_gateway_qps", "Inference requests that all gateways answer per second", {(): admission.peers.qps()})

    def _workers(self) -> Iterator[Metric]:
        seen = self._gateway.status.workers()
        infos = [each.info for each in seen]
        healthy = sum(info.healthy for info in infos)
        by_health = {("healthy",): healthy, ("unhealthy",): len(infos) - healthy}
        yield gauge("sie_gateway_workers", "Workers by health", by_health, ["status"])
        depth = {(info.name,): info.queue_depth for info in infos}
        yield gauge("sie_gateway_worker_queue_depth", "Work items that a worker holds", depth, ["worker"])
        memory = {(info.name,): info.memory_used_bytes for info in infos}
        yield gauge("sie_gateway_worker_memory_used_bytes", "Device memory in use at a worker", memory, ["worker"])
        hosts: dict[tuple[str, ...], float] = {}
        for info in infos:
            for model in info.loaded_models if info.healthy else ():
                name = (self._models(model),)
                hosts[name] = hosts.get(name, 0) + 1
        yield gauge("sie_gateway_model_workers", "Healthy workers that have a model loaded", hosts, ["model"])
