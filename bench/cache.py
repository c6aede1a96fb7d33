"""Gain and cost of the gateway's response cache: equal clusters with and without the cache are measured alternately. On
the simulated device, a batch takes a fixed time and a time for each token, so other load of the machine does not change
the ratio of the two clusters' rates.

1. Zipf traffic with 37 % repeats, 64 clients, one text a request: texts a second, and the share of inputs that no
   adapter computed, compared with the share of repeats.
2. Traffic without repeats, which shows the cost of the cache.
3. One client that sends one cached text.
4. Many distinct inputs, an adapter that takes no time: memory of the gateway, compared with the cache's limit.
5. `--answers 10000000`: that many distinct inputs, cached by calls in this process: its memory, the number of cached
   answers, and the bytes that the cache counts.
6. `--policies`: hit shares of LRU, segmented LRU and W-TinyLFU (if the package theine is installed) on Zipf traffic.

    python bench/cache.py [--rounds 5 --requests 2000 --distinct 1000000] [--answers N | --policies] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import msgspec
import numpy as np
import psutil
import uvloop
from client import connect, percentile, request
from report import Report, machine, parser_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from cluster import until
from stack import Device, Plan, Stack
from words import texts_of

from sie_cache.memory import AnswerMemory, AnswerSpace
from sie_cache.values import pack
from sie_contracts.wire.messages import ArraySlice, Ok, RunOptions, WorkResult
from sie_gateway.inference.answers import digests_of, space_of
from sie_gateway.inference.body import RequestItem

REPEATS = 0.37
PATH = "/v1/encode/toy/one"
DEVICE = Device(batch_ms=5, token_us=15, width=384)
EXPONENT = 1.0
CLIENTS = 64
CACHE_BYTES = 256 << 20
GOALS = "goals: rate relative to no cache 1.4 with repeats, 0.98 without repeats; at most 1.5 ms for a hit"


def zipf(count: int, universe: int, seed: int) -> list[int]:
    """Return the Zipf-distributed ranks of `count` requests for `universe` texts."""
    weights = 1.0 / np.arange(1, universe + 1) ** EXPONENT
    drawn = np.random.default_rng(seed).choice(universe, count, p=weights / weights.sum())
    return [int(rank) for rank in drawn]


def repeats_of(ranks: Sequence[int]) -> float:
    return 1 - len(set(ranks)) / len(ranks)


def traffic(count: int, seed: int) -> list[int]:
    """Return `count` ranks, of which about the share REPEATS are repeats. A bisection finds the number of texts to draw
    from, because more texts give fewer repeats.
    """
    low, high = count // 8, count * 4096
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if repeats_of(zipf(count, middle, seed)) > REPEATS else (low, middle)
    return zipf(count, high, seed)


def bodies(texts: Sequence[str]) -> list[bytes]:
    return [
        request(PATH, json.dumps({"items": [text]}).encode(), "application/json", accept="application/msgpack")
        for text in texts
    ]


async def play(port: int, requests: Sequence[bytes], clients: int) -> tuple[float, list[float]]:
    """Send each request once. Return requests per second, and the latencies in milliseconds."""
    source, latencies = iter(requests), list[float]()

    async def client() -> None:
        connection = await connect("127.0.0.1", port)
        for message in source:
            began_s = time.perf_counter()
            status, body = await connection.send(message)
            latencies.append(1000 * (time.perf_counter() - began_s))
            if status != 200:
                raise RuntimeError(f"a reply has status {status}, not 200: {body[:200]!r}")
        connection.close()

    began_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return len(requests) / (time.perf_counter() - began_s), latencies


def port_of(stack: Stack) -> int:
    return int(stack.urls[0].rpartition(":")[2])


def is_warm(stack: Stack, statuses: Sequence[str]) -> bool:
    answer = httpx.post(f"{stack.urls[0]}{PATH}", json={"items": ["warm"]}, timeout=60, trust_env=False)
    return answer.status_code == 200 and answer.headers.get("x-sie-cache-status", "") in statuses


def counted(stack: Stack) -> dict[str, float]:
    """Return result of a lookup in the cache (such as `hit`) -> number of inputs, from the metrics of the gateway."""
    text = httpx.get(f"{stack.metrics_urls[0]}/metrics", timeout=30, trust_env=False).text
    lines = [line.split() for line in text.splitlines() if line.startswith("sie_gateway_cache_inputs_total{")]
    return {name.partition('result="')[2].partition('"')[0]: float(value) for name, value in lines}


def compare(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stacks:
        plain, cached = (
            stacks.enter_context(Stack(Path(folder, name), Plan(workers=(DEVICE,), environ=environ)))
            for name, environ in (("plain", {}), ("cached", {"SIE_CACHE_BYTES": str(CACHE_BYTES)}))
        )
        until(lambda: is_warm(plain, ("",)), 60, "an answer")
        until(lambda: is_warm(cached, ("hit", "miss")), 60, "a heartbeat with the model")
        rates: dict[tuple[str, bool], list[float]] = {}
        shares, expected = [], []
        number = itertools.count()
        for turn in range(options.rounds + 1):
            ranks = traffic(options.requests, turn)
            for kind, order in (("repeats", ranks), ("no repeats", list(range(options.requests)))):
                fresh = texts_of("mix", len(set(order)), turn)
                own = dict(zip(dict.fromkeys(order), fresh, strict=False))
                mark = next(number)  # makes the texts differ from those of earlier rounds
                sent = bodies([f"{mark} {own[rank]}" for rank in order])
                before = counted(cached)
                both = {}
                for is_cached in (turn % 2 == 0, turn % 2 == 1):
                    both[is_cached], _ = uvloop.run(play(port_of((plain, cached)[is_cached]), sent, CLIENTS))
                after = counted(cached)
                if turn:  # the first round warms up
                    for is_cached, rate in both.items():
                        rates.setdefault((kind, is_cached), []).append(rate)
                    if kind == "repeats":
                        computed = after["miss"] - before["miss"]
                        shares.append(1 - computed / len(order))
                        expected.append(repeats_of(ranks))
        say(f"| {CLIENTS} clients, one text a request | without, texts/s | with | ratio |\n|---|--:|--:|--:|")
        for kind in ("repeats", "no repeats"):
            without, with_it = rates[kind, False], rates[kind, True]
            ratio = statistics.median(b / a for a, b in zip(without, with_it, strict=True))
            name = f"Zipf, {100 * statistics.mean(expected):.1f} % repeats" if kind == "repeats" else "no repeats"
            say(f"| {name} | {statistics.median(without):.0f} | {statistics.median(with_it):.0f} | {ratio:.3f} |")
        say(
            f"\nShare of inputs that were not computed: {100 * statistics.mean(shares):.2f} %; share of repeats: "
            f"{100 * statistics.mean(expected):.2f} %."
        )
        (message,) = bodies(["a text that is cached"])
        uvloop.run(play(port_of(cached), [message] * 200, 1))
        _, hits = uvloop.run(play(port_of(cached), [message] * 3000, 1))
        _, misses = uvloop.run(play(port_of(plain), [message] * 300, 1))
        p50, p99 = (percentile(hits, share) for share in (0.5, 0.99))
        without_p50, without_p99 = (percentile(misses, share) for share in (0.5, 0.99))
        say(
            f"\nOne client, one short text: a hit takes {p50:.2f} ms (p99 {p99:.2f}), the same text without the cache "
            f"{without_p50:.2f} ms (p99 {without_p99:.2f})."
        )


def memory(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Report the memory of a gateway that caches distinct short inputs, 64 in a request. The vectors have width 384."""
    limit, size = 64 << 20, 64
    environ = {"SIE_CACHE_BYTES": str(limit)}
    with (
        tempfile.TemporaryDirectory() as folder,
        Stack(Path(folder), Plan(models=("toy/one",), workers=(Device(width=384),), environ=environ)) as stack,
    ):
        gateway = stack.gateways[0]

        def messages(start: int, stop: int) -> list[bytes]:
            return [
                request(
                    PATH,
                    json.dumps({"items": [f"{number:x}" for number in range(at, at + size)]}).encode(),
                    "application/json",
                    accept="application/msgpack",
                )
                for at in range(start, stop, size)
            ]

        until(lambda: is_warm(stack, ("hit", "miss")), 60, "a heartbeat with the model")
        say("\n| distinct inputs | RSS of the gateway, MiB |\n|--:|--:|")
        done, sizes = 0, []
        for total in (0, options.distinct // 8, options.distinct // 4, options.distinct // 2, options.distinct):
            total -= total % size
            if total > done:
                uvloop.run(play(port_of(stack), messages(done, total), 4))
                done = total
            sizes.append(gateway.rss_bytes() >> 20)
            say(f"| {done:,} | {sizes[-1]} |")
        say(f"\nThe cache had {limit >> 20} MiB.")


def answers(count: int, say: Callable[[str], None]) -> None:
    """Cache the answers to `count` distinct inputs. One input in ten has its own options, to test the limit of spaces
    (groups of answers with equal model and options). One in ten is read again, to test the limit of protected answers.
    """
    limit, width, run = 64 << 20, 384, RunOptions(outputs=("dense",))
    cache = AnswerMemory(limit, 3600.0)
    outcome = Ok({"dense": ArraySlice("<f4", (width,), 0)}, 7)
    result = WorkResult("r", 0, "w", (outcome,), bytes(range(256)) * (4 * width // 256))
    shared = AnswerSpace(space_of("", "0123456789abcdef", "encode", run), "org/model", "")
    process, steps = psutil.Process(), {0, *(count * step // 10 for step in range(1, 11))}
    say("| distinct inputs | answers | bytes by the cache, MiB | RSS, MiB | seconds |\n|--:|--:|--:|--:|--:|")
    began_s = time.perf_counter()
    for number in range(count + 1):
        if number in steps:
            rss = process.memory_info().rss >> 20
            seconds = time.perf_counter() - began_s
            say(f"| {number:,} | {len(cache):,} | {cache.held_bytes / 2**20:.1f} | {rss} | {seconds:.0f} |")
        space = shared
        if number % 10 == 0:
            own = msgspec.structs.replace(run, prefix=str(number))
            space = shared._replace(name=space_of("", "0123456789abcdef", "encode", own))
        (digest,) = digests_of((RequestItem(f"input {number:x}"),))
        key = space.key(digest)
        cache.keep(space, key, pack(result, outcome))
        if number % 10 == 1 and cache.find(key) is None:
            raise RuntimeError(f"the answer to input {number} is not cached")
        if cache.held_bytes > limit:
            raise RuntimeError(f"the cache counts {cache.held_bytes} bytes, its limit is {limit}")
    say(f"\nThe cache had {limit >> 20} MiB; {cache.evictions:,} answers were removed for lack of room.")


class Lru:
    """A cache that removes the least recently used answer first."""

    def __init__(self, room: int) -> None:
        self._room, self._order = room, OrderedDict[int, None]()

    def hit(self, key: int) -> bool:
        if key in self._order:
            self._order.move_to_end(key)
            return True
        self._order[key] = None
        if len(self._order) > self._room:
            self._order.popitem(last=False)
        return False


class Segmented:
    """A segmented LRU cache. A second use moves an answer to the protected segment (four fifths of the capacity)."""

    def __init__(self, room: int) -> None:
        self._room, self._most = room, room * 4 // 5
        self._first, self._protected = OrderedDict[int, None](), OrderedDict[int, None]()

    def hit(self, key: int) -> bool:
        if key in self._protected:
            self._protected.move_to_end(key)
            return True
        is_hit = key in self._first
        if is_hit:
            del self._first[key]
            self._protected[key] = None
            if len(self._protected) > self._most:
                self._first[self._protected.popitem(last=False)[0]] = None
        else:
            self._first[key] = None
        while len(self._first) + len(self._protected) > self._room:
            self._first.popitem(last=False)
        return is_hit


class Theine:
    """A cache with the policy W-TinyLFU of the package theine."""

    def __init__(self, room: int) -> None:
        self._cache = importlib.import_module("theine").Cache(room)

    def hit(self, key: int) -> bool:
        _, is_hit = self._cache.get(key)
        if not is_hit:
            self._cache.set(key, b"")
        return bool(is_hit)


def policies(say: Callable[[str], None]) -> None:
    """Report the hit share of each cache policy, in percent of 400,000 requests."""
    kinds: dict[str, Callable[[int], Lru | Segmented | Theine]] = {"LRU": Lru, "segmented LRU": Segmented}
    try:
        importlib.import_module("theine")
        kinds["W-TinyLFU (theine)"] = Theine
    except ImportError:
        say("\ntheine is not installed.")
    count, universe = 400_000, 1_000_000
    say("\n| cached answers / distinct inputs | " + " | ".join(kinds) + " |\n|--:|" + "--:|" * len(kinds))
    for exponent in (0.8, 1.0):
        weights = 1.0 / np.arange(1, universe + 1) ** exponent
        drawn = np.random.default_rng(1).choice(universe, count, p=weights / weights.sum()).tolist()
        for share in (0.001, 0.01, 0.1):
            cells = []
            for kind in kinds.values():
                cache = kind(int(universe * share))
                cells.append(f"{100 * sum(map(cache.hit, drawn)) / count:.1f}")
            say(f"| Zipf {exponent}, {100 * share:g} % | " + " | ".join(cells) + " |")


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--requests", type=int, default=2000, help="of each measurement")
    parser.add_argument("--distinct", type=int, default=1_000_000, help="inputs of the measurement of memory")
    parser.add_argument("--answers", type=int, default=0, help="number of distinct inputs to cache in this process")
    parser.add_argument("--policies", action="store_true", help="only measure the hit shares of cache policies")
    options = parser.parse_args()
    say = Report()
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    say(
        f"# Cache of answers\n\n`python bench/cache.py`, {machine()}, Python {platform.python_version()}, load average "
        f"{load} at the start. The device takes 5 ms for a batch and 15 us for a token; {options.rounds} rounds of "
        f"{options.requests} requests; {GOALS}.\n"
    )
    if options.answers:
        answers(options.answers, say)
    elif options.policies:
        policies(say)
    else:
        compare(options, say)
        memory(options, say)
    say.save(options.out)


if __name__ == "__main__":
    main()
