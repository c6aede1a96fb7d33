"""Speed of a job (batch encoding of a file), compared with other ways to encode the same texts, measured in turn.

1. Texts a second of the engine alone on token ids (all its lanes, batches within the token budget), of 8 clients with
   32 texts a request, and of a job from its start to its end. Medians, and ratios.
2. One interactive request a second: its latency with and without the job, and the job's rate with and without the
   requests. Bound of the latency (docs/queue.md): twice the p99 without the job plus the time of
   SIE_RUST_PIPELINE_DEPTH batches of the largest size.
3. `client.embed` over an iterator of texts, compared with a job over them: texts a second, and the peak memory of the
   client's process without the returned array, for all texts and for a fifth of them.

    python bench/jobs.py [--texts 4000 --rounds 3 --embed-texts 100000]
    python bench/jobs.py --embed-only [--rounds 3 --embed-texts 100000]     only part 3, on MiniLM-L6
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from client import percentile
from overhead import MODEL, SHORT, Alone, Cluster
from report import Report, machine, parser_of
from stack import Device, Plan, Stack
from words import texts_of

GOALS = (
    "goals: the rate of a job is at least 0.95 of the engine alone, 1.3 of 8 clients x 32 texts, and 0.80 of its own "
    "rate while requests come"
)
EMBED_GOALS = "goals: embed at least 0.95 of a job, and no more memory for five times the texts"
# Script of a client process. It prints texts a second, and the peak memory of the call in bytes: the peak of the
# process minus the memory before the call and minus the size of the returned array.
EMBED = """
import json, sys, threading, time
import psutil
from sie_client import SIEClient

url, model, file, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
client, me, peak = SIEClient(url, progress=False), psutil.Process(), 0
client.embed(model, ["warm"])
before, ended = me.memory_info().rss, threading.Event()

def watch():
    global peak
    while not ended.wait(0.02):
        peak = max(peak, me.memory_info().rss)

watching = threading.Thread(target=watch)
watching.start()
with open(file) as lines:
    began_s = time.perf_counter()
    rows = client.embed(model, (json.loads(line) for line, _ in zip(lines, range(count))))
    seconds = time.perf_counter() - began_s
ended.set()
watching.join()
assert len(rows) == count
print(json.dumps([count / seconds, peak - before - rows.nbytes]))
"""
DEPTH = 2  # SIE_RUST_PIPELINE_DEPTH
STEADY = Device(batch_ms=2.0, token_us=100.0)  # a simulated device that needs little processor time
TOY = "toy/one"


class Jobs:
    """Jobs of a gateway over one uploaded file of texts."""

    def __init__(self, url: str, texts: list[str], model: str = MODEL) -> None:
        self._client = httpx.Client(base_url=url, timeout=60, trust_env=False)
        self._model = model
        rows = b"".join(json.dumps({"t": text}).encode() + b"\n" for text in texts)
        form = {"files": {"file": ("t.jsonl", rows)}, "data": {"purpose": "jobs"}}
        self._file = self._client.post("/v1/files", **form).raise_for_status().json()["id"]
        self._count = len(texts)

    def rate(self) -> float:
        """Run one job and return its texts a second. Raise RuntimeError if a text failed."""
        body = {"model": self._model, "input": {"file": self._file, "text": "{t}"}}
        job = self._client.post("/v1/jobs", json=body).raise_for_status().json()["id"]
        while True:
            status = self._client.get(f"/v1/jobs/{job}").json()
            if status["state"] in ("completed", "failed", "paused"):
                break
            time.sleep(0.02)
        if status["counts"]["done"] != self._count or status["counts"]["failed"]:
            raise RuntimeError(status)
        return self._count / (status["ended_at"] - status["started_at"])


class Interactive(threading.Thread):
    """A thread that sends one request a second until `ended`, and records `latencies_ms`."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.latencies_ms: list[float] = []
        self.ended = threading.Event()
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)

    def run(self) -> None:
        while not self.ended.is_set():
            began_s = time.perf_counter()
            self._client.post(f"/v1/encode/{MODEL}", json={"items": [SHORT]}).raise_for_status()
            self.latencies_ms.append(1000 * (time.perf_counter() - began_s))
            self.ended.wait(max(0.0, 1.0 - (time.perf_counter() - began_s)))


def main() -> None:
    parser = parser_of(__doc__, rounds=3, seconds=6.0)
    parser.add_argument("--texts", type=int, default=4000)
    parser.add_argument("--embed-texts", type=int, default=100_000)
    parser.add_argument("--embed-only", action="store_true", help="measure only `client.embed`, on MiniLM-L6")
    options = parser.parse_args()
    say = Report()
    if options.embed_only:
        say(f"# client.embed\n\n`python bench/jobs.py --embed-only`, {machine()}, MiniLM-L6.")
        with Cluster(()) as cluster:
            embed_many(cluster, options, say)
        say.save(options.out)
        return
    texts = texts_of("mix", options.texts)
    with torch.inference_mode(), Alone() as alone, Cluster(()) as cluster:
        measure(alone, cluster, texts, options, say)
        say("\nOn MiniLM-L6:")
        embed_many(cluster, options, say)
    measure_steady(options, say)
    say.save(options.out)


def measure(alone: Alone, cluster: Cluster, texts: list[str], options: argparse.Namespace, say: Report) -> None:
    say(f"# Jobs\n\n`python bench/jobs.py`, {machine()}, Python {platform.python_version()}, MiniLM-L6 in ")
    say(f"{alone.precision}, {len(texts):,} texts of 87 tokens in the mean, {options.rounds} rounds; {GOALS}.\n")
    jobs = Jobs(f"http://127.0.0.1:{cluster.port}", texts)
    batches, requests = alone.batches(texts), cluster.requests(texts, 32)
    rates: dict[str, list[float]] = {name: [] for name in ("engine", "clients", "job", "job beside requests")}
    quiet_ms: list[float] = []
    beside_ms: list[float] = []
    alone.rate(batches, 1.0)
    jobs.rate()
    for _ in range(options.rounds):
        rates["engine"].append(alone.rate(batches, options.seconds))
        rates["clients"].append(cluster.rate(requests, 8, options.seconds, 32))
        rates["job"].append(jobs.rate())
        for latencies, work in ((quiet_ms, None), (beside_ms, jobs.rate)):
            asking = Interactive(cluster.port)
            asking.start()
            if work is None:
                time.sleep(options.seconds)
            else:
                rates["job beside requests"].append(work())
            asking.ended.set()
            asking.join(60)
            latencies.extend(asking.latencies_ms)
    medians = {name: statistics.median(samples) for name, samples in rates.items()}
    say("| way | texts/s | of the engine |")
    say("|---|--:|--:|")
    for name, rate in medians.items():
        say(f"| {name} | {rate:.0f} | {rate / medians['engine']:.2f} |")
    say(f"\nJob to 8 x 32: {medians['job'] / medians['clients']:.2f}. ")
    say(
        f"The job beside one request a second to the job alone: {medians['job beside requests'] / medians['job']:.2f}. "
    )
    tokens = sum(len(batch.ids) // 4 for batch in batches) / len(texts)
    batch_ms = 1000 * alone.budget / (medians["job"] * tokens / len(alone.engine.device_threads))
    bound_ms = 2 * percentile(quiet_ms, 0.99) + DEPTH * batch_ms
    say(f"Bound of the p99 of a request beside a job: {bound_ms:.0f} ms; a full batch takes {batch_ms:.0f} ms.")
    say("\n| one short text, ms | p50 | p99 | requests |")
    say("|---|--:|--:|--:|")
    for name, times_ms in (("nothing beside it", quiet_ms), ("a job beside it", beside_ms)):
        say(f"| {name} | {statistics.median(times_ms):.1f} | {percentile(times_ms, 0.99):.1f} | {len(times_ms)} |")


def embed_many(cluster: Cluster, options: argparse.Namespace, say: Report) -> None:
    url = f"http://127.0.0.1:{cluster.port}"
    measure_embed(url, MODEL, texts_of("mix", options.embed_texts), options.rounds, say)


def measure_embed(url: str, model: str, texts: list[str], rounds: int, say: Report) -> None:
    """Measure `client.embed` in a child process, and a job over the same texts, in turn."""
    rates: dict[str, list[float]] = {"embed": [], "job": []}
    memory: dict[int, list[float]] = {len(texts) // 5: [], len(texts): []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts.jsonl"
        file.write_text("".join(json.dumps(text) + "\n" for text in texts))
        jobs = Jobs(url, texts, model)
        for _ in range(rounds):
            for count, peaks in memory.items():
                argv = [sys.executable, "-c", EMBED, url, model, str(file), str(count)]
                done = subprocess.run(argv, capture_output=True, text=True, check=True)
                rate, peak = json.loads(done.stdout)
                peaks.append(peak / 1e6)
                if count == len(texts):
                    rates["embed"].append(rate)
            rates["job"].append(jobs.rate())
    medians = {name: statistics.median(samples) for name, samples in rates.items()}
    say(f"\n`client.embed` of {len(texts):,} texts, {rounds} rounds; {EMBED_GOALS}:")
    say(
        f"{medians['embed']:.0f} texts/s, a job {medians['job']:.0f}, {medians['embed'] / medians['job']:.2f}; "
        "load average "
    )
    say(f"{os.getloadavg()[1]:.1f}.")
    for count, peaks in memory.items():
        say(f"Memory beside the array for {count:,} texts: {statistics.median(peaks):.0f} MB. ")


def measure_steady(options: argparse.Namespace, say: Report) -> None:
    """Measure `client.embed` and a job on a simulated device. Other load of this machine does not change the speed of
    this device.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "stack").mkdir()
        environ = {"SIE_PAYLOAD_STORE_URL": f"{folder}/payloads"}
        with Stack(Path(folder) / "stack", Plan(workers=(STEADY,), environ=environ)) as stack:
            say(f"\nOn a device that takes {STEADY.batch_ms} ms for a batch and {STEADY.token_us} us for a token:")
            texts = [f"short {number}" for number in range(options.embed_texts)]
            measure_embed(stack.urls[0], TOY, texts, options.rounds, say)


if __name__ == "__main__":
    main()
