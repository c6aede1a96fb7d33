"""Payloads: inputs that are too large for a message of the queue. Gateways store them in an object store, from which
workers read them.

    gateway: encoded Payload ──put──► key ──► WorkItem.payload ──► sidecar: get ──► digest checked ──► inputs

A key is the digest of the bytes and the number of the period in which they were written. A period is as long as the
time for which a payload is kept. When a payload is old enough for removal, its period has ended, so no gateway writes
its key any more, and `sweep` cannot remove bytes that were just stored. Other objects in the store are never changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable
from typing import TYPE_CHECKING, TypeVar

from sie_runtime.failpoints import failpoint
from sie_store import object_stores
from sie_store.object_stores import ObjectMissing, StoreError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

TRANSFERS_AT_ONCE = 8
LISTED_AT_ONCE = 1000
MAX_REMOVALS = 10_000  # number of removed payloads after which one clean-up stops
_KEY = re.compile(r"([0-9a-f]{64})\.[0-9]+")
_T = TypeVar("_T")


class PayloadMissing(StoreError):
    """Error for a payload that does not exist or does not match its key, or for an invalid key. Another attempt does
    not help.
    """


class PayloadStore:
    """Payloads by key. Every call raises StoreError if it takes longer than `timeout_s`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._turns = asyncio.Semaphore(TRANSFERS_AT_ONCE)

    async def put(self, data: bytes, *, period: int, timeout_s: float) -> str:
        """Store `data` and return its key, which contains `period`, the number of the present period. An existing
        object is written again, so that its age begins again at zero and `sweep` does not remove it.
        """
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
        """Return the number of bytes of a payload. Raises PayloadMissing, StoreError."""
        import obstore

        _digest_of(key)

        meta = await _within(timeout_s, obstore.head_async(self._store, key))
        return meta["size"]

    async def get(self, key: str, timeout_s: float) -> bytes:
        """Return a payload whose digest equals the digest in its key. Raises PayloadMissing, StoreError."""
        digest = _digest_of(key)

        async def read() -> bytes:
            async with self._turns:
                failpoint("payloads.before_get")
                data = await object_stores.whole_object(self._store, key)
                if await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest()) != digest:
                    raise PayloadMissing(f"the payload {key} is damaged: its digest differs from its key")
                return data

        return await _within(timeout_s, read())

    async def sweep(self, *, older_than_s: float, now_s: float, timeout_s: float) -> int:
        """Remove payloads that were last written more than `older_than_s` seconds before `now_s` (seconds since 1970).
        Returns the number of removed payloads, at most about MAX_REMOVALS.
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
                    try:
                        await obstore.delete_async(self._store, old)
                    except FileNotFoundError:  # another gateway removed one of them; the next sweep removes the rest
                        continue
                removed += len(old)
                if removed >= MAX_REMOVALS:
                    break
            return removed

        return await _within(timeout_s, swept())


def _digest_of(key: str) -> str:
    match = _KEY.fullmatch(key)
    if match is None:
        raise PayloadMissing("this is not the key of a payload")
    return match[1]


async def _within(timeout_s: float, work: Awaitable[_T]) -> _T:
    try:
        return await object_stores.within(timeout_s, work)
    except ObjectMissing as error:
        raise PayloadMissing(str(error)) from error


def open_store(url: str | None) -> PayloadStore | None:
    """Return the payload store at `url` (see SIE_PAYLOAD_STORE_URL); None if `url` is None. Raises SettingError.

    A missing folder is created, readable only by its owner, because it will have clients' inputs. Buckets are not
    checked, because they may be created later.
    """
    return None if url is None else PayloadStore(object_stores.opened(url, "SIE_PAYLOAD_STORE_URL"))
