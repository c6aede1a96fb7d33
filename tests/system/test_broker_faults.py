"""A broker that is partitioned, slow, restarted, silent or configured too small: the cost of each fault, its log lines,
and the recovery without an operator.

The table in docs/queue.md names the test of each row.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from consumer_race import LANE, item, race, work_queue
from inprocess import until
from nats_server import NatsServer
from tcp_proxy import TcpProxy

from sie_broker import Broker, BrokerError, BrokerUnavailable, Delivery, Entry, Write
from sie_broker.nats import client, connect
from sie_contracts.errors import GatewayTimeout, QueueUnavailable
from sie_contracts.wire import topology
from sie_gateway.streams import publish as gateway_queue
from sie_gateway.streams.publish import WorkQueue
from sie_runtime.process import Stop, retry

SIE = str(Path(sys.executable).with_name("sie"))
STREAM = topology.stream_name(LANE.pool)
SPEC = topology.work_stream(LANE.pool, storage="file", replicas=1, max_bytes=-1, max_age_s=0.0)
FETCHING_AGAIN_S, WAIT_S = 5.0, 30.0
FAULTS = 10
LATE = 1  # faults after which fetching may take longer: the machine may stand still now and then


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    nats = NatsServer(tmp_path / "nats")
    await asyncio.to_thread(nats.start)
    yield nats
    await asyncio.to_thread(nats.kill)


@contextlib.asynccontextmanager
async def connections() -> AsyncIterator[list[Broker]]:
    opened: list[Broker] = []
    yield opened
    for broker in opened:
        await broker.close()


class Received:
    """Acknowledges deliveries as they come. A test waits for a delivery by its body."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self._queue: asyncio.Queue[Delivery] = asyncio.Queue()

    def put(self, delivery: Delivery) -> None:
        self._queue.put_nowait(delivery)

    async def wait_for(self, body: bytes, timeout_s: float) -> float:
        """Return the seconds until a delivery of this body came."""
        started_s = time.monotonic()
        async with asyncio.timeout(timeout_s):
            while body not in self.bodies:
                delivery = await self._queue.get()
                self.bodies.append(delivery.data)
                with contextlib.suppress(
                    BrokerUnavailable
                ):  # the message is then delivered again, and the test sees a second body
                    await delivery.ack()
        return time.monotonic() - started_s


async def publish_until_stored(broker: Broker, subject: str, body: bytes) -> None:
    """Publish as the gateway does: again under the same id until the broker answers."""
    async with asyncio.timeout(30.0):
        while True:
            try:
                await broker.publish(subject, body, body.decode(), timeout_s=1.0)
            except BrokerUnavailable:
                await asyncio.sleep(0.05)  # the pause of the gateway's retries
            else:
                return


@pytest.mark.timeout(180)
async def test_fetching_goes_on_in_five_seconds_after_restarts_and_partitions(server: NatsServer) -> None:
    """The broker is restarted, cut off, killed, paused and held back, twice each. Deliveries and the watch of a bucket
    go on each time.
    """
    received, updates = Received(), asyncio.Queue[Entry]()
    async with TcpProxy(server.port) as proxy, connections() as opened:
        worker, publisher = await connect(proxy.url, name="worker"), await connect(server.url, name="publisher")
        opened += [worker, publisher]
        queue = work_queue(publisher, SIE_ACK_WAIT_S="3")
        await queue.ensure_pool(LANE.pool)
        publisher.on_reconnect(functools.partial(_reverified, queue))
        routes = gateway_queue._routes(LANE, "interactive", "toy/a", 30.0)
        subject, spec = queue.consumers.stream(LANE.pool).route(*routes, time.perf_counter() + 900.0)
        await queue.consumers.ensure(LANE.pool, spec)
        pulls = worker.pulls(STREAM, received.put)
        watch = await (await worker.key_value("things")).watch(updates.put)
        bucket = await publisher.key_value("things")

        async def restart() -> None:
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)

        async def kill() -> None:
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)

        async def stop_and_go_on() -> None:
            server.pause()
            await asyncio.sleep(0.5)  # the length of the fault
            server.resume()

        async def cut_off() -> None:
            proxy.refuse()
            await asyncio.sleep(0.5)
            proxy.heal()

        async def hold_back() -> None:
            proxy.hold()
            await asyncio.sleep(0.5)
            proxy.release()

        faults = [restart, cut_off, kill, stop_and_go_on, hold_back]
        took_s: list[float] = []
        for number in range(FAULTS):
            fault = faults[number % len(faults)]
            pulls.want(spec.name, 4)
            await fault()
            body = b"%d" % number
            over_s = time.monotonic()
            await publish_until_stored(publisher, subject, body)
            await received.wait_for(body, WAIT_S)
            fetching_s = time.monotonic() - over_s
            async with asyncio.timeout(WAIT_S):
                while True:
                    try:
                        await bucket.write([Write("key", body)])
                        break
                    except BrokerUnavailable:
                        await asyncio.sleep(0.05)
                while (await updates.get()).value != body:
                    pass
            took_s.append(fetching_s)
        assert sorted(took_s)[-1 - LATE] < FETCHING_AGAIN_S
        assert {int(body) for body in received.bodies} == set(range(FAULTS))
        await pulls.stop()
        await watch.stop()
        await queue.consumers.close()


async def _reverified(queue: WorkQueue) -> None:
    """Verify the queue as a gateway does after each reconnect."""
    logger = logging.getLogger("test")
    await retry(
        queue.reverify,
        errors=(BrokerError,),
        stop=Stop(),
        logger=logger,
        task="verifying the queue after a reconnect",
    )


@pytest.mark.timeout(90)
async def test_a_black_holed_connection_is_noticed_in_thirty_seconds_and_left(
    server: NatsServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network swallows every byte in both directions and closes no connection. After two pings without an answer
    (here every second) the connection counts as lost, and one log line says so. Fetching goes on when the network is
    back.
    """
    assert 3 * client.PING_S < 30
    monkeypatch.setattr(client, "PING_S", 1.0)
    received = Received()
    spec = topology.work_consumer(LANE, "interactive", "toy/a", 10.0)
    async with TcpProxy(server.port) as proxy, connections() as opened:
        worker, publisher = await connect(proxy.url, name="worker"), await connect(server.url, name="publisher")
        opened += [worker, publisher]
        await publisher.ensure_stream(SPEC)
        await publisher.ensure_consumer(spec)
        worker.pulls(STREAM, received.put).want(spec.name, 4)
        await worker.flush()
        proxy.swallow()
        started_s = time.monotonic()
        await until(
            lambda: not worker.connected and "connection lost" in caplog.text, "the loss of the connection", 30.0
        )
        assert time.monotonic() - started_s > 1.0
        assert caplog.text.count("worker: connection lost") == 1
        proxy.heal()
        await publish_until_stored(publisher, spec.subject, b"after")
        await received.wait_for(b"after", WAIT_S)


@pytest.mark.timeout(60)
async def test_a_slow_broker_costs_time_and_neither_work_nor_a_second_copy(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a short delay each way, a message is stored at the first attempt. At a round trip longer than an attempt,
    it is repeated under the same id and stored at most once. At a delay longer than the budget, the publish fails with
    504. Without a delay, the next request is stored.
    """
    monkeypatch.setattr(gateway_queue, "PUBLISH_TIMEOUT_S", 0.6)
    async with TcpProxy(server.port) as proxy, connections() as opened:
        broker, judge = await connect(proxy.url, name="gateway"), await connect(server.url, name="judge")
        opened += [broker, judge]
        queue = work_queue(broker)
        await queue.ensure_pool(LANE.pool)

        async def stored() -> int:
            return (await judge.stream_state(STREAM)).messages

        proxy.delay_s = 0.1
        await queue.publish(LANE, [item("toy/a", "slow")], time.perf_counter() + 10.0)
        assert await stored() == 1

        proxy.delay_s = 0.4  # a round trip above gateway_queue.PUBLISH_TIMEOUT_S
        assert 2 * proxy.delay_s > gateway_queue.PUBLISH_TIMEOUT_S
        with pytest.raises(GatewayTimeout):
            await queue.publish(LANE, [item("toy/a", "slower")], time.perf_counter() + 1.0)
        proxy.delay_s = 0.0
        await broker.flush(WAIT_S)
        assert await stored() <= 2

        proxy.delay_s = 1.5
        started_s = time.monotonic()
        with pytest.raises(GatewayTimeout):
            await queue.publish(LANE, [item("toy/a", "late")], time.perf_counter() + 0.4)
        assert time.monotonic() - started_s < 2 * proxy.delay_s  # the broker's reply would take that long
        proxy.delay_s = 0.0
        await broker.flush(WAIT_S)
        before = await stored()
        await queue.publish(LANE, [item("toy/a", "fast")], time.perf_counter() + 10.0)
        assert await stored() == before + 1
        await queue.consumers.close()


@pytest.mark.timeout(60)
async def test_a_publish_waits_out_a_partition_and_is_stored_once(server: NatsServer) -> None:
    """A request whose budget outlasts the partition is stored when the network is back. A request whose budget ends
    earlier gets 503.
    """
    async with TcpProxy(server.port) as proxy, connections() as opened:
        broker, judge = await connect(proxy.url, name="gateway"), await connect(server.url, name="judge")
        opened += [broker, judge]
        queue = work_queue(broker)
        await queue.ensure_pool(LANE.pool)
        proxy.refuse()
        waiting = asyncio.create_task(queue.publish(LANE, [item("toy/a", "patient")], time.perf_counter() + 30.0))
        started_s = time.perf_counter()
        with pytest.raises(QueueUnavailable):
            await queue.publish(LANE, [item("toy/a", "hasty")], started_s + 1.0)
        assert time.perf_counter() - started_s < 15.0  # it does not wait as long as the other one
        proxy.heal()
        (sequence,) = await asyncio.wait_for(waiting, WAIT_S)
        assert (await judge.stream_state(STREAM)).messages == 1
        assert await judge.consumers(STREAM) == [topology.work_consumer(LANE, "interactive", "toy/a", 10.0).name]
        await queue.withdraw(LANE.pool, [sequence])
        await queue.consumers.close()


@pytest.mark.timeout(60)
async def test_a_broker_that_comes_back_with_small_messages_is_told_once_and_lived_with(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit is read again at the reconnect, and the gateway cuts requests to fit it."""
    async with connections() as opened:
        broker = await connect(server.url, name="gateway")
        opened.append(broker)
        queue = work_queue(broker)
        await queue.ensure_pool(LANE.pool)
        wide = queue.limits().payload_bytes
        await asyncio.to_thread(server.stop)
        server.set_max_payload(40_000)
        await asyncio.to_thread(server.start)
        await until(lambda: broker.max_payload == 40_000, "the new limit")
        with caplog.at_level(logging.ERROR):
            await queue.reverify()
        assert queue.limits().payload_bytes < wide
        assert caplog.text.count("max_payload of 40000 bytes is too small") == 1
        await queue.publish(LANE, [item("toy/a", "small")], time.perf_counter() + 5.0)
        await queue.consumers.close()


@pytest.mark.timeout(60)
def test_a_gateway_at_a_broker_with_small_messages_ends_with_one_clear_line(tmp_path: Path) -> None:
    """The gateway ends with status 2. The line names the setting, the broker's limit and the least that is needed."""
    with NatsServer(tmp_path / "nats", max_payload=32768) as server:
        ended = subprocess.run(
            [SIE, "gateway", "--port", "0", "--gateway-metrics-port", "0", "--nats-url", server.url],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
    assert ended.returncode == 2
    (line,) = [line for line in ended.stderr.splitlines() if "max_payload" in line]
    assert "SIE_NATS_URL" in line
    assert {"32768", "65536"} <= set(re.findall(r"\d+", line))


# ---- deletions of consumers


@pytest.mark.parametrize("step", [1, 2], ids=["before its settings are read", "before it is brought up to date"])
async def test_a_consumer_that_is_deleted_while_it_is_ensured_is_made_anew(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The broker answers 10014 (not found) to the read of the settings, and 10149 (does not exist) to the update."""
    async with connections() as opened:
        opened.append(broker := await connect(server.url, name="gateway"))
        opened.append(collector := await connect(server.url, name="collector"))
        await work_queue(broker).ensure_pool(LANE.pool)
        spec = topology.work_consumer(LANE, "interactive", "toy/a", 10.0)
        await collector.ensure_consumer(dataclasses.replace(spec, version=spec.version - 1))
        verbs, api = list[str](), broker.api

        async def raced(verb: str, body: object, kind: type[Any]) -> Any:
            if len(verbs) == step:
                assert await collector.delete_consumer(spec.stream, spec.name)
            verbs.append(verb.split(".")[1])
            return await api(verb, body, kind)

        monkeypatch.setattr(broker, "api", raced)
        await broker.ensure_consumer(spec)

        assert verbs == [*["CREATE", "INFO", "CREATE"][: step + 1], "CREATE"]
        assert await collector.consumers(spec.stream) == [spec.name]


async def test_no_work_is_orphaned_by_deletions_that_race_publishes(server: NatsServer) -> None:
    """The race of test_consumers.py runs at a real broker for three seconds."""
    async with connections() as opened:

        async def open_(name: str) -> Broker:
            opened.append(await connect(server.url, name=name))
            return opened[-1]

        outcome = await race(open_, 10_000, for_s=3.0, pause_s=0.002)
    assert outcome.left == 0
    assert set(outcome.published) <= set(outcome.received)
    assert outcome.deleted > 30
    assert outcome.longest_s < 15.0
