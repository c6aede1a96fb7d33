"""How often what was done about memory that ran out. The sidecar exports it: this process has no port."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Literal

from sie_contracts.device_reports import Shortages

Remedy = Literal[
    "recoveries_attempted",
    "recoveries_succeeded",
    "terminal_failures",
    "cache_clears",
    "evictions_triggered",
    "batch_splits",
]


class Remedies:
    """Counts since the start of the process, by model and remedy. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[str]] = {}  # models are those that were ever loaded here

    def count(self, model: str, remedy: Remedy) -> None:
        with self._lock:
            self._counts.setdefault(model, Counter())[remedy] += 1

    def all(self) -> tuple[Shortages, ...]:
        """Of the models that ever ran out of memory."""
        with self._lock:
            return tuple(Shortages(model, **counts) for model, counts in self._counts.items())
