"""Metrics as processes make them from `metrics_table`: bounded label sets, families that are made when somebody scrapes, exemplars."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from sie_contracts.runtime.metrics_table import FOLDED, OTHER, TABLE, Kind, Metric, Process
from sie_contracts.runtime.tracing import current_trace_id

Labels = TypeVar("Labels", bound=tuple[str, ...])
Child = TypeVar("Child", Counter, Gauge, Histogram)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter and histogram, which nobody asks for


class Fold:
    """The label sets of one metric, at most as many as it may have."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._rest = metric.rest if FOLDED.intersection(metric.labels) else 0  # labels of fixed sets are all there is
        self._known: set[tuple[str, ...]] = set()

    def __call__(self, values: tuple[str, ...]) -> tuple[str, ...]:
        """These values, or what they are counted as: with `other` for what may be anything, in the last resort for all of them."""
        if values in self._known:
            return values
        room, labels = self._metric.most - len(self._known), self._metric.labels
        if room <= self._rest:
            values = tuple(OTHER if label in FOLDED else value for label, value in zip(labels, values, strict=True))
            if room <= 1 and values not in self._known:
                values = (OTHER,) * len(values)
        self._known.add(values)
        return values

    def keep(self, present: Collection[Labels]) -> None:
        """Forget all others: what is gone makes room."""
        self._known.intersection_update(present)


class Labelled(Generic[Child]):
    """The series of a metric with labels."""

    def __init__(self, metric: Metric, parent: Child) -> None:
        self._parent: Child = parent
        self._fold = Fold(metric)
        self._found: dict[tuple[str, ...], Child] = {}  # of those that were not folded: one look-up on the hot path

    def labels(self, *values: str) -> Child:
        """The series of these values, in the order of the table, or the one that they are counted in."""
        found = self._found.get(values)
        if found is None:
            folded = self._fold(values)
            found = self._parent.labels(*folded)
            if folded == values:
                self._found[values] = found
        return found


class Maker:
    """Makes the metrics of one process, each once, with `registry`. KeyError for a name that its table does not have."""

    def __init__(self, process: Process) -> None:
        self.registry = CollectorRegistry()
        self._table = TABLE[process]

    def _of(self, name: str, kind: Kind, *, labelled: bool) -> Metric:
        metric = self._table[name]
        if metric.kind != kind or bool(metric.labels) != labelled:
            raise TypeError(f"{name} is a {metric.kind} with the labels {metric.labels}")
        return metric

    def counter(self, name: str) -> Counter:
        return Counter(name, self._of(name, "counter", labelled=False).text, registry=self.registry)

    def counters(self, name: str) -> Labelled[Counter]:
        metric = self._of(name, "counter", labelled=True)
        return Labelled(metric, Counter(name, metric.text, metric.labels, registry=self.registry))

    def gauge(self, name: str) -> Gauge:
        return Gauge(name, self._of(name, "gauge", labelled=False).text, registry=self.registry)

    def histogram(self, name: str) -> Histogram:
        metric = self._of(name, "histogram", labelled=False)
        return Histogram(name, metric.text, buckets=metric.buckets, registry=self.registry)

    def histograms(self, name: str) -> Labelled[Histogram]:
        metric = self._of(name, "histogram", labelled=True)
        return Labelled(metric, Histogram(name, metric.text, metric.labels, buckets=metric.buckets, registry=self.registry))


class Scrape:
    """Families of what other parts keep, made when somebody scrapes. One lives as long as the process, so that names stay."""

    def __init__(self, process: Process) -> None:
        self._table = TABLE[process]
        self._folds = {name: Fold(metric) for name, metric in self._table.items()}

    def gauge(self, name: str, values: Mapping[Labels, float] | float) -> GaugeMetricFamily:
        """A gauge of now, values by their labels; those that are folded are added up."""
        if not isinstance(values, Mapping):
            return GaugeMetricFamily(name, self._table[name].text, value=float(values))
        metric, fold = self._table[name], self._folds[name]
        fold.keep(values.keys())
        family = GaugeMetricFamily(name, metric.text, labels=metric.labels)
        for labels, value in _folded(fold, values).items():
            family.add_metric(labels, value)
        return family

    def counter(self, name: str, values: Mapping[Labels, float] | float) -> CounterMetricFamily:
        """A counter that somebody else keeps. What is folded stays folded, since a counter never falls."""
        if not isinstance(values, Mapping):
            return CounterMetricFamily(name, self._table[name].text, value=float(values))
        metric = self._table[name]
        family = CounterMetricFamily(name, metric.text, labels=metric.labels)
        for labels, value in _folded(self._folds[name], values).items():
            family.add_metric(labels, value)
        return family


def _folded(fold: Fold, values: Mapping[Labels, float]) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for labels, value in values.items():
        folded = fold(labels)
        found[folded] = found.get(folded, 0.0) + float(value)
    return found


def exemplar() -> dict[str, str] | None:
    """What a latency that is observed now is to be found by among traces; None where there is no trace, or none that is kept."""
    trace_id = current_trace_id()
    return {"trace_id": trace_id} if trace_id is not None else None


def epoch_number(epoch: str) -> float:
    """The part of a catalogue's epoch that grows: an epoch is when the broker made the catalogue, and the sequence of its last write."""
    number = epoch.rpartition(":")[2]
    return float(number) if number.isdecimal() else 0.0
