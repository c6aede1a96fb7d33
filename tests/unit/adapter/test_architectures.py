"""Any transformers encoder through the packed path equals the stock model, one sequence at a time. W3, W4."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.adapter import toys
from unit.adapter.states import LENGTHS, states_one_by_one, states_packed


@pytest.mark.parametrize("kind", toys.CONFIGS)
def test_packed_states_equal_stock_states_one_by_one(kind: str, tmp_path: Path) -> None:
    folder = toys.save(tmp_path / "toy", kind)
    encoder = toys.load(folder)
    assert encoder.attention == ("sdpa padded" if kind in toys.PADDED else "sdpa")
    sequences = toys.random_ids(LENGTHS)
    for got, expected in zip(states_packed(encoder, sequences), states_one_by_one(folder, sequences), strict=True):
        assert (got - expected).abs().max() <= 2e-5
