"""The choice of parameters of tests: every run takes a few representative ones, and the long lane takes the others.

A plain `pytest tests/parity`, which writes docs/parity.md, takes all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

# One architecture for each kind of backbone: absolute positions, rotary positions with windows, a causal decoder with
# windows, and position biases, which run padded.
BACKBONES = ("bert", "modernbert", "qwen2 sliding", "deberta-v2")


def long_but(parameters: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Return `parameters`, with the mark `long` on those that are not `chosen`. Raise ValueError for unknown ones."""
    cases = list(parameters)
    if absent := [case for case in chosen if case not in cases]:
        raise ValueError(f"no such parameters: {absent}")
    return [case if case in chosen else _long(case) for case in cases]


def _long(parameters: Any) -> Any:
    values = parameters if isinstance(parameters, tuple) else (parameters,)
    return pytest.param(*values, marks=pytest.mark.long)
