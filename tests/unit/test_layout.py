"""Moves of a model from a busy worker to one with room."""

from __future__ import annotations

import pytest
from layouts import place

from sie_contracts.hosts import Holdings


@pytest.mark.parametrize(
    ("target", "slots", "moves"),
    [(Holdings(), 0, True), (Holdings(loading=frozenset({"c"})), 0, False), (Holdings(), 1, False)],
    ids=["idle", "loading", "full"],
)
def test_a_busy_worker_gives_a_model_to_a_worker_with_room_whose_loads_have_ended(
    target: Holdings, slots: int, moves: bool
) -> None:
    before = {"a": ("w0",), "b": ("w0",), "d": ("w1",)}
    workers = {"w0": Holdings(loaded=frozenset({"a", "b"})), "w1": target}
    after = place(before, dict.fromkeys(before, 1), workers, {"a": 0.6, "b": 0.6, "d": 0.01}, {"w1": slots})
    assert (after != before) == moves
