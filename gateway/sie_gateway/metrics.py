"""Every metric of the gateway, declared once."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("sie_gateway_requests", "Requests answered", ["endpoint", "status", "machine_profile"], registry=registry)
        self.latency = Histogram(
            "sie_gateway_request_latency_seconds", "Head received to reply ready", ["endpoint", "machine_profile"], buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.rejected = Counter(
            "sie_gateway_rejected_requests", "Refused before queueing", ["machine_profile", "bundle", "reason"], registry=registry
        )
        self.publish = Histogram(
            "sie_gateway_queue_publish_seconds", "Publish to broker ack", ["operation"], buckets=_SECONDS, registry=registry
        )
        self.result_wait = Histogram(
            "sie_gateway_queue_result_wait_seconds", "Publish to last result", ["operation"], buckets=_SECONDS, registry=registry
        )
        self.outcomes = Counter("sie_gateway_outcomes", "Chunk results by what became of them", ["verdict"], registry=registry)
        self.inbox_dropped = Counter("sie_gateway_inbox_dropped", "Results dropped unread: the inbox was full", registry=registry)
        self.unfinished = Gauge("sie_gateway_unfinished_result_bytes", "Held of results of which parts are missing", registry=registry)
        self.reattached = Gauge("sie_gateway_reattached", "Clients that came back to a run of theirs, since start", registry=registry)
        self.abandoned = Gauge("sie_gateway_abandoned", "Runs cancelled because their clients stayed away, since start", registry=registry)
        self.payload_offloads = Counter(
            "sie_gateway_queue_payload_offloads", "Chunks whose inputs went through the payload store", registry=registry
        )
        self.deliveries = Histogram(
            "sie_gateway_chunk_deliveries", "Deliveries that a chunk took", buckets=(1, 2, 3, 4, 5, 10), registry=registry
        )
        self.provisioning = Counter(
            "sie_gateway_provisioning_responses", "Requests told to wait for a worker that starts", registry=registry
        )
        self.pending_demand = Gauge(
            "sie_gateway_pending_demand", "1 while this gateway's demand for the lane counts", ["machine_profile", "bundle"],
            registry=registry,
        )  # fmt: skip
        self.permits = Gauge("sie_gateway_permits_held", "What requests of this gateway have in the queue", ["unit"], registry=registry)
        self.waiting_bytes = Gauge("sie_gateway_waiting_bytes", "Inputs that wait in this gateway for their turn", registry=registry)
        self.gateways = Gauge("sie_gateway_gateways", "Gateways that share the windows of keys, this one included", registry=registry)
        self.in_progress = Gauge("sie_gateway_requests_in_progress", "Requests now in progress", registry=registry)
        self.workers = Gauge("sie_gateway_workers", "Workers by health", ["status"], registry=registry)
        self.config_deltas = Gauge("sie_gateway_config_deltas", "Config deltas by result since start", ["result"], registry=registry)
        self.nats_connected = Gauge("sie_gateway_nats_connected", "1 while the broker is connected", registry=registry)
