"""Start of a cluster, of two installed versions in turn: time and processor time until the first answer, then idle use.

    python bench/start.py --old ../before/.venv/bin/sie

Each round starts each version twice with MiniLM. The first start has an empty data folder and an empty cache of
weights (MiniLM comes from an installed package); the second start has the folders that the first one left. `--old` and
`--new`: as in bench/versions.py. The script writes bench/results/start.md.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import uvloop

sys.path.insert(0, str(Path(__file__).parent))

from client import connect
from overhead import SHORT, Cluster
from report import Report, machine, parser_of
from versions import commands_of, version_options

STARTS = ("first", "second")


class Start(NamedTuple):
    """One start. Values by role of the process: `cpu_s` processor seconds until the first answer, `idle_percent` of a
    core, `pss_mib` of memory. `first_answer_s`: seconds from the start of `sie serve` to the first answer.
    """

    first_answer_s: float
    cpu_s: Mapping[str, float]
    idle_percent: Mapping[str, float]
    pss_mib: Mapping[str, float]


async def _answer(cluster: Cluster) -> None:
    connection = await connect("127.0.0.1", cluster.port)
    status, body = await connection.send(cluster.requests([SHORT], 1)[0])
    connection.close()
    if status != 200:
        raise RuntimeError(body[:300])


def measured(command: Path, folder: Path, settle_s: float, seconds: float) -> Start:
    """Start a cluster with the data in `folder`. Wait `settle_s` after the first answer, then measure idle use."""
    began_s = time.perf_counter()
    environ = {"SIE_LOCAL_CACHE": str(folder / "cache")}
    with Cluster((), command, environ=environ, data_dir=folder / "data") as cluster:
        uvloop.run(_answer(cluster))
        first_answer_s, cpu_s = time.perf_counter() - began_s, cluster.cpu_s()
        time.sleep(settle_s)
        before, idle_s = cluster.cpu_s(), time.perf_counter()
        time.sleep(seconds)
        after, idle_s = cluster.cpu_s(), time.perf_counter() - idle_s
        idle_percent = {role: 100 * (used - before[role]) / idle_s for role, used in after.items()}
        return Start(first_answer_s, cpu_s, idle_percent, cluster.pss_mib())


def rows(title: str, old: Sequence[Mapping[str, float]], new: Sequence[Mapping[str, float]]) -> list[str]:
    """Return rows of a table: the medians of each role, and of the sums over all roles."""
    sums = [[{**values, "all": sum(values.values())} for values in version] for version in (old, new)]
    lines = []
    for role in sums[1][0]:
        before, now = (statistics.median(values.get(role, 0.0) for values in version) for version in sums)
        lines.append(f"| {title}, {role} | {before:.2f} | {now:.2f} | {now / before if before else 0:.2f} |")
    return lines


def main() -> None:
    parser = parser_of(__doc__, rounds=3, seconds=10.0, out="start.md")
    version_options(parser)
    parser.add_argument("--settle", type=float, default=5.0, help="seconds between the first answer and idle")
    arguments = parser.parse_args()
    commands = commands_of(arguments)
    starts: dict[tuple[str, str], list[Start]] = {(name, start): [] for name in commands for start in STARTS}
    for number in range(arguments.rounds):
        for name in sorted(commands, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory() as folder:
                for start in STARTS:
                    starts[name, start].append(
                        measured(commands[name], Path(folder), arguments.settle, arguments.seconds)
                    )
    say = Report()
    say(f"# Start of a cluster\n\n`python bench/start.py`, {machine()}, medians of {arguments.rounds} rounds.\n")
    say("| | old | new | new / old |\n|---|---|---|---|")
    for start in STARTS:
        old, new = starts["old", start], starts["new", start]
        walls = [[{"s": one.first_answer_s} for one in version] for version in (old, new)]
        say(rows(f"{start} start, first answer", *walls)[0])
        for title, field in (("CPU s", "cpu_s"), ("idle %", "idle_percent"), ("PSS MiB", "pss_mib")):
            if start == "second" or field == "cpu_s":
                values = [[getattr(one, field) for one in version] for version in (old, new)]
                for line in rows(f"{start} start, {title}", *values):
                    say(line)
    say.save(arguments.out)


if __name__ == "__main__":
    main()
