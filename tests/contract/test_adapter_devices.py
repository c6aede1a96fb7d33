"""One adapter with two devices: two processes with a socket each, and their parent."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from adapter_process import MODEL, Adapter, Client, start, stop

from sie_contracts.wire import ipc

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="several devices need Linux")


@pytest.fixture
def adapter(tmp_path: Path) -> Iterator[Adapter]:
    # a killed adapter with more devices would leave this socket
    Path(ipc.device_socket(str(tmp_path / "a.sock"), 5)).touch()
    adapter = start(tmp_path / "a.sock", SIE_DEVICE="cpu,cpu")
    try:
        for _ in range(2):
            adapter.wait_for("adapter ready")
        yield adapter
    finally:
        stop(adapter)


def client_of(adapter: Adapter, number: int) -> Client:
    return Client(Path(ipc.device_socket(str(adapter.path), number)))


def test_each_device_has_a_process_of_its_own(adapter: Adapter) -> None:
    with client_of(adapter, 0) as first, client_of(adapter, 1) as second:
        described = [client.ask(ipc.Describe()) for client in (first, second)]
        assert [(description.device, description.devices) for description in described] == [("cpu", 2), ("cpu", 2)]
        assert len({adapter.process.pid, *(description.pid for description in described)}) == 3
        first.load()
        assert [loaded.model for loaded in first.ask(ipc.Describe()).models] == [MODEL]
        assert second.ask(ipc.Describe()).models == ()
    assert not Path(ipc.device_socket(str(adapter.path), 5)).exists()


def test_a_killed_process_is_replaced_and_the_other_one_keeps_its_models(adapter: Adapter) -> None:
    with client_of(adapter, 1) as second:
        second.load()
        before = second.ask(ipc.Describe())
        with client_of(adapter, 0) as first:
            victim = first.ask(ipc.Describe()).pid
            os.kill(victim, signal.SIGKILL)
            with pytest.raises((EOFError, OSError)):
                first.receive()
        with client_of(adapter, 0) as first:
            assert first.ask(ipc.Describe()).pid not in (victim, before.pid, adapter.process.pid)
        after = second.ask(ipc.Describe())
        assert (after.pid, [loaded.model for loaded in after.models]) == (before.pid, [MODEL])


def test_a_signal_ends_all_processes_and_removes_all_sockets(adapter: Adapter) -> None:
    pids = []
    for number in range(2):
        with client_of(adapter, number) as client:
            pids.append(client.ask(ipc.Describe()).pid)
    adapter.process.send_signal(signal.SIGTERM)
    assert adapter.process.wait(60) == 0
    assert not list(adapter.path.parent.glob("a.sock*"))
    end_s = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end_s, "a process of a device is left"
        time.sleep(0.02)


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are several GPUs")
def test_a_start_with_a_gpu_that_is_absent_ends_without_sockets(tmp_path: Path) -> None:
    status, log = start(tmp_path / "a.sock", SIE_DEVICE="cuda:0,cuda:1").ended()
    assert status != 0
    assert re.search("SIE_DEVICE.*cuda", log)
    assert not list(tmp_path.glob("a.sock*"))
