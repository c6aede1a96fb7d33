"""The Python client against real processes: long lists, a gateway that dies, what a terminal shows, pools, frames."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_adapter import TOKENIZER, vector_of
from numpy.typing import NDArray
from stack import Device, Plan, Stack
from tokenizers import Tokenizer

import sie_client
from sie_client import SIEAsyncClient, SIEClient

MODEL = "toy/one"
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


@pytest.fixture(params=["sync", "async"])
def using(request: pytest.FixtureRequest, stack: Stack) -> Callable[..., Any]:
    """Return `using(function, **options)`, which returns the result of `function(client)`; an asynchronous one is
    awaited.
    """

    def sync(function: Callable[[Any], Any], **options: Any) -> Any:
        with SIEClient(stack.urls[0], **options) as client:
            return function(client)

    def asynchronous(function: Callable[[Any], Any], **options: Any) -> Any:
        async def run() -> Any:
            async with SIEAsyncClient(stack.urls[0], **options) as client:
                return await function(client)

        return asyncio.run(run())

    return sync if request.param == "sync" else asynchronous


def expected(count: int) -> NDArray[np.float32]:
    """Return the vectors of CLIENT's texts, in order."""
    encoded = Tokenizer.from_buffer(TOKENIZER).encode_batch_fast([f"text {number}" for number in range(count)])
    return np.stack([vector_of(encoding.ids) for encoding in encoded])


class Run:
    """CLIENT in a process of its own, with a terminal or a pipe as its standard error. `shown` has the output there so
    far.
    """

    def __init__(
        self, url: str, count: int, path: Path, *, terminal: bool, part_tokens: int = 16_384, concurrency: int = 8
    ) -> None:
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


@pytest.mark.parametrize(
    ("count", "part_tokens", "concurrency"),
    [(4_000, 64, 2), pytest.param(100_000, 16_384, 8, marks=pytest.mark.long)],  # small parts last as long
)
def test_a_long_list_survives_a_gateway_that_is_killed(
    stack: Stack, tmp_path: Path, count: int, part_tokens: int, concurrency: int
) -> None:
    """When a fifth is answered, the only gateway is killed with -9 and started again. All results come in order, once
    each, and the bar goes on.
    """
    path = tmp_path / "vectors.npy"
    run = Run(stack.urls[0], count, path, terminal=True, part_tokens=part_tokens, concurrency=concurrency)
    before = run.wait_until_done(count // 5)
    (gateway,) = stack.gateways
    gateway.kill()
    gateway.start()
    gateway.wait_ready()
    assert before < count, "it was over before the kill"
    check(run)
    assert "waiting for connection" in run.shown
    assert run.done() == count


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_a_long_call_shows_a_bar_on_a_terminal_and_nothing_in_a_pipe(
    stack: Stack, tmp_path: Path, terminal: bool
) -> None:
    """70 parts run one after the other, each a batch of 20 ms: longer than the second after which a bar appears."""
    run = Run(stack.urls[0], 700, tmp_path / "vectors.npy", terminal=terminal, part_tokens=40, concurrency=1)
    check(run)
    assert (run.done(), run.shown.count("\n")) == ((700, 1) if terminal else (0, 0))
    assert terminal or run.shown == ""


def test_a_list_in_parts_equals_its_texts_one_by_one(using: Callable[..., Any]) -> None:
    texts = [f"text {number}" for number in range(40)]
    several = using(lambda client: client.encode(MODEL, texts, part_tokens=16))
    alone = using(lambda client: client.encode(MODEL, texts[7]))
    assert len({result["request_id"] for result in several}) == 8, "five texts of three estimated tokens in each part"
    assert np.allclose([result["dense"] for result in several], expected(40), atol=1e-6)
    assert alone["dense"].tobytes() == several[7]["dense"].tobytes()
    assert several[0]["headers"]["x-sie-worker"] == "w0"


def test_a_server_that_is_not_there_is_told_at_once_to_who_will_not_wait(stack: Stack) -> None:
    with (
        SIEClient("http://127.0.0.1:9", wait_for_capacity=False) as client,
        pytest.raises(sie_client.SIEConnectionError),
    ):
        client.encode(MODEL, "text")


def test_errors_have_their_classes_and_tell_what_to_do(using: Callable[..., Any]) -> None:
    with pytest.raises(sie_client.ModelNotFoundError) as unknown:
        using(lambda client: client.encode("toy/on", "text"))
    assert MODEL in unknown.value.details["suggestions"]
    with pytest.raises(sie_client.InvalidInputError) as wrong:
        using(lambda client: client.encode(MODEL, ["a"] * 30 + [{"text": 5}], part_tokens=16))
    assert (wrong.value.reason, wrong.value.param) == ("schema", "items[30].text"), (
        "the place in the list that was given"
    )
    with pytest.raises(sie_client.PoolNotFoundError):
        using(lambda client: client.encode(MODEL, "text", pool="nowhere"))


def test_what_a_cluster_has_and_does_is_told(using: Callable[..., Any]) -> None:
    assert MODEL in [model["id"] for model in using(lambda client: client.list_models(task="encode", loaded=True))]
    assert using(lambda client: client.list_models(task="extract", loaded=True)) == []
    assert using(lambda client: client.get_model(MODEL))["dims"] == {"dense": 8}
    assert using(lambda client: client.health())["status"] == "healthy"
    assert using(lambda client: client.get_capacity())["worker_count"] == 1
    assert using(lambda client: client.get_capacity("CPU"))["worker_count"] == 1
    assert using(lambda client: client.get_capacity("l4")) == {"worker_count": 0, "gpu_count": 0, "workers": []}
    assert using(lambda client: client.get_scaling("_default.cpu.default"))["ready_workers"] == 1
    assert using(lambda client: client.wait_for_capacity(MODEL))["state"] == "loaded"


def test_pools_are_reserved_and_given_back(stack: Stack) -> None:
    with SIEClient(stack.urls[0]) as client:
        with client.reserve("eval", {"cpu": 1}, ttl_seconds=60) as pool:
            assert (pool["name"], pool["spec"]["gpus"]) == ("eval", {"cpu": 1})
            assert client.renew_pool("eval") >= pool["status"]["expires_at"]
            assert {entry["name"] for entry in client.list_pools()} == {"default", "eval"}
            assert client.create_pool("eval", {"cpu": 2})["spec"]["gpus"] == {"cpu": 2}
            with pytest.raises(sie_client.PoolConflictError):
                client.create_pool("default", {"cpu": 1})
        with pytest.raises(sie_client.PoolNotFoundError):
            client.get_pool("eval")
        with pytest.raises(sie_client.PoolOperationForbiddenError):
            client.delete_pool("default")


def test_frames_are_watched(using: Callable[..., Any]) -> None:
    def two(client: Any) -> Any:
        if isinstance(client, SIEClient):
            watched = client.watch()
            return [next(watched), next(watched)]

        async def found() -> list[Any]:
            watched = client.watch()
            return [await anext(watched), await anext(watched)]

        return found()

    first, second = using(two)
    assert second["timestamp"] > first["timestamp"]
    assert [worker["name"] for worker in first["workers"]] == ["w0"]
