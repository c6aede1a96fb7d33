"""Latency of interactive requests during bulk load, and of one API key during the load of another key, on the
fixed-cost adapter and on MiniLM. The steps for each device, in this order:

1. unloaded      one interactive client alone: p99
2. bulk alone    30 bulk clients: texts/s
3. p99           an interactive client beside the 30 bulk clients, a request each --pause-ms: p99 of at least --samples
4. one a second  the same with one interactive request a second: bulk keeps 80 % of its rate alone
5. saturated     so many interactive clients that they alone use the whole device: bulk keeps 20 % of its rate alone
6. two keys      key 1 has a backlog of --backlog texts, key 2 has one client, both interactive: p99 of key 2
7. many clients  key 1 has 400 clients with one text each, key 2 has one client, both interactive: p99 of key 2

The bound of 3, 6 and 7 is 2 x unloaded p99 + pipeline depth x the time of a full batch, because a request waits for the
batches that the adapter holds, and the pipeline depth is their number. The time of a full batch is the p99 of the
forward passes that answers report: in 3 and 6 the bulk answers of step 2, in 7 the answers to key 1.

    python bench/fairness.py [--device fixed,minilm] [--code CHECKOUT]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from client import Answer, Clients, connect, percentile, request, statuses
from cluster import MODEL as MINILM
from report import Report, parser_of
from stack import Device, Plan, Stack
from words import WORDS

TOY = "toy/one"
QUERY = "What is deep learning?"
BULK_CLIENTS, SMALL_CLIENTS = 30, 400
DEPTH = 2  # SIE_RUST_PIPELINE_DEPTH
KEYS = ("first-key", "second-key")
REQUEST_TEXTS = 2048


@dataclass(frozen=True)
class Load:
    """Load for one device. `texts`: texts of a bulk request. `words`: words of a text. `saturating`: number of clients
    whose single queries use the whole device.
    """

    model: str
    device: Device | None
    texts: int
    words: int
    saturating: int
    environ: dict[str, str]


def loads(options: argparse.Namespace) -> dict[str, Load]:
    clock = Device(batch_ms=4, token_us=20)
    fixed = Load(TOY, clock, texts=32, words=12, saturating=128, environ={"SIE_MAX_BATCH_COST": "4096"})
    return {"fixed": fixed, "minilm": Load(MINILM, None, texts=16, words=60, saturating=64, environ={})}


class Bench:
    def __init__(self, stack: Stack, load: Load, options: argparse.Namespace, say: Callable[[str], None]) -> None:
        self.load = load
        self.options = options
        self.say = say
        pieces = urlsplit(stack.urls[0])
        self.host, self.port = str(pieces.hostname), int(pieces.port or 0)
        self._rng = np.random.default_rng(7)

    def _request(
        self, texts: Sequence[str], *, priority: str = "interactive", key: str = KEYS[0], budget_ms: int = 120_000
    ) -> bytes:
        body = msgspec.msgpack.encode({"items": list(texts)})
        headers = {"authorization": f"Bearer {key}", "x_sie_priority": priority, "x_sie_timeout_ms": str(budget_ms)}
        return request(f"/v1/encode/{self.load.model}", body, **headers)

    def _bulk_requests(self) -> Iterator[bytes]:
        def text() -> str:
            return " ".join(self._rng.choice(WORDS, self.load.words))

        return itertools.cycle(
            [self._request([text() for _ in range(self.load.texts)], priority="bulk") for _ in range(32)]
        )

    def _queries(self, **options: object) -> Iterator[bytes]:
        return itertools.repeat(self._request([QUERY], **options))  # type: ignore[arg-type]

    def clients(self, requests: Iterator[bytes], count: int) -> Clients:
        return Clients(self.host, self.port, requests, count=count)

    async def samples(self, requests: Iterator[bytes], count: int, pause_s: float, limit_s: float) -> list[Answer]:
        """Run one client until it has `count` answers or the time limit passes. Return its answers."""
        answers: list[Answer] = []
        end_s = time.perf_counter() + limit_s
        connection = await connect(self.host, self.port)
        while len(answers) < count and time.perf_counter() < end_s:
            started_s = time.perf_counter()
            status, body = await connection.send(next(requests))
            answers.append(Answer(started_s, time.perf_counter(), status, body))
            await asyncio.sleep(pause_s)
        connection.close()
        return answers

    async def rate(self, clients: Clients, seconds: float) -> float:
        """Return the texts per second of bulk clients during the next `seconds`."""
        begin_s = time.perf_counter()
        await asyncio.sleep(seconds)
        end_s = time.perf_counter()
        done = sum(answer.status == 200 and begin_s <= answer.ended_s < end_s for answer in clients.answers)
        return done * self.load.texts / (end_s - begin_s)

    async def run(self) -> None:
        options, seconds = self.options, self.options.seconds
        unloaded = await self.samples(self._queries(), options.samples, 0.0, 60)
        assert all(answer.status == 200 for answer in unloaded), statuses(unloaded)
        unloaded_ms = percentile(_millis(unloaded), 0.99)
        self.say(
            f"{len(unloaded)} requests without load: p50 {percentile(_millis(unloaded), 0.5):.1f} ms, "
            f"p99 {unloaded_ms:.1f} ms."
        )

        bulk = self.clients(self._bulk_requests(), BULK_CLIENTS)
        await asyncio.sleep(3)  # until the first bulk answers have come; the rate is measured after them
        solo = await self.rate(bulk, seconds)
        batch_ms = percentile([_inference_ms(answer) for answer in bulk.answers if answer.status == 200], 0.99)
        bound_ms = 2 * unloaded_ms + DEPTH * batch_ms
        self.say(f"Bulk alone: {solo:.0f} texts/s, a batch takes {batch_ms:.0f} ms. Bound: {bound_ms:.0f} ms.\n")
        self.say("| | measured | goal | |\n|---|---|---|---|")

        answers = await self.samples(self._queries(), options.samples, options.pause_ms / 1000, options.limit)
        self.judge_p99("interactive beside 30 bulk clients", answers, bound_ms)

        each_second = asyncio.create_task(self.samples(self._queries(), 1 << 30, 1.0, seconds + 1))
        share = await self.rate(bulk, seconds) / solo
        await each_second
        self.judge("bulk with one interactive request a second", f"{share:.0%} of alone", ">= 80 %", share >= 0.8)

        crowd = self.clients(self._queries(), self.load.saturating)
        await asyncio.sleep(2)
        share = await self.rate(bulk, seconds) / solo
        self.judge("bulk beside saturating interactive", f"{share:.0%} of alone", ">= 20 %", share >= 0.2)
        failed = [answer for answer in [*await crowd.stop(), *await bulk.stop()] if answer.status != 200]
        self.judge("all answered", statuses(failed) or "yes", "yes", not failed)
        await self.keys(unloaded_ms, bound_ms)
        await self.small(unloaded_ms)

    async def small(self, unloaded_ms: float) -> None:
        """Measure the p99 latency of the second API key while many clients of the first key send one text at a time."""
        options = self.options
        crowd = self.clients(self._queries(key=KEYS[0]), SMALL_CLIENTS)
        await asyncio.sleep(3)
        answers = await self.samples(
            self._queries(key=KEYS[1]), options.samples, options.pause_ms / 1000, options.limit
        )
        served = [answer for answer in await crowd.stop() if answer.status == 200]
        batch_ms = percentile([_inference_ms(answer) for answer in served], 0.99)
        seconds = served[-1].ended_s - served[0].started_s
        self.judge_p99(
            f"a key beside {SMALL_CLIENTS} clients of another, {len(served) / seconds:.0f} texts/s",
            answers,
            2 * unloaded_ms + DEPTH * batch_ms,
        )

    async def keys(self, unloaded_ms: float, bound_ms: float) -> None:
        """Measure the p99 latency of the second API key while the first key has a backlog. Then close the backlog's
        connections.
        """
        options = self.options
        texts = [f"{QUERY} {number}" for number in range(REQUEST_TEXTS)]
        message = self._request(texts, key=KEYS[0], budget_ms=600_000)
        connections = [await connect(self.host, self.port) for _ in range(-(-options.backlog // REQUEST_TEXTS))]
        backlog = [asyncio.create_task(connection.send(message)) for connection in connections]
        await asyncio.sleep(3)  # until the backlog is in the queue
        begin_s = time.perf_counter()
        answers = await self.samples(self._queries(key=KEYS[1], budget_ms=5000), options.samples, 0.0, options.limit)
        left = sum(not task.done() for task in backlog)
        self.judge_p99(f"a key beside a backlog of {options.backlog} texts of another", answers, bound_ms)
        taken_s = time.perf_counter() - begin_s
        self.say(f"\n{left} of {len(backlog)} requests of the backlog were open after {taken_s:.0f} s.")
        for connection in connections:
            connection.close()
        await asyncio.gather(*backlog, return_exceptions=True)  # the requests fail, as their connections are closed

    def judge_p99(self, label: str, answers: Sequence[Answer], bound_ms: float) -> None:
        """Report whether the p99 latency is within the bound. An answer other than 200 counts as infinitely slow."""
        failed = [answer for answer in answers if answer.status != 200]
        p99_ms = percentile([*_millis(answers), *(float("inf") for _ in failed)], 0.99)
        enough = len(answers) >= self.options.samples
        tail = f", {statuses(failed)}" if failed else ""
        self.judge(
            label,
            f"p99 {p99_ms:.0f} ms of {len(answers)} requests{tail}",
            f"<= {bound_ms:.0f} ms",
            enough and p99_ms <= bound_ms,
        )

    def judge(self, label: str, figure: str, goal: str, met: bool) -> None:
        self.say(f"| {label} | {figure} | {goal} | {'met' if met else 'MISSED'} |")


def _millis(answers: Sequence[Answer]) -> list[float]:
    return [answer.taken_s * 1000 for answer in answers if answer.status == 200]


def _inference_ms(answer: Answer) -> float:
    return float(msgspec.msgpack.decode(answer.body)["timing"]["inference_time"])


def main() -> None:
    parser = parser_of(__doc__, seconds=15.0, has_code=True)
    parser.add_argument("--device", default="fixed,minilm", help="fixed, minilm or both")
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument(
        "--pause-ms", type=float, default=50.0, help="pause of the interactive client between its requests"
    )
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds after which the samples of a line of the report end"
    )
    parser.add_argument("--backlog", type=int, default=100_000)
    parser.add_argument("--window", type=int, help="SIE_KEY_WINDOW_TOKENS")
    options = parser.parse_args()
    say = Report()
    say(f"`python bench/fairness.py`, {os.cpu_count()} cores, {BULK_CLIENTS} bulk clients.\n")
    named_loads = loads(options)
    for name in options.device.split(","):
        load = named_loads[name]
        environ = {"SIE_AUTH_MODE": "static", "SIE_AUTH_TOKENS": ",".join(KEYS), "OMP_NUM_THREADS": "1", **load.environ}
        if options.window:
            environ["SIE_KEY_WINDOW_TOKENS"] = str(options.window)
        say(f"## {name}\n")
        plan = Plan([TOY], workers=[load.device], environ=environ, code=options.code)
        with tempfile.TemporaryDirectory() as folder, Stack(Path(folder, "stack"), plan) as stack:
            uvloop.run(Bench(stack, load, options, say).run())
        say()
    say.save(options.out)


if __name__ == "__main__":
    main()
