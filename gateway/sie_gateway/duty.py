"""A duty that one process at a time has, by a key in the broker that its holder writes again and again."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable

from sie_broker import KeyValue, Write, WrongRevision

LAPSE_S = 30.0  # three rounds of a holder that asks every ten seconds


class Duty:
    """One process at a time; for moments it may be two or none, so what it covers must stay right then.

    No two clocks are compared: whoever does not have it watches, on its own clock, how long the key stays as it is, and
    takes it over by compare-and-set after `lapse_s`. Source: the observed-time rule of client-go's leader election.
    """

    def __init__(self, key: str, *, lapse_s: float = LAPSE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._key = key
        self._holder = uuid.uuid4().hex.encode()
        self._lapse_s = lapse_s
        self._clock = clock
        self._seen = (0, 0.0)  # the key's revision, and since when it has been that

    async def held(self, bucket: KeyValue) -> bool:
        """Take it, or renew it. Raises BrokerError."""
        entry = await bucket.get(self._key)
        now_s = self._clock()
        revision = 0 if entry is None else entry.revision
        if revision != self._seen[0]:
            self._seen = revision, now_s
        if entry is not None and entry.value != self._holder and now_s - self._seen[1] < self._lapse_s:
            return False
        try:
            self._seen = await bucket.write([Write(self._key, self._holder, revision)]), now_s
        except WrongRevision:
            return False
        return True

    async def give_up(self, bucket: KeyValue) -> None:
        """Leave it to others at once, if this process has it. Raises BrokerError."""
        entry = await bucket.get(self._key)
        if entry is not None and entry.value == self._holder:
            with contextlib.suppress(WrongRevision):  # somebody took it over
                await bucket.write([Write(self._key, None, entry.revision)])
