"""Inputs that no message of the queue can hold: kept in a store that gateways and workers share.

    gateway: encoded Payload ──put──► key ──► WorkItem.payload ──► sidecar: get ──► digest checked ──► inputs

A key is the digest of its bytes and the period that it was written in. Periods are as long as objects live, so when one is old enough to
be removed no writer can write it again: clean-up never takes what somebody just stored. Nothing else in the store is ever touched.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sie_contracts.runtime.failpoints import failpoint
from sie_contracts.settings import SettingError, store_url

if TYPE_CHECKING:
    from obstore.store import ObjectStore

TRANSFERS_AT_ONCE = 8
LISTED_AT_ONCE = 1000
MOST_REMOVALS = 10_000  # of one round
_KEY = re.compile(r"([0-9a-f]{64})\.[0-9]+")
_T = TypeVar("_T")


class StoreError(Exception):
    """The payload store refused, or did not answer in time. Trying again may help."""


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
                if removed >= MOST_REMOVALS:
                    break
            return removed

        return await _within(timeout_s, swept())


def _digest_of(key: str) -> str:
    found = _KEY.fullmatch(key)
    if found is None:
        raise PayloadMissing("the key is not that of a payload")
    return found[1]


async def _within(timeout_s: float, work: Coroutine[Any, Any, _T]) -> _T:
    from obstore.exceptions import BaseError, NotFoundError

    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError as error:
        raise StoreError(f"no answer within {timeout_s:.3g} s") from error
    except (NotFoundError, FileNotFoundError) as error:
        raise PayloadMissing("there is no such object") from error
    except (BaseError, OSError) as error:
        raise StoreError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]


def open_store(url: str | None, *, setting: str = "SIE_PAYLOAD_STORE_URL") -> PayloadStore | None:
    """The store at a URL of SIE_PAYLOAD_STORE_URL's form; None without one. Raises SettingError.

    A folder is made if it is not there, for its owner alone: it holds what clients sent. Buckets are not looked at: they may come later.
    """
    if url is None:
        return None
    from obstore.exceptions import BaseError
    from obstore.store import GCSStore, LocalStore, S3Store

    where = store_url(url)
    limits: dict[str, Any] = {
        # plain HTTP only where the operator's endpoint says so; options given here replace those of the environment (obstore 0.12)
        "client_options": {"allow_http": True, "connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=120)},
        "retry_config": {"max_retries": 3, "retry_timeout": timedelta(seconds=20)},
    }
    try:
        if where.scheme == "file":
            Path(where.path).mkdir(mode=0o700, parents=True, exist_ok=True)
            return PayloadStore(LocalStore(where.path))
        kind: Callable[..., ObjectStore] = S3Store if where.scheme == "s3" else GCSStore
        return PayloadStore(kind(where.bucket, prefix=where.path or None, **limits))
    except (BaseError, OSError) as error:
        raise SettingError(setting, _first_line(error)) from error
