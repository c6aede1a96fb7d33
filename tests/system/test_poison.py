"""One input among many ends the process that runs it, with the real adapter, the parent that forks it and a real
nats-server.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
import pytest
from cluster import Cluster, running
from fake_adapter import TOKENIZER

pytestmark = pytest.mark.serial

MODEL = "mortal/one"
DEADLY = "the text that ends its process"
CLIENTS = 32
# the promise, from each death to the next answer: 0.33 s and 0.25 s on 2 cores under a load of 10; 3x is the test's
# margin
BACK_S = 1.0
LESS = 0.05  # the promise, of throughput outside the restarts; 3x as well
_logger = logging.getLogger("tests.poison")
FAMILY = '''
import hashlib, os
import numpy as np
from sie_contracts.ipc import Rows

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
    """Each text as a request of its own, by CLIENTS clients that take the next one when they are answered."""
    numbers = iter(range(len(texts)))
    answers: list[Answer] = []

    async def client(http: httpx.AsyncClient) -> None:
        for number in numbers:
            answer = await http.post(f"{url}/v1/encode/{MODEL}", json={"items": [texts[number]]})
            answers.append(Answer(number, time.monotonic(), answer.status_code, answer.json()))

    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=CLIENTS), trust_env=False) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
    return answers


async def run_with_one_poison(cluster: Cluster, count: int) -> tuple[list[float], float, float]:
    """Check every answer. Returns the longest silences, and the requests a second before the first death and after the
    second.
    """
    texts = [f"text number {number}" for number in range(count)]
    await send_all(cluster.url, texts[:200])
    texts[count // 2] = DEADLY
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
    gaps = sorted(((after - before, before, after) for before, after in pairwise(ended)), reverse=True)[:2]
    first_s, last_s = min(gap[1] for gap in gaps), max(gap[2] for gap in gaps)
    before = sum(1 for each in ended if each <= first_s) / (first_s - ended[0])
    after = sum(1 for each in ended if each > last_s) / (ended[-1] - last_s)
    measured = [gap[0] for gap in gaps], before, after
    assert max(measured[0]) < 3 * BACK_S, report(*measured)
    assert len([line for line in cluster.lines if "adapter ready on" in line]) == 3
    assert len(cluster.pids("adapter")) == 2  # the parent has been the same all along
    return measured


def report(gaps: list[float], before: float, after: float) -> str:
    silences = ", ".join(f"{gap:.2f} s" for gap in gaps)
    return f"silences {silences}; {before:.0f} requests/s before, {after:.0f} after"


@pytest.mark.timeout(300)
async def test_one_input_of_2000(cluster: Cluster) -> None:
    """L4. A few seconds on each side are too short for more than a look at the rates."""
    gaps, before, after = await run_with_one_poison(cluster, 2000)
    _logger.info("%s", report(gaps, before, after))
    assert after > before / 2, report(gaps, before, after)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_one_input_of_10000(cluster: Cluster) -> None:
    """L4, at its full size: long enough for the rates on both sides to be compared."""
    gaps, before, after = await run_with_one_poison(cluster, 10_000)
    _logger.info("%s", report(gaps, before, after))
    assert after > (1 - 3 * LESS) * before, report(gaps, before, after)
