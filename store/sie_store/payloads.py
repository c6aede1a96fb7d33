"""Inputs that no message of the queue can hold: kept in a store that gateways and workers share.

    gateway: encoded Payload ──put──► key ──► WorkItem.payload ──► sidecar: get ──► digest checked ──► inputs

A key is the digest of its bytes and the period that it was written in. Periods are as long as objects live, so when one
is old enough to be removed no writer can write it again: clean-up never takes what somebody just stored. Nothing else
in the store is ever touched.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from sie_runtime.failpoints import failpoint
from sie_store import object_stores
from sie_store.object_stores import ObjectMissing, StoreError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

TRANSFERS_AT_ONCE = 8
LISTED_AT_ONCE = 1000
MAX_REMOVALS = 10_000  # of one round
_KEY = re.compile(r"([0-9a-f]{64})\.[0-9]+")
_T = TypeVar("_T")


class PayloadMissing(StoreError):
    """There is no such object, or it is not what its key says. Trying again does not help."""


class PayloadStore:
    """Objects by the digest of their bytes. Every call ends within its `timeout_s`, or raises StoreError."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._turns = asyncio.Semaphore(TRANSFERS_AT_ONCE)

    async def put(self, data: bytes, *, period: int, timeout_s: float) -> str:
        """Store `data`, also where it is already: that makes it young again. Returns its key."""
        import obstore

        async def stored() -> str:
            async with self._turns:
                digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
                key = f"{digest}.{period}"
                failpoint("payloads.before_put")
                await obstore.put_async(self._store, key, data)
                failpoint("payloads.after_put")
                return key

        return await _within(timeout_s, stored())

    async def size(self, key: str, timeout_s: float) -> int:
        """Bytes of an object. Raises PayloadMissing, StoreError."""
        import obstore

        _digest_of(key)

        async def looked_up() -> int:
            return (await obstore.head_async(self._store, key))["size"]

        return await _within(timeout_s, looked_up())

    async def get(self, key: str, timeout_s: float) -> bytes:
        """An object, whole and unchanged. Raises PayloadMissing, StoreError."""
        import obstore

        wanted = _digest_of(key)

        async def read() -> bytes:
            async with self._turns:
                failpoint("payloads.before_get")
                data = bytes(await (await obstore.get_async(self._store, key)).bytes_async())
                if await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest()) != wanted:
                    raise PayloadMissing(f"object {key} is damaged")
                return data

        return await _within(timeout_s, read())

    async def sweep(self, *, older_than_s: float, now_s: float, timeout_s: float) -> int:
        """Remove payloads last written before `now_s - older_than_s`, some thousands at most. Returns how many."""
        import obstore

        async def swept() -> int:
            removed = 0
            async for page in obstore.list(self._store, chunk_size=LISTED_AT_ONCE):
                old = [
                    entry["path"]
                    for entry in page
                    if _KEY.fullmatch(entry["path"]) and entry["last_modified"].timestamp() < now_s - older_than_s
                ]
                if old:
                    failpoint("payloads.before_removal")
                    await obstore.delete_async(self._store, old)
                removed += len(old)
                if removed >= MAX_REMOVALS:
                    break
            return removed

        return await _within(timeout_s, swept())


def _digest_of(key: str) -> str:
    found = _KEY.fullmatch(key)
    if found is None:
        raise PayloadMissing("the key is not that of a payload")
    return found[1]


async def _within(timeout_s: float, work: Coroutine[Any, Any, _T]) -> _T:
    try:
        return await object_stores.within(timeout_s, work)
    except ObjectMissing as error:
        raise PayloadMissing(str(error)) from error


def open_store(url: str | None, *, setting: str = "SIE_PAYLOAD_STORE_URL") -> PayloadStore | None:
    """The store at a URL of SIE_PAYLOAD_STORE_URL's form; None without one. Raises SettingError.

    A folder is made if it is not there, for its owner alone: it holds what clients sent. Buckets are not looked at:
    they may come later.
    """
    return None if url is None else PayloadStore(object_stores.opened(url, setting))
