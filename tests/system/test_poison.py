"""One input among many ends the process that runs it, with the real adapter, the parent that forks it and a real
nats-server.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from cluster import Cluster, running, until
from fake_adapter import TOKENIZER

MODEL = "mortal/one"
DEADLY = "the text that ends its process"
CLIENTS = 32
# the promise, from each death to the next answer: 0.33 s and 0.25 s on 2 cores under a load of 10; 3x is the test's
# margin
BACK_S = 1.0
LESS = 0.05  # the promised bound of work lost per second of processor time, restarts excluded; the margin is 3x too
SAMPLE_S = 0.25
WARM = 64  # requests before those that are measured
_logger = logging.getLogger("tests.poison")
FAMILY = '''
import hashlib, os
import numpy as np
from sie_contracts.wire.ipc import Rows

class Mortal:
    """The digest of a text as its vector; one text ends the process."""

    rows = {{"encode": Rows("raw")}}
    precision, attention, max_tokens, memory_bytes = "float32", "none", 512, 1 << 20

    def __init__(self, folder, entry, load, compute):
        self.tokenizer = (folder / "tokenizer.json").read_bytes()

    def encode(self, texts, options):
        if {deadly!r} in texts:
            os._exit(86)
        digests = [hashlib.sha256(text.encode()).digest() for text in texts]
        return [{{"dense": np.frombuffer(digest[:8], np.uint8).astype(np.float32)}} for digest in digests]
'''


def vector_of(text: str) -> np.ndarray:
    raw = np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.uint8).astype(np.float32)
    return raw / np.linalg.norm(raw)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """`sie serve` with a family of an installed package."""
    site, models, weights = tmp_path / "site", tmp_path / "models", tmp_path / "weights"
    about = site / "mortal-0.1.0.dist-info"
    for folder in (about, models, weights):
        folder.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mortal\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text("[sie.adapters]\nmortal = mortal:Mortal\n")
    (site / "mortal.py").write_text(FAMILY.format(deadly=DEADLY))
    (weights / "tokenizer.json").write_bytes(TOKENIZER)
    entry = {
        "id": MODEL,
        "license": "mit",
        "weights": {"path": str(weights)},
        "family": "mortal",
        "outputs": {"dense": 8},
        "max_tokens": 512,
    }
    (models / "mortal.yaml").write_text(json.dumps(entry))
    environ = {"PYTHONPATH": str(site), "SIE_MODELS_DIR": str(models)}
    with running(tmp_path / "data", "--preload", MODEL, environ=environ) as cluster:
        yield cluster


@dataclass
class Answer:
    number: int
    ended_s: float
    status: int
    body: dict[str, object]


async def send_all(url: str, texts: list[str]) -> list[Answer]:
    """Send each text as a request of its own, by CLIENTS clients that take the next text when they are answered."""
    numbers = iter(range(len(texts)))
    answers: list[Answer] = []

    async def client(http: httpx.AsyncClient) -> None:
        for number in numbers:
            answer = await http.post(f"{url}/v1/encode/{MODEL}", json={"items": [texts[number]]})
            answers.append(Answer(number, time.monotonic(), answer.status_code, answer.json()))

    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=CLIENTS), trust_env=False) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
    return answers


@dataclass
class Sample:
    """Processor seconds by process, at a moment. `worker`: sidecar and adapters."""

    at_s: float
    worker: dict[int, float]
    gateway: dict[int, float]


def sample(cluster: Cluster) -> Sample:
    def used_s(*roles: str) -> dict[int, float]:
        seconds = {}
        for pid in (pid for role in roles for pid in cluster.pids(role)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = psutil.Process(pid).cpu_times()
                seconds[pid] = times.user + times.system
        return seconds

    return Sample(time.monotonic(), used_s("sidecar", "adapter"), used_s("gateway"))


@contextlib.asynccontextmanager
async def sampled(cluster: Cluster) -> AsyncIterator[list[Sample]]:
    """Take a sample every SAMPLE_S until the end of the block."""
    samples = [await asyncio.to_thread(sample, cluster)]

    async def run() -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            samples.append(await asyncio.to_thread(sample, cluster))

    task = asyncio.create_task(run())
    try:
        yield samples
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def share_of_gateway(samples: list[Sample]) -> float:
    """Return the worker's processor seconds for each of the gateway's, from the first sample to the last. No process
    came or went between these.

    A busy machine makes a second of wall time bring less, and a second of processor time as well (shared cores and
    caches). It does so to both: the gateway does the same for each request whatever happens to adapters. At a load of 6
    on 2 cores, of windows of 10 s, requests a second were 79 to 139, and this was 1.11 to 1.24.
    """
    assert len(samples) > 1, "too few samples"

    def used_s(first: dict[int, float], last: dict[int, float]) -> float:
        return sum(seconds - first.get(pid, 0.0) for pid, seconds in last.items())

    first, last = samples[0], samples[-1]
    return used_s(first.worker, last.worker) / used_s(first.gateway, last.gateway)


async def run_with_one_poison(cluster: Cluster, count: int) -> tuple[list[float], float, float]:
    """Check every answer. Returns the longest silences, and the `share_of_gateway` before the first death and after the
    second.
    """
    texts = [f"text number {number}" for number in range(count)]
    await send_all(cluster.url, texts[:WARM])
    texts[count // 2] = DEADLY
    async with sampled(cluster) as samples:
        answers = await send_all(cluster.url, texts)
    assert len(answers) == count
    for answer in answers:
        if answer.number == count // 2:
            error = answer.body["error"]
            assert isinstance(error, dict)
            assert (answer.status, error["code"], error["reason"]) == (500, "INFERENCE_ERROR", "poison")
            continue
        assert answer.status == 200, answer.body
        values = answer.body["items"][0]["dense"]["values"]  # type: ignore[index]
        np.testing.assert_allclose(values, vector_of(texts[answer.number]), atol=1e-6)
    deaths = [line for line in cluster.lines if "ended with status 86" in line]
    assert len(deaths) == 2, deaths
    assert cluster.metric("sie_poisoned_inputs_total") == 1
    ended = sorted(answer.ended_s for answer in answers)
    gaps = sorted((after - before for before, after in pairwise(ended)), reverse=True)[:2]
    # not by the longest silences: on a busy machine these need not be those of the deaths
    before = share_of_gateway([entry for entry in samples if entry.worker.keys() == samples[0].worker.keys()])
    after = share_of_gateway([entry for entry in samples if entry.worker.keys() == samples[-1].worker.keys()])
    measured = gaps, before, after
    assert min(measured[0]) < 3 * BACK_S, report(*measured)  # the other one may have met a machine that stood still
    until(lambda: sum("adapter ready on" in line for line in cluster.lines) == 3, 10, "the log names each adapter")
    assert len(cluster.pids("adapter")) == 2  # the parent has been the same all along
    return measured


def report(gaps: list[float], before: float, after: float) -> str:
    silences = ", ".join(f"{gap:.2f} s" for gap in gaps)
    share = f"{before:.2f} before, {after:.2f} after"
    return f"silences {silences}; processor seconds of the worker for one of the gateway: {share}"


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_one_input_of_10000(cluster: Cluster) -> None:
    """The run is long enough to compare what requests cost before and after the deaths."""
    gaps, before, after = await run_with_one_poison(cluster, 10_000)
    _logger.info("%s", report(gaps, before, after))
    assert (1 - 3 * LESS) * after < before, report(gaps, before, after)
