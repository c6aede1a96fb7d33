"""A model on a server of SGLang: start, vectors, death, memory, end. By default `fake_sglang` stands in for the server.
The lane long runs the package itself.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_sglang
import numpy as np
import psutil
import pytest
from parity.checkpoints import ARCHITECTURES, NORMALIZE, add_modules, build, pooling

from sie_adapter.engine import engines
from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.packed.backbone import StateRunner
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.settings import Settings
from sie_contracts.wire.ipc import BatchDone, Group, Refused, RunBatch
from sie_contracts.wire.messages import Failed, Ok, RunOptions
from sie_engines.sglang_server import SGLang

ROOT = Path(__file__).parents[4]
REAL = ROOT / ".venv-sglang" / "bin" / "python"
ENDS_S = 30.0
TEXTS = [[5, 6, 7], [9], list(range(10, 75)), [5, 6, 8], [30] * 17]
BAD_ID = 77


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a Python that runs `fake_sglang` in place of the package."""
    return script(tmp_path_factory.mktemp("python") / "python", f"{sys.executable} {fake_sglang.__file__}")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the Python of `make test-long`. Its kernels for CPUs are not on PyPI, and are not called."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "sgl_kernel").mkdir()
    (folder / "sgl_kernel" / "__init__.py").write_text(
        "def __getattr__(name):\n    if name.startswith('_'):\n        raise AttributeError(name)\n"
        "    def absent(*given, **named):\n        raise NotImplementedError(name)\n    return absent\n"
    )
    return script(folder / "python", f"env PYTHONPATH={folder} {REAL}")


def script(path: Path, command: str) -> str:
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return str(path)


each_python = pytest.mark.parametrize("name", ["fake", pytest.param("real", marks=pytest.mark.long)])


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A model folder, with the states of the model for the fake server."""
    model_folder = add_modules(build(tmp_path / "qwen3", ARCHITECTURES["qwen3 causal"]), [pooling("last"), NORMALIZE])
    states = fake_sglang.LastStates(model_folder)
    yield model_folder
    states.close()


def entry_of(folder: Path, **load: Any) -> ModelEntry:
    return parse_entry(
        {
            "id": "toy/qwen3",
            "weights": {"path": str(folder)},
            "family": "text-encoder",
            "outputs": {"dense": ARCHITECTURES["qwen3 causal"].width},
            "max_tokens": 128,
            "load": {"precision": "float32", "engine": "sglang", **load},
        }
    )


@contextmanager
def engine(python: str | None) -> Iterator[AdapterEngine]:
    adapter = AdapterEngine(Settings(device="cpu", sglang_python=python))
    try:
        yield adapter
    finally:
        assert adapter.stop(10)


def runner_of(adapter: AdapterEngine) -> SGLang:
    with adapter.residency.use("m") as resident:
        runner: StateRunner = resident.weights.backbone._runner  # type: ignore[attr-defined]
    assert isinstance(runner, SGLang)
    return runner


def run(adapter: AdapterEngine, texts: list[list[int]], pooling: str = "", **options: Any) -> BatchDone | Refused:
    lengths, ids = np.array([len(ids) for ids in texts], "<i4"), np.concatenate(texts).astype("<i4")
    group = Group(0, len(texts), RunOptions(**options))
    message = RunBatch("b", "m", "encode", lengths.tobytes(), ids.tobytes(), (group,), pooling=pooling)
    reply = adapter.execute(message)
    assert isinstance(reply, BatchDone | Refused)
    return reply


def vectors(done: BatchDone | Refused) -> np.ndarray:
    assert isinstance(done, BatchDone), done
    return np.frombuffer(done.block, "<f4").reshape(len(done.outcomes), -1)


def until(condition: Callable[[], object], event: str) -> None:
    end_s = time.monotonic() + ENDS_S
    while not condition():
        assert time.monotonic() < end_s, event
        time.sleep(0.02)


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def started(folder: Path) -> list[int]:
    """Return the pids of all processes of all starts of the fake server."""
    return [int(pid) for pid in (folder / "starts").read_text().split()]


@each_python
def test_its_vectors_are_those_of_torch_and_its_processes_end_with_the_model(
    name: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    with engine(None) as stock:
        stock.residency.ensure("m", entry_of(folder, engine="torch"))
        expected, means = vectors(run(stock, TEXTS)), vectors(run(stock, TEXTS, pooling="mean"))
        unscaled = vectors(run(stock, TEXTS, normalize=False))
    with engine(request.getfixturevalue(name)) as adapter:
        weights: Any = adapter.residency.ensure("m", entry_of(folder)).weights
        assert (weights.engine_choice.engine, weights.attention) == ("sglang", "sglang")
        assert weights.certificate["packed"]["dense"] >= 0.9999
        assert weights.memory_bytes > (5e6 if name == "fake" else 100e6), "that of its processes"
        del weights
        done = run(adapter, TEXTS)
        np.testing.assert_allclose(vectors(done), expected, atol=1e-5)
        assert isinstance(done, BatchDone)
        assert done.engine == "sglang"
        for text, vector in zip(TEXTS, expected, strict=True):
            np.testing.assert_allclose(vectors(run(adapter, [text]))[0], vector, atol=1e-5)
        for reply, torch_vectors in (
            (run(adapter, TEXTS, pooling="mean"), means),
            (run(adapter, TEXTS, normalize=False), unscaled),
        ):
            np.testing.assert_allclose(vectors(reply), torch_vectors, atol=1e-5)
            assert isinstance(reply, BatchDone)
            assert reply.engine == "torch"
        pids = [pid for pid in psutil.pids() if runs(pid) and os.getsid(pid) == runner_of(adapter).pid]
        assert len(pids) > 1
        adapter.residency.release("m")
        until(lambda: not any(map(runs, pids)), "the processes of a model that was unloaded")


@each_python
def test_a_server_that_was_killed_is_replaced_for_the_next_batch(
    name: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    with engine(request.getfixturevalue(name)) as adapter:
        adapter.residency.ensure("m", entry_of(folder))
        before, pid = vectors(run(adapter, TEXTS)), runner_of(adapter).pid
        os.kill(pid, signal.SIGKILL)
        np.testing.assert_allclose(vectors(run(adapter, TEXTS)), before, atol=1e-6)
        assert runner_of(adapter).pid != pid
        assert not runs(pid)


def test_a_text_that_ends_it_fails_and_its_mates_do_not(folder: Path, fake: str) -> None:
    with engine(fake) as adapter:
        adapter.residency.ensure("m", entry_of(folder))
        (folder / "dies").write_text(str(BAD_ID))
        expected = vectors(run(adapter, [[5, 6]]))[0]
        done = run(adapter, [[5, BAD_ID], [5, 6]])
        assert isinstance(done, BatchDone)
        failed, fine = done.outcomes
        assert isinstance(failed, Failed)
        assert (failed.error.code, failed.error.reason) == ("INFERENCE_ERROR", "non_finite")
        assert isinstance(fine, Ok)
        np.testing.assert_allclose(np.frombuffer(done.block, "<f4"), expected, atol=1e-6)
        assert len(vectors(run(adapter, TEXTS))) == len(TEXTS)
        assert not any(map(runs, started(folder)[:-2])), "of all but the last server, and its child"


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("refuses", "the server ended with status 1"),
        ("wrong", "the vectors of SGLang and those of the stock path have cosine"),
    ],
)
def test_one_that_does_not_serve_the_model_is_not_used(
    file: str, reason: str, folder: Path, fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / file).touch()
    with engine(fake) as adapter:
        with pytest.raises(ModelLoadFailed, match=rf"load\.engine is sglang: {reason}"):
            adapter.residency.ensure("m", entry_of(folder))
        unasked = replace(engines.rules()["sglang"], unasked=lambda facts: "")
        rules = {"sglang": unasked, "torch": engines.rules()["torch"]}
        monkeypatch.setattr(engines, "rules", lambda: rules)
        weights: Any = adapter.residency.ensure("m", entry_of(folder, engine=None)).weights
        assert weights.engine_choice.engine == "torch"
        assert f"not sglang: {reason}" in weights.engine_choice.reason
        assert len(vectors(run(adapter, TEXTS))) == len(TEXTS)
    if file == "wrong":
        until(lambda: not any(map(runs, started(folder))), "the processes of servers that were not used")


def test_no_other_program_gets_the_port_of_a_server_that_starts(folder: Path, fake: str) -> None:
    """The answers of another server on that port would count as those of SGLang."""
    (folder / "waits").touch()
    with engine(fake) as adapter, ThreadPoolExecutor() as pool:
        loading = pool.submit(adapter.residency.ensure, "m", entry_of(folder))
        until((folder / "starts").exists, "the start")
        until(lambda: started(folder), "the pids")
        arguments = psutil.Process(started(folder)[0]).cmdline()
        try:
            with socket.socket() as second, pytest.raises(OSError, match="in use"):
                second.bind(("127.0.0.1", int(arguments[arguments.index("--port") + 1])))
        finally:
            (folder / "waits").unlink()
        loading.result(ENDS_S)
        assert len(vectors(run(adapter, TEXTS))) == len(TEXTS)


def test_it_ends_with_an_adapter_that_is_killed(folder: Path, fake: str) -> None:
    code = (
        "import sys, torch; from pathlib import Path; from sie_engines.sglang_server import Launch, SGLang;"
        " server = SGLang(Launch(sys.argv[1], Path(sys.argv[2]), torch.float32, torch.device('cpu'), 128, 1));"
        " print(server.pid, flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, fake, str(folder)], **pipes) as adapter:  # type: ignore[call-overload]
        pid = int(adapter.stdout.readline())
        assert runs(pid)
        adapter.kill()
    until(lambda: not runs(pid), "the server of an adapter that was killed")
    for child in started(folder)[1:]:  # the children of the fake server do not notice its end
        os.kill(child, signal.SIGKILL)


def test_the_setting_names_the_environment(folder: Path, fake: str) -> None:
    with engine(None) as adapter, pytest.raises(ModelLoadFailed, match="SIE_SGLANG_PYTHON names no environment"):
        adapter.residency.ensure("m", entry_of(folder))
    with engine(fake) as adapter:
        assert adapter.loader.settings.sglang_python == fake
        adapter.residency.ensure("m", entry_of(folder))
        assert runner_of(adapter).pid == started(folder)[0]
