"""`sie dlq` against a real nats-server: a dead letter survives the broker, and its replay gives the original answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from direct import ENTRY, DeadlyAdapter
from inprocess import Source, free_port, settings_of
from nats_server import NatsServer

from sie_broker import Broker, CoreMessage
from sie_broker.dead_letters import Letters
from sie_broker.nats import connect
from sie_cli.main import main
from sie_contracts.errors import ErrorInfo
from sie_contracts.wire import messages, topology
from sie_contracts.wire.messages import Confirmation, DeadLetter, Input, RunOptions, WorkItem, WorkResult
from sie_contracts.wire.topology import Lane
from sie_runtime.process import Stop
from sie_sidecar.process import serve

LANE = Lane("_default", "_default", "default")
SECRET = "a text that no list may show"


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def broker(nats: NatsServer) -> AsyncIterator[Broker]:
    """A gateway's connection, with the streams and the consumer that a gateway makes."""
    broker = await connect(nats.url, name="gateway")
    await broker.ensure_stream(topology.dead_letter_stream("_default", replicas=1))
    work = topology.work_stream("_default", storage="file", replicas=1, max_bytes=-1, max_age_s=0.0)
    await broker.ensure_stream(work)
    await broker.ensure_consumer(topology.work_consumer(LANE, "interactive", ENTRY.id, 10.0))
    yield broker
    await broker.close()


@pytest.fixture
async def adapter(tmp_path: Path) -> AsyncIterator[DeadlyAdapter]:
    adapter = DeadlyAdapter(tmp_path / "a.sock", SECRET)
    await adapter.start()
    yield adapter
    await adapter.stop()


@pytest.fixture
async def sidecar(nats: NatsServer, broker: Broker, adapter: DeadlyAdapter) -> AsyncIterator[None]:
    settings = settings_of(
        SIE_IPC_SOCKET_PATH=adapter.path, SIE_WORKER_METRICS_PORT=str(free_port()), SIE_WORKER_ID="w0"
    )
    stop, own = Stop(), await connect(nats.url, name="sidecar")
    task = asyncio.create_task(serve(settings, own, Source(ENTRY), stop, host="127.0.0.1"))
    yield
    stop.request()
    assert await asyncio.wait_for(task, 30) == 0
    await own.close()


async def answered(broker: Broker, *texts: str) -> None:
    """Send work and wait for its result."""
    result: asyncio.Future[WorkResult] = asyncio.get_running_loop().create_future()

    async def take(message: CoreMessage) -> None:
        await broker.send(message.reply, messages.encode(Confirmation("taken")))
        if not result.done():
            result.set_result(messages.decode_result(message.data))

    await broker.subscribe("inbox", take)
    item = WorkItem(
        "r", 3, ENTRY.id, ENTRY.revision, "encode", tuple(map(Input, texts)), RunOptions(), "inbox", 60_000, first=12
    )
    await broker.publish(topology.work_subject(LANE, "interactive", ENTRY.id), messages.encode(item), "r.3")
    await asyncio.wait_for(result, 30)


async def sie(nats: NatsServer, *arguments: str, status: int = 0) -> str:
    done = await asyncio.to_thread(CliRunner().invoke, main, ["dlq", "--nats-url", nats.url, *arguments])
    assert done.exit_code == status, done.output
    return done.output


@pytest.mark.usefixtures("sidecar")
async def test_letters_are_replayed_and_purged_from_the_command_line(
    nats: NatsServer, broker: Broker, adapter: DeadlyAdapter
) -> None:
    assert "no dead letters" in await sie(nats, "list")
    await answered(broker, SECRET)
    letters = Letters(broker, "_default")
    name = await asyncio.wait_for(first_of(letters), 30)
    assert "there is no dead letter zzz" in await sie(nats, "show", "zzz", status=1)
    adapter.deadly.clear()
    assert "1 of 1 inputs have a value, the dead letter is removed" in await sie(nats, "replay", name[:6])
    assert "no dead letters" in await sie(nats, "list")
    await broker.publish(topology.work_subject(LANE, "interactive", ENTRY.id), b"\xc1", "broken")
    name = await asyncio.wait_for(first_of(letters), 30)
    await broker.publish(topology.dead_letter_subject("_default"), b"\xc1", "of a version to come")
    listed = await sie(nats, "list")
    assert name in listed
    assert "letter 3 cannot be read by this version" in listed
    assert "its message cannot be decoded" in await sie(nats, "replay", name, status=1)
    assert "Aborted" in await sie(nats, "purge", status=1)
    for command in (("purge", "--yes", ""), ("replay", ""), ("show", "")):
        assert "the ID is empty" in await sie(nats, *command, status=1)
    assert "1 removed" in await sie(nats, "purge", "--yes")
    assert "0 removed" in await sie(nats, "purge", "--yes")


@pytest.mark.parametrize("at_s", [1e300, float("nan")])
async def test_a_letter_of_another_writer_hides_no_other_and_does_not_control_the_terminal(
    nats: NatsServer, broker: Broker, at_s: float
) -> None:
    escape = "\x1b[2J\x9b2J"
    item = WorkItem("r" + escape, 3, escape, escape, "encode", (Input(escape),), RunOptions(), "inbox", 60_000)
    error = ErrorInfo(escape, escape, escape)
    letter = DeadLetter("a1", escape, messages.encode(item), error, (escape,), 1, 1, at_s)
    await broker.publish(topology.dead_letter_subject("_default"), messages.encode(letter), "a1")
    letter = msgspec.structs.replace(letter, id="b2", at_s=1.0, item=escape.encode())
    await broker.publish(topology.dead_letter_subject("_default"), messages.encode(letter), "b2")
    listed = await sie(nats, "list")
    assert "a1  after the year 9999" in listed
    assert "b2  1970-01-01 00:00:01" in listed
    for name in ("a1", "b2"):
        shown = await sie(nats, "show", name, "--with-input")
        assert all(letter.isprintable() or letter == "\n" for letter in listed + shown)


async def first_of(letters: Letters) -> str:
    """Return the id of the first letter, once there is one."""
    while True:
        async for entry in letters.all():
            return entry.letter.id
