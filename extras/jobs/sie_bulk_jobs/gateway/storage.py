"""Storage of a job's plan, of the parts of a batch (one part: output lines of one shard), and of answers to pieces of
suspect shards, as objects below `jobs/{id}` in the payload store.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sie_bulk_jobs import records
from sie_bulk_jobs.gateway.files import FileStore
from sie_bulk_jobs.records import Plan
from sie_store.object_stores import (
    FILES,
    ObjectMissing,
    WrittenMeanwhile,
    objects_below,
    room,
    sync,
    whole_object,
    within,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

LONG_S = 120.0  # time limit in seconds to read or write one object, or to remove all objects of a job


class JobStorage:
    """Storage of the plan of one job, or of the plan and parts of a batch, in the payload store (`store`)."""

    def __init__(self, store: ObjectStore, job_id: str, files: FileStore) -> None:
        self.files = files
        self.store = store
        self._prefix = f"jobs/{job_id}"

    async def plan(self) -> Plan | None:
        """Read the plan; None if no plan is stored. Raises StoreError."""
        data = await self.existing("plan")
        return None if data is None else await asyncio.to_thread(records.decode_plan, data)

    async def keep_plan(self, plan: Plan) -> Plan:
        """Store the plan if no plan is stored yet. Return the stored plan. Raises StoreError."""
        data = await self.put_once("plan", await asyncio.to_thread(records.encode, plan))
        return await asyncio.to_thread(records.decode_plan, data)

    async def existing(self, name: str) -> bytes | None:
        """Return the bytes of an object of this job, such as a part; None if it does not exist. Raises StoreError."""
        try:
            return await within(LONG_S, whole_object(self.store, f"{self._prefix}/{name}"))
        except ObjectMissing:
            return None

    async def keep_piece(self, number: int, rows: range, data: bytes) -> None:
        """Store the answers to some rows of a shard, if they are not stored yet. Raises StoreError."""
        await self.put_once(f"pieces/{number:06}/{rows.start}-{rows.stop}", data)

    async def pieces(self, number: int) -> dict[int, bytes]:
        """Return the stored answers to rows of a shard, by the first of their rows. Raises StoreError."""
        folder = f"{self._prefix}/pieces/{number:06}/"
        names = [entry["path"] for entry in await within(LONG_S, objects_below(self.store, folder))]
        return {
            int(name.rpartition("/")[2].partition("-")[0]): await within(LONG_S, whole_object(self.store, name))
            for name in names
        }

    async def put_once(self, name: str, data: bytes) -> bytes:
        """Store an object if it does not exist yet. Return the bytes of the stored object. Raises StoreError."""
        import obstore

        key = f"{self._prefix}/{name}"
        try:
            with room(self.store, reserves=FILES) as claim:
                claim(len(data))
                await within(LONG_S, obstore.put_async(self.store, key, data, mode="create"))
        except WrittenMeanwhile:
            existing = await self.existing(name)
            if existing is None:  # the object existed at the write, but was removed before this read
                raise
            data = existing
        await sync(self.store, key)
        return data

    async def remove(self) -> None:
        """Remove all objects of this job. Raises StoreError."""
        import obstore

        async def removed() -> None:
            async for page in obstore.list(self.store, prefix=f"{self._prefix}/"):
                await obstore.delete_async(self.store, [entry["path"] for entry in page])

        await within(LONG_S, removed())
