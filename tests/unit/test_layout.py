"""The placement table that is updated by changes equals a table that is computed from scratch."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from layouts import place

from sie_contracts.hosts import Holdings

models, workers = st.integers(0, 11).map("m{}".format), st.integers(0, 5).map("w{}".format)
some = st.sets(models, max_size=4).map(frozenset)
holdings = st.builds(
    Holdings, some, st.sets(models, max_size=1).map(frozenset), st.sets(models, max_size=1).map(frozenset)
)
changes = st.one_of(
    st.tuples(st.just("worker"), workers, holdings, st.integers(0, 4)),
    st.tuples(st.just("lost"), workers),
    st.tuples(st.just("model"), models, st.integers(1, 3)),
    st.tuples(st.just("forgotten"), models),
    st.tuples(st.just("demand"), models, st.floats(0, 2)),
    st.tuples(st.just("written"), models, st.lists(workers, max_size=3, unique=True).map(tuple)),  # by another gateway
)


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
