"""The payload store of a simulation: objects in memory, behind a network that loses requests. Objects can expire before
a sidecar reads them, and the store can be away.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import NamedTuple

from simulation.network import Network

from sie_store.object_stores import StoreError
from sie_store.payloads import PayloadMissing

REFUSED_S = 1.0  # until a lost request has failed


class _Stored(NamedTuple):
    data: bytes
    written_s: float


class Payloads:
    """A stand-in for `sie_store.payloads.PayloadStore`, whose store has threads of its own."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._objects: dict[str, _Stored] = {}
        self.is_away = False

    async def put(self, data: bytes, *, period: int, timeout_s: float) -> str:
        await self._reach(timeout_s)
        key = f"{hashlib.sha256(data).hexdigest()}.{period}"
        self._objects[key] = _Stored(data, self._network.loop.now_s)
        self._network.log("stored", f"{key[:6]} {len(data)} bytes")
        await self._reach(timeout_s)
        return key

    async def size(self, key: str, timeout_s: float) -> int:
        return len(await self.get(key, timeout_s))

    async def get(self, key: str, timeout_s: float) -> bytes:
        await self._reach(timeout_s)
        if key not in self._objects:
            raise PayloadMissing(f"{key[:6]} does not exist")
        return self._objects[key].data

    async def sweep(self, *, older_than_s: float, now_s: float, timeout_s: float) -> int:
        await self._reach(timeout_s)
        old = [
            key for key, stored in self._objects.items() if self._network.loop.now_s - stored.written_s > older_than_s
        ]
        for key in old:
            del self._objects[key]
        return len(old)

    def expire(self) -> int:
        """Lose all objects, as by a rule of the bucket. Return their number."""
        count = len(self._objects)
        self._objects.clear()
        return count

    async def _reach(self, timeout_s: float) -> None:
        fate = self._network.draw()
        if self.is_away or fate in ("lost", "answer_lost"):
            await asyncio.sleep(min(timeout_s, REFUSED_S))
            raise StoreError("the store refused the request")
        await self._network.pause(fate)
