"""Air-gap archive: one tar file that begins with its index. The writer and the reader do not seek, so a pipe suffices.

    airgap.json   Index: size and SHA-256 of every file, the entries of the catalogue
    SHA256SUMS    the same digests and the digest of airgap.json, in the format of `sha256sum -c`
    ..            all other files, sorted by name; those of models (weights/) are last

The archive has only plain files. All their ustar headers have the same owner, mode and date, so equal contents give
equal bytes. Any tar program can read it. The reader does not trust the headers: it accepts exactly the files of the
index, in the order above, and refuses every other archive.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import IO, Any, BinaryIO, Literal

import msgspec

from sie_cli.refusal import CommandRefused
from sie_contracts.errors import UNDECODABLE
from sie_contracts.models.bundles import BUNDLE_ID, BundleEntry
from sie_store.weights.manifest import FileFact, is_safe

INDEX, SUMS, BILL = "airgap.json", "SHA256SUMS", "sbom.cdx.json"
VERSION = 1
# Allowed first parts of the paths in an archive. `load` writes its own files to other paths (models/, serve.env).
FOLDERS = ("cache", "golden", "licences", BILL, "weights")
MAX_INDEX_BYTES = 64 << 20
PIECE_BYTES = 1 << 20
_BLOCK, _RECORD = 512, 20 * 512
# bytes; a file of this size or more exceeds the 11 octal digits of the ustar header, so its size is stored in base 256
_USTAR_LIMIT = 1 << 33
_SHA256 = re.compile(r"[0-9a-f]{64}")

_DAMAGED = "the archive is damaged, or `sie airgap create` did not make it; copy it again"

ByteProgress = Callable[[int], None]


class ArchiveIndex(msgspec.Struct, frozen=True):
    """Index of an archive. `entries`: catalogue entries; their weights.path and golden are relative to the folder that
    `load` creates. `aliases` and `bundles` belong to these entries.
    """

    made_by: str
    files: dict[str, FileFact]
    entries: list[dict[str, Any]]
    aliases: list[dict[str, Any]] = []
    bundles: list[BundleEntry] = []
    kind: Literal["sie-airgap"] = "sie-airgap"
    version: int = VERSION

    @property
    def bytes(self) -> int:
        return sum(fact.bytes for fact in self.files.values())


def encode(index: ArchiveIndex) -> bytes:
    """Return the index as JSON. Equal contents give equal JSON."""
    return msgspec.json.format(msgspec.json.encode(index, order="sorted"), indent=1) + b"\n"


def decode(data: bytes) -> ArchiveIndex:
    """Return the index in `data`. Raises CommandRefused."""
    try:
        head = msgspec.json.decode(data, type=_IndexHead)
    except UNDECODABLE as error:
        raise CommandRefused(f"{INDEX} is not the index of an air-gap archive: {error}") from error
    if head.version != VERSION:
        raise CommandRefused(
            f"{INDEX} has version {head.version}, this sie reads {VERSION}: load it with the sie version that created "
            "it"
        )
    try:
        index = msgspec.json.decode(data, type=ArchiveIndex)
    except UNDECODABLE as error:
        raise CommandRefused(f"{INDEX}: {error}") from error
    for name, fact in index.files.items():
        if not is_safe(name) or name.split("/")[0] not in FOLDERS:
            raise CommandRefused(f"{INDEX} names the file {name[:200]!r}: expected a path below {', '.join(FOLDERS)}")
        if fact.bytes < 0 or not _SHA256.fullmatch(fact.sha256):
            raise CommandRefused(f"{INDEX} has no size and SHA-256 of {name[:200]!r}")
    for bundle in index.bundles:
        if not BUNDLE_ID.fullmatch(bundle.id):
            raise CommandRefused(f"{INDEX} names the bundle {bundle.id[:100]!r}: expected {BUNDLE_ID.pattern}")
    return index


class _IndexHead(msgspec.Struct):
    kind: Literal["sie-airgap"]
    version: int


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sums(raw: bytes, index: ArchiveIndex) -> bytes:
    lines = [f"{digest(raw)}  {INDEX}", *(f"{index.files[name].sha256}  {name}" for name in sorted(index.files))]
    return "\n".join((*lines, "")).encode()


def write(
    out: BinaryIO,
    index: ArchiveIndex,
    source: Callable[[str], AbstractContextManager[BinaryIO]],
    progress: ByteProgress,
) -> str:
    """Write an archive. Return the SHA-256 of its index, which identifies the whole archive. Call `progress` with the
    size of each written piece. Raises CommandRefused if `decode` refuses the index, if a file differs from the index
    (changed or damaged), or if a file name is too long. Raises OSError.
    """
    raw = encode(index)
    decode(raw)  # raises CommandRefused for an index that no reader would accept
    for name, data in ((INDEX, raw), (SUMS, sums(raw, index))):
        out.write(_header(name, len(data)) + data + bytes(-len(data) % _BLOCK))
    for name in sorted(index.files):
        fact = index.files[name]
        out.write(_header(name, fact.bytes))
        with source(name) as file:
            content_digest, left = hashlib.sha256(), fact.bytes
            while piece := file.read(min(PIECE_BYTES, left + 1)):
                left -= len(piece)
                if left < 0:
                    break
                content_digest.update(piece)
                out.write(piece)
                progress(len(piece))
        if left or content_digest.hexdigest() != fact.sha256:
            raise CommandRefused(
                f"{name} does not match its checksum: it was changed while it was read, or it is damaged"
            )
        out.write(bytes(-fact.bytes % _BLOCK))
    out.write(bytes(2 * _BLOCK))
    return digest(raw)


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size if size < _USTAR_LIMIT else 0
    try:
        block = bytearray(member.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict"))
    except (ValueError, UnicodeError) as error:
        raise CommandRefused(
            f"{name}: {error}; a tar archive stores file names of at most 100 bytes, in folders of at most 155"
        ) from error
    if size >= _USTAR_LIMIT:
        block[124:136] = b"\x80" + size.to_bytes(11, "big")
        block[148:156] = b"%06o\0 " % (sum(block[:148]) + 8 * ord(" ") + sum(block[156:]))
    return bytes(block)


class ArchiveReader:
    """Reader of an archive, in one pass from its beginning. The constructor reads the index and checks it. Raises
    CommandRefused, OSError.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._at = 0
        self.raw = self._small(INDEX)
        self.index = decode(self.raw)
        if self._small(SUMS) != sums(self.raw, self.index):
            raise CommandRefused(f"{SUMS} and {INDEX} do not agree: the archive is damaged; copy it again")

    @property
    def digest(self) -> str:
        """Digest of the index, which identifies the whole archive."""
        return digest(self.raw)

    def extract(self, sink: Callable[[str], AbstractContextManager[BinaryIO]], progress: ByteProgress) -> None:
        """Copy each file of the archive into the file that `sink` opens for its name, and compare the size and SHA-256
        of the content with the index. If this method raises an error, the caller must discard the copies.
        """
        for name in sorted(self.index.files):
            fact = self.index.files[name]
            self._expect(name, fact.bytes)
            digest = hashlib.sha256()
            with sink(name) as file:
                for piece in self._pieces(fact.bytes):
                    digest.update(piece)
                    file.write(piece)
                    progress(len(piece))
            actual = digest.hexdigest()
            if actual != fact.sha256:
                raise CommandRefused(
                    f"{name} has the SHA-256 {actual[:16]}.., the index has {fact.sha256[:16]}..: {_DAMAGED}"
                )
        if self._exactly(2 * _BLOCK) != bytes(2 * _BLOCK):
            raise CommandRefused(f"the archive has data after the last file of its index: {_DAMAGED}")
        # other tar programs fill the last record with NUL bytes, so accept up to one record of NUL bytes
        rest = self._stream.read(_RECORD + 1)
        if len(rest) > _RECORD or any(rest):
            raise CommandRefused(
                f"the file has more bytes after the end of the archive, at byte {self._at}: {_DAMAGED}"
            )

    def _small(self, name: str) -> bytes:
        return b"".join(self._pieces(self._expect(name)))

    def _expect(self, name: str, size: int | None = None) -> int:
        """Read the header of the next file, and return the file's size. Raises CommandRefused if this file is not the
        plain file `name` with `size` bytes, or with at most MAX_INDEX_BYTES if `size` is None.
        """
        try:
            member = tarfile.TarInfo.frombuf(self._exactly(_BLOCK), "utf-8", "strict")
        except (tarfile.HeaderError, UnicodeError) as error:
            raise CommandRefused(
                f"expected the file {name} at byte {self._at - _BLOCK}, but no file begins there: {_DAMAGED}"
            ) from error
        if member.name != name or member.type != tarfile.REGTYPE:
            kind = "file" if member.type == tarfile.REGTYPE else "link, folder or device"
            raise CommandRefused(f"expected the file {name}, got the {kind} {member.name[:200]!r}: {_DAMAGED}")
        if not 0 <= member.size <= MAX_INDEX_BYTES if size is None else member.size != size:
            most = f"at most {MAX_INDEX_BYTES}" if size is None else size
            raise CommandRefused(f"{name} has {member.size} bytes, expected {most}: {_DAMAGED}")
        return member.size

    def _pieces(self, size: int) -> Iterator[bytes]:
        """Yield the content of a file in pieces, and skip the padding of its last block."""
        left = size
        while left:
            piece = self._exactly(min(PIECE_BYTES, left))
            left -= len(piece)
            yield piece
        self._exactly(-size % _BLOCK)

    def _exactly(self, count: int) -> bytes:
        data = self._stream.read(count)
        while len(data) < count and (more := self._stream.read(count - len(data))):
            data += more  # a pipe may return fewer bytes than requested
        self._at += len(data)
        if len(data) < count:
            raise CommandRefused(
                f"the archive ends after {self._at} bytes, before its last file is complete: it is truncated; copy it "
                "again"
            )
        return data
