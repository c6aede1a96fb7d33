"""Metrics that the gateway updates when an event happens. `collector` has the metrics that are read at each scrape."""

from __future__ import annotations

from typing import get_args

from prometheus_client import Counter, Histogram

from sie_contracts.wire.messages import Operation
from sie_runtime.http.refusals import REFUSED
from sie_runtime.metrics import MetricMaker, exemplar

_VERDICTS = ("taken", "duplicate", "unknown", "undecodable", "no_room", "damaged")


class Metrics:
    """Metrics of the gateway. Series whose label values are known here exist from the start, because an alert cannot
    fire on a missing series. Plug-ins create their metrics with `make`.
    """

    def __init__(self) -> None:
        self.make = make = MetricMaker("gateway")
        self.registry = make.registry
        self._traffic = make.traffic
        self.requests = make.counters("sie_gateway_requests")
        self.latency = make.histograms("sie_gateway_request_latency_seconds")
        # metric objects by (endpoint, status, machine profile), stored because `labels` takes longer than the counting
        self._answered: dict[tuple[str, int, str], tuple[Counter, Histogram]] = {}
        self.rejected = make.counters("sie_gateway_rejected_requests")
        self.key_tokens = make.counters("sie_gateway_key_tokens")
        self.key_device_seconds = make.counters("sie_gateway_key_device_seconds")
        # series by operation or verdict, stored because `labels` takes longer than the counting
        publish = make.histograms("sie_gateway_queue_publish_seconds")
        result_wait = make.histograms("sie_gateway_queue_result_wait_seconds")
        self.publish = {operation: publish.labels(operation) for operation in get_args(Operation)}
        self.result_wait = {operation: result_wait.labels(operation) for operation in get_args(Operation)}
        self.ack_failures = make.counter("sie_gateway_queue_ack_failures")
        outcomes = make.counters("sie_gateway_outcomes")
        self.outcomes = {verdict: outcomes.labels(verdict) for verdict in _VERDICTS}
        self.inbox_dropped = make.counter("sie_gateway_inbox_dropped")
        self.payload_offloads = make.counter("sie_gateway_queue_payload_offloads")
        self.deliveries = make.histogram("sie_gateway_chunk_deliveries")
        self.refused = make.counters("sie_gateway_refused_below_routes")
        for reason in REFUSED:
            self.refused.labels(reason)
        self.provisioning = make.counter("sie_gateway_provisioning_responses")
        self.alias_requests = make.counters("sie_gateway_alias_requests")
        self.shadows = make.counters("sie_gateway_shadows")
        self.shadow_seconds = make.histograms("sie_gateway_shadow_seconds")
        self.shadow_cosine = make.histograms("sie_gateway_shadow_cosine")
        self.shadow_rank = make.histograms("sie_gateway_shadow_rank_correlation")
        self.pool_events = make.counters("sie_gateway_pool_events")
        self.active_lease_gpus = make.gauge("sie_gateway_active_lease_gpus")

    def count_refused(self, reason: str) -> None:
        """Count a request that was refused before it reached a route; `reason` is one of REFUSED."""
        self.refused.labels(reason).inc()

    def answered(self, endpoint: str, status: int, machine_profile: str, seconds: float | None) -> None:
        """Count a request that has ended, by a response or because the client disconnected. `endpoint` and
        `machine_profile`: label values of fixed sets, never a client's text. `seconds`: latency, None for a websocket.
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

    def used(self, key: str, tokens: int, device_s: float) -> None:
        """Add the usage of one request to an API key. `key`: the key's name in metrics."""
        self._traffic.met(key)
        self.key_tokens.labels(key).inc(tokens)
        self.key_device_seconds.labels(key).inc(device_s)
