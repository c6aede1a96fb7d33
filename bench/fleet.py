"""Processor time of the gateway for a request, in a cluster of many models and many workers.

The gateway, the broker, the config service and one worker are real; the worker's adapter takes no time. Heartbeats, one
every 5 s for each worker, simulate all other workers of its pool and bundle. The simulated workers share the other
models of the catalogue. 16 clients send requests with one short text to the only model of the real worker. The
gateway's processor time without requests (heartbeats, placement) is measured separately, as a part of a core, and
subtracted. Cases take turns, so that other load of the machine affects all of them.

    python bench/fleet.py [--cases 1x1,10000x1000] [--code CHECKOUT]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import request_cost
import stack
import wrk
from report import Report, machine, parser_of
from stack import Device, Plan, Stack

from sie_broker.nats import connect
from sie_contracts.wire import messages, topology
from sie_contracts.wire.heartbeats import Heartbeat, ModelStatus

BEAT_S = 5.0
SETTLE_S = 12.0  # seconds before the first measurement, in which each worker sends two heartbeats
MAX_EACH = 14  # maximum number of models of a simulated worker


def beats(workers: int, models: list[str]) -> list[Heartbeat]:
    """Return one heartbeat for each simulated worker; the workers share these models."""
    model_count = min(MAX_EACH, -(-len(models) // workers)) if models else 0
    generator = np.random.default_rng(1)
    heartbeats = []
    for number in range(workers):
        own = list(dict.fromkeys(models[(number * model_count + index) % len(models)] for index in range(model_count)))
        rates = generator.exponential(50, len(own)).tolist()
        statuses = tuple(
            ModelStatus(model, "loaded", load_s=5.0, cost_rate=rate) for model, rate in zip(own, rates, strict=True)
        )
        beat = Heartbeat(
            f"simulated-{number:04}",
            "_default",
            "cpu",
            "default",
            True,
            "0",
            models=statuses,
            slots=MAX_EACH,
            rate=5000.0,
            credit_cost=32_768,
            credit_items=64,
            batch_cost=16_384,
            pipeline=2,
        )
        heartbeats.append(beat)
    return heartbeats


@contextlib.contextmanager
def simulated(url: str, workers: int, models: list[str]) -> Iterator[None]:
    """Within the block, send the heartbeats of simulated workers, evenly spread over BEAT_S."""
    ending = threading.Event()

    async def send() -> None:
        broker = await connect(url, name="simulated")
        publications = [
            (topology.health_subject(beat.worker), messages.encode(beat)) for beat in beats(workers, models)
        ]
        while not ending.is_set():
            for subject, data in publications:
                await broker.send(subject, data)
                await asyncio.sleep(BEAT_S / len(publications))
        await broker.close()

    thread = threading.Thread(target=asyncio.run, args=(send(),), daemon=True) if workers else None
    if thread is not None:
        thread.start()
    try:
        yield
    finally:
        ending.set()
        if thread is not None:
            thread.join(BEAT_S + 10)


def gateway_us(part: stack.Part, load: wrk.Load, before_s: float) -> float:
    return (part.cpu_s() - before_s) / load.answered * 1e6


class Case:
    """A cluster with `models` models in its catalogue and `workers` workers."""

    def __init__(self, models: int, workers: int, options: argparse.Namespace, stacked: contextlib.ExitStack) -> None:
        self.name = f"{models} | {workers}"
        self._clients, self._seconds = options.clients, options.seconds
        names = request_cost.names(models)
        folder = stacked.enter_context(tempfile.TemporaryDirectory())
        plan = Plan(models=names, workers=[Device(lanes=2)], code=options.code, preload=False)
        self.stack = stacked.enter_context(Stack(Path(folder, "stack"), plan))
        request_cost.check(self.stack, names[:1])
        stacked.enter_context(simulated(self.stack.broker_urls, workers - 1, names[1:]))
        self._path = f"/v1/encode/{names[0]}"
        self.cost_us: list[float] = []
        self.idle: list[float] = []
        self.rates: list[float] = []

    def idle_cpu(self, seconds: float) -> None:
        """Measure the processor time of the gateway without requests, as a part of a core."""
        gateway, before_s, at_s = self.stack.gateways[0], self.stack.gateways[0].cpu_s(), time.perf_counter()
        time.sleep(seconds)
        self.idle.append((gateway.cpu_s() - before_s) / (time.perf_counter() - at_s))

    def cost(self) -> float:
        """Return the gateway's median processor time for a request in us, less its processor time without requests."""
        return float(
            np.median(
                [cost_us - 1e6 * self.idle[0] / rate for cost_us, rate in zip(self.cost_us, self.rates, strict=True)]
            )
        )

    def measure(self) -> None:
        body = '{"items": ["What is deep learning?"]}'
        gateway = self.stack.gateways[0]
        before_s = gateway.cpu_s()
        url, folder = self.stack.urls[0], self.stack.folder
        load = wrk.closed_loop(url, [(self._path, body)], clients=self._clients, seconds=self._seconds, folder=folder)
        if load.refused or load.failed:
            raise RuntimeError(f"{load.refused} replies were not 200, {load.failed} are missing\n{self.stack.log()}")
        self.cost_us.append(gateway_us(gateway, load, before_s))
        self.rates.append(load.rate)


def main() -> None:
    parser = parser_of(__doc__, rounds=5, seconds=4.0, has_code=True)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--cases", default="1x1,10000x1,1x1000,1000x100,10000x1000", help="models x workers")
    options = parser.parse_args()
    if not wrk.installed():
        sys.exit("wrk was not found; it is the Debian package of that name")
    say = Report()
    say("# What a request costs with many models and workers\n")
    say(f"`python bench/fleet.py`, {machine()}, Python {platform.python_version()}, {options.clients} clients, ")
    say(f"{options.rounds} rounds of {options.seconds:g} s, the cases in turn; medians.\n")
    stack.START_S = 240.0
    with contextlib.ExitStack() as stacked:
        cases = [Case(*map(int, text.split("x")), options, stacked) for text in options.cases.split(",")]
        time.sleep(SETTLE_S)
        for case in cases:
            case.measure()  # warms up
            case.cost_us.clear()
            case.rates.clear()
        for _ in range(options.rounds):
            for case in cases:
                case.measure()
        for case in cases:
            case.idle_cpu(5.0)
        costs = [case.cost() for case in cases]
        say(
            "| models | workers | gateway us per request | relative to the first row | requests/s | without requests, "
            "of one core |"
        )
        say("|---" * 6 + "|")
        for case, cost in zip(cases, costs, strict=True):
            say(
                f"| {case.name} | {cost:.0f} | {cost / costs[0] - 1:+.1%} | {np.median(case.rates):.0f} | "
                f"{case.idle[0]:.1%} |"
            )
    say(f"\nThe dearest row relative to the cheapest: {max(costs) / min(costs) - 1:+.1%} (goal: within 10 %).")
    say.save(options.out)


if __name__ == "__main__":
    main()
