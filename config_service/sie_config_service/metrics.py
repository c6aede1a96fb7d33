"""Metrics of the config service: its requests, and the epoch and size of the catalogue at the last read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

import sie_contracts
from sie_config_service.store import CatalogueStore
from sie_runtime.http.refusals import REFUSED
from sie_runtime.metrics import MetricMaker, Scrape, epoch_number
from sie_runtime.metrics_table import OTHER

_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})


class ConfigMetrics(Collector):
    """Metrics of the config service. `store`: returns the catalogue's store; None until the catalogue is built."""

    def __init__(self, store: Callable[[], CatalogueStore | None]) -> None:
        make = MetricMaker("config")
        self.registry = make.registry
        self._requests = make.counters("sie_config_requests")
        self._seconds = make.histograms("sie_config_request_seconds")
        self.refused = make.counters("sie_config_refused_below_routes")
        self.foreign_key_records = make.counter("sie_config_foreign_key_records")
        for reason in REFUSED:
            self.refused.labels(reason)
        self._scrape = Scrape("config")
        self._store = store
        self.registry.register(self)

    def count_refused(self, reason: str) -> None:
        """Count a request that was refused before it reached a route; `reason` is one of REFUSED."""
        self.refused.labels(reason).inc()

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count an answered request. `route`: without the model's name, so that clients cannot add label values."""
        self._requests.labels(route, method if method in _METHODS else OTHER, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        gauge, store = self._scrape.gauge, self._store()
        read = None if store is None else store.last_read
        yield gauge("sie_config_build_info", {(sie_contracts.__version__,): 1})
        yield gauge("sie_config_ready", store is not None)
        yield gauge("sie_config_catalogue_epoch", {} if read is None else epoch_number(read.epoch))
        yield gauge("sie_config_models", {} if read is None else len(read.live))
