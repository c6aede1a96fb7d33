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
from pathlib import Path
from typing import Any

import pytest
from inprocess import InProcess
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
    """A hub without repositories, except a gated one."""

    def _answer(self) -> None:
        is_gated = "gated" in self.path
        self.send_response(403 if is_gated else 401)
        self.send_header("X-Error-Code", "GatedRepo" if is_gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_POST = _answer

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
def broken(good: Path) -> Path:
    """Create folders of models whose weights are cut off, or larger than any memory."""
    whole = (good / "model.safetensors").read_bytes()
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    contents = {"half": whole[: len(whole) // 2], "vast": len(header).to_bytes(8, "little") + header}
    for name, content in contents.items():
        folder = shutil.copytree(good, good.parent / "broken" / name)
        (folder / "model.safetensors").write_bytes(content)
    # a sparse file
    os.truncate(good.parent / "broken" / "vast" / "model.safetensors", (1 << 42) + 8 + len(header))
    return good.parent / "broken"


def _hub(name: str) -> dict[str, Any]:
    return {"weights": {"hub": f"org/{name}", "revision": COMMIT}}


# cause -> fields that differ from an entry that loads (words in braces are folders), class, whether the failure is
# permanent, and a part of the message
CASES: dict[str, tuple[dict[str, Any], str, bool, str]] = {
    "no repository": (_hub("none"), "NOT_FOUND", True, f"org/none@{COMMIT}"),
    "gated": (_hub("gated"), "GATED", True, "HF_TOKEN"),
    "missing library": ({"family": "lacking"}, "DEPENDENCY", True, "no_such_library"),
    "half a download": ({"weights": {"path": "{broken}/half"}}, "INCOMPATIBLE", True, "model.safetensors"),
    "no room": ({"weights": {"path": "{broken}/vast"}}, "OOM", False, ""),
    "wrong digest": (
        {"weights": {"path": "{good}", "digests": {"model.safetensors": "0" * 64}}},
        "CERTIFICATE",
        True,
        "model.safetensors",
    ),
    "allocator of torch": ({"family": "greedy"}, "OOM", False, "SIE_DEFAULT_COMPUTE_PRECISION"),
    "no network": (_hub("any"), "NETWORK", False, "SIE_LOCAL_CACHE"),
    "anything else": ({"family": "surprising"}, "UNKNOWN", False, "a surprise"),
}


def entry_of(failing: dict[str, Any], **folders: Path) -> ModelEntry:
    fields = {"weights": {"path": "{good}"}, "family": "text-encoder", **failing}
    paths = {
        name: text.format_map(folders) if isinstance(text, str) else text for name, text in fields["weights"].items()
    }
    return parse_entry({"id": "toy/failing", "outputs": {"dense": 32}, "max_tokens": 64, **fields, "weights": paths})


@pytest.mark.parametrize("name", long_but(CASES, ["gated", "half a download", "wrong digest"]))
async def test_each_class_reaches_the_client_with_what_is_wrong_and_what_helps(
    name: str, hub: str, closed: str, good: Path, broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is 500 without Retry-After, with class, attempts and `permanent`. A second request gets the same
    without another attempt.
    """
    failing, error_class, is_permanent, text = CASES[name]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", closed if name == "no network" else hub)
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
        async with InProcess(tmp_path, entry_of(failing, good=good, broken=broken)) as cluster:
            gateway = await cluster.gateway()
            await cluster.sidecar(SIE_IPC_SOCKET_PATH=str(tmp_path / "real.sock"))
            for _ in range(2):
                answer = await asyncio.wait_for(gateway.encode("w7 w8", model="toy/failing"), 30)
                error = answer.json()["error"]
                assert (answer.status_code, answer.json()["code"]) == (500, "MODEL_LOAD_FAILED"), answer.text
                assert "retry-after" not in answer.headers
                assert (error["error_class"], error["attempts"], error["permanent"]) == (error_class, 1, is_permanent)
                assert text in error["message"]
                assert str(tmp_path.parent) not in answer.text, "clients are told of no path"
            async with asyncio.timeout(30):  # a heartbeat brings the state
                while True:
                    shown = (await gateway.client.get("/v1/models/toy/failing")).json()
                    if shown["state"] == "failed":
                        break
                    await asyncio.sleep(0.01)
            assert shown["last_error"]["code"] == error_class
            assert str(tmp_path.parent) not in json.dumps(shown)
