"""Uploaded files and files of batches, in the payload store. A file is written and read in pieces, so that a file of
any size needs little memory.

    pieces ──put──► object files/{id} ──open, range──► bytes        remove ──► object deleted

An object appears in the store only when it is complete. This module changes only objects below `files/`.
`PayloadStore.sweep` does not remove these objects, because their keys are not digests.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from sie_store import object_stores
from sie_store.object_stores import CALL_S, ObjectMissing

if TYPE_CHECKING:
    from obstore.store import ObjectStore

FOLDER = "files"
PART_BYTES = 8 << 20  # bytes of one part of a multipart upload; a bucket allows 10,000 parts, so 80 GB for a file
PARTS_AT_ONCE = 2
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class FileObjects:
    """Files in an object store, by file id. Every method raises StoreError."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def put(self, file: str, pieces: AsyncIterator[bytes], timeout_s: float) -> None:
        """Write or replace an object. A failed write creates no object and replaces none. Raises StoreFull and errors
        of `pieces`.
        """
        import obstore

        async def checked() -> AsyncIterator[bytes]:
            # Number of bytes that this upload may still claim. The claims must cover the bytes that are in memory. Once
            # bytes are written, the disk itself reports them as used. So later bytes need no further claim.
            left = PARTS_AT_ONCE * PART_BYTES
            with object_stores.room(self._store, reserves=object_stores.FILES) as claim:
                async for piece in pieces:
                    claim(min(len(piece), left))
                    left -= min(len(piece), left)
                    yield piece

        writing = obstore.put_async(
            self._store, _key(file), checked(), use_multipart=True, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
        )
        await object_stores.within(timeout_s, writing)
        await object_stores.sync(self._store, _key(file))

    async def open(self, file: str) -> AsyncIterator[bytes]:
        """Return the bytes of an object, in pieces. Raises ObjectMissing if the object does not exist."""
        _, pieces = await object_stores.within(CALL_S, object_stores.open_object(self._store, _key(file)))
        return pieces

    async def range(self, file: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` to before `end` of an object that has at least `end` bytes."""
        import obstore

        key = _key(file)
        return bytes(
            await object_stores.within(CALL_S, obstore.get_range_async(self._store, key, start=start, end=end))
        )

    async def remove(self, file: str) -> None:
        """Remove an object if it exists. If the store is a folder, also remove incomplete files that a killed process
        has left. In a bucket, incomplete uploads stay until a lifecycle rule of the bucket removes them.
        """
        import obstore
        from obstore.store import LocalStore

        key = _key(file)
        try:
            await object_stores.within(CALL_S, obstore.delete_async(self._store, key))
        except ObjectMissing:
            pass  # already removed; only a folder reports this, a bucket raises no error for a missing object
        if isinstance(self._store, LocalStore):
            await asyncio.to_thread(_remove_unfinished, Path(str(self._store.prefix)) / key)


def _key(file: str) -> str:
    if not _ID.fullmatch(file):
        raise ObjectMissing("this is not the id of a file")
    return f"{FOLDER}/{file}"


def _remove_unfinished(path: Path) -> None:
    """Remove an object's incomplete files. obstore (0.12) writes a file `NAME#1` and renames it at the end."""
    for unfinished in path.parent.glob(f"{path.name}#*"):
        unfinished.unlink(missing_ok=True)


def open_files(url: str | None) -> FileObjects | None:
    """Return the files in the store at `url` (SIE_PAYLOAD_STORE_URL); None if `url` is None. Raises SettingError."""
    return None if url is None else FileObjects(object_stores.opened(url, "SIE_PAYLOAD_STORE_URL"))
