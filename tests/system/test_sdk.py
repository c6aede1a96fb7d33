"""The Python client against real processes: long lists, a gateway that dies, what a terminal shows, pools, frames."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_adapter import TOKENIZER, vector_of
from numpy.typing import NDArray
from stack import Device, Plan, Stack
from tokenizers import Tokenizer

BATCH_MS = 20.0
# encodes numbered texts, prints their count and writes their vectors
CLIENT = """
import sys
import numpy as np
from sie_client import SIEClient

url, count, path, part_tokens, concurrency = sys.argv[1:]
with SIEClient(url, part_tokens=int(part_tokens), concurrency=int(concurrency)) as client:
    results = client.encode("toy/one", [f"text {number}" for number in range(int(count))])
np.save(path, np.stack([result["dense"] for result in results]))
print(len(results), results.usage["total_tokens"])
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("sdk") / "stack", Plan(workers=(Device(batch_ms=BATCH_MS),))) as running:
        yield running
        running.workers[0].sidecar.kill()  # its drain would offer results to the killed gateway for as long as it may


def expected(count: int) -> NDArray[np.float32]:
    """Return the vectors of CLIENT's texts, in order."""
    encoded = Tokenizer.from_buffer(TOKENIZER).encode_batch_fast([f"text {number}" for number in range(count)])
    return np.stack([vector_of(encoding.ids) for encoding in encoded])


class Run:
    """CLIENT in a process of its own, with a terminal or a pipe as its standard error. `shown` has the output there so
    far.
    """

    def __init__(self, url: str, count: int, path: Path, *, terminal: bool, part_tokens: int, concurrency: int) -> None:
        self.count, self.path = count, path
        self.shown = ""
        self._told = threading.Condition()
        reading, writing = pty.openpty() if terminal else os.pipe()
        argv = [sys.executable, "-c", CLIENT, url, str(count), str(path), str(part_tokens), str(concurrency)]
        self.process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=writing, text=True, env={**os.environ, "COLUMNS": "100"}
        )
        os.close(writing)
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()

    def _read(self, reading: int) -> None:
        with open(reading, "rb", buffering=0) as stream:
            while True:
                try:
                    data = stream.read(4096)
                except OSError:  # a terminal reports so that its last writer has closed it
                    data = b""
                with self._told:
                    self.shown += data.decode()
                    self._told.notify_all()
                if not data:
                    return

    def done(self) -> int:
        """Return the last count that the bar showed."""
        counts = re.findall(r"([\d,]+)/" + f"{self.count:,}", self.shown)
        return int(counts[-1].replace(",", "")) if counts else 0

    def wait_until_done(self, count: int, timeout_s: float = 60.0) -> int:
        with self._told:
            assert self._told.wait_for(lambda: self.done() >= count or self.process.poll() is not None, timeout_s), (
                self.shown
            )
            return self.done()

    def result(self, timeout_s: float = 90.0) -> str:
        """Return the output. Raises if the program failed."""
        printed, _ = self.process.communicate(timeout=timeout_s)
        self._reader.join(5)
        assert self.process.returncode == 0, self.shown
        return printed.strip()


def check(run: Run) -> None:
    """Check that the results are complete and in order, and that each text has its own vector and is counted once."""
    texts = [f"text {number}" for number in range(run.count)]
    assert run.result() == f"{run.count} {sum(map(len, texts)) + 2 * run.count}"
    vectors = np.load(run.path)
    assert vectors.shape == (run.count, 8)
    assert np.allclose(vectors, expected(run.count), atol=1e-6)
    assert len(np.unique(vectors, axis=0)) == run.count


def test_a_long_list_survives_a_gateway_that_is_killed(stack: Stack, tmp_path: Path) -> None:
    """When a fifth is answered, the only gateway is killed with -9 and started again. All results come in order, once
    each, and the bar goes on.
    """
    count = 2_500  # in small parts it lasts as long as many more texts
    run = Run(stack.urls[0], count, tmp_path / "vectors.npy", terminal=True, part_tokens=64, concurrency=2)
    before = run.wait_until_done(count // 5)
    (gateway,) = stack.gateways
    gateway.kill()
    gateway.start()
    gateway.wait_ready()
    assert before < count, "it was over before the kill"
    check(run)
    assert "waiting for connection" in run.shown
    assert run.done() == count


def test_a_long_call_shows_nothing_in_a_pipe(stack: Stack, tmp_path: Path) -> None:
    """70 parts run one after the other, each a batch of 20 ms: longer than the second after which a bar appears."""
    run = Run(stack.urls[0], 700, tmp_path / "vectors.npy", terminal=False, part_tokens=40, concurrency=1)
    check(run)
    assert run.shown == ""
