"""Loads, uses and evictions, on a memory that the test sets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from sie_adapter.device import Memory
from sie_adapter.failure import load_failed
from sie_adapter.residency import Residency
from sie_contracts.catalogue import LoadOptions, ModelEntry, Resolved, RunDefaults
from sie_contracts.catalogue import Weights as Source
from sie_contracts.errors import ModelLoadFailed, ModelLoading


@dataclass
class FakeWeights:
    memory_bytes: int = 1
    tokenizer: bytes = b"{}"
    attention: str = "sdpa"
    precision: str = "float32"
    stored_pooling: str = "mean"
    max_tokens: int = 8
    vocabulary: int = 8
    width: int = 4


@dataclass
class World:
    """A residency over a device of 1,000 bytes in which every model takes its size."""

    threshold: float = 85.0
    other_bytes: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    now_s: float = 0.0
    loads: list[str] = field(default_factory=list)
    during_load: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self.residency = Residency(self._load, self._memory, lambda: None, self.threshold, lambda: self.now_s)

    def _load(self, resolved: Resolved) -> Any:
        self.loads.append(resolved.entry.id)
        self.during_load(resolved.entry.id)
        return FakeWeights(self.sizes.get(resolved.entry.id, 0))

    def _memory(self) -> Memory:
        held = sum(model.memory_bytes for model in self.residency.describe())
        return Memory(held + self.other_bytes, 1000)

    def ensure(self, model: str, evictable: tuple[str, ...] = (), **changes: Any) -> tuple[str, ...]:
        self.now_s += 1
        return self.residency.ensure(model, entry(model, **changes), "default", evictable)[1]

    def use(self, model: str) -> None:
        self.now_s += 1
        with self.residency.use(model):
            pass

    def loaded(self) -> list[str]:
        return [model.model for model in self.residency.describe()]


def entry(model: str, **changes: Any) -> ModelEntry:
    return ModelEntry(id=model, weights=Source(path="/weights"), family="text-encoder", outputs={"dense": 4}, max_tokens=8, **changes)


@pytest.mark.parametrize(("other", "evicted"), [(549, ()), (551, ("a",))])
def test_a_model_goes_above_the_threshold_and_not_below(other: int, evicted: tuple[str, ...]) -> None:
    """84.9 % stays, 85.1 % evicts."""
    world = World(sizes={"a": 300}, other_bytes=other)
    world.ensure("a")
    assert world.ensure("b", evictable=("a",)) == evicted
    assert world.loaded() == [name for name in ("a", "b") if name not in evicted]


def test_the_least_recently_used_goes_first_by_dispatch_and_not_by_load() -> None:
    world = World(sizes=dict.fromkeys("abc", 300))
    for model in "abc":
        world.ensure(model)
    world.use("a")
    assert world.ensure("d", evictable=("a", "b", "c")) == ("b",)


def test_if_one_is_not_enough_the_largest_idle_goes_next() -> None:
    world = World(sizes={"a": 100, "b": 100, "c": 700, "d": 100})
    for model in "abcd":
        world.ensure(model)
    world.other_bytes = 200
    assert world.ensure("e", evictable=("a", "b", "c", "d")) == ("a", "c")


def test_only_what_the_sidecar_named_goes() -> None:
    world = World(sizes={"a": 500, "b": 500})
    world.ensure("a")
    world.ensure("b")
    assert world.ensure("c", evictable=()) == ()
    assert world.ensure("d", evictable=("b", "unknown")) == ("b",)
    assert world.loaded() == ["a", "c", "d"]


def test_a_model_that_runs_stays_even_if_named() -> None:
    world = World(sizes={"a": 900})
    world.ensure("a")
    with world.residency.use("a"):
        assert world.ensure("b", evictable=("a",)) == ()
    assert world.ensure("c", evictable=("a",)) == ("a",)


def test_pressure_after_a_batch_evicts_what_was_not_used_since() -> None:
    world = World(sizes={"a": 300, "b": 300})
    world.ensure("a")
    world.ensure("b")
    world.ensure("c", evictable=("a", "b"))
    world.use("a")
    world.other_bytes = 500
    assert world.residency.relieve() == ("b",)
    world.other_bytes = 900
    assert world.residency.relieve() == ()  # within a second of the last look
    world.now_s += 1.1
    assert world.residency.relieve() == ()  # b is gone, a was used since


def test_eight_askers_make_one_load() -> None:
    barrier = threading.Barrier(8)
    world = World()
    asked = threading.Event()
    world.during_load = lambda _: (asked.wait(5) and None) or None

    def ask(results: list[str]) -> None:
        barrier.wait()
        resident, _ = world.residency.ensure("a", entry("a"), "default", ())
        results.append(resident.model)

    results: list[str] = []
    threads = [threading.Thread(target=ask, args=(results,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    asked.set()
    for thread in threads:
        thread.join()
    assert results == ["a"] * 8
    assert world.loads == ["a"]


def test_different_models_load_at_the_same_time() -> None:
    both = threading.Barrier(2)
    world = World(during_load=lambda _: (both.wait(5) and None) or None)
    threads = [threading.Thread(target=world.residency.ensure, args=(name, entry(name), "default", ())) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(world.loaded()) == ["a", "b"]  # the barrier would have broken if one had waited for the other


def test_a_failed_load_is_told_to_all_who_wait_and_the_next_one_tries_again() -> None:
    def fail(_: str) -> None:
        raise load_failed("NOT_FOUND", "no weights")

    world = World(during_load=fail)
    with pytest.raises(ModelLoadFailed) as raised:
        world.ensure("a")
    assert raised.value.extras["error_class"] == "NOT_FOUND"
    world.during_load = lambda _: None
    world.ensure("a")
    assert world.loads == ["a", "a"]


def test_an_entry_that_needs_other_weights_loads_them_and_another_one_is_only_noted() -> None:
    world = World()
    world.ensure("a")
    before = world.residency.describe()[0].fingerprint
    world.ensure("a", run=RunDefaults(pooling="cls"))
    assert world.loads == ["a"]
    assert world.residency.describe()[0].fingerprint != before
    world.ensure("a", load=LoadOptions(precision="float32"))
    assert world.loads == ["a", "a"]


def test_a_changed_entry_is_served_from_then_on() -> None:
    world = World()
    world.ensure("a")
    world.residency.change("a", entry("a", run=RunDefaults(pooling="last")))
    with world.residency.use("a") as resident:
        assert resident.resolved.run.pooling == "last"
    world.residency.change("a", entry("a", load=LoadOptions(precision="float32")))
    assert world.loaded() == []
    world.residency.change("a", None)


def test_released_and_absent_models_are_reported_as_loading() -> None:
    world = World()
    world.ensure("a")
    world.residency.release("a")
    world.residency.release("a")
    with pytest.raises(ModelLoading), world.residency.use("a"):
        pass
