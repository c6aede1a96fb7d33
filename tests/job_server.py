"""A server of jobs and files for tests of clients, in one process. A script says what a job does.

upload ──► digest and size, the bytes are not kept        job ──► the states of `script`, one for each request
"""

from __future__ import annotations

import hashlib
import re
import socket
import struct
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from sie_contracts.api.batches import FileDeleted, FileObject
from sie_contracts.api.jobs import ENDED, JobDeleted, JobManifest, JobPart, JobRequest

HANGING = 30.0  # seconds; an operation that takes longer hangs
PIECE = 1 << 16
FILE = "file-" + "0" * 31
JOB = "job-" + "0" * 31


class JobServer(ThreadingHTTPServer):
    """A server of jobs and files.

    `script`: the changes of a job at each request for it; the last one stays. `parts`: the output of each job. `cuts`:
    by part, how often its bytes end early. `refuses`: by the begin of a request line, the error of such requests.
    `losses`: by the begin of a request line, how many such requests are done without an answer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.seen: list[tuple[str, str]] = []
        self.bodies: dict[str, JobRequest] = {}
        self.keys: dict[str, str] = {}
        self.files: dict[str, FileObject] = {}
        self.digests: dict[str, str] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.script: list[dict[str, Any]] = []
        self.parts: dict[str, bytes] = {}
        self.announced: dict[str, str] = {}  # digests in manifests in place of the true ones
        self.cuts: Counter[str] = Counter()
        self.refuses: dict[str, tuple[int, str, str]] = {}
        self.losses: Counter[str] = Counter()
        self.page = 2
        self.is_late = False  # if set, a pause or a cancel is answered before it takes effect
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: tests have clients that disconnect."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self.thread.join()

    def asked(self, method: str, path: str = "") -> list[str]:
        """Return the paths of the requests so far."""
        return [target for verb, target in self.seen if verb == method and target.startswith(path)]

    def add(self, **fields: Any) -> dict[str, Any]:
        """Add a job."""
        job: dict[str, Any] = {
            "id": f"{JOB}{len(self.jobs)}",
            "object": "job",
            "state": "queued",
            "created_at": 1790000000.0 + len(self.jobs),
            "updated_at": 1790000000.0,
            "model": "org/m",
            "operation": "encode",
            "counts": {},
            "request": {"model": "org/m", "input": {"file": f"{FILE}0"}},
            **fields,
        }
        self.jobs[job["id"]] = job
        return job

    def look(self, job: dict[str, Any]) -> dict[str, Any]:
        if self.script:
            job |= self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return job


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are sent separately, and Nagle would delay the body up to 40 ms
    server: JobServer

    def answer(self) -> None:
        url, server = urlsplit(self.path), self.server
        with server.lock:
            server.seen.append((self.command, self.path))
        line = f"{self.command} {self.path}"
        for start, (status, code, message) in server.refuses.items():
            if line.startswith(start):
                self.rfile.read(int(self.headers.get("content-length", 0)))
                self.fail(status, code, message)
                return
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        match url.path.split("/")[2:]:
            case ["files"]:
                self.reply(self.upload())
            case ["files", name, *rest] if name in server.files:
                self.file(name, rest)
            case ["jobs"] if self.command == "POST":
                self.submit(self.rfile.read(int(self.headers["content-length"])))
            case ["jobs"]:
                self.listing(query)
            case ["jobs", name, *rest] if name in server.jobs:
                self.job(server.jobs[name], rest, query)
            case _:
                self.fail(404, "NOT_FOUND", f"there is no {url.path}")

    do_GET = do_POST = do_DELETE = answer

    def upload(self) -> FileObject:
        """Accept a form whose last field is the file, and which has exactly the announced length."""
        boundary = re.search("boundary=(.+)", self.headers["content-type"])
        assert boundary is not None
        left = int(self.headers["content-length"])
        head = b""
        while not re.search(rb"filename=[^\0]*\r\n\r\n", head):
            head += self.rfile.read(1)
        left -= len(head)
        tail = f"\r\n--{boundary[1]}--\r\n".encode()
        purpose = re.search(rb'name="purpose"\r\n\r\n(\w+)\r\n', head)
        name = re.search(rb'name="file"; filename="([^"\r\n]*)"\r\n', head)
        seconds = re.search(
            rb'"expires_after\[anchor\]"\r\n\r\ncreated_at\r\n.*seconds\]"\r\n\r\n(\d+)\r\n', head, re.S
        )
        assert purpose, head
        assert name, head
        digest, size = hashlib.sha256(), left - len(tail)
        rest = size
        while rest:
            piece = self.rfile.read(min(PIECE, rest))
            assert piece
            digest.update(piece)
            rest -= len(piece)
        assert self.rfile.read(len(tail)) == tail
        server = self.server
        with server.lock:
            record = FileObject(
                id=f"{FILE}{len(server.files)}",
                bytes=size,
                created_at=1790000000,
                filename=name[1].decode(),
                purpose=purpose[1].decode(),
                expires_at=1790000000 + int(seconds[1]) if seconds else None,
            )
            server.files[record.id], server.digests[record.id] = record, digest.hexdigest()
        return record

    def file(self, name: str, rest: list[str]) -> None:
        if rest == ["content"]:
            self.send(200, b"x" * self.server.files[name].bytes)
        elif self.command == "DELETE":
            del self.server.files[name]
            self.reply(FileDeleted(id=name))
        else:
            self.reply(self.server.files[name])

    def submit(self, body: bytes) -> None:
        server = self.server
        try:
            job_request = msgspec.json.decode(body, type=JobRequest)
        except msgspec.ValidationError as error:
            self.fail(400, "INVALID_INPUT", str(error))
            return
        key = self.headers["idempotency-key"]
        if key not in server.keys:
            request = msgspec.to_builtins(job_request)
            job = server.add(
                model=job_request.model, operation=job_request.operation, name=job_request.name, request=request
            )
            server.keys[key] = job["id"]
            server.bodies[job["id"]] = job_request
        self.reply(server.jobs[server.keys[key]], 201)

    def listing(self, query: dict[str, str]) -> None:
        jobs = [job for job in reversed(self.server.jobs.values()) if query.get("state") in (None, job["state"])]
        ids = [job["id"] for job in jobs]
        start = ids.index(query["after"]) + 1 if "after" in query else 0
        end = start + int(query["limit"])
        self.reply({"data": jobs[start:end], "next": ids[end - 1] if end < len(ids) else None})

    def job(self, job: dict[str, Any], rest: list[str], query: dict[str, str]) -> None:
        server = self.server
        match self.command, rest:
            case "GET", []:
                self.reply(server.look(job))
            case "DELETE", []:
                if job["state"] not in ENDED:
                    self.fail(409, "CONTENT_CONFLICT", f"{job['id']} has not ended")
                    return
                del server.jobs[job["id"]]
                self.reply(JobDeleted(id=job["id"]))
            case "POST", ["retry"]:
                self.reply(server.add(state="queued", request=job["request"]), 201)
            case "POST", [_] if job["state"] in ENDED:
                self.fail(409, "CONTENT_CONFLICT", f"the job is {job['state']}")
            case "POST", [action]:
                if not server.is_late:
                    job["state"] = {"pause": "paused", "resume": "running", "cancel": "cancelled"}[action]
                self.reply(job)
            case "GET", ["manifest"]:
                self.reply(self.manifest(job, int(query.get("after", 0))))
            case "GET", ["part"]:
                self.part(query["name"])
            case "GET", ["rows"]:
                rows = [{"id": "7", "error": {"code": "INVALID_INPUT", "message": "empty"}}, {"id": "8", "dims": 4}]
                self.reply({"rows": [row for row in rows if ("error" in row) == (query.get("failed") == "true")]})

    def manifest(self, job: dict[str, Any], after: int) -> JobManifest:
        server = self.server
        parts = [
            JobPart(
                name=name,
                rows=1,
                failed=0,
                bytes=len(data),
                sha256=server.announced.get(name, hashlib.sha256(data).hexdigest()),
                source="docs.jsonl",
            )
            for name, data in server.parts.items()
        ]
        end = after + server.page
        return JobManifest(
            job=job["id"],
            state=job["state"],
            url="",
            format="parquet",
            model="org/m",
            fingerprint="f",
            rows=len(parts),
            failed=0,
            parts=parts[after:end],
            next=end if end < len(parts) else None,
        )

    def part(self, name: str) -> None:
        data = self.server.parts[name]
        with self.server.lock:
            self.server.cuts[name] -= 1
            is_cut = self.server.cuts[name] >= 0
        if not is_cut:
            self.send(200, data)
            return
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2])
        self.reset()

    def reset(self) -> None:
        """Reset the connection, as after the death of a process."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def reply(self, value: Any, status: int = 200) -> None:
        self.send(status, msgspec.json.encode(value))

    def fail(self, status: int, code: str, message: str) -> None:
        self.send(status, msgspec.json.encode({"error": {"code": code, "message": message, "request_id": "r"}}))

    def send(self, status: int, data: bytes) -> None:
        losses = self.server.losses
        for start in losses:
            if f"{self.command} {self.path}".startswith(start) and losses[start] > 0:
                losses[start] -= 1
                self.reset()
                return
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Write nothing to the test's output."""
