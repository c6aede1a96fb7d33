"""Records of inputs that crash adapters. All workers share the records, which outlive restarts. A record has a digest
of the input's content, and not its text.

    an adapter dies ──► the inputs that were running are marked, and each runs alone ──► success: its mark is removed
                                                           └──► adapters die twice while it runs alone:
                                                                the input is poison, and is refused from now on

One death while an input runs alone may have another cause, such as the kernel that needs memory.

The marks are in a NATS key-value bucket, and expire after POISON_LIFETIME_S. Each worker watches the bucket. Without a
broker, or if the broker has lost the bucket, a worker uses the marks in its memory. If the bucket was lost and created
again, it is empty; a worker stores a mark in it when the marked input crashes an adapter again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec

from sie_broker import BrokerError, Store, Write, WrongRevision
from sie_broker.record import Record, RecordBucket
from sie_contracts.errors import InferenceFailed
from sie_contracts.wire.topology import POISON_BUCKET, POISON_LIFETIME_S
from sie_runtime.failpoints import failpoint
from sie_runtime.process import Trouble

POISON_DEATHS = 3  # the first one in a batch, where another input may be the cause, and two alone
# maximum number of marks in memory. A further mark replaces the oldest mark, whose input may then crash adapters again
MAX_MARKS = 1 << 16
WRITES_AT_ONCE = 256  # marks in one write; the broker accepts at most 1,000 in one batch
PATIENCE_S = 2.0  # seconds to wait for the broker to store marks; then the worker goes on
REOPEN_S = 2.0
_logger = logging.getLogger("sie.sidecar.poison")


class Mark(msgspec.Struct, frozen=True, omit_defaults=True):
    """Number of deaths of adapters while an input with this content ran, counted up to POISON_DEATHS. `at_s`: time of
    the last death by the broker's clock. `workers`: the last POISON_DEATHS workers whose adapters died.
    """

    model: str
    deaths: int
    at_s: float
    workers: tuple[str, ...] = ()

    @property
    def is_poison(self) -> bool:
        return self.deaths >= POISON_DEATHS


_decoder = msgspec.msgpack.Decoder(Mark)


def after_death(before: Mark | None, model: str, worker: str, now_s: float) -> Mark:
    """Return the mark after an adapter died while the content ran, alone or in a batch. `before`: the earlier mark."""
    deaths, workers = (before.deaths, before.workers) if before else (0, ())
    return Mark(model, min(deaths + 1, POISON_DEATHS), now_s, (*workers, worker)[-POISON_DEATHS:])


def refusal() -> InferenceFailed:
    return InferenceFailed(
        "the inference process ended twice while this input ran alone, so it is not run again", reason="poison"
    )


class PoisonMarks:
    """Poison marks that this worker has read from the bucket or has added itself. `now_s`: the broker's clock."""

    def __init__(self, broker: Store, worker: str, now_s: Callable[[], float]) -> None:
        self._worker = worker
        self._now_s = now_s
        # digest of the content -> mark, and its revision in the bucket (0 before the broker has stored the mark)
        self._known: OrderedDict[str, tuple[Mark, int]] = OrderedDict()
        # model -> number of marked contents; inputs of other models need no check
        self.models: Counter[str] = Counter()
        self._is_open = False
        self._bucket = RecordBucket(broker, POISON_BUCKET, max_age_s=POISON_LIFETIME_S)
        self._record = Record(
            self._bucket, lambda entry: _decoder.decode(entry.value or b""), self._on_mark, on_lost=self._on_lost
        )

    async def open(self) -> None:
        """Read all marks and watch the bucket. Raises BrokerError."""
        await self._record.follow()
        self._is_open = True

    async def run(self) -> None:
        """Open the bucket, and open it again whenever it was lost. Retries every REOPEN_S seconds."""
        trouble = Trouble(_logger, "the records of inputs that crash adapters (poison marks) cannot be read yet")
        while True:
            if self._record.is_stale:
                with trouble.logged(BrokerError):
                    await self.open()
            await asyncio.sleep(REOPEN_S)

    async def close(self) -> None:
        await self._record.close()

    def get(self, key: str) -> Mark | None:
        """Return the mark of a content, or None. An expired mark is removed."""
        entry = self._known.get(key)
        if entry is None:
            return None
        if self._now_s() - entry[0].at_s >= POISON_LIFETIME_S:
            self._discard(key)
            return None
        return entry[0]

    async def died(self, model: str, keys: Iterable[str]) -> None:
        """Add one death to each content that ran when an adapter died. Returns after at most PATIENCE_S."""
        writes = []
        for key in dict.fromkeys(keys):
            before = self.get(key)
            mark = after_death(before, model, self._worker, self._now_s())
            revision = self._known[key][1] if before else 0
            self._keep(key, mark, revision)
            writes.append(Write(key, msgspec.msgpack.encode(mark), None if mark.is_poison else revision))
        failpoint("poison.before_mark")
        await self._write(writes)

    async def suspected(self, model: str, keys: Iterable[str]) -> None:
        """Record one death of an adapter for each content in `keys` that has no mark. All contents ran in one batch. A
        marked content gets no further death, because another content of the batch may be the cause.
        """
        await self.died(model, [key for key in keys if self.get(key) is None])

    def clear(self, key: str) -> Coroutine[Any, Any, None]:
        """Remove the mark of a content that ran without a crash. Await the returned coroutine to remove the mark at the
        broker too.
        """
        _, revision = self._known.get(key, (None, 0))
        self._discard(key)
        return self._write([Write(key, None, revision)] if revision else [])

    async def _write(self, writes: list[Write]) -> None:
        if not self._is_open or not writes:
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                for start in range(0, len(writes), WRITES_AT_ONCE):
                    await self._write_some(writes[start : start + WRITES_AT_ONCE])
        except (BrokerError, TimeoutError) as error:
            _logger.warning(
                "%d records of inputs that crash adapters (poison marks) were not stored for other workers: %r",
                len(writes),
                error,
            )

    async def _write_some(self, writes: list[Write]) -> None:
        """Write marks in one batch. If another worker has changed one of these marks, write each mark alone; a mark
        that another worker has changed is not written.
        """
        try:
            last = await self._bucket.write(writes)
        except WrongRevision:
            for write in writes:
                try:
                    self._written(write, await self._bucket.write([write]))
                except WrongRevision:
                    _logger.info("another worker has already stored a poison mark for an input that crashed an adapter")
        else:
            for revision, write in enumerate(writes, last - len(writes) + 1):
                self._written(write, revision)

    def _written(self, write: Write, revision: int) -> None:
        entry = self._known.get(write.key)
        if entry is not None and write.value is not None and entry[1] < revision:
            self._known[write.key] = (entry[0], revision)

    def _on_lost(self) -> None:
        self._known = OrderedDict((key, (mark, 0)) for key, (mark, _) in self._known.items())

    def _on_mark(self, key: str, mark: Mark | None, revision: int) -> None:
        entry = self._known.get(key)
        if entry is not None and entry[1] >= revision:
            return
        if mark is None:
            if entry is not None and entry[1]:
                self._discard(key)
        elif entry is None or entry[0].deaths <= mark.deaths:
            self._keep(key, mark, revision)

    def _keep(self, key: str, mark: Mark, revision: int) -> None:
        self._discard(key)
        self._known[key] = (mark, revision)
        self.models[mark.model] += 1
        if len(self._known) > MAX_MARKS:
            self._discard(next(iter(self._known)))

    def _discard(self, key: str) -> None:
        entry = self._known.pop(key, None)
        if entry is not None:
            self.models[entry[0].model] -= 1
            if not self.models[entry[0].model]:
                del self.models[entry[0].model]
