"""What jobs tell Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sie_gateway.jobs.ledger import Ledger
from sie_runtime.metrics import Scrape


class Figures(Collector):
    """Of all jobs that are kept, whichever gateway leads them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._scrape = Scrape("gateway")

    def collect(self) -> Iterator[Metric]:
        """As Prometheus asks for it."""
        jobs = list(self._ledger)
        states = Counter(job.state for job in jobs)
        waiting = sum(max(0, (job.rows or 0) - job.done) for job in jobs if not job.ended)
        gauge = self._scrape.gauge
        yield gauge("sie_gateway_jobs", {(state,): count for state, count in states.items()})
        yield gauge("sie_gateway_job_rows_waiting", waiting)
        yield gauge("sie_gateway_jobs_in_trouble", sum(job.trouble is not None for job in jobs if not job.ended))
