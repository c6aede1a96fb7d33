"""Push of a snapshot into a bucket: its files first, its manifest last, so that a manifest never names a missing file.

    read the manifest in the bucket ──► digest and write each missing file ──► write the merged manifest if the bucket
    still has the manifest that was read ──► list all files again

Any number of pushers may run at once, because they write the same bytes. A write of a manifest fails if another pusher
has written the manifest since it was read. Each pusher checks at the end whether the files and the manifest exist.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from sie_store import object_stores
from sie_store.object_stores import ObjectMissing, StoreError, WrittenMeanwhile
from sie_store.weights.bucket import WeightBucket, place
from sie_store.weights.manifest import MANIFEST, FetchFailed, FileFact, Manifest, digest, encode
from sie_store.weights.progress import FetchProgress

if TYPE_CHECKING:
    from obstore import PutMode


_logger = logging.getLogger("sie.store")

MAX_PARTS = 9_000  # largest number of parts of one object; stores allow 10,000
MIN_PART_BYTES = 8 << 20  # smallest number of bytes of a part; stores refuse parts below 5 MiB
STALL_S = 180.0  # time limit in seconds for the store to accept one part
ROUNDS = 20  # largest number of attempts of a push; a change by another writer causes a new attempt
DIGEST = "sha256"  # name of the object attribute that contains the digest computed by the writer


class PushRefused(Exception):
    """Error for a push that is not allowed: its files differ from their manifest or from the files of the same commit
    in the bucket, or the manifest in the bucket is invalid.
    """


@dataclass(frozen=True)
class Pushed:
    """Result of a push: number of files written, number of files that were in the bucket already, and bytes written."""

    written: int
    present: int
    bytes: int


class Push:
    """Push of the files in `manifest` from `folder` to the bucket."""

    def __init__(self, bucket: WeightBucket, folder: Path, manifest: Manifest, progress: FetchProgress) -> None:
        self._bucket, self._folder, self._manifest, self._progress = bucket, folder, manifest, progress
        self._place = place(manifest.repository, manifest.revision)
        self._label = f"{manifest.repository}@{manifest.revision}"
        self._written: dict[str, int] = {}

    async def all(self, *, force: bool) -> Pushed:
        """Push the files that the bucket lacks (with `force` all files), then the manifest. Raises PushRefused,
        FetchFailed, StoreError, OSError.
        """
        for number in range(ROUNDS):
            there, version = await self._there(force=force)
            todo = await self._lacking(there, everything=force and not number)
            self._progress.expect(sum(self._manifest.files[name].bytes for name in todo))
            for name in todo:
                await self._write(name, self._manifest.files[name])
                self._written[name] = self._manifest.files[name].bytes
            joined = self._joined(there)
            try:
                if joined != there:
                    await self._put(MANIFEST, encode(joined), {}, version)
                stored = await self._bucket.stored(self._manifest.repository, self._manifest.revision)
                if (
                    not stored.wrong
                    and stored.manifest is not None
                    and self._joined(stored.manifest) == stored.manifest
                ):
                    return Pushed(
                        len(self._written), len(self._manifest.files) - len(self._written), sum(self._written.values())
                    )
            except WrittenMeanwhile as error:
                _logger.info("the manifest of %s was not written, the push starts again: %s", self._label, error)
            # random, so that several pushers do not retry at the same moment
            await asyncio.sleep(random.uniform(0, self._bucket.limits.pause_s))  # noqa: S311
        raise StoreError(
            f"other writers removed or replaced files of {self._label} in the bucket in {ROUNDS} attempts: push later"
        )

    async def _there(self, *, force: bool) -> tuple[Manifest | None, PutMode]:
        """Return (manifest in the bucket, obstore's mode for the write of the manifest). This write fails if another
        pusher has changed the manifest, unless the mode is "overwrite". The manifest is None if it is missing, or if
        `force` replaces it. Without `force`, raises PushRefused if the manifest is invalid or its files differ from the
        files of this push.
        """
        try:
            there, version = await self._bucket.manifest(self._manifest.repository, self._manifest.revision)
        except FetchFailed as error:
            if force:
                return None, "overwrite"
            raise PushRefused(error.message) from error
        changed = [
            name
            for name, fact in self._manifest.files.items()
            if there is not None and there.files.get(name, fact) != fact
        ]
        if changed and not force:
            raise PushRefused(
                f"the bucket already has {self._label}, with another content of {changed[0]}, "
                f"SHA-256 {there.files[changed[0]].sha256[:16]}.. instead of "  # type: ignore[union-attr]
                f"{self._manifest.files[changed[0]].sha256[:16]}.., but the files of a commit never differ. "
                "Push these files under another name or revision, "
                "or replace the files in the bucket with --force"
            )
        return None if changed else there, version

    async def _lacking(self, there: Manifest | None, *, everything: bool) -> list[str]:
        """Return the names of the files to write. A file is written if the bucket lacks it or has it with another size.
        A file with the right size is written if the bucket's manifest does not name it, and no attribute of the object
        has the file's digest.
        """
        if everything:
            return list(self._manifest.files)
        sizes = await self._bucket.sizes(self._manifest.repository, self._manifest.revision)
        lacking = []
        for name, fact in self._manifest.files.items():
            is_in_manifest = there is not None and name in there.files
            if sizes.get(name) != fact.bytes or not (is_in_manifest or await self._is_ours(name, fact)):
                lacking.append(name)
        return lacking

    async def _is_ours(self, name: str, fact: FileFact) -> bool:
        """Return whether an earlier push has written the object. A push sets the file's digest as an attribute."""
        import obstore

        try:
            answer = await self._bucket.limits.call(
                functools.partial(
                    obstore.get_async, self._bucket.store, f"{self._place}/{name}", options={"head": True}
                )
            )
        except ObjectMissing:
            return False
        return answer.attributes.get(DIGEST) == fact.sha256

    def _joined(self, there: Manifest | None) -> Manifest:
        files, left_out = dict(self._manifest.files), set(self._manifest.left_out)
        if there is not None:
            files = {**there.files, **files}
            left_out |= set(there.left_out)
        return Manifest(
            self._manifest.repository, self._manifest.revision, files, tuple(sorted(left_out - files.keys())), "cluster"
        )

    async def _write(self, name: str, fact: FileFact) -> None:
        path = self._folder / name
        if (
            path.stat().st_size != fact.bytes
            or await asyncio.to_thread(digest, path, self._progress.touch) != fact.sha256
        ):
            raise PushRefused(f"{path} differs from its manifest: `sie weights verify --local` lists all faults")
        attributes = {DIGEST: fact.sha256}
        if fact.bytes <= MIN_PART_BYTES:
            await self._put(name, await asyncio.to_thread(path.read_bytes), attributes, "overwrite")
            self._progress.add(fact.bytes)
        else:
            await self._bucket.limits.repeated(functools.partial(self._stream, name, path, fact.bytes, attributes))

    async def _put(self, name: str, data: bytes, attributes: dict[str, str], mode: PutMode) -> None:
        """Write an object. Raises WrittenMeanwhile if another writer has written the object in the meantime, and `mode`
        forbids replacing that object. In a store that cannot check `mode`, the object is always replaced.
        """
        import obstore
        from obstore.exceptions import NotSupportedError

        async def put(mode: PutMode) -> None:
            await obstore.put_async(
                self._bucket.store, f"{self._place}/{name}", data, attributes=attributes, mode=mode, use_multipart=False
            )

        try:
            await self._bucket.limits.call(functools.partial(put, mode), STALL_S)
        except StoreError as error:
            if not isinstance(error.__cause__, NotSupportedError):
                raise
            await self._bucket.limits.call(functools.partial(put, "overwrite"), STALL_S)

    async def _stream(self, name: str, path: Path, size: int, attributes: dict[str, str]) -> None:
        """Write a large file in parts, several at once. Raises StoreError if the store accepts no part for STALL_S."""
        import obstore
        from obstore.exceptions import BaseError

        part_bytes = max(MIN_PART_BYTES, -(-size // MAX_PARTS))
        sent = 0
        loop = asyncio.get_running_loop()

        async def pieces(file: IO[bytes], patience: asyncio.Timeout) -> AsyncIterator[bytes]:
            nonlocal sent
            while piece := await asyncio.to_thread(file.read, part_bytes):
                yield piece
                sent += len(piece)
                self._progress.add(len(piece))
                patience.reschedule(loop.time() + STALL_S)

        is_whole = False
        try:
            with path.open("rb") as file:
                async with asyncio.timeout(STALL_S) as patience:
                    await obstore.put_async(
                        self._bucket.store,
                        f"{self._place}/{name}",
                        pieces(file, patience),
                        attributes=attributes,
                        use_multipart=True,
                        chunk_size=part_bytes,
                        max_concurrency=self._bucket.limits.parts_at_once,
                    )
            is_whole = True
        except TimeoutError as error:
            raise StoreError(f"the store accepted no part of the file for {STALL_S:g} s") from error
        except BaseError as error:
            raise object_stores.failure(error) from error
        finally:
            if not is_whole:
                self._progress.add(-sent)
