"""Processor time of the broker and of SIE's broker client for one request: publish, pull, confirmed publication of the
result, ack.

    python bench/broker.py [--messages 20000] [--consumers 1 50 200] [--credit 1 16]

One process publishes requests and receives results as a gateway does, with 64 requests in flight. Another process pulls
requests and publishes results as a sidecar does. Each consumer has a fixed credit (number of messages that the broker
may send), which the sidecar renews when half of it is used. The broker is a new nats-server with file storage and
sync_interval 100ms. No process computes vectors, so all processor time is that of the queue.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from nats_server import NatsServer

from sie_broker import CoreMessage, Delivery
from sie_broker.nats import connect
from sie_contracts.wire import topology
from sie_contracts.wire.topology import Lane

LANE = Lane("_default", "cpu", "default")
BODY = bytes(300)
IN_FLIGHT = 64


async def _serve(url: str, credit: int) -> None:
    broker = await connect(url, name="worker")
    answering: set[asyncio.Task[None]] = set()
    stream = topology.stream_name(LANE.pool)

    def on_delivery(delivery: Delivery) -> None:
        task = asyncio.get_running_loop().create_task(answer(delivery))
        answering.add(task)
        task.add_done_callback(answering.discard)
        if pulls.outstanding(delivery.consumer) <= credit // 2:
            pulls.want(delivery.consumer, credit)

    async def answer(delivery: Delivery) -> None:
        await broker.request("bench.inbox", delivery.data, 10.0)
        await delivery.ack()

    async def on_consumer(name: str, exists: bool) -> None:
        pulls.want(name, credit if exists else 0)

    pulls = broker.pulls(stream, on_delivery)
    await broker.watch_consumers(stream, on_consumer)
    for name in await broker.consumers(stream):
        await on_consumer(name, True)
    await asyncio.Event().wait()


def worker(url: str, credit: int) -> None:
    import uvloop

    uvloop.run(_serve(url, credit))


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def measure(
    server: NatsServer, consumers: int, messages: int, worker_process: psutil.Process
) -> dict[str, float]:
    broker = await connect(server.url, name="gateway")
    waiting: dict[bytes, asyncio.Future[None]] = {}

    async def on_result(message: CoreMessage) -> None:
        waiting.pop(message.data[:8]).set_result(None)
        await broker.send(message.reply, b"taken")

    subscription = await broker.subscribe("bench.inbox", on_result)
    subjects = []
    for number in range(consumers):
        spec = topology.work_consumer(LANE, "interactive", f"toy/{number}", 30.0)
        await broker.ensure_consumer(spec)
        subjects.append(spec.subject)
    await asyncio.sleep(0.5)
    assert server._process is not None
    processes = {
        "broker": psutil.Process(server._process.pid),
        "gateway side": psutil.Process(),
        "worker side": worker_process,
    }
    count = 0

    async def client() -> None:
        nonlocal count
        while count < messages:
            count += 1
            key = b"%08d" % count
            done = waiting[key] = asyncio.get_running_loop().create_future()
            await broker.publish(subjects[count % consumers], key + BODY, f"{consumers}-{count}")
            await done

    before, started_s = {name: cpu_s(process) for name, process in processes.items()}, time.monotonic()
    await asyncio.gather(*(client() for _ in range(IN_FLIGHT)))
    wall_s = time.monotonic() - started_s
    cpu_us = {name: (cpu_s(process) - before[name]) / messages * 1e6 for name, process in processes.items()}
    started_s, idle = time.monotonic(), {name: cpu_s(process) for name, process in processes.items()}
    await asyncio.sleep(8.0)
    idle_s = time.monotonic() - started_s
    cpu_us |= {
        f"{name} idle, % of a core": (cpu_s(process) - idle[name]) / idle_s * 100 for name, process in processes.items()
    }
    await subscription.stop()
    await broker.close()
    return {"a second": messages / wall_s, **cpu_us}


async def run(consumers: list[int], credits: list[int], messages: int, report: Callable[[str], None]) -> None:
    for number, credit in itertools.product(consumers, credits):
        with tempfile.TemporaryDirectory() as folder, NatsServer(Path(folder)) as server:
            broker = await connect(server.url, name="setup")
            spec = topology.work_stream(LANE.pool, storage="file", replicas=1, max_bytes=1 << 30, max_age_s=720.0)
            await broker.ensure_stream(spec)
            await broker.close()
            process = multiprocessing.get_context("spawn").Process(target=worker, args=(server.url, credit))
            process.start()
            try:
                cpu_us = await measure(server, number, messages, psutil.Process(process.pid))
            finally:
                process.terminate()
                process.join()
        report(
            f"{number:>4} consumers, credit {credit:>2}: "
            + ", ".join(f"{name} {value:,.1f}" for name, value in cpu_us.items())
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--consumers", type=int, nargs="+", default=[1, 50, 200])
    parser.add_argument("--credit", type=int, nargs="+", default=[1, 16])
    arguments = parser.parse_args()
    import uvloop

    uvloop.run(run(arguments.consumers, arguments.credit, arguments.messages, lambda line: print(line, flush=True)))
