"""Cost of the cluster over its engine, measured side by side in one run.

1. Latency of one short text: in this process (tokenise, forward, pool), then through the cluster, and the difference.
2. Texts per second: the engine alone on token ids (all its lanes, batches within the token budget of the machine
   profile), and the cluster at 64 clients with one text a request and at 8 clients with 32. Both are measured in turn;
   the report has medians and their ratio.
3. Causes of the difference: the engine's rate with batches as small as those of the cluster at 64 x 1 shows the loss by
   smaller batches. The processor time for one text shows the overhead of each process.

Run `make bench`. It writes bench/results/overhead.md.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import httpx
import msgspec
import numpy as np
import psutil
import torch
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from client import closed_loop, connect, percentile, request
from report import Report, in_turn, parser_of
from text_rows import text_rows
from words import texts_of

from sie_adapter.engine.device_threads import DeviceJob
from sie_adapter.engine.engine import AdapterEngine, prepare_process
from sie_cli.serve.ports import free_port
from sie_contracts.settings import load
from sie_contracts.wire import ipc
from sie_runtime.feed import packaged_catalogue
from sie_sidecar.prepare.rows import ModelTokenizer

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
SHORT = "What is deep learning?"
TARGETS = {"mix": (0.85, 0.95), "short": (0.50, 0.50)}


class Alone:
    def __init__(self) -> None:
        prepare_process()
        profile = "cuda" if torch.cuda.is_available() else "cpu"
        settings = load(environ={**os.environ, "SIE_MACHINE_PROFILE": profile}).settings
        self.engine = AdapterEngine(settings)
        self.budget = settings.max_batch_cost
        entry = packaged_catalogue().entries[MODEL]
        resident = self.engine.residency.ensure(MODEL, entry)
        self.precision = resident.describe(0.0).precision
        self.layout = resident.weights.rows["encode"]
        self.tokenizer = ModelTokenizer(resident.weights.tokenizer, entry.max_tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop(5)

    def batch(self, ids: list[np.ndarray]) -> ipc.RunBatch:
        lengths = np.array([len(text_ids) for text_ids in ids], np.int32)
        group = ipc.Group(0, len(ids))
        return ipc.RunBatch(
            "b", MODEL, "encode", lengths.tobytes(), np.concatenate(ids).astype(np.int32).tobytes(), (group,)
        )

    def one(self, text: str) -> None:
        """Tokenise and run one text on the calling thread."""
        (row,) = text_rows(self.tokenizer, [text])
        done = self.engine.execute(self.batch([row.ids]))
        assert isinstance(done, ipc.BatchDone), done

    def batches(self, texts: list[str], most: int = 1 << 30) -> list[ipc.RunBatch]:
        """Tokenise the texts. Return them in order, in batches within the token budget and of at most `most` texts."""
        run_batches: list[ipc.RunBatch] = []
        ids: list[np.ndarray] = []
        for row in text_rows(self.tokenizer, texts):
            if ids and (len(ids) == most or sum(map(len, ids)) + len(row.ids) > self.budget):
                run_batches.append(self.batch(ids))
                ids = []
            ids.append(row.ids)
        return [*run_batches, self.batch(ids)]

    def rate(self, batches: list[ipc.RunBatch], seconds: float) -> float:
        """Return the texts per second of the engine while every lane (device thread) is busy."""
        end_s = time.perf_counter() + seconds
        done = 0
        lock = threading.Lock()
        source = itertools.cycle(batches)

        def lane(_: int) -> None:
            nonlocal done
            while time.perf_counter() < end_s:
                with lock:
                    message = next(source)
                job = DeviceJob(message, lambda _: None)
                self.engine.device_threads.submit(job)
                job.finished.wait()
                with lock:
                    done += len(message.lengths) // 4

        started_s = time.perf_counter()
        with ThreadPoolExecutor(len(self.engine.device_threads)) as pool:
            list(pool.map(lane, range(len(self.engine.device_threads))))
        return done / (time.perf_counter() - started_s)


class Cluster:
    """A running `sie serve` with one loaded model. `sie`: path of the command, which may be that of another version."""

    def __init__(
        self,
        extra: Sequence[str],
        sie: Path = Path(sys.executable).with_name("sie"),  # noqa: B008
        model: str = MODEL,
        environ: Mapping[str, str] | None = None,
        data_dir: Path | None = None,
    ) -> None:
        """`data_dir`: data folder, which stays after `stop`; None for a new one, which is removed."""
        self._model = model
        self.port, self._worker_port, self._folder = free_port(), free_port(), tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name, "log").open("w")  # noqa: SIM115  closed by `stop`
        data_dir = data_dir or Path(self._folder.name, "data")
        argv = [str(sie), "serve", "--port", str(self.port), "--data-dir", str(data_dir), "--no-spare"]
        argv += ["--gateway-metrics-port", "0", "--worker-metrics-port", str(self._worker_port)]
        argv += ["--preload", model, *extra]
        environ = {**os.environ, **(environ or {})}
        self._process = subprocess.Popen(argv, stdout=self._log, stderr=subprocess.STDOUT, env=environ)
        end_s = time.monotonic() + 180  # much longer than a usual start, for a busy machine
        while not self._ready():
            if time.monotonic() > end_s or self._process.poll() is not None:
                raise RuntimeError(Path(self._folder.name, "log").read_text()[-3000:])
            time.sleep(0.1)

    def _ready(self) -> bool:
        try:
            models = httpx.get(f"http://127.0.0.1:{self.port}/v1/models", timeout=2, trust_env=False).json()["data"]
        except (httpx.HTTPError, KeyError, ValueError):
            return False
        return any(model["id"] == self._model and model["loaded"] for model in models)

    def batch_sizes(self) -> tuple[float, float]:
        """Return the numbers of texts and of batches that the worker has run so far."""
        text = httpx.get(f"http://127.0.0.1:{self._worker_port}/metrics", timeout=5, trust_env=False).text
        lines = [
            line.split()
            for line in text.splitlines()
            if line.startswith(("sie_batch_size_sum", "sie_batch_size_count"))
        ]
        texts, batches = (
            sum(float(value) for name, value in lines if name.startswith(f"sie_batch_size_{part}"))
            for part in ("sum", "count")
        )
        return texts, batches

    def cpu_s(self) -> dict[str, float]:
        """Return role -> processor seconds of its processes so far."""
        cpu_by_role: dict[str, float] = {}
        for role, process in self.processes():
            times = process.cpu_times()
            cpu_by_role[role] = cpu_by_role.get(role, 0.0) + times.user + times.system
        return cpu_by_role

    def pss_mib(self) -> dict[str, float]:
        """Return role -> MiB of memory of its processes; a page that n processes share counts 1/n for each (Linux)."""
        pss_by_role: dict[str, float] = {}
        for role, process in self.processes():
            pss_by_role[role] = pss_by_role.get(role, 0.0) + process.memory_full_info().pss / 2**20
        return pss_by_role

    def processes(self) -> Iterator[tuple[str, psutil.Process]]:
        root = psutil.Process(self._process.pid)
        for process in [root, *root.children(recursive=True)]:
            argv = process.cmdline()
            role = "nats-server" if argv[0].endswith("nats-server") else argv[3 if argv[1] == "-m" else 2]
            yield role, process

    def requests(self, texts: list[str], batch_size: int) -> list[bytes]:
        parts = [texts[start : start + batch_size] for start in range(0, len(texts) - batch_size + 1, batch_size)]
        return [request(f"/v1/encode/{MODEL}", msgspec.msgpack.encode({"items": part})) for part in parts]

    def rate(self, requests: list[bytes], clients: int, seconds: float, batch_size: int = 1) -> float:
        """Return texts per second of `clients` clients. Each sends its next request when its last one is answered."""
        loop = closed_loop("127.0.0.1", self.port, requests, clients=clients, seconds=seconds)
        answered, taken_s, _ = uvloop.run(loop)
        return answered * batch_size / taken_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()
        self._folder.cleanup()


async def latency(alone: Alone, cluster: Cluster, pairs: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of one text in this process, and those through the cluster. Values with the same index
    were measured directly one after the other.
    """
    connection = await connect("127.0.0.1", cluster.port)
    (message,) = cluster.requests([SHORT], 1)
    here, there = [], []
    for number in range(pairs + 30):
        started_s = time.perf_counter()
        alone.one(SHORT)
        between_s = time.perf_counter()
        status, body = await connection.send(message)
        ended_s = time.perf_counter()
        if status != 200:
            raise RuntimeError(body[:300])
        if number >= 30:
            here.append((between_s - started_s) * 1000)
            there.append((ended_s - between_s) * 1000)
    connection.close()
    return here, there


def main() -> None:
    parser = parser_of(__doc__, rounds=5, seconds=6.0, out="overhead.md")
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("serve", nargs="*", help="further arguments of `sie serve`, after --")
    arguments = parser.parse_args()
    say = Report()
    with torch.inference_mode(), Alone() as alone, Cluster(arguments.serve) as cluster:
        measure(alone, cluster, arguments, say)
    say.save(arguments.out)


def measure(alone: Alone, cluster: Cluster, arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores"
    say(
        f"# Overhead of the cluster over its engine\n\n`python bench/overhead.py`, {versions}, MiniLM-L6 in "
        f"{alone.precision}.\n"
    )
    here, there = uvloop.run(latency(alone, cluster, arguments.pairs))
    difference = [b - a for a, b in zip(here, there, strict=True)]
    say("| one short text, ms | p50 | p99 |\n|---|---|---|")
    for name, values in (
        ("in this process", here),
        ("through the cluster", there),
        ("difference of each pair", difference),
    ):
        say(f"| {name} | {statistics.median(values):.2f} | {percentile(values, 0.99):.2f} |")
    say(
        f"\nGoals: difference p50 <= 2 ms, p99 <= 5 ms.\n\nTexts per second, median of {arguments.rounds} rounds, each "
        "in turn:\n"
    )
    say(
        "| texts | engine alone | cluster, 64 x 1 | ratio | cluster, 8 x 32 | ratio | goals "
        "|\n|---|---|---|---|---|---|---|"
    )
    for kind, (goal_one, goal_many) in TARGETS.items():
        texts = texts_of(kind, 1024 if kind == "mix" else 8192)
        batches = alone.batches(texts)
        single_requests, many = cluster.requests(texts, 1), cluster.requests(texts, 32)
        runs = {
            "engine": functools.partial(alone.rate, batches, arguments.seconds),
            "single": functools.partial(cluster.rate, single_requests, 64, arguments.seconds),
            "bulk": functools.partial(cluster.rate, many, 8, arguments.seconds, 32),
        }
        engine, single, bulk = in_turn(arguments.rounds, runs).values()
        ratio_one = statistics.median(b / a for a, b in zip(engine, single, strict=True))
        ratio_many = statistics.median(b / a for a, b in zip(engine, bulk, strict=True))
        say(
            f"| {kind} | {statistics.median(engine):.0f} | {statistics.median(single):.0f} | {ratio_one:.2f} "
            f"| {statistics.median(bulk):.0f} | {ratio_many:.2f} | {goal_one:.2f}, {goal_many:.2f} |"
        )
    say("\nCauses of the difference at 64 x 1:\n")
    say(
        "| texts | texts a batch | engine alone, batches of this size | cluster | ratio | ms of CPU for a text "
        "|\n|---|---|---|---|---|---|"
    )
    for kind in TARGETS:
        say(profile(alone, cluster, kind, arguments))


def profile(alone: Alone, cluster: Cluster, kind: str, arguments: argparse.Namespace) -> str:
    """Return a table row: texts of a batch in the cluster, the engine's rate with batches of this size, the cluster's
    rate, the ratio of the two rates, and the processor time of each process for a text.
    """
    texts = texts_of(kind, 1024 if kind == "mix" else 8192)
    single_requests = cluster.requests(texts, 1)
    (texts_before, batches_before), cpu_before = cluster.batch_sizes(), cluster.cpu_s()
    rates = [cluster.rate(single_requests, 64, arguments.seconds) for _ in range(arguments.rounds)]
    (texts_after, batches_after), cpu_after = cluster.batch_sizes(), cluster.cpu_s()
    done = texts_after - texts_before
    size = max(1, round(done / (batches_after - batches_before)))
    engine = statistics.median(
        alone.rate(alone.batches(texts, size), arguments.seconds) for _ in range(arguments.rounds)
    )
    rate = statistics.median(rates)
    cpu = ", ".join(
        f"{role} {1000 * (cpu_after[role] - cpu_before[role]) / done:.2f}" for role in cpu_after if role != "config"
    )
    return f"| {kind} | {size} | {engine:.0f} | {rate:.0f} | {rate / engine:.2f} | {cpu} |"


if __name__ == "__main__":
    main()
