"""SIE_MODELS_DIR as a bucket: objects below s3://bucket/prefix or gs://bucket/prefix are used like the files of a
models folder.

list ──► name, time, size and ETag of every object that a models folder may contain ──► bodies of the
changed objects, a few at a time
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

from sie_contracts.settings import SettingError
from sie_store import object_stores
from sie_store.object_stores import ObjectMissing, RetryPolicy, StoreError

_T = TypeVar("_T")

SETTING = "SIE_MODELS_DIR"
READS_AT_ONCE = 16
# largest number of objects below the prefix, including objects that are no files of models; with more, listing fails
MAX_OBJECTS = 100_000


class BucketFolder:
    """Files of models in the bucket at `url`. Methods block for a limited time, and raise SettingError on failure."""

    def __init__(self, url: str, suffixes: tuple[str, ...], patience: RetryPolicy | None = None) -> None:
        self.url = url
        self._suffixes = suffixes
        self._patience = patience or RetryPolicy(stall_s=20.0, tries=4)
        self._store = object_stores.opened(url, SETTING)

    def list_files(self) -> dict[str, tuple[int, int, int]]:
        """Return each file that has one of the suffixes and is not hidden, by path below the prefix: (time of the last
        change in ns, size in bytes, hash of the ETag). Raises SettingError if there is no such file.
        """
        files = self._run(self._patience.call(self._listed))
        if not files:
            kinds = " or ".join(f"*{suffix}" for suffix in self._suffixes)
            raise SettingError(SETTING, f"{self.url} has no {kinds}: add such a file, or name another bucket or prefix")
        return files

    def read(self, paths: Collection[str], max_bytes: int) -> dict[str, bytes]:
        """Return the first `max_bytes` of each file, by path. Files that were removed meanwhile are omitted."""
        return self._run(self._bodies(paths, max_bytes))

    async def _listed(self) -> dict[str, tuple[int, int, int]]:
        import obstore

        files: dict[str, tuple[int, int, int]] = {}
        count = 0
        async for page in obstore.list(self._store):
            count += len(page)
            if count > MAX_OBJECTS:
                raise SettingError(
                    SETTING, f"{self.url} has more than {MAX_OBJECTS} objects: keep models below a prefix of their own"
                )
            for entry in page:
                path = entry["path"]
                if path.endswith(self._suffixes) and not any(part.startswith(".") for part in path.split("/")):
                    changed_ns = int(entry["last_modified"].timestamp() * 1e9)
                    files[path] = changed_ns, entry["size"], hash(entry["e_tag"])
        return files

    async def _bodies(self, paths: Collection[str], max_bytes: int) -> dict[str, bytes]:
        bodies: dict[str, bytes] = {}

        async def read_body(path: str) -> None:
            with contextlib.suppress(ObjectMissing):
                _, bodies[path] = await self._patience.call(
                    lambda: object_stores.first_bytes(self._store, path, max_bytes)
                )

        await object_stores.gather(read_body, paths, READS_AT_ONCE)
        return bodies

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            return asyncio.run(work)
        except StoreError as error:
            raise SettingError(SETTING, f"{self.url}: {object_stores.remedy(error, self.url, SETTING)}") from error
