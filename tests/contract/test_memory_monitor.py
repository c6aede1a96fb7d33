"""The memory monitor of a real adapter process. After the models are loaded, a limit on the data of the process is set
from outside. The next batch or ping that permits the unload of a model unloads it, and its reply names the model.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from adapter_process import Adapter, Client, batch, running, toy
from unit.adapter import toys

from sie_contracts.wire import ipc

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prlimit and /proc are Linux's")
MODELS = ("idle", "other", "busy")
THRESHOLD_PERCENT = 80
PRESSURES_PERCENT = (85, 88, 91, 94)  # the monitor does not count the part that is free in the allocator
REASON = f"the threshold is {THRESHOLD_PERCENT} %"
DROPPED_WITHIN_S = 15.0  # at each pressure
# one arena: memory that is free in another arena would count as not used
ENVIRON = {"SIE_MEMORY_PRESSURE_THRESHOLD_PERCENT": str(THRESHOLD_PERCENT), "MALLOC_ARENA_MAX": "1"}


def loaded(client: Client) -> list[str]:
    return [model.model for model in client.ask(ipc.Describe()).models]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapter]:
    """An adapter with a model for each test to unload. A batch has run on each model, because it grows the heap."""
    folder = tmp_path_factory.mktemp("monitor")
    with running(folder / "a.sock", **ENVIRON) as process:
        with process.connect() as client:
            for name in MODELS:
                client.load(name, toy(toys.save(folder / name, "bert")))
                client.run(batch([[7, 8, 9]], name))
            assert client.ask(ipc.Ping(MODELS)).dropped == ()
            assert loaded(client) == list(MODELS), "nothing goes before there is pressure"
        yield process


@pytest.fixture
def client(adapter: Adapter) -> Iterator[Client]:
    with adapter.connect() as connected:
        yield connected


def press(adapter: Adapter, percent: int) -> None:
    """Limit the data of the process so that its data of now is `percent` of the limit. A batch may use the rest. The
    limit is never raised, because that needs privileges.
    """
    status = Path(f"/proc/{adapter.process.pid}/status").read_text()
    held_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))
    limit = held_kib * 1024 * 100 // percent
    before = resource.prlimit(adapter.process.pid, resource.RLIMIT_DATA)[1]
    if before == resource.RLIM_INFINITY or limit < before:
        resource.prlimit(adapter.process.pid, resource.RLIMIT_DATA, (limit, limit))


def assert_dropped(adapter: Adapter, client: Client, model: str, look: Callable[[], Sequence[str]]) -> None:
    """Assert that `look` drops `model` at one of the pressures, and that the other models stay."""
    rest = [name for name in loaded(client) if name != model]
    dropped_names: tuple[str, ...] = ()
    for percent in PRESSURES_PERCENT:
        press(adapter, percent)
        assert client.ask(ipc.Ping()).dropped == (), "nothing goes without a permission"
        until_s = time.monotonic() + DROPPED_WITHIN_S
        while not dropped_names and time.monotonic() < until_s:  # the monitor reads the memory once a second
            dropped_names = tuple(look())
        if dropped_names:
            break
    assert dropped_names == (model,)
    assert loaded(client) == rest
    assert REASON in adapter.wait_for(f"evicted {model}"), (
        "a failed allocation drops a model as well, and is not what is tested"
    )


@pytest.fixture(autouse=True, scope="module")
def quiet_machine() -> None:
    if psutil.virtual_memory().percent > THRESHOLD_PERCENT - 5:
        pytest.skip("the machine itself is under memory pressure")


@pytest.mark.long
def test_pressure_between_batches_is_noticed_by_a_ping(adapter: Adapter, client: Client) -> None:
    """No load and no batch comes after the pressure."""

    def ping() -> Sequence[str]:
        time.sleep(0.05)
        return client.ask(ipc.Ping(("idle",))).dropped  # type: ignore[no-any-return]

    assert_dropped(adapter, client, "idle", ping)
