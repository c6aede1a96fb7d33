"""Rank correlation of two lists of values."""

from __future__ import annotations

from typing import Any

import numpy as np


def spearman(first: Any, second: Any) -> float | None:
    """Return Spearman's rank correlation; None if a list has only equal values. Equal values get their mean rank."""
    a, b = (_ranks(values) for values in (first, second))
    spread = float(a.std() * b.std())
    return float(((a - a.mean()) * (b - b.mean())).mean()) / spread if spread > 0 else None


def _ranks(values: Any) -> Any:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[inverse]
