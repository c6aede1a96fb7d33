"""The hub as a source of snapshots: one listing of the commit, then its files by the download engine.

    listing ──► files that are wanted ──► download.py ──► manifest

The hub's own client starts a file again when its process ended (huggingface_hub 2.4), so only its sessions, its listing
and its errors are used.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from sie_store.cache import Fetch
from sie_store.download import Download, Limits, Piece, RemoteFile
from sie_store.manifest import FetchFailed, FileFact, Manifest, is_safe
from sie_store.object_stores import StoreError
from sie_store.progress import Progress
from sie_store.selection import Wanted

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

_T = TypeVar("_T")

# One answer brings the rest of a file: the hub counts requests, and redirects each of them to an address that it signs.
LIMITS = Limits(tries=3, part_bytes=0)


def hub_fetch(repository: str, revision: str, wanted: Wanted) -> Fetch:
    """The fetch of the `wanted` files of a commit, for `LocalCache.obtain`."""
    return functools.partial(_fetch, repository, revision, wanted)


def commit_of(repository: str, revision: str | None = None, *, what: str = "") -> str:
    """The present commit of a branch or tag; without one, of the main branch. `what` names it in logs and errors.
    Raises FetchFailed.
    """
    from huggingface_hub import HfApi, constants

    what = what or (f"{repository}@{revision}" if revision else repository)
    with _classed(what):
        wait_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        sha = _asked(lambda: HfApi().model_info(repository, revision=revision, timeout=wait_s).sha, what)
    if sha is None:
        raise FetchFailed("NOT_FOUND", f"the hub names no commit of {what}: name one")
    return sha


def _fetch(repository: str, revision: str, wanted: Wanted, folder: Path, progress: Progress) -> Manifest:
    from huggingface_hub import HfApi, constants

    what, wait_s, hub = progress.what, constants.HF_HUB_DOWNLOAD_TIMEOUT, HfApi()
    with _classed(what):
        listing = _asked(
            lambda: hub.model_info(repository, revision=revision, files_metadata=True, timeout=wait_s).siblings, what
        )
        found = {sibling.rfilename: sibling for sibling in listing or []}
        if unsafe := next((name for name in found if wanted(name) and not is_safe(name)), None):
            raise FetchFailed(
                "INCOMPATIBLE",
                f"{what} has a file {unsafe[:200]!r}, which does not lie below the folder of its snapshot",
            )
        url = f"{hub.endpoint}/{repository}/resolve/{quote(revision, safe='')}"
        files = [_file(url, sibling, what) for name, sibling in found.items() if wanted(name)]
        if not files:
            raise FetchFailed("INCOMPATIBLE", f"{what} has none of the files that a model of its kind needs")
        facts = asyncio.run(_downloaded(url, files, folder, progress))
    left_out = tuple(sorted(name for name in found if not wanted(name) and is_safe(name)))
    return Manifest(repository, revision, facts, left_out, "hub")


def _file(url: str, sibling: RepoSibling, what: str) -> RemoteFile:
    """A file of the listing. If a mirror leaves its size out, the headers of the file are asked. A large file has a
    SHA-256, any other the digest of a git blob; a mirror may give neither.
    """
    from huggingface_hub import get_hf_file_metadata

    name = sibling.rfilename
    if sibling.size is not None:
        sha256, blob = (sibling.lfs.sha256, "") if sibling.lfs else ("", sibling.blob_id or "")
        return RemoteFile(name, sibling.size, sha256, blob)
    metadata = _asked(lambda: get_hf_file_metadata(f"{url}/{quote(name)}"), f"{what}: {name}")
    if metadata.size is None:
        raise FetchFailed("INCOMPATIBLE", f"{what}: the hub does not tell the size of {name}")
    etag = metadata.etag or ""
    return RemoteFile(name, metadata.size, etag if len(etag) == 64 else "", etag if len(etag) == 40 else "")


async def _downloaded(url: str, files: Sequence[RemoteFile], folder: Path, progress: Progress) -> dict[str, FileFact]:
    from huggingface_hub import get_async_session

    async with get_async_session() as session:
        return await Download(_Hub(session, url, progress.what), folder, progress).all(files)


class _Hub:
    """The files of one commit below `url`, as a source of the download engine."""

    limits = LIMITS

    def __init__(self, session: Any, url: str, what: str) -> None:
        self._session, self._url, self.what = session, url, what

    async def answer(self, file: RemoteFile, start: int, end: int) -> AsyncGenerator[Piece, None]:
        from huggingface_hub import constants, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, but not exported

        # with compression a range would be one of the compressed bytes
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        wait_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with _passing():
            url = f"{self._url}/{quote(file.path)}"
            async with self._session.stream("GET", url, headers=headers, timeout=wait_s) as response:
                hf_raise_for_status(response)
                at = start if response.status_code == 206 else 0  # a mirror without range requests sends the whole file
                async for data in response.aiter_bytes():
                    piece = data[max(0, start - at) : max(0, end - at)]  # the digest detects extra bytes
                    at += len(data)
                    if piece:
                        yield piece

    def damaged(self, file: RemoteFile) -> FetchFailed:
        return FetchFailed(
            "NETWORK", f"{self.what}: {file.path} came twice without the digest that the hub names for it"
        )


def _asked(call: Callable[[], _T], what: str) -> _T:
    """The result of a call of the hub's client, repeated where that may help. The call blocks this thread; the end of
    the process does not wait for it.
    """
    tries = 0
    while True:
        try:
            with _passing():
                return call()
        except StoreError as error:
            tries += 1
            asyncio.run(LIMITS.pause(error, tries, what))


@contextlib.contextmanager
def _passing() -> Iterator[None]:
    """A failure that may pass becomes StoreError. Its text is safe for a log; that of the cause contains the URL, which
    may be signed or contain a password.
    """
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # the base class of connection errors of the library that the hub's client is built on
    http_error: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        yield
    except OfflineModeIsEnabled:
        raise
    except HfHubHTTPError as error:
        if (status := error.response.status_code) in (408, 425, 429) or status >= 500:
            after = error.response.headers.get("Retry-After", "")
            raise StoreError(f"status {status}", float(after) if after.isdecimal() else 0.0) from error
        raise
    except (http_error, ConnectionError, TimeoutError) as error:
        raise StoreError(type(error).__name__) from error


@contextlib.contextmanager
def _classed(what: str) -> Iterator[None]:
    """Errors of the hub's client become FetchFailed; errors of the disk do not."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise FetchFailed("GATED", f"{what} is gated: accept its licence and set HF_TOKEN") from error
    except (RepositoryNotFoundError, RevisionNotFoundError, RemoteEntryNotFoundError) as error:
        raise FetchFailed("NOT_FOUND", f"{what} does not exist on the hub, or is private (HF_TOKEN)") from error
    except HFValidationError as error:
        raise FetchFailed("NOT_FOUND", f"{what} is not the name of a hub repository") from error
    except OfflineModeIsEnabled as error:
        fix = "unset it, or have SIE_LOCAL_CACHE hold the model"
        raise FetchFailed("NETWORK", f"{what} was not downloaded: HF_HUB_OFFLINE is set; {fix}") from error
    except HfHubHTTPError as error:
        if (status := error.response.status_code) in (401, 403):
            fix = "set HF_TOKEN to one that may read it"
            raise FetchFailed("GATED", f"{what}: the hub refuses this token, status {status}; {fix}") from error
        if status == 404:
            raise FetchFailed("NOT_FOUND", f"{what} is not known to the hub (HF_ENDPOINT)") from error
        raise _unreachable(what, f"status {status}") from error
    except StoreError as error:
        raise _unreachable(what, str(error)) from error


def _unreachable(what: str, cause: str) -> FetchFailed:
    fix = "the network has to reach the hub (HF_ENDPOINT), or SIE_LOCAL_CACHE to hold the model"
    return FetchFailed("NETWORK", f"{what} could not be downloaded: {cause}; {fix}")
