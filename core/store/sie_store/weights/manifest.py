"""Manifest of a snapshot of weights: the files of one commit of a repository, with their sizes and SHA-256.

The manifest is written last, so a snapshot without a manifest is not complete. A local cache, a bucket and an archive
have the same file, MANIFEST, in the folder of the snapshot.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from sie_contracts.errors import UNDECODABLE
from sie_store.durable import PART

MANIFEST = "sie-manifest.json"
VERSION = 1
MAX_MANIFEST_BYTES = 16 << 20
MAX_FILES = 10_000  # largest number of files of one snapshot
# longest name of a file or folder, in bytes: file systems allow 255, and a name ends with PART during the download
MAX_NAME_BYTES = 255 - len(PART)
_PIECE_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
# largest number of characters of a repository's name, so that the name of its folder has at most 255 bytes
MAX_REPOSITORY_CHARS = 200

Origin = Literal["hub", "cluster", "archive", "found"]
FetchErrorClass = Literal["GATED", "NOT_FOUND", "INCOMPATIBLE", "NETWORK", "UNKNOWN"]


class ManifestError(ValueError):
    """Error for a file that is not a valid manifest, or for a name of a repository, revision or file that is not
    allowed.
    """


class FetchFailed(Exception):
    """Error of a source of weights that could not deliver a snapshot. `error_class` becomes the error class of the
    model's load. A load with the class NETWORK may be retried.
    """

    def __init__(self, error_class: FetchErrorClass, message: str) -> None:
        super().__init__(message)
        self.error_class: FetchErrorClass = error_class
        self.message = message


class FileFact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Files of a snapshot, by path below its folder, with `/` as separator. `revision`: commit. `left_out`: files of
    the repository that were not selected for this snapshot; for a model that needs such a file, the snapshot is not
    complete. `origin`: source of the snapshot. A snapshot with the origin `found` was written by another program, and
    SIE never removes it to free space.
    """

    repository: str
    revision: str
    files: dict[str, FileFact]
    left_out: tuple[str, ...] = ()
    origin: Origin = "hub"
    version: int = VERSION

    @property
    def bytes(self) -> int:
        """Return the total size of all files in bytes."""
        return sum(fact.bytes for fact in self.files.values())


# created at import: msgspec crashes the process if two threads use a type for the first time at the same time
_manifest = msgspec.json.Decoder(Manifest)


def encode(manifest: Manifest) -> bytes:
    """Encode a manifest as JSON; equal manifests give equal bytes. Raises ManifestError for an invalid manifest."""
    _check(manifest)
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


def decode(data: bytes) -> Manifest:
    """Decode a manifest from JSON and check it. Raises ManifestError."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"a manifest has at most {MAX_MANIFEST_BYTES} bytes, this one has {len(data)}")
    try:
        manifest = _manifest.decode(data)
    except UNDECODABLE as error:
        raise ManifestError(f"not a manifest of weights: {error}") from error
    _check(manifest)
    return manifest


def check_names(repository: str, revision: str) -> None:
    """Raise ManifestError if `repository` or `revision` is unsafe in a path. The names are untrusted, because archives
    and buckets of other authors may contain any name.
    """
    is_long = len(repository) > MAX_REPOSITORY_CHARS
    if is_long or not _REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
        raise ManifestError(f"{repository[:200]!r} is not the name of a repository: expected organisation/name")
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise ManifestError(f"{revision[:200]!r} is not a revision: expected a commit, 40 hexadecimal digits")


def is_safe(name: str) -> bool:
    """Return whether a file name is safe: below the folder of its snapshot, printable, not too long for a disk, and not
    the name of the manifest or of an incomplete file.
    """
    parts = name.split("/")
    if not name.isprintable() or len(name) > 1024 or "\\" in name or name == MANIFEST or name.endswith(PART):
        return False
    return all(part not in ("", ".", "..") and len(part.encode()) <= MAX_NAME_BYTES for part in parts)


def check_paths(names: Collection[str]) -> None:
    """Raise ManifestError for an unsafe name, for a file that is also a folder, or for more than MAX_FILES names."""
    if len(names) > MAX_FILES:
        raise ManifestError(f"a snapshot has at most {MAX_FILES} files, this one has {len(names)}")
    files = frozenset(names)
    for name in names:
        if not is_safe(name):
            raise ManifestError(f"the snapshot names the file {name[:200]!r}: expected a path such as folder/file.json")
        for folder in PurePosixPath(name).parents:
            if str(folder) in files:
                raise ManifestError(f"the snapshot has {str(folder)[:200]!r} as a file and as a folder")


def _check(manifest: Manifest) -> None:
    if manifest.version != VERSION:
        raise ManifestError(f"the manifest has version {manifest.version}, this program reads {VERSION}")
    check_names(manifest.repository, manifest.revision)
    if not manifest.files:
        raise ManifestError(f"the manifest of {manifest.repository}@{manifest.revision} names no file")
    check_paths(manifest.files)
    for name, fact in manifest.files.items():
        if fact.bytes < 0 or not _SHA256.fullmatch(fact.sha256):
            raise ManifestError(
                f"the manifest has no size and SHA-256 of {name[:200]!r}: got {fact.bytes} and {fact.sha256[:80]!r}"
            )


def digest(path: Path, read: Callable[[int], None] = lambda _: None) -> str:
    """Compute the SHA-256 of a file, in hex. `read` is called with the size of each piece. Raises OSError."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            sha256.update(piece)
            read(len(piece))
    return sha256.hexdigest()


def describe(
    folder: Path,
    repository: str,
    revision: str,
    *,
    select: Callable[[str], bool] = lambda _: True,
    origin: Origin = "found",
    read: Callable[[int], None] = lambda _: None,
) -> Manifest:
    """Build a manifest of the files in `folder`, without hidden files and the manifest itself. Files that `select`
    accepts are read for their digests. `left_out` names all other files. Raises OSError, ManifestError.
    """
    files, left_out = {}, []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or name == MANIFEST or any(part.startswith(".") for part in name.split("/")):
            continue
        if select(name):
            files[name] = FileFact(path.stat().st_size, digest(path, read))
        else:
            left_out.append(name)
    manifest = Manifest(repository, revision, files, tuple(left_out), origin)
    _check(manifest)
    return manifest


def verify(
    folder: Path, manifest: Manifest, *, digests: bool = True, read: Callable[[int], None] = lambda _: None
) -> list[str]:
    """List the faults of the files in `folder`, one line each. Without `digests`, only sizes are compared."""
    wrong = []
    for name, fact in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if not path.is_file():
                wrong.append(f"{name} is not a file")
            elif size != fact.bytes:
                wrong.append(f"{name} has {size} bytes, the manifest says {fact.bytes}")
            elif digests and (actual := digest(path, read)) != fact.sha256:
                wrong.append(f"{name} has the SHA-256 {actual[:16]}.., the manifest says {fact.sha256[:16]}..")
        except FileNotFoundError:
            wrong.append(f"{name} is missing")
        except OSError as error:
            wrong.append(f"{name} cannot be read: {error.strerror}")
    return wrong
