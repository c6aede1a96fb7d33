"""Metrics of the cache of answers."""

from __future__ import annotations

from sie_runtime.metrics_table import Metric

METRICS = {
    "gateway": (
        # Cache of answers; all values are 0 at a gateway without SIE_CACHE_BYTES
        Metric(
            "sie_gateway_cache_inputs",
            "counter",
            "Inputs of requests that use the cache: hit, joined (an equal input was under way), miss",
            ("result",),
            3,
        ),
        Metric("sie_gateway_cache_answers", "gauge", "Answers in the cache of this gateway"),
        Metric("sie_gateway_cache_bytes", "gauge", "Memory of the answers in the cache, at most SIE_CACHE_BYTES"),
        Metric("sie_gateway_cache_evictions", "counter", "Answers removed from the cache for lack of room"),
    )
}
