"""A hub and a bucket with hostile answers: no listing, no end, other sizes, compression, a byte now and then."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fetching import REPOSITORY
from hub_stub import COMMIT, blob
from object_stores import aws_environ

from sie_contracts.errors import LoraLoadFailed, ModelLoadFailed
from sie_contracts.models.entries import ModelEntry, Weights
from sie_store.cluster import ClusterCache
from sie_store.weights import hub
from sie_store.weights.download import DownloadLimits
from sie_store.weights.manifest import MAX_MANIFEST_BYTES, FileFact, Manifest, encode
from sie_store.weights.selection import MAX_LORA_BYTES
from sie_store.weights.sources import WeightSources

FILES = {"config.json": b'{"a": 1}', "model.safetensors": bytes(100_000)}
ENTRY = ModelEntry(
    id=REPOSITORY,
    weights=Weights(hub=REPOSITORY, revision=COMMIT),
    family="text-encoder",
    outputs={"dense": 8},
    max_tokens=16,
)
QUICK = DownloadLimits(stall_s=0.3, tries=2, pause_s=0.01)
PIECE = b"x" * (1 << 20)
# bytes that a server sends before it notices that nobody reads: buffers of the kernel and of the client
UNREAD_BYTES = 64 << 20

Answer = Callable[["Handler"], None]


class Handler(http.server.BaseHTTPRequestHandler):
    """Handler that answers with `listing` or `file`. `sent` has the number of bytes of each write."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are sent apart: Nagle's algorithm would put up to 40 ms between them
    listing: Answer
    file: Answer
    paths: list[str]
    sent: list[int]

    def do_GET(self) -> None:
        self.paths.append(self.path)
        try:
            (self.listing if self.path.startswith("/api/") else self.file)()
        except ConnectionError:
            self.close_connection = True

    do_HEAD = do_GET

    def whole(self, body: bytes, **headers: str) -> None:
        self._head({"Content-Length": str(len(body)), **headers})
        self.send(body)

    def endless(self, first: bytes, piece: bytes, pause_s: float = 0.0, status: int = 200, **headers: str) -> None:
        """Send a body without an end, until the client disconnects."""
        self._head({"Transfer-Encoding": "chunked", **headers}, status)
        while True:
            self.send(b"%x\r\n%b\r\n" % (len(first), first))
            first = piece
            time.sleep(pause_s)

    def send(self, body: bytes) -> None:
        self.wfile.write(body)
        self.sent.append(len(body))

    def own_file(self) -> None:
        self.whole(FILES[self.path.rpartition("/")[2]])

    def _head(self, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing to the test's output."""


def siblings(**changes: object) -> list[dict[str, Any]]:
    """Return the listing of FILES, with `changes` to the file of weights."""
    weights = FILES["model.safetensors"]
    digest = {"sha256": hashlib.sha256(weights).hexdigest(), "size": len(weights), "pointerSize": 130}
    return [
        {"rfilename": "config.json", "size": len(FILES["config.json"]), "blobId": blob(FILES["config.json"])},
        {"rfilename": "model.safetensors", "size": len(weights), "blobId": "0", "lfs": digest, **changes},
    ]


def page(files: object) -> bytes:
    return json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": files}).encode()


@contextlib.contextmanager
def serving(listing: Answer, file: Answer = Handler.own_file) -> Iterator[type[Handler]]:
    members = {"listing": listing, "file": file, "paths": [], "sent": []}
    handler = type("Serving", (Handler,), members)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        handler.url = f"http://127.0.0.1:{server.server_address[1]}"  # type: ignore[attr-defined]
        try:
            yield handler
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "LIMITS", DownloadLimits(stall_s=0.3, tries=2, pause_s=0.01, part_bytes=0))
    monkeypatch.setattr(hub._Hub, "limits", hub.LIMITS)


def refused(server: type[Handler], cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)  # type: ignore[attr-defined]
    with pytest.raises(ModelLoadFailed) as raised:
        WeightSources(cache, True).folder(ENTRY)
    assert not list(cache.glob("hub/models--*/snapshots/*"))
    return raised.value.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>sign in</html>", "not the listing"),
        (b"", "not the listing"),
        (b"null", "not the listing"),
        (b"[]", "not the listing"),
        (b"[" * 100_000, "not the listing"),
        (page({"a": 1}), "not the listing"),
        (page(["config.json"]), "not the listing"),
        (page([{"size": 1}]), "not the listing"),
        (page(siblings(rfilename=7)), "not the listing"),
        *((page(siblings(size=size)), "not the listing") for size in ("9", -5, 1e300, float("nan"), [])),
        (page(siblings(size=2**70)), "ended early, at byte"),
        (page(siblings(size=10)), "with a digest that differs"),
        (page(siblings(size=200_000)), "ended early, at byte"),
        *((page(siblings(lfs=lfs)), "not the listing") for lfs in ("x", {"size": 3}, {"sha256": 5})),
        *(
            (page([*siblings(), {"rfilename": name, "size": 2}]), "names the file")
            for name in ("/etc/x.json", "a\nb.json", "a" * 300 + ".json", "a\u202e.json")
        ),
        (page([*siblings(), {"rfilename": "config.json/a.json", "size": 2}]), "as a file and as a folder"),
        (page([{"rfilename": f"{number}.json", "size": 0} for number in range(20_000)]), "at most 10000 files"),
    ],
    ids=lambda value: repr(value)[-40:],
)
def test_a_listing_that_is_none_is_a_typed_failure(
    body: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(lambda handler: handler.whole(body)) as server:
        assert message in refused(server, tmp_path, monkeypatch)
    # nothing else than the repository is asked of a hub
    assert all(REPOSITORY in path for path in server.paths)


def test_a_listing_has_a_bound_of_bytes_and_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda handler: handler.endless(b'{"id":"', PIECE)) as server:
        assert f"more than {MAX_MANIFEST_BYTES} bytes" in refused(server, tmp_path, monkeypatch)
    assert sum(server.sent) < hub.LIMITS.tries * (MAX_MANIFEST_BYTES + UNREAD_BYTES)
    monkeypatch.setattr(hub, "LISTING_S", 0.5)
    with serving(lambda handler: handler.endless(b"{", b" ", 0.01)) as server:
        assert "not complete within 0.5 s" in refused(server, tmp_path, monkeypatch)


def test_compressed_answers_are_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One compressed byte may be a thousand bytes, and one that was compressed twice a million."""
    bomb = zlib.compress(zlib.compress(b" " * (64 << 20)))
    with serving(lambda handler: handler.whole(bomb, Content_Encoding="deflate, deflate")) as server:
        assert "compressed" in refused(server, tmp_path, monkeypatch)
    with serving(
        lambda handler: handler.whole(page(siblings())),
        lambda handler: handler.whole(bomb, Content_Encoding="deflate, deflate"),
    ) as server:
        assert "compressed" in refused(server, tmp_path, monkeypatch)


def of_weights(answer: Answer) -> Answer:
    return lambda handler: answer(handler) if "model.safetensors" in handler.path else handler.own_file()


def test_what_follows_a_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = of_weights(lambda handler: handler.endless(FILES["model.safetensors"], PIECE))
    with serving(lambda handler: handler.whole(page(siblings())), file) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)  # type: ignore[attr-defined]
        folder = WeightSources(tmp_path, True).folder(ENTRY)
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert sum(server.sent) < UNREAD_BYTES


def test_a_file_that_comes_byte_by_byte_has_stalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = of_weights(lambda handler: handler.endless(b"x", b"x", 0.01))
    with serving(lambda handler: handler.whole(page(siblings())), file) as server:
        assert "could not be downloaded: the source delivered only" in refused(server, tmp_path, monkeypatch)


def test_a_lora_that_a_client_names_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = MAX_LORA_BYTES
    lora = [{"rfilename": "adapter_config.json", "size": 1}, {"rfilename": "adapter_model.safetensors", "size": size}]
    with serving(lambda handler: handler.whole(page(lora))) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)  # type: ignore[attr-defined]
        with pytest.raises(LoraLoadFailed, match=f"has {size + 1} bytes, a LoRA has at most {size}"):
            WeightSources(tmp_path, True).locate_lora(REPOSITORY, ENTRY, None)
    assert all(path.startswith("/api/") for path in server.paths)


META = {"ETag": '"1"', "Last_Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}


def in_bucket(server: type[Handler], cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in aws_environ(server.url).items():  # type: ignore[attr-defined]
        monkeypatch.setenv(name, value)
    sources = WeightSources(cache, False, ClusterCache("s3://bucket/weights", QUICK))
    with pytest.raises(ModelLoadFailed) as raised:
        sources.folder(ENTRY)
    return raised.value.message


def test_a_manifest_without_an_end_is_not_read_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"Content_Length": "2", **META}
    with serving(Handler.own_file, lambda handler: handler.endless(b"{", PIECE, **headers)) as server:
        assert f"a manifest has at most {MAX_MANIFEST_BYTES} bytes" in in_bucket(server, tmp_path, monkeypatch)
    assert sum(server.sent) < MAX_MANIFEST_BYTES + UNREAD_BYTES


def test_a_file_of_a_bucket_ends_where_its_manifest_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fact = FileFact(len(FILES["model.safetensors"]), "a" * 64)
    manifest = encode(Manifest(REPOSITORY, COMMIT, {"model.safetensors": fact}))
    ranged = {"Content_Range": f"bytes 0-{fact.bytes - 1}/{fact.bytes}", **META}

    def answer(handler: Handler) -> None:
        if "sie-manifest" in handler.path:
            handler.whole(manifest, **META)
        else:
            handler.endless(b"x", PIECE, status=206, Content_Length=str(fact.bytes), **ranged)

    with serving(Handler.own_file, answer) as server:
        assert "has another SHA-256 than the manifest states" in in_bucket(server, tmp_path, monkeypatch)
    assert sum(server.sent) < 2 * UNREAD_BYTES
