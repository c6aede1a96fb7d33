"""The hub as a source of snapshots: one listing of the commit, then its files, each resumed where an earlier try ended.

    listing ──► files that are wanted ──► those already there, checked ──► ranged reads of the rest ──► digests ──►
    manifest

The hub's own client begins every file anew when its process ends (huggingface_hub 2.4), so only its session and its
errors are used.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

from sie_store.cache import Fetch
from sie_store.durable import PART
from sie_store.manifest import FetchFailed, FileFact, Manifest, is_safe
from sie_store.progress import Progress
from sie_store.selection import Wanted

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

_logger = logging.getLogger("sie.store")
_T = TypeVar("_T")

FILES_AT_ONCE = 8
PIECE_BYTES = 1 << 18
TRIES = 3  # without a byte in between
PAUSE_S = 0.5  # before the second one; twice that before the next, each with jitter: many nodes may ask at once
MAX_PAUSE_S = 30.0


class _Passing(Exception):
    """The hub, or the way to it, failed in a way that may pass. `after_s`: what it asked to wait for. Its text is fit
    for a log: that of `cause` has the URL, which may be signed or hold a password.
    """

    def __init__(self, cause: Exception, after_s: float = 0.0, *, status: int = 0) -> None:
        super().__init__(f"status {status}" if status else type(cause).__name__)
        self.cause = cause
        self.after_s = after_s


class _Stopped(Exception):
    """Another file of the snapshot failed."""


def hub_fetch(repository: str, revision: str, wanted: Wanted) -> Fetch:
    """The fetch of the files of a commit that are `wanted`, for `LocalCache.obtain`."""
    return functools.partial(_fetch, repository, revision, wanted)


def commit_of(repository: str, revision: str | None = None, *, what: str = "") -> str:
    """The commit that a branch or tag is now; without one, the main branch. `what` names it in logs and errors. Raises
    FetchFailed.
    """
    from huggingface_hub import HfApi, constants

    what = what or (f"{repository}@{revision}" if revision else repository)
    with _classed(what):
        wait_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        sha = _tried(lambda: HfApi().model_info(repository, revision=revision, timeout=wait_s).sha, what)
    if sha is None:
        raise FetchFailed("NOT_FOUND", f"the hub names no commit of {what}: name one")
    return sha


@dataclass(frozen=True)
class _File:
    """A file of the listing. A large one has a SHA-256, any other the digest of a blob of git; a mirror may tell
    neither.
    """

    path: str
    size: int
    sha256: str = ""
    blob: str = ""


def _fetch(repository: str, revision: str, wanted: Wanted, folder: Path, progress: Progress) -> Manifest:
    what = progress.what
    with _classed(what):
        found = _siblings(repository, revision, what)
        names = [sibling.rfilename for sibling in found]
        if unsafe := next((name for name in names if wanted(name) and not is_safe(name)), None):
            raise FetchFailed(
                "INCOMPATIBLE",
                f"{what} has a file {unsafe[:200]!r}, which does not lie below the folder of its snapshot",
            )
        files = [_file(repository, revision, sibling, what) for sibling in found if wanted(sibling.rfilename)]
        if not files:
            raise FetchFailed("INCOMPATIBLE", f"{what} has none of the files that a model of its kind needs")
        facts = _Download(repository, revision, folder, progress).all(files)
    left_out = tuple(sorted(name for name in names if not wanted(name) and is_safe(name)))
    return Manifest(repository, revision, facts, left_out, "hub")


def _siblings(repository: str, revision: str, what: str) -> list[RepoSibling]:
    """The files of a commit, in one answer."""
    from huggingface_hub import HfApi, constants

    def asked() -> list[RepoSibling]:
        wait_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        return HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=wait_s).siblings or []

    return _tried(asked, what)


def _file(repository: str, revision: str, sibling: RepoSibling, what: str) -> _File:
    """What the listing says of a file; where a mirror leaves its size out, what the file's own headers say."""
    from huggingface_hub import get_hf_file_metadata

    name = sibling.rfilename
    if sibling.size is not None:
        return _File(
            name, sibling.size, sibling.lfs.sha256 if sibling.lfs else "", "" if sibling.lfs else sibling.blob_id or ""
        )
    metadata = _tried(lambda: get_hf_file_metadata(_url(repository, revision, name)), f"{what}: {name}")
    if metadata.size is None:
        raise FetchFailed("INCOMPATIBLE", f"{repository}@{revision}: the hub does not tell the size of {name}")
    etag = metadata.etag or ""
    return _File(name, metadata.size, etag if len(etag) == 64 else "", etag if len(etag) == 40 else "")


def _url(repository: str, revision: str, name: str) -> str:
    from huggingface_hub import HfApi

    return f"{HfApi().endpoint}/{repository}/resolve/{quote(revision, safe='')}/{quote(name)}"


class _Download:
    """The files of one snapshot, some at a time."""

    def __init__(self, repository: str, revision: str, folder: Path, progress: Progress) -> None:
        self._repository, self._revision, self._folder, self._progress = repository, revision, folder, progress
        self._what = progress.what
        self._failed = threading.Event()

    def all(self, files: list[_File]) -> dict[str, FileFact]:
        """What each file is, once it is there and right. Raises what the first failure was."""
        present = self._each(self._present, files)
        missing = [file for file in files if present[file.path] is None]
        had = sum(file.size for file in files if present[file.path]) + sum(_size(self._part(file)) for file in missing)
        self._progress.expect(sum(file.size for file in files), had)
        fetched = self._each(self._file, missing)
        return {path: fact or fetched[path] for path, fact in present.items()}

    def _each(self, call: Callable[[_File], _T], files: list[_File]) -> dict[str, _T]:
        """What `call` returns for each file, some at a time. The threads are of a kind that nobody waits for when the
        process ends: what they did not write will be asked for again.
        """
        results: dict[str, _T] = {}
        failures: list[Exception] = []
        left = queue.SimpleQueue[_File]()
        for file in files:
            left.put(file)

        def work() -> None:
            while not self._failed.is_set():
                try:
                    file = left.get_nowait()
                    results[file.path] = call(file)
                except queue.Empty:
                    return
                except Exception as error:  # noqa: BLE001  # raised below
                    failures.append(error)
                    self._failed.set()

        threads = [
            threading.Thread(target=work, name="fetch", daemon=True) for _ in range(min(FILES_AT_ONCE, len(files)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise next((error for error in failures if not isinstance(error, _Stopped)), failures[0])
        return {file.path: results[file.path] for file in files}

    def _part(self, file: _File) -> Path:
        return self._folder / f"{file.path}{PART}"

    def _present(self, file: _File) -> FileFact | None:
        """A file that is there under its final name and right. One that is not is taken away; it may be a link to
        somebody's file.
        """
        path, part = self._folder / file.path, self._part(file)
        if path.exists():
            if _size(path) == file.size and (fact := self._checked(path, file)) is not None:
                part.unlink(missing_ok=True)
                return fact
            path.unlink()
        if _size(part) > file.size:
            part.unlink()
        return None

    def _file(self, file: _File) -> FileFact:
        path, part = self._folder / file.path, self._part(file)
        part.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            part.touch()
            self._grown(file, part)
            if (fact := self._checked(part, file)) is not None:
                os.replace(part, path)
                return fact
            _logger.warning(
                "%s: %s does not have the digest that the hub names, it is fetched again", self._what, file.path
            )
            part.unlink()
            self._progress.add(-file.size)
        raise FetchFailed(
            "NETWORK", f"{self._what}: {file.path} came twice without the digest that the hub names for it"
        )

    def _grown(self, file: _File, part: Path) -> None:
        """Make `part` as long as the file, in as many tries as bring something."""
        tries = 0
        while (before := _size(part)) < file.size:
            try:
                self._read_on(file, part)
                return
            except _Passing as error:
                tries = 1 if _size(part) > before else tries + 1
                if tries >= TRIES:
                    raise error.cause from error
                _logger.info(
                    "%s: %s is asked for again from byte %d: %s", self._what, file.path, max(0, _size(part)), error
                )
                self._failed.wait(_pause_s(tries, error.after_s))

    def _read_on(self, file: _File, part: Path) -> None:
        from huggingface_hub import constants, get_session, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, but not marked so

        if self._failed.is_set():
            raise _Stopped
        offset = max(0, _size(part))
        url = _url(self._repository, self._revision, file.path)
        # compressed, a range would be one of the compressed bytes
        headers = {
            **build_hf_headers(),
            "Accept-Encoding": "identity",
            **({"Range": f"bytes={offset}-"} if offset else {}),
        }
        with (
            _passing(),
            get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response,
        ):
            hf_raise_for_status(response)
            with part.open("ab", buffering=0) as growing:
                if offset and response.status_code != 206:  # all of it comes
                    growing.truncate(0)
                    self._progress.add(-offset)
                    offset = 0
                for piece in response.iter_bytes():
                    if self._failed.is_set():
                        raise _Stopped
                    piece = piece[: file.size - offset]  # the digest tells what more would mean
                    _write_all(growing.write, piece)
                    offset += len(piece)
                    self._progress.add(len(piece))
                os.fsync(growing.fileno())
        if offset < file.size:
            raise _Passing(ConnectionError(f"the answer ended at byte {offset} of {file.size}"))

    def _checked(self, path: Path, file: _File) -> FileFact | None:
        """What the file is, None if that is not what the listing says: the SHA-256 of a large file, the blob of git of
        any other.
        """
        sha256, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
        with path.open("rb") as opened:
            while piece := opened.read(PIECE_BYTES):
                sha256.update(piece)
                if file.blob:
                    blob.update(piece)
                self._progress.touch()
        is_right = file.sha256 in ("", sha256.hexdigest()) and file.blob in ("", blob.hexdigest())
        return FileFact(file.size, sha256.hexdigest()) if is_right else None


def _write_all(write: Callable[[bytes], int | None], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[write(bytes(view)) or 0 :]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _pause_s(tries: int, after_s: float) -> float:
    return min(MAX_PAUSE_S, max(after_s, PAUSE_S * 2.0 ** (tries - 1))) * random.uniform(0.75, 1.25)  # noqa: S311


def _tried(call: Callable[[], _T], what: str) -> _T:
    """What `call` returns, asked again where that may help."""
    tries = 0
    while True:
        try:
            with _passing():
                return call()
        except _Passing as error:
            tries += 1
            if tries >= TRIES:
                raise error.cause from error
            _logger.info("%s is asked for again: %s", what, error)
            time.sleep(_pause_s(tries, error.after_s))


@contextlib.contextmanager
def _passing() -> Iterator[None]:
    """What may pass becomes _Passing."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # of whichever library the hub's client is built on: the parent of all that can go wrong with a connection
    http_error: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        yield
    except OfflineModeIsEnabled:
        raise
    except HfHubHTTPError as error:
        if (status := error.response.status_code) in (408, 425, 429) or status >= 500:
            after = error.response.headers.get("Retry-After", "")
            raise _Passing(error, float(after) if after.isdecimal() else 0.0, status=status) from error
        raise
    except (http_error, ConnectionError, TimeoutError) as error:
        raise _Passing(error) from error


@contextlib.contextmanager
def _classed(what: str) -> Iterator[None]:
    """What the hub's client raises becomes FetchFailed; what the disk does not."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    http_error: type[Exception] = HfHubHTTPError.__bases__[0]
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
    except (http_error, ConnectionError, TimeoutError) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _unreachable(what, type(error).__name__) from error


def _unreachable(what: str, cause: str) -> FetchFailed:
    fix = "the network has to reach the hub (HF_ENDPOINT), or SIE_LOCAL_CACHE to hold the model"
    return FetchFailed("NETWORK", f"{what} could not be downloaded: {cause}; {fix}")
