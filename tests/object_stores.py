"""Object stores for tests: SeaweedFS in a process of its own, and moto's S3 and an emulator of Google's store, with
faults, in this process.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import format_datetime
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

import httpx
import pytest
from zygote import end_with_parent

from sie_cli.serve.ports import free_port

if TYPE_CHECKING:
    from obstore.store import ObjectStore

KEY, SECRET = "somebody", "something"
BUCKET = "bucket"


@dataclass
class S3:
    """A real object store that speaks S3, in a process of its own."""

    url: str
    process: subprocess.Popen[bytes]
    is_ready: bool = False

    @property
    def environ(self) -> dict[str, str]:
        return aws_environ(self.url)

    def pause(self) -> None:
        """Stop answering without closing a connection."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


def aws_environ(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    keys = {
        "name": "test",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [keys]}))
    ports = {
        f"-{part}.port{kind}": free_port() for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")
    }
    argv = [
        str(Path(sys.executable).with_name("weed")),
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-filer",
        "-s3",
        f"-s3.config={folder / 's3.json'}",
        "-volume.max=4",
        "-master.volumeSizeLimitMB=64",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        *(f"{name}={port}" for name, port in ports.items()),
    ]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=end_with_parent)
    server = S3(f"http://127.0.0.1:{ports['-s3.port']}", process)
    try:
        deadline_s = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(server.url, trust_env=False).status_code in (200, 403):
                    break
            assert process.poll() is None, "the store did not start"
            assert time.monotonic() < deadline_s, "the store did not answer"
            time.sleep(0.05)
        yield server
    finally:
        server.resume()
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Request:
    """A request of a client. `range` is the value of its header."""

    method: str
    path: str
    range: str


@dataclass
class Faults:
    """The faults of a server, and the requests that it got. `refuse` returns the status and the S3 code of an error, or
    None.

    An answer of `slow_from` bytes or more comes in pieces of `piece_bytes` with pauses of `pause_s`. After `cut_after`
    bytes of all answers together, every connection is cut.
    """

    refuse: Callable[[Request], tuple[str, str] | None] = lambda _: None
    before: Callable[[Request], None] = lambda _: None
    slow_from: int = 1 << 62
    piece_bytes: int = 1 << 16
    pause_s: float = 0.0
    cut_after: int = 1 << 62
    requests: list[Request] = field(default_factory=list)
    most_at_once: int = 0
    now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reads(self) -> list[Request]:
        """Return the reads of files, without those of manifests."""
        return [request for request in self.requests if request.method == "GET" and request.range]

    def writes(self) -> list[str]:
        return [request.path for request in self.requests if request.method == "PUT"]


class Moto:
    """moto's S3 in this process, with Faults. It has a bucket from the start."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.faults = Faults()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._server.daemon_threads = True  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        httpx.put(f"{self.url}/{BUCKET}", trust_env=False, timeout=60).raise_for_status()

    @property
    def environ(self) -> dict[str, str]:
        return aws_environ(self.url)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        faults = self.faults
        request = Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("HTTP_RANGE", ""))
        if not environ.get("HTTP_AUTHORIZATION", "").startswith(
            "AWS4"
        ):  # a client of Google's XML interface, which is close enough to S3's
            environ["HTTP_AUTHORIZATION"] = (
                "AWS4-HMAC-SHA256 Credential=x/2026/us-east-1/s3/aws4_request,SignedHeaders=host,Signature=x"
            )
        with faults._lock:
            faults.requests.append(request)
            faults.now += 1
            faults.most_at_once = max(faults.most_at_once, faults.now)
        try:
            faults.before(request)
            if (refusal := faults.refuse(request)) is not None:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response(refusal[0], [("Content-Type", "application/xml")])
                return [f"<Error><Code>{refusal[1]}</Code><Message>no</Message></Error>".encode()]
            body = b"".join(self._app(environ, start_response))
        finally:
            with faults._lock:
                faults.now -= 1
        return self._sent(faults, body, environ["werkzeug.socket"])

    @staticmethod
    def _sent(faults: Faults, body: bytes, connection: socket.socket) -> Iterator[bytes]:
        is_slow = len(body) >= faults.slow_from
        for start in range(0, max(1, len(body)), faults.piece_bytes):
            piece = body[start : start + faults.piece_bytes]
            with faults._lock:
                faults.cut_after -= len(piece)
                is_cut = faults.cut_after < 0
            if is_cut:
                connection.shutdown(socket.SHUT_RDWR)
                return
            if is_slow:
                time.sleep(faults.pause_s)
            yield piece


class Google:
    """An emulator of Google's store, with additions to its XML interface: HEAD, DELETE, lists, empty objects, and the
    headers of every answer.
    """

    def __init__(self, folder: Path) -> None:
        from gcp_storage_emulator.exceptions import NotFound
        from gcp_storage_emulator.handlers.buckets import create_bucket
        from gcp_storage_emulator.handlers.objects import _checksums, _make_object_resource
        from gcp_storage_emulator.server import RequestHandler
        from gcp_storage_emulator.storage import Storage

        self.storage = Storage(use_memory_fs=True, data_dir=str(folder))
        logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)

        writing = threading.Lock()

        class Handler(RequestHandler):  # type: ignore[misc]
            def end_headers(self) -> None:
                bucket, _, name = unquote(urlsplit(self.path).path).lstrip("/").partition("/")
                generation = self.storage.objects.get(bucket, {}).get(name, {}).get("generation", 1)
                self.send_header("ETag", f'"{generation}"')
                self.send_header("x-goog-generation", str(generation))
                self.send_header("Last-Modified", _http_date())
                super().end_headers()
                if self.command == "HEAD":
                    self.wfile = io.BytesIO()

            def do_GET(self) -> None:
                query = parse_qs(urlsplit(self.path).query)
                if "list-type" in query:
                    self._list(unquote(urlsplit(self.path).path).strip("/"), query)
                else:
                    super().do_GET()

            def do_HEAD(self) -> None:
                super().do_GET()

            def do_PUT(self) -> None:
                bucket, _, name = unquote(self.path).lstrip("/").partition("/")
                data = self.rfile.read(int(self.headers["Content-Length"]))
                resource = _make_object_resource(
                    f"http://{self.headers['Host']}", bucket, name, "application/octet-stream", str(len(data))
                )
                generation = self.headers.get("x-goog-if-generation-match")
                with writing:
                    files = {} if bucket not in self.storage.buckets else self.storage.objects.get(bucket, {})
                    if generation is not None and int(generation) != int(files.get(name, {}).get("generation", 0)):
                        self._xml(412, "<Error><Code>PreconditionFailed</Code></Error>")
                        return
                    try:
                        self.storage.create_file(bucket, name, data, _checksums(data, resource))
                    except NotFound:
                        self._xml(404, "<Error><Code>NoSuchBucket</Code></Error>")
                        return
                self._xml(200, "")

            def do_DELETE(self) -> None:
                bucket, _, name = self.path.lstrip("/").partition("/")
                self.path = f"/storage/v1/b/{bucket}/o/{name}"
                super().do_DELETE()

            def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
                prefix = query.get("prefix", [""])[0]
                try:
                    files, prefixes = self.storage.get_file_list(
                        bucket, prefix or None, query.get("delimiter", [None])[0]
                    )
                except NotFound:
                    self._xml(404, "<Error><Code>NoSuchBucket</Code></Error>")
                    return
                contents = "".join(
                    f"<Contents><Key>{escape(file['name'])}</Key><LastModified>{file['updated']}</LastModified><ETag>&quot;1&quot;</ETag>"
                    f"<Size>{file['size']}</Size></Contents>"
                    for file in files
                )
                common = "".join(
                    f"<CommonPrefixes><Prefix>{escape(entry)}</Prefix></CommonPrefixes>" for entry in prefixes
                )
                self._xml(
                    200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}{common}</ListBucketResult>"
                )

            def _xml(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

        create_bucket(BUCKET, self.storage)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, self.storage))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.environ = {"GOOGLE_SERVICE_ACCOUNT": str(google_account(folder / "account.json", self.url))}

    def object(self, name: str) -> bytes:
        """Return an object from Google's JSON interface."""
        answer = httpx.get(
            f"{self.url}/storage/v1/b/{BUCKET}/o/{quote(name, safe='')}?alt=media", trust_env=False, timeout=60
        )
        return answer.raise_for_status().content

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def google_account(file: Path, url: str) -> Path:
    """Write the file for GOOGLE_SERVICE_ACCOUNT, for a store at `url` that needs no token."""
    account = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    file.write_text(json.dumps(account))
    return file


def _http_date() -> str:
    from datetime import UTC, datetime

    return format_datetime(datetime.now(UTC), usegmt=True)


_numbers = itertools.count()


@dataclass
class Place:
    """A prefix of its own in a bucket of one of the servers."""

    url: str
    server: Any

    @classmethod
    def at(cls, server: Moto | Google | S3, environ: pytest.MonkeyPatch) -> Place:
        """Return a new prefix, and set the variables that lead a client there."""
        for name, value in server.environ.items():
            environ.setenv(name, value)
        place = cls(f"{'gs' if isinstance(server, Google) else 's3'}://{BUCKET}/{next(_numbers)}/weights", server)
        if isinstance(server, S3) and not server.is_ready:
            place._make_bucket()
            server.is_ready = True
        return place

    def _make_bucket(self) -> None:
        """Create the bucket with a first object, and retry until the store has found its volumes."""
        from obstore.exceptions import BaseError

        deadline_s = time.monotonic() + 60
        while True:
            try:
                self.put("first", b"")
                self.delete("first")
            except (BaseError, OSError):
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.1)
            else:
                return

    @property
    def store(self) -> ObjectStore:
        """Open the store as another client of it."""
        from sie_store.object_stores import opened

        return opened(self.url, "SIE_CLUSTER_CACHE")

    def put(self, name: str, data: bytes) -> None:
        import obstore

        obstore.put(self.store, name, data)

    def get(self, name: str) -> bytes:
        import obstore

        return bytes(obstore.get(self.store, name).bytes())

    def delete(self, name: str) -> None:
        import obstore

        obstore.delete(self.store, name)

    def names(self) -> list[str]:
        import obstore

        return sorted(entry["path"] for page in obstore.list(self.store) for entry in page)
