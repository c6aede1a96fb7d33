"""Brokers for the conformance suite: one in memory and a real nats-server, with ways to lose and restore them."""

from __future__ import annotations

import abc
import asyncio
from typing import Generic, TypeVar

import pytest
from inprocess import until
from nats_server import NatsServer

from sie_broker import Broker, BrokerUnavailable, CoreMessage, Delivery, Pulls
from sie_broker.memory import MemoryServer
from sie_broker.nats import PULL_EXPIRES_S, NatsBroker, connect
from sie_contracts.wire.topology import ConsumerSpec, Lane, work_consumer, work_stream, work_subject

T = TypeVar("T")
LANE = Lane("_default", "cpu", "default")
STREAM = work_stream("_default", storage="file", replicas=1, max_bytes=-1, max_age_s=0.0)
WAIT_S = 30.0  # far above the expected time, so that a busy machine does not fail a test


class Box(Generic[T]):
    """A list that handlers fill, and on which tests wait."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._changed = asyncio.Event()

    def put(self, item: T) -> None:
        self.items.append(item)
        self._changed.set()

    async def take(self, item: T) -> None:
        self.put(item)

    async def fill(self, count: int, timeout_s: float = WAIT_S) -> list[T]:
        """Wait for `count` items and return the first `count`."""
        async with asyncio.timeout(timeout_s):
            while len(self.items) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.items[:count]

    async def quiet(self, for_s: float) -> None:
        """Assert that no item comes for that long."""
        count = len(self.items)
        with pytest.raises(TimeoutError):
            await self.fill(count + 1, for_s)


class Harness(abc.ABC):
    """A broker for one test, with connections to it and ways to kill and restore it."""

    pull_expires_s = 0.1

    def __init__(self) -> None:
        self._connections: list[Broker] = []

    async def connect(self, name: str = "test") -> Broker:
        broker = await self._connect(name)
        self._connections.append(broker)
        await broker.subscribe(f"silent.{len(self._connections)}", Box[CoreMessage]().take)
        return broker

    async def crash(self) -> None:
        """Kill the broker, and wait until every connection has noticed: a request in flight on it fails."""
        waiting = [broker.request(f"silent.{number}", b"", 60.0) for number, broker in enumerate(self._connections, 1)]
        noticed = asyncio.gather(*waiting, return_exceptions=True)
        await self._kill()
        async with asyncio.timeout(WAIT_S):
            assert all(isinstance(error, BrokerUnavailable) for error in await noticed)

    async def close(self) -> None:
        for broker in self._connections:
            await broker.close()

    @abc.abstractmethod
    async def _connect(self, name: str) -> Broker: ...

    @abc.abstractmethod
    async def _kill(self) -> None: ...

    @abc.abstractmethod
    async def restore(self) -> None: ...

    @abc.abstractmethod
    async def cut(self) -> None:
        """Cut all connections while the broker lives, and wait until they have noticed."""

    @abc.abstractmethod
    async def mend(self) -> None:
        """Let the connections come back."""


class MemoryHarness(Harness):
    def __init__(self) -> None:
        super().__init__()
        self.server = MemoryServer()

    async def _connect(self, name: str) -> Broker:
        return self.server.connect(name)

    async def _kill(self) -> None:
        await asyncio.sleep(0)
        self.server.disconnect()

    async def restore(self) -> None:
        self.server.reconnect()

    async def cut(self) -> None:
        await self._kill()

    async def mend(self) -> None:
        self.server.reconnect()


class NatsHarness(Harness):
    pull_expires_s = PULL_EXPIRES_S

    def __init__(self, server: NatsServer) -> None:
        super().__init__()
        self.server = server

    async def _connect(self, name: str) -> Broker:
        return await connect(self.server.url, name=name)

    async def _kill(self) -> None:
        await asyncio.to_thread(self.server.kill)

    async def restore(self) -> None:
        await asyncio.to_thread(self.server.start)

    async def cut(self) -> None:
        for broker in self._connections:
            assert isinstance(broker, NatsBroker)
            broker._transport.abort()
        # the loss of a closed transport is noticed a turn of the loop later
        live = [broker._up for broker in self._connections if isinstance(broker, NatsBroker)]
        await until(lambda: not any(up.is_set() for up in live), "the loss of the connections")

    async def mend(self) -> None:
        """Do nothing: the connections come back by themselves."""

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self.server.kill)


def consumer_of(model: str, ack_wait_s: float = 30.0) -> ConsumerSpec:
    return work_consumer(LANE, "interactive", model, ack_wait_s)


def subject_of(model: str) -> str:
    return work_subject(LANE, "interactive", model)


async def publish(broker: Broker, model: str, count: int, first: int = 0) -> list[int]:
    """Publish the bodies `0`, `1`, … and return their sequences."""
    numbers = range(first, first + count)
    return [
        (await broker.publish(subject_of(model), b"%d" % number, f"{model}-{number}")).sequence for number in numbers
    ]


async def pulling(broker: Broker, spec: ConsumerSpec, *, published: int, wanted: int) -> tuple[Box[Delivery], Pulls]:
    """Return a box, and pulls of the consumer of model a that fill it with `wanted` messages."""
    await broker.ensure_consumer(spec)
    await publish(broker, "a", published)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    pulls.want(spec.name, wanted)
    return box, pulls


async def messages_left(broker: Broker, count: int) -> None:
    """Wait until the stream has `count` messages, because acks are not answered."""
    async with asyncio.timeout(WAIT_S):
        while (await broker.stream_state(STREAM.name)).messages != count:
            await broker.flush(WAIT_S)
