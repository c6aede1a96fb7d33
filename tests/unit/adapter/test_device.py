"""Resolution of device and attention."""

from __future__ import annotations

import os

import pytest
import torch

from sie_adapter.engine import device as devices
from sie_adapter.engine.device import resolve_device
from sie_adapter.packed.attention_backend import AttentionFacts, resolve_attention, uses_varlen_kernel
from sie_contracts.settings import MAX_DEVICES, SettingError

AMPERE = AttentionFacts("cuda", (8, 0), flash_lacks="", varlen_present=True, is_16_bit=True)
HOPPER_BARE = AttentionFacts("cuda", (9, 0), varlen_present=True, is_16_bit=True)
TURING = AttentionFacts("cuda", (7, 5), flash_lacks="", varlen_present=True, is_16_bit=True)
FLOAT = AttentionFacts("cuda", (8, 0), flash_lacks="", varlen_present=True, is_16_bit=False)
CPU = AttentionFacts("cpu", is_16_bit=True, flash_lacks="", varlen_present=True)
MPS = AttentionFacts("mps", is_16_bit=True)


@pytest.mark.parametrize(
    ("requested", "facts", "backend", "reason", "varlen"),
    [
        ("auto", AMPERE, "flash_attention_2", "auto", True),
        ("auto", HOPPER_BARE, "sdpa", "auto: the package flash-attn is not installed", True),
        ("auto", TURING, "sdpa", "auto: compute capability 7.5 is below 8.0", False),
        ("auto", FLOAT, "sdpa", "auto: the precision is float32", False),
        ("auto", CPU, "sdpa", "auto: the device is cpu, not cuda", False),
        ("flash_attention_2", AMPERE, "flash_attention_2", "as requested", True),
        ("flash_attention_2", CPU, "sdpa", "flash_attention_2 was requested but the device is cpu, not cuda", False),
        ("flash_attention_2", FLOAT, "sdpa", "flash_attention_2 was requested but the precision is float32", False),
        ("eager", AMPERE, "eager", "as requested", True),
    ],
)
def test_attention_resolves(requested: str, facts: AttentionFacts, backend: str, reason: str, varlen: bool) -> None:
    assert resolve_attention(requested, facts) == (backend, reason)
    assert uses_varlen_kernel(facts) is varlen


@pytest.mark.parametrize(
    ("setting", "cuda", "gpus", "names"),
    [
        ("cuda:1,cuda:3", "13.0", 9, ["cuda:1", "cuda:3"]),
        ("cpu,cpu", None, 0, ["cpu", "cpu"]),
        ("auto", "13.0", 2, ["auto"]),
        ("all", "13.0", 2, ["cuda:0", "cuda:1"]),
        ("all", "13.0", 99, [f"cuda:{number}" for number in range(MAX_DEVICES)]),
        ("all", "13.0", 0, ["auto"]),
        ("all", None, 2, ["auto"]),
    ],
)
def test_each_named_device_is_for_a_process_of_its_own(
    setting: str, cuda: str | None, gpus: int, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_by: list[int] = []
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: asked_by.append(os.getpid()) or gpus)
    assert devices.names_of(setting) == names
    assert asked_by == [], "this process must not use CUDA"


@pytest.mark.parametrize(
    ("before", "name", "after"), [(None, "cuda:1", "1"), ("", "cuda:0", "0"), ("4, GPU-a ,6", "cuda:1", "GPU-a")]
)
def test_a_process_of_one_of_several_gpus_sees_that_one_alone(
    before: str | None, name: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    devices.hide_other_gpus(name)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == after


def test_a_gpu_beyond_the_visible_ones_is_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(SettingError, match="CUDA_VISIBLE_DEVICES has 1"):
        devices.hide_other_gpus("cuda:1")


def test_a_named_device_that_is_absent_is_a_start_error_with_the_name_of_the_setting() -> None:
    absent = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(SettingError, match="SIE_DEVICE") as raised:
        resolve_device(absent)
    assert raised.value.name == "SIE_DEVICE"


def test_the_cpu_is_always_there_and_auto_finds_something() -> None:
    assert resolve_device("cpu").type == "cpu"
    assert not torch.backends.cudnn.allow_tf32, "float32 means float32 on a GPU too"
    assert resolve_device("auto").type in ("cpu", "cuda", "mps")
