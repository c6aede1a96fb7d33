"""The real adapter process and a client of its socket.

with running(folder / "a.sock") as adapter, adapter.connect() as client:
    client.load()
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import yaml
from cgroups import MemoryGroup
from cluster import SIE
from zygote import Forked, end_with_parent, reads_at_start

from sie_contracts.errors import ErrorInfo
from sie_contracts.models.catalogue import packaged_folder
from sie_contracts.wire import ipc
from sie_contracts.wire.messages import Operation

END_S = 30.0
MODEL = "mini"
ENTRY: dict[str, Any] = yaml.safe_load(
    (packaged_folder() / "models" / "sentence-transformers" / "all-MiniLM-L6-v2.yaml").read_text()
)


class Refusal(Exception):
    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(error.code)
        self.error = error


@dataclass
class Client:
    """One connection, one request at a time."""

    path: Path
    connection: socket.socket = field(init=False)

    def __post_init__(self) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        try:
            self.connection.connect(str(self.path))
        except OSError:
            self.connection.close()
            raise

    def send(self, request: ipc.Request) -> None:
        self.connection.sendall(ipc.frame(request))

    def receive(self) -> ipc.Reply:
        reply = ipc.reply(bytes(ipc.receive_frame(self.connection)))
        if isinstance(reply, ipc.Refused):
            raise Refusal(reply.error)
        return reply

    def ask(self, request: ipc.Request) -> Any:
        self.send(request)
        return self.receive()

    def run(self, batch: ipc.RunBatch) -> ipc.BatchDone:
        assert self.ask(batch) == ipc.BatchStarted(batch.batch)
        done = self.receive()
        assert isinstance(done, ipc.BatchDone)
        return done

    def load(self, model: str = MODEL, entry: dict[str, Any] | None = None) -> ipc.Ready:
        ready = self.ask(ipc.EnsureReady(model, entry or ENTRY))
        assert isinstance(ready, ipc.Ready)
        return ready

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


@dataclass(eq=False)
class Adapter:
    """An adapter process and the lines of its log."""

    path: Path
    process: Forked | subprocess.Popen[str]

    @property
    def log(self) -> IO[str]:
        stdout = self.process.stdout
        assert stdout is not None
        return stdout

    def wait_for(self, *texts: str) -> str:
        """Return the next line of the log that has one of `texts`."""
        for line in self.log:
            if any(text in line for text in texts):
                return line
        raise AssertionError(f"the adapter ended with {self.process.wait(END_S)} and never logged {texts}")

    def ended(self) -> tuple[int, str]:
        """Wait until the process has ended by itself. Return its status and the rest of its log."""
        with self.log as log:
            rest = log.read()
        return self.process.wait(END_S), rest

    def connect(self) -> Client:
        return Client(self.path)


def start(
    path: Path, *, spare: bool = False, before: str = "", group: MemoryGroup | None = None, **environ: str
) -> Adapter:
    """Start an adapter. `before` is code that it runs first.

    Without `before`, a spare, a control group, or a setting that the C library reads at its start, the process is a
    fork of one that has done the imports of `sie adapter` (`zygote`).
    """
    # the last two restrict the instructions of the CPU that are used
    names = (
        "PATH",
        "HOME",
        "ATEN_CPU_CAPABILITY",
        "ONEDNN_MAX_CPU_ISA",
    )
    environment = {name: os.environ[name] for name in names if name in os.environ}
    settings = {
        "SIE_IPC_SOCKET_PATH": str(path),
        "SIE_DEVICE": "cpu",
        "SIE_DEFAULT_COMPUTE_PRECISION": "float32",
        "SIE_HF_FALLBACK": "false",
        "SIE_MODEL_PATHS": "/",  # tests may name any path
        "SIE_ALLOW_REMOTE_CODE": "true",
    }
    settings["SIE_LOCAL_CACHE"] = str(path.parent / "cache")
    environ = {**environment, **settings, **environ}
    if not before and not spare and group is None and not reads_at_start(environ):
        return Adapter(path, Forked("engine", [SIE, "adapter", "--no-spare"], environ))
    code = (
        f"{before}\nimport logging, sys; logging.basicConfig(level='INFO', stream=sys.stderr)\nfrom "
        "sie_contracts.settings import load; from sie_adapter.process import run; sys.exit(run(load().settings, "
        f"spare={spare}))"
    )
    argv = [sys.executable, "-c", code]
    argv = argv if group is None else group.inside(argv)
    return Adapter(
        path,
        subprocess.Popen(
            argv,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=end_with_parent,
        ),
    )


@contextlib.contextmanager
def running(path: Path, *, spare: bool = False, group: MemoryGroup | None = None, **environ: str) -> Iterator[Adapter]:
    adapter = start(path, spare=spare, group=group, **environ)
    try:
        adapter.wait_for("adapter ready")
        yield adapter
    finally:
        stop(adapter)


def stop(adapter: Adapter) -> None:
    adapter.process.kill()
    adapter.process.wait(END_S)
    adapter.log.close()


def toy(folder: Path, **changes: Any) -> dict[str, Any]:
    fields = {
        "id": folder.name,
        "weights": {"path": str(folder)},
        "family": "text-encoder",
        "outputs": {"dense": 32},
        "max_tokens": 280,
    }
    return {**fields, **changes}


def batch(
    sequences: list[list[int]], model: str = MODEL, operation: Operation = "encode", **changes: Any
) -> ipc.RunBatch:
    fields: dict[str, Any] = {"groups": (ipc.Group(0, len(sequences)),), "batch": "b", **changes}
    lengths = np.array([len(ids) for ids in sequences], "<i4").tobytes()
    ids = np.array([token for ids in sequences for token in ids], "<i4").tobytes()
    return ipc.RunBatch(model=model, operation=operation, lengths=lengths, ids=ids, **fields)
