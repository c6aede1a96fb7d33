"""What happens above capacity, with an adapter that takes time and no processor.

1. Capacity: as many closed-loop clients as the queue needs to be full.
2. Overload: an open loop at ten times that, each request with a budget. Goodput is answers with status 200 a second, which all lie within
   their budget; refusals are 503 answers. Resident memory of each process once a second.
3. Normal service again: one client from the moment when the load stops, until its answers take no more than twice the unloaded p99.
4. A storm: clients that send again at once, whatever they were answered.

The device: one lane, a batch of at most --cost tokens takes --batch-ms + --token-us x tokens. Processor time of generator and processes
is shown, since a starved machine measures itself.

    python bench/overload.py [--seconds 60] [--code CHECKOUT]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from client import Answer, Clients, OpenLoop, connect, percentile, request
from report import Report, add_options
from stack import Device, Plan, Stack

MODEL = "toy/one"
TEXT = "What is deep learning?"
FACTOR = 10
REFUSED_MS, RECOVERED_S = 20.0, 2.0
GOODPUT, STORM_GOODPUT = 0.9, 0.8
GROWTH = 0.02  # of resident memory over the second half: what counts as flat


def message(budget_ms: int) -> bytes:
    body = msgspec.json.encode({"items": [TEXT]})
    return request(f"/v1/encode/{MODEL}", body, "application/json", x_sie_timeout_ms=str(budget_ms))


def good(answers: Sequence[Answer], begin_s: float, end_s: float) -> float:
    """Answers with status 200 a second, by the time of their arrival."""
    return sum(each.status == 200 and begin_s <= each.ended_s < end_s for each in answers) / (end_s - begin_s)


def statuses(answers: Sequence[Answer]) -> str:
    codes = Counter(f"{each.status} {_code(each.body)}".strip() if each.status != 200 else "200" for each in answers)
    return ", ".join(f"{count} x {code}" for code, count in codes.most_common())


def _code(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["code"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:60].decode("utf-8", "replace")


class Memory:
    """Resident bytes of each role, once a second, until cancelled."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.readings: list[tuple[float, dict[str, int]]] = []

    async def run(self) -> None:
        while True:
            self.readings.append((time.perf_counter(), self._stack.rss_bytes()))
            await asyncio.sleep(1.0)

    def growth(self, role: str, begin_s: float) -> float:
        """Share by which a straight line through the readings after `begin_s` rises from its start to its end."""
        found = [(when_s, rss[role]) for when_s, rss in self.readings if when_s >= begin_s]
        slope, start = np.polyfit([when_s - found[0][0] for when_s, _ in found], [rss for _, rss in found], 1)
        return float(slope * (found[-1][0] - found[0][0]) / start)


class Bench:
    """The measurements of one cluster, in order. `say` takes a line of the report."""

    def __init__(self, stack: Stack, options: argparse.Namespace, say: Callable[[str], None]) -> None:
        self.stack = stack
        self.options = options
        self.say = say
        pieces = urlsplit(stack.urls[0])
        self.host, self.port = str(pieces.hostname), int(pieces.port or 0)
        self.met: list[tuple[str, str, str, bool]] = []

    def judge(self, what: str, found: str, goal: str, met: bool) -> None:
        self.met.append((what, found, goal, met))

    def endless(self, budget_ms: int) -> itertools.repeat[bytes]:
        return itertools.repeat(message(budget_ms))

    async def run(self) -> None:
        options = self.options
        unloaded = await self.one_by_one(100)
        unloaded_s = percentile([each.taken_s for each in unloaded], 0.99)
        capacity = await self.capacity()
        self.say(f"Unloaded: p50 {percentile([each.taken_s for each in unloaded], 0.5) * 1000:.1f} ms, p99 {unloaded_s * 1000:.1f} ms.")
        self.say(f"Capacity: {capacity:.0f} texts/s at {options.clients} clients.\n")
        await self.overload(capacity, unloaded_s)
        await self.storm(capacity)
        self.say("\n| | found | goal | |\n|---|---|---|---|")
        for what, found, goal, met in self.met:
            self.say(f"| {what} | {found} | {goal} | {'met' if met else 'MISSED'} |")

    async def one_by_one(self, count: int) -> list[Answer]:
        connection = await connect(self.host, self.port)
        found = []
        for _ in range(count):
            started_s = time.perf_counter()
            status, body = await connection.send(message(30_000))
            found.append(Answer(started_s, time.perf_counter(), status, body))
        connection.close()
        assert all(each.status == 200 for each in found), statuses(found)
        return found

    async def capacity(self) -> float:
        clients = Clients(self.host, self.port, self.endless(60_000), count=self.options.clients)
        await asyncio.sleep(2)  # the ramp
        begin_s = time.perf_counter()
        await asyncio.sleep(self.options.capacity_seconds)
        end_s = time.perf_counter()
        answers = await clients.stop()
        assert all(each.status == 200 for each in answers), statuses(answers)
        return good(answers, begin_s, end_s)

    async def overload(self, capacity: float, unloaded_s: float) -> None:
        options = self.options
        rate = FACTOR * capacity
        memory = Memory(self.stack)
        watching = asyncio.create_task(memory.run())
        cpu_before, own_before = self.stack.cpu_s(), _own_cpu_s()
        load = OpenLoop(self.host, self.port, self.endless(options.budget_ms), rate=rate, seconds=options.seconds)
        begin_s = time.perf_counter()
        await load.run()
        stopped_s = time.perf_counter()
        cpu_after, own_after = self.stack.cpu_s(), _own_cpu_s()
        recovered_s = await self.recovery(unloaded_s, stopped_s)
        answers = await load.finish()
        watching.cancel()
        refused = [each for each in answers if each.status == 503]
        found = good(answers, begin_s + 0.1 * (stopped_s - begin_s), stopped_s) / capacity
        refusal_ms = percentile([each.taken_s for each in refused], 0.99) * 1000
        wall_s = stopped_s - begin_s
        self.say(f"Overload: {rate:.0f} requests/s for {options.seconds:g} s, budget {options.budget_ms} ms: {statuses(answers)};")
        self.say(f"the generator was at most {load.late_s * 1000:.0f} ms late, {load.unsent} were not sent for want of a connection.")
        served = [each.taken_s for each in answers if each.status == 200]
        self.say(f"Answers: p50 {percentile(served, 0.5) * 1000:.0f} ms, p99 {percentile(served, 0.99) * 1000:.0f} ms.")
        cores = {role: (cpu_after[role] - cpu_before[role]) / wall_s for role in cpu_after}
        self.say(f"Cores: generator {(own_after - own_before) / wall_s:.2f}, " + ", ".join(f"{k} {v:.2f}" for k, v in cores.items()) + ".")
        rise = {role: memory.growth(role, begin_s + wall_s / 2) for role in ("gateway", "sidecar", "broker")}
        levels = ", ".join(f"{role} {memory.readings[0][1][role] >> 20} to {memory.readings[-1][1][role] >> 20} MiB" for role in rise)
        self.say(f"Resident memory: {levels}.")
        self.judge("goodput of capacity at 10x", f"{found:.0%}", f">= {GOODPUT:.0%}", found >= GOODPUT)
        in_time = bool(refused) and refusal_ms <= REFUSED_MS
        self.judge("refusals, p99", f"{refusal_ms:.1f} ms of {len(refused)}", f"<= {REFUSED_MS:g} ms", in_time)
        grown = ", ".join(f"{role} {share:+.1%}" for role, share in rise.items())
        self.judge("memory over the second half", grown, f"<= {GROWTH:+.0%}", all(share <= GROWTH for share in rise.values()))
        self.judge("normal service after the load", f"{recovered_s:.1f} s", f"<= {RECOVERED_S:g} s", recovered_s <= RECOVERED_S)

    async def recovery(self, unloaded_s: float, stopped_s: float) -> float:
        """Seconds from the end of the load to the first of five answers in a row that take at most twice the unloaded p99."""
        connection = await connect(self.host, self.port)
        row: list[float] = []
        while len(row) < 5:
            started_s = time.perf_counter()
            status, _ = await connection.send(message(30_000))
            is_normal = status == 200 and time.perf_counter() - started_s <= 2 * unloaded_s
            row = [*row, started_s] if is_normal else []
            if started_s - stopped_s > 60:
                return float("inf")
            await asyncio.sleep(0.02)
        connection.close()
        return row[0] - stopped_s

    async def storm(self, capacity: float) -> None:
        options = self.options
        own_before, cpu_before = _own_cpu_s(), self.stack.cpu_s()
        begin_s = time.perf_counter()
        clients = Clients(self.host, self.port, self.endless(options.budget_ms), count=options.storm)
        await asyncio.sleep(options.storm_seconds)
        end_s = time.perf_counter()
        own_after, cpu_after = _own_cpu_s(), self.stack.cpu_s()
        answers = await clients.stop()
        found = good(answers, begin_s + 0.1 * (end_s - begin_s), end_s) / capacity
        self.say(f"\nStorm: {options.storm} clients without back-off for {options.storm_seconds:g} s: {statuses(answers)};")
        wall_s = end_s - begin_s
        gateway = (cpu_after["gateway"] - cpu_before["gateway"]) / wall_s
        generator = (own_after - own_before) / wall_s
        self.say(f"{len(answers) / wall_s:.0f} requests/s; cores: generator {generator:.2f}, gateway {gateway:.2f}.")
        self.judge("goodput of capacity in the storm", f"{found:.0%}", f">= {STORM_GOODPUT:.0%}", found >= STORM_GOODPUT)


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--capacity-seconds", type=float, default=10.0)
    parser.add_argument("--storm-seconds", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=24, help="that saturate the device")
    parser.add_argument("--storm", type=int, default=100, help="clients of the storm")
    parser.add_argument("--budget-ms", type=int, default=1000)
    parser.add_argument("--batch-ms", type=float, default=4.0)
    parser.add_argument("--token-us", type=float, default=1000.0)
    parser.add_argument("--cost", type=int, default=128, help="SIE_MAX_BATCH_COST")
    add_options(parser)
    options = parser.parse_args()
    say = Report()
    device = Device(options.batch_ms, options.token_us)
    plan = Plan([MODEL], workers=[device], environ={"SIE_MAX_BATCH_COST": str(options.cost)}, code=options.code)
    say(f"`python bench/overload.py --seconds {options.seconds:g}`, {os.cpu_count()} cores, {options.batch_ms:g} ms a batch")
    say(f"and {options.token_us:g} us a token, at most {options.cost} tokens a batch.\n")
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder, "stack"), plan) as stack:
        uvloop.run(Bench(stack, options, say).run())
    say.save(options.out)


if __name__ == "__main__":
    main()
