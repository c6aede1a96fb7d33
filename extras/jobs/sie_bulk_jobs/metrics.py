"""Metrics of jobs. Every gateway exports the same values."""

from __future__ import annotations

from sie_runtime.metrics_table import Metric

METRICS = {
    "gateway": (
        Metric("sie_gateway_jobs", "gauge", "Stored jobs and batches, by state", ("state",), 9, 3),
        Metric("sie_gateway_job_rows_waiting", "gauge", "Rows without an answer, of all jobs that have not ended"),
        Metric("sie_gateway_jobs_in_trouble", "gauge", "Jobs that wait for a store, a broker or a worker"),
    )
}
