"""Publishers, a worker and a collector that deletes consumers at every chance, on one work stream."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from inprocess import settings_of

from sie_broker import Broker, BrokerError, Delivery
from sie_contracts.wire import messages, topology
from sie_contracts.wire.messages import Input, RunOptions, WorkItem
from sie_contracts.wire.topology import Lane
from sie_gateway.metrics import Metrics
from sie_gateway.streams.publish import WorkConsumers, WorkQueue
from sie_runtime.process import Stop

LANE = Lane("_default", "cpu", "default")
MODELS = [f"toy/{number}" for number in range(400)]  # so many that no later publish of a model hides a lost message
BUDGET_S = 60.0


def item(model: str, request: str) -> WorkItem:
    return WorkItem(
        request=request,
        chunk=0,
        model=model,
        revision="1",
        operation="encode",
        inputs=(Input("x"),),
        options=RunOptions(),
        reply="none",
        budget_ms=int(BUDGET_S * 1000),
    )


def work_queue(broker: Broker, **environ: str) -> WorkQueue:
    return WorkQueue(broker, settings_of(**environ), Metrics(), lambda pool: None)


@dataclass
class Outcome:
    """The outcome of a race. `left`: messages that were never delivered. `longest_s`: the longest wait of a message."""

    deleted: int
    published: dict[str, float]
    received: dict[str, float]
    left: int

    @property
    def longest_s(self) -> float:
        return max(self.received[request] - sent_s for request, sent_s in self.published.items())


class _Worker:
    """A worker that takes and acks all messages of the stream."""

    def __init__(self, broker: Broker) -> None:
        self.received: dict[str, float] = {}
        self._broker = broker
        self._arrived: asyncio.Queue[Delivery] = asyncio.Queue()
        self._pulls = broker.pulls(topology.stream_name(LANE.pool), self._arrived.put_nowait)

    async def run(self) -> None:
        async def on_consumer(name: str, exists: bool) -> None:
            self._pulls.want(name, 16 if exists else 0)

        stream = topology.stream_name(LANE.pool)
        await self._broker.watch_consumers(stream, on_consumer)
        for name in await self._broker.consumers(stream):
            self._pulls.want(name, 16)
        while True:
            delivery = await self._arrived.get()
            self.received.setdefault(messages.decode_work(delivery.data).request, time.monotonic())
            with contextlib.suppress(BrokerError):
                await delivery.ack()
            if self._pulls.outstanding(delivery.consumer) < 8:
                self._pulls.want(delivery.consumer, 16)


async def race(
    connect: Callable[[str], Awaitable[Broker]],
    deletions: int,
    *,
    for_s: float = 600.0,
    publishers: int = 4,
    pause_s: float = 0.0,
) -> Outcome:
    """Publish while consumers are deleted, busy ones too, until `deletions` consumers are deleted or `for_s` has
    passed.

    The publisher and the collector are those of real gateways. The collector counts every consumer as idle at once.
    """
    queue = work_queue(await connect("publisher"))
    await queue.ensure_pool(LANE.pool)
    collector = WorkConsumers(await connect("collector"), settings_of(), idle_s=0.0)
    stream = await collector.follow(LANE.pool)
    worker, stop, published = _Worker(await connect("worker")), Stop(), dict[str, float]()

    async def publish(number: int) -> None:
        count = 0
        while not stop.requested:
            count += 1
            request = f"{number}-{count}"
            await queue.publish(
                LANE, [item(MODELS[(number + count) % len(MODELS)], request)], time.perf_counter() + BUDGET_S
            )
            published[request] = time.monotonic()
            await asyncio.sleep(pause_s)

    async def delete() -> int:
        deleted, end_s = 0, time.monotonic() + for_s
        while deleted < deletions and time.monotonic() < end_s:
            deleted += await stream.sweep(10.0)
            await asyncio.sleep(0)
        return deleted

    async with asyncio.TaskGroup() as group:
        long_lived = [
            group.create_task(worker.run()),
            group.create_task(queue.consumers.run(stop)),
            group.create_task(collector.run(Stop())),
        ]
        publishing = [group.create_task(publish(number)) for number in range(publishers)]
        deleted = await delete()
        stop.request()
        await asyncio.gather(*publishing)
        broker, left, end_s = await connect("judge"), -1, time.monotonic() + 15.0
        while left and time.monotonic() < end_s:
            await asyncio.sleep(0.05)
            left = (await broker.stream_state(topology.stream_name(LANE.pool))).messages
        for task in long_lived:
            task.cancel()
    await queue.consumers.close()
    await collector.close()
    return Outcome(deleted, published, worker.received, left)
