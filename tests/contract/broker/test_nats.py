"""Promises that only the broker over NATS makes."""

from __future__ import annotations

import asyncio
import logging
import time
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from broker_harness import STREAM, WAIT_S, Box, NatsHarness, consumer_of, publish, subject_of
from inprocess import until
from nats_server import free_port
from selection import long_but
from tcp_proxy import TcpProxy

from sie_broker import BrokerUnavailable, Delivery, Entry, PayloadTooBig, Write
from sie_broker.nats import NatsDelivery, connect, keyvalue
from sie_broker.nats.client import WORK_EXPIRES_S, NatsPulls
from sie_broker.nats.keyvalue import NatsKeyValue


async def connections(harness: NatsHarness) -> int:
    """Return the number of connections that the server has ever accepted."""

    def read() -> int:
        with urllib.request.urlopen(f"{harness.server.monitor_url}/varz", timeout=5) as answer:
            return int(msgspec.json.decode(answer.read())["total_connections"])

    return await asyncio.to_thread(read)


async def test_a_reachable_broker_is_required_to_connect(caplog: pytest.LogCaptureFixture) -> None:
    """The attempt fails within the time-out, and no log and no error has the credentials of the URL. One line says that
    attempts go on. It is no warning, because a broker may start later than its clients.
    """
    with caplog.at_level(logging.DEBUG), pytest.raises(BrokerUnavailable) as refusal:
        await connect(f"nats://user:canary@127.0.0.1:{free_port()}", name="test", timeout_s=0.5)
    assert "canary" not in caplog.text + str(refusal.value)
    (line,) = [record for record in caplog.records if "further attempts follow" in record.getMessage()]
    assert (line.levelname, line.name) == ("INFO", "sie.broker")
    assert line.getMessage().startswith("test: connecting to the broker failed")
    assert "for good" not in caplog.text  # the caller tries again
    with pytest.raises(ValueError, match="port") as malformed:
        await connect("nats://user:canary@host:port", name="test")
    assert "canary" not in str(malformed.value)


async def test_credentials_of_the_url_are_used(
    nats: Callable[..., Awaitable[NatsHarness]], caplog: pytest.LogCaptureFixture
) -> None:
    """The password is percent-encoded, as in any URL. The error after a refusal names the authorization."""
    with caplog.at_level(logging.DEBUG):
        server = (await nats(extra='authorization { users: [{user: "gateway", password: "p@ss:canary"}] }')).server
        address = server.url.removeprefix("nats://")
        broker = await connect(f"nats://gateway:p%40ss%3Acanary@{address}", name="test")
        await broker.flush(WAIT_S)
        await broker.close()
        with pytest.raises(BrokerUnavailable, match=r"(?i)authorization"):
            await connect(f"nats://gateway:canary-wrong@{address}", name="test", timeout_s=1.4)
    assert "canary" not in caplog.text


async def test_closing_does_not_wait_for_a_silent_broker(nats: Callable[..., Awaitable[NatsHarness]]) -> None:
    """Closing ends although the buffer holds more than the socket takes and the server reads nothing."""
    harness = await nats()
    broker = await harness.connect()
    harness.server.pause()
    sending = [asyncio.create_task(broker.send("big", bytes(1 << 19))) for _ in range(40)]
    async with asyncio.timeout(WAIT_S):
        await broker.close()
    await asyncio.gather(*sending, return_exceptions=True)
    assert not broker.connected


async def test_a_limit_of_the_broker_is_read_and_the_connection_kept(
    nats: Callable[..., Awaitable[NatsHarness]],
) -> None:
    """The broker takes 64 KiB per message, headers included. A refused message opens no new connection."""
    harness = await nats(max_payload=65536)
    broker = await harness.connect()
    assert broker.max_payload == 65536
    await broker.ensure_stream(STREAM)
    before = await connections(harness)
    for size in (65536, 65530):
        with pytest.raises(PayloadTooBig):
            await broker.publish(subject_of("a"), bytes(size), "id")
    await broker.publish(subject_of("a"), bytes(65400), "id")
    assert await connections(harness) == before


async def test_a_broker_that_falls_silent_is_left_and_found_again(
    nats: Callable[..., Awaitable[NatsHarness]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stops answering but keeps its connections open, and the client sends more than the socket takes. After
    two pings without an answer the connection counts as lost. When the server goes on, a message that it hands to a
    pull of the lost connection is delivered again after the ack wait.
    """
    monkeypatch.setattr("sie_broker.nats.client.PING_S", 0.5)
    spec = consumer_of("a", ack_wait_s=1.0)
    box: Box[Delivery] = Box()
    harness = await nats()
    broker = await harness.connect()
    await broker.ensure_stream(STREAM)
    await broker.ensure_consumer(spec)
    broker.pulls(STREAM.name, box.put).want(spec.name, 1)
    await broker.flush(WAIT_S)
    harness.server.pause()
    sending = (broker.publish(subject_of("b"), bytes(1 << 19), str(number), timeout_s=60.0) for number in range(20))
    async with asyncio.timeout(30.0):
        failed = await asyncio.gather(*sending, return_exceptions=True)
    assert all(isinstance(error, BrokerUnavailable) for error in failed)
    assert not broker.connected

    harness.server.resume()
    await broker.flush(WAIT_S)
    await publish(broker, "a", 1)
    await box.fill(1)


async def test_a_watch_whose_reader_brings_nothing_looks_for_itself(
    nats: Callable[..., Awaitable[NatsHarness]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subscription that silently ended brings no more messages. The watch compares revisions and reads again."""
    monkeypatch.setattr(keyvalue, "_WATCH_CHECK_S", 0.5)
    harness = await nats()
    broker = await harness.connect()
    bucket = await broker.key_value("things")
    box: Box[Entry] = Box()
    watch = await bucket.watch(box.take)
    await bucket.write([Write("a", b"1")])
    await box.fill(1)
    await watch._pulls._subscription.unsubscribe()  # type: ignore[attr-defined]
    await bucket.write([Write("a", b"2")])
    assert (await box.fill(2, 6.0))[1].value == b"2"
    assert "missed the entries after revision 1" in caplog.text
    await watch.stop()


def test_facts_of_a_delivery_are_read_from_both_forms_of_its_ack_subject() -> None:
    class Message:
        data, subject, headers = b"x", "sie.work.a", None

        def __init__(self, reply: str) -> None:
            self.reply = reply

    for reply in (
        "$JS.ACK.WORK_p.name.3.17.21.1700000000500000000.9",
        "$JS.ACK.domain.hash.WORK_p.name.3.17.21.1700000000500000000.9",
        "$JS.ACK.domain.hash.WORK_p.name.3.17.21.1700000000500000000.9.random",
    ):
        delivery = NatsDelivery(None, Message(reply))  # type: ignore[arg-type]
        assert (delivery.consumer, delivery.delivered, delivery.sequence, delivery.pending) == ("name", 3, 17, 9)
        assert delivery.sent_s == 1700000000.5
    with pytest.raises(ValueError, match="ack subject"):
        NatsDelivery(None, Message("_INBOX.x"))  # type: ignore[arg-type]


# larger messages are fewer, and of them a pull asks for less
@pytest.mark.parametrize("max_payload", long_but([1 << 20, 8 << 20], [8 << 20]), ids=["1MiB", "8MiB"])
async def test_no_reader_asks_for_more_than_a_connection_may_hold(
    nats: Callable[..., Awaitable[NatsHarness]], max_payload: int
) -> None:
    """Four readers and a watch of a bucket of 160 MiB share one connection, which then pulls a queue of 160 MiB. A
    server closes a connection for which it holds 64 MiB of unsent data, and this connection stays open.
    """
    harness = await nats(max_payload=max_payload)
    writer, reader = await harness.connect("writer"), await harness.connect("reader")
    value = bytes(max_payload - 4096)
    names = [f"k{number}" for number in range((160 << 20) // max_payload)]
    bucket = await writer.key_value("large")
    for name in names:
        await bucket.write([Write(name, value)])
    spec = consumer_of("a")
    await writer.ensure_stream(STREAM)
    await writer.ensure_consumer(spec)
    for name in names:
        await writer.publish(subject_of("a"), value, name)
    before = await connections(harness)

    opened = await reader.key_value("large")
    keys: Box[str] = Box()

    async def see(entry: Entry) -> None:
        keys.put(entry.key)

    watch = await opened.watch(see)
    reads = await asyncio.gather(*(opened.entries() for _ in range(3)), opened.since(0))
    assert [len(entries) for entries in reads] == [len(names)] * 4
    assert await keys.fill(len(names), 30.0) == names
    await watch.stop()
    box: Box[int] = Box()
    pulls = reader.pulls(STREAM.name, lambda delivery: box.put(delivery.sequence))
    pulls.want(spec.name, len(names))
    assert await box.fill(len(names), 30.0) == list(range(1, len(names) + 1))
    await pulls.stop()
    assert await connections(harness) == before, [line for line in harness.server.log if "Slow Consumer" in line]


async def test_messages_above_the_bytes_of_a_pull_come_one_by_one(
    nats: Callable[..., Awaitable[NatsHarness]],
) -> None:
    """Entries stay readable when the message limit of the broker is lowered below their size."""
    harness = await nats(max_payload=8 << 20)
    broker = await harness.connect()
    bucket = await broker.key_value("large")
    for name, size in (("a", 10), ("b", 8_000_000), ("c", 8_000_000), ("d", 10)):
        await bucket.write([Write(name, bytes(size))])
    harness.server.set_max_payload(1 << 20)
    await harness.crash()
    await harness.restore()
    bucket = await broker.key_value("large")
    assert [entry.key for entry in await bucket.entries()] == ["a", "b", "c", "d"]
    entries: Box[Entry] = Box()
    watch = await bucket.watch(entries.take)
    assert [entry.key for entry in await entries.fill(4)] == ["a", "b", "c", "d"]
    await watch.stop()


async def test_a_read_ends_although_its_last_entry_is_purged_before_it_arrives(
    nats: Callable[..., Awaitable[NatsHarness]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry that expires during a read is missing in the same way, and the bucket is not damaged."""
    bucket = await (await (await nats()).connect("reader")).key_value("purged")
    assert isinstance(bucket, NatsKeyValue)
    await bucket.write([Write("stays.a", b"1"), Write("goes.b", b"1")])
    open_pulls, tasks = bucket._jetstream.open_pulls, list[asyncio.Task[None]]()

    def open_slow_pulls(*arguments: Any) -> NatsPulls:
        pulls = open_pulls(*arguments)
        want = pulls.want

        async def purge_first(consumer: str, credit: int) -> None:
            await bucket.purge("goes")
            want(consumer, credit)

        def want_one(consumer: str, credit: int) -> None:
            monkeypatch.setattr(pulls, "want", lambda *rest: tasks.append(asyncio.create_task(purge_first(*rest))))
            want(consumer, 1)

        monkeypatch.setattr(pulls, "want", want_one)
        return pulls

    monkeypatch.setattr(bucket._jetstream, "open_pulls", open_slow_pulls)
    entries = await asyncio.wait_for(bucket.entries(), WAIT_S)
    assert [entry.key for entry in entries] == ["stays.a"]
    assert len(tasks) == 1


async def test_a_holder_that_stopped_takes_work_until_its_pulls_expire_and_none_of_it_twice(
    nats: Callable[..., Awaitable[NatsHarness]],
) -> None:
    """Two holders have credit for all messages, and the network swallows every byte of one of them. Messages are
    published for three times as long as a pull lasts. The broker delivers some of the first to the stopped holder, and
    after the ack wait to the other one, as their second delivery. Messages after the pulls have expired reach the other
    holder at once.
    """
    harness = await nats()
    broker = await harness.connect()
    await broker.ensure_stream(STREAM)
    spec, step_s, sent = consumer_of("a", ack_wait_s=3.0), 0.02, 0
    await broker.ensure_consumer(spec)
    got: dict[int, tuple[float, int]] = {}  # by message: seconds after it was sent, and the number of the delivery
    sent_s: dict[int, float] = {}
    done: set[asyncio.Task[None]] = set()

    def take(delivery: Delivery) -> None:
        number = int(delivery.data)
        got[number] = time.monotonic() - sent_s[number], delivery.delivered
        done.add(asyncio.create_task(delivery.ack()))

    async with TcpProxy(harness.server.port) as proxy:
        stopped = await connect(proxy.url, name="stopped")
        held: Box[Delivery] = Box()
        stopped.pulls(STREAM.name, held.put).want(spec.name, 1000)
        await publish(broker, "a", 1, first=10_000)
        await held.fill(1)
        await held.items[0].ack()
        pulls = broker.pulls(STREAM.name, take)
        pulls.want(spec.name, 1000)
        await broker.flush(WAIT_S)
        proxy.swallow()
        began_s = time.monotonic()
        while time.monotonic() < began_s + 3 * WORK_EXPIRES_S:
            sent_s[sent] = time.monotonic()
            await publish(broker, "a", 1, first=sent)
            sent += 1
            await asyncio.sleep(step_s)
        await until(lambda: len(got) == sent, "every message at the other holder", 30.0)
        repeats = [number for number, (_, delivered) in got.items() if delivered > 1]
        assert repeats, "the stopped holder took some"
        assert max(sent_s[number] for number in repeats) - began_s < 2 * WORK_EXPIRES_S
        assert {delivered for _, delivered in got.values()} == {1, 2}
        at_once_s = sorted(after_s for after_s, delivered in got.values() if delivered == 1)
        assert at_once_s[len(at_once_s) * 9 // 10] < 1.5  # a machine that stood still may have delayed the others
        await asyncio.gather(*done)
        await pulls.stop()
        await stopped.close()
