"""The connections to an adapter: a request that is cancelled or too large does not affect other requests."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from fake_adapter import FakeAdapter, toy_entry, vector_of
from inprocess import until

import sie_sidecar.link as links
from sie_contracts.errors import InternalFailure, ModelLoadFailed, PayloadTooLarge
from sie_contracts.wire import ipc
from sie_runtime.process import Stop
from sie_sidecar.link import AdapterGone, AdapterLink

Linked = tuple[AdapterLink, FakeAdapter]


@pytest.fixture(scope="module")
def left_alone() -> None:
    """Freeze the objects of earlier tests: each collection here would take a second of a processor."""
    gc.collect()
    gc.freeze()


@pytest.fixture
async def linked(tmp_path: Path, left_alone: None) -> AsyncIterator[Linked]:
    """A link of two batch connections to an adapter that holds toy/one. An unretrieved exception fails the test."""
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
    adapter = await FakeAdapter(tmp_path / "a.sock").start()
    link = AdapterLink(adapter.path, size=2, ping_s=60.0, stale_s=120.0)
    stop = Stop()
    running = asyncio.create_task(link.run(stop))
    await asyncio.wait_for(link.wait_connected(), 10)
    entry = toy_entry()
    await link.ensure_ready(
        ipc.EnsureReady(
            entry.id,
            {"id": entry.id, "weights": {"path": "/toy"}, "family": "toy", "outputs": {"dense": 8}, "max_tokens": 512},
        )
    )
    yield link, adapter
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await adapter.stop()
    gc.collect()
    assert unseen == []


def batch(ids: int = 1, name: str = "b") -> ipc.RunBatch:
    lengths = ids.to_bytes(4, "little")
    return ipc.RunBatch(name, "toy/one", "encode", lengths, bytes(4 * ids), (ipc.Group(0, 1),))


async def test_a_death_is_one_whichever_connection_notices_it_first(linked: Linked) -> None:
    """The batch at the device is suspect even if the end of the control connection is read before that of its own
    connection.
    """
    link, adapter = linked
    adapter.hold_batches = True
    begun = asyncio.Event()
    running = asyncio.create_task(link.run_batch(batch(), begun.set))
    await asyncio.wait_for(begun.wait(), 10)
    adapter.freeze()
    asking = asyncio.create_task(link.request(ipc.Ping()))
    await asyncio.sleep(0)  # the request is sent, so both readers wake together
    await adapter.stop()
    outcomes = await asyncio.wait_for(asyncio.gather(running, asking, return_exceptions=True), 10)
    assert all(isinstance(outcome, AdapterGone) and outcome.died for outcome in outcomes), outcomes


async def answered(link: AdapterLink) -> None:
    done = await link.run_batch(batch(), lambda: None)
    assert done.block == vector_of([0]).tobytes()


async def test_a_batch_that_the_adapter_would_not_read_is_refused_before_it_is_sent(linked: Linked) -> None:
    link, adapter = linked
    with pytest.raises(PayloadTooLarge) as raised:
        await link.run_batch(batch(ipc.MAX_REQUEST_BYTES // 4), lambda: None)
    assert raised.value.extras == {"limit": ipc.MAX_REQUEST_BYTES}
    connections = adapter.connections
    await answered(link)
    assert adapter.connections == connections, "the link was not lost"


async def test_a_question_that_is_given_up_leaves_no_task_and_the_link_is_made_again(linked: Linked) -> None:
    """The answer might still arrive, so the connection cannot be used again."""
    link, adapter = linked
    adapter.freeze()
    before = asyncio.all_tasks()
    ping = asyncio.create_task(link.request(ipc.Ping()))
    await asyncio.sleep(0)
    ping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ping
    await until(lambda: asyncio.all_tasks() <= before, "no task is left")
    await until(lambda: not link.connected, "the link is given up")


async def test_an_adapter_that_does_not_answer_a_question_is_gone(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, adapter = linked
    monkeypatch.setattr(links, "CONTROL_TIMEOUT_S", 0.05)
    adapter.freeze()
    with pytest.raises(AdapterGone, match="no reply"):
        await link.request(ipc.Ping())
    await until(lambda: not link.connected, "the link is given up")


async def test_an_adapter_that_stops_in_the_middle_of_a_batch_ends_it(tmp_path: Path) -> None:
    """The adapter reads a part of the frame, and answers nothing more."""
    path = str(tmp_path / "a.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        connection = await links._connect(path)
        peer, _ = listener.accept()
        with peer:
            sending = asyncio.create_task(connection.send(bytes(64 << 20)))
            await until(connection._writer.transport.get_write_buffer_size, "a part of the frame waits")
            connection.close()
            done, _ = await asyncio.wait([sending], timeout=10)
            assert done
            with pytest.raises(AdapterGone):
                await connection.receive()


async def test_a_failed_health_check_loses_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter without memory may refuse a ping, and still runs its batches."""
    adapter = await FakeAdapter(tmp_path / "a.sock").start()
    link = AdapterLink(adapter.path, size=2, ping_s=0.01, stale_s=120.0)
    running = asyncio.create_task(link.run(Stop()))
    refused: list[ipc.Request] = []

    def refuse(request: ipc.Request) -> ipc.Reply:
        refused.append(request)
        return ipc.Refused(InternalFailure("no memory").info())

    try:
        await asyncio.wait_for(link.wait_connected(), 10)
        connections = adapter.connections
        monkeypatch.setattr(adapter, "_at_once", refuse)
        await until(lambda: len(refused) >= 3 or running.done(), "several health checks")
        assert (running.done(), link.connected, adapter.connections) == (False, True, connections)
        fresh = AdapterLink(adapter.path, size=2, ping_s=60.0, stale_s=120.0)
        with pytest.raises(AdapterGone, match="no memory"):
            await fresh._open()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await adapter.stop()


async def test_a_connection_that_is_made_while_the_adapter_is_lost_is_closed(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that generates text opens a connection."""
    link, _ = linked
    connect, reached, go_on = links._connect, asyncio.Event(), asyncio.Event()
    opened: list[links._AdapterConnection] = []

    async def slow(path: str) -> links._AdapterConnection:
        connection = await connect(path)
        opened.append(connection)
        reached.set()
        await go_on.wait()
        return connection

    monkeypatch.setattr(links, "_connect", slow)
    running = asyncio.create_task(link.run_batch(batch(), lambda: None, asyncio.Event()))
    await reached.wait()
    link._lost.set()
    await until(lambda: not link.connected, "the link is given up")
    monkeypatch.undo()
    go_on.set()
    with pytest.raises(AdapterGone, match="lost"):
        await running
    assert opened[0]._writer.is_closing()


async def test_who_stops_waiting_for_a_connection_takes_none_with_him(linked: Linked) -> None:
    link, adapter = linked
    adapter.hold_batches = True
    running = [asyncio.create_task(link.run_batch(batch(name=str(number)), lambda: None)) for number in range(2)]
    await adapter.until(lambda adapter: adapter.running == 2, "both connections are taken")
    waiting = asyncio.create_task(link.run_batch(batch(name="waiting"), lambda: None))
    await asyncio.sleep(0)
    before = asyncio.all_tasks() - {waiting}
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    adapter.let_go()
    await asyncio.gather(*running)
    assert all(task.done() or task in before for task in asyncio.all_tasks() | {waiting})
    await asyncio.gather(*(answered(link) for _ in range(4)))
    assert link.connected


def test_a_connection_that_was_reset_is_an_adapter_that_is_gone(tmp_path: Path) -> None:
    """The test uses uvloop, as a sidecar does. uvloop has an error of its own for a write to a closed transport."""
    path = str(tmp_path / "a.sock")

    async def run() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            connection = await links._connect(path)
            peer, _ = listener.accept()
            await connection.send(b"never read")
            peer.close()  # with bytes that it has not read: a reset
            with pytest.raises(AdapterGone):
                await connection.receive()
            await until(connection._writer.is_closing, "the transport is closed")
            with pytest.raises(AdapterGone, match="reset"):
                await connection.send(b"x")
            connection.close()

    uvloop.run(run())


async def test_a_batch_names_what_may_go_and_every_reply_what_went(linked: Linked) -> None:
    """The requests are a batch, a relief, and a load that is refused."""
    link, adapter = linked
    drops: list[tuple[str, ...]] = []
    link.attach(lambda: ("toy/idle", "toy/other"), drops.append)
    await answered(link)
    assert (adapter.batches[-1].may_drop, drops) == (("toy/idle", "toy/other"), [])
    adapter.dropped = ("toy/idle",)
    await answered(link)
    await link.relieve(("toy/idle",))
    adapter.refusals["toy/large"] = ModelLoadFailed("no room", extras={"error_class": "OOM"})
    with pytest.raises(ModelLoadFailed):
        await link.ensure_ready(ipc.EnsureReady("toy/large", {}))
    assert drops == [("toy/idle",)] * 3


async def test_a_relief_may_take_longer_than_a_short_question(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that takes long to release memory does not count as dead, and answers health checks."""
    link, adapter = linked
    monkeypatch.setattr(links, "CONTROL_TIMEOUT_S", 0.05)
    adapter.hold_relief = True
    relieving = asyncio.create_task(link.relieve(("toy/idle",)))
    done, _ = await asyncio.wait([relieving], timeout=0.2)
    assert not done
    monkeypatch.setattr(links, "CONTROL_TIMEOUT_S", 30.0)
    assert isinstance(await link.request(ipc.Ping()), ipc.Pong)
    adapter.let_go(1)
    await relieving
    assert link.connected
