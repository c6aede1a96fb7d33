"""Metric of the images at URLs."""

from __future__ import annotations

from sie_runtime.metrics_table import Metric

METRICS = {
    "gateway": (
        Metric(
            "sie_gateway_image_fetches",
            "counter",
            "Images at URLs, by whether they were fetched, were refused by a rule or a limit, or failed at their "
            "server",
            ("result",),
            3,
            3,
        ),
    )
}
