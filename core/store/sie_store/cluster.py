"""Cluster cache: one bucket (SIE_CLUSTER_CACHE) from which all nodes fetch snapshots (the weights of a model at one
commit). All methods block.

    fetch: manifest ──► its files, in parts, by download.py ──► comparison of their digests
    push:  files that the bucket lacks ──► manifest ──► list the files again, to check that none is missing

Pushes need no lock: a store writes an object completely or not at all, and every push of a commit writes the same
bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sie_store import object_stores
from sie_store.object_stores import BucketMissing, StoreError
from sie_store.weights.bucket import BucketSource, CommitState, WeightBucket
from sie_store.weights.cache import Fetch
from sie_store.weights.download import FILES_AT_ONCE, Digests, DownloadLimits, Reader, RemoteFile, SnapshotDownload
from sie_store.weights.manifest import FetchErrorClass, FetchFailed, Manifest, check_names, encode
from sie_store.weights.progress import FetchProgress
from sie_store.weights.push import Push, Pushed
from sie_store.weights.selection import Wanted, check_size

_T = TypeVar("_T")

SETTING = "SIE_CLUSTER_CACHE"


async def _wrong(source: BucketSource, files: list[RemoteFile], progress: FetchProgress) -> list[str]:
    """Read the files, and return an error text for each file with a wrong digest. Raises FetchFailed, StoreError."""
    reader = Reader(source, progress)

    async def digested(file: RemoteFile) -> str:
        digests = Digests(file)
        async with contextlib.aclosing(reader.read(file)) as pieces:
            async for piece in pieces:
                await asyncio.to_thread(digests.add, piece)
        return digests.sha256

    return [
        f"{file.path} has the SHA-256 {digest[:16]}.., the manifest says {file.sha256[:16]}.."
        for file, digest in zip(files, await object_stores.gather(digested, files, FILES_AT_ONCE), strict=True)
        if digest != file.sha256
    ]


class ClusterCache:
    """Snapshots in the bucket at `url` (s3:// or gs://). The constructor raises SettingError."""

    def __init__(self, url: str, limits: DownloadLimits | None = None) -> None:
        self.url = url
        self._bucket = WeightBucket(url, object_stores.opened(url, SETTING), limits or DownloadLimits())

    def fetch(self, repository: str, revision: str, select: Wanted | None = None) -> Fetch | None:
        """Return a function that fetches the snapshot, or only its files that `select` accepts. Return None if the
        bucket has no manifest of the snapshot, or if the manifest names no file that `select` accepts. Raises
        FetchFailed, ManifestError.
        """
        check_names(repository, revision)
        manifest, _ = self._run(self._bucket.manifest(repository, revision))
        if manifest is not None and select is not None:
            files = {name: fact for name, fact in manifest.files.items() if select(name)}
            left_out = tuple(sorted({*manifest.left_out, *manifest.files} - set(files)))
            manifest = msgspec.structs.replace(manifest, files=files, left_out=left_out)
        return functools.partial(self._fetch, manifest, select) if manifest is not None and manifest.files else None

    def _fetch(self, manifest: Manifest, select: Wanted | None, folder: Path, progress: FetchProgress) -> Manifest:
        check_size(select, manifest.bytes, progress.label)
        source = BucketSource(self._bucket, manifest, progress.label)
        self._run(SnapshotDownload(source, folder, progress).all(source.files()))
        return msgspec.structs.replace(manifest, origin="cluster")

    def push(self, folder: Path, manifest: Manifest, progress: FetchProgress, *, force: bool = False) -> Pushed:
        """Write the files in `manifest` from `folder` to the bucket, then the manifest itself. Without `force`,
        files that the bucket has are skipped. No file is removed. Raises PushRefused, FetchFailed, ManifestError,
        OSError.
        """
        encode(manifest)
        return self._run(Push(self._bucket, folder, manifest, progress).all(force=force))

    def listed(self) -> list[CommitState]:
        """Return all snapshots, complete or not, sorted by name. Raises FetchFailed."""
        return self._run(self._bucket.listed())

    def stored(self, repository: str, revision: str) -> CommitState:
        """Return the state of a snapshot in the bucket, with sizes and faults. Raises FetchFailed, ManifestError."""
        check_names(repository, revision)
        return self._run(self._bucket.stored(repository, revision))

    def verify(self, stored: CommitState, progress: FetchProgress) -> list[str]:
        """Return a line for each fault of a snapshot: the faults in `stored`, and the files with a wrong digest. Files
        with a fault in `stored` are not read. Raises FetchFailed.
        """
        if stored.manifest is None:
            return list(stored.wrong.values())
        source = BucketSource(self._bucket, stored.manifest, progress.label)
        files = [file for file in source.files() if file.path not in stored.wrong]
        progress.expect(sum(file.size for file in files))
        return [*stored.wrong.values(), *self._run(_wrong(source, files, progress))]

    def remove(self, repository: str, revision: str) -> int:
        """Remove a snapshot, its manifest first, so that no node begins to fetch the snapshot. Returns the number of
        removed bytes. Raises FetchFailed, ManifestError.
        """
        check_names(repository, revision)
        return self._run(self._bucket.removed(repository, revision))

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` in a new event loop. A StoreError becomes a FetchFailed, whose message names the fix."""
        try:
            return asyncio.run(work)
        except StoreError as error:
            error_class: FetchErrorClass = "NOT_FOUND" if isinstance(error, BucketMissing) else "NETWORK"
            raise FetchFailed(error_class, object_stores.remedy(error, self.url, SETTING)) from error
