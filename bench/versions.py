"""Compare the speed of two installed versions of SIE, measured alternately in one run.

1. Latencies of one short text: pairs of one request to each version, and the difference of each pair. Both versions are
   started in both orders, because the version that starts first has 0.1 ms less.
2. Texts per second at 64 clients with one text a request and at 8 clients with 32: medians of alternating rounds, their
   ratio, and the processor time of each process for one text.

    python bench/versions.py --old ../before/.venv/bin/sie

`--old` names the command `sie` of another checkout after its `make install`, `--new` that of this version. Install the
same packages for both, but not the packages of the tests, with which a sidecar took up to a tenth more processor time.
The script writes bench/results/versions.md.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parent))

from client import connect, percentile
from overhead import SHORT, TARGETS, Cluster
from report import Report, machine, parser_of
from words import texts_of

LOADS = {"64 x 1": (64, 1), "8 x 32": (8, 32)}  # (clients, texts of a request)
WARM_UP = 30


async def latencies(clusters: Mapping[str, Cluster], pairs: int) -> dict[str, list[float]]:
    """Return version -> milliseconds of each request with one short text. The values at an index are a pair: measured
    directly after each other. The version that is measured first alternates.
    """
    connections = {name: await connect("127.0.0.1", cluster.port) for name, cluster in clusters.items()}
    (message,) = clusters["old"].requests([SHORT], 1)
    times_ms: dict[str, list[float]] = {name: [] for name in clusters}
    for number in range(pairs + WARM_UP):
        for name in sorted(clusters, reverse=bool(number % 2)):
            began_s = time.perf_counter()
            status, body = await connections[name].send(message)
            taken_ms = (time.perf_counter() - began_s) * 1000
            if status != 200:
                raise RuntimeError(body[:300])
            if number >= WARM_UP:
                times_ms[name].append(taken_ms)
    for connection in connections.values():
        connection.close()
    return times_ms


@contextlib.contextmanager
def started(order: Iterable[str], commands: Mapping[str, Path]) -> Iterator[dict[str, Cluster]]:
    """Yield version -> its cluster, with the clusters started in this order."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(Cluster((), commands[name])) for name in order}


def throughput(
    clusters: Mapping[str, Cluster], kind: str, load: str, rounds: int, seconds: float
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Return version -> texts per second of each round, and version -> role of the process -> processor milliseconds
    for a text.
    """
    clients, batch_size = LOADS[load]
    requests = {
        name: cluster.requests(texts_of(kind, 1024 if kind == "mix" else 8192), batch_size)
        for name, cluster in clusters.items()
    }
    rates: dict[str, list[float]] = {name: [] for name in clusters}
    used: dict[str, dict[str, float]] = {name: {} for name in clusters}
    for number in range(rounds + 1):
        for name in sorted(clusters, reverse=bool(number % 2)):
            before = clusters[name].cpu_s()
            rate = clusters[name].rate(requests[name], clients, seconds, batch_size)
            after = clusters[name].cpu_s()
            if number:  # the first round warms up
                rates[name].append(rate)
                for role, cpu_s in after.items():
                    spent_ms = 1000 * (cpu_s - before[role]) / (rate * seconds * rounds)
                    used[name][role] = used[name].get(role, 0.0) + spent_ms
    return rates, used


def version_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--old", type=Path, required=True, metavar="SIE", help="path of the command `sie` of the other version"
    )
    parser.add_argument(
        "--new",
        type=Path,
        default=Path(sys.executable).with_name("sie"),
        metavar="SIE",
        help="default: this version",
    )


def commands_of(arguments: argparse.Namespace) -> dict[str, Path]:
    """Return version -> path of its command `sie`."""
    return {"new": arguments.new.absolute(), "old": arguments.old.absolute()}


def main() -> None:
    parser = parser_of(__doc__, rounds=5, seconds=5.0, out="versions.md")
    version_options(parser)
    parser.add_argument("--pairs", type=int, default=1000)
    arguments = parser.parse_args()
    say = Report()
    say(
        f"# Two versions beside each other\n\n`python bench/versions.py`, {machine()}, "
        f"Python {platform.python_version()}.\n"
    )
    commands = commands_of(arguments)
    with started(reversed(commands), commands) as clusters:
        times_ms = uvloop.run(latencies(clusters, arguments.pairs // 2))
    with started(commands, commands) as clusters:
        for name, values in uvloop.run(latencies(clusters, arguments.pairs // 2)).items():
            times_ms[name] += values
        difference = [new - old for new, old in zip(times_ms["new"], times_ms["old"], strict=True)]
        say("| one short text, ms | p50 | p90 | p99 |\n|---|---|---|---|")
        for name, values in {**times_ms, "new - old, of each pair": difference}.items():
            say(f"| {name} | {' | '.join(f'{percentile(values, share):.2f}' for share in (0.5, 0.9, 0.99))} |")
        say("\n| texts | clients x texts a request | old, texts/s | new | new / old | CPU of a text, old, ms | new |")
        say("|---|---|---|---|---|---|---|")
        for kind in TARGETS:
            for load in LOADS:
                rates, used = throughput(clusters, kind, load, arguments.rounds, arguments.seconds)
                ratio = statistics.median(new / old for new, old in zip(rates["new"], rates["old"], strict=True))
                spent = {
                    name: ", ".join(f"{role} {ms:.2f}" for role, ms in by_role.items() if ms >= 0.01)
                    for name, by_role in used.items()
                }
                medians = [f"{statistics.median(rates[name]):.0f}" for name in ("old", "new")]
                say(
                    f"| {kind} | {load} | {medians[0]} | {medians[1]} | {ratio:.2f} | {spent['old']} | {spent['new']} |"
                )
    say.save(arguments.out)


if __name__ == "__main__":
    main()
