"""The broker's clock as this process sees it, so that ages and deadlines are the same on every machine.

    8 questions for the time ──► the answer with the least round trip ──► offset of our monotonic clock, half the round
    trip as its margin

Method: Cristian, "Probabilistic clock synchronization" (1989). Our own wall clock is not read once the broker has
answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from sie_broker import BrokerError, Queue
from sie_runtime.process import Trouble

SAMPLES = 8
EVERY_S = 30.0
RETRY_S = 1.0  # between attempts while there is no first measurement
_logger = logging.getLogger("sie.clock")


class Sample(NamedTuple):
    """One question: our clock when it was asked and when it was answered, and the broker's time in the answer."""

    asked_s: float
    answered_s: float
    broker_s: float


def estimate(samples: Iterable[Sample]) -> tuple[float, float]:
    """(broker time less ours, how far that may be off at most): of the sample with the least round trip. At least one
    sample.
    """
    best = min(samples, key=lambda sample: sample.answered_s - sample.asked_s)
    return best.broker_s - (best.asked_s + best.answered_s) / 2, (best.answered_s - best.asked_s) / 2


class BrokerClock:
    """Broker time. One task runs `run`; everybody of the process may read `now_s` and `margin_s`.

    `stream` is whose leader is asked, the one that stamps its messages. Before the first answer `now_s` is this
    machine's wall clock and `margin_s` infinite: nothing may be dropped by it.
    """

    def __init__(self, queue: Queue, stream: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._queue = queue
        self._stream = stream
        self._clock = clock
        self._offset_s = time.time() - clock()
        self._again = asyncio.Event()
        self.margin_s = math.inf
        queue.on_reconnect(self._reconnected)

    def now_s(self) -> float:
        """Seconds since 1970 at the broker, give or take `margin_s`."""
        return self._clock() + self._offset_s

    def ahead_s(self) -> float | None:
        """This machine's wall clock less the broker's, give or take `margin_s`; None before the first answer."""
        return None if math.isinf(self.margin_s) else time.time() - self.now_s()

    async def measure(self) -> None:
        """Ask SAMPLES times. Raises BrokerError if there is no answer at all; what was measured before stays."""
        samples: list[Sample] = []
        for _ in range(SAMPLES):
            asked_s = self._clock()
            try:
                broker_s = await self._queue.server_time(self._stream)
            except BrokerError:
                if not samples:
                    raise
                break
            samples.append(Sample(asked_s, self._clock(), broker_s))
        self._offset_s, self.margin_s = estimate(samples)

    async def run(self) -> None:
        """Measure now, every EVERY_S and after each reconnect, until cancelled."""
        trouble = Trouble(_logger, "the broker's time could not be read, its last known offset is kept")
        while True:
            self._again.clear()
            pause_s = EVERY_S
            try:
                await self.measure()
                trouble.passed()
            except BrokerError as error:
                trouble.met(error)
                pause_s = RETRY_S if math.isinf(self.margin_s) else EVERY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._again.wait()

    async def _reconnected(self) -> None:
        self._again.set()
