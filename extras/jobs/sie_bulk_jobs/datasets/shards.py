"""Write parts (files of a job's output). If several processes write the same part, only the first write succeeds, and
the other processes use the stored part.

    shard ──encode──► bytes ──put, create only──┬─► written ──────────────────────► ShardRecord
                                                └─► exists: read, inspected ──────► ShardRecord of the existing part
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
from collections.abc import AsyncIterator

from sie_bulk_jobs.datasets.formats import MANIFEST
from sie_bulk_jobs.datasets.parts import PartFault, inspect
from sie_bulk_jobs.datasets.places import Place
from sie_bulk_jobs.records import ShardRecord
from sie_contracts.api.jobs import OutputFormat
from sie_contracts.errors import InvalidInput
from sie_store.object_stores import (
    CALL_S,
    FILES,
    ObjectMissing,
    StoreError,
    WrittenMeanwhile,
    open_object,
    room,
    sync,
    whole_object,
    within,
)

PUT_S = 300.0  # time limit of one call of the store, in seconds
OWNER = ".sie-job"  # object in the output folder that contains the id of the job to which the folder belongs


class PartDamaged(StoreError):
    """Error for an object that has the name of a part, but is no part. The job continues after an operator moves the
    object.
    """


async def claim(place: Place, owner: str) -> None:
    """Mark an output folder as the folder of one job, so that a job never uses the parts of another job. `owner`: text
    that identifies the job. Raises StoreError, and InvalidInput (reason `output_in_use`) if the folder has another
    owner, or parts without an owner.
    """
    import obstore

    key = place.folder + OWNER
    await place.check(key)
    try:
        if (await bytes_of(place, OWNER)).decode(errors="replace") == owner:
            await sync(place.store, key)
            return
    except ObjectMissing:
        if not await _has_parts(place):
            put = functools.partial(
                obstore.put_async, place.store, key, owner.encode(), mode="create", use_multipart=False
            )
            # another job, or a gateway that has lost the lease of this job, may write the object at the same time
            with contextlib.suppress(WrittenMeanwhile):
                await place.patience.repeated(lambda: within(PUT_S, put()))
            await claim(place, owner)
            return
    raise in_use("this folder has the output of another job")


def in_use(why: str) -> InvalidInput:
    """Return the error for an output folder that a job cannot use, because it has other content."""
    return InvalidInput.at("output.url", f"{why}; name another folder", reason="output_in_use")


async def _has_parts(place: Place) -> bool:
    """Return whether a folder already has a manifest or a part (an output file of a job)."""
    import obstore

    async def looked() -> bool:
        async for page in obstore.list(place.store, place.folder.rstrip("/") or None):
            # an empty object for the folder itself is listed without the slash at its end, so it is left out here
            paths = (entry["path"] for entry in page)
            names = (path.removeprefix(place.folder) for path in paths if path.startswith(place.folder))
            if any(name == MANIFEST or name.startswith("part-") for name in names):
                return True
        return False

    return await place.patience.repeated(lambda: within(PUT_S, looked()))


async def put_once(place: Place, name: str, data: bytes, format: OutputFormat) -> ShardRecord:
    """Write a part (output file) if no object `name` exists. Return the record of the stored part, which may be a part
    that another process has written. Raises PartDamaged, StoreError.
    """
    import obstore

    record = await asyncio.to_thread(_record, name, data, format)
    key = place.folder + name
    await place.check(key)
    try:
        with room(place.store, reserves=FILES) as claim:
            claim(len(data))
            await place.patience.repeated(
                lambda: within(PUT_S, obstore.put_async(place.store, key, data, mode="create", use_multipart=False))
            )
    except WrittenMeanwhile as error:
        # the part is from another gateway that ran this job, or from an earlier attempt whose response was lost
        there = await existing(place, name, format)
        if there is None:
            raise StoreError(f"another process has written the part {name} and removed it") from error
        return there
    await sync(place.store, key)
    return record


async def existing(place: Place, name: str, format: OutputFormat) -> ShardRecord | None:
    """Return the record of a part in the store; None if the part does not exist. Raises PartDamaged, StoreError."""
    key = place.folder + name
    try:
        data = await bytes_of(place, name)
    except ObjectMissing:
        return None
    try:
        record = await asyncio.to_thread(_record, name, data, format)
    except PartFault as error:
        raise PartDamaged(f"{name}: {error}") from error
    await sync(place.store, key)
    return record


async def pieces_of(place: Place, name: str) -> tuple[int, AsyncIterator[bytes]]:
    """Return the number of bytes of the object `name` in the folder, and its bytes in pieces. Raises ObjectMissing,
    StoreError.
    """
    key = place.folder + name
    await place.check(key)
    return await place.patience.call(lambda: open_object(place.store, key), CALL_S)


async def bytes_of(place: Place, name: str) -> bytes:
    """Return the bytes of the object `name` in the folder. Raises ObjectMissing, StoreError."""
    key = place.folder + name
    await place.check(key)
    return await place.patience.call(lambda: whole_object(place.store, key), PUT_S)


def _record(name: str, data: bytes, format: OutputFormat) -> ShardRecord:
    about = inspect(data, format)
    return ShardRecord(
        name,
        about.rows,
        len(data),
        hashlib.sha256(data).hexdigest(),
        about.failed,
        about.reused,
        about.tokens,
        about.codes,
        about.fingerprint,
    )
