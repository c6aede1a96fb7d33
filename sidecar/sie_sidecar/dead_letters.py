"""Dead letters: messages that no worker will try again are copied to a separate stream, which `sie dlq` reads."""

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
    """Writes dead letters to the stream of `pool` (SIE_POOL), also for work of a reservation (a temporary pool),
    because the streams of a reservation are removed at its end. `now_s` returns the time of the broker's clock.
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
        """Store the message of a delivery once, with the error of its work. Return False if ATTEMPTS attempts failed
        and the letter is lost. Even then the caller acknowledges or terminates the message: otherwise the broker would
        deliver it for ever.
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
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await self._queue.publish(topology.dead_letter_subject(self._pool), data, name, PUBLISH_TIMEOUT_S)
                break
            except BrokerError as failure:
                if attempt == ATTEMPTS:
                    _logger.error("dead letter %s could not be stored and is lost: %s", name, failure)
                    self._metrics.dead_letters.labels("lost").inc()
                    return False
            await asyncio.sleep(PAUSE_S)  # the broker may be unreachable for a while
        _logger.error(
            "a message failed and is now a dead letter, see `sie dlq show %s`: %s %s", name, error.code, error.reason
        )
        self._metrics.dead_letters.labels("kept").inc()
        failpoint("dead_letters.published")
        return True


def letter_id(stream: str, delivery: Delivery) -> str:
    """Return the id of the dead letter for a delivery. All deliveries of one message have the same id."""
    return hashlib.sha256(f"{stream} {delivery.sequence} {delivery.sent_s:.6f}".encode()).hexdigest()[:12]
