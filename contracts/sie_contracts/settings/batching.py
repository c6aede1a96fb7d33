"""Settings of batching and scheduling."""

from __future__ import annotations

from dataclasses import dataclass

from sie_contracts.settings.rows import row
from sie_contracts.settings.values import number, whole


@dataclass(frozen=True, kw_only=True, repr=False)
class BatchingSettings:
    max_batch_requests: int = row(
        64,
        "SIE_MAX_BATCH_REQUESTS",
        "sidecar",
        whole(1),
        "Most requests per batch. In queue mode SIE_BATCHER_MAX_BATCH_REQUESTS applies.",
        mode="standalone",
    )
    max_batch_wait_ms: int = row(
        10,
        "SIE_MAX_BATCH_WAIT_MS",
        "sidecar",
        whole(0),
        "Longest wait for a batch to fill, milliseconds. In queue mode SIE_BATCHER_COALESCE_MS applies.",
        mode="standalone",
    )
    max_batch_cost: int = row(
        16384,
        "SIE_MAX_BATCH_COST",
        "sidecar",
        whole(1),
        "Cost budget per batch; the cost of a text is its token count after truncation. One item over the budget runs alone.",
    )
    max_concurrent_requests: int = row(
        512,
        "SIE_MAX_CONCURRENT_REQUESTS",
        "gateway",
        whole(1),
        "Requests in progress per gateway process; beyond it 503 QUEUE_FULL.",
    )
    max_items_per_request: int = row(
        2048, "SIE_MAX_ITEMS_PER_REQUEST", "gateway", whole(1), "Inputs per request, on every API."
    )
    rust_pipeline_depth: int = row(
        2,
        "SIE_RUST_PIPELINE_DEPTH",
        "sidecar",
        whole(1, 8),
        "Batches sent ahead to the adapter, per inference lane: one runs, the rest are ready. The name is historical.",
    )
    batcher_coalesce_ms: int = row(
        5,
        "SIE_BATCHER_COALESCE_MS",
        "sidecar",
        whole(0),
        "How long a batch may wait for more of its kind, milliseconds.",
        mode="queue",
    )
    batcher_max_batch_requests: int = row(
        12,
        "SIE_BATCHER_MAX_BATCH_REQUESTS",
        "sidecar",
        whole(1),
        "Work items (queue messages) per batch; a chunk of many texts is one.",
        mode="queue",
    )
    adaptive_min_quantum_ms: int = row(
        2,
        "SIE_ADAPTIVE_MIN_QUANTUM_MS",
        "sidecar",
        whole(0),
        "Shortest gathering of deliveries before they are tokenised together, milliseconds.",
    )
    adaptive_max_quantum_ms: int = row(
        15, "SIE_ADAPTIVE_MAX_QUANTUM_MS", "sidecar", whole(0), "Longest gathering of deliveries, milliseconds."
    )
    adaptive_target_p50_ms: float = row(
        50.0,
        "SIE_ADAPTIVE_TARGET_P50_MS",
        "sidecar",
        number(0, open_low=True),
        "Median latency that the gathering steers toward, milliseconds.",
    )
    chunk_cost: int = row(
        4096,
        "SIE_CHUNK_COST",
        "gateway",
        whole(1),
        "Tokens per queue message: a request is split by cost into messages of about this size.",
    )
    bulk_max_overtakes: int = row(
        4,
        "SIE_BULK_MAX_OVERTAKES",
        "sidecar",
        whole(0),
        "How often interactive batches may overtake the oldest bulk batch.",
    )
    key_window_tokens: int = row(
        65536, "SIE_KEY_WINDOW_TOKENS", "gateway", whole(1), "Tokens in the queue per key, lane and priority."
    )
    adopt_after_ms: int = row(
        2000,
        "SIE_ADOPT_AFTER_MS",
        "gateway",
        whole(0),
        "Age of a model's oldest item past which it gets one more host.",
    )
    swap_after_ms: int = row(
        1000,
        "SIE_SWAP_AFTER_MS",
        "sidecar",
        whole(0),
        "Age of the oldest item of an absent model from which a worker swaps to it. The model that goes has been there for as long, and for as long as its load took, of which 5 s count.",
    )
