"""Refused and late requests under overload, with real processes and a simulated adapter that takes time but no
processor time.

    clients ──► 1 or 2 gateways ──► nats-server ──► sidecar ──► fixed-cost adapter: a batch takes a + b x tokens

Each cell (`Case`) is a corner of the matrix that `bench/admission.py` runs in virtual time, and starts new processes:

* cold: the processes have served no request before; tiny: they have served one small request;
* stall: after a third of the cell, the adapter is stopped for 6 s;
* slow: after a third of the cell, a control group limits all processes to a tenth of the machine;
* 10x: clients come at ten times the capacity, each with one request.

A client whose request is refused repeats it after the Retry-After. Columns:

* false: share of all requests that were refused although an answer was expected in time, with a margin of a full batch
  and a tenth of the budget. The expected time includes the requests that were admitted before, by the times of their
  answers. It also includes the refused clients whose Retry-After had not passed, at the highest measured rate of this
  device (after a slow-down: the rate after it);
* late: share of the admitted requests that were not answered within the budget. Onset: until ten full batches and twice
  the budget have passed, at most half of the cell, and from a stall or slow-down on; steady: the rest;
* served: share of the repeated requests that was admitted and answered in time;
* goodput: answers a second in the second half of a cell, as a share of the capacity with full batches;
* log: lines a second of all processes.

    python bench/overload.py [--before CHECKOUT] [--only TEXT] [--out bench/results/overload.md]

`--before` also runs the processes of another checkout, alternately, in the short cells: tiny, 10x with one gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from cgroups import limited
from client import Connection, connect, request
from report import Report, machine, parser_of
from stack import Device, Plan, Stack

MODEL = "toy/one"
TOKENS = 8  # tokens of a request: one for each of six letters, and two special tokens
REQUESTS = 12  # number of requests in a full batch
SMALL, LARGE = (0.005, 2e-5), (0.3, 2e-3)  # costs of a device: (seconds for a batch, further seconds for each token)
STALL_S, SLOWER = 6.0, 10.0
FACTOR = 10
SPARE = 0.1  # margin of the column `false`, as a part of the budget (see the docstring)


@dataclass(frozen=True)
class Case:
    start: str
    device: tuple[float, float]
    clients: int
    budget_s: float
    seconds: float
    gateways: int = 1
    is_compared: bool = False

    @property
    def full_s(self) -> float:
        return self.device[0] + self.device[1] * TOKENS * REQUESTS

    @property
    def capacity(self) -> float:
        """Requests a second that the device computes in full batches."""
        return REQUESTS / self.full_s


def cases() -> Iterator[Case]:
    for device in (SMALL, LARGE):
        for clients, budget_s in ((500, 60.0), (1, 1.0), (40, 10.0), (500, 1.0)):
            yield Case("cold", device, clients, budget_s, 6.0)
        for clients, budget_s in ((40, 10.0), (500, 1.0)):
            yield Case("tiny", device, clients, budget_s, 6.0, is_compared=True)
        for clients, budget_s in ((40, 1.0), (500, 10.0)):
            yield Case("stall", device, clients, budget_s, 12.0)
        for clients, budget_s in ((40, 10.0), (500, 10.0)):
            yield Case("slow", device, clients, budget_s, 12.0)
    for gateways in (1, 2):
        for budget_s, seconds in ((1.0, 15.0), (10.0, 40.0)):
            yield Case("10x", LARGE, 0, budget_s, seconds, gateways, is_compared=gateways == 1)


@dataclass(slots=True)
class Try:
    """One request. Times are those of `time.perf_counter`. `ended_s` is 0 before the end of the request."""

    at_s: float
    is_return: bool
    ended_s: float = 0.0
    status: int = 0
    retry_s: float = 0.0
    code: str = ""

    def is_late(self, budget_s: float) -> bool:
        return self.status != 503 and not (self.status == 200 and self.ended_s - self.at_s <= budget_s + 0.05)


@dataclass
class Found:
    """Requests of a cell, with their outcomes."""

    case: Case
    tries: list[Try] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0
    onsets: list[tuple[float, float]] = field(default_factory=list)
    log_lines: int = 0
    rate: float = 0.0  # highest measured number of answers a second, which `false` uses

    @property
    def refused(self) -> list[Try]:
        return [attempt for attempt in self.tries if attempt.status == 503]

    def false(self) -> int:
        """Return the number of false refusals, as the module's docstring defines them."""
        case = self.case
        entered = sorted((entrant for entrant in self.tries if entrant.status != 503), key=lambda entrant: entrant.at_s)
        starts, last_s, ends = [entrant.at_s for entrant in entered], 0.0, []
        for attempt in entered:
            last_s = max(last_s, attempt.ended_s if attempt.status == 200 else attempt.at_s)
            ends.append(last_s)
        refusal_ends = sorted(refusal.ended_s for refusal in self.refused)
        due = sorted(refusal.ended_s + refusal.retry_s for refusal in self.refused)
        slow_s = self.onsets[1][0] + case.budget_s if case.start == "slow" else self.ended_s
        slow_rate = max(1.0, self.answered(slow_s, self.ended_s))
        count = 0
        for attempt in self.refused:
            place = bisect_left(starts, attempt.at_s)
            ahead_s = max(attempt.at_s, ends[place - 1]) if place else attempt.at_s
            turns = bisect_left(refusal_ends, attempt.at_s) - bisect_left(due, attempt.at_s)
            rate = slow_rate if attempt.at_s >= slow_s else self.rate
            would_s = ahead_s - attempt.at_s + turns / rate + REQUESTS / rate
            count += would_s + REQUESTS / rate + SPARE * case.budget_s <= case.budget_s
        return count

    def answered(self, begin_s: float, end_s: float) -> float:
        """Return the answers a second from `begin_s` to `end_s`; 0 if these times are at most half a second apart."""
        count = sum(attempt.status == 200 and begin_s <= attempt.ended_s < end_s for attempt in self.tries)
        return count / (end_s - begin_s) if end_s > begin_s + 0.5 else 0.0

    def late(self, *, onset: bool) -> tuple[int, int]:
        attempts = [attempt for attempt in self.tries if attempt.status != 503 and self.is_onset(attempt.at_s) == onset]
        return sum(attempt.is_late(self.case.budget_s) for attempt in attempts), len(attempts)

    def is_onset(self, at_s: float) -> bool:
        return any(begin_s <= at_s < end_s for begin_s, end_s in self.onsets)

    def served(self) -> tuple[int, int]:
        attempts = [attempt for attempt in self.tries if attempt.is_return]
        return sum(attempt.status == 200 and not attempt.is_late(self.case.budget_s) for attempt in attempts), len(
            attempts
        )

    def goodput(self) -> float:
        middle_s = (self.began_s + self.ended_s) / 2
        return self.answered(middle_s, self.ended_s) / self.case.capacity

    def row(self) -> str:
        case, refused = self.case, len(self.refused)
        error_codes = Counter(attempt.code for attempt in self.tries if attempt.status not in (200, 503))
        errors_text = ", ".join(f"{count} {code}" for code, count in error_codes.most_common(2))
        count = len(self.tries)
        return (
            f"{count} | {refused / count:.1%} | {self.false() / count:.2%} | {_share(self.late(onset=False))} | "
            f"{_share(self.late(onset=True))} | {_share(self.served())} | "
            f"{f'{self.goodput():.0%}' if case.start == '10x' else ''} | "
            f"{self.log_lines / (self.ended_s - self.began_s):.1f} | {errors_text} |"
        )


def _share(pair: tuple[int, int]) -> str:
    return f"{pair[0] / pair[1]:.1%} of {pair[1]}" if pair[1] else ""


class Run:
    """Clients that run the requests of one cell against one cluster."""

    def __init__(self, case: Case, stack: Stack) -> None:
        self.case = case
        self.stack = stack
        self.found = Found(case)
        self._ways = [(str(pieces.hostname), int(pieces.port or 0)) for pieces in map(urlsplit, stack.urls)]
        self._idle: list[list[Connection]] = [[] for _ in self._ways]
        self._tasks: set[asyncio.Task[None]] = set()

    def _message(self, client: int) -> bytes:
        body = msgspec.json.encode({"items": [f"{client:06d}"]})
        return request(
            f"/v1/encode/{MODEL}", body, "application/json", x_sie_timeout_ms=str(int(1000 * self.case.budget_s))
        )

    async def _ask(self, client: int, *, is_return: bool = False) -> Try:
        way = client % len(self._ways)
        attempt = Try(time.perf_counter(), is_return)
        self.found.tries.append(attempt)
        idle = self._idle[way]
        try:
            while idle and not idle[-1].is_open:
                idle.pop()
            connection = idle.pop() if idle else await connect(*self._ways[way])
            attempt.status, body = await connection.send(self._message(client))
        except OSError as error:
            attempt.code = type(error).__name__
        else:
            idle.append(connection)
            if attempt.status != 200:
                attempt.code = str(msgspec.json.decode(body).get("code"))
                attempt.retry_s = float(connection.headers().get("retry-after", 1))
        attempt.ended_s = time.perf_counter()
        return attempt

    async def _client(self, client: int, end_s: float, *, again: bool) -> None:
        is_return = False
        while time.perf_counter() < end_s:
            attempt = await self._ask(client, is_return=is_return)
            is_return = attempt.status == 503
            if is_return:
                if time.perf_counter() + attempt.retry_s >= end_s:
                    return
                await asyncio.sleep(attempt.retry_s + random.uniform(0.001, 0.02))
            elif not again:
                return

    def _start(self, client: int, end_s: float, *, again: bool) -> None:
        task = asyncio.create_task(self._client(client, end_s, again=again))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self) -> Found:
        case, record = self.case, self.found
        if case.start == "tiny":
            await self._ask(0)
            record.tries.clear()
        lines = sum(part.lines for part in self.stack.parts)
        begin_s = record.began_s = time.perf_counter()
        end_s = record.ended_s = begin_s + case.seconds
        onset_s = min(case.seconds / 2, max(2 * case.budget_s, 10 * case.full_s))
        record.onsets = [(begin_s, begin_s + onset_s)]
        disturbing = asyncio.create_task(self._disturb(begin_s + case.seconds / 3, end_s))
        if case.start == "10x":
            await self._arrive(begin_s, end_s)
        else:
            for client in range(case.clients):
                self._start(client, end_s, again=True)
        await asyncio.sleep(max(0.0, end_s - time.perf_counter()))
        record.log_lines = sum(part.lines for part in self.stack.parts) - lines
        await disturbing
        while self._tasks:
            await asyncio.wait(self._tasks)
        for idle in self._idle:
            for connection in idle:
                connection.close()
        return record

    async def _arrive(self, begin_s: float, end_s: float) -> None:
        rate = FACTOR * self.case.capacity
        for number in range(int(rate * (end_s - begin_s))):
            await asyncio.sleep(max(0.0, begin_s + number / rate - time.perf_counter()))
            self._start(number, end_s, again=False)

    async def _disturb(self, at_s: float, end_s: float) -> None:
        if self.case.start not in ("stall", "slow"):
            return
        await asyncio.sleep(at_s - time.perf_counter())
        self.found.onsets.append((at_s - self.case.budget_s, end_s))
        if self.case.start == "stall":
            adapter = self.stack.workers[0].adapter
            adapter.pause()
            await asyncio.sleep(STALL_S)
            adapter.resume()
            return
        with contextlib.ExitStack() as limits:
            limits.enter_context(limited([part.pid for part in self.stack.parts], (os.cpu_count() or 1) / SLOWER))
            await asyncio.sleep(max(0.0, end_s - time.perf_counter()))


def cell(case: Case, code: Path | None) -> Found:
    device = Device(1000 * case.device[0], 1e6 * case.device[1])
    plan = Plan(
        [MODEL],
        gateways=case.gateways,
        workers=[device],
        environ={"SIE_BATCHER_MAX_BATCH_REQUESTS": str(REQUESTS)},
        code=code,
    )
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder, "stack"), plan) as stack:
        return uvloop.run(Run(case, stack).run())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="compare with the processes of this checkout")
    parser.add_argument("--only", default="", help="run the cells with this in `start clients budget a gateways`")
    options = parser.parse_args()
    say, began_s = Report(), time.perf_counter()
    say("# Overload, stalls and slow machines at real processes\n")
    say(f"`python bench/overload.py{' --before CHECKOUT' if options.before else ''}`, {machine()}, cores,")
    say(
        f"load average before {os.getloadavg()[0]:.1f}. A device takes the time `a` for a batch of at most {REQUESTS} "
        "requests and `b` for each token."
    )
    say(f"A request has {TOKENS} tokens. The docstring of the script explains the columns.\n")
    say(
        "| start | a, b | clients | budget | code | requests | refused | false | late, steady | late, onset | served | "
        "goodput | log/s | |"
    )
    say("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    rates: dict[tuple[float, float], float] = {}
    all_found: dict[str, list[Found]] = {}
    for case in cases():
        if (
            options.only
            and options.only not in f"{case.start} {case.clients} {case.budget_s:g} {case.device[0]:g} {case.gateways}"
        ):
            continue
        codes = [("now", None), *([("before", options.before)] if options.before and case.is_compared else [])]
        for name, code in codes:
            record = cell(case, code)
            answer_rate = record.answered((record.began_s + record.ended_s) / 2, record.ended_s)
            record.rate = rates[case.device] = min(case.capacity, max(answer_rate, rates.get(case.device, 1.0)))
            device = f"{1000 * case.device[0]:g} ms, {1e6 * case.device[1]:g} us"
            start = case.start if case.gateways == 1 else f"{case.start}, {case.gateways} gateways"
            clients = case.clients or f"{FACTOR * case.capacity:.0f}/s"
            say(f"| {start} | {device} | {clients} | {case.budget_s:g} s | {name} | {record.row()}")
            all_found.setdefault(name, []).append(record)
    say("\n| sum of the cells above | false | late, steady | late, onset | served | goodput |")
    say("|---|---|---|---|---|---|")
    for name, those in all_found.items():
        say(f"| {name} | {_sum(those)}")
    say(f"\nThe run took {time.perf_counter() - began_s:.0f} s; load average at its end {os.getloadavg()[0]:.1f}.")
    say.save(options.out)


def _sum(those: list[Found]) -> str:
    """Return one row over several cells: shares of all their requests, and goodput as a share of their capacity."""
    tries = sum(len(record.tries) for record in those)
    pairs = [
        [record.late(onset=False) for record in those],
        [record.late(onset=True) for record in those],
        [record.served() for record in those],
    ]
    shares = " | ".join(_share((sum(some for some, _ in pair), sum(of for _, of in pair))) for pair in pairs)
    open_loads = [record for record in those if record.case.start == "10x"]
    could = sum(record.case.capacity * record.case.seconds for record in open_loads)
    did = sum(record.goodput() * record.case.capacity * record.case.seconds for record in open_loads)
    false_share = sum(record.false() for record in those) / tries
    return f"{false_share:.2%} | {shares} | {f'{did / could:.1%}' if could else ''} |"


if __name__ == "__main__":
    main()
