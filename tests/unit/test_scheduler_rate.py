"""The rate of a device, and what inputs cost."""

from __future__ import annotations

import numpy as np
import pytest

from sie_sidecar.batch import MEMORY_S, Rate
from sie_sidecar.prepare.rows import TokenRow

ROWS = ((12, 0), (12, 32), (40, 32))  # tokens of a row, and its length on the device


def test_time_without_a_batch_does_not_count() -> None:
    rate = Rate()
    assert rate.tokens_per_s == 0
    for began_s in (0.0, 100.0, 200.0):
        rate.sent(began_s)
        rate.ended(500, began_s + 0.5)
    assert rate.tokens_per_s == pytest.approx(1000)


def test_batches_sent_ahead_count_the_time_once() -> None:
    """One lane has two batches at the adapter at any time: one runs for 1 s, the other waits."""
    rate = Rate()
    rate.sent(0.0)
    rate.sent(0.0)
    for second in range(1, 20):
        rate.ended(1000, float(second))
        rate.sent(float(second))
    assert rate.tokens_per_s == pytest.approx(1000)


def test_lanes_that_run_side_by_side_add_up() -> None:
    rate = Rate()
    for _ in range(4):
        rate.sent(0.0)
    for _ in range(4):
        rate.ended(250, 1.0)
    assert rate.tokens_per_s == pytest.approx(1000)


def test_the_rate_follows_the_device_and_a_failed_batch_costs_time() -> None:
    rate = Rate()
    for second in range(20):
        rate.sent(float(second))
        rate.ended(1000, second + 1.0)
    before = rate.tokens_per_s
    rate.sent(20.0)
    rate.ended(0, 21.0)
    assert rate.tokens_per_s < before
    for second in range(int(5 * MEMORY_S)):
        rate.sent(30.0 + second)
        rate.ended(100, 31.0 + second)
    assert rate.tokens_per_s == pytest.approx(100, rel=0.1)


def test_what_inputs_cost() -> None:
    """The cost of a text is its number of tokens, or its length on the device if that is more."""
    costs = [TokenRow(np.zeros(tokens, np.int32), tokens, expanded=expanded).cost for tokens, expanded in ROWS]
    assert costs == [12, 32, 40]
