"""Progress of a fetch: its figures, and how often they are reported."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest

from sie_contracts.wire.heartbeats import Fetched
from sie_store.weights.manifest import FetchFailed
from sie_store.weights.progress import FetchProgress

MIB = 1 << 20


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_it_is_logged_every_few_seconds_and_told_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    clock, states = Clock(), []
    progress = FetchProgress("org/model@abc", clock)
    progress.on_step = states.append
    caplog.set_level(logging.INFO, "sie.store")
    progress.expect(90 * MIB, 10 * MIB)
    for _ in range(80):
        clock.now_s += 0.125
        progress.add(MIB)
    assert [state.done_bytes // MIB for state in states] == [10, *range(18, 91, 8)]
    assert progress.state() == Fetched(90 * MIB, 90 * MIB, 8.0 * MIB)
    progress.end()
    assert [record.getMessage() for record in caplog.records] == [
        "fetching org/model@abc: 56 %, 50.0 of 90.0 MiB, 8.0 MiB/s",
        "fetching org/model@abc: 100 %, 90.0 of 90.0 MiB, 8.0 MiB/s",
        "fetched org/model@abc: 100 %, 90.0 of 90.0 MiB, 8.0 MiB/s",
    ]


def test_what_another_process_does_is_told_until_it_is_done_here() -> None:
    clock = Clock()
    progress = FetchProgress("it", clock)
    progress.follow(Fetched(30, 100, 7.5))
    assert progress.state() == Fetched(30, 100, 7.5)
    clock.now_s += 50
    progress.expect(100, 40)  # the other process was killed, this one goes on
    clock.now_s += 2
    progress.add(20)
    assert progress.state() == Fetched(60, 100, 10.0)
    progress.add(-20)  # these bytes were wrong
    assert progress.state().done_bytes == 40


def test_no_byte_is_expected_that_there_is_no_room_for() -> None:
    counts = []

    def full(count: int) -> None:
        counts.append(count)
        raise FetchFailed("NETWORK", "no space")

    progress = FetchProgress("it")
    progress.on_expect = full
    with pytest.raises(FetchFailed):
        progress.expect(100, 30)
    assert counts == [70]
