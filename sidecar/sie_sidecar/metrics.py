"""Every metric of the sidecar, declared once."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sie_contracts.messages import Failed, WorkResult

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("sie_requests", "Chunks answered", ["model", "endpoint", "status"], registry=registry)
        self.duration = Histogram(
            "sie_request_duration_seconds", "Time of a chunk", ["model", "endpoint", "phase"], buckets=_SECONDS, registry=registry
        )
        self.batch_size = Histogram("sie_batch_size", "Inputs per batch", ["model"], buckets=_COUNTS, registry=registry)
        self.tokens = Counter("sie_tokens_processed", "Tokens run", ["model"], registry=registry)
        self.queue_depth = Gauge("sie_queue_depth", "Chunks held and not yet answered", ["model"], registry=registry)
        self.gathered = Histogram("sie_gathered_deliveries", "Deliveries taken from the wire together", buckets=_COUNTS, registry=registry)
        self.batches = Gauge("sie_batches_in_progress", "Batches sent to the adapter", registry=registry)
        self.loaded = Gauge("sie_model_loaded", "1 while the model is resident", ["model", "device"], registry=registry)
        self.memory = Gauge("sie_model_memory_bytes", "Measured memory of a resident model", ["model"], registry=registry)
        self.loads = Counter("sie_model_loads", "Loads that ended with a resident model", ["model"], registry=registry)
        self.swaps = Gauge("sie_model_swaps", "Models closed to new work for another one's load, since start", registry=registry)
        self.deliveries = Counter("sie_deliveries", "Deliveries taken in", ["redelivered"], registry=registry)
        self.settlements = Counter("sie_settlements", "What became of deliveries", ["outcome"], registry=registry)
        self.dead_letters = Counter("sie_dead_letters", "Work given up, by whether it was kept", ["result"], registry=registry)
        self.poisoned = Counter("sie_poisoned_inputs", "Inputs refused because they ended two adapters", registry=registry)
        self.adapter_deaths = Counter("sie_adapter_deaths", "Adapters that went away", registry=registry)
        self.config_deltas = Gauge("sie_config_deltas", "Config deltas by result since start", ["result"], registry=registry)

    def answered(self, model: str, operation: str, result: WorkResult) -> None:
        """Account for a chunk, after its result has left."""
        failed = any(isinstance(outcome, Failed) for outcome in result.outcomes)
        self.requests.labels(model, operation, "error" if failed else "success").inc()
        stages = result.stages
        for phase, millis in (
            ("total", stages.worker_ms), ("queue", stages.device_wait_ms), ("tokenize", stages.preprocess_ms),
            ("batch_wait", stages.batch_wait_ms), ("inference", stages.inference_ms), ("postprocess", stages.postprocess_ms),
        ):  # fmt: skip
            self.duration.labels(model, operation, phase).observe(millis / 1000)
