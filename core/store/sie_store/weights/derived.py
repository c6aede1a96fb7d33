"""Files that a process computes from the weights of a model, kept on the disk for the next load: a compiled graph,
states of the unchanged model, the certificate of a load.

    sie-derived/KEY/NAME/           the files of one entry, and a manifest with their digests
    sie-derived/writing-RANDOM/     an entry that a process writes, locked by this process

KEY is a digest of everything that the files are computed from. A process may lose these files at any time: it then
computes them again. So an entry is used only if its digests are right, and errors of the disk are no errors of a load.

An entry is written to a folder of its own, which is then renamed, so two processes may write the same entry. If all
entries have more than LIMIT_BYTES, those that were used longest ago are removed. A process that has mapped a removed
file into its memory keeps the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sie_contracts.errors import UNDECODABLE
from sie_store.weights.locks import Lock, try_lock

FOLDER = "sie-derived"
LIMIT_BYTES = 4 << 30  # most bytes of all entries
_MANIFEST = "manifest.json"
_WRITING = "writing-"  # prefix of folders that are written
_LOCK = "lock"
_logger = logging.getLogger("sie.store")
_decode_manifest = msgspec.json.Decoder(dict[str, str]).decode


def digest(path: Path) -> str:
    """Return the SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class DerivedFiles:
    """Entries with one key. `folder`: folder of all keys, in which new files are written; None: the system's temporary
    folder, and nothing is kept. `is_kept`: whether new files are kept, and files of earlier loads are used.
    Thread-safe.
    """

    folder: Path | None = None
    key: str = ""
    is_kept: bool = False

    def _place(self, name: str) -> Path | None:
        return self.folder / self.key / name if self.folder is not None and self.is_kept else None

    def find(self, name: str) -> Path | None:
        """Return the folder of an entry; None if it is missing, or one of its files is missing or was changed."""
        if (place := self._place(name)) is None:
            return None
        try:
            manifest = place / _MANIFEST
            digests = _decode_manifest(manifest.read_bytes())
            if any(digest(place / file) != expected for file, expected in digests.items()):
                _logger.warning("files that were computed from weights have changed, and are computed again: %s", place)
                self.discard(name)
                return None
        except (OSError, *UNDECODABLE):
            return None
        with contextlib.suppress(OSError):  # a read-only disk, or a file of another user
            os.utime(manifest)
        return place

    def read(self, name: str) -> bytes | None:
        """Return what `keep` has stored under a name; None if it is missing or was changed."""
        place = self.find(name)
        try:
            return None if place is None else (place / name).read_bytes()
        except OSError:
            return None

    def keep(self, name: str, data: bytes) -> None:
        """Store bytes for `read`. If the disk is full or read-only, nothing is stored."""
        if self.is_kept:
            with contextlib.suppress(OSError), self.writing(name) as place:
                (place / name).write_bytes(data)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Yield an empty folder. After the context, keep its files as the entry `name`, or remove them if an exception
        was raised or they cannot be kept. Raises OSError if no folder can be made.
        """
        if self.folder is not None:
            _remove_abandoned(self.folder)
        with _new_folder(self.folder) as growing:
            yield growing
            place = self._place(name)
            if self.folder is None or place is None or _bytes_in(growing) > LIMIT_BYTES:
                return
            try:
                digests = {path.name: digest(path) for path in growing.iterdir() if path.name != _LOCK}
                (growing / _MANIFEST).write_bytes(msgspec.json.encode(digests))
                self.discard(name)
                place.parent.mkdir(exist_ok=True)
                growing.rename(place)
            except OSError as error:
                # another process has stored the same entry, or the disk is full
                _logger.debug("files computed from weights were not kept: %s", error)
        while _bytes_in(self.folder) > LIMIT_BYTES and remove_oldest(self.folder):
            pass

    def discard(self, name: str) -> None:
        if self.folder is not None and (place := self._place(name)) is not None and place.exists():
            _remove(self.folder, place)


def remove_oldest(folder: Path) -> bool:
    """Remove the entry that was used longest ago. Return whether an entry was removed."""
    used_s: dict[Path, float] = {}
    for manifest in folder.glob(f"*/*/{_MANIFEST}"):
        with contextlib.suppress(OSError):  # another process removes the entry at the same time
            used_s[manifest.parent] = manifest.stat().st_mtime
    return any(_remove(folder, place) for place in sorted(used_s, key=lambda place: used_s[place]))


@contextlib.contextmanager
def _new_folder(place: Path | None) -> Iterator[Path]:
    """Yield a new temporary folder in `place`, locked by this process, and remove it afterwards if it is still there.
    On a file system without locks, the folder is not locked.
    """
    with tempfile.TemporaryDirectory(prefix=_WRITING, dir=place, ignore_cleanup_errors=True) as folder:
        lock = None
        with contextlib.suppress(OSError):
            lock = try_lock(Path(folder) / _LOCK, shared=False)
        with lock or Lock(None):
            yield Path(folder)


def _remove_abandoned(folder: Path) -> None:
    """Remove folders that killed processes have left: their locks are free. A new folder without files may be one that
    its process is about to lock.
    """
    for left in folder.glob(f"{_WRITING}*"):
        with contextlib.suppress(OSError):  # another process may remove the folder at the same time
            if len(list(left.iterdir())) > 1 and (lock := try_lock(left / _LOCK, shared=False)) is not None:
                with lock:
                    shutil.rmtree(left)


def _remove(folder: Path, place: Path) -> bool:
    """Remove an entry. Rename it first, so that no process sees a part of it. Return whether it is gone."""
    removed = folder / f"{_WRITING}{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):  # another process has removed it, or it belongs to another user
        place.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
        place.parent.rmdir()  # fails if the key has other entries
    return not place.exists()


def _bytes_in(folder: Path) -> int:
    sizes = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                sizes += os.lstat(os.path.join(where, name)).st_size
    return sizes
