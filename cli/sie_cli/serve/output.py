"""The lines of all processes of `sie serve` on one stream."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime

import msgspec


def _matters(line: str) -> bool:
    """Whether a line of nats-server is for people. Its banner would bury what is; why it ends a connection is at the
    level of the banner. The passwords that it warns of are random ones of this start, in no file of the server.
    """
    return "Slow Consumer" in line or not ("[INF]" in line or "Plaintext passwords" in line)


class LineOutput:
    """Lines of all processes on one stream: prefixed, or with --log-json each a JSON object."""

    def __init__(self, *, json: bool) -> None:
        self._json = json

    def __call__(self, name: str, line: str) -> None:
        if name == "nats-server" and not _matters(line):
            return
        try:
            print(self._shown(name, line), file=sys.stderr, flush=True)  # noqa: T201  this is the program's output
        except OSError:
            # whoever read our output is gone: children's output must still be taken, and this process still end with
            # its own status, which the interpreter's last flush would otherwise replace
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stderr.fileno())
            os.close(nowhere)

    def _shown(self, name: str, line: str) -> str:
        if not self._json:
            return f"[{name}] {line}"
        if line.startswith("{"):
            return line
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        entry = {
            "timestamp": stamp,
            "level": "INFO",
            "logger": name,
            "message": line,
            "model": None,
            "request_id": None,
            "trace_id": None,
            "latency_ms": None,
        }
        return msgspec.json.encode(entry).decode()
