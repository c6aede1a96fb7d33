"""Which passes run now, kept in a file, so that the next process knows in what the one before it died.

    begin of a pass ──► a record: model, tokens ──► its end removes it
    the process is killed in it ──► the record stays ──► learn ──► Frontier.failed ──► the next batches are smaller

When memory of a control group ends, the kernel kills the process: no allocation fails, so nothing can be caught. It
counts such kills (`oom_kill` in memory.events and memory.oom_control), and the parent of the killed process reads that
count. Where the whole container was killed, as Kubernetes does on control groups of version 2, the count is gone. Then
a record counts only if its pass was larger than all that had fitted, and not small: other reasons kill processes too.

Of passes on a CPU alone: those on a GPU take no memory that the kernel would miss.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sie_adapter.frontier import Frontier, learnt_folder
from sie_contracts.settings import Settings
from sie_runtime import control_group

SLOTS = 64  # more than there are lanes
DOUBTED_TOKENS = 1024  # a pass below is too small for memory to be the likely reason of an unknown death
# tokens of the pass, 0 if the slot is free; the largest that had fitted; bytes of the key
_HEAD = struct.Struct("<III")
_SLOT_BYTES = 512
_FREE = bytes(_HEAD.size)
_logger = logging.getLogger("sie.adapter")


@dataclass(frozen=True)
class Record:
    """A pass that had begun and not ended. `fitted_tokens`: the largest pass of the model that had fitted before it."""

    key: str
    tokens: int
    fitted_tokens: int


class Passes:
    """The records of one adapter. `during` may be called from any thread. Nothing raises: without its file an adapter
    serves as well, and learns less.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._free = list(range(SLOTS))
        self._file: int | None = None

    @classmethod
    def of(cls, settings: Settings) -> Passes:
        """Those of the adapter on this socket."""
        name = hashlib.sha256(settings.ipc_socket_path.encode()).hexdigest()[:16]
        return cls(learnt_folder(settings) / f"passes-{name}")

    @contextlib.contextmanager
    def during(self, key: str, tokens: int, fitted_tokens: int) -> Iterator[None]:
        """Keep a record of a pass while it runs."""
        name = key.encode()
        with self._lock:
            slot = self._free.pop() if self._free and len(name) <= _SLOT_BYTES - _HEAD.size else None
        if slot is None:
            yield
            return
        self._write(slot, _HEAD.pack(tokens, fitted_tokens, len(name)) + name)
        try:
            yield
        finally:
            self._write(slot, _FREE)
            with self._lock:
                self._free.append(slot)

    def left(self) -> list[Record]:
        """The records of a process that is dead. They are removed."""
        try:
            content = self._path.read_bytes()
            self._path.unlink()
        except FileNotFoundError:
            return []
        except OSError as error:
            _logger.warning("the passes that ran cannot be read from %s: %s", self._path, error)
            return []
        slots = (content[start : start + _SLOT_BYTES] for start in range(0, len(content), _SLOT_BYTES))
        return [record for slot in slots if (record := _record(slot)) is not None]

    def _write(self, slot: int, content: bytes) -> None:
        try:
            os.pwrite(self._opened(), content, slot * _SLOT_BYTES)
        except OSError as error:
            _logger.debug("a pass is not noted in %s: %s", self._path, error)

    def _opened(self) -> int:
        with self._lock:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            return self._file


def _record(slot: bytes) -> Record | None:
    """None for a slot that is free, or was not written to its end."""
    if len(slot) < _HEAD.size:
        return None
    tokens, fitted_tokens, size = _HEAD.unpack_from(slot)
    name = slot[_HEAD.size : _HEAD.size + size]
    if not tokens or len(name) < size:
        return None
    return Record(name.decode("utf-8", "replace"), tokens, fitted_tokens)


class PostMortem:
    """Has the frontier learn of the passes that a process did not survive. Belongs to the process that starts the next
    one.
    """

    def __init__(self, passes: Passes, frontier: Callable[[], Frontier]) -> None:
        """`frontier` reads the file, which the process that died has written."""
        self._passes = passes
        self._read_frontier = frontier
        self._kills = control_group.oom_kills()

    def learn(self) -> None:
        """Of the process before, which is dead."""
        kills = control_group.oom_kills()
        is_known, self._kills = kills > self._kills, kills
        how = "was killed by the kernel, which had no memory left," if is_known else "ended, as if out of memory,"
        frontier = self._read_frontier()
        for record in self._passes.left():
            if is_known or (record.tokens > record.fitted_tokens and record.tokens >= DOUBTED_TOKENS):
                frontier.failed(record.key, record.tokens, killed=True)
                _logger.warning(
                    "the adapter's process %s in a pass of %d tokens of %s: passes of this model hold at most %s now",
                    how,
                    record.tokens,
                    record.key,
                    frontier.limit(record.key),
                )
