"""SGLang server of one model: a separate process on loopback, which ends when the model is unloaded or evicted.

    load ──► a process in the environment of SIE_SGLANG_PYTHON ──► ready ──► ids of texts ──► last states, normalised
                                         └──► the process ended or hangs ──► a new process, at most one per batch

The process is separate because SGLang needs its own versions of torch and transformers, and because some inputs crash
SGLang. `engine` already refuses one kind of these inputs, ids beyond the table of embeddings. Source: the server's HTTP
interface, version 0.5.23 (`/v1/embeddings`, `/ready`).
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import httpx
import msgspec
import numpy as np
import psutil
import torch
from torch import Tensor

from sie_adapter.engine.engines import EngineFacts, EngineLoad, NotServed, Rule, in_int8, reads_more
from sie_adapter.packed.packing import Float32, Int64, PackedBatch
from sie_contracts.errors import UNDECODABLE, InferenceFailed
from sie_contracts.wire.ipc import RunBatch
from sie_engines.settings import SglangSettings

# model classes for which SGLang's vector of a text is the state of its last token
ARCHITECTURES = (
    "Qwen3ForCausalLM",
    "Qwen3Model",
    "Qwen2ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MistralModel",
)
# seconds within which a started server must be ready; imports and reading of weights take minutes on a busy machine
START_S = 300.0
RUN_S = 120.0  # a server that has not answered a batch after these seconds is replaced
_LOOK_S = 0.1  # seconds between two checks whether the server is ready
_POOL_TOKENS = 16_384  # smallest size of the server's KV cache, in tokens; a text waits until the cache has room for it
# Environment variables that the process inherits. No other variable is passed on, because it may be secret.
_KEPT = (
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LD_LIBRARY_PATH",
    "TMPDIR",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "NVIDIA_VISIBLE_DEVICES",
)
# Python program that becomes SGLang by exec. The kernel kills this process when the adapter's thread that started the
# process ends (prctl(2), which stays in force after exec).
_BOOT = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL);"
    " os.getppid() == int(sys.argv[1]) or os._exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)
_logger = logging.getLogger("sie.adapter")


class SglangNotStarted(NotServed):
    """Raised if a server did not become ready. The message has the reason."""


class _SglangLost(Exception):
    """Raised if a server does not reply to a batch, or its reply is not valid."""


class _SglangVector(msgspec.Struct):
    embedding: str
    index: int


class _SglangVectors(msgspec.Struct):
    data: list[_SglangVector]


@dataclass(frozen=True)
class Launch:
    """Launch arguments of a server. `python`: interpreter of SGLang's environment. `threads`: number of threads of
    OpenMP, if the device is a CPU.
    """

    python: str
    folder: Path
    dtype: torch.dtype
    device: torch.device
    max_tokens: int
    threads: int

    def arguments(self, port: int) -> list[str]:
        where = ["--attention-backend", "torch_native"] if self.device.type == "cpu" else []
        if self.device.index:
            where += ["--base-gpu-id", str(self.device.index)]
        options = {
            "--model-path": str(self.folder),
            "--device": self.device.type,
            "--dtype": str(self.dtype).removeprefix("torch."),
            "--host": "127.0.0.1",
            "--port": str(port),
            # one more than max_tokens, because SGLang accepts only texts that are shorter than this length
            "--context-length": str(self.max_tokens + 1),
            "--max-total-tokens": str(max(_POOL_TOKENS, 2 * self.max_tokens)),
            "--log-level": "error",
        }
        switches = ["--is-embedding", "--disable-radix-cache", "--skip-tokenizer-init"]
        named = itertools.chain.from_iterable(options.items())
        return [self.python, "-m", "sglang.launch_server", *named, *switches, *where]

    def environment(self) -> dict[str, str]:
        inherited = {name: os.environ[name] for name in _KEPT if name in os.environ}
        own = {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        }
        on_cpu = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(self.threads), "CUDA_VISIBLE_DEVICES": ""}
        return {**inherited, **own, **(on_cpu if self.device.type == "cpu" else {})}


class SGLang:
    """Engine that computes normalised last states of texts with an SGLang server. Several threads may call `run` at
    once. `memory_bytes`: device memory that the server's processes used when they were ready.
    """

    attention = "sglang"

    def __init__(self, launch: Launch) -> None:
        """Start the server and return when it is ready. Raises SglangNotStarted."""
        self._launch = launch
        self._lock = threading.Lock()
        self._width = 0
        # the kernel kills the server when the thread that started it ends, so a thread of this executor starts it
        self._thread = ThreadPoolExecutor(1, "sglang")
        # A list that contains the one server in use. The finalizer below runs after this object was freed, when it
        # cannot read the object's attributes, so it gets the list as an argument.
        self._servers: list[_SglangProcess] = []
        self._end = weakref.finalize(self, _end, self._servers, self._thread)
        self._start()
        self.memory_bytes = self._servers[0].memory_bytes()

    @property
    def pid(self) -> int:
        return self._servers[0].pid

    def places(self, packed: PackedBatch) -> Int64:
        """Return the indices of the last token of each text, whose states `run` computes; other states are zero."""
        return packed.bounds[1:].astype(np.int64) - 1

    def trials(self, packed: PackedBatch) -> Iterator[tuple[Tensor, Int64]]:
        yield self.run(packed), self.places(packed)

    def close(self) -> None:
        """End the server. Do not call this during a pass. The server also ends when this object is freed."""
        self._end()

    def run(self, packed: PackedBatch) -> Tensor:
        """Return states, float32 [tokens, width], in packed order. The states are NaN if two servers in a row failed on
        the batch: the caller then runs each text alone, to find the text that causes the failures. Raises
        InferenceFailed if no new server starts, or if two servers failed before any batch succeeded.
        """
        texts = [packed.ids[start:stop].tolist() for start, stop in itertools.pairwise(packed.bounds.tolist())]
        vectors = self._embedded(texts)
        self._width = vectors.shape[1]
        states = torch.zeros((len(packed.ids), vectors.shape[1]), device=self._launch.device)
        states[torch.from_numpy(self.places(packed)).to(states.device)] = torch.from_numpy(vectors).to(states.device)
        return states

    def _embedded(self, texts: Sequence[Sequence[int]]) -> Float32:
        server = self._servers[0]
        try:
            return server.embed(texts)
        except _SglangLost as error:
            _logger.warning("the SGLang server (process %d) is replaced: %s", server.pid, error)
        try:
            return self._successor(server).embed(texts)
        except SglangNotStarted as error:
            raise InferenceFailed("the SGLang server of the model cannot be started again") from error
        except _SglangLost as error:
            if not self._width:
                raise InferenceFailed("the SGLang server of the model does not answer") from error
            _logger.warning("two SGLang servers in a row failed on the same batch, of %d texts: %s", len(texts), error)
            return np.full((len(texts), self._width), np.nan, np.float32)

    def _successor(self, lost: _SglangProcess) -> _SglangProcess:
        """Return the server that replaces `lost`; the first caller starts the new server. Raises SglangNotStarted."""
        with self._lock:
            if self._servers[0] is lost:
                lost.end()
                self._start()
            return self._servers[0]

    def _start(self) -> None:
        self._servers[:] = [self._thread.submit(_SglangProcess, self._launch).result()]


def _end(servers: Sequence[_SglangProcess], thread: ThreadPoolExecutor) -> None:
    for server in servers:
        server.end()
    thread.shutdown(wait=False)


class _SglangProcess:
    """SGLang server process and its children, which are all in one session (setsid)."""

    def __init__(self, launch: Launch) -> None:
        """Start the process and wait until it is ready. Raises SglangNotStarted. Call this on a thread that lives as
        long as the server: the kernel kills the process when the thread that started it ends (see _BOOT).
        """
        self._is_cpu, self._device = launch.device.type == "cpu", launch.device
        self._before = 0 if self._is_cpu else _used_bytes(launch.device)
        # This socket stays bound until the server is ready, so no other program gets the port. The server can bind the
        # same port, because the server and this socket set SO_REUSEADDR.
        with socket.socket() as reserved:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
            self._start(launch, reserved.getsockname()[1])

    def _start(self, launch: Launch, port: int) -> None:
        command = [sys.executable, "-c", _BOOT, str(os.getpid()), *launch.arguments(port)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=launch.environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise SglangNotStarted(str(error)) from error
        self.pid = self._process.pid
        self._is_over = False
        # one client for all threads; `verify` is off, because plain HTTP on loopback needs no certificates
        url = f"http://127.0.0.1:{port}"
        self._client = httpx.Client(base_url=url, timeout=RUN_S, trust_env=False, verify=False)  # noqa: S501
        try:
            self._wait_until_ready()
        except BaseException:
            self.end()
            raise

    def _wait_until_ready(self) -> None:
        end_s = time.monotonic() + START_S
        while True:
            if (status := self._process.poll()) is not None:
                raise SglangNotStarted(f"the server ended with status {status}, see the log of the adapter")
            with contextlib.suppress(httpx.HTTPError):
                if self._client.get("/ready", timeout=5).status_code == 200:
                    return
            if time.monotonic() > end_s:
                raise SglangNotStarted(f"the server was not ready within {START_S:g} s")
            time.sleep(_LOOK_S)

    def embed(self, texts: Sequence[Sequence[int]]) -> Float32:
        """Return the vectors of the texts, float32 [texts, width]. Raises _SglangLost."""
        body = msgspec.json.encode({"model": "model", "input": texts, "encoding_format": "base64"})
        try:
            answer = self._client.post("/v1/embeddings", content=body, headers={"content-type": "application/json"})
        except (httpx.HTTPError, RuntimeError) as error:
            # httpx raises RuntimeError if another thread has closed the client
            raise _SglangLost(f"the request of a batch failed with {type(error).__name__}") from error
        if answer.status_code != 200:
            raise _SglangLost(f"the server answered with status {answer.status_code}")
        try:
            embeddings = msgspec.json.decode(answer.content, type=_SglangVectors).data
            rows = [
                np.frombuffer(base64.b64decode(embedding.embedding, validate=True), "<f4") for embedding in embeddings
            ]
            vectors = np.stack(rows)
        except UNDECODABLE as error:
            raise _SglangLost("the answer of the server is not a list of vectors") from error
        if [embedding.index for embedding in embeddings] != list(range(len(texts))):
            raise _SglangLost("the answer of the server does not have one vector for each text, in order")
        return vectors

    def memory_bytes(self) -> int:
        """Return the bytes that the server uses: GPU memory, or on a CPU the memory of the processes in its session."""
        if not self._is_cpu:
            return max(0, _used_bytes(self._device) - self._before)
        used_bytes = 0
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) == self.pid:
                    used_bytes += process.memory_full_info().uss
        return used_bytes

    def end(self) -> None:
        """Kill the processes of the session, which have no data to lose. A second call does nothing, because the id of
        an ended session may belong to another session.
        """
        if self._is_over:
            return
        self._is_over = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._client.close()


def _used_bytes(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


_NAMES = ", ".join(ARCHITECTURES)


def _beyond(facts: EngineFacts) -> str:
    """Return the reason why the files of a model are none that SGLang can run here; empty if they are not read yet."""
    if not facts.gives_last_states:
        return "its vectors are not the states of its last token"
    if facts.config is None:
        return ""
    named = getattr(facts.config, "architectures", None) or ["none"]
    return "" if named[0] in ARCHITECTURES else f"its architecture is {named[0]}, not one of {_NAMES}"


def _sglang(facts: EngineFacts) -> str:
    if not cast(SglangSettings, facts.settings).sglang_python:
        return "SIE_SGLANG_PYTHON names no environment that has the package"
    if more := reads_more(facts) or _beyond(facts) or in_int8(facts):
        return more
    if facts.lora:
        return "its entry has a LoRA, which runs on torch"
    return "RLIMIT_DATA limits the memory of this process, but not of the SGLang process" if facts.is_limited else ""


def _is_plain(batch: RunBatch) -> bool:
    return batch.pooling in ("", "last") and all(
        group.options.outputs == ("dense",) and group.options.normalize and group.options.muvera is None
        for group in batch.groups
    )


def _load(request: EngineLoad) -> SGLang:
    compute = request.compute
    python = cast(SglangSettings, compute.model.settings).sglang_python
    assert request.folder is not None
    assert python is not None
    return SGLang(Launch(python, request.folder, compute.dtype, compute.device, request.max_tokens, request.lanes))


RULE = Rule(  # it was not measured
    "SIE_SGLANG_PYTHON names an environment with SGLang, which is for decoder models",
    "",
    _sglang,
    lambda facts: "" if facts.device == "cuda" else f"the device is {facts.device}, not cuda",
    held_bytes=lambda weight_bytes: 2 * weight_bytes,
    load=_load,
    states="the vectors of SGLang",
    frees_torch=True,
    only_causal=True,
    runs=_is_plain,
)
