"""Download of a snapshot from the hub: one request lists the files of a commit, then the selected files are fetched.

    listing ──► selected files ──► download.py ──► manifest

The hub's own client (huggingface_hub 2.4) fetches a file from the start again if the process ended during the download,
compares no digest, and reads a response of any length and for any time. So only its HTTP sessions, settings, token and
exceptions are used.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import msgspec

import sie_contracts
from sie_contracts.errors import UNDECODABLE
from sie_store.object_stores import StoreError
from sie_store.weights.cache import Fetch
from sie_store.weights.download import DownloadLimits, Piece, RemoteFile, SnapshotDownload
from sie_store.weights.manifest import MAX_MANIFEST_BYTES, FetchFailed, Manifest, ManifestError, check_paths, is_safe
from sie_store.weights.progress import FetchProgress
from sie_store.weights.selection import Wanted, check_size

# part_bytes=0: one request reads all missing bytes of a file, because the hub limits the number of requests and
# redirects each request to a new signed URL
LIMITS = DownloadLimits(tries=3, part_bytes=0)
LISTING_S = 30.0  # seconds within which the hub must send the whole listing


class _Lfs(msgspec.Struct):
    sha256: str


class _Sibling(msgspec.Struct):
    """File of a repository; the hub's listing calls each file a sibling."""

    rfilename: str
    size: Annotated[int, msgspec.Meta(ge=0)] | None = None
    blob_id: str | None = msgspec.field(default=None, name="blobId")
    lfs: _Lfs | None = None


class _Listing(msgspec.Struct):
    sha: str = ""
    siblings: tuple[_Sibling, ...] = ()


# created at import: msgspec crashes the process if two threads use a type for the first time at the same time
_listings = msgspec.json.Decoder(_Listing)


def hub_fetch(repository: str, revision: str, select: Wanted) -> Fetch:
    """Return a function for `LocalCache.obtain` that fetches those files of a commit that `select` accepts."""

    def fetch(folder: Path, progress: FetchProgress) -> Manifest:
        with _classed(progress.label):
            return asyncio.run(_fetched(repository, revision, select, folder, progress))

    return fetch


def commit_of(repository: str, revision: str | None = None, *, label: str = "") -> str:
    """Return the id of the commit to which a branch or tag points now; by default the main branch. `label`: name of the
    model in logs and errors. Raises FetchFailed.
    """
    label = label or (f"{repository}@{revision}" if revision else repository)
    sha = _listed(repository, revision, label).sha
    if not sha:
        raise FetchFailed("NOT_FOUND", f"the hub reports no commit of {label}: give the id of a commit as the revision")
    return sha


def has_file(repository: str, revision: str, name: str) -> bool:
    """Return whether a commit has a file. Raises FetchFailed."""
    listing = _listed(repository, revision, f"{repository}@{revision}")
    return any(sibling.rfilename == name for sibling in listing.siblings)


def _listed(repository: str, revision: str | None, label: str) -> _Listing:
    async def listed() -> _Listing:
        async with _session() as session:
            return await LIMITS.repeated(lambda: _listing(session, repository, revision), label)

    with _classed(label):
        return asyncio.run(listed())


async def _fetched(repository: str, revision: str, select: Wanted, folder: Path, progress: FetchProgress) -> Manifest:
    from huggingface_hub import constants

    label = progress.label
    async with _session() as session:
        listing = await LIMITS.repeated(lambda: _listing(session, repository, revision), label)
        siblings = {sibling.rfilename: sibling for sibling in listing.siblings}
        names = [name for name in siblings if select(name)]
        try:
            check_paths(names)
        except ManifestError as error:
            raise FetchFailed("INCOMPATIBLE", f"{label}: {error}") from error
        if not names:
            raise FetchFailed("INCOMPATIBLE", f"{label} has none of the files that a model of its kind needs")
        url = f"{constants.ENDPOINT}/{repository}/resolve/{quote(revision, safe='')}"
        files = [await _file(session, url, siblings[name], label) for name in names]
        check_size(select, sum(file.size for file in files), label)
        facts = await SnapshotDownload(_Hub(session, url, label), folder, progress).all(files)
    left_out = tuple(sorted(name for name in siblings if not select(name) and is_safe(name)))
    return Manifest(repository, revision, facts, left_out, "hub")


async def _listing(session: Any, repository: str, revision: str | None) -> _Listing:
    """Read the listing of a revision: its commit and its files. Raises StoreError, also if the response is endless or
    is not a listing (such as a page of a proxy).
    """
    from huggingface_hub import constants

    path = f"/revision/{quote(revision, safe='')}" if revision else ""
    url, data = f"{constants.ENDPOINT}/api/models/{repository}{path}?blobs=true", bytearray()
    try:
        async with asyncio.timeout(LISTING_S), _answered(session, url) as response:
            async for piece in response.aiter_raw():
                data += piece
                if len(data) > MAX_MANIFEST_BYTES:
                    raise StoreError(f"the hub's listing of files has more than {MAX_MANIFEST_BYTES} bytes")
        return _listings.decode(data)
    except TimeoutError as error:
        raise StoreError(f"the hub's listing of files was not complete within {LISTING_S:g} s") from error
    except UNDECODABLE as error:
        raise StoreError(f"the hub's reply is not the listing of a repository: {str(error)[:200]}") from error


async def _file(session: Any, url: str, sibling: _Sibling, label: str) -> RemoteFile:
    """Return the size and the digest of a file in the listing. If a mirror's listing has no sizes, size and digest are
    read from the headers of a HEAD request. The digest is a SHA-256 for a file in LFS, and the digest of the git blob
    for another file. A mirror may send no digest.
    """
    name = sibling.rfilename
    if sibling.size is not None:
        sha256, blob = (sibling.lfs.sha256, "") if sibling.lfs else ("", sibling.blob_id or "")
        return RemoteFile(name, sibling.size, sha256, blob)

    async def headers() -> tuple[str, str]:
        """Return (size, ETag), each "" if unknown. Any response of a chain of redirections may have the headers
        X-Linked-*. Content-Length and ETag are read only from the last response: in an earlier response, they
        describe the redirection.
        """
        async with _answered(session, f"{url}/{quote(name)}", method="HEAD") as response:

            def header(linked: str, own: str) -> str:
                answers = (*response.history, response)
                values = (answer.headers[linked] for answer in answers if linked in answer.headers)
                return str(next(values, response.headers.get(own, "")))

            return header("X-Linked-Size", "Content-Length"), header("X-Linked-Etag", "ETag")

    size, etag = await LIMITS.repeated(headers, f"{label}: {name}")
    if not size.isdecimal():
        raise FetchFailed("INCOMPATIBLE", f"{label}: the hub does not report the size of {name}")
    etag = etag.strip('W/"')
    return RemoteFile(name, int(size), etag if len(etag) == 64 else "", etag if len(etag) == 40 else "")


def _session() -> Any:
    """Return an HTTP session of the hub's client without its response hook, which reads error bodies of any length."""
    from huggingface_hub import get_async_session

    session = get_async_session()
    session.event_hooks = {**session.event_hooks, "response": []}
    return session


@contextlib.asynccontextmanager
async def _answered(session: Any, url: str, *, method: str = "GET", start: int = 0) -> AsyncIterator[Any]:
    """Send a request, and yield its response before the body is read. If the server supports ranges, the body begins at
    byte `start` of the file. Raises StoreError and the exceptions of the hub's client.
    """
    from huggingface_hub import constants, get_token, hf_raise_for_status

    # `build_hf_headers` of huggingface_hub is not used: it may download a list of unlimited length to detect which AI
    # agent runs this program. No compression is requested: a byte range would count compressed bytes, and a small body
    # could expand to gigabytes.
    headers = {"User-Agent": f"sie/{sie_contracts.__version__}", "Accept-Encoding": "identity"}
    if token := get_token():
        headers["Authorization"] = f"Bearer {token}"
    if start:
        headers["Range"] = f"bytes={start}-"
    with _passing():
        async with session.stream(method, url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
            hf_raise_for_status(response)
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise StoreError("the hub's reply is compressed, although compression was not requested")
            yield response


class _Hub:
    """Source of the download engine: the files of one commit, at URLs below `url`."""

    limits = LIMITS

    def __init__(self, session: Any, url: str, label: str) -> None:
        self._session, self._url, self.label = session, url, label

    async def answer(self, file: RemoteFile, start: int, end: int) -> AsyncGenerator[Piece, None]:
        async with _answered(self._session, f"{self._url}/{quote(file.path)}", start=start) as response:
            # a mirror without range requests sends the whole file; the bytes before `start` are skipped
            at = start if response.status_code == 206 else 0
            async for data in response.aiter_raw():
                if piece := data[max(0, start - at) :]:
                    yield piece
                at += len(data)

    def damaged(self, file: RemoteFile) -> FetchFailed:
        return FetchFailed(
            "NETWORK", f"{self.label}: {file.path} was received twice with a digest that differs from the hub's"
        )


@contextlib.contextmanager
def _passing() -> Iterator[None]:
    """Convert an error after which another attempt may help (no connection, time-out, status 408, 425, 429, 5xx) to a
    StoreError. Only the text of the StoreError may be logged: the text of the original error contains the URL, which
    may be signed or contain a password.
    """
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # base class of all errors of the hub client's HTTP library, which is httpx or requests
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
def _classed(label: str) -> Iterator[None]:
    """Convert errors of the hub's client into FetchFailed; errors of the disk are not changed."""
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
        raise FetchFailed("GATED", f"{label} is gated: accept its licence and set HF_TOKEN") from error
    except (RepositoryNotFoundError, RevisionNotFoundError, RemoteEntryNotFoundError) as error:
        raise FetchFailed("NOT_FOUND", f"{label} does not exist on the hub, or is private (set HF_TOKEN)") from error
    except OfflineModeIsEnabled as error:
        fix = "unset it, or put the model into SIE_LOCAL_CACHE"
        raise FetchFailed("NETWORK", f"{label} was not downloaded: HF_HUB_OFFLINE is set; {fix}") from error
    except HfHubHTTPError as error:
        if (status := error.response.status_code) in (401, 403):
            fix = "set HF_TOKEN to a token that may read the repository"
            raise FetchFailed("GATED", f"{label}: the hub refuses this token, status {status}; {fix}") from error
        if status == 404:
            raise FetchFailed("NOT_FOUND", f"{label} is not known to the hub (HF_ENDPOINT)") from error
        raise _unreachable(label, f"status {status}") from error
    except StoreError as error:
        raise _unreachable(label, str(error)) from error


def _unreachable(label: str, cause: str) -> FetchFailed:
    fix = "check the network and HF_ENDPOINT, or put the model into SIE_LOCAL_CACHE"
    return FetchFailed("NETWORK", f"{label} could not be downloaded: {cause}; {fix}")
