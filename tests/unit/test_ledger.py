"""The ledger from which a sidecar returns the deliveries of a killed predecessor to the queue."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from direct import ENTRY, Direct, is_right
from hypothesis import given
from hypothesis import strategies as st
from inprocess import until

from sie_sidecar.settle import SLOT_BYTES, SLOTS, LeaseLedger, open_ledger

NOW_S = 1_000_000.0
REPLY = "$JS.ACK.WORK__default.cpu__default__interactive__m.1.%d.1.1700000000000000000.0"


def opened(path: Path, now_s: float = NOW_S) -> LeaseLedger:
    ledger = open_ledger(path, lambda: now_s)
    assert ledger is not None
    return ledger


def test_what_a_killed_process_held_is_found_by_the_next(tmp_path: Path) -> None:
    """A process records three deliveries, settles one, and is killed without a flush. The next process finds the other
    two.
    """
    path = tmp_path / "w.leases"
    body = (
        f"import os, pathlib, sie_sidecar.settle as l; x = l.open_ledger(pathlib.Path({str(path)!r}), lambda: "
        f"{NOW_S})\nslots = [x.put({REPLY!r} % n) for n in range(3)]; x.clear(slots[1]); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", body], check=False).returncode == -9
    ledger = opened(path, NOW_S + 2)
    assert ledger.take_over(8.0) == [REPLY % 0, REPLY % 2]
    assert ledger.take_over(8.0) == []
    ledger.close()
    assert not path.exists()


@pytest.mark.parametrize(
    ("renewed_s", "now_s", "is_abandoned"), [(0.0, 7.9, True), (0.0, 8.0, False), (3.0, 10.9, True), (3.0, 11.0, False)]
)
def test_leases_that_may_be_somebody_elses_are_left_alone(
    tmp_path: Path, renewed_s: float, now_s: float, is_abandoned: bool
) -> None:
    times = iter([NOW_S, NOW_S + renewed_s])
    first = open_ledger(tmp_path / "w", lambda: next(times))
    assert first is not None
    first.put(REPLY % 1)
    first.renewed()
    first.close()
    second = opened(tmp_path / "w", NOW_S + now_s)
    assert second.take_over(8.0) == ([REPLY % 1] if is_abandoned else [])
    second.close()


@given(st.data())
def test_a_damaged_ledger_gives_true_entries_or_none(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "w"
    first = opened(path)
    replies = {REPLY % number for number in range(8)}
    for reply in replies:
        first.put(reply)
    first.close()
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(8, 10 * SLOT_BYTES))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(whole), len(whole) - 1, SLOT_BYTES, 3, 0]))
    path.write_bytes(whole[:cut])
    second = opened(path)
    assert set(second.take_over(8.0)) <= replies
    second.close()


def test_two_processes_never_share_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = opened(tmp_path / "w")
    assert open_ledger(tmp_path / "w", lambda: NOW_S) is None
    first.close()


def test_more_than_it_has_room_for_is_not_noted(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "w")
    slots = [ledger.put(REPLY % number) for number in range(SLOTS + 1)]
    assert slots[-1] == 0
    assert sorted(slots[:-1]) == list(range(1, SLOTS + 1))
    ledger.clear(slots[-1])
    ledger.clear(slots[0])
    assert ledger.put("r" * SLOT_BYTES) == 0
    assert ledger.put(REPLY % 7) == slots[0]
    ledger.close()


async def test_what_a_killed_sidecar_held_comes_back_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A sidecar is killed while it holds work: its connection and its tasks end, its ledger stays. The next sidecar of
    the worker gets the work long before the ack wait of 30 s is over, and answers it.
    """
    async with Direct(tmp_path, ENTRY) as cluster:
        adapter = await cluster.adapter("a.sock")
        adapter.hold_batches = True
        first = await cluster.sidecar(adapter, SIE_ACK_WAIT_S="30")
        items = [await cluster.publish(f"text {number}") for number in range(5)]
        await adapter.until(lambda adapter: adapter.running, "a batch at the device")
        path = Path(f"{adapter.path}.w0.leases")
        copy = await until(
            lambda: content if (content := path.read_bytes()).count(b"$JS.ACK") == 5 else b"", "all of it in the ledger"
        )
        await first.broker.close()  # no message of this sidecar arrives from here on
        first.task.cancel()
        await asyncio.gather(first.task, return_exceptions=True)
        await asyncio.to_thread(path.write_bytes, copy)
        await adapter.die()
        adapter.let_go()
        began_s = time.monotonic()
        await cluster.sidecar(adapter, SIE_WORKER_ID="w0", SIE_ACK_WAIT_S="30")
        results = [await cluster.result(item) for item in items]
        assert time.monotonic() - began_s < 20  # it would be 30 s without the ledger
        assert all(is_right(result, item, 0) for result, item in zip(results, items, strict=True))
        assert {result.batch.deliveries for result in results} == {2}
        assert "an earlier process of this worker was killed: 5 deliveries returned to the queue" in caplog.text
        await cluster.left(0)
