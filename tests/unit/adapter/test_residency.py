"""Loads, uses and evictions, on a memory that the test sets."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from cluster import until
from selection import long_but

from sie_adapter.engine.device import MemoryUse
from sie_adapter.engine.engines import TORCH, Choice
from sie_adapter.memory import residency
from sie_adapter.memory.oom import Relief
from sie_adapter.memory.residency import DeviceMemory, ResidentModels
from sie_contracts.errors import ModelLoadFailed, ModelLoading
from sie_contracts.models.catalogue import Resolved
from sie_contracts.models.entries import HeadOptions, LoadOptions, ModelEntry, RunDefaults
from sie_contracts.models.entries import Weights as Source
from sie_contracts.models.load_errors import load_failed


@dataclass
class FakeWeights:
    memory_bytes: int = 1
    tokenizer: bytes = b"{}"
    attention: str = "sdpa"
    precision: str = "float32"
    requested_precision: str = "float32"
    crossover_tokens: int = 0
    engine_choice: Choice = TORCH
    precision_reason: str = ""
    max_tokens: int = 8
    certificate: dict[str, str] = field(default_factory=dict)


@dataclass
class World:
    """A residency over a device of 1,000 bytes in which every model takes its size."""

    threshold: float = 85.0
    other_bytes: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    known: bool = False  # whether a model's size is known before it is loaded
    kept_bytes: int = 0  # bytes that the allocator keeps until it gives them back
    again_bytes: int = 0  # bytes of data that can be made again
    given_back: int = 0
    now_s: float = 0.0
    loads: list[str] = field(default_factory=list)
    during_load: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self.residency = ResidentModels(
            self._load,
            DeviceMemory(self._memory, self._give_back, self.threshold, self._shed),
            lambda: self.now_s,
            needed_bytes=lambda resolved: self.sizes.get(resolved.entry.id, 0) if self.known else 0,
            warm_up=lambda _, weights: 2 * weights.memory_bytes,
        )

    def _give_back(self) -> None:
        self.given_back += 1
        self.kept_bytes = 0

    def _shed(self) -> bool:
        had, self.again_bytes = self.again_bytes, 0
        return had > 0

    def _load(self, resolved: Resolved) -> Any:
        self.loads.append(resolved.entry.id)
        self.during_load(resolved.entry.id)
        return FakeWeights(self.sizes.get(resolved.entry.id, 0))

    def _memory(self, more_bytes: int) -> MemoryUse:
        held = sum(model.memory_bytes for model in self.residency.describe())
        return MemoryUse(held + self.other_bytes + self.kept_bytes + self.again_bytes + more_bytes, 1000)

    def ensure(self, model: str, may_drop: tuple[str, ...] = (), **changes: Any) -> tuple[str, ...]:
        """Return the models that were dropped for the load."""
        self.now_s += 1
        permission = self.residency.permission(may_drop)
        self.residency.ensure(model, entry(model, **changes), "default", permission)
        return permission.dropped

    def relieve(self, *may_drop: str) -> tuple[str, ...]:
        """Return the models that a request with this permission drops because of pressure."""
        permission = self.residency.permission(may_drop)
        self.residency.relieve(permission)
        return permission.dropped

    def use(self, model: str) -> None:
        self.now_s += 1
        with self.residency.use(model):
            pass

    def loaded(self) -> list[str]:
        return [model.model for model in self.residency.describe()]


def entry(model: str, **changes: Any) -> ModelEntry:
    return ModelEntry(
        id=model, weights=Source(path="/weights"), family="text-encoder", outputs={"dense": 4}, max_tokens=8, **changes
    )


@pytest.mark.parametrize(("other_bytes", "evicted"), [(549, ()), (551, ("a",))])
def test_a_model_goes_above_the_threshold_and_not_below(other_bytes: int, evicted: tuple[str, ...]) -> None:
    """The model stays at 84.9 % and is evicted at 85.1 %."""
    world = World(sizes={"a": 300}, other_bytes=other_bytes)
    world.ensure("a")
    assert world.ensure("b", may_drop=("a",)) == evicted
    assert world.loaded() == [name for name in ("a", "b") if name not in evicted]


@pytest.mark.parametrize(
    ("other_bytes", "kept_bytes", "fits", "given_back"),
    [(920, 0, True, 0), (930, 0, False, 1), (500, 430, True, 1)],
)
def test_what_grows_fits_up_to_the_middle_between_the_threshold_and_all(
    other_bytes: int, kept_bytes: int, fits: bool, given_back: int
) -> None:
    """The bound is 92.5 % of 1,000 bytes. Bytes that the allocator only keeps do not count."""
    world = World(other_bytes=other_bytes, kept_bytes=kept_bytes)
    memory = DeviceMemory(world._memory, world._give_back, 85.0)
    assert (memory.fits(5), world.given_back) == (fits, given_back)


def test_models_go_in_the_order_that_the_sidecar_names_and_no_more_than_are_needed() -> None:
    world = World(sizes={"a": 100, "b": 100, "c": 700, "d": 100})
    for model in "abcd":
        world.ensure(model)
    world.other_bytes = 200
    assert world.ensure("e", may_drop=("b", "c", "a", "d")) == ("b", "c")


def test_only_what_the_sidecar_named_goes() -> None:
    world = World(sizes={"a": 500, "b": 500})
    world.ensure("a")
    world.ensure("b")
    assert world.ensure("c", may_drop=()) == ()
    assert world.ensure("d", may_drop=("unknown", "b")) == ("b",)
    assert world.loaded() == ["a", "c", "d"]


def test_no_permission_outlives_its_request() -> None:
    world = World(sizes={"a": 500, "b": 500})
    world.ensure("a")
    world.ensure("b", may_drop=())
    assert world.relieve("a") == ("a",)
    world.ensure("a")
    world.now_s += 2
    assert world.relieve() == ()
    assert not world.residency.make_room(world.residency.permission())


@pytest.mark.parametrize("again", ["used", "asked for"])
def test_a_model_that_is_used_or_asked_for_after_the_request_began_stays(again: str) -> None:
    """While a load fetches its files, a model that it may drop gets work. The load drops another model."""
    world = World(sizes={"a": 400, "b": 400, "c": 400}, known=True)
    world.ensure("a")
    world.ensure("b")
    needed = world.residency._needed_bytes

    def fetch(resolved: Resolved) -> int:
        world.use("a") if again == "used" else world.ensure("a")
        return needed(resolved)

    world.residency._needed_bytes = fetch
    assert world.ensure("c", may_drop=("a", "b")) == ("b",)


def test_a_model_that_runs_stays_even_if_named() -> None:
    world = World(sizes={"a": 900})
    world.ensure("a")
    with world.residency.use("a"):
        assert world.ensure("b", may_drop=("a",)) == ()
    assert world.ensure("c", may_drop=("a",)) == ("a",)


def test_pressure_drops_what_was_not_used_since_and_is_looked_at_once_a_second() -> None:
    world = World(sizes={"a": 300, "b": 300})
    world.ensure("a")
    world.ensure("b")
    world.ensure("c")
    permission = world.residency.permission(("a", "b"))
    world.use("a")
    world.other_bytes = 500
    world.residency.relieve(permission)
    assert permission.dropped == ("b",)
    world.other_bytes = 900
    assert world.relieve("c") == ()  # within a second of the last look
    world.now_s += 1.1
    world.residency.relieve(permission)
    assert permission.dropped == ("b",)  # a was used since
    world.now_s += 1.1
    assert world.relieve("c", "a") == ("c", "a")


def test_the_weights_to_come_count_before_they_are_loaded() -> None:
    """A model that would not fit evicts first, and one that fits does not."""
    world = World(sizes={"a": 400, "b": 400, "c": 100}, known=True)
    world.ensure("a")
    assert world.ensure("b", may_drop=("a",)) == ()
    assert world.ensure("c", may_drop=("a", "b")) == ("a",)
    world.use("b")
    assert world.loaded() == ["b", "c"]


def test_loads_at_the_same_time_count_each_other() -> None:
    world = World(sizes={"a": 400, "b": 300, "c": 300}, known=True)
    world.ensure("a")
    evicted: list[tuple[str, ...]] = []

    def load_another(model: str) -> None:
        if model == "b":
            evicted.append(world.ensure("c", may_drop=("a",)))

    world.during_load = load_another
    evicted.append(world.ensure("b", may_drop=("a",)))
    assert evicted == [("a",), ()]
    assert world.loaded() == ["c", "b"]


def test_weights_that_a_load_has_read_by_now_count_once() -> None:
    world = World(sizes={"a": 200, "b": 200, "c": 400}, known=True)
    world.ensure("a")
    world.ensure("b")
    evictions: list[tuple[str, ...]] = []

    def half_way(model: str) -> None:
        world.other_bytes, world.now_s = 400, world.now_s + 2
        evictions.append(world.relieve("a", "b"))
        world.other_bytes = 0

    world.during_load = half_way
    assert world.ensure("c", ("a", "b")) == ()
    assert evictions == [()]
    assert world.loaded() == ["a", "b", "c"]


def test_what_cannot_fit_beside_models_with_work_is_refused_before_it_is_loaded() -> None:
    """The model is loaded once the others are idle. A model that fits the device above the threshold is loaded at
    once.
    """
    world = World(sizes={"a": 600, "b": 500, "c": 350}, known=True)
    world.ensure("a")
    with pytest.raises(ModelLoadFailed) as raised:
        world.ensure("b")
    assert (raised.value.reason, raised.value.extras) == ("no_room", {"error_class": "OOM"})
    assert world.loads == ["a"]
    world.ensure("c")
    assert world.ensure("b", may_drop=("a", "c")) == ("a",)
    assert world.loaded() == ["c", "b"]


def test_a_load_that_runs_out_of_memory_is_tried_again_with_one_idle_model_less() -> None:
    world = World(sizes={"a": 100, "b": 100, "c": 100})
    for model in "abc":
        world.ensure(model)

    def fail_while_more_than_one_is_loaded(_: str) -> None:
        if len(world.loaded()) > 1:
            raise load_failed("OOM", "too little memory")

    world.during_load = fail_while_more_than_one_is_loaded
    assert world.ensure("d", may_drop=("a", "b")) == ("a", "b")
    assert world.loads == ["a", "b", "c", "d", "d", "d"]
    with pytest.raises(ModelLoadFailed) as raised:
        world.ensure("e")
    assert raised.value.extras["error_class"] == "OOM"
    assert world.loaded() == ["c", "d"]


def test_loads_that_run_out_of_memory_beside_each_other_are_tried_alone_and_cost_no_model_its_place() -> None:
    world, both, loading = World(), threading.Barrier(2), set[str]()
    world.ensure("idle")
    most_at_once = []

    def fail_beside_another(model: str) -> None:
        loading.add(model)
        try:
            if world.loads.count(model) == 1:
                both.wait(30)
                raise load_failed("OOM", "too little memory for two at once")
            most_at_once.append(len(loading))
        finally:
            loading.remove(model)

    world.during_load = fail_beside_another
    dropped: dict[str, tuple[str, ...]] = {}

    def ask(model: str) -> None:
        dropped[model] = world.ensure(model, may_drop=("idle",))

    threads = [threading.Thread(target=ask, args=(model,)) for model in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert dropped == {"a": (), "b": ()}
    assert most_at_once == [1, 1]
    assert sorted(world.loaded()) == ["a", "b", "idle"]
    assert sorted(world.loads) == ["a", "a", "b", "b", "idle"]


def test_what_the_allocator_keeps_is_given_back_before_anything_is_unloaded() -> None:
    world = World(sizes={"a": 300})
    world.ensure("a")
    world.kept_bytes = 600
    assert world.ensure("b", may_drop=("a",)) == ()
    assert world.given_back == 1


def test_room_is_made_whatever_the_pressure_and_only_from_idle_models() -> None:
    world = World(sizes={"a": 1, "b": 1, "c": 1})
    for model in "abc":
        world.ensure(model)
    assert not world.residency.make_room(world.residency.permission())  # no model may go
    permission = world.residency.permission(("a", "b", "c", "unknown"))
    world.use("a")
    with world.residency.use("c"):
        assert world.residency.make_room(permission)
        assert not world.residency.make_room(permission)
    assert permission.dropped == ("b",)
    assert world.loaded() == ["a", "c"]


def test_what_can_be_made_again_goes_before_any_model() -> None:
    """Data that can be made again is dropped above the threshold, for a load without memory, and once for a request
    whose allocation failed.
    """
    world = World(sizes={"a": 400, "b": 300}, known=True)
    world.ensure("a")
    world.again_bytes = 200
    world.ensure("b", may_drop=("a",))
    assert (world.loaded(), world.again_bytes) == (["a", "b"], 0)
    world.again_bytes = 200
    assert world.relieve("a") == ()
    assert (world.loaded(), world.again_bytes) == (["a", "b"], 0)
    world.again_bytes = 200
    permission = world.residency.permission(("a",))
    assert world.residency.make_room(permission) == "cache_clears"
    world.again_bytes = 200
    assert world.residency.make_room(permission) == "evictions_triggered"
    assert world.residency.make_room(permission) is None
    assert (world.loaded(), permission.dropped, world.again_bytes) == (["b"], ("a",), 200)

    def fails_once(_: str) -> None:
        if world.again_bytes:
            raise load_failed("OOM", "too little memory")

    world.during_load = fails_once
    world.ensure("c")
    assert (world.loaded(), world.again_bytes) == (["b", "c"], 0)


def test_a_load_that_is_refused_names_what_went_for_it() -> None:
    world = World(sizes={"a": 400, "b": 1200}, known=True)
    world.ensure("a")
    permission = world.residency.permission(("a",))
    with pytest.raises(ModelLoadFailed):
        world.residency.ensure("b", entry("b"), "default", permission)
    assert world.loaded() == []
    assert permission.dropped == ("a",)


@pytest.mark.timeout(60)
def test_a_pass_without_memory_waits_for_the_load_that_took_it() -> None:
    world = World()
    begun, go = threading.Event(), threading.Event()

    def wait(_: str) -> None:
        begun.set()
        go.wait(30)
        raise load_failed("OOM", "too little memory")  # a failed load ends the wait too

    world.during_load = wait

    def load() -> None:
        with pytest.raises(ModelLoadFailed):
            world.ensure("a")

    loading = threading.Thread(target=load)
    loading.start()
    begun.wait(30)
    answers: list[Relief | None] = []
    waiting = threading.Thread(target=lambda: answers.append(world.residency.make_room(world.residency.permission())))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    go.set()
    waiting.join()
    loading.join()
    assert answers == ["load_ended"], "no model was evicted"
    assert not world.residency.make_room(world.residency.permission())


def test_weights_and_the_peak_of_the_warm_up_are_reported() -> None:
    world = World(sizes={"a": 300})
    world.ensure("a")
    (loaded,) = world.residency.describe()
    assert (loaded.memory_bytes, loaded.peak_bytes) == (300, 600)


def test_a_model_that_cannot_be_warmed_up_is_not_loaded() -> None:
    world = World()
    world.residency._warm_up = lambda *_: (_ for _ in ()).throw(load_failed("INCOMPATIBLE", "it gives no vector"))
    with pytest.raises(ModelLoadFailed):
        world.ensure("a")
    assert world.loaded() == []


def least_recent(world: World) -> tuple[str, ...]:
    """The loaded models, the least recently used one first."""
    return tuple(model.model for model in sorted(world.residency.describe(), key=lambda model: -model.idle_s))


def lru_loads(traffic: list[str], capacity: int) -> int:
    """Return the number of loads of a plain least-recently-used cache of `capacity` models."""
    held: list[str] = []
    loads = 0
    for model in traffic:
        loads += model not in held
        held = [*(name for name in held if name != model), model][-capacity:]
    return loads


@pytest.mark.usefixtures("quick_collections")
@pytest.mark.parametrize("seed", long_but(range(3), [0]))
@pytest.mark.parametrize("knows_sizes", long_but([True, False], [True]))
def test_zipf_traffic_over_twenty_models_needs_no_more_loads_than_plain_lru(seed: int, knows_sizes: bool) -> None:
    """5 of 20 models fit below the threshold. Requests come one by one. All idle models may go, the least recently used
    first.
    """
    weights = 1 / np.arange(1, 21)
    ranks = np.random.default_rng(seed).choice(20, 2000, p=weights / weights.sum())
    traffic = [f"m{rank}" for rank in ranks]
    world = World(sizes={f"m{number}": 170 for number in range(20)}, known=knows_sizes)
    for model in traffic:
        if model not in world.loaded():
            world.ensure(model, may_drop=least_recent(world))
        world.use(model)
        world.relieve(*least_recent(world))
        assert len(world.loaded()) <= (5 if knows_sizes else 6)
    assert len(world.loads) <= lru_loads(traffic, 5)
    assert world._memory(0).percent <= world.threshold


def until_waiting(world: World, model: str, callers: int) -> None:
    """Wait until this number of callers wait for the running load of a model."""
    condition: Any = world.residency._loads[model][1]._condition
    until(lambda: len(condition._waiters) == callers, 30, f"{callers} callers wait")


def eight_ask(world: World) -> list[str]:
    """Return what eight callers of one model get: its name, or the class of the error. The load goes on when the seven
    others wait for it.
    """
    during_load = world.during_load

    def load(model: str) -> None:
        until_waiting(world, model, 7)
        during_load(model)

    world.during_load = load

    def load(_: int) -> str:
        try:
            return world.residency.ensure("a", entry("a")).model
        except ModelLoadFailed as error:
            return str(error.extras["error_class"])

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(load, range(8)))


def test_eight_askers_make_one_load() -> None:
    world = World()
    assert eight_ask(world) == ["a"] * 8
    assert world.loads == ["a"]


def test_different_models_load_at_the_same_time() -> None:
    both = threading.Barrier(2)
    world = World(during_load=lambda _: (both.wait(30) and None) or None)
    threads = [threading.Thread(target=world.residency.ensure, args=(name, entry(name))) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(world.loaded()) == ["a", "b"]  # the barrier would have broken if one had waited for the other


def test_a_failed_load_is_told_to_all_who_wait_and_the_next_one_tries_again() -> None:
    def fail(_: str) -> None:
        raise load_failed("NOT_FOUND", "no weights")

    world = World(during_load=fail)
    assert eight_ask(world) == ["NOT_FOUND"] * 8
    world.during_load = lambda _: None
    world.ensure("a")
    assert world.loads == ["a", "a"]


def test_the_traceback_of_a_failed_load_does_not_grow_with_each_caller() -> None:
    def fail(model: str) -> None:
        until_waiting(world, model, 7)
        raise load_failed("NOT_FOUND", "no weights")

    world = World(during_load=fail)
    with ThreadPoolExecutor(8) as pool:
        loads = [pool.submit(world.residency.ensure, "a", entry("a")) for _ in range(8)]
        errors = [load.exception(60) for load in loads]
    assert [str(error) for error in errors] == ["no weights"] * 8
    assert len({id(error) for error in errors}) == 8


def test_a_failed_load_leaves_nothing_of_its_model_in_memory() -> None:
    """The frames of its error refer to the model, and objects of a model refer to each other. If they waited for the
    collector, the next batch that lacks memory would evict a loaded model.
    """
    models: list[weakref.ref[FakeWeights]] = []

    def fail(_: str) -> None:
        half_loaded = FakeWeights()
        half_loaded.certificate["of"] = half_loaded  # type: ignore[assignment]
        models.append(weakref.ref(half_loaded))
        raise load_failed("CERTIFICATE", "wrong numbers")

    world = World(during_load=fail)
    gc.disable()
    try:
        with pytest.raises(ModelLoadFailed, match="wrong numbers"):
            world.ensure("a")
        assert [model() for model in models] == [None]
        assert world.given_back
    finally:
        gc.enable()


def test_the_failure_of_other_weights_is_not_told_to_an_entry_that_waited() -> None:
    """A sidecar that starts again while a load runs may ask for a newer entry of the model."""
    begun = threading.Event()

    def fail_once(model: str) -> None:
        if len(world.loads) == 1:
            begun.set()
            until_waiting(world, model, 1)
            raise load_failed("NOT_FOUND", "no weights")

    world = World(during_load=fail_once)
    with ThreadPoolExecutor() as pool:
        older = pool.submit(world.ensure, "a")
        assert begun.wait(30)
        newer = pool.submit(world.ensure, "a", load=LoadOptions(precision="float32"))
        assert isinstance(older.exception(60), ModelLoadFailed)
        assert newer.exception(60) is None
    assert world.loads == ["a", "a"]


def test_an_entry_that_needs_other_weights_loads_them_and_another_one_is_only_noted() -> None:
    world = World()
    world.ensure("a")
    before = world.residency.describe()[0].fingerprint
    world.ensure("a", run=RunDefaults(instruction="find"))
    assert world.loads == ["a"]
    assert world.residency.describe()[0].fingerprint != before
    world.ensure("a", load=LoadOptions(precision="float32"))
    assert world.loads == ["a", "a"]


@pytest.mark.parametrize(
    "changes",
    [
        {"head": HeadOptions(query_length=8)},
        {"pair": ("{query}", "{document}")},
        {"run": RunDefaults(pooling="cls")},
        {"run": RunDefaults(parameters={"max_len": 9})},
    ],
)
def test_what_a_family_keeps_of_its_entry_is_read_again_when_it_changes(changes: dict[str, Any]) -> None:
    """Otherwise the heads and rows of the old entry would be served under the new fingerprint."""
    world = World()
    world.ensure("a")
    world.ensure("a", **changes)
    assert world.loads == ["a", "a"]


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts": {"query": "q: {text}"}},
        {"default_prompt_name": "query"},
        {"golden": "other.json"},
        {"unproven": "never compared"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_change_of_a_field_that_a_load_checks_needs_a_load(changes: dict[str, Any]) -> None:
    """Otherwise a worker with the model would serve an entry that a worker without it refuses."""
    world = World()
    world.ensure("a")
    world.ensure("a", **changes)
    assert world.loads == ["a", "a"]


def test_a_changed_entry_is_served_from_then_on() -> None:
    world = World()
    world.ensure("a")
    world.ensure("a", run=RunDefaults(instruction="find"))
    assert world.loads == ["a"]
    with world.residency.use("a") as resident:
        assert resident.resolved.run.instruction == "find"
    world.ensure("a", load=LoadOptions(precision="float32"))
    assert world.loads == ["a", "a"]


def test_an_entry_that_changes_while_a_fingerprint_is_computed_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device threads read the fingerprint of a resident model without a lock, for the limits of its passes."""
    world = World()
    world.ensure("a", run=RunDefaults(instruction="find"))
    expected = world.residency.describe()[0].fingerprint
    world.ensure("a")
    compute = residency.fingerprint

    def changed_meanwhile(*arguments: Any) -> str:
        monkeypatch.setattr(residency, "fingerprint", compute)
        older = compute(*arguments)
        world.ensure("a", run=RunDefaults(instruction="find"))
        return older

    monkeypatch.setattr(residency, "fingerprint", changed_meanwhile)
    with world.residency.use("a") as resident:
        assert resident.fingerprint != expected
        assert resident.fingerprint == expected


def test_released_and_absent_models_are_reported_as_loading() -> None:
    world = World()
    world.ensure("a")
    world.residency.release("a")
    world.residency.release("a")
    with pytest.raises(ModelLoading), world.residency.use("a"):
        pass
