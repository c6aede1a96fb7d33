"""Results leave the worker: sent as a request to the gateway's inbox, again until confirmed or the budget is over, and only then acked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from sie_contracts import messages
from sie_contracts.broker import Broker, BrokerUnavailable, NoResponder
from sie_contracts.errors import PayloadTooLarge
from sie_contracts.messages import Failed, WorkItem, WorkResult
from sie_sidecar.lease import Lease, Leases
from sie_sidecar.metrics import Metrics

CONFIRM_TIMEOUT_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
_logger = logging.getLogger("sie.sidecar.settlement")


class Settlement:
    """Answers held work."""

    def __init__(self, broker: Broker, leases: Leases, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._broker = broker
        self._leases = leases
        self._metrics = metrics
        self._clock = clock

    async def answer(self, lease: Lease, item: WorkItem, result: WorkResult, deadline_s: float) -> None:
        """Deliver a result and settle its message.

        An error is sent only while the lease is ours: a superseded holder must not answer for the present one. A success always is.
        """
        only_errors = all(isinstance(outcome, Failed) for outcome in result.outcomes)
        if only_errors and not self._leases.is_mine(lease):
            self._leases.drop(lease)
            self._metrics.settlements.labels("fenced").inc()
            return
        data = messages.encode(result)
        if len(data) > self._broker.max_payload:
            limit = self._broker.max_payload
            message = f"a result of {len(data)} bytes, at most {limit} can be sent: ask for a smaller dtype or fewer outputs"
            error = PayloadTooLarge(message, extras={"limit": limit})
            failed = tuple(Failed(error.info()) for _ in result.outcomes)
            data = messages.encode(msgspec.structs.replace(result, outcomes=failed, block=b""))
        verdict = await self._deliver(item, data, deadline_s)
        self._metrics.settlements.labels(verdict).inc()
        await self._leases.finish(lease)

    async def _deliver(self, item: WorkItem, data: bytes, deadline_s: float) -> str:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                answer = await self._broker.request(item.reply, data, CONFIRM_TIMEOUT_S)
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
