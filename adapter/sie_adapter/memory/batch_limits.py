"""Limits of the tokens of one pass: learnt from passes that fitted and passes that ran out of memory, for each model on
each device.

    before a pass: limit(key) ──► split_off(chosen, lengths, limit) ──► a pass that is known to fit, and the rest
    after a pass:  fits(key, tokens) | failed(key, tokens) ──► the edge moves, and is kept on disk

The rule. A failure of n tokens sets the edge to n, and the limit to what fitted below it, at least n / 2; where n had
fitted before, less memory is free now and n / 2 is all that is still believed. Failures of the past do not hold
for ever, since another process may have taken the memory: for every WAIT_S without news the limit rises by RAISE. If
a pass of the risen size fails, the wait doubles, up to MAX_WAIT_S, so a device that is simply too small is tried ever
more rarely; if it fits, the wait begins anew, from there. A failure that killed the process cost its models and its
other batches: half of its tokens count as failed as well, and the wait begins at KILLED_WAIT_S.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from sie_adapter.packed.packing import Int64
from sie_contracts.settings import Settings
from sie_runtime import control_group

WAIT_S = 30.0
KILLED_WAIT_S = 480.0
MAX_WAIT_S = 1920.0
RAISE = 1.25
FORGET_STEPS = 40  # 1.25 ** 40 is 7,500 times what failed: nothing is left of it
MAX_KEYS = 256
_SAVE_EVERY_S = 1.0
_logger = logging.getLogger("sie.adapter")


class BatchLimit(msgspec.Struct):
    """`fit_tokens`: the largest pass that fitted. `fail_tokens`: the smallest that failed, 0 if none did. `since_s`: of
    the last news. `wait_s`: until the limit rises; it begins at `first_wait_s`.
    """

    fit_tokens: int = 0
    fail_tokens: int = 0
    since_s: float = 0.0
    wait_s: float = WAIT_S
    first_wait_s: float = WAIT_S


class _LimitsFile(msgspec.Struct):
    edges: dict[str, BatchLimit]


def limits_key(fingerprint: str, precision: str, device: str) -> str:
    """The key of a loaded model on a device: its fingerprint, the precision it computes in, the device's label."""
    return "/".join((fingerprint, precision, device.replace(" ", "-")))


def learnt_folder(settings: Settings) -> Path:
    """The folder of the files that the adapters of a machine share."""
    return settings.cache_folder / "sie"


def split_off(chosen: Int64, lengths: Int64, limit: int | None) -> tuple[Int64, Int64]:
    """The next part of the `chosen` items, of at most `limit` tokens and at least one item, and the rest. Short items
    go first.
    """
    if limit is None or lengths[chosen].sum() <= limit:
        return chosen, chosen[:0]
    ordered = chosen[np.argsort(lengths[chosen], kind="stable")]
    count = max(1, int(np.searchsorted(np.cumsum(lengths[ordered]), limit, side="right")))
    return ordered[:count], ordered[count:]


def _believed(edge: BatchLimit) -> int:
    return max(1, min(edge.fail_tokens - 1, max(edge.fit_tokens, edge.fail_tokens // 2)))


class DeviceLimits:
    """The edges of this device, at most MAX_KEYS, kept in the file at `path`. Every method may be called from any
    thread. None raises.

    The file is read at the first use: a spare process may have been started long before. `clock` is wall time, which a
    restart survives.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._edges: dict[str, BatchLimit] = {}
        self._read = False
        self._dirty = False
        self._saved_s = 0.0

    @classmethod
    def for_machine(cls, settings: Settings) -> DeviceLimits:
        """The limits of this machine, which all of its adapters share."""
        return cls(learnt_folder(settings) / "frontier.json")

    def limit(self, key: str) -> int | None:
        """The most tokens that a pass should have now; None while nothing is known to fail. At least 1."""
        with self._lock:
            edge = self._edge(key)
            return self._limit(edge) if edge and edge.fail_tokens else None

    def fitted(self, key: str) -> int:
        """The tokens of the largest pass that went through; 0 while none did."""
        with self._lock:
            edge = self._edge(key)
            return edge.fit_tokens if edge else 0

    def fits(self, key: str, tokens: int) -> None:
        """A pass of so many tokens went through."""
        with self._lock:
            edge = self._edge(key) or self._add(key)
            if tokens <= edge.fit_tokens:
                return
            was_raised = bool(edge.fail_tokens) and tokens > _believed(edge)
            edge.fit_tokens = tokens
            if not edge.fail_tokens:
                return
            if was_raised:
                edge.since_s, edge.wait_s = self._clock(), edge.first_wait_s
            if tokens >= edge.fail_tokens:
                edge.fail_tokens = int(tokens * RAISE) + 1
            self._dirty = True
            if self._clock() - self._saved_s >= _SAVE_EVERY_S:
                self._save()

    def failed(self, key: str, tokens: int, *, killed: bool = False) -> None:
        """A pass of so many tokens ran out of memory. `killed`: the process did not survive it."""
        with self._lock:
            edge = self._edge(key) or self._add(key)
            if killed:
                tokens = max(1, tokens // 2)
            if edge.fail_tokens:
                if tokens > self._limit(edge):
                    return  # an item that is larger alone, or another lane's pass of before: no news
                edge.wait_s = min(2 * edge.wait_s, MAX_WAIT_S) if tokens > _believed(edge) else edge.first_wait_s
            if killed:
                edge.first_wait_s = KILLED_WAIT_S
                edge.wait_s = max(edge.wait_s, KILLED_WAIT_S)
            if tokens <= edge.fit_tokens:
                edge.fit_tokens = tokens // 2
            edge.fail_tokens, edge.since_s = tokens, self._clock()
            self._dirty = True
            self._save()

    def save(self) -> None:
        """Write what is not written yet."""
        with self._lock:
            if self._dirty:
                self._save()

    def _steps(self, edge: BatchLimit) -> int:
        return min(FORGET_STEPS, max(0, int((self._clock() - edge.since_s) / edge.wait_s)))

    def _limit(self, edge: BatchLimit) -> int:
        believed, steps = _believed(edge), self._steps(edge)
        return max(int(believed * RAISE**steps), believed + steps)  # RAISE alone would never lift a limit of 1

    def _edge(self, key: str) -> BatchLimit | None:
        if not self._read:
            self._read = True
            self._edges = self._stored()
        return self._edges.get(key)

    def _add(self, key: str) -> BatchLimit:
        while len(self._edges) >= MAX_KEYS:
            del self._edges[min(self._edges, key=lambda key: self._edges[key].since_s)]
        self._edges[key] = edge = BatchLimit()
        return edge

    def _stored(self) -> dict[str, BatchLimit]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_LimitsFile).edges
        except FileNotFoundError:
            return {}
        except OSError as error:
            _logger.warning("the batch limits at %s cannot be read: %s", self._path, error)
            return {}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            aside = self._path.with_suffix(".corrupt")
            _logger.warning("the batch limits at %s is moved to %s and learnt anew: %s", self._path, aside.name, error)
            try:
                self._path.replace(aside)
            except OSError as moving:
                _logger.warning("%s cannot be moved: %s", self._path, moving)
            return {}

    def _save(self) -> None:
        # what another process of this machine learnt of other models stays
        edges = self._stored() | self._edges
        learnt = {key: edge for key, edge in edges.items() if edge.fail_tokens and self._steps(edge) < FORGET_STEPS}
        latest = sorted(learnt, key=lambda key: learnt[key].since_s)[-MAX_KEYS:]
        draft = self._path.with_suffix(f".{os.getpid()}")
        self._dirty, self._saved_s = False, self._clock()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(_LimitsFile({key: learnt[key] for key in latest})))
            draft.replace(self._path)
        except OSError as error:
            _logger.warning("the batch limits cannot be kept at %s: %s", self._path, error)


SLOTS = 64  # more than there are lanes
DOUBTED_TOKENS = 1024  # a pass below is too small for memory to be the likely reason of an unknown death
# tokens of the pass, 0 if the slot is free; the largest that had fitted; bytes of the key
_HEAD = struct.Struct("<III")
_SLOT_BYTES = 512
_FREE = bytes(_HEAD.size)


@dataclass(frozen=True)
class PassRecord:
    """A pass that had begun and not ended. `fitted_tokens`: the largest pass of the model that had fitted before it."""

    key: str
    tokens: int
    fitted_tokens: int


class PassRecords:
    """The records of one adapter. `during` may be called from any thread. Nothing raises: without its file an adapter
    serves as well, and learns less.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._free = list(range(SLOTS))
        self._file: int | None = None

    @classmethod
    def for_socket(cls, settings: Settings) -> PassRecords:
        """The records of the adapter on this socket."""
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

    def left(self) -> list[PassRecord]:
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


def _record(slot: bytes) -> PassRecord | None:
    """None for a slot that is free, or was not written to its end."""
    if len(slot) < _HEAD.size:
        return None
    tokens, fitted_tokens, size = _HEAD.unpack_from(slot)
    name = slot[_HEAD.size : _HEAD.size + size]
    if not tokens or len(name) < size:
        return None
    return PassRecord(name.decode("utf-8", "replace"), tokens, fitted_tokens)


class CrashRecord:
    """Lowers the batch limits after passes that a process did not survive. Belongs to the process that starts the next
    one.
    """

    def __init__(self, pass_records: PassRecords, batch_limits: Callable[[], DeviceLimits]) -> None:
        """`batch_limits` reads the file, which the process that died has written."""
        self._pass_records = pass_records
        self._read_limits = batch_limits
        self._kills = control_group.oom_kills()

    def learn(self) -> None:
        """Lower the limits for the passes of the previous process, which is dead."""
        kills = control_group.oom_kills()
        is_known, self._kills = kills > self._kills, kills
        how = "was killed by the kernel, which had no memory left," if is_known else "ended, as if out of memory,"
        batch_limits = self._read_limits()
        for record in self._pass_records.left():
            if is_known or (record.tokens > record.fitted_tokens and record.tokens >= DOUBTED_TOKENS):
                batch_limits.failed(record.key, record.tokens, killed=True)
                _logger.warning(
                    "the adapter's process %s in a pass of %d tokens of %s: passes of this model hold at most %s now",
                    how,
                    record.tokens,
                    record.key,
                    batch_limits.limit(record.key),
                )
