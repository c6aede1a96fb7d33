"""What the metrics of all processes share: bounded labels, and families that are made when somebody scrapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

Labels = TypeVar("Labels", bound=tuple[str, ...])
MOST_MODELS = 256
OTHER = "other"


class Names:
    """The first `most` distinct names stay as they are, all later ones are `other`: a series lives as long as its process."""

    def __init__(self, most: int = MOST_MODELS) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, name: str) -> str:
        if name in self._known:
            return name
        if len(self._known) >= self._most:
            return OTHER
        self._known.add(name)
        return name


def epoch_number(epoch: str) -> float:
    """The part of a catalogue's epoch that grows: an epoch is when the broker made the catalogue, and the sequence of its last write."""
    number = epoch.rpartition(":")[2]
    return float(number) if number.isdecimal() else 0.0


def gauge(name: str, text: str, values: Mapping[Labels, float], labels: Sequence[str] = ()) -> GaugeMetricFamily:
    """A gauge of now: values by their labels."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for found, value in values.items():
        family.add_metric(found, float(value))
    return family


def counter(name: str, text: str, values: Mapping[Labels, float], labels: Sequence[str] = ()) -> CounterMetricFamily:
    """A counter that somebody else keeps, exported as `name` with `_total`."""
    family = CounterMetricFamily(name, text, labels=labels)
    for found, value in values.items():
        family.add_metric(found, float(value))
    return family
