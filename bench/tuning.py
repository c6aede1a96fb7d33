"""Effect of each batching setting on this machine: texts a second, processor time and latency of a text.

    python bench/tuning.py [--seconds 1.5] [--rounds 8]

Clients send one text a request (log-normal lengths, about 87 tokens), and the next request after the answer. For each
value of a setting, a `sie serve` runs with only this change; all are measured in turn. The fastest round of each value
counts, since other work on the machine can only slow a round down. The script writes bench/results/tuning.md and
docs/tuning.svg.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import uvloop
from client import closed_loop, percentile
from matplotlib.figure import Figure
from overhead import Cluster
from report import Report, in_turn
from words import texts_of

ROOT = Path(__file__).parents[1]
CLIENTS = (1, 2, 4, 8, 16, 32, 64)
SETTINGS = {
    "--max-batch-cost": (256, 1024, 4096, 16384),
    "--batcher-max-batch-requests": (1, 4, 16, 64),
}
AT = 32  # number of clients in the measurements of all settings
BLUE, RED = "#1b6ca8", "#c8553d"


@dataclass(frozen=True)
class Point:
    """Measurement of one value of a setting: texts a second, processor time of all processes for a text, median and
    99th percentile of the latency in milliseconds, texts a forward pass.
    """

    value: int
    rate: float
    cpu_ms: float
    p50_ms: float
    p99_ms: float
    batch: float


def measured(cluster: Cluster, requests: list[bytes], value: int, clients: int, seconds: float) -> Point:
    (texts, passes), cpu_s = cluster.batch_sizes(), sum(cluster.cpu_s().values())
    answered, taken_s, latencies = uvloop.run(
        closed_loop("127.0.0.1", cluster.port, requests, clients=clients, seconds=seconds)
    )
    texts_after, passes_after = cluster.batch_sizes()
    batch, cpu_ms = (
        (texts_after - texts) / (passes_after - passes),
        1e3 * (sum(cluster.cpu_s().values()) - cpu_s) / answered,
    )
    return Point(
        value, answered / taken_s, cpu_ms, percentile(latencies, 0.5) * 1e3, percentile(latencies, 0.99) * 1e3, batch
    )


def fastest(rounds: int, measures: Sequence[Callable[[], Point]]) -> list[Point]:
    """Return, for each measurement, its round with the highest rate."""
    points = in_turn(rounds, dict(enumerate(measures))).values()
    return [max(own, key=lambda point: point.rate) for own in points]


def table(name: str, points: Sequence[Point]) -> str:
    lines = [
        f"| {name} | texts/s | CPU of a text, ms | p50, ms | p99, ms | texts a batch |",
        "|---|---|---|---|---|---|",
    ]
    for point in points:
        latencies = f"{point.p50_ms:.1f} | {point.p99_ms:.1f}"
        lines.append(f"| {point.value:,} | {point.rate:.0f} | {point.cpu_ms:.2f} | {latencies} | {point.batch:.1f} |")
    return "\n".join(lines)


def plot(curves: dict[str, Sequence[Point]], file: Path) -> None:
    """Draw the processor time of a text (left axis) and the median latency (right axis) of each sweep."""
    figure = Figure(figsize=(9, 2.8 * -(-len(curves) // 2)), layout="constrained")
    for number, (name, points) in enumerate(curves.items(), 1):
        left = figure.add_subplot(-(-len(curves) // 2), 2, number, title=name)
        sides = (
            (left, BLUE, "processor time of a text, ms", [point.cpu_ms for point in points]),
            (left.twinx(), RED, "median latency, ms", [point.p50_ms for point in points]),
        )
        for axes, colour, label, values in sides:
            axes.plot([f"{point.value:,}" for point in points], values, color=colour, marker="o", markersize=3)
            axes.set_ylabel(label, color=colour)
            axes.set_ylim(bottom=0)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each round")
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    say = Report()
    texts = texts_of("mix", 1024)
    curves: dict[str, Sequence[Point]] = {}

    def sweep(name: str, points: list[Point]) -> None:
        curves[name] = points
        say(table(name, points) + "\n")

    say("# Batching settings, one at a time\n")
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores"
    say(f"`python bench/tuning.py`, {versions}, MiniLM-L6 on the CPU, machine profile cpu.")
    say(
        f"Texts of about 87 tokens, one a request; the fastest of {arguments.rounds} rounds of {arguments.seconds:g} "
        "s.\n"
    )
    with Cluster([]) as cluster:
        requests = cluster.requests(texts, 1)
        measures = [
            functools.partial(measured, cluster, requests, clients, clients, arguments.seconds) for clients in CLIENTS
        ]
        sweep("clients at once", fastest(arguments.rounds, measures))
    say(f"With {AT} clients:\n")
    for flag, values in SETTINGS.items():
        with contextlib.ExitStack() as stack:
            clusters = [stack.enter_context(Cluster([flag, str(value)])) for value in values]
            pairs = zip(clusters, values, strict=True)
            measures = [
                functools.partial(measured, cluster, requests, value, AT, arguments.seconds) for cluster, value in pairs
            ]
            sweep("SIE_" + flag.removeprefix("--").upper().replace("-", "_"), fastest(arguments.rounds, measures))
    say.save(ROOT / "bench" / "results" / "tuning.md")
    plot(curves, ROOT / "docs" / "tuning.svg")


if __name__ == "__main__":
    main()
