"""A stub of the Hugging Face hub on loopback, for HF_ENDPOINT. It serves the requests of huggingface_hub over real
HTTP, records each of them, and can fail.

GET /api/models/ID[/revision/REV] the commit, and its files with `?blobs=true` GET /api/models/ID/tree/REV[/FOLDER] the
files POST /api/models/ID/paths-info/REV files of these names HEAD, GET /ID/resolve/REV/PATH a small file itself, a
large one by a redirection to /cdn, both in ranges

A dataset is a repository whose name begins with `datasets/`; its API is below /api/datasets.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# a file of this size and every safetensors file has a SHA-256 in the listing, a smaller one the digest of a git blob
LARGE_BYTES = 4096
_PIECE_BYTES = 1 << 14


class Asked(NamedTuple):
    """One request. `start`: the first byte of its range, 0 without a range."""

    method: str
    path: str
    start: int
    token: str


@dataclass
class HubStub:
    """The files and failures of a hub. Fields may change while it serves. `sent` counts the sent bytes of each file."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commit: str = COMMIT
    token: str = ""  # if set, the token that is needed to read the files
    gated: bool = False  # without the token the repository is gated; if False, it does not exist
    status: int = 0  # if set, the status of every answer
    failures: Counter[str] = field(default_factory=Counter)  # by file: so many answers are 503
    # by file: after so many bytes of an answer the connection is closed, once for each number
    cuts: dict[str, list[int]] = field(default_factory=dict)
    wrong: Counter[str] = field(default_factory=Counter)  # by file: so many answers have wrong bytes
    ignores_ranges: bool = False
    lists_only_names: bool = False
    links_nothing: bool = False  # redirections have no X-Linked headers
    # called before each piece of a file; it blocks for a slow hub
    before_piece: Callable[[str, int], None] = lambda path, sent: None
    asked: list[Asked] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, repository: str, folder: Path) -> None:
        """Add a repository with the files of a folder."""
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        self.repositories[repository] = files

    def of(self, prefix: str) -> list[Asked]:
        """Return the requests whose path begins with `prefix`."""
        with self.lock:
            return [request for request in self.asked if request.path.startswith(prefix)]

    @contextlib.contextmanager
    def serving(self) -> Iterator[HubStub]:
        """Listen on a free port until the end of the block."""
        handler = type("Handler", (_Handler,), {"hub": self})
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            server.daemon_threads = True
            self.url = f"http://127.0.0.1:{server.server_address[1]}"
            thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="hub")
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join(10)


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: HubStub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are sent separately, and Nagle would delay the body up to 40 ms

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client was killed
            super().handle()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        with self.hub.lock:
            self.hub.asked.append(Asked(self.command, path, start, token))
        if self.hub.status:
            self._refuse(self.hub.status, "", "an error that the test asked for")
        elif path.startswith(("/api/models/", "/api/datasets/")):
            self._api(path.removeprefix("/api/").removeprefix("models/"), parse_qs(url.query), token)
        elif path.startswith("/cdn/"):
            self._file(*self._found(path.removeprefix("/cdn/"), "/at/"), start)
        else:
            self._resolve(path.removeprefix("/"), start, token)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        path = unquote(urlsplit(self.path).path).removeprefix("/api/").removeprefix("models/")
        repository, _, revision = path.partition("/paths-info/")
        files = self.hub.repositories.get(repository, {}) if revision == self.hub.commit else {}
        names = [name for name in form.get("paths", ()) if name in files]
        self._json([{"type": "file", "path": name, **_listed(name, files[name], "oid", "oid")} for name in names])

    def _found(self, path: str, word: str) -> tuple[str, str, bytes | None]:
        """Return repository, name and bytes of a file."""
        repository, _, rest = path.partition(word)
        revision, _, name = rest.partition("/")
        files = self.hub.repositories.get(repository, {}) if revision in (self.hub.commit, "main") else {}
        return repository, name, files.get(name)

    def _api(self, path: str, query: dict[str, list[str]], token: str) -> None:
        for word in ("/revision/", "/tree/", ""):
            if word in path:
                break
        repository, _, revision = path.partition(word) if word else (path, "", "main")
        revision, _, folder = revision.partition("/")
        files = self.hub.repositories.get(repository)
        if files is None or (self.hub.token and token != self.hub.token and not self.hub.gated):
            self._refuse(401, "RepoNotFound", "Repository not found")
        elif revision not in (self.hub.commit, "main"):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif word == "/tree/":
            self._json(_tree(files, f"{folder}/" if folder else "", "true" in query.get("recursive", ())))
        else:
            with_facts = "blobs" in query and not self.hub.lists_only_names
            facts = [
                {"rfilename": name, **(_listed(name, data, "blobId", "sha256") if with_facts else {})}
                for name, data in sorted(files.items())
            ]
            self._json(
                {
                    "_id": "1",
                    "id": repository,
                    "modelId": repository,
                    "sha": self.hub.commit,
                    "siblings": facts,
                    "private": False,
                }
            )

    def _resolve(self, path: str, start: int, token: str) -> None:
        repository, name, data = self._found(path, "/resolve/")
        if self.hub.token and token != self.hub.token:
            if self.hub.gated:
                self._refuse(403, "GatedRepo", f"Access to model {repository} is restricted")
            else:
                self._refuse(401, "RepoNotFound", "Repository not found")
        elif data is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
        elif self.hub.failures[name] > 0:
            self.hub.failures[name] -= 1
            self._refuse(503, "", "try again")
        elif is_large(name, data):
            digest = hashlib.sha256(data).hexdigest()
            linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
            self._answer(
                302,
                b"",
                {
                    "Location": f"/cdn/{repository}/at/{self.hub.commit}/{name}",
                    "X-Repo-Commit": self.hub.commit,
                    "ETag": f'"{blob(data)}"',
                    **({} if self.hub.links_nothing else linked),
                },
            )
        else:
            self._file(repository, name, data, start)

    def _file(self, repository: str, name: str, data: bytes | None, start: int) -> None:
        if data is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        if self.hub.ignores_ranges:
            start = 0
        etag = hashlib.sha256(data).hexdigest() if is_large(name, data) else blob(data)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": self.hub.commit, "Content-Length": str(len(data) - start)}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._head(206 if start else 200, headers)
        if self.command == "GET":
            self._send_pieces(repository, name, data, start)

    def _send_pieces(self, repository: str, name: str, data: bytes, start: int) -> None:
        with self.hub.lock:
            cuts = self.hub.cuts.get(name, [])
            end = start + cuts.pop(0) if cuts else len(data)
            is_wrong = self.hub.wrong[name] > 0
            self.hub.wrong[name] -= is_wrong
        if is_wrong:
            data = data[:-1] + bytes([data[-1] ^ 1])
        for offset in range(start, min(end, len(data)), _PIECE_BYTES):
            self.hub.before_piece(name, offset)
            piece = data[offset : min(offset + _PIECE_BYTES, end, len(data))]
            with self.hub.lock:
                self.hub.sent[name] += len(piece)
            self.wfile.write(piece)
        if end < len(data):
            self.close_connection = True

    def _json(self, document: Any) -> None:
        self._answer(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._answer(status, b"", {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self._head(status, {**headers, "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def is_large(name: str, data: bytes) -> bool:
    """Return True if the hub keeps a file outside git."""
    return name.endswith(".safetensors") or len(data) >= LARGE_BYTES


def blob(data: bytes) -> str:
    """Return the digest of a file as a git blob."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _tree(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """Return the files and folders of a folder, whose name ends with a slash or is empty."""
    below = {name: name.removeprefix(folder).split("/") for name in sorted(files) if name.startswith(folder)}
    folders = dict.fromkeys(folder + parts[0] for parts in below.values() if len(parts) > 1)
    own = [name for name, parts in below.items() if recursive or len(parts) == 1]
    return [{"type": "directory", "path": name, "oid": "0", "size": 0} for name in folders if not recursive] + [
        {"type": "file", "path": name, **_listed(name, files[name], "oid", "oid")} for name in own
    ]


def _listed(name: str, data: bytes, own: str, large: str) -> dict[str, Any]:
    lfs = {large: hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return {"size": len(data), own: blob(data), **({"lfs": lfs} if is_large(name, data) else {})}
