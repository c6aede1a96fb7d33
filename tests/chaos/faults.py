"""Faults and repair: kills and freezes of random parts, restarts of dead ones, and spans without a leader of the
brokers.

`choose` is pure and names a part and an action. `Monkey` carries it out on real processes.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import httpx
from stack import Part, Stack

Action = Literal["kill", "freeze", "died"]
RESTART_S = 0.5  # the pause of an orchestrator before it restarts a process
FREEZE_S = (2.0, 5.0)
REPAIR_S = 60.0
POLL_S = 0.2


@dataclass
class Fault:
    """A fault of a part. `recovered_s` is when the part was ready again, or 0. Times are of `time.monotonic`."""

    part: str
    role: str
    action: Action
    at_s: float
    frozen_s: float = 0.0
    recovered_s: float = 0.0


def choose(parts: Sequence[tuple[str, str]], unwell: set[str], rng: random.Random) -> tuple[str, Action, float]:
    """Return the name of a part that is well, an action, and the seconds of a freeze. At most one broker is down at a
    time.
    """
    broker_down = any(role == "broker" for name, role in parts if name in unwell)
    candidates = [name for name, role in parts if name not in unwell and not (role == "broker" and broker_down)]
    part = rng.choice(candidates)
    if rng.random() < 0.5:
        return part, "kill", 0.0
    return part, "freeze", rng.uniform(*FREEZE_S)


class Monkey:
    """One fault every `every_s`, and the supervisor that restarts dead parts. `faults` has them in order."""

    def __init__(self, stack: Stack, *, every_s: float, seed: int) -> None:
        self.faults: list[Fault] = []
        self._stack = stack
        self._every_s = every_s
        self._rng = random.Random(seed)
        self._parts = {part.name: part for part in stack.parts}
        self._repairs: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        self._begun_s = time.monotonic()

    async def run(self, duration_s: float) -> None:
        """Cause faults for `duration_s`, then repair until all parts are ready. Raise AssertionError if a part does not
        become ready.
        """
        supervising = asyncio.create_task(self._supervise())
        try:
            end_s = time.monotonic() + duration_s
            while time.monotonic() + self._every_s <= end_s:
                await asyncio.sleep(self._every_s)
                self._strike()
            await asyncio.sleep(max(0.0, end_s - time.monotonic()))
        finally:
            self._stopping.set()
            await supervising

    def _note(self, fault: Fault) -> None:
        self.faults.append(fault)
        print(
            f"{time.monotonic() - self._begun_s:6.1f} s  {fault.part} {fault.action} {fault.frozen_s or ''}",
            file=sys.stderr,
            flush=True,
        )

    def _strike(self) -> None:
        parts = [(part.name, part.role) for part in self._stack.parts]
        name, action, frozen_s = choose(parts, set(self._repairs), self._rng)
        part = self._parts[name]
        fault = Fault(name, part.role, action, time.monotonic(), frozen_s)
        self._note(fault)
        if action == "kill":
            part.kill()
        else:
            part.pause()
        self._repair(part, fault)

    def _repair(self, part: Part, fault: Fault) -> None:
        self._repairs[part.name] = asyncio.create_task(self._restored(part, fault), name=f"repair of {part.name}")

    async def _restored(self, part: Part, fault: Fault) -> None:
        """Restart a part until it is ready, also if it ends again meanwhile. Raise AssertionError if it is not ready
        within REPAIR_S.
        """
        if fault.action == "freeze":
            await asyncio.sleep(fault.frozen_s)
            part.resume()
        end_s = time.monotonic() + REPAIR_S
        while not await asyncio.to_thread(part.is_ready):
            assert time.monotonic() < end_s, f"{part.name} is not ready\n" + "\n".join(part.log)
            if part.alive:
                await asyncio.sleep(POLL_S)
                continue
            await asyncio.sleep(RESTART_S)
            if fault.action == "died" or part.status != -signal.SIGKILL:
                self._note(Fault(part.name, part.role, "died", time.monotonic(), recovered_s=time.monotonic()))
            part.start()
        fault.recovered_s = time.monotonic()

    async def _supervise(self) -> None:
        """Record a process that ended by itself as a fault of its own."""
        while not (self._stopping.is_set() and not self._repairs):
            for name, task in list(self._repairs.items()):
                if task.done():
                    del self._repairs[name]
                    task.result()
            for part in self._stack.parts:
                if part.name not in self._repairs and not part.alive:
                    self._repair(part, Fault(part.name, part.role, "died", time.monotonic()))
            await asyncio.sleep(POLL_S)


class Leaders:
    """A watch on the monitors of the brokers. `without` has the spans in which a stream or consumer had no live
    leader.
    """

    def __init__(self, stack: Stack) -> None:
        self.without: list[tuple[float, float]] = []
        self._stack = stack
        self._since_s = 0.0

    async def run(self) -> None:
        """Poll the monitors until cancelled."""
        async with httpx.AsyncClient(timeout=1.0, trust_env=False) as client:
            while True:
                answers = await asyncio.gather(
                    *(self._led(client, number) for number in range(len(self._stack.brokers)))
                )
                self._note(all(answer is not False for answer in answers) and any(answers), time.monotonic())
                await asyncio.sleep(POLL_S)

    def end(self) -> None:
        self._note(True, time.monotonic())

    def _note(self, led: bool, now_s: float) -> None:
        if not led and not self._since_s:
            self._since_s = now_s - POLL_S
        elif led and self._since_s:
            self.without.append((self._since_s, now_s))
            self._since_s = 0.0

    async def _led(self, client: httpx.AsyncClient, number: int) -> bool | None:
        """Return whether one broker sees a live leader for each group, or None if it does not answer. A frozen leader
        does not count.
        """
        part = self._stack.brokers[number]
        if not part.alive or part.paused:
            return None
        try:
            answer = await client.get(f"{self._stack.monitor_urls[number]}/jsz?streams=true&consumers=true")
            report = answer.json()
        except (httpx.HTTPError, ValueError):
            return None
        streams = [
            stream for account in report.get("account_details") or [] for stream in account.get("stream_detail") or []
        ]
        groups = [*streams, *(consumer for stream in streams for consumer in stream.get("consumer_detail") or [])]
        leaders = {group.get("cluster", {}).get("leader") for group in groups} | {
            report.get("meta_cluster", {}).get("leader")
        }
        return leaders <= {
            f"b{index}" for index, broker in enumerate(self._stack.brokers) if broker.alive and not broker.paused
        }
