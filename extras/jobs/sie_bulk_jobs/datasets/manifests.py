"""Manifest of a job's output. The job writes the manifest last, so an output without a manifest is not complete."""

from __future__ import annotations

import msgspec

from sie_bulk_jobs.datasets.formats import MANIFEST
from sie_bulk_jobs.datasets.places import Place
from sie_contracts.api.jobs import JobManifest
from sie_store.object_stores import sync


async def write(place: Place, manifest: JobManifest) -> None:
    """Write the manifest, or replace the existing manifest. If the gateway that runs the job dies after the write, the
    gateway that continues the job writes the manifest again. Raises StoreError.
    """
    import obstore

    key = place.folder + MANIFEST
    await place.check(key)
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
    await place.patience.call(lambda: obstore.put_async(place.store, key, data))
    await sync(place.store, key)
