"""Several models on one worker: copies of MiniLM under other names.

1. Memory: the private memory of the adapter that each further copy takes, and that of each process when all are idle.
2. Rate: texts per second of 32 clients, one short text a request, all to one model, and to all models in turn.
3. Latency: p50 and p99 of a quiet model, which gets a request every 100 ms, beside the clients of 2.

The two loads of 2 and 3 alternate; the report has medians, and the processor time of the adapter for one text. Two
versions run at the same time and are measured in turn; `--old` and `--new`: as in bench/versions.py.

    python bench/many_models.py --old ../before/.venv/bin/sie [--models 8] [--precision float32]
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop

sys.path.insert(0, str(Path(__file__).parent))

from client import Clients, connect, percentile, request
from engine import model_folder
from overhead import SHORT, Cluster
from report import Report, machine, parser_of
from versions import commands_of, version_options
from words import texts_of

from sie_contracts.models.catalogue import packaged_folder

QUIET = "quiet"
CLIENTS = 32
PAUSE_S = 0.1
WARM_UP_S = 2.0


class Sample(NamedTuple):
    """Measurement of one load. `batch`: texts of a batch. `cpu_ms`: processor time of the adapter for one text."""

    rate: float
    p50_ms: float
    p99_ms: float
    batch: float
    cpu_ms: float


def write_entries(folder: Path, names: Sequence[str]) -> None:
    """Write an entry for each name, with the weights of MiniLM."""
    entry = next(packaged_folder().glob("models/**/all-MiniLM-L6-v2.yaml")).read_text()
    for name in names:
        lines = [line for line in entry.splitlines() if not line.startswith(("id:", "golden:"))]
        (folder / f"{name}.yaml").write_text("\n".join([f"id: {name}", *lines]))


def private_mib(cluster: Cluster) -> float:
    """Return the MiB of memory that only the adapter's processes have, without pages of files."""
    adapters = (process for role, process in cluster.processes() if role == "adapter")
    return sum(process.memory_full_info().uss for process in adapters) / 2**20


def encode(model: str, text: str) -> bytes:
    return request(f"/v1/encode/{model}", msgspec.msgpack.encode({"items": [text]}))


async def load(cluster: Cluster, model: str) -> None:
    connection = await connect("127.0.0.1", cluster.port)
    for _ in range(20):
        status, body = await connection.send(encode(model, SHORT))
        if status != 200:
            raise RuntimeError(body[:300])
    connection.close()


async def measured(cluster: Cluster, models: Sequence[str], seconds: float) -> Sample:
    """Measure the clients, whose requests name the models in turn, and the quiet model beside them."""
    texts = itertools.cycle(texts_of("short", 1000))
    requests = (encode(model, next(texts)) for model in itertools.cycle(models))
    clients = Clients("127.0.0.1", cluster.port, requests, count=CLIENTS)
    connection = await connect("127.0.0.1", cluster.port)
    quiet_ms: list[float] = []
    await asyncio.sleep(WARM_UP_S)
    cpu_s, (texts_before, batches_before) = cluster.cpu_s()["adapter"], cluster.batch_sizes()
    began_s = time.perf_counter()
    while time.perf_counter() < began_s + seconds:
        sent_s = time.perf_counter()
        await connection.send(encode(QUIET, SHORT))
        quiet_ms.append(1000 * (time.perf_counter() - sent_s))
        await asyncio.sleep(PAUSE_S)
    ended_s = time.perf_counter()
    cpu_s, (texts_after, batches_after) = cluster.cpu_s()["adapter"] - cpu_s, cluster.batch_sizes()
    connection.close()
    answers = await clients.stop()
    if refused := [answer for answer in answers if answer.status != 200]:
        raise RuntimeError(refused[0].body[:300])
    done = sum(began_s <= answer.ended_s < ended_s for answer in answers)
    return Sample(
        done / (ended_s - began_s),
        percentile(quiet_ms, 0.5),
        percentile(quiet_ms, 0.99),
        (texts_after - texts_before) / max(1.0, batches_after - batches_before),
        1000 * cpu_s / done,
    )


def load_copies(cluster: Cluster, names: Sequence[str]) -> float:
    """Load all models, and return the MiB that a further copy takes."""
    sizes = []
    for name in [QUIET, *names]:
        uvloop.run(load(cluster, name))
        time.sleep(1)
        sizes.append(private_mib(cluster))
    return statistics.median(after - before for before, after in itertools.pairwise(sizes))


def main() -> None:
    parser = parser_of(__doc__, rounds=5, seconds=8.0, out="many_models.md")
    version_options(parser)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--precision", default="bfloat16", choices=("bfloat16", "float32"))
    arguments = parser.parse_args()
    names = [f"copy-{number}" for number in range(arguments.models)]
    say = Report()
    say(f"# Several models on one worker\n\n`python bench/many_models.py --precision {arguments.precision}`,")
    say(f"{machine()}, medians of {arguments.rounds} rounds.\n")
    weights_mib = (model_folder() / "model.safetensors").stat().st_size / 2**20
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        write_entries(Path(folder), [*names, QUIET])
        environ = {"SIE_DEFAULT_COMPUTE_PRECISION": arguments.precision}
        clusters = {
            version: stack.enter_context(Cluster(("--models-dir", folder), command, environ=environ))
            for version, command in commands_of(arguments).items()
        }
        for version, cluster in clusters.items():
            further = load_copies(cluster, names)
            say(f"{version}: a further copy of {weights_mib:.0f} MiB takes {further:.0f}: {further / weights_mib:.2f}.")
            held = ", ".join(f"{role} {mib:.0f}" for role, mib in cluster.pss_mib().items())
            say(f"{version}, {len(names) + 2} models, idle, MiB: {held}.\n")
        kinds = {"one model": names[:1], f"{arguments.models} in turn": names}
        cases = [(version, kind) for version in clusters for kind in kinds]
        samples: dict[tuple[str, str], list[Sample]] = {case: [] for case in cases}
        for number in range(arguments.rounds):
            for version, kind in cases[:: -1 if number % 2 else 1]:
                samples[version, kind].append(uvloop.run(measured(clusters[version], kinds[kind], arguments.seconds)))
    say("| version, requests to | texts/s | quiet p50 ms | quiet p99 ms | texts a batch | adapter, CPU ms a text |")
    say("|---|---|---|---|---|---|")
    for (version, kind), taken in samples.items():
        rate, p50_ms, p99_ms, batch, cpu_ms = (statistics.median(values) for values in zip(*taken, strict=True))
        say(f"| {version}, {kind} | {rate:.0f} | {p50_ms:.1f} | {p99_ms:.1f} | {batch:.1f} | {cpu_ms:.2f} |")
    say.save(arguments.out)


if __name__ == "__main__":
    main()
