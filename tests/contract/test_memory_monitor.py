"""The memory monitor of a real adapter process: it drops a model under pressure that rises after the last load, with a
batch and with a ping that permit it.

two models loaded ──► a limit on data is set from outside ──► a request that may drop one of them ──► it goes, the other
stays, and the reply names it
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from adapter_process import Adapter, Client, batch, running, toy
from unit.adapter import toys

from sie_contracts import ipc
from sie_contracts.messages import Ok

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prlimit and /proc are Linux's")
THRESHOLD_PERCENT = 80
PRESSURES_PERCENT = (85, 88, 91, 94)  # of which a part may be free in the allocator, and does not count
REASON = f"above {THRESHOLD_PERCENT} %"
DROPPED_WITHIN_S = 15.0  # at each pressure
# one arena: memory that is free in another one counts as not used
ENVIRON = {"SIE_MEMORY_PRESSURE_THRESHOLD_PERCENT": str(THRESHOLD_PERCENT), "MALLOC_ARENA_MAX": "1"}


def loaded(client: Client) -> list[str]:
    return [model.model for model in client.ask(ipc.Describe()).models]


def prepare(client: Client, folder: Path) -> None:
    """Load `idle`, then `busy`, and run a batch on each: the heap has grown by what a batch needs."""
    for name in ("idle", "busy"):
        client.load(name, toy(toys.save(folder / name, "bert")))
        client.run(batch([[7, 8, 9]], name))
    assert client.ask(ipc.Ping(("idle",))).dropped == ()
    assert loaded(client) == ["idle", "busy"], "nothing goes before there is pressure"


def press(adapter: Adapter, percent: int) -> None:
    """Limit the data of the process so that what it holds now is `percent` of it. The rest is left to the batch. A
    limit is never raised: that needs privileges.
    """
    status = Path(f"/proc/{adapter.process.pid}/status").read_text()
    held_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))
    limit = held_kib * 1024 * 100 // percent
    before = resource.prlimit(adapter.process.pid, resource.RLIMIT_DATA)[1]
    if before == resource.RLIM_INFINITY or limit < before:
        resource.prlimit(adapter.process.pid, resource.RLIMIT_DATA, (limit, limit))


def dropped(client: Client) -> tuple[str, ...]:
    """What the adapter drops at pings that permit it."""
    until_s = time.monotonic() + DROPPED_WITHIN_S
    while time.monotonic() < until_s:
        if gone := client.ask(ipc.Ping(("idle",))).dropped:
            return tuple(gone)
        time.sleep(0.05)
    return ()


@pytest.fixture(autouse=True)
def quiet_machine() -> None:
    if psutil.virtual_memory().percent > THRESHOLD_PERCENT - 5:
        pytest.skip("the machine itself is under memory pressure")


def test_pressure_between_batches_is_noticed_by_a_ping(tmp_path: Path) -> None:
    """No load and no batch comes after the pressure. Pings without a permission drop nothing."""
    with running(tmp_path / "a.sock", **ENVIRON) as adapter, adapter.connect() as client:
        prepare(client, tmp_path)
        gone: tuple[str, ...] = ()
        for percent in PRESSURES_PERCENT:
            press(adapter, percent)
            assert client.ask(ipc.Ping()).dropped == ()
            if gone := dropped(client):
                break
        assert gone == ("idle",)
        assert loaded(client) == ["busy"]
        assert REASON in adapter.wait_for("unloaded idle"), (
            "a failed allocation drops a model as well, and is not what is tested"
        )


def test_pressure_is_noticed_after_a_batch(tmp_path: Path) -> None:
    with running(tmp_path / "a.sock", **ENVIRON) as adapter, adapter.connect() as client:
        prepare(client, tmp_path)
        gone: tuple[str, ...] = ()
        for percent in PRESSURES_PERCENT:
            press(adapter, percent)
            until_s = time.monotonic() + DROPPED_WITHIN_S
            while not gone and time.monotonic() < until_s:  # memory is looked at once a second
                done = client.run(msgspec.structs.replace(batch([[7, 8, 9]], "busy"), may_drop=("idle",)))
                assert isinstance(done.outcomes[0], Ok)
                gone = done.dropped
        assert gone == ("idle",)
        assert loaded(client) == ["busy"]
        assert REASON in adapter.wait_for("unloaded idle"), (
            "a failed allocation drops a model as well, and is not what is tested"
        )
