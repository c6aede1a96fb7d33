"""Limits of the tokens of one forward pass, per model and device, learnt from passes that fitted or ran out of memory.

    before a pass: limit(key) ──► split_off(chosen, lengths, limit) ──► the items of the next pass, and the other items
    after a pass:  fits(key, tokens) | failed(key, tokens) ──► the `BatchLimit` of the key changes and is stored on disk

* After a pass of n tokens fails, the limit is the size of the largest pass that fitted, or n / 2 if that is larger. If
a pass of n or more tokens fitted before, less memory is free now, so the limit is n / 2.
* The limit rises by the factor RAISE after each wait without a new result, because another process may have used the
memory at the time of the failure. The first wait is WAIT_S.
* A raised limit permits a pass that is larger than the limit before the raises. If such a pass fails, the wait doubles,
up to MAX_WAIT_S, so that failures are rare. If it fits, its size is the limit, and the wait is the first wait again.
* A failure that kills the adapter process ends all its models and batches, so it must be rarer than other failures. It
counts as the failure of a pass with half of the tokens, and from then on the first wait of the model is KILLED_WAIT_S.
"""

from __future__ import annotations

import contextlib
import functools
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
from sie_contracts.errors import UNDECODABLE
from sie_contracts.settings import Settings
from sie_runtime import control_group

WAIT_S = 30.0
KILLED_WAIT_S = 480.0
MAX_WAIT_S = 1920.0
RAISE = 1.25
# number of raises after which a limit stops rising and `_save` drops the limit: 40 raises multiply a limit by
# 1.25 ** 40 = 7,500
FORGET_STEPS = 40
MAX_KEYS = 256
_SAVE_EVERY_S = 1.0
_logger = logging.getLogger("sie.adapter")


class BatchLimit(msgspec.Struct):
    """Measured passes of one model on one device (`limits_key`). `fit_tokens`: tokens of the largest pass that fitted.
    If a later pass of n tokens fails, and n is at most `fit_tokens`, `fit_tokens` becomes n / 2. `fail_tokens`: tokens
    of the last recorded failure, 0 without a failure. If a later pass of n tokens fits, and n is at least
    `fail_tokens`, `fail_tokens` becomes RAISE times n, plus 1. `since_s`: wall time, in seconds, of the last result
    that changed the limit. `wait_s`: seconds from one raise of the limit to the next. `first_wait_s`: the first value
    of `wait_s`.
    """

    fit_tokens: int = 0
    fail_tokens: int = 0
    since_s: float = 0.0
    wait_s: float = WAIT_S
    first_wait_s: float = WAIT_S


class _LimitsFile(msgspec.Struct):
    edges: dict[str, BatchLimit]


def limits_key(fingerprint: str, precision: str, device: str) -> str:
    """Return the key of a loaded model on a device: its fingerprint, its precision in use, and the device's label."""
    return "/".join((fingerprint, precision, device.replace(" ", "-")))


def learnt_folder(settings: Settings) -> Path:
    return settings.cache_folder / "sie"


def split_off(chosen: Int64, lengths: Int64, limit: int) -> tuple[Int64, Int64]:
    """Return the items of the next pass, short items first, and the other items. The pass has at most `limit` tokens,
    but at least one item of `chosen`.
    """
    if lengths[chosen].sum() <= limit:
        return chosen, chosen[:0]
    ordered = chosen[np.argsort(lengths[chosen], kind="stable")]
    count = max(1, int(np.searchsorted(np.cumsum(lengths[ordered]), limit, side="right")))
    return ordered[:count], ordered[count:]


def _believed(edge: BatchLimit) -> int:
    return max(1, min(edge.fail_tokens - 1, max(edge.fit_tokens, edge.fail_tokens // 2)))


class DeviceLimits:
    """Limits for the tokens of a pass on this device, for at most MAX_KEYS models, stored in the file at `path`.
    Thread-safe. No method raises.

    The file is read at the first use of this object, because another process may change the file before this use.
    `clock` is wall time in seconds, which stays valid after a restart.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._measured: set[str] = set()  # keys whose limits this process has changed
        self._dirty = False
        self._saved_s = 0.0

    @classmethod
    def for_machine(cls, settings: Settings) -> DeviceLimits:
        """Return the limits in the file that all adapter processes of this machine share."""
        return cls(learnt_folder(settings) / "frontier.json")

    def limit(self, key: str) -> int | None:
        """Return the number of tokens that a pass may have now, at least 1; None while no pass has failed."""
        with self._lock:
            edge = self._edges.get(key)
            return self._limit(edge) if edge and edge.fail_tokens else None

    def fitted(self, key: str) -> int:
        """Return `fit_tokens` of a key (see `BatchLimit`); 0 while no pass has fitted."""
        with self._lock:
            edge = self._edges.get(key)
            return edge.fit_tokens if edge else 0

    def fits(self, key: str, tokens: int) -> None:
        with self._lock:
            edge = self._edges.get(key) or self._add(key)
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
            self._measured.add(key)
            self._dirty = True
            if abs(self._clock() - self._saved_s) >= _SAVE_EVERY_S:
                self._save()

    def failed(self, key: str, tokens: int, *, killed: bool = False) -> None:
        """Record that a pass of `tokens` tokens ran out of memory. `killed`: the process did not survive the pass."""
        with self._lock:
            edge = self._edges.get(key) or self._add(key)
            if killed:
                tokens = max(1, tokens // 2)
            if edge.fail_tokens:
                if tokens > self._limit(edge):
                    # Ignore the failure of a pass above the limit: the pass had a single item, or began before another
                    # thread lowered the limit.
                    return
                edge.wait_s = min(2 * edge.wait_s, MAX_WAIT_S) if tokens > _believed(edge) else edge.first_wait_s
            if killed:
                edge.first_wait_s = KILLED_WAIT_S
                edge.wait_s = max(edge.wait_s, KILLED_WAIT_S)
            if tokens <= edge.fit_tokens:
                edge.fit_tokens = tokens // 2
            edge.fail_tokens, edge.since_s = tokens, self._clock()
            self._measured.add(key)
            self._dirty = True
            self._save()

    def save(self) -> None:
        with self._lock:
            if self._dirty:
                self._save()

    def _steps(self, edge: BatchLimit) -> int:
        now_s = self._clock()
        # if the clock was set back, `since_s` may lie in the future: the wait then begins now
        edge.since_s = min(edge.since_s, now_s)
        return min(FORGET_STEPS, int((now_s - edge.since_s) / edge.wait_s))

    def _limit(self, edge: BatchLimit) -> int:
        believed, steps = _believed(edge), self._steps(edge)
        # add at least 1 token per step, because `int` rounds small products down: int(1 * 1.25 ** 3) is 1
        return max(int(believed * RAISE**steps), believed + steps)

    @functools.cached_property
    def _edges(self) -> dict[str, BatchLimit]:
        return self._stored()

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
            _logger.warning("the batch limits at %s cannot be read, so they are measured again: %s", self._path, error)
            return {}
        except UNDECODABLE as error:
            aside = self._path.with_suffix(".corrupt")
            _logger.warning(
                "the batch limits at %s are corrupt, so they are measured again, and the file is moved to %s: %s",
                self._path,
                aside.name,
                error,
            )
            try:
                self._path.replace(aside)
            except OSError as moving:
                _logger.warning("%s cannot be moved, so the next save replaces it: %s", self._path, moving)
            return {}

    def _save(self) -> None:
        # keep the limits of other models that another process of this machine has stored in the file
        edges = self._stored() | {key: edge for key, edge in self._edges.items() if key in self._measured}
        learnt = {key: edge for key, edge in edges.items() if edge.fail_tokens and self._steps(edge) < FORGET_STEPS}
        latest = sorted(learnt, key=lambda key: learnt[key].since_s)[-MAX_KEYS:]
        draft = self._path.with_suffix(f".{os.getpid()}")
        self._dirty, self._saved_s = False, self._clock()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(_LimitsFile({key: learnt[key] for key in latest})))
            draft.replace(self._path)
        except OSError as error:
            _logger.warning("the batch limits cannot be written to %s, so a restart loses them: %s", self._path, error)
            with contextlib.suppress(OSError):
                draft.unlink()


SLOTS = 64  # number of passes that can be recorded at the same time; a further pass runs without a record
# A smaller pass is not recorded, because it needs little memory besides the weights. If the kernel killed the process
# during a recorded small pass, the limit of the model would fall to a few tokens, and a limit rises slowly.
RECORDED_TOKENS = 256
# if a process ends for an unknown reason, only a running pass of at least this number of tokens counts as the cause
DOUBTED_TOKENS = 1024
# head of a slot: tokens of the pass (0 if the slot is free), tokens of the largest earlier pass that fitted, and length
# of the key in bytes
_HEAD = struct.Struct("<III")
_SLOT_BYTES = 512
_FREE = bytes(_HEAD.size)


@dataclass(frozen=True)
class PassRecord:
    """Pass that ran when its process ended. `fitted_tokens`: tokens of the model's largest earlier pass that fitted."""

    key: str
    tokens: int
    fitted_tokens: int


class PassRecords:
    """File with records of the passes that one adapter process is running. `during` is thread-safe. No method raises an
    error if the file cannot be read or written: passes then run without records, so a crash of the process lowers no
    limit.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._free = list(range(SLOTS))
        self._file: int | None = None

    @classmethod
    def for_socket(cls, settings: Settings) -> PassRecords:
        name = hashlib.sha256(settings.ipc_socket_path.encode()).hexdigest()[:16]
        return cls(learnt_folder(settings) / f"passes-{name}")

    @contextlib.contextmanager
    def during(self, key: str, tokens: int, fitted_tokens: int) -> Iterator[None]:
        """Keep a record of a pass in the file while the pass runs, if a slot is free and the key fits into the slot."""
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
        """Return the records that a dead process left in the file, and remove the file."""
        try:
            content = self._path.read_bytes()
            self._path.unlink()
        except FileNotFoundError:
            return []
        except OSError as error:
            _logger.warning("the records of passes in %s cannot be read, so no limit is lowered: %s", self._path, error)
            return []
        slots = (content[start : start + _SLOT_BYTES] for start in range(0, len(content), _SLOT_BYTES))
        return [record for slot in slots if (record := _record(slot)) is not None]

    def _write(self, slot: int, content: bytes) -> None:
        try:
            os.pwrite(self._opened(), content, slot * _SLOT_BYTES)
        except OSError as error:
            _logger.debug("a pass cannot be recorded in %s: %s", self._path, error)

    def _opened(self) -> int:
        with self._lock:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            return self._file


def _record(slot: bytes) -> PassRecord | None:
    """Return the record in a slot; None if the slot is free, or was not written completely."""
    if len(slot) < _HEAD.size:
        return None
    tokens, fitted_tokens, size = _HEAD.unpack_from(slot)
    name = slot[_HEAD.size : _HEAD.size + size]
    if not tokens or len(name) < size:
        return None
    return PassRecord(name.decode("utf-8", "replace"), tokens, fitted_tokens)


class CrashRecord:
    """Reader of the pass records of an ended adapter process. `learn` lowers the limits of models whose passes probably
    killed that process. The process that starts the next adapter process runs this code.
    """

    def __init__(self, pass_records: PassRecords, batch_limits: Callable[[], DeviceLimits]) -> None:
        """`batch_limits` returns the limits from the file that the dead process wrote."""
        self._pass_records = pass_records
        self._read_limits = batch_limits
        self._kills = control_group.oom_kills()

    def learn(self) -> None:
        """Lower the limit of each model that ran a pass when the previous process ended, if memory probably ran out."""
        kills = control_group.oom_kills()
        is_known, self._kills = kills > self._kills, kills
        how = "was killed by the kernel for lack of memory" if is_known else "ended, probably for lack of memory,"
        batch_limits = self._read_limits()
        for record in self._pass_records.left():
            if is_known or (record.tokens > record.fitted_tokens and record.tokens >= DOUBTED_TOKENS):
                batch_limits.failed(record.key, record.tokens, killed=True)
                _logger.warning(
                    "the adapter's process %s in a pass of %d tokens of %s, whose passes now have at most %s tokens",
                    how,
                    record.tokens,
                    record.key,
                    batch_limits.limit(record.key),
                )
