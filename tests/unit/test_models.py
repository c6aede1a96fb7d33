"""Decisions of a worker about its models, without an adapter and without an event loop."""

from __future__ import annotations

import pytest
from fake_adapter import TOKENIZER, toy_entry

from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.wire import ipc
from sie_sidecar.models import MAX_STATES, MAX_TURN_S, UNUSED_S, ModelState, ModelStates

NAMES = ("toy/a", "toy/b", "toy/c", "toy/d")


class Device:
    """Four models on a clock that the test sets. After 1 s a model is closed for another one."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.assigned: frozenset[str] | None = None
        self.models = ModelStates(lambda: self.now_s, 1.0, assigned=lambda: self.assigned)
        catalogue = Catalogue({name: toy_entry(name) for name in NAMES})
        self.all = [self.models.obtain(catalogue.resolve(name)) for name in NAMES]

    def load(self, *models: ModelState, memory_bytes: int = 1, load_s: float = 0.0) -> None:
        for hosted in models:
            loaded = ipc.LoadedModel(hosted.name, "local", "f", "float32", "toy", memory_bytes)
            self.models.loaded(hosted, ipc.Ready(loaded, TOKENIZER, 512, {"encode": ipc.Rows()}), load_s)
            self.now_s += 5

    def evictable(self, idle_s: float = 1.0) -> list[str]:
        return [hosted.name for hosted in self.models.evictable(idle_s)]


@pytest.fixture
def device() -> Device:
    return Device()


def test_only_models_without_work_that_were_not_used_lately_may_go(device: Device) -> None:
    a, b, c, _ = device.all
    device.load(a, b, c)
    device.models.add_items(b)
    device.models.add_items(c)
    device.models.add_items(c, -1)
    assert device.evictable() == ["toy/a"]
    assert device.evictable(0.0) == ["toy/a", "toy/c"]
    device.models.add_items(b, -1)
    device.now_s += 5
    assert device.evictable() == ["toy/a", "toy/b", "toy/c"]
    device.models.add_items(a)
    assert device.evictable() == ["toy/b", "toy/c"]


def test_the_least_recently_used_model_goes_first_then_the_largest(device: Device) -> None:
    for memory_bytes, hosted in enumerate(device.all, 1):
        device.load(hosted, memory_bytes=memory_bytes)
    assert device.evictable() == ["toy/a", "toy/d", "toy/c", "toy/b"]
    device.all[0].used_s = device.now_s
    device.now_s += 5
    assert device.evictable() == ["toy/b", "toy/d", "toy/c", "toy/a"]


def test_models_that_are_placed_elsewhere_go_before_all_others(device: Device) -> None:
    device.load(*device.all)
    device.assigned = frozenset({"toy/a", "toy/c"})
    assert device.evictable() == ["toy/b", "toy/d", "toy/a", "toy/c"]


def test_work_that_waits_before_a_gate_keeps_no_model(device: Device) -> None:
    a, b, *_ = device.all
    device.load(a, b)
    device.models.add_items(a, 2)
    assert device.models.busy(b) == [a]
    waiting = 1
    a.before_gate.append(lambda: waiting)
    assert device.models.busy(b) == [a]
    waiting = 2
    assert (device.models.busy(b), device.evictable(0.0)) == ([], ["toy/b", "toy/a"])


def test_the_model_whose_turn_ends_first_is_closed_when_the_load_waited_and_the_turn_is_over(device: Device) -> None:
    a, b, c, d = device.all
    device.load(a, load_s=30.0)
    device.load(b, load_s=0.1)
    asked_s = device.now_s = b.loaded_s + 0.25
    # a was loaded 5 s before b, and its turn lasts MAX_TURN_S; that of b lasts 1 s
    assert device.models.next_to_close([a, b], asked_s) == (a, pytest.approx(1.0))
    a.is_closed = True
    assert device.models.next_to_close([a, b], asked_s) == (b, pytest.approx(1.0))
    device.now_s += 2
    assert device.models.next_to_close([a, b], asked_s) == (b, pytest.approx(-1.0))
    assert device.models.next_to_close([a, c, d], asked_s) == (None, None), "closed already, or not loaded"
    device.load(c, load_s=MAX_TURN_S + 20)
    assert device.models.next_to_close([c], 0.0) == (c, pytest.approx(0.0)), "a turn of MAX_TURN_S is over"


def test_a_model_that_makes_room_takes_no_work_and_one_that_went_neither(device: Device) -> None:
    a, *_ = device.all
    assert not a.is_open
    device.load(a)
    assert a.is_open
    a.is_closed = True
    assert not a.is_open
    a.is_closed = False
    assert device.models.dropped(("toy/a", "unknown")) == [a]
    assert (a.state, a.ready, a.is_open) == ("available", None, False)


def test_models_that_nobody_here_asked_for_were_left_by_an_earlier_process(device: Device) -> None:
    a, b, *_ = device.all
    device.load(a)
    b.state = "loading"
    held = [ipc.LoadedModel(name, "local", "f", "float32", "toy") for name in ("toy/a", "toy/b", "toy/c", "other")]
    assert device.models.left_over(held) == ["toy/c", "other"]


def test_a_failed_load_is_remembered_until_its_cool_down_is_over_or_its_entry_changes(device: Device) -> None:
    a, *_ = device.all
    device.models.failed(a, ModelLoadFailed("no", extras={"error_class": "OOM"}))
    refusal = a.refusal(device.now_s + 59)
    assert refusal is not None
    assert refusal.extras == {"error_class": "OOM", "permanent": False, "attempts": 1}
    assert a.refusal(device.now_s + 60) is None
    device.models.failed(a, ModelLoadFailed("no", extras={"error_class": "NOT_FOUND"}))
    assert a.refusal(device.now_s + 1e6) is not None
    changed = Catalogue({"toy/a": toy_entry("toy/a", max_tokens=7)}).resolve("toy/a")
    assert device.models.obtain(changed) is a
    assert (a.state, a.refusal(device.now_s)) == ("available", None)


def test_states_of_models_that_are_neither_loaded_nor_needed_are_removed_above_a_number(device: Device) -> None:
    loaded, failed, needed, _ = device.all
    device.load(loaded)
    device.models.failed(failed, ModelLoadFailed("no", extras={"error_class": "OOM"}))
    device.models.add_items(needed)
    names = [f"more/{number:04}" for number in range(MAX_STATES)]
    catalogue = Catalogue({name: toy_entry(name) for name in names})
    for name in names:
        device.models.obtain(catalogue.resolve(name))
    device.now_s += UNUSED_S
    device.models.obtain(catalogue.resolve(names[0]))
    device.models.remove_unused()
    retained = {hosted.name for hosted in device.models.all()}
    assert retained == {loaded.name, needed.name, names[0], *names[3:]}
    assert names[1] not in device.models.of_model
    device.models.remove_unused()
    assert len(device.models.all()) == MAX_STATES
