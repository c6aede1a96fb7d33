"""Payloads: inputs that are too large for a message of the queue, in a store of all gateways and workers.

    gateway: encoded Payload ──put──► key ──► WorkItem.payload ──► sidecar: get ──► digest checked ──► inputs

A key is the digest of the bytes and the number of the period in which they were written. A period is as long as the
life of an object. So a key that is old enough to be removed is never written again, and clean-up never removes bytes
that were just stored. Other objects of the store are never touched.
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
MAX_REMOVALS = 10_000  # number of removed payloads after which a sweep ends
_KEY = re.compile(r"([0-9a-f]{64})\.[0-9]+")
_T = TypeVar("_T")


class PayloadMissing(StoreError):
    """Error for a payload that does not exist or does not match its key. Another attempt does not help."""


class PayloadStore:
    """Store of payloads, by the digest of their bytes. Every call ends within its `timeout_s`, or raises StoreError."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._turns = asyncio.Semaphore(TRANSFERS_AT_ONCE)

    async def put(self, data: bytes, *, period: int, timeout_s: float) -> str:
        """Store `data`, and return its key. If the store already has the object, its age is reset to zero."""
        import obstore

        async def stored() -> str:
            async with self._turns:
                digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
                key = f"{digest}.{period}"
                with object_stores.room(self._store, reserves=object_stores.PAYLOADS) as claim:
                    claim(len(data))
                    failpoint("payloads.before_put")
                    await obstore.put_async(self._store, key, data)
                failpoint("payloads.after_put")
                return key

        return await _within(timeout_s, stored())

    async def size(self, key: str, timeout_s: float) -> int:
        """Return the number of bytes of an object. Raises PayloadMissing, StoreError."""
        import obstore

        _digest_of(key)

        async def looked_up() -> int:
            return (await obstore.head_async(self._store, key))["size"]

        return await _within(timeout_s, looked_up())

    async def get(self, key: str, timeout_s: float) -> bytes:
        """Read an object and compare the digest of its bytes with its key. Raises PayloadMissing, StoreError."""
        import obstore

        digest = _digest_of(key)

        async def read() -> bytes:
            async with self._turns:
                failpoint("payloads.before_get")
                data = bytes(await (await obstore.get_async(self._store, key)).bytes_async())
                if await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest()) != digest:
                    raise PayloadMissing(f"object {key} is damaged")
                return data

        return await _within(timeout_s, read())

    async def sweep(self, *, older_than_s: float, now_s: float, timeout_s: float) -> int:
        """Remove payloads that were last written before `now_s - older_than_s`; stop when MAX_REMOVALS are removed.
        Returns the number of removed payloads.
        """
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
    match = _KEY.fullmatch(key)
    if match is None:
        raise PayloadMissing("the key is not that of a payload")
    return match[1]


async def _within(timeout_s: float, work: Coroutine[Any, Any, _T]) -> _T:
    try:
        return await object_stores.within(timeout_s, work)
    except ObjectMissing as error:
        raise PayloadMissing(str(error)) from error


def open_store(url: str | None, *, setting: str = "SIE_PAYLOAD_STORE_URL") -> PayloadStore | None:
    """Open the store at a URL in the form of SIE_PAYLOAD_STORE_URL; None without a URL. Raises SettingError.

    A folder is created if it does not exist, with permissions for its owner alone: it contains input of clients.
    Buckets are not checked: they may be created later.
    """
    return None if url is None else PayloadStore(object_stores.opened(url, setting))
