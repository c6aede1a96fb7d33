"""Tokens that all gateways together may send to a remote server in a calendar month (UTC, by the broker's clock).

Before a gateway sends a request or a probe, it adds the estimated tokens (the charge) to the month's record in the
broker by compare-and-set. If the broker is unreachable, the gateway sends nothing. When the server reports the tokens
of a request, the gateway corrects the charge. It does not correct the charges of probes and of failed requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sie_broker.record import Record
from sie_contracts.wire.records import RemoteReference, RemoteUsage

Stored = RemoteReference | RemoteUsage


class BudgetUsed(Exception):
    """Raised if the month has fewer tokens left than a request or probe needs."""


class MonthlyBudget:
    """Budget of one remote server."""

    def __init__(self, record: Record[Stored], name: str, monthly_tokens: int, now_s: Callable[[], float]) -> None:
        self._record = record
        self._key = f"budget.{name}"
        self._monthly_tokens = monthly_tokens
        self._now_s = now_s

    async def spend(self, tokens: int) -> str:
        """Charge the tokens of a request or a probe, and return the charged month. Raises BudgetUsed, BrokerError."""

        def charged(before: Stored | None) -> RemoteUsage:
            usage = self._current(before)
            if usage.tokens + tokens > self._monthly_tokens:
                raise BudgetUsed(f"{usage.tokens} of {self._monthly_tokens} tokens of {usage.month} are used")
            return RemoteUsage(usage.month, usage.tokens + tokens)

        stored = await self._record.change(self._key, charged)
        assert isinstance(stored, RemoteUsage), "`charged` returns nothing else"
        return stored.month

    async def correct(self, difference: int, month: str) -> None:
        """Correct the charge of a request. Do nothing if the charged `month` has ended. `difference`: tokens that the
        request used, minus its charge. Raises BrokerError.
        """

        def corrected(before: Stored | None) -> RemoteUsage | None:
            usage = self._current(before)
            if usage.month != month:
                return None
            return RemoteUsage(usage.month, max(0, usage.tokens + difference))

        await self._record.change(self._key, corrected)

    def _current(self, before: Stored | None) -> RemoteUsage:
        month = time.strftime("%Y-%m", time.gmtime(self._now_s()))
        return before if isinstance(before, RemoteUsage) and before.month == month else RemoteUsage(month, 0)
