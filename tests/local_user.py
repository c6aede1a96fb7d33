"""An attacker without rights on the same machine. The program becomes user 65534 and tries to reach a `sie serve`.

    python tests/local_user.py '{"ports": [...], "pids": [...], "folders": [...], "paths": [...]}'

It prints one JSON object: the answers of each port, the files, sockets and processes that it could open, and all bytes
that it got as `loot`.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  the process cannot import after it has given up its rights
import json
import os
import socket
import stat
import sys
from pathlib import Path
from typing import Any

NOBODY = 65534
WAIT_S = 5.0
CONNECTS = (
    {},
    {"user": "operator"},
    {"user": "operator", "pass": ""},
    {"user": "operator", "pass": "operator"},
    {"user": "gateway", "pass": "gateway"},
    {"user": "sys", "pass": "pass"},
    {"auth_token": "operator"},
    {"user": "operator", "pass": "$OPERATOR_PASSWORD"},
)
PATHS = (
    "/",
    "/varz",
    "/connz?auth=1&subs=1",
    "/jsz?streams=1&consumers=1&config=1",
    "/subsz?subs=1",
    "/accountz",
    "/routez",
    "/gatewayz",
    "/leafz",
    "/healthz",
    "/stacksz",
    "/ipqueuesz",
    "/expvarz",
    "/raftz",
    "/debug/pprof/",
    "/debug/vars",
    "/metrics",
    "/readyz",
    "/livez",
    "/v1/configs/models",
    "/v1/configs/export",
    "/v1/configs/epoch",
    "/docs",
    "/openapi.json",
    "/ws/status",
    "/ws/cluster-status",
    "/v1/models",
    "/health",
    "/v1/pools",
    "/v1/scaling/_default.cpu.default",
)
WRITES = (
    ("POST", "/v1/configs/models", {"id": "evil/code", "weights": {"path": "/tmp/evil"}, "family": "encoder"}),
    ("POST", "/v1/encode/sentence-transformers/all-MiniLM-L6-v2", {"items": ["x"]}),
    ("POST", "/v1/pools", {"name": "mine", "gpus": {"cpu": 1}}),
)


class Attacker:
    """A client that keeps every byte that it gets."""

    def __init__(self) -> None:
        self.loot = bytearray()

    def exchange(self, address: tuple[str, int] | str, sent: bytes) -> bytes:
        """Send bytes, and return those that arrive until the peer closes or is silent for WAIT_S."""
        family = socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX
        got = bytearray()
        with socket.socket(family) as peer:
            peer.settimeout(WAIT_S)
            try:
                peer.connect(address)
                peer.sendall(sent)
                while len(got) < 1 << 20 and (part := peer.recv(1 << 16)):
                    got += part
                    if b"PONG" in got or b"-ERR" in got:
                        break
            except TimeoutError:
                pass
        self.loot += got
        return bytes(got)

    def http(self, port: int, method: str, path: str, body: Any = None) -> int:
        """Send a request and return the status of its answer, or 0 if the answer is no HTTP."""
        content = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\nAuthorization: Bearer "
            f"guessed\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        answer = self.exchange(("127.0.0.1", port), head.encode() + content)
        return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0

    def nats(self, port: int, credentials: dict[str, str]) -> str:
        """Try to subscribe to all, write a key and delete a stream. Return `refused`, or the end of the answer."""
        words = (
            f"CONNECT {json.dumps({'verbose': False, **credentials})}\r\nSUB > 1\r\nSUB _INBOX.> 2\r\n"
            "PUB $KV.sie_keys.evil 2\r\n{}\r\nPUB $JS.API.STREAM.DELETE.WORK__default 0\r\n\r\nPING\r\n"
        )
        answer = self.exchange(("127.0.0.1", port), words.encode())
        return "refused" if b"Authorization Violation" in answer else answer[-200:].decode("latin-1")

    def port(self, port: int) -> dict[str, Any]:
        greeting = self.exchange(("127.0.0.1", port), b"PING\r\n")
        if greeting.startswith(b"INFO "):
            return {"kind": "nats", "answers": [self.nats(port, credentials) for credentials in CONNECTS]}
        replies = {path: self.http(port, "GET", path) for path in PATHS}
        written = {f"{method} {path}": self.http(port, method, path, body) for method, path, body in WRITES}
        return {"kind": "http", "answers": replies | written}

    def files(self, folders: list[str]) -> dict[str, list[str]]:
        """List the entries below the folders that can be read, written or connected to, and the folders in which a file
        can be created.
        """
        opened: dict[str, list[str]] = {"read": [], "written": [], "sockets": [], "placed": []}
        for folder in folders:
            for place, below, names in os.walk(folder):
                try:
                    os.close(os.open(f"{place}/evil", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644))
                    opened["placed"].append(place)
                except OSError:
                    pass
                for path in (f"{place}/{name}" for name in [*names, *below]):
                    self._file(path, opened)
        return opened

    def _file(self, path: str, opened: dict[str, list[str]]) -> None:
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode):
            return
        if stat.S_ISSOCK(mode):
            try:
                self.exchange(path, b"\x00\x00\x00\x01\x80")
                opened["sockets"].append(path)
            except PermissionError:
                pass
            return
        for flag, kind in ((os.O_RDONLY, "read"), (os.O_WRONLY, "written")):
            try:
                handle = os.open(path, flag | os.O_NONBLOCK)
            except OSError:
                continue
            opened[kind].append(path)
            self.loot += os.read(handle, 1 << 20) if kind == "read" else b""
            os.close(handle)

    def named(self, paths: list[str]) -> list[str]:
        """Return the files of a data directory that open by their names, although their folder cannot be listed."""
        opened: dict[str, list[str]] = {"read": [], "written": [], "sockets": [], "placed": []}
        for path in paths:
            try:
                self._file(path, opened)
            except PermissionError:
                continue
        return [*opened["read"], *opened["written"], *opened["sockets"]]

    def processes(self, pids: list[int]) -> list[str]:
        """List the secrets of the processes that can be opened, and the processes that can be signalled."""
        opened = []
        for pid in pids:
            self.loot += Path(f"/proc/{pid}/cmdline").read_bytes()
            for name in ("environ", "mem", "maps", "fd"):
                try:
                    os.listdir(f"/proc/{pid}/fd") if name == "fd" else Path(f"/proc/{pid}/{name}").read_bytes()
                    opened.append(f"{pid} {name}")
                except PermissionError:
                    continue
            try:
                os.kill(pid, 0)
                opened.append(f"{pid} kill")
            except PermissionError:
                continue
        return opened

    def abstract_sockets(self, pids: list[int]) -> list[str]:
        """Return the names of sockets in the abstract namespace, which no file mode protects."""
        rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        return [row[7] for row in rows if len(row) > 7 and "sie" in row[7] and row[7].startswith("@")]


def main() -> None:
    targets = json.loads(sys.argv[1])
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    attacker = Attacker()
    report = {
        "uid": os.getuid(),
        "processes": attacker.processes(targets["pids"]),
        "files": attacker.files(targets["folders"]),
        "named": attacker.named(targets["paths"]),
        "abstract": attacker.abstract_sockets(targets["pids"]),
        "ports": {str(port): attacker.port(port) for port in targets["ports"]},
    }
    report["loot"] = attacker.loot.decode("latin-1")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
