"""The placement table that is updated by changes equals a table that is computed from scratch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import Table, place

from sie_contracts.hosts import Holdings
from sie_contracts.models.layout import Layout

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


class State:
    """The inputs of a table, and the table."""

    def __init__(self) -> None:
        self.layout = Layout()
        self.workers: dict[str, Holdings] = {}
        self.slots: dict[str, int] = {}
        self.wanted: dict[str, int] = {}
        self.demand: dict[str, float] = {}
        self.table: Table = {}

    def change(self, kind: str, name: str, *rest) -> None:  # type: ignore[no-untyped-def]
        if kind == "worker":
            self.workers[name], self.slots[name] = rest
            self.layout.set_worker(name, *rest)
        elif kind == "lost" and name in self.workers:
            del self.workers[name]
            self.layout.drop_worker(name)
        elif kind == "model":
            self.wanted[name] = rest[0]
            self.layout.set_model(name, rest[0])
        elif kind == "forgotten" and name in self.wanted:
            for mapping in (self.wanted, self.demand, self.table):
                mapping.pop(name, None)  # type: ignore[attr-defined]
            self.layout.drop_model(name)
        elif kind == "demand" and name in self.wanted:
            self.demand[name] = rest[0]
        elif kind == "written" and name in self.wanted:
            self.table[name] = rest[0]
            self.layout.set_before(name, rest[0])

    def settle(self) -> None:
        demand = np.zeros(self.layout.size)
        for model, amount in self.demand.items():
            demand[self.layout.indices[model]] = amount
        self.table.update(self.layout.settle(demand))


@pytest.mark.long
@given(st.lists(st.lists(changes, max_size=6), max_size=12))
@settings(max_examples=200, deadline=None)
def test_what_has_changed_is_placed_as_if_all_of_it_were_placed_anew(looks: list[list[tuple[object, ...]]]) -> None:
    state = State()
    for number in range(4):
        state.change("model", f"m{number}", 1)
    for look in looks:
        for change in look:
            state.change(*change)  # type: ignore[arg-type]
        placement = place(state.table, state.wanted, state.workers, state.demand, state.slots)
        state.settle()
        if state.workers:
            assert {model: state.table.get(model, ()) for model in state.wanted} == placement


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
