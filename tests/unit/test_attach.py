"""Clients that leave, come back or stay away, over real sockets and the whole ASGI stack; and what a cancelled request
leaves behind.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_adapter import FakeAdapter, ids_of, toy_entry, vector_of
from inprocess import WINDOW_S, GatewayProcess, InProcess, inference_of, settings_of, unchanged_inference_of, until
from nats_server import NatsServer
from simulation.virtual import in_virtual_time

from sie_broker import CoreMessage
from sie_broker.memory import MemoryServer
from sie_broker.nats import connect
from sie_contracts.errors import GatewayTimeout, ModelNotFound, ShuttingDown
from sie_contracts.wire import messages, topology
from sie_contracts.wire.messages import CancelRequests, Input, RunOptions, WorkItem
from sie_gateway.inference import reattach, reply
from sie_gateway.inference.call import Call
from sie_gateway.inference.reattach import Attachments, ClientGone
from sie_gateway.metrics import Metrics
from sie_gateway.streams.publish import WorkQueue

STREAM = "WORK__default"


# the table, without HTTP


@dataclass
class Client:
    """A client as the ASGI server shows it."""

    path: str = "/v1/encode/m"
    headers: dict[str, str] = field(default_factory=dict)
    client: str = ""
    body: bytes = b"body"
    key: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def grant(self) -> SimpleNamespace:
        return SimpleNamespace(key=self.key)

    def follow(self, source: Any) -> None:
        self.labels.update(source.labels)

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


class Runs:
    """Runs of a table. Each run is a task that waits for its future in `ends`."""

    def __init__(self, **limits: float) -> None:
        self.table: Attachments = Attachments(**{"window_s": 60.0, **limits})
        self.ends: list[asyncio.Future[str]] = []

    def start(self, client: Client) -> asyncio.Task[str]:
        end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ends.append(end)

        async def run() -> str:
            task = asyncio.current_task()
            assert task is not None
            self.table.watch(task, client)
            try:
                answer = await end
            except BaseException as error:
                self.table.ended(task, error)
                raise
            self.table.ended(task, None, answer)
            return answer

        return asyncio.create_task(run())

    async def away(self, client: Client) -> asyncio.Task[str]:
        """Start a run whose client leaves. Return when the table counts it, or when it has ended."""
        count = self.table.count
        task = self.start(client)
        client.gone.set()
        await until(lambda: self.table.count == count + 1 or task.done(), "a run without a client")
        return task


async def test_the_same_request_takes_the_place_of_a_client_that_left() -> None:
    runs = Runs()
    first = await runs.away(Client(labels={"model": "m"}))
    client = Client()
    run = runs.table.find(client)
    assert run is not None
    joined = asyncio.create_task(run.join(client, 10.0))
    await until(lambda: not runs.table.count, "the place is taken")
    assert runs.table.find(Client()) is None, "nobody else may have it"
    runs.ends[0].set_result("answer")
    assert await joined == await first == "answer"
    assert client.labels == {"model": "m"}
    assert (runs.table.joined, runs.table.abandoned) == (1, 0)
    await until(lambda: not len(runs.table.tasks), "nobody is watched any more")


@pytest.mark.parametrize(
    "change",
    [
        {"path": "/v1/encode/other"},
        *(
            {"headers": {name: "x"}}
            for name in ("authorization", "content-type", "accept", "x-sie-remote", "x-sie-cache", "x-sie-of-tomorrow")
        ),
    ],
    ids=str,
)
async def test_another_path_or_header_is_another_request(change: dict[str, Any]) -> None:
    """A client gets no answer to a request with another token or for another form of reply."""
    runs = Runs()
    task = await runs.away(Client())
    assert runs.table.find(Client(**change)) is None
    assert runs.table.find(Client(body=b"ydob")) is None
    assert (
        runs.table.find(Client(headers={"x-sie-request-id": "x", "x-request-id": "x", "traceparent": "y"})) is not None
    )
    runs.ends[0].set_result("")
    await task


@pytest.mark.parametrize(("key", "is_joined"), [("", False), ("of-a-credential", True)])
async def test_a_client_without_a_credential_joins_only_from_its_own_address(key: str, is_joined: bool) -> None:
    """The address of such a client selects the target of an alias."""
    runs = Runs()
    task = await runs.away(Client(client="10.0.0.1", key=key))
    assert runs.table.find(Client(client="10.0.0.1", key=key)) is not None
    assert (runs.table.find(Client(client="10.0.0.2", key=key)) is not None) == is_joined
    runs.ends[0].set_result("")
    await task


async def test_nobody_joins_a_client_that_is_still_there() -> None:
    runs = Runs()
    task = runs.start(Client())
    await asyncio.sleep(0.05)  # longer than the time until a client is watched
    assert runs.table.find(Client()) is None
    runs.ends[0].set_result("answer")
    assert await task == "answer"


async def test_a_run_whose_client_stays_away_is_cancelled_when_the_window_ends() -> None:
    runs = Runs(window_s=0.05)
    task = await runs.away(Client())
    with pytest.raises(ClientGone):
        await task
    assert (runs.table.count, runs.table.abandoned, len(runs.table.tasks)) == (0, 1, 0)


@in_virtual_time
async def test_whoever_joined_and_leaves_begins_the_window_again() -> None:
    runs = Runs(window_s=0.2)
    first = await runs.away(Client())
    for _ in range(3):
        client = Client()
        run = runs.table.find(client)
        assert run is not None
        joined = asyncio.create_task(run.join(client, 10.0))
        await until(lambda: not runs.table.count, "the place is taken")
        await asyncio.sleep(0.15)  # most of a window
        client.gone.set()
        with pytest.raises(ClientGone):
            await joined
        assert runs.table.count == 1
    with pytest.raises(ClientGone):
        await first
    assert (runs.table.joined, runs.table.abandoned) == (3, 1)


async def test_who_joins_gets_the_error_of_the_run_and_waits_no_longer_than_its_own_budget() -> None:
    runs = Runs()
    task = await runs.away(Client())
    for budget_s, expected in ((0.02, GatewayTimeout), (10.0, ModelNotFound)):
        client = Client()
        run = runs.table.find(client)
        assert run is not None
        joined = asyncio.create_task(run.join(client, budget_s))
        await until(lambda: not runs.table.count, "the place is taken")
        if expected is ModelNotFound:
            runs.ends[0].set_exception(ModelNotFound("gone"))
        with pytest.raises(expected):
            await joined
    with pytest.raises(ModelNotFound):
        await task


async def test_a_cancelled_run_tells_who_joined_to_go_elsewhere() -> None:
    runs = Runs()
    task = await runs.away(Client())
    client = Client()
    run = runs.table.find(client)
    assert run is not None
    joined = asyncio.create_task(run.join(client, 10.0))
    await until(lambda: not runs.table.count, "the place is taken")
    task.cancel()
    with pytest.raises(ShuttingDown):
        await joined
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_without_room_a_run_ends_with_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of runs without a client is bounded, and so are the bytes of their bodies."""
    runs = Runs()
    tasks = [await runs.away(Client(body=b"%d" % number)) for number in range(reattach.MAX_AWAY)]
    with pytest.raises(ClientGone):
        await (await runs.away(Client(body=b"one more")))
    assert runs.table.count == reattach.MAX_AWAY
    runs.table.close()
    assert all(isinstance(error, ClientGone) for error in await asyncio.gather(*tasks, return_exceptions=True))
    large = Runs()
    body = bytes(reattach.MAX_AWAY_BYTES // 2 + 1)
    held = await large.away(Client(body=body))
    with pytest.raises(ClientGone):
        await (await large.away(Client(body=body)))
    large.ends[0].set_result("")
    await held
    assert large.table.count == 0


async def test_once_closed_nobody_is_waited_for() -> None:
    """A gateway that drains waits for no client: a client that comes back reaches another gateway."""
    runs = Runs()
    away = await runs.away(Client())
    runs.table.close()
    with pytest.raises(ClientGone):
        await away
    with pytest.raises(ClientGone):
        await (await runs.away(Client()))


# over sockets


class Connection:
    """A connection of its own, that can be closed at any moment."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def ask(
        cls,
        gateway: GatewayProcess,
        *texts: str,
        sent: int | None = None,
        path: str = "/v1/encode/toy/one",
        body: Any = None,
        **headers: str,
    ) -> Connection:
        """Post an encode request, or another `body`. Send only its first `sent` bytes, if `sent` is not None."""
        host, port = gateway.url.removeprefix("http://").split(":")
        connection = cls(*await asyncio.open_connection(host, int(port)))
        content = json.dumps(body or {"items": list(texts)}).encode()
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        head = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(content)}", *lines, "", ""]
        connection.writer.write("\r\n".join(head).encode() + content[:sent])
        await connection.writer.drain()
        return connection

    async def leave(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()

    async def answer(self) -> tuple[int, dict[str, Any]]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        (length,) = (line.partition(":")[2] for line in head.splitlines() if line.lower().startswith("content-length"))
        body = json.loads(await self.reader.readexactly(int(length)))
        await self.leave()
        return int(head.split()[1]), body


def queued(cluster: InProcess) -> int:
    return cluster.server.streams[STREAM].state().messages


async def cancels(cluster: InProcess) -> list[CancelRequests]:
    """Return the list of cancellations that workers receive from now on."""
    cancellations: list[CancelRequests] = []

    async def on_cancel(message: CoreMessage) -> None:
        cancellations.append(messages.decode_cancel(message.data))

    await cluster._observer.subscribe(topology.cancel_subject("_default"), on_cancel)
    return cancellations


async def held(cluster: InProcess, **environ: str) -> tuple[GatewayProcess, FakeAdapter]:
    """Start a gateway, and a worker whose device holds all batches."""
    gateway, adapter = await cluster.gateway(**environ), await cluster.adapter()
    adapter.hold_batches = True
    await cluster.sidecar(adapter)
    return gateway, adapter


async def test_work_of_a_client_that_stays_away_leaves_the_queue_and_workers_are_told(cluster: InProcess) -> None:
    """The gateway removes nothing before the window ends. Then the message and the collector are gone."""
    gateway = await cluster.gateway()
    inference, cancellations = inference_of(gateway), await cancels(cluster)
    client = await Connection.ask(gateway, "hello")
    await until(lambda: queued(cluster) == 1, "queued work")
    left_s = asyncio.get_running_loop().time()
    await client.leave()
    await until(lambda: not queued(cluster), "the queue is empty")
    assert asyncio.get_running_loop().time() - left_s >= WINDOW_S
    await until(lambda: cancellations, "a cancellation")
    assert (len(inference._runner._inbox._open), inference.slots.used) == (0, 0)
    assert len(cancellations[0].requests) == 1
    assert await gateway.metric("sie_gateway_requests_total", endpoint="encode", status="499") == 1


async def test_the_client_of_a_quick_run_is_not_watched(cluster: InProcess) -> None:
    gateway, adapter = await held(cluster)
    inference = inference_of(gateway)
    inference.watch_after_s = 60.0
    client = await Connection.ask(gateway, "hello")
    await until(lambda: inference.slots.used == 1 and queued(cluster) == 1, "queued work")
    assert len(inference.away.tasks) == 0
    adapter.hold_batches = False
    assert (await client.answer())[0] == 200


async def test_the_window_is_ten_seconds(cluster: InProcess) -> None:
    """The gateway watches a client from one second after its request. A run without a client ends after ten seconds."""
    inference = unchanged_inference_of(await cluster.gateway())
    assert (inference.watch_after_s, inference.away.window_s) == (1.0, 10.0)


async def test_a_client_that_comes_back_gets_the_work_that_was_done_meanwhile(cluster: InProcess) -> None:
    """After two clients left, the device has run one batch, and the third gets its answer."""
    gateway, adapter = await held(cluster)
    inference = inference_of(gateway, window_s=60.0)
    for _ in range(2):
        client = await Connection.ask(gateway, "hello")
        await adapter.until(lambda fake: fake.running, "a batch")
        await until(lambda: not inference.away.count, "a client is there")
        await client.leave()
        await until(lambda: inference.away.count == 1, "the gateway has noticed")
    client = await Connection.ask(gateway, "hello")
    await until(lambda: inference.away.joined == 2, "it is known again")
    adapter.let_go()
    status, body = await client.answer()
    assert status == 200
    assert body["items"][0]["dense"]["values"] == pytest.approx(vector_of(ids_of("hello")))
    assert (len(adapter.batches), inference.slots.used) == (1, 0)


async def test_a_client_that_comes_back_reads_errors_of_its_own_family(cluster: InProcess) -> None:
    """The fields of the body say which client family a `/v1/rerank` request belongs to: `truncation` is Voyage's."""
    cluster.source.put(toy_entry("toy/score", outputs={"score": 0}))
    gateway = await cluster.gateway()
    inference = inference_of(gateway, window_s=60.0)
    request_fields = {
        "path": "/v1/rerank",
        "body": {"model": "toy/score", "query": "q", "documents": ["a"], "truncation": True},
        "X_SIE_Timeout_Ms": "2400",
    }
    client = await Connection.ask(gateway, **request_fields)
    await until(lambda: queued(cluster) == 1, "queued work")
    await client.leave()
    await until(lambda: inference.away.count == 1, "the gateway has noticed")
    status, body = await (await Connection.ask(gateway, **request_fields)).answer()
    assert (status, body["code"], type(body["error"]), inference.away.joined) == (503, "PROVISIONING", str, 1)


async def test_a_request_is_in_progress_until_its_reply_is_sent(
    cluster: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that ends waits until the reply is sent."""
    gateway = await cluster.gateway()
    await cluster.sidecar()
    inference = inference_of(gateway)
    monkeypatch.setattr(reply, "body_of", lambda *_, **__: ((b" " * (1 << 20) for _ in range(64)), "application/json"))
    client = await Connection.ask(gateway, "hello")
    await client.reader.readuntil(b"\r\n\r\n")
    gateway.stop.request()
    await asyncio.sleep(0.1)  # the client reads nothing meanwhile
    assert inference.slots.used == 1
    assert len(await client.reader.read()) > 64 << 20
    assert not inference.slots.used
    await client.leave()


async def test_what_differs_runs_by_itself(cluster: InProcess) -> None:
    gateway, adapter = await held(cluster)
    inference = inference_of(gateway, window_s=60.0)
    client = await Connection.ask(gateway, "hello")
    await adapter.until(lambda fake: fake.running, "a batch")
    await client.leave()
    await until(lambda: inference.away.count == 1, "the gateway has noticed")
    variants = [await Connection.ask(gateway, "hellO"), await Connection.ask(gateway, "hello", X_SIE_Explain="1")]
    await until(lambda: inference.slots.used == 3, "three runs")
    assert inference.away.joined == 0
    adapter.let_go()
    assert [(await variant.answer())[0] for variant in variants] == [200, 200]


async def test_equal_requests_of_clients_that_are_there_are_run_each(cluster: InProcess) -> None:
    """Each request has its own message in the queue."""
    gateway, adapter = await held(cluster)
    inference_of(gateway)
    clients = [await Connection.ask(gateway, "hello") for _ in range(3)]
    stream = cluster.server.streams[STREAM]
    await until(lambda: stream.last_sequence == 3, "three messages")
    adapter.let_go()
    assert [(await client.answer())[0] for client in clients] == [200] * 3


async def test_an_upload_that_breaks_off_leaves_nothing(cluster: InProcess) -> None:
    """The connection ends after half of the body. Nothing is queued, no run waits, and the status is 499, no server
    error.
    """
    gateway = await cluster.gateway()
    inference = inference_of(gateway)
    client = await Connection.ask(gateway, "x" * 100_000, sent=50_000)
    await until(lambda: inference.slots.used == 1, "the request has begun")
    await client.leave()
    await until(lambda: not inference.slots.used, "the request has ended")
    assert (queued(cluster), cluster.server.streams[STREAM].last_sequence, inference.away.count) == (0, 0, 0)
    assert await gateway.metric("sie_gateway_requests_total", endpoint="encode", status="499") == 1


async def test_a_draining_gateway_does_not_wait_for_clients_that_left(cluster: InProcess) -> None:
    gateway = await cluster.gateway()
    inference = inference_of(gateway, window_s=60.0)
    client = await Connection.ask(gateway, "hello")
    await until(lambda: queued(cluster) == 1, "queued work")
    await client.leave()
    await until(lambda: inference.away.count == 1, "the gateway has noticed")
    began_s = asyncio.get_running_loop().time()
    assert await gateway.end() == 0
    assert asyncio.get_running_loop().time() - began_s < 20
    assert queued(cluster) == 0


async def test_a_request_cancelled_at_any_point_leaves_nothing_behind(cluster: InProcess) -> None:
    """Each request of 40 messages is cancelled one turn of the event loop later than the one before. No collector,
    permit or message is left.

    The worker keeps the messages that it leased, because its device holds all batches.
    """
    gateway, _ = await held(cluster, SIE_CHUNK_COST="64")
    inference = inference_of(gateway)
    inbox, texts = inference._runner._inbox, [f"{number:098d}" for number in range(80)]
    stored = set()
    for turns in range(150):
        client = await Connection.ask(gateway, *texts)
        while not inference.slots.used:  # noqa: ASYNC110  the next turn of the loop is meant
            await asyncio.sleep(0)
        (handler,) = (task for task in asyncio.all_tasks() if "run_asgi" in repr(task.get_coro()))
        for _ in range(turns):
            await asyncio.sleep(0)
        stored.add(queued(cluster))
        handler.cancel()
        await asyncio.wait({handler})
        await until(lambda: not queued(cluster), f"the queue is empty after a cancellation at turn {turns}")
        assert (len(inbox._open), inbox.unfinished_bytes, inference.slots.used) == (0, 0, 0)
        assert inference._admission.occupied() == (0, 0, 0)
        await client.leave()
    assert 0 in stored
    assert len(stored) > 2, "some were cancelled between two messages"


async def test_a_chunk_that_cannot_be_stored_takes_its_siblings_along(tmp_path: Path) -> None:
    """Five of eight messages of 200 kB fit into the stream; all are removed, workers are notified, the client gets one
    answer.
    """
    async with InProcess(tmp_path) as cluster:
        gateway, adapter = await held(cluster, SIE_QUEUE_MAX_BYTES=str(1 << 20), SIE_CHUNK_COST="500")
        adapter.hold_batches = False
        assert (await gateway.encode("the model is loaded")).status_code == 200
        await until(
            lambda: (beat := cluster.last_beat("w0")) and any(model.state == "loaded" for model in beat.models),
            "a loaded model",
        )
        adapter.hold_batches = True
        cancellations = await cancels(cluster)
        answer = await gateway.encode(*(f"{number}" * 200_000 for number in range(8)))
        assert (answer.status_code, answer.json()["code"]) == (503, "QUEUE_FULL")
        assert answer.json()["error"]["queue_depth"] >= 0
        await until(lambda: cancellations, "a cancellation")
        await until(lambda: queued(cluster) == 0, "the removal of its siblings")
        assert cluster.server.streams[STREAM].last_sequence >= 5
        assert len(adapter.batches) <= 2, "the warm one, and what was at the device by then"


@pytest.mark.parametrize("chunks", [1, 4])
async def test_a_publish_that_is_cancelled_before_its_answer_came_is_withdrawn_all_the_same(
    tmp_path: Path, chunks: int
) -> None:
    """A publish at a real broker is cancelled at each turn of the event loop, also when the message is stored and its
    sequence is not known yet.
    """
    lane = topology.Lane("_default", "cpu", "default")
    with NatsServer(tmp_path / "nats") as server:
        broker = await connect(server.url, name="gateway")
        queue = WorkQueue(broker, settings_of(), Metrics(), lambda pool: None)
        await queue.ensure_pool("_default")
        done = 0
        for turns in range(100):
            items = [
                WorkItem(f"r{turns}", chunk, "m", "v", "encode", (Input("a"),), RunOptions(), "nobody", 60_000)
                for chunk in range(chunks)
            ]
            publishing = asyncio.create_task(queue.publish(lane, items, time.perf_counter() + 60))
            for _ in range(turns):
                await asyncio.sleep(0)
            publishing.cancel()
            ended = (await asyncio.gather(publishing, return_exceptions=True))[0]
            if isinstance(ended, list):
                done += 1
                await queue.withdraw("_default", ended)
        assert done < 100
        await queue.close()
        state = await broker.stream_state(STREAM)
        assert (state.messages, state.last_sequence > 10) == (0, True)
        await broker.close()


async def test_a_lost_stream_is_reported_with_its_pool() -> None:
    """The open requests of the other pools go on."""
    server, pools = MemoryServer(), list[str]()
    queue = WorkQueue(server.connect("gateway"), settings_of(), Metrics(), pools.append, serves=lambda pool: True)
    await queue.ensure_pools(["_default", "batch"])
    server.lose_stream(topology.stream_name("batch"))
    await queue.ensure_pools(["_default", "batch"])
    assert pools == ["batch"]
    await queue.close()


async def test_what_lay_in_a_lost_stream_is_not_taken_from_the_one_that_took_its_place() -> None:
    """The stream of a stored message is lost. Another gateway creates it again, and its message gets the same sequence.
    Withdrawing the first message leaves the second one.
    """
    lane = topology.Lane("_default", "cpu", "default")
    server = MemoryServer()
    queues = [
        WorkQueue(server.connect(f"gateway {number}"), settings_of(), Metrics(), lambda pool: None)
        for number in range(2)
    ]
    items = [
        WorkItem(f"r{number}", 0, "m", "v", "encode", (Input("a"),), RunOptions(), "nobody", 60_000)
        for number in range(2)
    ]
    await queues[0].ensure_pool("_default")
    stored = await queues[0].publish(lane, items[:1], time.perf_counter() + 60)
    server.lose_stream(STREAM)
    await queues[1].ensure_pool("_default")
    theirs = await queues[1].publish(lane, items[1:], time.perf_counter() + 60)
    assert [receipt.sequence for receipt in stored] == [receipt.sequence for receipt in theirs]
    await queues[0].withdraw("_default", stored)
    assert server.streams[STREAM].state().messages == 1
    await queues[1].withdraw("_default", theirs)
    assert server.streams[STREAM].state().messages == 0
    for queue in queues:
        await queue.close()


# what is left of a request


def calls() -> list[Call]:
    return [candidate for candidate in gc.get_objects() if type(candidate) is Call]


async def ended_answered(cluster: InProcess, gateway: GatewayProcess, adapter: FakeAdapter) -> None:
    client = await Connection.ask(gateway, "hello")
    await adapter.until(lambda fake: fake.running, "a batch")
    await asyncio.sleep(0.05)  # longer than the time until the client is watched
    adapter.let_go()
    assert (await client.answer())[0] == 200


async def ended_refused(cluster: InProcess, gateway: GatewayProcess, adapter: FakeAdapter) -> None:
    for body in ({"items": [5]}, {"items": ["a"], "params": {"truncate": 5}}, {"items": ["a"] * 3000}):
        assert (await (await Connection.ask(gateway, body=body)).answer())[0] == 400


async def ended_late(cluster: InProcess, gateway: GatewayProcess, adapter: FakeAdapter) -> None:
    """The budget of the request ends while the device computes."""
    client = await Connection.ask(gateway, "hello", X_SIE_Timeout_Ms="300")
    assert (await client.answer())[0] == 504


async def ended_left(cluster: InProcess, gateway: GatewayProcess, adapter: FakeAdapter) -> None:
    client = await Connection.ask(gateway, "hello")
    await adapter.until(lambda fake: fake.running, "a batch")
    await client.leave()
    inference = inference_of(gateway, window_s=0.05)
    await until(lambda: not inference.slots.used, "the run is given up")


async def ended_joined(cluster: InProcess, gateway: GatewayProcess, adapter: FakeAdapter) -> None:
    """A client leaves, and another one joins its run and gets the error."""
    inference = inference_of(gateway, window_s=60.0)
    client = await Connection.ask(gateway, "hello", X_SIE_Timeout_Ms="3400")
    await adapter.until(lambda fake: fake.running, "a batch")
    await client.leave()
    await until(lambda: inference.away.count == 1, "the gateway has noticed")
    assert (await (await Connection.ask(gateway, "hello", X_SIE_Timeout_Ms="3400")).answer())[0] == 504
    assert inference.away.joined == 1


@pytest.mark.parametrize("end", [ended_answered, ended_refused, ended_late, ended_left, ended_joined])
async def test_nothing_keeps_a_request_that_has_ended(cluster: InProcess, end: Any) -> None:
    """The body goes with the last reference. The garbage collector runs so rarely that gigabytes would be held."""
    gateway, adapter = await held(cluster)
    inference_of(gateway)
    gc.collect()
    gc.disable()
    try:
        before = len(calls())
        await end(cluster, gateway, adapter)
        await until(lambda: len(calls()) == before, "no call is left")
    finally:
        gc.enable()
