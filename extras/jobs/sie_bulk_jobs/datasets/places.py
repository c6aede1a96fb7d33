"""Places: objects and folders that a client names by URL for the input or output of a job. Only URLs below a URL of
SIE_JOBS_URLS are opened.

URL ──► no segment `..`, below an allowed URL ──► store at the allowed URL, key of the folder, name of the object
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from sie_contracts.errors import InvalidInput, NotReady
from sie_contracts.settings import SettingError, StoreUrl, store_url
from sie_store import object_stores
from sie_store.object_stores import RetryPolicy

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SETTING = "SIE_JOBS_URLS"
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")


@dataclass(frozen=True)
class Place:
    """One object in a store, or all objects below a folder.

    `folder`: key of the folder, empty or ending in `/`. `name`: name of the object in the folder; empty for all
    objects. `label`: name of the object in spans and row ids if it differs from `name`, such as the name of an uploaded
    file. `digest`: digest of an object that never changes; empty if unknown. `root`: allowed folder on the disk, which
    symbolic links must not leave; None in a bucket. `patience`: time limit and number of attempts of a call of the
    store. `param`: field of the request that names the place, for errors.
    """

    store: ObjectStore
    folder: str = ""
    name: str = ""
    label: str = ""
    digest: str = ""
    root: Path | None = None
    patience: RetryPolicy = field(default_factory=RetryPolicy)
    param: str = "input.url"

    @classmethod
    def opened(cls, url: str, allowed: tuple[str, ...], *, is_output: bool = False) -> Place:
        """Open the place at a client's URL. An output is always a folder. Raises InvalidInput if the URL is invalid or
        not allowed, and NotReady if the store of an allowed URL cannot be opened.
        """
        param = "output.url" if is_output else "input.url"
        try:
            where = store_url(url)
        except ValueError as error:
            raise InvalidInput(
                f"{param}: expected s3://bucket/path, gs://bucket/path or file:///path", param=param
            ) from error
        _check_segments(url, where, param)
        for root in allowed:
            if (path := _below(where, store_url(root))) is not None:
                break
        else:
            raise InvalidInput.at(param, f"the URL is not below a URL of {SETTING}", reason="not_allowed")
        try:
            store = object_stores.opened(root, SETTING)
        except SettingError as error:
            raise NotReady(f"{param}: the store of {SETTING} cannot be opened", param=param) from error
        local = Path(store_url(root).path) if where.scheme == "file" else None
        if is_output or not path or url.endswith("/"):
            return cls(store, f"{path}/" if path else "", root=local, param=param)
        folder, slash, name = path.rpartition("/")
        return cls(store, folder + slash, name, root=local)

    @property
    def is_folder(self) -> bool:
        return not self.name

    def key(self, source: str) -> str:
        """Return the key of an object in the store. `source`: name of the object in spans (ranges of rows)."""
        return self.folder + (self.name or source)

    def below(self, folder: str) -> Place:
        return replace(self, folder=f"{self.folder}{folder}/", name="", label="", digest="")

    async def check(self, key: str) -> None:
        """Raise InvalidInput if a symbolic link leads out of the allowed folder. The check does not protect against a
        user who creates such a link between this check and the opening of the file.
        """
        if self.root is not None and not await asyncio.to_thread(_is_inside, self.root, key):
            raise InvalidInput(
                f"a symbolic link leads out of the folders of {SETTING}", reason="not_allowed", param=self.param
            )


def _check_segments(url: str, where: StoreUrl, param: str) -> None:
    # The path in `where` is resolved and has no `..`, so the client's own text is checked.
    written = url if where.scheme == "file" and not url.lower().startswith("file:") else unquote(urlsplit(url).path)
    if _CONTROL.search(written):
        raise InvalidInput.at(param, "control characters and \\ are not allowed", reason="not_allowed")
    segments = written.removeprefix("/").removesuffix("/").split("/")
    if any(segment in (".", "..") for segment in segments) or ("" in segments and segments != [""]):
        raise InvalidInput.at(
            param, f"empty segments and the segments `.` and `..` are not allowed ({SETTING})", reason="not_allowed"
        )


def _below(where: StoreUrl, allowed: StoreUrl) -> str | None:
    """Return the path of `where` relative to `allowed`: empty for equal paths, None if `where` is elsewhere."""
    if (where.scheme, where.bucket) != (allowed.scheme, allowed.bucket):
        return None
    if where.path == allowed.path:
        return ""
    prefix = allowed.path.rstrip("/") + "/" if allowed.path else ""
    return where.path.removeprefix(prefix) if where.path.startswith(prefix) else None


def _is_inside(root: Path, key: str) -> bool:
    real = root.resolve()
    return (real / key).resolve().is_relative_to(real)
