"""Numbers of messages in the streams, by lane and priority. A lane is a pool, a machine profile and a bundle. Waiting
and leased messages count, even if no worker runs.

The gateway reads the numbers from the broker every EVERY_S seconds, and earlier if a caller needs newer numbers. If no
read succeeded in the last UNKNOWN_S seconds, the numbers are None.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from sie_broker import BrokerError, BrokerUnavailable, Queue, StreamMessage
from sie_broker.independent import independently
from sie_contracts.wire import topology
from sie_contracts.wire.messages import Priority
from sie_contracts.wire.topology import Lane
from sie_gateway.streams.shared import SharedTasks
from sie_runtime.process import Stop, Trouble

EVERY_S = 1.0
UNKNOWN_S = 5.0  # seconds after a read during which the gateway uses the numbers that were read
_logger = logging.getLogger("sie.gateway.backlog")


def _by_priority(counts: dict[str, int]) -> dict[str, int]:
    """Sum `counts` (subject -> number of messages) by lane and priority. The keys of the result are the first six
    tokens of a subject, which name lane and priority.
    """
    sums: Counter[str] = Counter()
    for subject, count in counts.items():
        sums[".".join(subject.split(".", 6)[:6])] += count
    return sums


class Backlog:
    """Numbers of messages of all pools. One task calls `run`. Concurrent calls of `fresh` share one read of a pool."""

    def __init__(self, queue: Queue, pools: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._queue = queue
        self._pools = pools  # the `PoolRecord`, not a copy of it: its pools change at run time
        self._clock = clock
        self._read: dict[
            str, tuple[float, dict[str, int], dict[str, int]]
        ] = {}  # pool -> (time of the read, number of messages by subject, number of messages by lane and priority)
        self._asking = SharedTasks()

    async def run(self, stop: Stop) -> None:
        """Read the numbers of messages of every pool every EVERY_S seconds until `stop`."""
        trouble = Trouble(_logger, "the backlog is unknown")
        while not await stop.wait_for(EVERY_S):
            with trouble.logged(BrokerError):
                await independently(functools.partial(self.fresh, pool, EVERY_S / 2) for pool in sorted(self._pools))

    def drop_pool(self, pool: str) -> None:
        self._read.pop(pool, None)

    async def fresh(self, pool: str, max_age_s: float) -> None:
        """Read the pool's numbers of messages if the last read is older than `max_age_s`. Raises BrokerError."""
        read = self._read.get(pool)
        if read is not None and self._clock() - read[0] < max_age_s:
            return
        if not self._queue.connected:
            raise BrokerUnavailable("no connection to the broker")
        await self._asking.run(pool, functools.partial(self._read_counts, pool))

    async def _read_counts(self, pool: str) -> None:
        asked_s = self._clock()
        counts = await self._queue.subject_counts(topology.stream_name(pool), f"sie.work.{pool}.>")
        self._read[pool] = (asked_s, counts, _by_priority(counts))

    async def oldest(self, pool: str, subjects: Sequence[str]) -> list[StreamMessage | None]:
        """Return the oldest message of each subject; None for a subject without messages. A subject may have wildcards.
        Raises BrokerError.
        """
        stream = topology.stream_name(pool)
        questions = (self._queue.first_stored(stream, subject=subject) for subject in subjects)
        # wait for all queries even if one fails, so that no query runs after the end of this call
        answers = await asyncio.gather(*questions, return_exceptions=True)
        failed = next((answer for answer in answers if isinstance(answer, BaseException)), None)
        if failed is not None:
            raise failed
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def messages(self, lane: Lane, priority: Priority) -> int | None:
        """Return the number of messages of a lane with a priority; None while the number is unknown."""
        read = self._read.get(lane.pool)
        if read is None or self._clock() - read[0] > UNKNOWN_S:
            return None
        return read[2].get(topology.lane_filter(lane, priority).removesuffix(".>"), 0)

    def by_subject(self, pool: str) -> dict[str, int] | None:
        """Return a pool's numbers of messages by subject, without empty subjects; None while they are unknown."""
        read = self._read.get(pool)
        return None if read is None or self._clock() - read[0] > UNKNOWN_S else read[1]

    async def stop(self) -> None:
        await self._asking.stop()
