"""Failed loads as a client sees them: a real cause for each error class, in a real adapter behind gateway and sidecar.

request ──► gateway ──► sidecar ──► Server, Engine, Loader ──► a folder, a package, the allocator, a hub on loopback
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import shutil
import socket
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from inprocess import InProcess
from safetensors.torch import load_file, save_file
from selection import long_but
from unit.adapter import toys

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.server import AdapterServer
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.models.trust import Allowed
from sie_contracts.settings import Settings
from sie_store.models_folder import worker_trust

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FAMILIES = {
    "lacking": "import no_such_library",
    "greedy": (
        "import torch\nclass Family:\n    def __init__(self, *_):\n        torch.empty(1 << 60, dtype=torch.uint8)"
    ),
    "vast": "class Family:\n    def __init__(self, *_):\n        bytearray(1 << 62)",
    "surprising": "class Family:\n    def __init__(self, *_):\n        raise RuntimeError('a surprise')",
}


@contextlib.contextmanager
def real_adapter(path: Path, cache: Path) -> Iterator[None]:
    """Run an engine with its socket at `path`, on threads of this process."""
    engine = AdapterEngine(
        Settings(device="cpu", default_compute_precision="float32", local_cache=str(cache), hf_fallback=True)
    )
    wake, waker = socket.socketpair()
    with wake, waker, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        server = AdapterServer(listener, engine, lambda: None, worker_trust(Allowed(code=True, paths=("/",))))
        thread = threading.Thread(target=server.serve, args=(wake,), name="adapter")
        thread.start()
        try:
            yield
        finally:
            waker.send(b"x")
            thread.join(10)
            assert engine.stop(10)
            server.close()


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub whose answer depends on the name of the repository."""

    def _answer(self) -> None:
        if "cut" in self.path:
            self._cut_off()
        elif "gated" in self.path:
            self._refuse(403, "GatedRepo", "Access to model org/gated is restricted")
        elif "broken" in self.path:
            self._refuse(500, "", "an internal error")
        elif "moved" in self.path:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {COMMIT}")
        else:
            self._refuse(401, "RepoNotFound", "Repository not found")

    do_GET = do_HEAD = do_POST = _answer

    def _cut_off(self) -> None:
        """Send one file, and close the connection after its first bytes."""
        listing = json.dumps([{"type": "file", "oid": "0" * 40, "size": 1000, "path": "config.json"}]).encode()
        is_listing = "/tree/" in self.path
        length = len(listing) if is_listing else 1000
        self.send_response(200)
        for name, value in (
            ("Content-Length", str(length)),
            ("ETag", '"1"'),
            ("X-Repo-Commit", COMMIT),
            ("Connection", "close"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(listing if is_listing else b"{")

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        for name, value in (("X-Error-Code", code), ("X-Error-Message", message), ("Content-Length", "0")):
            if value:
                self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)


@pytest.fixture(scope="module")
def closed() -> Iterator[str]:
    """Yield the address of a bound port that does not listen."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.save(tmp_path_factory.mktemp("models") / "good", "bert")


@pytest.fixture(scope="module")
def headless(good: Path) -> Path:
    """A model without one of its weights."""
    folder = toys.save(good.parent / "headless", "bert")
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def broken(good: Path) -> Path:
    """Create folders of models whose weights are cut off, a pointer of Git LFS, or larger than any memory."""
    whole = (good / "model.safetensors").read_bytes()
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    contents = {
        "half": whole[: len(whole) // 2],
        "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "vast": len(header).to_bytes(8, "little") + header,
    }
    for name, content in contents.items():
        folder = shutil.copytree(good, good.parent / "broken" / name)
        (folder / "model.safetensors").write_bytes(content)
    # a sparse file
    os.truncate(good.parent / "broken" / "vast" / "model.safetensors", (1 << 42) + 8 + len(header))
    return good.parent / "broken"


@dataclass(frozen=True)
class Case:
    """A cause of a failed load. `entry`: fields that differ from an entry that loads; words in braces are folders.
    `texts`: parts of the message, for the cause and the remedy.
    """

    entry: dict[str, Any]
    error_class: str
    permanent: bool
    texts: tuple[str, ...]
    network: bool = True


def _hub(name: str) -> dict[str, Any]:
    return {"weights": {"hub": f"org/{name}", "revision": COMMIT}}


CASES = {
    "no folder": Case(
        {"weights": {"path": "/nowhere/x"}}, "NOT_FOUND", True, ("weights.path …/x ", "config.json and safetensors")
    ),
    "no package": Case(
        {"weights": {"package": "no-such-distribution"}}, "NOT_FOUND", True, ("no-such-distribution is not installed",)
    ),
    "no repository": Case(_hub("none"), "NOT_FOUND", True, (f"org/none@{COMMIT}", "HF_TOKEN")),
    "no revision": Case(_hub("moved"), "NOT_FOUND", True, (f"org/moved@{COMMIT} does not exist",)),
    "gated": Case(_hub("gated"), "GATED", True, ("accept its licence", "HF_TOKEN")),
    "missing library": Case({"family": "lacking"}, "DEPENDENCY", True, ("no_such_library", "not installed")),
    "missing weights": Case(
        {"weights": {"path": "{headless}"}}, "INCOMPATIBLE", True, ("encoder.layer.1.output.dense.weight",)
    ),
    "half a download": Case(
        {"weights": {"path": "{broken}/half"}}, "INCOMPATIBLE", True, ("model.safetensors is cut off",)
    ),
    "pointer": Case({"weights": {"path": "{broken}/pointer"}}, "INCOMPATIBLE", True, ("a pointer of Git LFS",)),
    "no room": Case(
        {"weights": {"path": "{broken}/vast"}}, "OOM", False, (" MiB are free", "no loaded model may be evicted")
    ),
    "unknown family": Case({"family": "nobody"}, "INCOMPATIBLE", True, ("no family nobody", "sie.adapters")),
    "wrong digest": Case(
        {"weights": {"path": "{good}", "digests": {"model.safetensors": "0" * 64}}},
        "CERTIFICATE",
        True,
        ("model.safetensors", "SHA-256"),
    ),
    "unproven": Case(  # refused before the download
        {**_hub("none"), "unproven": "its oracle is not at hand"},
        "CERTIFICATE",
        True,
        ("its oracle is not at hand", "accept_unproven"),
    ),
    "allocator of torch": Case(
        {"family": "greedy"}, "OOM", False, ("too little memory", "SIE_DEFAULT_COMPUTE_PRECISION")
    ),
    "allocator of Python": Case({"family": "vast"}, "OOM", False, ("too little memory",)),
    "hub out of order": Case(_hub("broken"), "NETWORK", False, ("could not be downloaded",)),
    "connection cut": Case(_hub("cut"), "NETWORK", False, ("could not be downloaded", "SIE_LOCAL_CACHE")),
    "no network": Case(_hub("any"), "NETWORK", False, ("could not be downloaded", "SIE_LOCAL_CACHE"), network=False),
    "anything else": Case({"family": "surprising"}, "UNKNOWN", False, ("a surprise",)),
}


def entry_of(case: Case, **folders: Path) -> ModelEntry:
    fields = {"weights": {"path": "{good}"}, "family": "text-encoder", **case.entry}
    paths = {
        name: text.format_map(folders) if isinstance(text, str) else text for name, text in fields["weights"].items()
    }
    return parse_entry({"id": "toy/failing", "outputs": {"dense": 32}, "max_tokens": 64, **fields, "weights": paths})


@pytest.mark.parametrize("name", long_but(CASES, list(CASES)[::3]))
async def test_each_class_reaches_the_client_with_what_is_wrong_and_what_helps(
    name: str,
    hub: str,
    closed: str,
    good: Path,
    headless: Path,
    broken: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer is 500 without Retry-After, with class, attempts and `permanent`. A second request gets the same
    without another attempt.
    """
    case = CASES[name]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub if case.network else closed)
    for module in ("utils._http", "file_download"):  # without 23 s of pauses between five attempts
        monkeypatch.setattr(
            f"huggingface_hub.{module}.time", types.SimpleNamespace(sleep=lambda seconds: None, time=time.time)
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    for family, code in FAMILIES.items():
        (tmp_path / f"{family}_family.py").write_text(code)
        info = tmp_path / f"{family}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {family}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[sie.adapters]\n{family} = {family}_family:Family\n")
    with real_adapter(tmp_path / "real.sock", tmp_path / "cache"):
        async with InProcess(tmp_path, entry_of(case, good=good, headless=headless, broken=broken)) as cluster:
            gateway = await cluster.gateway()
            await cluster.sidecar(SIE_IPC_SOCKET_PATH=str(tmp_path / "real.sock"))
            for _ in range(2):
                answer = await asyncio.wait_for(gateway.encode("w7 w8", model="toy/failing"), 30)
                error = answer.json()["error"]
                assert (answer.status_code, answer.json()["code"]) == (500, "MODEL_LOAD_FAILED"), answer.text
                assert "retry-after" not in answer.headers
                assert (error["error_class"], error["attempts"], error["permanent"]) == (
                    case.error_class,
                    1,
                    case.permanent,
                )
                assert [text for text in case.texts if text not in error["message"]] == [], error["message"]
                assert str(tmp_path.parent) not in answer.text, "clients are told of no path"
            async with asyncio.timeout(30):  # a heartbeat brings the state
                while True:
                    shown = (await gateway.client.get("/v1/models/toy/failing")).json()
                    if shown["state"] == "failed":
                        break
                    await asyncio.sleep(0.01)
            assert shown["last_error"]["code"] == case.error_class
            assert str(tmp_path.parent) not in json.dumps(shown)
