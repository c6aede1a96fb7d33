"""Manifest of a job's output. It is written last, so an output without a manifest is not complete."""

from __future__ import annotations

import msgspec

from sie_contracts.api.jobs import JobManifest
from sie_store.datasets.formats import MANIFEST
from sie_store.datasets.places import Place
from sie_store.object_stores import sync


async def write(place: Place, manifest: JobManifest) -> None:
    """Write the manifest. An existing one is replaced, because the next leader of a job (the gateway that runs it)
    repeats this step if the leader dies. Raises StoreError.
    """
    import obstore

    key = place.folder + MANIFEST
    await place.check(key)
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
    await place.patience.call(lambda: obstore.put_async(place.store, key, data))
    await sync(place.store, key)
