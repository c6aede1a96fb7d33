"""Metrics of a process. `metrics_table` defines them and limits their label sets (combinations of label values). Values
that other objects store are read from these objects at each scrape. A name is the value of a metric's first label: a
model or a key.

    each request for a name ── met(name) ──► MetricMaker.traffic counts it
    after a scrape, at most every TURN_S: the busiest names get series of their own; series of other names are removed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from sie_runtime.current_trace import TRACE_ID
from sie_runtime.metrics_table import FOLDED, OTHER, Kind, Metric, Process, tables

Labels = TypeVar("Labels", bound=tuple[str, ...])
Child = TypeVar("Child", Counter, Gauge, Histogram)
Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)

TURN_S = 60.0  # seconds between two rankings of the busiest names (models, keys)
HALF_LIFE_S = 600.0
KEEPS = 2
_FORGOTTEN = 0.01  # a name is removed when its decayed number of requests is at most this number
disable_created_metrics()  # type: ignore[no-untyped-call]  # nobody uses the `_created` series


class Fold:
    """Limits the number of label sets of one metric. Above the limit, the label value `other` replaces new values."""

    def __init__(self, metric: Metric) -> None:
        self._labels = metric.labels
        # only labels in FOLDED can have any number of values: without these labels, no label set needs `other`
        self._rest = metric.rest if FOLDED.intersection(metric.labels) else 0
        self._most = metric.most - self._rest
        self._known: set[tuple[str, ...]] = set()
        self._folded: set[tuple[str, ...]] = set()

    def __call__(self, values: tuple[str, ...]) -> tuple[str, ...]:
        """Return the label set under which `values` are counted: `values`, while the limit allows another label set.
        Above the limit, labels in FOLDED get the value `other`. The metric reserves `rest` label sets with `other`;
        when they are used up, all labels get the value `other`.
        """
        if values in self._known or values in self._folded:
            return values
        if len(self._known) < self._most and not (self._rest and OTHER in values):
            self._known.add(values)
            return values
        values = tuple(OTHER if label in FOLDED else value for label, value in zip(self._labels, values, strict=True))
        if values not in self._folded and len(self._folded) >= self._rest - 1:
            values = (OTHER,) * len(values)
        self._folded.add(values)
        return values

    def keep(self, present: Collection[Labels]) -> None:
        """Remove all label sets except `present`, so that the limit allows new label sets."""
        self._known.intersection_update(present)
        self._folded.clear()

    def remove(self, values: tuple[str, ...]) -> None:
        self._known.discard(values)


class Traffic:
    """Number of recent requests by name. After HALF_LIFE_S, a request counts half."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._faded_s = clock()
        self._met: dict[str, float] = {}

    def met(self, name: str) -> None:
        self._met[name] = self._met.get(name, 0.0) + 1.0

    def fade(self) -> bool:
        """Reduce the numbers of requests, by half for every HALF_LIFE_S since the last reduction. If the last reduction
        was less than TURN_S ago, change nothing and return False.
        """
        passed_s = self._clock() - self._faded_s
        if passed_s < TURN_S:
            return False
        self._faded_s += passed_s
        share = 0.5 ** (passed_s / HALF_LIFE_S)
        self._met = {name: count * share for name, count in self._met.items() if count * share > _FORGOTTEN}
        return True

    def weight(self, name: str) -> float:
        return self._met.get(name, 0.0)


class Labelled(Generic[Child]):
    """Time series of a metric with labels: one series for each label set."""

    def __init__(self, metric: Metric, parent: Child) -> None:
        self._most = metric.most - metric.rest
        self._each = metric.series_per_name
        self._parent: Child = parent
        self._fold = Fold(metric)
        # label values -> series, so that a known label set needs only one look-up
        self._children: dict[tuple[str, ...], Child] = {}
        # name (value of the first label) -> number of its series; empty without `series_per_name`
        self._named: dict[str, int] = {}
        # names whose label values were counted as `other` since the last ranking, because no series was free
        self._waiting: set[str] = set()
        self._room = self._most  # number of series that are not reserved for a name yet

    def labels(self, *values: str) -> Child:
        """Return the series in which these label values are counted: their own series, or a series with the value
        `other` if the limit of the metric is reached. The values are in the order of the labels in the table.
        """
        child = self._children.get(values)
        if child is None:
            folded = self._fold(self._admitted(values) if self._each else values)
            if self._each and folded != values:
                self._waiting.add(values[0])
            child = self._children.get(folded)
            if child is None:
                child = self._children[folded] = self._parent.labels(*folded)
                if folded[0] in self._named:
                    self._named[folded[0]] += 1
                    self._room -= self._named[folded[0]] > self._each
        return child

    def _admitted(self, values: tuple[str, ...]) -> tuple[str, ...]:
        if values[0] not in self._named and values[0] != OTHER:
            if self._room < self._each:
                return OTHER, *values[1:]
            self._named[values[0]] = 0
            self._room -= self._each
        return values

    def turn(self, traffic: Traffic) -> None:
        """Rank the names (values of the first label) that have series or wait for series. The busiest names get series,
        and the series of all others are removed. A name keeps its series until another name is KEEPS times as busy.
        """
        if not self._waiting:
            return
        busy = {
            name: traffic.weight(name) * (KEEPS if name in self._named else 1)
            for name in {*self._named, *self._waiting}
        }
        before, self._named, room = self._named, {}, self._most
        for name in sorted(busy, key=busy.__getitem__, reverse=True):
            needed = max(before.get(name, 0), self._each)
            if room < needed:
                break
            self._named[name] = before.get(name, 0)
            # some label sets of a name in `before` were counted as `other`: reserve more series for the name
            more = self._each if name in before and name in self._waiting else 0
            room -= needed + min(more, room - needed)
        self._room = self._most - sum(max(sets, self._each) for sets in self._named.values())
        for values in [values for values in self._children if values[0] not in self._named and values[0] != OTHER]:
            del self._children[values]
            self._fold.remove(values)
            self._parent.remove(*values)
        self._waiting = set()


class Registry(CollectorRegistry):
    """Metrics of a process, with a function to call after each scrape."""

    def __init__(self, on_scraped: Callable[[], None]) -> None:
        super().__init__()
        self.scraped = on_scraped  # function that the scrape calls when it has read all metrics


class MetricMaker:
    """Creates the metrics of one process in `registry`, each once. Raises KeyError for a name that is not in the table,
    and TypeError if the table has another kind of metric. `traffic` decides which names get their own series.
    """

    def __init__(self, process: Process, clock: Callable[[], float] = time.monotonic) -> None:
        self.traffic = Traffic(clock)
        self.registry = Registry(self._turn)
        self._table = tables()[process]
        self._labelled: list[Labelled[Any]] = []

    def _turn(self) -> None:
        """Rank the names. A scrape calls this at its end, after it has read the series that the ranking removes."""
        if self.traffic.fade():
            for labelled in self._labelled:
                labelled.turn(self.traffic)

    def _row(self, name: str, kind: Kind, *, labelled: bool) -> Metric:
        metric = self._table[name]
        if metric.kind != kind or bool(metric.labels) != labelled:
            raise TypeError(
                f"{name} is a {metric.kind} with the labels {metric.labels}, expected a {kind} "
                f"{'with' if labelled else 'without'} labels"
            )
        return metric

    def counter(self, name: str) -> Counter:
        return Counter(name, self._row(name, "counter", labelled=False).text, registry=self.registry)

    def counters(self, name: str) -> Labelled[Counter]:
        return self._labels(name, "counter", Counter)

    def gauge(self, name: str) -> Gauge:
        return Gauge(name, self._row(name, "gauge", labelled=False).text, registry=self.registry)

    def histogram(self, name: str) -> Histogram:
        metric = self._row(name, "histogram", labelled=False)
        return Histogram(name, metric.text, buckets=metric.buckets, registry=self.registry)

    def histograms(self, name: str) -> Labelled[Histogram]:
        return self._labels(name, "histogram", Histogram, buckets=self._table[name].buckets)

    def _labels(self, name: str, kind: Kind, new: type[Child], **more: Any) -> Labelled[Child]:
        metric = self._row(name, kind, labelled=True)
        labelled = Labelled(metric, new(name, metric.text, metric.labels, registry=self.registry, **more))
        self._labelled.append(labelled)
        return labelled


class Scrape:
    """Builds metric families at a scrape from values of other objects. `_folds` stores label sets between scrapes."""

    def __init__(self, process: Process) -> None:
        self._table = tables()[process]
        self._folds = {name: Fold(metric) for name, metric in self._table.items()}

    def gauge(self, name: str, values: Mapping[Labels, float] | float) -> GaugeMetricFamily:
        """Return a gauge with the present values, by label set. Values that are folded into one label set are added."""
        if isinstance(values, Mapping):
            self._folds[name].keep(values.keys())
        return self._family(GaugeMetricFamily, name, values)

    def counter(self, name: str, values: Mapping[Labels, float] | float) -> CounterMetricFamily:
        """Return a counter for values that other objects count. Label sets that were once counted as `other` stay under
        `other`, because a counter must never fall.
        """
        return self._family(CounterMetricFamily, name, values)

    def _family(self, kind: type[Family], name: str, values: Mapping[Labels, float] | float) -> Family:
        metric, fold = self._table[name], self._folds[name]
        if not isinstance(values, Mapping):
            return kind(name, metric.text, value=float(values))
        totals: dict[tuple[str, ...], float] = {}
        for labels, value in values.items():
            folded = fold(labels)
            totals[folded] = totals.get(folded, 0.0) + float(value)
        family = kind(name, metric.text, labels=metric.labels)
        for folded, value in totals.items():
            family.add_metric(folded, value)
        return family


def exemplar() -> dict[str, str] | None:
    """Return the exemplar (trace id) for a latency that is observed now; None if there is no sampled trace."""
    trace_id = TRACE_ID.get()
    return {"trace_id": trace_id} if trace_id is not None else None


def epoch_number(epoch: str) -> float:
    """Return the number of the last write in a catalogue epoch (`created:number`); 0 if the epoch has no number."""
    number = epoch.rpartition(":")[2]
    return float(number) if number.isdecimal() else 0.0
