"""The manifest of a snapshot: what it says, what it may not say, and what `verify` finds."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sie_store.weights.manifest import (
    MANIFEST,
    MAX_FILES,
    MAX_MANIFEST_BYTES,
    FileFact,
    Manifest,
    ManifestError,
    decode,
    describe,
    encode,
    verify,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FACT = FileFact(3, "a" * 64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_bytes(b"{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(200)))
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "note").write_bytes(b"not of the model")
    return tmp_path


def test_it_says_what_is_there_and_reads_as_it_was_written(folder: Path) -> None:
    manifest = describe(folder, "org/model", COMMIT)
    assert {name: fact.bytes for name, fact in manifest.files.items()} == {
        "1_Pooling/config.json": 2,
        "model.safetensors": 200,
    }
    assert manifest.bytes == 202
    (folder / MANIFEST).write_bytes(encode(manifest))
    assert decode((folder / MANIFEST).read_bytes()) == manifest
    assert describe(folder, "org/model", COMMIT) == manifest  # the manifest does not name itself
    assert verify(folder, manifest) == []
    turned = msgspec.structs.replace(manifest, files=dict(reversed(manifest.files.items())))
    assert encode(turned) == encode(manifest)


def test_whatever_is_wrong_is_named(folder: Path) -> None:
    manifest = describe(folder, "org/model", COMMIT)
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(200))
    assert verify(folder, manifest, digests=False) == []
    (wrong,) = verify(folder, manifest)
    assert wrong.startswith("model.safetensors has the SHA-256 ")
    weights.write_bytes(bytes(199))
    assert verify(folder, manifest, digests=False) == ["model.safetensors has 199 bytes, the manifest says 200"]
    weights.unlink()
    weights.mkdir()
    (folder / "1_Pooling" / "config.json").unlink()
    assert set(verify(folder, manifest)) == {"1_Pooling/config.json is missing", "model.safetensors is not a file"}


@pytest.mark.parametrize(
    "name",
    [
        *("../model", "/etc/passwd", "a//b", "a/./b", "a/../../b", "", "a\\b", MANIFEST, "a/" * 512 + "a", "a" * 251),
        *("a\0b", "a\nb", "\x1b[31m", "a\x7f", "a\u202eb", "model.safetensors.part"),
    ],
)
def test_a_file_outside_of_its_folder_is_refused(name: str) -> None:
    manifest = Manifest("org/model", COMMIT, {name: FACT})
    with pytest.raises(ManifestError, match="names the file"):
        encode(manifest)
    with pytest.raises(ManifestError, match="names the file"):
        decode(msgspec.json.encode(manifest))


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (Manifest("../model", COMMIT, {"a": FACT}), "organisation/name"),
        (Manifest("org/model", "a/b", {"a": FACT}), "a commit"),
        (Manifest("org/model", COMMIT, {}), "names no file"),
        (Manifest("org/model", COMMIT, {"a/b/c": FACT, "a/b": FACT}), "'a/b' as a file and as a folder"),
        (Manifest("org/model", COMMIT, {str(number): FACT for number in range(MAX_FILES + 1)}), "at most 10000 files"),
        (Manifest("org/model", COMMIT, {"a": FileFact(-1, "a" * 64)}), "size"),
        (Manifest("org/model", COMMIT, {"a": FileFact(1, "A" * 64)}), "SHA-256"),
        (Manifest("org/model", COMMIT, {"a": FACT}, version=2), "version 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_make_sense_is_refused(manifest: Manifest, says: str) -> None:
    with pytest.raises(ManifestError, match=says):
        decode(msgspec.json.encode(manifest))


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\xff", b"[1]", b'{"repository": 1}', b"[" * 100_000, b" " * (MAX_MANIFEST_BYTES + 1)]
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        decode(data)
