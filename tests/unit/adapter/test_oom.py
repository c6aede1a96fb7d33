"""Counts of remedies for a lack of memory, by model."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from sie_adapter.engine import device as devices
from sie_adapter.memory.oom import OomRecovery, Relief, Remedy
from sie_adapter.packed.packing import Int64

CPU = torch.device("cpu")


def counted(
    fits: int, count: int, room: int = 0, relief: Relief = "evictions_triggered"
) -> tuple[Counter[str], list[int]]:
    """Run work of `count` items on a device where `fits` items fit at once, and all items after `room` evictions.
    Return the remedies and the refused items.
    """
    remedies: Counter[str] = Counter()
    left = room
    refused: list[int] = []

    def work(items: Int64) -> None:
        if len(items) > fits and not (room and not left):
            raise MemoryError

    def make_room() -> Relief | None:
        nonlocal left
        left -= 1
        return relief if left >= 0 else None

    def note(remedy: Remedy) -> None:
        remedies[remedy] += 1

    OomRecovery(CPU, make_room, note).run(work, np.arange(count), refused.append)
    return remedies, refused


def test_a_batch_that_is_split_was_one_recovery() -> None:
    """8 items on a device for 2 need 3 splits, each after the cache is cleared."""
    remedies, refused = counted(2, 8)
    assert refused == []
    assert remedies == {"recoveries_attempted": 1, "recoveries_succeeded": 1, "cache_clears": 3, "batch_splits": 3}


def test_a_model_that_makes_room_is_an_eviction_and_no_split() -> None:
    remedies, refused = counted(2, 8, room=1)
    assert refused == []
    assert remedies == {
        "recoveries_attempted": 1,
        "recoveries_succeeded": 1,
        "cache_clears": 1,
        "evictions_triggered": 1,
    }


def test_an_item_that_does_not_fit_alone_is_a_terminal_failure() -> None:
    remedies, refused = counted(0, 2)
    assert refused == [0, 1]
    assert (remedies["terminal_failures"], remedies["recoveries_attempted"], remedies["recoveries_succeeded"]) == (
        2,
        1,
        0,
    )


def test_the_use_of_a_cpu_is_measured_between_two_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cores are busy for 3 of 4 seconds."""
    seconds = [(100.0, 400.0), (103.0, 404.0), (103.0, 404.0)]
    monkeypatch.setattr(devices, "_cpu_seconds", lambda: seconds.pop(0))
    use = devices.UtilisationProbe(CPU)
    assert use.percent() == 75.0
    assert use.percent() is None, "no time has passed"
