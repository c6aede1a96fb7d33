"""Output of all processes of `sie serve` on one stream."""

from __future__ import annotations

import errno
import os
import sys
from datetime import UTC, datetime

import msgspec

_NATS_LEVELS = {"[WRN]": "WARNING", "[ERR]": "ERROR", "[FTL]": "CRITICAL"}


def _matters(line: str) -> bool:
    """Return whether to show a line of nats-server. Its long banner at the start, of level INF, would hide important
    lines. So lines of this level are hidden, except those about slow consumers. The warning about plaintext passwords
    is hidden, because the passwords are random, valid for one start, and in none of the server's files.
    """
    return "Slow Consumer" in line or not ("[INF]" in line or "Plaintext passwords" in line)


class LineOutput:
    """Printer for the lines of all processes, each with its process's name; with --log-json, each as a JSON object.
    Lines that a process has written together are printed by one write.
    """

    def __init__(self, *, json: bool) -> None:
        self._json = json

    def __call__(self, name: str, *lines: str, level: str = "INFO") -> None:
        shown = [self._shown(name, line, level) for line in lines if name != "nats-server" or _matters(line)]
        if not shown:
            return
        try:
            print("\n".join(shown), file=sys.stderr, flush=True)  # noqa: T201  this is the program's output
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return  # the disk of the log is full: later lines are written when it has space again
            # The reader has closed the pipe, so write to /dev/null: child processes can still print, and the flush at
            # the interpreter's exit does not fail and change the exit status.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stderr.fileno())
            os.close(nowhere)

    def _shown(self, name: str, line: str, level: str) -> str:
        if not self._json:
            return f"[{name}] {line}"
        if line.startswith("{"):
            return line
        if name == "nats-server":
            level = next((level for mark, level in _NATS_LEVELS.items() if mark in line), "INFO")
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        entry = {
            "timestamp": stamp,
            "level": level,
            "logger": name,
            "message": line,
            "model": None,
            "request_id": None,
            "trace_id": None,
            "latency_ms": None,
            "worker": None,
            "key": None,
        }
        return msgspec.json.encode(entry).decode()
