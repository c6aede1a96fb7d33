"""The header of a safetensors file: a damaged file is refused with the reason, and a huge header is not read."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from sie_store.weights.headers import DamagedFile, StoredTensor, stored_tensors

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
