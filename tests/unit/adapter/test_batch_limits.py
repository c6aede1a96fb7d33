"""Limits that are learnt from passes that fit and from passes that fail, on a clock that the test sets."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie_adapter.memory.batch_limits import (
    DOUBTED_TOKENS,
    FORGET_STEPS,
    MAX_KEYS,
    RAISE,
    SLOTS,
    WAIT_S,
    CrashRecord,
    DeviceLimits,
    PassRecord,
    PassRecords,
    limits_key,
    split_off,
)
from sie_contracts.settings import load
from sie_runtime import control_group

KEY = limits_key("f00d", "float32", "NVIDIA L4")


class Device:
    """A device that holds `room` tokens at once. Its batches read their limit from DeviceLimits, as in the adapter."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_s = 1_000_000.0
        self.room = 4000
        self.failures = 0
        self.restart()

    def restart(self) -> None:
        self.batch_limits = DeviceLimits(self.path, lambda: self.now_s)

    def run(self, tokens: int) -> None:
        """Run a batch of one-token items."""
        while tokens:
            part = min(tokens, self.batch_limits.limit(KEY) or tokens)
            self._run(part)
            tokens -= part

    def _run(self, tokens: int) -> None:
        if tokens <= self.room:
            self.batch_limits.fits(KEY, tokens)
            return
        self.failures += 1
        self.batch_limits.failed(KEY, tokens)
        for half in (tokens // 2, tokens - tokens // 2):
            self._run(half)


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path / "sie" / "frontier.json")


def test_after_a_failure_batches_are_as_large_as_what_is_known_to_fit(device: Device) -> None:
    device.run(3000)
    device.run(10_000)
    failures = device.failures
    assert failures == 3  # the batch and both of its halves
    assert device.batch_limits.limit(KEY) == 3000
    for _ in range(50):
        device.run(10_000)
    assert device.failures == failures


def test_a_restart_knows_the_edge(device: Device) -> None:
    for _ in range(3):
        device.run(16_384)
    limit, failures = device.batch_limits.limit(KEY), device.failures
    assert failures > 0
    device.restart()
    assert device.batch_limits.limit(KEY) == limit
    device.run(16_384)
    assert device.failures == failures


def test_what_a_neighbour_took_is_used_again_slowly(device: Device) -> None:
    """A neighbour process leaves a quarter of the device. After it ends, the limit rises in steps to its old size."""
    device.run(3900)
    device.room = 1000
    device.run(3900)
    limit = device.batch_limits.limit(KEY)
    assert limit is not None
    assert limit <= 1000
    device.room = 4000
    failures, rounds = device.failures, 0
    while (device.batch_limits.limit(KEY) or 0) < 3900:
        before = device.batch_limits.limit(KEY) or 0
        device.now_s += WAIT_S
        device.run(3900)
        after = device.batch_limits.limit(KEY) or 0
        assert after <= before * RAISE + 2
        rounds += 1
        assert rounds < 20
    assert device.failures == failures


def test_a_device_that_is_too_small_is_tried_ever_more_rarely(device: Device) -> None:
    """The wait between probes doubles up to the longest wait, which bounds the failures of a day of full batches."""
    device.run(16_384)
    start, failures = device.now_s, device.failures
    while device.now_s < start + 24 * 3600:
        device.now_s += 10
        device.run(16_384)
    assert device.failures - failures < 80
    assert 0.7 * device.room <= (device.batch_limits.limit(KEY) or 0) <= device.room


def test_the_limit_is_at_least_one_token_and_rises_from_there(device: Device) -> None:
    device.batch_limits.failed(KEY, 1)
    assert device.batch_limits.limit(KEY) == 1
    device.now_s += WAIT_S
    assert device.batch_limits.limit(KEY) == 2


@pytest.mark.parametrize("restarts", [False, True])
def test_a_limit_rises_after_the_clock_was_set_back(device: Device, restarts: bool) -> None:
    """A machine may start with a clock that is years ahead, until it is set."""
    device.batch_limits.failed(KEY, 1000)
    limit = device.batch_limits.limit(KEY)
    device.now_s -= 500_000
    if restarts:
        device.restart()
    assert device.batch_limits.limit(KEY) == limit
    device.now_s += 2 * WAIT_S
    assert (device.batch_limits.limit(KEY) or 0) > (limit or 0)


def test_models_precisions_and_devices_are_apart(device: Device) -> None:
    device.batch_limits.failed(KEY, 1000)
    for key_parts in (("beef", "float32", "NVIDIA L4"), ("f00d", "bfloat16", "NVIDIA L4"), ("f00d", "float32", "cpu")):
        assert device.batch_limits.limit(limits_key(*key_parts)) is None


def test_a_corrupt_file_is_put_aside_with_a_warning(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    device.path.parent.mkdir()
    for content in (b"{", b'{"edges": {"a": {"fit_tokens": "x"}}}', b"\xff"):
        device.path.write_bytes(content)
        device.restart()
        caplog.clear()
        assert device.batch_limits.limit(KEY) is None
        assert "measured again" in caplog.text
        assert device.path.with_suffix(".corrupt").read_bytes() == content
    device.batch_limits.failed(KEY, 100)
    device.restart()
    assert device.batch_limits.limit(KEY) == 50


def test_two_processes_keep_what_each_learnt_of_its_models(device: Device) -> None:
    neighbour = DeviceLimits(device.path, lambda: device.now_s)
    assert neighbour.limit("b") is None
    device.batch_limits.failed("a", 100)
    neighbour.failed("b", 100)
    device.restart()
    assert [device.batch_limits.limit(key) for key in "ab"] == [50, 50]
    neighbour.failed("b", 40)
    device.batch_limits.failed("a", 40)  # the limits of other models that this process has read are old
    device.restart()
    assert [device.batch_limits.limit(key) for key in "ab"] == [20, 20]


def test_what_fits_is_written_at_most_once_a_second_and_at_the_end(device: Device) -> None:
    device.batch_limits.failed(KEY, 1000)
    written = device.path.read_bytes()
    for tokens in range(600, 700):
        device.batch_limits.fits(KEY, tokens)
    assert device.path.read_bytes() == written
    device.batch_limits.save()
    device.restart()
    assert device.batch_limits.limit(KEY) == 699
    device.now_s += 1
    device.batch_limits.fits(KEY, 800)
    device.restart()
    assert device.batch_limits.limit(KEY) == 800


def test_the_file_is_bounded_and_old_edges_are_forgotten(device: Device) -> None:
    for number in range(MAX_KEYS + 10):
        device.now_s += 0.01
        device.batch_limits.failed(f"key-{number}", 100)
    device.restart()
    limits = [device.batch_limits.limit(f"key-{number}") for number in range(MAX_KEYS + 10)]
    assert limits == [None] * 10 + [50] * MAX_KEYS
    device.now_s += FORGET_STEPS * WAIT_S
    device.batch_limits.failed(KEY, 100)
    assert device.path.read_bytes().count(b"fit_tokens") == 1


@given(st.lists(st.integers(1, 600), min_size=1, max_size=40), st.integers(1, 2000), st.data())
def test_parts_hold_every_item_once_and_stay_within_the_limit(
    lengths: list[int], limit: int, data: st.DataObject
) -> None:
    """Only an item that is alone in its part may exceed the limit."""
    chosen = np.array(sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1)))), np.int64)
    tokens, rest, members = np.array(lengths, np.int64), chosen, []
    while len(rest):
        part, rest = split_off(rest, tokens, limit)
        assert len(part) == 1 or tokens[part].sum() <= limit
        members += part.tolist()
    assert sorted(members) == chosen.tolist()


# passes that their process did not survive


CPU_KEY = limits_key("f00d", "float32", "cpu")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sie" / "passes"


def die_in(path: Path, tokens: int, fitted: int = 0) -> None:
    """Fork a process that is killed within a pass of `tokens` tokens."""
    child = os.fork()
    if not child:
        with PassRecords(path).during(CPU_KEY, tokens, fitted):
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_only_a_pass_that_was_not_survived_is_left(path: Path) -> None:
    records = PassRecords(path)
    with records.during(CPU_KEY, 10, 0), records.during(CPU_KEY, 20, 5):
        pass
    with pytest.raises(MemoryError), records.during(CPU_KEY, 30, 0):
        raise MemoryError
    assert PassRecords(path).left() == []
    die_in(path, 4000, 3000)
    assert PassRecords(path).left() == [PassRecord(CPU_KEY, 4000, 3000)]
    assert PassRecords(path).left() == [], "each is told once"


@pytest.mark.parametrize(
    ("kills", "tokens", "fitted", "is_learnt"),
    [
        (1, 40, 4000, True),  # the kernel counted an OOM kill
        (0, 4000, 3000, True),  # larger than all passes that fitted
        (0, 4000, 4000, False),  # a pass of this size had fitted
        (0, DOUBTED_TOKENS - 1, 0, False),  # the first pass of a process that was killed for another reason
    ],
)
def test_what_is_learnt_of_a_death(
    path: Path, monkeypatch: pytest.MonkeyPatch, kills: int, tokens: int, fitted: int, is_learnt: bool
) -> None:
    counter = 5
    monkeypatch.setattr(control_group, "oom_kills", lambda: counter)
    file = path.with_name("frontier.json")
    crash_record = CrashRecord(PassRecords(path), lambda: DeviceLimits(file))
    die_in(path, tokens, fitted)
    counter += kills
    crash_record.learn()
    assert DeviceLimits(file).limit(CPU_KEY) == (tokens // 4 if is_learnt else None)
    crash_record.learn()
    assert DeviceLimits(file).limit(CPU_KEY) == (tokens // 4 if is_learnt else None), "a death counts once"


def test_adapters_of_one_machine_share_the_frontier_and_keep_their_passes_apart(tmp_path: Path) -> None:
    settings_a, settings_b = (
        load(environ={"SIE_LOCAL_CACHE": str(tmp_path), "SIE_IPC_SOCKET_PATH": f"/run/{name}.sock"}).settings
        for name in "ab"
    )
    DeviceLimits.for_machine(settings_a).failed(CPU_KEY, 100)
    assert DeviceLimits.for_machine(settings_b).limit(CPU_KEY) == 50
    with PassRecords.for_socket(settings_a).during(CPU_KEY, 9, 0):
        assert PassRecords.for_socket(settings_b).left() == []


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "sie").write_text("a file")
    batch_limits = DeviceLimits(tmp_path / "sie" / "frontier.json")
    batch_limits.failed(KEY, 100)
    assert batch_limits.limit(KEY) == 50
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * len(caplog.records)
    assert "cannot be written" in caplog.text


def test_more_passes_than_slots_and_a_long_name_run_without_a_record(path: Path) -> None:
    records = PassRecords(path)
    running = [records.during(KEY, number + 1, 0) for number in range(SLOTS + 2)]
    for running_pass in running:
        running_pass.__enter__()
    with records.during("x" * 5000, 7, 0):
        assert len(PassRecords(path).left()) == SLOTS
    for running_pass in running:
        running_pass.__exit__(None, None, None)


def test_a_file_that_cannot_be_written_keeps_no_pass_from_running(tmp_path: Path) -> None:
    (tmp_path / "sie").write_text("a file")
    ran = False
    with PassRecords(tmp_path / "sie" / "passes").during(KEY, 5, 0):
        ran = True
    assert ran
