"""The size of weights before they are loaded, and the memory that a pass takes beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sie_adapter.memory.footprint import weight_bytes
from sie_contracts.errors import ModelLoadFailed


def test_floats_count_in_the_precision_they_will_have_and_the_rest_as_stored(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(3, 5, dtype=torch.bfloat16),
        "b": torch.zeros(7),
        "c": torch.zeros(4, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert weight_bytes(tmp_path, 4) == 22 * 4 + 32
    assert weight_bytes(tmp_path, 2) == 22 * 2 + 32


def test_only_the_files_that_are_loaded_count(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "consolidated.safetensors"):
        save_file({name: torch.zeros(10)}, tmp_path / name)
    index = {"weight_map": {name: f"model-0000{name}-of-00002.safetensors" for name in "12"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_bytes(tmp_path, 4) == 80


def test_model_safetensors_counts_before_a_stale_index_and_a_missing_part_is_refused(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadFailed, match="names 1 files that the folder lacks: model-00001-of-00002") as refused:
        weight_bytes(tmp_path, 4)
    assert refused.value.extras["error_class"] == "INCOMPATIBLE"
    save_file({"a": torch.zeros(10)}, tmp_path / "model.safetensors")
    assert weight_bytes(tmp_path, 4) == 40


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', "\x00"])
def test_a_damaged_index_is_refused(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadFailed, match=r"model\.safetensors\.index\.json") as refused:
        weight_bytes(tmp_path, 4)
    assert refused.value.extras["error_class"] == "INCOMPATIBLE"


@pytest.mark.parametrize("header", [b"[1]", b'{"a": 5}', b'{"a": {"dtype": "F32"}}'])
def test_a_header_without_tensors_is_refused(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelLoadFailed, match=r"model\.safetensors is cut off or damaged") as refused:
        weight_bytes(tmp_path, 4)
    assert refused.value.extras["error_class"] == "INCOMPATIBLE"


PEAKS = """
import torch
from sie_adapter.engine.device import peak_of
held = []
def take_and_free():
    torch.ones(50 << 18)  # 50 MiB, freed at once
    held.append(torch.ones(20 << 18))
cpu = torch.device("cpu")
take_and_free()  # the pages of code that it runs are part of the process's memory too, once they are read
print(peak_of(cpu, take_and_free), peak_of(cpu, lambda: None))
"""


def test_the_peak_of_a_pass_is_what_it_allocated_at_most() -> None:
    """The measurement runs in its own process, because earlier allocations decide whether freed memory is reused."""
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True, timeout=100)
    peak, idle_peak = map(int, done.stdout.split())
    assert peak == pytest.approx(50 << 20, rel=0.1)
    assert idle_peak < 5 << 20
