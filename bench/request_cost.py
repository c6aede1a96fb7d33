"""Cost of the queue: HTTP -> JetStream -> sidecar -> Unix socket -> HTTP, with an adapter that costs nothing.

1. Requests a second at 64 clients, one short text each, and the processor time of a request in each process.
2. The same with 1, 20 and 200 models that have had requests. The cost of requests to one model must not depend on the
   number of models. Requests to all models in turn cost more, since only requests to the same model share a batch.
3. With --long, 100,000 requests and the resident memory of each process before, between and after.

Rates depend on other load of the machine; processor time per request hardly does. The load generator is `wrk`, whose
processor time is a column of its own.

    python bench/request_cost.py [--long] [--code CHECKOUT]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import wrk
from fake_adapter import ids_of, vector_of
from report import Report, parser_of
from stack import Device, Plan, Stack

TEXT = "What is deep learning?"
ROLES = ("gateway", "sidecar", "broker", "adapter", "config")
GOALS_US = {"gateway": 250, "sidecar": 80, "broker": 60}
GOAL_RATE = 4000


@dataclass(frozen=True)
class Sample:
    load: wrk.Load
    cpu_us: dict[str, float]  # role -> microseconds of processor time for a request

    @property
    def generator_us(self) -> float:
        return self.load.cpu_s / self.load.answered * 1e6


def names(count: int) -> list[str]:
    return [f"toy/m{number}" for number in range(count)]


def check(stack: Stack, models: Sequence[str]) -> None:
    """Send a request to each model, so that the broker's consumer of each model exists. Raise RuntimeError if an answer
    is wrong.
    """
    expected = vector_of(ids_of(TEXT))
    with httpx.Client(base_url=stack.urls[0], timeout=30, trust_env=False) as client:
        for model in models:
            answer = client.post(f"/v1/encode/{model}", json={"items": [TEXT]})
            if answer.status_code != 200 or not np.allclose(answer.json()["items"][0]["dense"]["values"], expected):
                raise RuntimeError(f"{model}: wrong reply, status {answer.status_code}: {answer.text[:300]}")


def sample(stack: Stack, models: Sequence[str], *, clients: int, seconds: float) -> Sample:
    """Send requests to the models in turn, and return the measurement."""
    return measured(
        stack,
        [(f"/v1/encode/{model}", json.dumps({"items": [TEXT]})) for model in models],
        clients=clients,
        seconds=seconds,
    )


def measured(
    stack: Stack,
    requests: Sequence[tuple[str, str]],
    *,
    clients: int,
    seconds: float,
    headers: Mapping[str, str] = wrk.NO_HEADERS,
) -> Sample:
    """Send the requests, (path, JSON body), in turn. Return the measurement. Raise RuntimeError if a reply is not 200
    or missing.
    """
    before = stack.cpu_s()
    load = wrk.closed_loop(
        stack.urls[0], requests, clients=clients, seconds=seconds, folder=stack.folder, headers=headers
    )
    after = stack.cpu_s()
    if load.refused or load.failed:
        raise RuntimeError(f"{load.refused} replies were not 200, {load.failed} are missing\n{stack.log()}")
    return Sample(load, {role: (after[role] - before[role]) / load.answered * 1e6 for role in ROLES})


def middle(samples: Sequence[Sample]) -> Sample:
    """Return the sample with the median rate."""
    return sorted(samples, key=lambda measurement: measurement.load.rate)[len(samples) // 2]


def row(name: str, measurement: Sample) -> str:
    cpu = " | ".join(f"{measurement.cpu_us[role]:.0f}" for role in ("gateway", "sidecar", "broker", "adapter"))
    load = measurement.load
    return (
        f"| {name} | {load.rate:.0f} | {load.p50_ms:.1f} | {load.p99_ms:.1f} | {cpu} | {measurement.generator_us:.0f} |"
    )


HEAD = (
    "| {} | requests/s | p50 ms | p99 ms | gateway us | sidecar us | broker us | adapter us | wrk us |\n"
    + 9 * "|---"
    + "|"
)


def by_models(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Report a table with one row for each number of models."""
    say(HEAD.format("models"))
    measurements: dict[int, Sample] = {}
    for count in options.models:
        models = names(count)
        with tempfile.TemporaryDirectory() as folder, Stack(Path(folder, "stack"), plan(options, models)) as stack:
            check(stack, models)
            sample(stack, models, clients=options.clients, seconds=2)
            for name, used in (("one", models[:1]), ("in turn", models)) if count > 1 else (("", models),):
                rounds = [
                    sample(stack, used, clients=options.clients, seconds=options.seconds) for _ in range(options.rounds)
                ]
                measurements.setdefault(count, middle(rounds))
                say(row(f"{count} {name}".strip(), middle(rounds)))
    first = measurements[options.models[0]]
    totals = {count: sum(measurement.cpu_us.values()) for count, measurement in measurements.items()}
    spread = (max(totals.values()) - min(totals.values())) / totals[options.models[0]]
    cost = ", ".join(f"{role} {first.cpu_us[role]:.0f} us (goal {goal})" for role, goal in GOALS_US.items())
    say(f"\nAt {options.models[0]} model: {first.load.rate:.0f} requests/s (goal {GOAL_RATE}), {cost}.")
    say(
        f"Processor time of a request to one of {min(measurements)} to {max(measurements)} models: "
        f"within {spread:.0%} (goal: 10 %).\n"
    )


def plan(options: argparse.Namespace, models: Sequence[str]) -> Plan:
    return Plan(models=models, workers=[Device(lanes=options.lanes)], code=options.code)


def memory(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Report the resident memory during --requests requests, in ten parts, and its slope over the last eight parts."""
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder, "stack"), plan(options, names(1))) as stack:
        check(stack, names(1))
        readings: list[tuple[int, dict[str, int]]] = [(0, stack.rss_bytes())]
        total, seconds = 0, 5.0
        while total < options.requests:
            measurement = sample(stack, names(1), clients=options.clients, seconds=seconds)
            total += measurement.load.answered
            seconds = min(60.0, max(2.0, options.requests / 10 / measurement.load.rate))
            readings.append((total, stack.rss_bytes()))
    say(
        "| process | MiB at the start | MiB after 20 % | MiB at the end | KiB per 1,000 requests "
        "|\n|---|---|---|---|---|"
    )
    fitted = readings[max(1, len(readings) // 5) :]
    for role in ROLES:
        slope = float(np.polyfit([count for count, _ in fitted], [rss[role] for _, rss in fitted], 1)[0])
        first, second, last = (rss[role] / 2**20 for rss in (readings[0][1], fitted[0][1], readings[-1][1]))
        say(f"| {role} | {first:.1f} | {second:.1f} | {last:.1f} | {slope * 1000 / 1024:+.1f} |")
    say(
        f"\nOver {total} requests at {options.clients} clients; the slope is fitted over the last {len(fitted)} of "
        f"{len(readings)} readings.\n"
    )


def main() -> None:
    parser = parser_of(__doc__, rounds=3, seconds=6.0, has_code=True)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--models", type=lambda text: [int(part) for part in text.split(",")], default=[1, 20, 200])
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--long", action="store_true", help="also measure the memory over --requests requests")
    parser.add_argument("--requests", type=int, default=100_000)
    options = parser.parse_args()
    say = Report()
    if not wrk.installed():
        sys.exit("wrk was not found; it is the Debian package of that name")
    say(
        f"`python bench/request_cost.py`, Python {platform.python_version()}, {os.cpu_count()} cores, {options.clients}"
        " clients.\n"
    )
    by_models(options, say)
    if options.long:
        memory(options, say)
    say.save(options.out)


if __name__ == "__main__":
    main()
