"""Local cache: snapshots (the weights of a model at one commit) on this node's disk. The folders are the same as in
HF_HOME, so that other programs find the snapshots too.

    hub/models--org--name/snapshots/COMMIT/     a snapshot that has a manifest or that the hub's own client has written
    hub/models--org--name/partial/COMMIT/       files of an unfinished fetch; the next fetch resumes there
    hub/.locks/models--org--name/COMMIT.fetch   exclusive lock of the one process of the node that fetches the snapshot;
                                                the file contains the progress
    hub/.locks/models--org--name/COMMIT.use     shared lock of processes that load, use or fetch the snapshot;
                                                exclusive lock of a process that removes it. The file's mtime: last use

A fetch fills the partial folder. The manifest is written last, and then the folder is renamed to the snapshot's folder.
If the snapshot exists already, the new files are moved into its folder before its manifest is written.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from sie_contracts.errors import UNDECODABLE
from sie_contracts.wire.heartbeats import Fetched
from sie_store import durable
from sie_store.weights import listing
from sie_store.weights.locks import Lock, try_lock
from sie_store.weights.manifest import (
    MANIFEST,
    FetchFailed,
    Manifest,
    ManifestError,
    check_names,
    decode,
    encode,
    verify,
)
from sie_store.weights.progress import FetchProgress
from sie_store.weights.selection import LORA_FILES, Wanted, common

_logger = logging.getLogger("sie.store")

POLL_S = 0.2
# seconds without progress after which a fetch by another process counts as failed; longer than the time-outs within a
# fetch, so that a fetch that still retries does not count as failed
STALLED_S = 180.0
REMOVAL_S = 60.0  # seconds for which a process waits while another process removes snapshots
FULL = (errno.ENOSPC, errno.EDQUOT)
REMOVED = ".removed"

T = TypeVar("T")
_note_decoder = msgspec.json.Decoder(tuple[Fetched, float])


class Fetch(Protocol):
    """Function that fetches the files of one snapshot into a folder and returns the manifest.

    The function uses files that earlier attempts have left in the folder. An incomplete file has the suffix PART until
    its digest is correct. A file without the suffix may be a hard link to a file of another program. So a wrong file
    is replaced, but never written to. Every file is synced to the disk. `progress.expect` is called before the first
    byte is fetched. Raises FetchFailed, OSError.
    """

    def __call__(self, folder: Path, progress: FetchProgress) -> Manifest: ...


@dataclass(frozen=True)
class Candidate:
    """Snapshot or partial folder that may be removed to free disk space. `used_s`: time of its last use, seconds since
    1970. `is_partial`: remove only the partial folder of an unfinished fetch.
    """

    repository: str
    revision: str
    used_s: float
    is_partial: bool
    bytes: int = 0


class LocalCache:
    """Snapshots below `folder`. Methods are safe for use by several threads and processes.

    `room`: function that frees a number of bytes on the disk before a fetch, or raises FetchFailed. `relieve`: function
    that removes snapshots until the disk is below its threshold, and returns whether the disk is below it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hub = folder / "hub"
        self.room: Callable[[int], None] = lambda _: None
        self.relieve: Callable[[], bool] = lambda: True

    def place(self, repository: str, revision: str) -> Path:
        """Return the folder of a snapshot, even if it does not exist. Raises ManifestError for invalid names."""
        check_names(repository, revision)
        return self._folder_of(repository) / "snapshots" / revision

    def find(self, repository: str, revision: str, select: Wanted | None = None) -> Path | None:
        """Return the folder of a snapshot; None if it is missing or incomplete. Raises ManifestError.

        With a manifest, the snapshot must have all files of the manifest, and `select` must accept no file that the
        manifest left out. Without a manifest, the snapshot must have the files that `select` (by default `common`)
        accepts in the listing of the hub's own client.
        """
        folder = self.place(repository, revision)
        manifest = self.manifest(repository, revision)
        if manifest is None:
            is_whole = folder.is_dir() and listing.is_listed_whole(self.hub, repository, folder, select or common)
        else:
            lacks = select is not None and any(select(name) for name in manifest.left_out)
            is_whole = not lacks and not verify(folder, manifest, digests=False)
        return folder if is_whole else None

    def flaw(self, repository: str, revision: str) -> str:
        """Return why a snapshot is not complete; empty if no fault is found. The files are compared with the manifest.
        Without a manifest, `listing.contradiction` examines them. Raises ManifestError.
        """
        folder, manifest = self.place(repository, revision), self.manifest(repository, revision)
        if manifest is None:
            return listing.contradiction(folder)
        return "; ".join(verify(folder, manifest, digests=False))

    def log_name(self, repository: str, revision: str) -> str:
        """Return a snapshot's name for logs. A LoRA is not named, because a client may have chosen its name. An
        unfinished download is not named either, because it may be a LoRA.
        """
        place = self.place(repository, revision)
        if not place.exists():
            return "an unfinished download"
        return "a LoRA" if any((place / name).exists() for name in LORA_FILES) else f"{repository}@{revision}"

    def manifest(self, repository: str, revision: str) -> Manifest | None:
        """Return the manifest of a snapshot; None if it is missing, invalid or of another snapshot. The files are not
        checked.
        """
        try:
            manifest = decode((self.place(repository, revision) / MANIFEST).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ManifestError as error:
            _logger.warning(
                "the manifest of %s in the local cache is not used: %s", self.log_name(repository, revision), error
            )
            return None
        return manifest if (manifest.repository, manifest.revision) == (repository, revision) else None

    def lease(self, repository: str, revision: str) -> Lock:
        """Return a lease, a shared file lock on a snapshot that may be missing. No process removes the snapshot during
        the lease. Raises FetchFailed if another process takes longer than REMOVAL_S to remove the snapshot, or if the
        lock file cannot be written. Raises ManifestError.
        """
        check_names(repository, revision)
        deadline_s = time.monotonic() + REMOVAL_S
        path = self._lock_file(repository, revision, "use")

        def tried() -> Lock | None:
            return try_lock(path, shared=True, is_use=True)

        while (lock := self._with_room(tried, f"the lease on {repository}@{revision}")) is None:
            if time.monotonic() > deadline_s:
                raise FetchFailed(
                    "NETWORK", f"{repository}@{revision}: its removal from the cache takes more than {REMOVAL_S:g} s"
                )
            time.sleep(POLL_S)
        return lock

    def obtain(
        self,
        repository: str,
        revision: str,
        fetch: Fetch,
        label: str,
        *,
        select: Wanted | None = None,
        progress: FetchProgress | None = None,
    ) -> Path:
        """Return the folder of a snapshot. Fetch the snapshot first if it is not complete; other processes of the node
        wait until this fetch ends. `label`: name of the snapshot in logs and errors. Raises FetchFailed, ManifestError.

        A caller that uses the files later must have a lease before this call, because another process could remove the
        snapshot after the call.
        """
        progress = progress or FetchProgress(label)

        def fetched() -> Path:
            with self._sole_fetch(repository, revision, label, progress) as lock:
                if (there := self.find(repository, revision, select)) is not None:
                    return there
                place, partial = (
                    self.place(repository, revision),
                    self._folder_of(repository) / "partial" / revision,
                )
                while not partial.is_dir():
                    with contextlib.suppress(FileNotFoundError):  # `clean` may remove a parent folder meanwhile
                        partial.mkdir(parents=True, exist_ok=True)
                _link_files(place, partial)
                progress.on_expect, progress.on_step = self.room, functools.partial(_note, lock)
                manifest = fetch(partial, progress)
                if wrong := verify(partial, manifest, digests=False):
                    raise FetchFailed("NETWORK", f"{label} was fetched, but {wrong[0]}")
                self._publish(partial, place, self._merged(repository, revision, manifest))
                progress.end()
                return place

        with self.lease(repository, revision):
            return self._with_room(fetched, label)

    def _with_room(self, act: Callable[[], T], label: str) -> T:
        """Call `act`. If the disk is full, free space and call `act` once more. `label`: name of the written files in
        error texts. Raises FetchFailed.
        """
        try:
            try:
                return act()
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self.room(0)
                return act()
        except OSError as error:
            raise _disk_failed(label, self.folder, error) from error

    def used_s(self, repository: str, revision: str) -> float:
        """Return the time when a lease on a snapshot last began or ended, in seconds since 1970. If the snapshot never
        had a lease, return the time of the last change of its folder; 0 if the folder does not exist.
        """
        for path in (self._lock_file(repository, revision, "use"), self.place(repository, revision)):
            with contextlib.suppress(OSError):
                return path.stat().st_mtime
        return 0.0

    def remove(self, repository: str, revision: str) -> bool:
        """Remove a snapshot and its partial folder. Return False if a process uses or fetches it. Raises OSError."""
        return self.discard(Candidate(repository, revision, 0.0, is_partial=False))

    def candidates(self) -> list[Candidate]:
        """Return the snapshots and partial folders that may be removed to free space, least recently used first.
        Snapshots that are in use or that SIE did not fetch are omitted.
        """
        going = []
        for path in self.hub.glob(f"models--*/snapshots/*/{MANIFEST}"):
            try:
                manifest = decode(path.read_bytes())
            except (OSError, ManifestError):
                continue
            repository, revision = manifest.repository, manifest.revision
            is_own = manifest.origin != "found" and self.place(repository, revision) == path.parent
            if is_own and not self._is_used(repository, revision):
                with contextlib.suppress(FileNotFoundError):  # another process removes the snapshot at the same time
                    used_s, size = self.used_s(repository, revision), _bytes_in(path.parent)
                    going.append(Candidate(repository, revision, used_s, is_partial=False, bytes=size))
        for path in self.hub.glob("models--*/partial/*"):
            repository, revision = (
                path.parents[1].name.removeprefix("models--").replace("--", "/"),
                path.name.removesuffix(REMOVED),
            )
            # skip a folder without the name of a snapshot, and a folder that was moved meanwhile
            with contextlib.suppress(ManifestError, FileNotFoundError):
                check_names(repository, revision)
                if not self._is_used(repository, revision):
                    used_s = self.used_s(repository, revision)
                    # files with a second hard link, for example in the snapshot, stay on the disk and are not counted
                    size = _bytes_in(path, linked=False)
                    going.append(Candidate(repository, revision, used_s, is_partial=True, bytes=size))
        return sorted(going, key=lambda copy: (copy.used_s, not copy.is_partial, copy.repository, copy.revision))

    def _is_used(self, repository: str, revision: str) -> bool:
        path = self._lock_file(repository, revision, "use")
        # A snapshot without a lock file was never used. `try_lock` would create the file, and `used_s` would take its
        # mtime for a use.
        if not path.exists():
            return False
        try:
            lock = try_lock(path, shared=False)
        except PermissionError:  # another user may hold the lock, so the snapshot counts as in use
            return True
        if lock is None:
            return True
        lock.close()
        return False

    def discard(self, candidate: Candidate) -> bool:
        """Remove a candidate and return True. If a process uses or fetches the snapshot, remove nothing and return
        False. Raises OSError.

        The hub's own client stores files in `blobs`, and a snapshot has links to these files. A file in `blobs` is
        removed with the last snapshot that has a link to it.
        """
        repository, revision = candidate.repository, candidate.revision
        lock = try_lock(self._lock_file(repository, revision, "use"), shared=False)
        if lock is None:
            return False
        with lock:
            place, partial = self.place(repository, revision), self._folder_of(repository) / "partial"
            removed = partial / f"{revision}{REMOVED}"
            blobs = self._blobs(repository, removed)
            _remove(removed)
            if place.exists() and not candidate.is_partial:
                blobs |= self._blobs(repository, place)
                partial.mkdir(parents=True, exist_ok=True)
                os.rename(place, removed)  # atomic, so that no process sees only a part of the files
            for folder in (removed, partial / revision):
                _remove(folder)
            for blob in blobs - self._blobs(repository, place.parent):
                blob.unlink(missing_ok=True)
        return True

    def clean(self, repository: str, revision: str) -> None:
        """Remove the lock files and the empty folders of a snapshot that does not exist. Without the removal, they
        would accumulate, because clients may name any number of LoRAs. Do nothing while a process has a lease on the
        snapshot. Files of an unfinished download stay.
        """
        use, folder = self._lock_file(repository, revision, "use"), self._folder_of(repository)
        with contextlib.suppress(OSError):  # a folder is not empty, or belongs to another user
            if (lock := try_lock(use, shared=False)) is None:
                return
            with lock:
                if self.place(repository, revision).exists():
                    return
                with contextlib.suppress(FileNotFoundError):
                    (folder / "partial" / revision).rmdir()
                # no process holds the fetch lock: a fetch also holds a lease, and `lock` excludes all leases
                self._lock_file(repository, revision, "fetch").unlink(missing_ok=True)
                use.unlink()
            use.parent.rmdir()
        for empty in (folder / "partial", folder):
            with contextlib.suppress(OSError):
                empty.rmdir()

    def outstanding_bytes(self) -> int:
        """Return the number of bytes that the running fetches of all processes of this node have yet to write."""
        due = 0
        for path in self.hub.glob(".locks/*/*.fetch"):
            # skip a lock file that this user cannot read, or that was removed meanwhile
            with contextlib.suppress(PermissionError, FileNotFoundError):
                lock = try_lock(path, shared=False)
                if lock is None:
                    noted = _noted(path.read_bytes())
                    due += max(0, noted.total_bytes - noted.done_bytes)
                else:
                    lock.close()
        return due

    def _folder_of(self, repository: str) -> Path:
        return self.hub / f"models--{repository.replace('/', '--')}"

    def _blobs(self, repository: str, folder: Path) -> set[Path]:
        """Return the files in `blobs`, where the hub's own client stores files, to which links below `folder` lead."""
        blobs = (self._folder_of(repository) / "blobs").resolve()
        targets = (path.resolve() for path in folder.rglob("*") if path.is_symlink())
        return {target for target in targets if target.parent == blobs}

    def _lock_file(self, repository: str, revision: str, kind: str) -> Path:
        return self.hub / ".locks" / self._folder_of(repository).name / f"{revision}.{kind}"

    @contextlib.contextmanager
    def _sole_fetch(self, repository: str, revision: str, label: str, progress: FetchProgress) -> Iterator[Lock]:
        """Acquire the lock that allows this process alone to fetch a snapshot. While another process has the lock, wait
        and report the progress of its fetch. Raises FetchFailed if that fetch makes no progress for STALLED_S.
        """
        path = self._lock_file(repository, revision, "fetch")
        last, last_s, is_logged = b"", time.monotonic(), False
        while (lock := try_lock(path, shared=False)) is None:
            if (note := path.read_bytes()) != last:
                last, last_s = note, time.monotonic()
                progress.follow(_noted(note))
            if time.monotonic() - last_s > STALLED_S:
                raise FetchFailed(
                    "NETWORK", f"{label} is fetched by another process, which has made no progress for {STALLED_S:g} s"
                )
            if not is_logged:
                is_logged = True
                _logger.info("waiting for another process, which fetches %s", label)
            time.sleep(POLL_S)
        with lock:
            _note(lock, Fetched())
            yield lock

    def _merged(self, repository: str, revision: str, manifest: Manifest) -> Manifest:
        """Return the manifest of the fetched files, joined with the manifest of the existing snapshot. If that snapshot
        has no manifest, another program has written it. Then `origin` is `found`, so that the snapshot is never removed
        to free disk space.
        """
        place, before = self.place(repository, revision), self.manifest(repository, revision)
        if before is None:
            return msgspec.structs.replace(manifest, origin="found") if place.exists() else manifest
        wrong = {name for name, fact in before.files.items() if not _has_size(place / name, fact.bytes)}
        intact_files = {name: fact for name, fact in before.files.items() if name not in wrong}
        files = {**intact_files, **manifest.files}
        left_out = tuple(sorted({*before.left_out, *manifest.left_out, *wrong} - set(files)))
        return msgspec.structs.replace(manifest, files=files, left_out=left_out, origin=before.origin)

    def _publish(self, partial: Path, place: Path, manifest: Manifest) -> None:
        (partial / MANIFEST).unlink(missing_ok=True)
        if place.exists():  # the snapshot may be in use, so it is not replaced: the new files are moved into it
            for name in manifest.files:
                source, target = partial / name, place / name
                if source.exists() and not (target.exists() and os.path.samefile(source, target)):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(source, target)
            durable.write(place / MANIFEST, encode(manifest))
            shutil.rmtree(partial)
            return
        published_names = {*manifest.files}
        for path in partial.rglob("*"):
            if path.is_file() and path.relative_to(partial).as_posix() not in published_names:
                path.unlink()
        durable.write(partial / MANIFEST, encode(manifest))
        place.parent.mkdir(parents=True, exist_ok=True)
        os.rename(partial, place)
        durable.sync(place.parent)


def _disk_failed(label: str, folder: Path, error: OSError) -> FetchFailed:
    """Return the error for a failed write. The class of the error allows a retry only if the disk was full."""
    if error.errno in FULL:
        return FetchFailed(
            "NETWORK", f"{label} could not be written: no space is left on the disk of {folder}; delete files there"
        )
    fix = "set SIE_LOCAL_CACHE to a folder that this user may write to"
    return FetchFailed(
        "UNKNOWN", f"{label} could not be written to {folder}: {error.strerror or type(error).__name__}; {fix}"
    )


def _note(lock: Lock, fetched: Fetched) -> None:
    # the time makes each note differ, so that waiting processes see that the fetch continues
    lock.write(msgspec.json.encode((fetched, time.time())))


def _remove(folder: Path) -> None:
    """Remove a folder if it exists. If it is a symbolic link, remove the link and keep the target."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def _bytes_in(folder: Path, *, linked: bool = True) -> int:
    """Return the number of bytes of all files below a folder; without `linked`, only of files with a single hard link.
    Raises FileNotFoundError if a file is removed meanwhile.
    """
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum(file.st_size for file in files if linked or file.st_nlink == 1)


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _noted(note: bytes) -> Fetched:
    """Return the progress in `note`, the content of a lock file; an empty `Fetched` if the note is incomplete."""
    try:
        return _note_decoder.decode(note)[0]
    except UNDECODABLE:
        return Fetched()


def _link_files(place: Path, partial: Path) -> None:
    """Hard-link the files of a snapshot into the partial folder, if the file system can, so that they are not fetched
    again. A file with the suffix PART is not linked, because the fetch would append to it.
    """
    for path in place.rglob("*") if place.exists() else ():
        target = partial / path.relative_to(place)
        if path.is_file() and path.name != MANIFEST and path.suffix != durable.PART and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):
                os.link(path.resolve(), target)
