"""Unpacking of an archive to a folder for `sie airgap serve`. A failed load creates no folder.

    archive ─► .NAME.loading: files of the archive, compared with the index and synced; models/; serve.env ─► FOLDER

A load unpacks the archive in .NAME.loading, a hidden folder next to FOLDER. The last step of the load renames the
hidden folder to FOLDER. If a load is interrupted, the next load removes its files and begins again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import yaml

from sie_cli import display
from sie_cli.airgap.archive import INDEX, SUMS, ArchiveIndex, ArchiveReader, ByteProgress, decode, sums
from sie_cli.refusal import CommandRefused
from sie_config_service.overlay import BUNDLES
from sie_contracts.errors import SIEError
from sie_contracts.models.aliases import Alias
from sie_contracts.models.entries import ModelEntry, parse_document, parse_entry
from sie_contracts.wire.topology import token
from sie_store import durable
from sie_store.weights.manifest import Manifest, verify

ENVIRONMENT = "serve.env"


def documents(index: ArchiveIndex) -> tuple[list[ModelEntry], list[Alias]]:
    """Return the entries and the aliases of an archive. Raises CommandRefused for a document that this version cannot
    read, and for an entry whose files are not in the archive.
    """
    try:
        entries = [parse_entry(raw) for raw in index.entries]
        alias_documents = [parse_document(raw) for raw in index.aliases]
    except SIEError as error:
        raise CommandRefused(
            f"{INDEX}: {error.message}; load the archive with the version that created it, sie {index.made_by}"
        ) from error
    for entry in entries:
        path, own = entry.weights.path, f"weights/{token(entry.id)}"
        if path != own or not any(name.startswith(f"{path}/") for name in index.files):
            raise CommandRefused(
                f"{INDEX}: {entry.id} has weights.path {path[:200]!r}, expected {own}, a folder with files"
            )
        if entry.golden and entry.golden not in index.files:
            raise CommandRefused(
                f"{INDEX}: {entry.id} has golden {entry.golden[:200]!r}, which is no file of the archive"
            )
    aliases = [document for document in alias_documents if isinstance(document, Alias)]
    if len(aliases) < len(alias_documents):
        raise CommandRefused(f"{INDEX} has a model among its aliases")
    return entries, aliases


def check(index: ArchiveIndex) -> None:
    """Raise CommandRefused if this version cannot read the entries or the aliases of the index."""
    documents(index)


def settings(index: ArchiveIndex, at: Path) -> dict[str, str]:
    """Return the settings with which `sie serve` serves only the models of an archive, without downloads. `at`: path of
    the unpacked archive.
    """
    entries, aliases = documents(index)
    names = [*(entry.id for entry in entries), *(alias.id for alias in aliases)]
    return {
        "SIE_LOCAL_CACHE": str(at / "cache"),
        "SIE_MODELS_DIR": str(at / "models"),
        "SIE_HF_FALLBACK": "false",
        "SIE_MODEL_FILTER": ",".join(names),
    }


def load(reader: ArchiveReader, folder: Path, at: Path, progress: ByteProgress) -> None:
    """Unpack an archive to `folder`. `at`: the path under which workers see this folder, for example in a container.
    Raises CommandRefused, OSError. The load of a refused archive creates no `folder`.
    """
    check(reader.index)
    # resolve symbolic links, because the rename below can replace an empty folder, but not a link to a folder
    folder = folder.resolve()
    if folder.is_mount():
        raise CommandRefused(
            f"{folder} is a mount point, which a load cannot replace: use --folder {folder / 'airgap'}"
        )
    with _loading(folder) as partial:
        have = shutil.disk_usage(partial).free
        if have < reader.index.bytes:
            need = display.size(reader.index.bytes)
            raise CommandRefused(
                f"{folder.parent} has {display.size(have)} free, the archive needs {need}: free space, or name another "
                "--folder"
            )

        @contextmanager
        def sink(name: str) -> Iterator[BinaryIO]:
            path = partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())

        reader.extract(sink, progress)
        for name, data in ((INDEX, reader.raw), (SUMS, sums(reader.raw, reader.index))):
            durable.write(partial / name, data)
        place(partial, reader.index, at)
        for path in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
            durable.sync(path)
        os.rename(partial, folder)
        durable.sync(folder.parent)


def place(folder: Path, index: ArchiveIndex, at: Path) -> None:
    """Write the entries, aliases, bundles and settings of an archive into `folder`. The files contain paths below `at`,
    the folder at which they will be used. Files that already have the right content are not written. Raises
    CommandRefused, OSError.
    """

    def document(value: Any) -> bytes:
        plain = msgspec.json.decode(msgspec.json.encode(value))
        return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=130, encoding="utf-8")

    texts: dict[str, bytes] = {}
    entries, aliases = documents(index)
    for entry in entries:
        weights = msgspec.structs.replace(entry.weights, path=str(at / entry.weights.path))
        moved = msgspec.structs.replace(entry, weights=weights, golden=str(at / entry.golden) if entry.golden else "")
        texts[f"models/{token(entry.id)}.yaml"] = document(moved)
    texts |= {f"models/{token(alias.id)}.yaml": document(alias) for alias in aliases}
    texts |= {f"models/{BUNDLES}/{bundle.id}.yaml": document(bundle) for bundle in index.bundles}
    texts[ENVIRONMENT] = "".join(f"{name}={value}\n" for name, value in settings(index, at).items()).encode()
    (folder / "cache").mkdir(exist_ok=True)
    for name, data in texts.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            durable.write(path, data)


def loaded(folder: Path) -> tuple[ArchiveIndex, bytes]:
    """Return the index of a folder that `load` created, parsed and as bytes. Raises CommandRefused for other folders,
    and for a changed index.
    """
    try:
        raw = (folder / INDEX).read_bytes()
        index = decode(raw)
        if (folder / SUMS).read_bytes() != sums(raw, index):
            raise CommandRefused(f"{folder}: {SUMS} and {INDEX} do not agree: load the archive again")
    except (FileNotFoundError, NotADirectoryError) as error:
        lacking = Path(str(error.filename)).name
        raise CommandRefused(
            f"{folder} was not created by `sie airgap load`, because it has no {lacking}: name a folder that it created"
        ) from error
    return index, raw


def wrong(
    folder: Path, index: ArchiveIndex, *, digests: bool = True, progress: ByteProgress = lambda _: None
) -> list[str]:
    """Return one line for each file of the index that is missing in a loaded folder or differs: its name and the
    difference. Without `digests`, compare only sizes.
    """
    return verify(folder, Manifest("air-gap", "archive", index.files), digests=digests, read=progress)


@contextmanager
def _loading(folder: Path) -> Iterator[Path]:
    """Yield an empty, locked folder next to `folder`. The caller renames this folder to `folder`. If the context raises
    an error, the new folder is removed. Raises CommandRefused, OSError.
    """
    partial = folder.with_name(f".{folder.name}.loading")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial.mkdir(exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        claim(partial, descriptor)
        for left in partial.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        try:
            yield partial
        except BaseException:  # not `finally`: after the rename, `partial` may belong to the next load
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def claim(path: Path, descriptor: int) -> None:
    """Lock the file or folder opened at `path` against other writers until `descriptor` is closed. Raises
    CommandRefused.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CommandRefused(f"another `sie airgap` writes {path} now: wait for it") from error
    held = os.fstat(descriptor)
    # between the open and the lock, another process may have renamed the file to its final name
    if not path.exists() or not os.path.samestat(held, path.stat()):
        raise CommandRefused(f"another `sie airgap` has just written {path}: check its result")
    if held.st_uid != os.geteuid():
        raise CommandRefused(f"{path} belongs to another user: remove it, or write elsewhere")
