"""The memory monitor of a real adapter process: it evicts under pressure that rises after the last load, once a second
and after a batch.

two models loaded ──► the sidecar names one as idle ──► a limit on data is set from outside ──► the idle one goes, the
other stays
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import psutil
import pytest
from adapter_process import Adapter, Client, batch, running, toy
from unit.adapter import toys

from sie_contracts import ipc
from sie_contracts.messages import Ok

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prlimit and /proc are Linux's")
THRESHOLD_PERCENT, PRESSURE_PERCENT = 80, 85
REASON = f"above {THRESHOLD_PERCENT} %"
EVICTED_WITHIN_S = 30.0
# one arena: memory that is free in another one counts as not used
ENVIRON = {"SIE_MEMORY_PRESSURE_THRESHOLD_PERCENT": str(THRESHOLD_PERCENT), "MALLOC_ARENA_MAX": "1"}
WITHOUT_TIMER = "from sie_adapter import server; server.RELIEVE_S = 3600.0"


def loaded(client: Client) -> list[str]:
    return [model.model for model in client.ask(ipc.Describe()).models]


def prepare(client: Client, folder: Path) -> None:
    """Load `idle`, then `busy`, and run a batch on each: the heap has grown by what a batch needs."""
    for name in ("idle", "busy"):
        client.load(name, toy(toys.save(folder / name, "bert")))
        client.run(batch([[7, 8, 9]], name))
    client.ask(ipc.Ping(idle=("idle",)))
    assert loaded(client) == ["idle", "busy"], "nothing goes before there is pressure"


def press(adapter: Adapter) -> None:
    """Limit the data of the process so that what it holds now is PRESSURE_PERCENT of it. The rest is
    left to the batch.
    """
    status = Path(f"/proc/{adapter.process.pid}/status").read_text()
    held_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))
    limit = held_kib * 1024 * 100 // PRESSURE_PERCENT
    resource.prlimit(adapter.process.pid, resource.RLIMIT_DATA, (limit, limit))


def evicted(client: Client, within_s: float = EVICTED_WITHIN_S) -> tuple[str, ...]:
    """What the adapter tells of it, which it does once."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if gone := client.ask(ipc.Ping(idle=("idle",))).evicted:
            return tuple(gone)
        time.sleep(0.05)
    return ()


@pytest.fixture(autouse=True)
def quiet_machine() -> None:
    if psutil.virtual_memory().percent > THRESHOLD_PERCENT - 5:
        pytest.skip("the machine itself is under memory pressure")


def test_pressure_between_batches_is_noticed_by_the_timer(tmp_path: Path) -> None:
    """No load, no batch and no connection comes after the pressure: only the timer can notice it."""
    with running(tmp_path / "a.sock", **ENVIRON) as adapter, adapter.connect() as client:
        prepare(client, tmp_path)
        gone: tuple[str, ...] = ()
        for _ in range(6):  # it may give back memory of the batch, and be below the threshold then
            press(adapter)
            if gone := evicted(client, EVICTED_WITHIN_S / 6):
                break
        assert gone == ("idle",)
        assert loaded(client) == ["busy"]
        assert REASON in adapter.wait_for("unloaded idle"), (
            "a failed allocation evicts as well, and is not what is tested"
        )


def test_pressure_is_noticed_after_a_batch(tmp_path: Path) -> None:
    """The timer of this process is set to an hour: only the look after the batch can notice the pressure."""
    with running(tmp_path / "a.sock", before=WITHOUT_TIMER, **ENVIRON) as adapter, adapter.connect() as client:
        prepare(client, tmp_path)
        press(adapter)
        done = client.run(batch([[7, 8, 9]], "busy"))
        assert isinstance(done.outcomes[0], Ok)
        assert evicted(client) == ("idle",)
        assert loaded(client) == ["busy"]
        assert REASON in adapter.wait_for("unloaded idle"), (
            "a failed allocation evicts as well, and is not what is tested"
        )
