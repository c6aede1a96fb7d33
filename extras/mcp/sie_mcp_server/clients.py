"""Clients of the gateway, one for each API key, so that no connection is shared between keys."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass

from sie_client import SIEAsyncClient

CONNECTION_S = 5.0
MAX_CLIENTS = 64


@dataclass
class _OpenClient:
    client: SIEAsyncClient
    uses: int = 0


class GatewayClients:
    """Open clients by API key. Above MAX_CLIENTS, `of_key` closes the clients that were unused for longest.
    `timeout_s`: seconds that a call waits for an answer. A call waits for capacity for at most half of this time.
    """

    def __init__(self, gateway_url: str, timeout_s: float) -> None:
        self._gateway_url = gateway_url
        self._timeout_s = timeout_s
        self._clients: OrderedDict[str | None, _OpenClient] = OrderedDict()
        self._opening = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def of_key(self, api_key: str | None) -> AsyncIterator[SIEAsyncClient]:
        """Yield the client that sends this key and no other key."""
        if api_key not in self._clients:
            async with self._opening:  # several calls with a new key may wait here; one of them opens the client
                if api_key not in self._clients:
                    # in a thread, because a client for https reads all certificates of this machine from the disk
                    self._clients[api_key] = _OpenClient(await asyncio.to_thread(self._opened, api_key))
        entry = self._clients[api_key]
        self._clients.move_to_end(api_key)
        entry.uses += 1
        try:
            yield entry.client
        finally:
            entry.uses -= 1
            await self._close_unused(MAX_CLIENTS)

    async def close(self) -> None:
        await self._close_unused(0)

    def _opened(self, api_key: str | None) -> SIEAsyncClient:
        return SIEAsyncClient(
            self._gateway_url,
            api_key=api_key,
            timeout_s=self._timeout_s,
            # half of the time, so that the client raises an error with the reason of the wait before the call times out
            capacity_budget_s=self._timeout_s / 2,
            connection_budget_s=CONNECTION_S,
            progress=False,
        )

    async def _close_unused(self, most: int) -> None:
        unused = [key for key, entry in self._clients.items() if not entry.uses]
        closed = [self._clients.pop(key) for key in unused[: max(0, len(self._clients) - most)]]
        for entry in closed:
            await entry.client.close()
