"""The hub as a source of snapshots: one listing of the commit, then its files by the download engine.

    listing ──► files that are wanted ──► download.py ──► manifest

The hub's own client starts a file again when its process ended (huggingface_hub 2.4) and reads any answer to its end,
so only its sessions and its errors are used.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import msgspec

import sie_contracts
from sie_store.object_stores import StoreError
from sie_store.weights.cache import Fetch
from sie_store.weights.download import DownloadLimits, Piece, RemoteFile, SnapshotDownload
from sie_store.weights.manifest import MAX_MANIFEST_BYTES, FetchFailed, Manifest, ManifestError, check_paths, is_safe
from sie_store.weights.progress import FetchProgress
from sie_store.weights.selection import Wanted, of_lora

_T = TypeVar("_T")

# One answer brings the rest of a file: the hub counts requests, and redirects each of them to an address that it signs.
LIMITS = DownloadLimits(tries=3, part_bytes=0)
LISTING_S = 30.0  # for one listing
MAX_LORA_BYTES = 4 << 30  # a client may name any: it must not cost the disk its models


class _Lfs(msgspec.Struct):
    sha256: str


class _Sibling(msgspec.Struct):
    """A file of a listing, as the hub describes it."""

    rfilename: str
    size: Annotated[int, msgspec.Meta(ge=0)] | None = None
    blob_id: str | None = msgspec.field(default=None, name="blobId")
    lfs: _Lfs | None = None


class _Listing(msgspec.Struct):
    sha: str = ""
    siblings: tuple[_Sibling, ...] = ()


# made at import: two threads that use a type first at the same time end the process
_listings = msgspec.json.Decoder(_Listing)


def hub_fetch(repository: str, revision: str, wanted: Wanted) -> Fetch:
    """The fetch of the `wanted` files of a commit, for `LocalCache.obtain`."""
    return functools.partial(_fetch, repository, revision, wanted)


def commit_of(repository: str, revision: str | None = None, *, what: str = "") -> str:
    """The present commit of a branch or tag; without one, of the main branch. `what` names it in logs and errors.
    Raises FetchFailed.
    """
    what = what or (f"{repository}@{revision}" if revision else repository)

    async def commit() -> str:
        async with _session() as session:
            return (await _asked(lambda: _listing(session, repository, revision), what)).sha

    with _classed(what):
        sha = asyncio.run(commit())
    if not sha:
        raise FetchFailed("NOT_FOUND", f"the hub names no commit of {what}: name one")
    return sha


def _fetch(repository: str, revision: str, wanted: Wanted, folder: Path, progress: FetchProgress) -> Manifest:
    with _classed(progress.what):
        return asyncio.run(_fetched(repository, revision, wanted, folder, progress))


async def _fetched(repository: str, revision: str, wanted: Wanted, folder: Path, progress: FetchProgress) -> Manifest:
    from huggingface_hub import constants

    what = progress.what
    async with _session() as session:
        listing = await _asked(lambda: _listing(session, repository, revision), what)
        siblings = {sibling.rfilename: sibling for sibling in listing.siblings}
        names = [name for name in siblings if wanted(name)]
        try:
            check_paths(names)
        except ManifestError as error:
            raise FetchFailed("INCOMPATIBLE", f"{what}: {error}") from error
        if not names:
            raise FetchFailed("INCOMPATIBLE", f"{what} has none of the files that a model of its kind needs")
        url = f"{constants.ENDPOINT}/{repository}/resolve/{quote(revision, safe='')}"
        files = [await _file(session, url, siblings[name], what) for name in names]
        if wanted is of_lora and (size := sum(file.size for file in files)) > MAX_LORA_BYTES:
            raise FetchFailed("INCOMPATIBLE", f"{what} has {size} bytes, a LoRA has at most {MAX_LORA_BYTES}")
        facts = await SnapshotDownload(_Hub(session, url, what), folder, progress).all(files)
    left_out = tuple(sorted(name for name in siblings if not wanted(name) and is_safe(name)))
    return Manifest(repository, revision, facts, left_out, "hub")


async def _listing(session: Any, repository: str, revision: str | None) -> _Listing:
    """The commit of a revision and its files. Raises StoreError, also for an answer that is no listing: a page of a
    proxy, or one without an end.
    """
    from huggingface_hub import constants

    path = f"/revision/{quote(revision, safe='')}" if revision else ""
    url, data = f"{constants.ENDPOINT}/api/models/{repository}{path}?blobs=true", bytearray()
    try:
        async with asyncio.timeout(LISTING_S), _answered(session, url) as response:
            async for piece in response.aiter_raw():
                data += piece
                if len(data) > MAX_MANIFEST_BYTES:
                    raise StoreError(f"the listing has more than {MAX_MANIFEST_BYTES} bytes")
        return _listings.decode(data)
    except TimeoutError as error:
        raise StoreError(f"the listing was not complete within {LISTING_S:g} s") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"the answer is not the listing of a repository: {str(error)[:200]}") from error


async def _file(session: Any, url: str, sibling: _Sibling, what: str) -> RemoteFile:
    """A file of the listing. If a mirror leaves its size out, the headers of the file are asked. A large file has a
    SHA-256, any other the digest of a git blob; a mirror may give neither.
    """
    name = sibling.rfilename
    if sibling.size is not None:
        sha256, blob = (sibling.lfs.sha256, "") if sibling.lfs else ("", sibling.blob_id or "")
        return RemoteFile(name, sibling.size, sha256, blob)

    async def header(*names: str) -> str:
        """The first of these headers that the hub, or the server to which it redirects, sends."""
        async with _answered(session, f"{url}/{quote(name)}", method="HEAD") as response:
            answers = (*response.history, response)
            return next((answer.headers[key] for key in names for answer in answers if key in answer.headers), "")

    size = await _asked(lambda: header("X-Linked-Size", "Content-Length"), f"{what}: {name}")
    if not size.isdecimal():
        raise FetchFailed("INCOMPATIBLE", f"{what}: the hub does not tell the size of {name}")
    etag = (await _asked(lambda: header("X-Linked-Etag", "ETag"), f"{what}: {name}")).strip('W/"')
    return RemoteFile(name, int(size), etag if len(etag) == 64 else "", etag if len(etag) == 40 else "")


def _session() -> Any:
    """A session of the hub's client, which reads no more of an answer than it is asked for: its own hook reads the
    whole body of an error.
    """
    from huggingface_hub import get_async_session

    session = get_async_session()
    session.event_hooks = {**session.event_hooks, "response": []}
    return session


@contextlib.asynccontextmanager
async def _answered(session: Any, url: str, *, method: str = "GET", start: int = 0) -> AsyncIterator[Any]:
    """The answer to a request, whose body is still to be read as it is sent: from byte `start` on, if the server knows
    ranges. Raises StoreError, and what the hub's client raises.
    """
    from huggingface_hub import constants, get_token, hf_raise_for_status

    # the client's own headers name the agent that runs it, from a list that it fetches and reads to any length;
    # compressed, a range would be one of other bytes, and a few bytes may be any number of others
    headers = {"User-Agent": f"sie/{sie_contracts.__version__}", "Accept-Encoding": "identity"}
    if token := get_token():
        headers["Authorization"] = f"Bearer {token}"
    if start:
        headers["Range"] = f"bytes={start}-"
    with _passing():
        async with session.stream(method, url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
            hf_raise_for_status(response)
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise StoreError("the answer is compressed, which was not asked for")
            yield response


class _Hub:
    """The files of one commit below `url`, as a source of the download engine."""

    limits = LIMITS

    def __init__(self, session: Any, url: str, what: str) -> None:
        self._session, self._url, self.what = session, url, what

    async def answer(self, file: RemoteFile, start: int, end: int) -> AsyncGenerator[Piece, None]:
        async with _answered(self._session, f"{self._url}/{quote(file.path)}", start=start) as response:
            at = start if response.status_code == 206 else 0  # a mirror without range requests sends the whole file
            async for data in response.aiter_raw():
                if piece := data[max(0, start - at) :]:
                    yield piece
                at += len(data)

    def damaged(self, file: RemoteFile) -> FetchFailed:
        return FetchFailed(
            "NETWORK", f"{self.what}: {file.path} came twice without the digest that the hub names for it"
        )


async def _asked(call: Callable[[], Awaitable[_T]], what: str) -> _T:
    """The result of a call of the hub, repeated where that may help."""
    tries = 0
    while True:
        try:
            return await call()
        except StoreError as error:
            tries += 1
            await LIMITS.pause(error, tries, what)


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
