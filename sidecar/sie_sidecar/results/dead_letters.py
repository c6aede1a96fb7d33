"""Work that was given up goes into a stream of its own, whole, before its message leaves the queue. `sie
dlq` reads it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable

from sie_broker import BrokerError, Delivery, Queue
from sie_contracts.errors import ErrorInfo
from sie_contracts.wire import messages, topology
from sie_contracts.wire.messages import DeadLetter
from sie_runtime.failpoints import failpoint
from sie_sidecar.metrics import SidecarMetrics

ATTEMPTS = 3
PUBLISH_TIMEOUT_S = 2.0
PAUSE_S = 0.5
_logger = logging.getLogger("sie.sidecar.dead_letters")


class DeadLetterWriter:
    """The dead letters that this worker writes, all to its own `pool`: those of a reservation outlive it. `now_s` is
    broker time.
    """

    def __init__(
        self, queue: Queue, pool: str, worker: str, metrics: SidecarMetrics, now_s: Callable[[], float]
    ) -> None:
        self._queue = queue
        self._pool = pool
        self._worker = worker
        self._metrics = metrics
        self._now_s = now_s

    async def write(
        self, delivery: Delivery, error: ErrorInfo, *, deaths: int = 0, workers: tuple[str, ...] = ()
    ) -> bool:
        """Keep a delivery with why it was given up, once however often it is tried. False, with an error in the log, if
        it is lost.

        What the broker does not take in ATTEMPTS is lost: work that is never settled would come back for as long as its
        stream keeps it.
        """
        name = letter_id(topology.stream_name(topology.pool_of(delivery.subject)), delivery)
        letter = DeadLetter(
            name,
            delivery.subject,
            delivery.data,
            error,
            tuple(dict.fromkeys((*workers, self._worker))),
            delivery.delivered,
            deaths,
            self._now_s(),
        )
        data = messages.encode(letter)
        failpoint("dead_letters.before_publish")
        for attempt in range(ATTEMPTS):
            try:
                await self._queue.publish(topology.dead_letter_subject(self._pool), data, name, PUBLISH_TIMEOUT_S)
            except BrokerError as failure:
                if attempt + 1 < ATTEMPTS:
                    await asyncio.sleep(PAUSE_S)  # between attempts at a broker that is away
                    continue
                _logger.error("dead letter %s is lost: %s", name, failure)
                self._metrics.dead_letters.labels("lost").inc()
                return False
            break
        _logger.error("work was given up, `sie dlq show %s` tells which: %s %s", name, error.code, error.reason)
        self._metrics.dead_letters.labels("kept").inc()
        failpoint("dead_letters.published")
        return True


def letter_id(stream: str, delivery: Delivery) -> str:
    """The same for every delivery of one message."""
    return hashlib.sha256(f"{stream} {delivery.sequence} {delivery.sent_s:.6f}".encode()).hexdigest()[:12]
