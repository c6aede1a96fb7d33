"""Settings of batching and scheduling."""

from __future__ import annotations

from dataclasses import dataclass

from sie_contracts.settings.rows import row
from sie_contracts.settings.values import number, whole


@dataclass(frozen=True, kw_only=True, repr=False)
class BatchingSettings:
    max_batch_requests: int = row(
        64,
        "sidecar",
        whole(1),
        "Maximum number of requests per batch, with --standalone. In queue mode SIE_BATCHER_MAX_BATCH_REQUESTS applies.",
        mode="standalone",
    )
    max_batch_wait_ms: int = row(
        10,
        "sidecar",
        whole(0),
        "Maximum time that a batch waits to fill, milliseconds, with --standalone. In queue mode SIE_BATCHER_COALESCE_MS applies.",
        mode="standalone",
    )
    max_batch_cost: int = row(
        16384,
        "sidecar",
        whole(1),
        "Maximum cost of a batch, in tokens. The cost of a text is its number of tokens after truncation. The model determines the cost of an image, such as its number of patches. An item above the maximum runs alone.",
    )
    max_concurrent_requests: int = row(
        512,
        "gateway",
        whole(1),
        "Maximum number of requests in progress per gateway process. More requests get 503 QUEUE_FULL.",
    )
    max_items_per_request: int = row(2048, "gateway", whole(1), "Maximum number of inputs per request, on every API.")
    rust_pipeline_depth: int = row(
        2,
        "sidecar",
        whole(1, 8),
        "Maximum number of batches that wait at the adapter of a device, plus 1. A batch is sent there only a few milliseconds before a device thread is free. The name is historical.",
    )
    batcher_coalesce_ms: int = row(
        5,
        "sidecar",
        whole(0),
        "Maximum time that a batch waits for more requests that can join it, milliseconds.",
        mode="queue",
    )
    batcher_max_batch_requests: int = row(
        12,
        "sidecar",
        whole(1),
        "Maximum number of work items (queue messages) per batch. A chunk of many texts is one work item.",
        mode="queue",
    )
    adaptive_min_quantum_ms: int = row(
        2,
        "sidecar",
        whole(0),
        "Minimum time for which a worker gathers delivered messages before it tokenises them together, milliseconds.",
    )
    adaptive_max_quantum_ms: int = row(
        15, "sidecar", whole(0), "Maximum time for which a worker gathers delivered messages, milliseconds."
    )
    adaptive_target_p50_ms: float = row(
        50.0,
        "sidecar",
        number(0, open_low=True),
        "Target for the median latency at the worker, milliseconds. The further the median is below it, the longer a worker gathers delivered messages.",
    )
    chunk_cost: int = row(
        4096, "gateway", whole(1), "Tokens per queue message. A request is split into messages of about this cost."
    )
    bulk_max_overtakes: int = row(
        4, "sidecar", whole(0), "How many times interactive batches may overtake the oldest bulk batch."
    )
    key_window_tokens: int = row(
        65536, "gateway", whole(1), "Maximum number of tokens in the queue for each API key, lane and priority."
    )
    adopt_after_ms: int = row(
        2000,
        "gateway",
        whole(0),
        "Age of a model's oldest waiting work above which one more worker loads the model, milliseconds.",
    )
    swap_after_ms: int = row(
        1000,
        "sidecar",
        whole(0),
        "How long the load of a model waits for memory before the worker evicts a model that has work, milliseconds. A model that has work stays loaded for at least this time, or for as long as its own load took (at most 5 s) if that is longer.",
    )
