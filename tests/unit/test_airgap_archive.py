"""The format of air-gap archives, and a load that is all or nothing: whole, damaged, truncated and hostile archives."""

from __future__ import annotations

import hashlib
import io
import os
import random
import shutil
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sie_cli.airgap import archive, placing
from sie_cli.airgap.archive import INDEX, SUMS, ArchiveIndex, ArchiveReader, encode, sums, write
from sie_cli.refusal import CommandRefused
from sie_store.weights.manifest import FileFact

ENTRY = {
    "id": "my/model",
    "weights": {"path": "weights/my_2fmodel"},
    "family": "text-encoder",
    "outputs": {"dense": 8},
    "max_tokens": 16,
}
FILES = {
    "licences/models/my_2fmodel.txt": b"my/model\nlicence: MIT\n",
    "sbom.cdx.json": b"{}\n",
    "weights/my_2fmodel/config.json": b"{}",
    "weights/my_2fmodel/empty.txt": b"",
    "weights/my_2fmodel/model.safetensors": bytes(range(256)) * 3,
}


def silent(_: int) -> None:
    pass


def index_of(contents: dict[str, bytes] = FILES, **changes: Any) -> ArchiveIndex:
    facts = {name: FileFact(len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()}
    return msgspec.structs.replace(ArchiveIndex("0.1.0", facts, [ENTRY]), **changes)


def made(contents: dict[str, bytes] = FILES) -> bytes:
    out = io.BytesIO()
    write(out, index_of(contents), lambda name: io.BytesIO(contents[name]), silent)
    return out.getvalue()


def load(data: bytes, folder: Path) -> None:
    placing.load(ArchiveReader(io.BytesIO(data)), folder, folder, silent)


def held(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "site" / "airgap"


def nothing_is_left(folder: Path) -> bool:
    return not folder.parent.exists() or list(folder.parent.iterdir()) == []


def test_what_was_written_is_loaded(folder: Path) -> None:
    load(made(), folder)
    contents = held(folder)
    assert {name: contents[name] for name in FILES} == FILES
    assert set(contents) - set(FILES) == {INDEX, SUMS, "models/my_2fmodel.yaml", "serve.env"}
    assert [path.name for path in folder.parent.iterdir()] == ["airgap"]
    assert {stat.S_IMODE(path.stat().st_mode) & 0o111 for path in folder.rglob("*") if path.is_file()} == {0}


def test_other_tars_read_it_and_sha256sum_checks_it() -> None:
    """`sie` is not needed to look into an archive."""
    with tarfile.open(fileobj=io.BytesIO(made())) as tar:
        assert tar.getnames() == [INDEX, SUMS, *sorted(FILES)]
        contents = {name: file.read() for name in tar.getnames() if (file := tar.extractfile(name)) is not None}
    for line in contents[SUMS].decode().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256(contents[name]).hexdigest() == digest


def test_equal_contents_are_equal_bytes_in_any_order() -> None:
    assert made(dict(reversed(FILES.items()))) == made()


def test_a_file_above_8_gib_has_a_header_that_tars_read() -> None:
    """The octal digits of a tar header end at 8 GiB."""
    for size in ((1 << 33) - 1, 1 << 33, 30 << 30):
        member = tarfile.TarInfo.frombuf(archive._header("weights/m/model.safetensors", size), "utf-8", "strict")
        assert (member.name, member.size, member.type) == ("weights/m/model.safetensors", size, tarfile.REGTYPE)


def test_it_is_read_from_a_pipe(folder: Path) -> None:
    """A pipe returns pieces of any size and cannot go back."""
    pieces = random.Random(3)

    class Pipe(io.RawIOBase):
        def __init__(self, data: bytes) -> None:
            self._data = io.BytesIO(data)

        def read(self, size: int = -1) -> bytes:
            return self._data.read(min(size, pieces.randint(1, 700)))

    placing.load(ArchiveReader(Pipe(made())), folder, folder, silent)  # type: ignore[arg-type]
    assert held(folder)["weights/my_2fmodel/model.safetensors"] == FILES["weights/my_2fmodel/model.safetensors"]


def test_a_file_that_changes_while_it_is_written_is_refused() -> None:
    for content in (b"x", FILES["weights/my_2fmodel/config.json"] + b"x", b"[]"):
        files = {**FILES, "weights/my_2fmodel/config.json": content}
        with pytest.raises(CommandRefused, match=r"weights/my_2fmodel/config.json does not match its checksum"):
            write(io.BytesIO(), index_of(), lambda name, files=files: io.BytesIO(files[name]), silent)


def test_every_cut_changes_nothing(folder: Path) -> None:
    data = made()
    for length in [*range(0, len(data), 97), len(data) - 1]:
        with pytest.raises(CommandRefused, match=r"truncated|damaged"):
            load(data[:length], folder)
        assert nothing_is_left(folder), length


def test_every_flipped_bit_is_found_or_was_padding(folder: Path) -> None:
    """A damaged archive is refused, or all its files are loaded unchanged."""
    name = "weights/my_2fmodel/model.safetensors"
    data = made({name: FILES[name]})
    load(data, folder)
    whole = held(folder)
    shutil.rmtree(folder)
    loads = 0
    for at in range(0, len(data), 47):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        try:
            load(bytes(damaged), folder)
        except CommandRefused:
            assert nothing_is_left(folder), at
            continue
        loads += 1
        assert held(folder) == whole, at
        shutil.rmtree(folder)
    assert loads < len(data) / 47 / 2  # most of an archive is no padding


def tampered(change: Callable[[tarfile.TarFile, str, bytes], bool]) -> bytes:
    """Return an archive. `change` may write members before each of its members, and returns true to replace that
    member.
    """
    raw = encode(index_of())
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in {INDEX: raw, SUMS: sums(raw, index_of()), **FILES}.items():
            if not change(tar, name, data):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def instead(**fields: Any) -> Callable[[tarfile.TarFile, str, bytes], bool]:
    """Return a change that writes config.json with these fields of its header."""

    def change(tar: tarfile.TarFile, name: str, data: bytes) -> bool:
        if name != "weights/my_2fmodel/config.json":
            return False
        member = tarfile.TarInfo(name)
        member.size = len(data)
        for field, value in fields.items():
            setattr(member, field, value)
        tar.addfile(member, io.BytesIO(data) if member.isreg() else None)
        return True

    return change


def before(**fields: Any) -> Callable[[tarfile.TarFile, str, bytes], bool]:
    """Return a change that adds a member before config.json."""

    def change(tar: tarfile.TarFile, name: str, data: bytes) -> bool:
        if name == "weights/my_2fmodel/config.json":
            instead(**fields)(tar, name, data)
        return False

    return change


def test_the_tampering_itself_is_no_reason(folder: Path) -> None:
    load(tampered(lambda *_: False), folder)


@pytest.mark.parametrize(
    "change",
    [
        instead(type=tarfile.SYMTYPE, linkname="/etc/passwd", size=0),
        instead(type=tarfile.LNKTYPE, linkname=INDEX, size=0),
        instead(type=tarfile.CHRTYPE, devmajor=1, devminor=3, size=0),
        instead(type=tarfile.FIFOTYPE, size=0),
        instead(type=tarfile.DIRTYPE, size=0),
        instead(type=tarfile.CONTTYPE),
        instead(name="../evil"),
        instead(name="/tmp/evil"),
        before(name="weights/evil"),
        before(name=SUMS),
        before(name="weights", type=tarfile.SYMTYPE, linkname="/tmp", size=0),
        before(name="././@LongLink", type=tarfile.GNUTYPE_LONGNAME, size=2),
        before(type=tarfile.XHDTYPE, size=2),
    ],
    ids=[
        "symlink",
        "hardlink",
        "device",
        "fifo",
        "folder",
        "contiguous",
        "up",
        "absolute",
        "more",
        "again",
        "above",
        "long",
        "pax",
    ],
)
def test_anything_but_the_files_of_the_index_in_their_order_is_refused(
    folder: Path, change: Callable[[tarfile.TarFile, str, bytes], bool]
) -> None:
    with pytest.raises(
        CommandRefused,
        match=r"expected the file weights/my_2fmodel/config\.json|there is no weights/my_2fmodel/config\.json",
    ):
        load(tampered(change), folder)
    assert nothing_is_left(folder)


def resealed(**changes: Any) -> bytes:
    """Return an archive with a changed index and checksums that match it, as an attacker creates it."""
    index = index_of(**changes)
    raw = encode(index)
    out = io.BytesIO()
    for name, data in ((INDEX, raw), (SUMS, sums(raw, index))):
        out.write(archive._header(name, len(data)) + data + bytes(-len(data) % 512))
    return out.getvalue() + bytes(1 << 16)


HOSTILE_NAMES = [
    "../evil",
    "/etc/evil",
    "weights/../../evil",
    "weights//a",
    "models/my_2fmodel.yaml",
    "serve.env",
    INDEX,
    "weights\\a",
    "weights/a\nb",
    "",
    ".",
    "weights/\0",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_an_index_that_names_what_it_must_not_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(CommandRefused, match=r"airgap\.json names the file"):
        load(resealed(files={name: FileFact(0, hashlib.sha256().hexdigest())}), folder)
    assert nothing_is_left(folder)


@pytest.mark.parametrize("behind", [b"x", bytes(512) + b"x", bytes(20 * 512 + 1), made()])
def test_bytes_behind_the_end_are_refused(folder: Path, behind: bytes) -> None:
    with pytest.raises(CommandRefused, match="more bytes after the end of the archive"):
        load(made() + behind, folder)
    assert nothing_is_left(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, r"version 2, this sie reads 1: load it with the sie version that created it"),
        ({"entries": [{**ENTRY, "weights": {"path": "/etc"}}]}, r"weights\.path '/etc', expected weights/my_2fmodel"),
        ({"entries": [{**ENTRY, "weights": {"path": "weights/.."}}]}, r"weights\.path 'weights/\.\.', expected"),
        ({"entries": [{**ENTRY, "weights": {"hub": "a/b", "revision": "c"}}]}, r"weights\.path '', expected"),
        ({"entries": [{**ENTRY, "golden": "/etc/passwd"}]}, r"golden '/etc/passwd', which is no file of the archive"),
        (
            {"entries": [{**ENTRY, "surprise": 1}]},
            r"load the archive with the version that created it, sie 0\.1\.0",
        ),
        ({"aliases": [{"id": "a"}]}, r"load the archive with the version that created it, sie 0\.1\.0"),
        ({"aliases": [{"id": "../../x", "alias": "my/model"}]}, r"id '\.\./\.\./x' is not of the form"),
        ({"aliases": [ENTRY]}, r"has a model among its aliases"),
        ({"entries": [{**ENTRY, "id": "../../x"}]}, r"id '\.\./\.\./x' is not of the form"),
        (
            {"files": {"weights/my_2fmodel/a": FileFact(1 << 60, "0" * 64)}},
            r"free, the archive needs .* TiB: free space",
        ),
        ({"files": {"weights/my_2fmodel/a": FileFact(-1, "0" * 64)}}, r"no size and SHA-256"),
        ({"files": {"weights/my_2fmodel/a": FileFact(1, "A" * 64)}}, r"no size and SHA-256"),
    ],
)
def test_an_index_that_cannot_be_served_is_refused_before_a_file_is_read(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CommandRefused, match=message):
        load(resealed(**changes), folder)
    assert nothing_is_left(folder)


@pytest.mark.parametrize(
    "data", [b"", b"hello" * 500, bytes(4096), made()[512:]], ids=["empty", "text", "zeros", "no head"]
)
def test_what_is_no_archive_is_refused(data: bytes) -> None:
    with pytest.raises(CommandRefused, match=r"the file airgap\.json at byte 0|the archive ends after 0 bytes"):
        ArchiveReader(io.BytesIO(data))


def test_an_index_of_gigabytes_is_not_read() -> None:
    with pytest.raises(CommandRefused, match=r"airgap\.json has \d+ bytes, expected at most"):
        ArchiveReader(io.BytesIO(archive._header(INDEX, 1 << 40)))


def test_what_a_killed_load_left_is_replaced(folder: Path) -> None:
    left = folder.with_name(".airgap.loading")
    (left / "weights").mkdir(parents=True)
    (left / "weights" / "half").write_bytes(b"half")
    (left / "link").symlink_to("/etc")
    load(made(), folder)
    assert not (folder / "weights" / "half").exists()
    assert not (folder / "link").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["airgap"]
    assert Path("/etc/passwd").is_file()


def test_two_loads_at_once_do_not_mix(folder: Path) -> None:
    """The second load is refused while the first one writes, and does not harm it."""
    refused = []

    def told(_: int) -> None:
        if not refused:
            with pytest.raises(CommandRefused, match=r"another `sie airgap` writes .*\.airgap\.loading now") as caught:
                load(made(), folder)
            refused.append(caught)

    placing.load(ArchiveReader(io.BytesIO(made())), folder, folder, told)
    assert refused
    assert held(folder)["weights/my_2fmodel/config.json"] == b"{}"


def test_an_error_of_the_disk_leaves_nothing(folder: Path) -> None:
    """A file in the place of a folder stands for a disk that fails, fills up or is read-only."""

    def told(_: int) -> None:
        (folder.with_name(".airgap.loading") / "weights").write_bytes(b"")

    with pytest.raises(OSError, match="Not a directory"):
        placing.load(ArchiveReader(io.BytesIO(made())), folder, folder, told)
    assert nothing_is_left(folder)


def test_a_link_in_the_place_of_the_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    """A load refuses another user's link at the name of its partial folder."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_bytes(b"1")
    folder.parent.mkdir()
    os.symlink(elsewhere, folder.with_name(".airgap.loading"))
    with pytest.raises(OSError):
        load(made(), folder)
    assert list(elsewhere.iterdir()) == [elsewhere / "precious"]
