"""Snapshots (the weights of a model at one commit) in a bucket. Every call is a coroutine with a time limit. It raises
StoreError or FetchFailed.

    models--org--name/COMMIT/path/of/a/file      the files, as in the local cache
    models--org--name/COMMIT/sie-manifest.json   written last: a snapshot without a manifest is not complete
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sie_store import object_stores
from sie_store.object_stores import ObjectMissing, RangeMissing, RetryPolicy, StoreError
from sie_store.weights.download import PIECE_BYTES, DownloadLimits, Piece, RemoteFile
from sie_store.weights.manifest import MANIFEST, MAX_MANIFEST_BYTES, FetchFailed, Manifest, ManifestError, decode

if TYPE_CHECKING:
    from obstore import GetOptions, PutMode, UpdateVersion
    from obstore.store import ObjectStore

MAX_OBJECTS = 100_000  # largest number of objects of one snapshot; with more, `sizes` raises StoreError
GLANCE_S, GLANCES = 10.0, 3  # time limit in seconds of one attempt to read a manifest; number of attempts
_FOLDER = re.compile(r"models--(.+)")


def place(repository: str, revision: str) -> str:
    """Return the prefix that the keys of all objects of a snapshot have."""
    return f"models--{repository.replace('/', '--')}/{revision}"


@dataclass(frozen=True)
class CommitState:
    """State of one snapshot in the bucket. `wrong`: a line for each fault, by file name; a missing manifest is a fault
    too. `sizes`: number of bytes of each object except the manifest, by name.
    """

    repository: str
    revision: str
    manifest: Manifest | None
    sizes: dict[str, int]
    wrong: dict[str, str]

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())


class WeightBucket:
    def __init__(self, url: str, store: ObjectStore, limits: DownloadLimits) -> None:
        self.url, self.store, self.limits = url, store, limits
        # Limits for reads of manifests. They are short, because a load of a model waits for the manifest before it
        # tries the next source.
        self._glance = RetryPolicy(min(limits.stall_s, GLANCE_S), min(limits.tries, GLANCES), limits.pause_s)

    async def manifest(self, repository: str, revision: str) -> tuple[Manifest | None, PutMode]:
        """Return (manifest of a snapshot, or None if the bucket has none; obstore's mode for the next write of this
        manifest). With this mode, the write fails if another writer changes the manifest after this call. For a
        store without ETags, the mode is "overwrite", which replaces the changed manifest. Raises FetchFailed for a
        wrong manifest.
        """
        key, snapshot = f"{place(repository, revision)}/{MANIFEST}", f"{repository}@{revision}"

        async def read() -> tuple[bytes, PutMode]:
            first_answer, data = await object_stores.first_bytes(self.store, key, MAX_MANIFEST_BYTES + 1)
            version: UpdateVersion = {}
            if first_answer.meta["e_tag"]:
                version["e_tag"] = first_answer.meta["e_tag"]
            if first_answer.meta["version"]:
                version["version"] = first_answer.meta["version"]
            return data, version or "overwrite"

        try:
            data, version = await self._glance.call(read)
            manifest = decode(data)
        except ObjectMissing:
            return None, "create"
        except ManifestError as error:
            raise FetchFailed(
                "INCOMPATIBLE", f"{snapshot}: {error}; `sie weights push --force` writes another manifest"
            ) from error
        if (manifest.repository, manifest.revision) != (repository, revision):
            other_snapshot = f"{manifest.repository}@{manifest.revision}"
            raise FetchFailed(
                "INCOMPATIBLE",
                f"{snapshot} has the manifest of {other_snapshot}: `sie weights push --force` writes the right one",
            )
        return manifest, version

    async def sizes(self, repository: str, revision: str) -> dict[str, int]:
        """Return the number of bytes of each object of a snapshot except the manifest, by name."""
        import obstore

        prefix = place(repository, revision)

        async def listed() -> dict[str, int]:
            sizes: dict[str, int] = {}
            async for page in obstore.list(self.store, prefix=prefix):
                sizes |= {entry["path"].removeprefix(prefix + "/"): entry["size"] for entry in page}
                if len(sizes) > MAX_OBJECTS:
                    raise StoreError(f"more than {MAX_OBJECTS} objects below {prefix}")
            sizes.pop(MANIFEST, None)
            return sizes

        return await self.limits.call(listed)

    async def below(self, prefix: str | None) -> list[str]:
        import obstore

        listing = await self.limits.call(lambda: obstore.list_with_delimiter_async(self.store, prefix=prefix))
        return sorted(path.rpartition("/")[2] for path in listing["common_prefixes"])

    async def stored(self, repository: str, revision: str) -> CommitState:
        sizes, manifest = await self.sizes(repository, revision), None
        wrong: dict[str, str] = {}
        try:
            manifest, _ = await self.manifest(repository, revision)
            if manifest is None:
                wrong[MANIFEST] = "the snapshot has no manifest: a push still runs, or did not finish"
        except FetchFailed as error:
            wrong[MANIFEST] = error.message
        for name, fact in manifest.files.items() if manifest is not None else ():
            if (size := sizes.get(name)) != fact.bytes:
                wrong[name] = (
                    f"{name} is missing" if size is None else f"{name} has {size} bytes, the manifest says {fact.bytes}"
                )
        return CommitState(repository, revision, manifest, sizes, wrong)

    async def listed(self) -> list[CommitState]:
        async def states(folder: str) -> list[CommitState]:
            repository = folder.removeprefix("models--").replace("--", "/")
            return [await self.stored(repository, revision) for revision in await self.below(folder)]

        folders = [name for name in await self.below(None) if _FOLDER.fullmatch(name)]
        listed = await object_stores.gather(states, folders, self.limits.parts_at_once)
        # some tools write an empty object for a folder; such an object alone is no snapshot
        return [stored for stored in itertools.chain(*listed) if stored.bytes or stored.manifest is not None]

    async def removed(self, repository: str, revision: str) -> int:
        import obstore

        prefix = place(repository, revision)
        removed_bytes = 0
        with contextlib.suppress(ObjectMissing):
            await self.limits.call(lambda: obstore.delete_async(self.store, f"{prefix}/{MANIFEST}"))
        for name, size in (await self.sizes(repository, revision)).items():
            with contextlib.suppress(ObjectMissing):  # another process has already removed the object
                await self.limits.call(functools.partial(obstore.delete_async, self.store, f"{prefix}/{name}"))
            removed_bytes += size
        return removed_bytes


class BucketSource:
    """`download.Source` that reads the files of a manifest from the bucket."""

    def __init__(self, bucket: WeightBucket, manifest: Manifest, label: str) -> None:
        self._bucket, self._manifest, self.label = bucket, manifest, label
        self.limits = bucket.limits
        self._prefix = place(manifest.repository, manifest.revision)

    def files(self) -> list[RemoteFile]:
        return [RemoteFile(name, fact.bytes, fact.sha256) for name, fact in self._manifest.files.items()]

    async def answer(self, file: RemoteFile, start: int, end: int) -> AsyncGenerator[Piece, None]:
        import obstore

        options: GetOptions = {"range": (start, end)}
        get = obstore.get_async(self._bucket.store, f"{self._prefix}/{file.path}", options=options)
        try:
            answer = await object_stores.within(self.limits.stall_s, get)
            if (size := answer.meta["size"]) != file.size:
                raise self._broken(f"{file.path} has {size} bytes, the manifest says {file.size}")
            stream = answer.stream(min_chunk_size=PIECE_BYTES)
            while (chunk := await object_stores.within(self.limits.stall_s, anext(stream, None))) is not None:
                yield bytes(chunk)
        except (ObjectMissing, RangeMissing) as error:
            raise self._broken(f"{file.path}: {error}") from error

    def damaged(self, file: RemoteFile) -> FetchFailed:
        return self._broken(f"{file.path} has another SHA-256 than the manifest states")

    def _broken(self, wrong: str) -> FetchFailed:
        """Return the error for files that differ from the manifest. Its class NETWORK lets the load be retried, because
        a push can repair the files.
        """
        return FetchFailed(
            "NETWORK", f"{self.label} is damaged in the bucket, {wrong}: `sie weights push --force` writes it again"
        )
