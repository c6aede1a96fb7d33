"""Manifests of snapshots, headers of their files, and the progress of a fetch."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sie_contracts.wire.heartbeats import Fetched
from sie_store.weights.headers import DamagedFile, StoredTensor, stored_tensors
from sie_store.weights.manifest import (
    MANIFEST,
    MAX_FILES,
    MAX_MANIFEST_BYTES,
    FetchFailed,
    FileFact,
    Manifest,
    ManifestError,
    decode,
    describe,
    encode,
    verify,
)
from sie_store.weights.progress import FetchProgress

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


TENSOR = {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}


def file_of(header: Any, data: bytes = bytes(8)) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def test_the_tensors_of_a_file_are_those_of_its_header(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(file_of({"__metadata__": {"format": "pt"}, "a": TENSOR}))
    assert stored_tensors(file) == {"a": StoredTensor("F32", [2, 1], (0, 8))}
    file.write_bytes(file_of({}, b""))
    assert stored_tensors(file) == {}


NO_HEADER = "its header is not that of a safetensors file"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it has 0 bytes, but its header alone needs 8"),
        (file_of({"a": TENSOR})[:20], "it has 20 bytes, but its header alone needs"),
        (file_of({"a": TENSOR})[:-1], "it has 79 bytes, but its header describes 80"),
        (file_of({"a": TENSOR}, bytes(9)), "it has 81 bytes, but its header describes 80"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it is a pointer of Git LFS"),
        (file_of(b'{"\xff": {}}'), NO_HEADER),
        (file_of(b'{"a": ' + b"[" * 100_000), NO_HEADER),
        (file_of([1]), NO_HEADER),
        (file_of({"a": 5}), NO_HEADER),
        (file_of({"a": {"dtype": "F32"}}), NO_HEADER),
        (file_of({"a": {**TENSOR, "dtype": 32}}), NO_HEADER),
        (file_of({"a": {**TENSOR, "shape": [-1]}}), NO_HEADER),
        (file_of({"a": {**TENSOR, "data_offsets": [8]}}), NO_HEADER),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(data: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(DamagedFile) as refused:
        stored_tensors(tmp_path / "model.safetensors")
    assert str(refused.value).startswith(reason)


def test_a_header_larger_than_the_format_allows_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedFile, match="at most 100000000 are allowed"):
            stored_tensors(tmp_path / "model.safetensors")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_what_another_process_does_is_told_until_it_is_done_here() -> None:
    clock = Clock()
    progress = FetchProgress("it", clock)
    progress.follow(Fetched(30, 100, 7.5))
    assert progress.state() == Fetched(30, 100, 7.5)
    clock.now_s += 50
    progress.expect(100, 40)  # the other process was killed, this one goes on
    clock.now_s += 2
    progress.add(20)
    assert progress.state() == Fetched(60, 100, 10.0)
    progress.add(-20)  # these bytes were wrong
    assert progress.state().done_bytes == 40


def test_no_byte_is_expected_that_there_is_no_room_for() -> None:
    counts = []

    def full(count: int) -> None:
        counts.append(count)
        raise FetchFailed("NETWORK", "no space")

    progress = FetchProgress("it")
    progress.on_expect = full
    with pytest.raises(FetchFailed):
        progress.expect(100, 30)
    assert counts == [70]
