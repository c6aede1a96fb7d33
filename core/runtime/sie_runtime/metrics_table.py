"""Table of all metrics of all processes. Each process creates its metrics from this table; dashboards, alerts and
docs/metrics.md are checked against it.

`Metric.most`: largest number of label sets (combinations of label values) of a metric. There is a limit because clients
may name ten thousand models. When the limit is reached, further label sets are counted with the value `other` in the
labels that FOLDED lists; `Metric.rest` label sets are reserved for this. In a metric with `series_per_name`, the
busiest names (values of the first label) have series of their own: `series_per_name` series are reserved for each of
these names, which may also use free series. In any other metric, the first label sets have series of their own.
A process has at most MAX_SERIES series in total.

A package adds rows by an entry point of `sie.metrics`: `module:attribute` of a map from processes to sequences of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sie_contracts import entry_points
from sie_contracts.models.entries import ENGINE_POINTS
from sie_contracts.settings import MAX_DEVICES

Kind = Literal["counter", "gauge", "histogram"]
Process = Literal["gateway", "worker", "config"]
MAX_SERIES = 2000
ENTRY_POINTS = "sie.metrics"
OTHER = "other"
FOLDED = frozenset({"model", "alias", "key", "worker", "pool", "machine_profile", "bundle"})
_ENGINES = (*entry_points.names(ENGINE_POINTS), "torch")
LABELS = {
    "alias": "an alias of the catalogue",
    "bundle": "the bundle of a lane",
    "device": (
        "a device of a worker, as torch names it, with a number if several have the same name; empty until its adapter "
        "has started"
    ),
    "endpoint": (
        "a route, whatever model its path names; at workers: encode, score, extract, embeddings, tokenize, decode"
    ),
    "engine": f"the engine that computes the hidden states of a model: {', '.join(_ENGINES)}",
    "event": "what happened to a reservation",
    "key": "the id of a key; `static-1`, `static-2` for tokens of the settings, `admin`, `anonymous`; `_shadow` for "
    "copies to a shadow",
    "kind": "put, removal, unknown",
    "machine_profile": "the machine profile of a lane; empty before one is chosen",
    "method": "the HTTP method",
    "model": "an id of the catalogue; at workers also `id:profile` if a profile needs weights of its own",
    "operation": "encode, score, extract, tokenize, decode",
    "outcome": (
        "the outcome of a delivery: taken, duplicate, unknown (its request is closed), unconfirmed, fenced, cancelled, "
        "late, changed, handed_back"
    ),
    "phase": "total and its parts: queue, tokenize, batch_wait, inference, postprocess",
    "pool": "the pool of a lane",
    "priority": "interactive, bulk",
    "reason": "the reason of the refusal",
    "redelivered": "true, false",
    "result": "the outcome",
    "route": "a route of the config service, with placeholders for names in its path",
    "side": "served, shadow",
    "state": "the state of a job: queued, planning, running, paused, finalizing, completed, failed, cancelled, expired",
    "status": (
        "the HTTP status; 499: the client had disconnected. In metrics of workers: success, error, queue_full. In "
        "`sie_gateway_workers`: healthy, unhealthy"
    ),
    "verdict": "what the gateway did with a result",
    "version": "of the distribution",
    "worker": "the id of a worker",
}

_REQUEST_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120)
_CHUNK_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 15, 60)
_COUNTS = (1, 2, 4, 8, 16, 64, 256, 1024)
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1)
_AGREEMENT = (0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999)
# Number of values of the label `endpoint` at a gateway. A metric with this label and `machine_profile` reserves as many
# label sets (`Metric.rest`): one for each endpoint, with the machine profile `other`.
_ENDPOINTS = 26
_CHUNK_ENDPOINTS = 6
_BELOW = (
    "Requests that the HTTP server itself refused or broke off: `host` (SIE_ALLOWED_HOSTS), `origin` (a foreign page), "
    "`malformed` (not HTTP/1.1), `connections` (too many), `slow` (a body slower than SIE_MIN_BODY_RATE), `unread` (a "
    "reply that its client did not read)"
)


@dataclass(frozen=True)
class Metric:
    """Row of the table. An exported counter's name ends in `_total`. `buckets`: upper bounds, without infinity."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    most: int = 1
    rest: int = 1
    buckets: tuple[float, ...] = ()
    series_per_name: int = 0

    @property
    def exported(self) -> tuple[str, ...]:
        """Return the names under which Prometheus sees the metric, such as NAME_bucket and NAME_sum."""
        endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}[self.kind]
        return tuple(self.name + ending for ending in endings)

    @property
    def series(self) -> int:
        """Return the largest number of time series that the metric can have."""
        return self.most * (len(self.buckets) + 3 if self.kind == "histogram" else 1)


_GATEWAY = (
    # Requests: rate, errors, duration
    Metric("sie_gateway_requests", "counter", "Requests answered", ("endpoint", "status", "machine_profile"), 160, 80),
    Metric(
        "sie_gateway_request_latency_seconds",
        "histogram",
        "Time from the arrival of a request's headers until its reply",
        ("endpoint", "machine_profile"),
        36,
        _ENDPOINTS,
        _REQUEST_S,
    ),
    Metric("sie_gateway_requests_in_progress", "gauge", "Requests now in progress"),
    Metric(
        "sie_gateway_qps",
        "gauge",
        "Inference requests that all gateways answer per second; every gateway reports the same",
    ),
    Metric(
        "sie_gateway_rejected_requests",
        "counter",
        "Refused before queueing",
        ("machine_profile", "bundle", "reason"),
        48,
        16,
    ),
    Metric("sie_gateway_refused_below_routes", "counter", _BELOW, ("reason",), 6),
    Metric(
        "sie_gateway_provisioning_responses", "counter", "Requests that were told to wait until a worker has started"
    ),
    Metric(
        "sie_gateway_reattached",
        "counter",
        "Clients that disconnected, sent their request again, and joined the run of the first request",
    ),
    Metric(
        "sie_gateway_abandoned",
        "counter",
        "Requests cancelled because their clients disconnected and did not send them again",
    ),
    Metric("sie_gateway_key_tokens", "counter", "Tokens that were run for a key", ("key",), 48, series_per_name=1),
    Metric(
        "sie_gateway_key_device_seconds",
        "counter",
        "Device time charged to a key: the time of each batch, times the key's share of the batch's tokens",
        ("key",),
        48,
        series_per_name=1,
    ),
    # Queue of a lane (pool, machine profile and bundle)
    Metric(
        "sie_gateway_queue_oldest_seconds",
        "gauge",
        "Age of the oldest message of a lane and priority, leased ones included",
        ("pool", "machine_profile", "bundle", "priority"),
        24,
        2,
    ),
    Metric(
        "sie_gateway_queue_messages",
        "gauge",
        "Messages of a lane and priority, leased ones included",
        ("pool", "machine_profile", "bundle", "priority"),
        24,
        2,
    ),
    Metric(
        "sie_gateway_model_queue_oldest_seconds",
        "gauge",
        "Age of a model's oldest message; only for the models with the most or the oldest work",
        ("model", "pool", "machine_profile", "bundle", "priority"),
        40,
        2,
    ),
    Metric(
        "sie_gateway_model_queue_messages",
        "gauge",
        "Messages of a model in the queue; only for the models with the most or the oldest work",
        ("model", "pool", "machine_profile", "bundle", "priority"),
        40,
        2,
    ),
    Metric(
        "sie_gateway_queue_publish_seconds",
        "histogram",
        "Time from a publish to the broker's acknowledgement",
        ("operation",),
        6,
        1,
        _REQUEST_S,
    ),
    Metric(
        "sie_gateway_queue_result_wait_seconds",
        "histogram",
        "Time from the publish of a request's messages to the last result",
        ("operation",),
        6,
        1,
        _REQUEST_S,
    ),
    Metric(
        "sie_gateway_queue_ack_failures",
        "counter",
        "Attempts to publish a message that the broker refused or did not acknowledge",
    ),
    Metric("sie_gateway_queue_payload_offloads", "counter", "Chunks whose inputs went through the payload store"),
    Metric(
        "sie_gateway_chunk_deliveries",
        "histogram",
        "Number of times that a chunk was delivered before its result came",
        (),
        1,
        1,
        (1, 2, 3, 4, 5, 10),
    ),
    Metric("sie_gateway_outcomes", "counter", "Results of chunks, by what was done with them", ("verdict",), 12),
    Metric("sie_gateway_inbox_dropped", "counter", "Results dropped unread: the inbox was full"),
    Metric("sie_gateway_unfinished_result_bytes", "gauge", "Memory of results that have not arrived completely yet"),
    Metric("sie_gateway_permits_held_tokens", "gauge", "Tokens that requests of this gateway have in the queue"),
    Metric("sie_gateway_permits_held_messages", "gauge", "Messages that requests of this gateway have in the queue"),
    Metric(
        "sie_gateway_waiting_bytes",
        "gauge",
        "Inputs that wait in this gateway for permission to enter the queue, bytes",
    ),
    Metric("sie_gateway_dlq_events", "counter", "Work items given up in all pools; every gateway reports the same"),
    Metric("sie_gateway_nats_connected", "gauge", "1 while the broker is connected"),
    Metric("sie_gateway_workers", "gauge", "Workers by health", ("status",), 2),
    Metric("sie_gateway_worker_queue_depth", "gauge", "Work items that a worker holds", ("worker",), 48),
    Metric("sie_gateway_worker_memory_used_bytes", "gauge", "Device memory in use at a worker", ("worker",), 48),
    Metric("sie_gateway_model_workers", "gauge", "Healthy workers that have a model loaded", ("model",), 64),
    Metric(
        "sie_gateway_pending_demand",
        "gauge",
        "1 if clients lately asked for a model that no worker of the lane has loaded",
        ("machine_profile", "bundle"),
        16,
    ),
    Metric("sie_gateway_active_lease_gpus", "gauge", "GPUs that live reservations ask for"),
    Metric("sie_gateway_pool_events", "counter", "Events of reservations", ("event",), 12),
    Metric("sie_gateway_config_epoch", "gauge", "Number of catalogue writes that this gateway has seen"),
    Metric(
        "sie_gateway_config_behind",
        "gauge",
        "1 while the last read from the config service failed; the process goes on with its last catalogue",
    ),
    Metric("sie_gateway_config_deltas", "counter", "Config deltas, by result", ("kind", "result"), 20),
    Metric(
        "sie_gateway_alias_requests",
        "counter",
        "Answers to requests for an alias, by the model that answered",
        ("alias", "model"),
        40,
    ),
    Metric(
        "sie_gateway_shadows",
        "counter",
        "Requests copied to a shadow model, by result",
        ("alias", "model", "result"),
        48,
        12,
    ),
    Metric(
        "sie_gateway_shadow_seconds",
        "histogram",
        "Time from the publish of a request's messages to its last result, for served requests and for their copies",
        ("alias", "model", "side"),
        8,
        2,
        _REQUEST_S,
    ),
    Metric(
        "sie_gateway_shadow_cosine",
        "histogram",
        "Cosine between a served dense vector and the vector of the copied request",
        ("alias", "model"),
        5,
        1,
        _AGREEMENT,
    ),
    Metric(
        "sie_gateway_shadow_rank_correlation",
        "histogram",
        "Spearman's correlation between served scores and the scores of the copied request",
        ("alias", "model"),
        5,
        1,
        _AGREEMENT,
    ),
    Metric("sie_gateway_build_info", "gauge", "Always 1; the label is the version that runs", ("version",)),
    Metric("sie_gateway_websockets", "gauge", "Websockets that are open"),
    Metric(
        "sie_gateway_gateways",
        "gauge",
        "Gateways that share SIE_KEY_WINDOW_TOKENS of each API key, this one included",
    ),
)

OOM = {
    "recoveries_attempted": "forward passes that ran out of memory",
    "recoveries_succeeded": "forward passes that succeeded when they were retried",
    "terminal_failures": "forward passes that failed after all retries",
    "cache_clears": "caches cleared",
    "evictions_triggered": "models evicted",
    "batch_splits": "batches split",
}
_WORKER = (
    # Work items (chunks): rate, errors, duration
    Metric("sie_requests", "counter", "Chunks answered", ("model", "endpoint", "status"), 96, 18, series_per_name=2),
    Metric(
        "sie_request_duration_seconds",
        "histogram",
        "Time of a chunk",
        ("model", "endpoint", "phase"),
        84,
        6 * _CHUNK_ENDPOINTS,
        _CHUNK_S,
        series_per_name=6,
    ),
    Metric("sie_queue_depth", "gauge", "Chunks in flight at the worker", ("model",), 24),
    Metric("sie_deliveries", "counter", "Deliveries taken in", ("redelivered",), 2),
    Metric(
        "sie_gathered_deliveries",
        "histogram",
        "Number of deliveries that the worker gathered before it tokenised them",
        (),
        1,
        1,
        _COUNTS,
    ),
    Metric(
        "sie_settlements",
        "counter",
        "Deliveries, by outcome; late: the deadline passed before the work ran",
        ("outcome",),
        12,
    ),
    Metric(
        "sie_dead_letters", "counter", "Work items given up, by whether their dead letters were stored", ("result",), 2
    ),
    Metric(
        "sie_images",
        "counter",
        "Images, by result: `prepared`; a cause of `invalid_media`; `failed` if the file is not the cause",
        ("result",),
        6,
    ),
    Metric(
        "sie_sounds",
        "counter",
        "Sounds, by result: `prepared`; a cause of `invalid_media`; `failed` if the file is not the cause",
        ("result",),
        6,
    ),
    Metric("sie_poisoned_inputs", "counter", "Inputs refused because adapters died twice while they ran alone"),
    Metric("sie_batch_size", "histogram", "Inputs per batch", ("model",), 12, 1, _COUNTS, series_per_name=1),
    Metric("sie_batch_fill_ratio", "histogram", "Tokens of a batch divided by SIE_MAX_BATCH_COST", (), 1, 1, _SHARES),
    Metric("sie_batches_in_progress", "gauge", "Batches sent to the adapters and not answered yet"),
    Metric("sie_tokens_processed", "counter", "Tokens run", ("model",), 24, series_per_name=1),
    Metric("sie_padding_tokens", "counter", "Padding positions that were computed", ("model",), 24, series_per_name=1),
    Metric(
        "sie_device_seconds",
        "counter",
        "Device time of batches, summed over the lanes of the device",
        ("model",),
        24,
        series_per_name=1,
    ),
    Metric(
        "sie_device_lanes",
        "gauge",
        "Batches that the device runs at once; 0 while it has no connected adapter",
        ("device",),
        MAX_DEVICES,
    ),
    Metric(
        "sie_device_utilization_ratio",
        "gauge",
        "Utilisation of the device by all programs; absent where nothing measures it",
        ("device",),
        MAX_DEVICES,
    ),
    Metric(
        "sie_device_memory_used_bytes",
        "gauge",
        "Used memory of the device; absent while it has no connected adapter",
        ("device",),
        MAX_DEVICES,
    ),
    Metric(
        "sie_device_memory_total_bytes",
        "gauge",
        "Memory of the device; absent while it has no connected adapter",
        ("device",),
        MAX_DEVICES,
    ),
    Metric(
        "sie_tower_outputs",
        "counter",
        "Images for a vision tower: `hit` if its output for the image was in memory, `miss` if the tower ran",
        ("result",),
        2,
    ),
    Metric(
        "sie_tower_output_bytes",
        "gauge",
        "Memory of stored outputs of vision towers; absent while the device has no connected adapter",
        ("device",),
        MAX_DEVICES,
    ),
    *(
        Metric(f"sie_oom_{name}", "counter", f"Out of device memory: {text}", ("model",), 16)
        for name, text in OOM.items()
    ),
    Metric("sie_model_loaded", "gauge", "1 while the model is loaded", ("model", "device"), 24),
    Metric("sie_model_memory_bytes", "gauge", "Measured memory of a loaded model", ("model",), 24),
    Metric("sie_model_engine", "gauge", "1 for the engine of a loaded model", ("model", "engine"), 24),
    Metric("sie_model_loads", "counter", "Successful loads of a model", ("model",), 24, series_per_name=1),
    Metric("sie_model_load_failures", "counter", "Failed attempts to load a model", ("model",), 16, series_per_name=1),
    Metric("sie_model_swaps", "counter", "Times that a model stopped taking new work to make room for another one"),
    Metric("sie_idle_evictions", "counter", "Models evicted because nobody used them"),
    Metric(
        "sie_certificates",
        "counter",
        "Loads, by whether the model passed the checks of its certificate",
        ("result",),
        2,
    ),
    Metric("sie_build_info", "gauge", "Always 1; the label is the version that runs", ("version",)),
    Metric("sie_refused_below_routes", "counter", _BELOW, ("reason",), 6),
    Metric("sie_ready", "gauge", "1 while /readyz answers 200"),
    Metric("sie_adapter_deaths", "counter", "Lost connections to adapters: the process ended, or did not answer"),
    Metric("sie_config_epoch", "gauge", "Number of catalogue writes that this worker has seen"),
    Metric(
        "sie_config_behind",
        "gauge",
        "1 while the last read from the config service failed; the process goes on with its last catalogue",
    ),
    Metric("sie_config_deltas", "counter", "Config deltas, by result", ("kind", "result"), 20),
)

_CONFIG = (
    Metric("sie_config_build_info", "gauge", "Always 1; the label is the version that runs", ("version",)),
    Metric("sie_config_ready", "gauge", "1 once the catalogue is built"),
    Metric("sie_config_requests", "counter", "Requests answered", ("route", "method", "status"), 160),
    Metric("sie_config_foreign_key_records", "counter", "Records in the buckets of keys that were no keys, removed"),
    Metric("sie_config_refused_below_routes", "counter", _BELOW, ("reason",), 6),
    Metric(
        "sie_config_request_seconds",
        "histogram",
        "Time from the arrival of a request's headers until its reply",
        ("route",),
        12,
        1,
        _REQUEST_S,
    ),
    Metric(
        "sie_config_catalogue_epoch",
        "gauge",
        "Number of catalogue writes that this replica has read; absent until it has read one",
    ),
    Metric("sie_config_models", "gauge", "Models and aliases in the catalogue; absent until the catalogue is read"),
)

_CORE: Mapping[Process, Sequence[Metric]] = {"gateway": _GATEWAY, "worker": _WORKER, "config": _CONFIG}


@functools.cache
def tables() -> Mapping[Process, Mapping[str, Metric]]:
    """Return the metrics of each process by name: those of the core, then those of packages."""
    every = (_CORE, *entry_points.load(ENTRY_POINTS).objects.values())
    return {process: {row.name: row for table in every for row in table.get(process, ())} for process in _CORE}
