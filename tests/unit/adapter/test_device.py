"""What resolves to what: device, attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sie_adapter import device as devices
from sie_adapter.device import AttentionFacts, Memory, resolve_attention, resolve_device, uses_varlen_kernel
from sie_contracts.settings import SettingError

AMPERE = AttentionFacts("cuda", (8, 0), flash_present=True, varlen_present=True, is_16_bit=True)
HOPPER_BARE = AttentionFacts("cuda", (9, 0), flash_present=False, varlen_present=True, is_16_bit=True)
TURING = AttentionFacts("cuda", (7, 5), flash_present=True, varlen_present=True, is_16_bit=True)
FLOAT = AttentionFacts("cuda", (8, 0), flash_present=True, varlen_present=True, is_16_bit=False)
CPU = AttentionFacts("cpu", is_16_bit=True, flash_present=True, varlen_present=True)
MPS = AttentionFacts("mps", is_16_bit=True)


@pytest.mark.parametrize(
    ("requested", "facts", "backend", "reason", "varlen"),
    [
        ("auto", AMPERE, "flash_attention_2", "auto", True),
        ("auto", HOPPER_BARE, "sdpa", "auto: the package flash-attn is not installed", True),
        ("auto", TURING, "sdpa", "auto: compute capability 7.5 is below 8.0", False),
        ("auto", FLOAT, "sdpa", "auto: the precision is float32", False),
        ("auto", CPU, "sdpa", "auto: the device is cpu, not cuda", False),
        ("auto", MPS, "sdpa", "auto: the device is mps, not cuda", False),
        ("flash_attention_2", AMPERE, "flash_attention_2", "as requested", True),
        ("flash_attention_2", CPU, "sdpa", "flash_attention_2 was requested but the device is cpu, not cuda", False),
        ("flash_attention_2", FLOAT, "sdpa", "flash_attention_2 was requested but the precision is float32", False),
        ("sdpa", AMPERE, "sdpa", "as requested", True),
        ("eager", AMPERE, "eager", "as requested", True),
    ],
)
def test_attention_resolves(requested: str, facts: AttentionFacts, backend: str, reason: str, varlen: bool) -> None:
    assert resolve_attention(requested, facts) == (backend, reason)
    assert uses_varlen_kernel(facts) is varlen


def test_a_named_device_that_is_absent_is_a_start_error_with_the_name_of_the_setting() -> None:
    absent = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(SettingError, match="SIE_DEVICE") as raised:
        resolve_device(absent)
    assert raised.value.name == "SIE_DEVICE"


@pytest.mark.parametrize(
    ("cuda", "controls", "missing"),
    [
        (None, True, "torch that is built for CUDA"),
        ("13.0", False, "nvidiactl is missing"),
        ("13.0", True, "torch sees 0 CUDA devices"),
    ],
)
def test_a_gpu_that_is_absent_is_one_line_that_says_what_is_missing(
    cuda: str | None, controls: bool, missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    control = tmp_path / "nvidiactl"
    if controls:
        control.touch()
    monkeypatch.setattr(devices, "_CONTROLS", (control,))
    monkeypatch.setattr(devices.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SettingError, match=missing) as raised:
        resolve_device("cuda")
    assert "\n" not in str(raised.value)


def test_the_cpu_is_always_there_and_auto_finds_something() -> None:
    assert resolve_device("cpu").type == "cpu"
    assert not torch.backends.cudnn.allow_tf32, "float32 means float32 on a GPU too"
    assert resolve_device("auto").type in ("cpu", "cuda", "mps")


def test_memory_is_within_its_total_and_cores_are_at_least_one() -> None:
    memory = devices.memory(torch.device("cpu"))
    assert 0 < memory.used_bytes < memory.total_bytes
    assert 0 < memory.percent < 100
    assert Memory(849, 1000).percent == pytest.approx(84.9)
    assert devices.usable_cores() >= 1
