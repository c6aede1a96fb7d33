"""The metrics of the gateway: `Metrics` what is counted where it happens, `Live` what is read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

import sie_contracts
from sie_runtime.metrics import Maker, Scrape, epoch_number, exemplar
from sie_runtime.refusals import REFUSED

if TYPE_CHECKING:
    from sie_broker import Connection
    from sie_gateway.admission import Admission
    from sie_gateway.demand import DemandRecords
    from sie_gateway.finished import Finished
    from sie_gateway.inbox import Inbox
    from sie_gateway.inference import Inference
    from sie_gateway.lag import Lag
    from sie_gateway.status import Status
    from sie_runtime.feed import CatalogueFeed

_FETCHES = ("fetched", "refused", "failed")
_OPERATIONS = ("encode", "score", "extract")
_VERDICTS = ("taken", "duplicate", "unknown", "undecodable", "no_room", "damaged")


class Metrics:
    """A series whose labels are known from the start is there from the start: what is absent cannot raise an alert."""

    def __init__(self) -> None:
        make = Maker("gateway")
        self.registry = make.registry
        self._traffic = make.traffic
        self.requests = make.counters("sie_gateway_requests")
        self.latency = make.histograms("sie_gateway_request_latency_seconds")
        self._answered: dict[
            tuple[str, int, str], tuple[Counter, Histogram]
        ] = {}  # looking one up costs more than counting
        self.rejected = make.counters("sie_gateway_rejected_requests")
        self.key_tokens = make.counters("sie_gateway_key_tokens")
        self.key_device_seconds = make.counters("sie_gateway_key_device_seconds")
        self.publish = make.histograms("sie_gateway_queue_publish_seconds")
        self.result_wait = make.histograms("sie_gateway_queue_result_wait_seconds")
        for operation in _OPERATIONS:
            self.publish.labels(operation)
            self.result_wait.labels(operation)
        self.ack_failures = make.counter("sie_gateway_queue_ack_failures")
        self.outcomes = make.counters("sie_gateway_outcomes")
        for verdict in _VERDICTS:
            self.outcomes.labels(verdict)
        self.inbox_dropped = make.counter("sie_gateway_inbox_dropped")
        self.payload_offloads = make.counter("sie_gateway_queue_payload_offloads")
        self.deliveries = make.histogram("sie_gateway_chunk_deliveries")
        self.refused = make.counters("sie_gateway_refused_below_routes")
        for reason in REFUSED:
            self.refused.labels(reason)
        self._image_fetches = make.counters("sie_gateway_image_fetches")
        for result in _FETCHES:
            self._image_fetches.labels(result)
        self.provisioning = make.counter("sie_gateway_provisioning_responses")
        self.alias_requests = make.counters("sie_gateway_alias_requests")
        self.shadows = make.counters("sie_gateway_shadows")
        self.shadow_seconds = make.histograms("sie_gateway_shadow_seconds")
        self.shadow_cosine = make.histograms("sie_gateway_shadow_cosine")
        self.shadow_rank = make.histograms("sie_gateway_shadow_rank_correlation")
        self.pool_events = make.counters("sie_gateway_pool_events")
        self.active_lease_gpus = make.gauge("sie_gateway_active_lease_gpus")

    def count_fetch(self, result: str) -> None:
        """Count an image at a URL; `result` is one of _FETCHES."""
        self._image_fetches.labels(result).inc()

    def count_refused(self, reason: str) -> None:
        """Count a request that no route saw; `reason` is one of REFUSED."""
        self.refused.labels(reason).inc()

    def answered(self, endpoint: str, status: int, machine_profile: str, seconds: float | None) -> None:
        """Account for a request, once its answer has left. `endpoint` and `machine_profile` come from fixed sets, never
        from a client.

        `seconds` None: of what lasts for as long as the client likes.
        """
        counted = self._answered.get((endpoint, status, machine_profile))
        if counted is None:
            counted = (
                self.requests.labels(endpoint, str(status), machine_profile),
                self.latency.labels(endpoint, machine_profile),
            )
            self._answered[endpoint, status, machine_profile] = counted
        counted[0].inc()
        if seconds is not None:
            counted[1].observe(seconds, exemplar())

    def used(self, key: str, finished: Finished) -> None:
        """Account to a key, by the name that its grant has in metrics, what a request of it used."""
        self._traffic.met(key)
        self.key_tokens.labels(key).inc(finished.usage["total_tokens"])
        self.key_device_seconds.labels(key).inc(finished.device_s)


class Live(Collector):
    """What the gateway's parts know anyway. Workers that are forgotten and demand that is over leave no
    series behind.
    """

    def __init__(
        self,
        broker: Connection,
        feed: CatalogueFeed,
        status: Status,
        lag: Lag,
        demand: DemandRecords,
        inference: Inference,
        inbox: Inbox,
        admission: Admission,
    ) -> None:
        self._broker = broker
        self._feed = feed
        self._status = status
        self._lag = lag
        self._demand = demand
        self._inference = inference
        self._inbox = inbox
        self._admission = admission
        self._scrape = Scrape("gateway")

    def collect(self) -> Iterator[Metric]:
        gauge, counter = self._scrape.gauge, self._scrape.counter
        yield gauge("sie_gateway_build_info", {(sie_contracts.__version__,): 1})
        yield from self._workers()
        yield from self._queue()
        demand = {(lane.machine_profile, lane.bundle): 1.0 for lane in self._demand.pending()}
        yield gauge("sie_gateway_pending_demand", demand)
        yield gauge("sie_gateway_nats_connected", self._broker.connected)
        yield gauge("sie_gateway_config_epoch", epoch_number(self._feed.catalogue.epoch))
        yield gauge("sie_gateway_config_behind", self._feed.is_behind)
        yield counter("sie_gateway_config_deltas", self._feed.deltas)
        yield counter("sie_gateway_dlq_events", self._status.dead_letters)
        yield gauge("sie_gateway_websockets", self._status.seats.taken)
        yield gauge("sie_gateway_requests_in_progress", self._inference.in_progress)
        yield gauge("sie_gateway_unfinished_result_bytes", self._inbox.unfinished_bytes)
        yield counter("sie_gateway_reattached", self._inference.away.joined)
        yield counter("sie_gateway_abandoned", self._inference.away.abandoned)
        tokens, items, waiting_bytes = self._admission.occupied()
        yield gauge("sie_gateway_permits_held_tokens", tokens)
        yield gauge("sie_gateway_permits_held_messages", items)
        yield gauge("sie_gateway_waiting_bytes", waiting_bytes)
        yield gauge("sie_gateway_gateways", self._admission.peers.count())
        yield gauge("sie_gateway_qps", self._admission.peers.qps())

    def _workers(self) -> Iterator[Metric]:
        gauge = self._scrape.gauge
        seen = self._status.workers()
        infos = [each.info for each in seen]
        healthy = sum(info.healthy for info in infos)
        yield gauge("sie_gateway_workers", {("healthy",): healthy, ("unhealthy",): len(infos) - healthy})
        yield gauge("sie_gateway_worker_queue_depth", {(info.name,): info.queue_depth for info in infos})
        yield gauge("sie_gateway_worker_memory_used_bytes", {(info.name,): info.memory_used_bytes for info in infos})
        hosts: dict[tuple[str, ...], float] = {}
        for info in infos:
            for model in info.loaded_models if info.healthy else ():
                hosts[model,] = hosts.get((model,), 0) + 1
        yield gauge("sie_gateway_model_workers", hosts)

    def _queue(self) -> Iterator[Metric]:
        for name, found in (("queue", self._lag.lanes()), ("model_queue", self._lag.models())):
            messages = {labels: float(waiting.count) for labels, waiting in found.items()}
            oldest_s = {labels: waiting.oldest_s for labels, waiting in found.items()}
            yield self._scrape.gauge(f"sie_gateway_{name}_messages", messages)
            yield self._scrape.gauge(f"sie_gateway_{name}_oldest_seconds", oldest_s)
