"""Results leave the worker: sent as a request to the gateway's inbox, again until confirmed or the budget is over, and
only then acked.

result of a usual size ──► one request ──► taken, duplicate or unknown
larger ──► parts, one after the other, each again until confirmed ──► part ... part, taken
              last one confirmed as a mere part: the gateway misses some, or the whole is damaged; all of them again, a
              few times
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable

import msgspec

from sie_broker import BrokerUnavailable, Bus, NoResponder, PayloadTooBig
from sie_contracts import messages
from sie_contracts.errors import InternalFailure, SIEError
from sie_contracts.messages import Failed, Fragment, WorkItem, WorkResult
from sie_runtime.failpoints import failpoint
from sie_sidecar.lease import Lease, Leases
from sie_sidecar.metrics import Metrics

CONFIRM_TIMEOUT_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
# of one message: 32 MiB at a broker of 8 MiB took 0.83 s, in parts of 1 MiB 0.20 s (nats-py 2.16, 2 busy cores)
MAX_BYTES = 1 << 20
MAX_ROUNDS = 3  # of sending all parts of one result
_logger = logging.getLogger("sie.sidecar.settlement")


class Settlement:
    """Answers held work."""

    def __init__(self, bus: Bus, leases: Leases, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._bus = bus
        self.leases = leases
        self._metrics = metrics
        self._clock = clock

    async def answer(
        self,
        lease: Lease,
        item: WorkItem,
        result: WorkResult,
        deadline_s: float,
        before_ack: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Deliver a result and settle its message, `before_ack` in between.

        An error is sent only while the lease is ours: a superseded holder must not answer for the present one. A
        success always is.
        """
        verdict = await self._answer(lease, item, result, deadline_s)
        self._metrics.settlements.labels(verdict).inc()
        if verdict == "fenced":
            self.leases.drop(lease)
            return
        if before_ack is not None:
            await before_ack()
        failpoint("settlement.before_ack")
        await self.leases.finish(lease)

    async def _answer(self, lease: Lease, item: WorkItem, result: WorkResult, deadline_s: float) -> str:
        only_errors = all(isinstance(outcome, Failed) for outcome in result.outcomes)
        fence = lease if only_errors else None
        if fence is not None and not self.leases.is_mine(fence):
            return "fenced"
        failpoint("settlement.before_result")
        data = messages.encode(result)
        verdict = "part"
        if len(data) <= min(MAX_BYTES, self._bus.max_payload):
            try:
                verdict = await self._deliver(item, data, deadline_s, fence)
            except PayloadTooBig:  # the broker came back with a lower limit
                verdict = "part"
        if verdict == "part":
            verdict = await self._deliver_parts(item, data, deadline_s, fence)
        if verdict != "part":
            return verdict
        if only_errors:
            return "unconfirmed"
        error = InternalFailure(f"the result was damaged on its way {MAX_ROUNDS} times")
        return await self._answer(lease, item, failed(result, error), deadline_s)

    async def _deliver_parts(self, item: WorkItem, data: bytes, deadline_s: float, fence: Lease | None) -> str:
        """Send a result that no message holds. `part`: it never was whole at the gateway."""
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        view = memoryview(data)
        verdict = "part"
        for _ in range(MAX_ROUNDS):
            size = part_bytes(item, digest, len(data), min(MAX_BYTES, self._bus.max_payload))
            count = -(-len(data) // size)
            try:
                for index in range(count):
                    piece = view[index * size : (index + 1) * size]
                    part = Fragment(item.request, item.chunk, item.attempt, index, count, digest, piece)  # type: ignore[arg-type]
                    failpoint("settlement.between_parts")
                    verdict = await self._deliver(item, messages.encode(part), deadline_s, fence)
                    if verdict != "part":
                        return verdict
            except PayloadTooBig:  # the broker came back with a lower limit
                continue
            _logger.error(
                "request %s: a result of %d bytes was not whole at the gateway, it is sent again",
                item.request,
                len(data),
            )
        return verdict

    async def _deliver(self, item: WorkItem, data: bytes, deadline_s: float, fence: Lease | None) -> str:
        """Send one message until it is confirmed. Returns the verdict, `unconfirmed`, or `fenced` once the lease
        `fence` is not ours any more. Raises PayloadTooBig.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            timeout_s = CONFIRM_TIMEOUT_S if fence is None else min(CONFIRM_TIMEOUT_S, self.leases.left_s(fence))
            if timeout_s <= 0:
                return "fenced"
            try:
                answer = await self._bus.request(item.reply, data, timeout_s)
                return messages.decode_confirmation(answer).verdict
            except (NoResponder, BrokerUnavailable) as error:
                if self._clock() + pause_s >= deadline_s:
                    _logger.warning("a result of request %s was not confirmed in time: %s", item.request, error)
                    return "unconfirmed"
            except msgspec.DecodeError:
                _logger.error("request %s: its inbox answers with something else than a confirmation", item.request)
                return "unconfirmed"
            await asyncio.sleep(pause_s)  # between attempts at a gateway that is away
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def part_bytes(item: WorkItem, digest: str, size_bytes: int, message_bytes: int) -> int:
    """How much of a result a message of that size holds beside what says which part it is."""
    frame = Fragment(item.request, item.chunk, item.attempt, size_bytes, size_bytes, digest, b"")
    # the length of 4 GiB takes four bytes more than that of nothing
    return max(1, message_bytes - len(messages.encode(frame)) - 4)


def failed(result: WorkResult, error: SIEError) -> WorkResult:
    """The same chunk, with this error for every input."""
    info = error.info()
    return msgspec.structs.replace(result, outcomes=tuple(Failed(info) for _ in result.outcomes), block=b"")
