"""Effect of the batching settings on this machine: texts a second, their processor time and their latency with a real
`sie serve`, one setting changed at a time.

    python bench/tuning.py [--seconds 1.5] [--rounds 8]

Clients send one text a request (log-normal lengths, about 87 tokens) and the next one when it was answered. Each value
of a setting has a cluster of its own. The clusters are measured in turn. The fastest round of each value counts, since
other work on the machine only ever slows a round down. The files bench/results/tuning.md and docs/tuning.svg are
written.
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
from overhead import Cluster, texts_of
from report import Report

ROOT = Path(__file__).parents[1]
CLIENTS = (1, 2, 4, 8, 16, 32, 64)
SETTINGS = {
    "--max-batch-cost": (256, 1024, 4096, 16384),
    "--batcher-max-batch-requests": (1, 4, 16, 64),
}
AT = 32  # number of clients while a setting is changed
WIDTH, HEIGHT, MARGIN = 380, 230, 52


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


class Started(Cluster):
    def close(self) -> None:
        self.stop()


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
    """Return the best round of each measurement. They take turns, and the first round warms up."""
    measurements = [[measure() for measure in measures] for _ in range(rounds + 1)][1:]
    return [max(points, key=lambda point: point.rate) for points in zip(*measurements, strict=True)]


def table(name: str, points: Sequence[Point]) -> str:
    lines = [
        f"| {name} | texts/s | CPU of a text, ms | p50, ms | p99, ms | texts a batch |",
        "|---|---|---|---|---|---|",
    ]
    for point in points:
        latencies = f"{point.p50_ms:.1f} | {point.p99_ms:.1f}"
        lines.append(f"| {point.value:,} | {point.rate:.0f} | {point.cpu_ms:.2f} | {latencies} | {point.batch:.1f} |")
    return "\n".join(lines)


def panel(name: str, points: Sequence[Point], left: int, top: int) -> str:
    """Draw the processor time of a text (blue, left axis) and the median latency (red, right axis) over the values of a
    setting, evenly spaced.
    """
    room = WIDTH - 2 * MARGIN
    xs = [left + MARGIN + room * index / (len(points) - 1) for index in range(len(points))]
    base = top + HEIGHT - 34
    parts = [f'<text x="{left + MARGIN}" y="{top + 16}" font-weight="bold">{name}</text>']
    parts += [
        f'<text x="{x:.0f}" y="{base + 18}" text-anchor="middle">{point.value}</text>'
        for x, point in zip(xs, points, strict=True)
    ]
    sides = (
        ("#1b6ca8", [point.cpu_ms for point in points], left + MARGIN - 6, "end"),
        ("#c8553d", [point.p50_ms for point in points], left + WIDTH - MARGIN + 6, "start"),
    )
    for colour, values, at, anchor in sides:
        most = max(values) * 1.1
        ys = [base - (HEIGHT - 70) * value / most for value in values]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{line}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in zip(xs, ys, strict=True)]
        for share in (0.0, 0.5, 1.0):
            y = base - (HEIGHT - 70) * share
            parts.append(
                f'<text x="{at}" y="{y + 4:.1f}" text-anchor="{anchor}" fill="{colour}">{most * share:.0f}</text>'
            )
            parts.append(f'<path d="M{left + MARGIN} {y:.1f}h{room}" stroke="#ddd" fill="none"/>')
    return "\n".join(parts)


def plot(curves: dict[str, Sequence[Point]]) -> str:
    """Draw all sweeps, two beside each other."""
    rows = -(-len(curves) // 2)
    high = rows * HEIGHT + 26
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {high}" font-family="sans-serif" '
            'font-size="12">'
        ),
        f'<rect width="{2 * WIDTH}" height="{high}" fill="white"/>',
        f'<text x="{MARGIN}" y="{high - 8}" fill="#1b6ca8">processor time of a text, ms</text>',
        f'<text x="{MARGIN + 190}" y="{high - 8}" fill="#c8553d">median latency, ms</text>',
    ]
    for number, (name, points) in enumerate(curves.items()):
        parts.append(panel(name, points, WIDTH * (number % 2), HEIGHT * (number // 2)))
    return "\n".join([*parts, "</svg>", ""])


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
    with contextlib.closing(Started([])) as cluster:
        requests = cluster.requests(texts, 1)
        measures = [
            functools.partial(measured, cluster, requests, clients, clients, arguments.seconds) for clients in CLIENTS
        ]
        sweep("clients at once", fastest(arguments.rounds, measures))
    say(f"With {AT} clients:\n")
    for flag, values in SETTINGS.items():
        with contextlib.ExitStack() as stack:
            clusters = [stack.enter_context(contextlib.closing(Started([flag, str(value)]))) for value in values]
            pairs = zip(clusters, values, strict=True)
            measures = [
                functools.partial(measured, cluster, requests, value, AT, arguments.seconds) for cluster, value in pairs
            ]
            sweep("SIE_" + flag.removeprefix("--").upper().replace("-", "_"), fastest(arguments.rounds, measures))
    say.save(ROOT / "bench" / "results" / "tuning.md")
    (ROOT / "docs" / "tuning.svg").write_text(plot(curves))


if __name__ == "__main__":
    main()
