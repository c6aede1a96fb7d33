"""Estimate of the broker's clock, by which all machines judge ages and deadlines.

    8 requests for the time ──► the reply with the shortest round trip ──► offset of this process's monotonic clock
                                                                     └─► half of this round trip: margin of error

Method: Cristian, "Probabilistic clock synchronization" (1989). After the first measurement, `now_s` uses only the
monotonic clock and this offset, so a change of this machine's wall clock has no effect on it.
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
from sie_runtime.process import Trouble, wait_set

SAMPLES = 8
EVERY_S = 30.0
RETRY_S = 1.0  # seconds between two attempts, until the first measurement succeeds
_logger = logging.getLogger("sie.clock")


class ClockSample(NamedTuple):
    """Times in seconds: the monotonic times at which a request was sent and its reply was received, and the broker's
    time in the reply.
    """

    asked_s: float
    answered_s: float
    broker_s: float


def estimate(samples: Iterable[ClockSample]) -> tuple[float, float]:
    """Return (broker's time minus monotonic time, margin of error) in seconds, from the sample with the shortest round
    trip. The broker's time in a sample is taken as the time in the middle of the round trip.
    """
    best = min(samples, key=lambda sample: sample.answered_s - sample.asked_s)
    return best.broker_s - (best.asked_s + best.answered_s) / 2, (best.answered_s - best.asked_s) / 2


class BrokerClock:
    """Clock of the broker. One task runs `run`; every task of the process may use `now_s` and `margin_s`.

    `stream`: the source of the time is the broker's server that leads this stream, because this server sets the
    timestamps of messages. Before the first measurement, `now_s` is the wall clock of this machine and `margin_s` is
    infinite, so that callers drop no message as too old.
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
        """Return the broker's time in seconds since 1970. At the last measurement, the error was at most `margin_s`."""
        return self._clock() + self._offset_s

    def ahead_s(self) -> float | None:
        """Return the wall clock minus the broker's clock, in seconds; None before the first measurement. The error is
        at most `margin_s`.
        """
        return None if math.isinf(self.margin_s) else time.time() - self.now_s()

    async def measure(self) -> None:
        """Measure the broker's time with SAMPLES requests; stop at a request that fails. If the first request fails,
        keep the previous offset and margin, and raise BrokerError.
        """
        samples: list[ClockSample] = []
        for _ in range(SAMPLES):
            asked_s = self._clock()
            try:
                broker_s = await self._queue.server_time(self._stream)
            except BrokerError:
                if not samples:
                    raise
                break
            samples.append(ClockSample(asked_s, self._clock(), broker_s))
        self._offset_s, self.margin_s = estimate(samples)

    async def begin(self) -> None:
        """Measure the broker's time once. Ignore a BrokerError, because `run` measures again and logs its errors."""
        with contextlib.suppress(BrokerError):
            await self.measure()

    async def run(self) -> None:
        """Measure the broker's time now, every EVERY_S seconds and after each reconnect, until cancelled."""
        trouble = Trouble(
            _logger,
            "the broker's time could not be read; the last estimate of it, or else this machine's clock, stays in use",
        )
        while True:
            self._again.clear()
            pause_s = EVERY_S
            try:
                await self.measure()
                trouble.passed()
            except BrokerError as error:
                trouble.met(error)
                pause_s = RETRY_S if math.isinf(self.margin_s) else EVERY_S
            await wait_set(self._again, pause_s)

    async def _reconnected(self) -> None:
        self._again.set()
