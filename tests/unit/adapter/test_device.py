"""Resolution of device, attention and precision."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel
from unit.adapter import toys

from sie_adapter.engine import device as devices
from sie_adapter.engine.device import resolve_device
from sie_adapter.loading.precision import cpu_lacks_bfloat16, resolve_precision
from sie_adapter.packed.attention_backend import (
    AttentionFacts,
    Backend,
    flash_import,
    resolve_attention,
    uses_varlen_kernel,
)
from sie_adapter.packed.backbone import Backbone
from sie_contracts.settings import MAX_DEVICES, SettingError

AMPERE = AttentionFacts("cuda", (8, 0), flash_lacks="", varlen_present=True, is_16_bit=True)
HOPPER_BARE = AttentionFacts("cuda", (9, 0), varlen_present=True, is_16_bit=True)
TURING = AttentionFacts("cuda", (7, 5), flash_lacks="", varlen_present=True, is_16_bit=True)
FLOAT = AttentionFacts("cuda", (8, 0), flash_lacks="", varlen_present=True, is_16_bit=False)
CPU = AttentionFacts("cpu", is_16_bit=True, flash_lacks="", varlen_present=True)


BACKENDS: tuple[Backend, ...] = ("flash_attention_2", "sdpa", "eager")


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


# precisions


EPYC = {"avx2": True, "avx512_bf16": True}
XEON = {**EPYC, "amx_bf16": True}
LAPTOP = {"avx2": True}
NO_INSTRUCTIONS = "this CPU has neither AVX512-BF16 nor AMX instructions"
IN_BFLOAT16 = "a CPU computes 16-bit models in bfloat16"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread as in an adapter: threads that wait for each other on a busy machine take minutes for a load."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("own", "default", "device_type", "lacks", "expected", "reason"),
    [
        (None, "float16", "cpu", "", torch.bfloat16, IN_BFLOAT16),
        (None, "float16", "cpu", NO_INSTRUCTIONS, torch.float32, NO_INSTRUCTIONS),
        ("bfloat16", "float32", "cpu", "", torch.bfloat16, ""),
        ("bfloat16", "float32", "cpu", NO_INSTRUCTIONS, torch.float32, NO_INSTRUCTIONS),
        ("float32", "float16", "cpu", "", torch.float32, ""),
        ("float32", "float16", "cpu", NO_INSTRUCTIONS, torch.float32, ""),
        ("bfloat16", "float16", "cuda", NO_INSTRUCTIONS, torch.bfloat16, ""),
        (None, "float16", "cuda", "", torch.float16, ""),
        (None, "float32", "mps", "", torch.float32, ""),
    ],
)
def test_precision_resolves(
    own: str | None, default: str, device_type: str, lacks: str, expected: torch.dtype, reason: str
) -> None:
    assert resolve_precision(own, default, device_type, lacks=lacks) == (expected, reason)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("instructions", "capability", "environ", "named"),
    [
        (LAPTOP, "AVX2", {}, "neither AVX512-BF16 nor AMX"),
        ({**LAPTOP, "avx512_f": True, "avx512_bw": True}, "AVX512", {}, "neither AVX512-BF16 nor AMX"),
        (EPYC, "AVX512", {}, ""),
        (XEON, "AVX512", {}, ""),
        ({"amx_bf16": True}, "AVX512", {"ONEDNN_MAX_CPU_ISA": "ALL"}, ""),
        (XEON, "AVX512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, ""),
        (XEON, "AVX512", {"ONEDNN_MAX_CPU_ISA": ""}, ""),
        (XEON, "AVX512", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "ONEDNN_MAX_CPU_ISA=AVX2"),
        (XEON, "AVX512", {"ONEDNN_MAX_CPU_ISA": "avx512_core"}, "ONEDNN_MAX_CPU_ISA=avx512_core"),
        (EPYC, "AVX512", {"DNNL_MAX_CPU_ISA": "AVX2"}, "DNNL_MAX_CPU_ISA=AVX2"),
        (EPYC, "AVX512", {"DNNL_MAX_CPU_ISA": "AVX2", "ONEDNN_MAX_CPU_ISA": "ALL"}, ""),
        (XEON, "AVX2", {}, "ATEN_CPU_CAPABILITY limits torch to AVX2"),
        (XEON, "DEFAULT", {}, "ATEN_CPU_CAPABILITY limits torch to DEFAULT"),
    ],
)
def test_a_cpu_has_bfloat16_by_its_instructions_less_what_its_libraries_may_not_use(
    instructions: dict[str, bool], capability: str, environ: dict[str, str], named: str
) -> None:
    lacks = cpu_lacks_bfloat16(instructions, capability, environ)
    assert named in lacks
    assert bool(lacks) == bool(named)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (None, "the package flash-attn is not installed"),
        ("import absent_library", "the package flash-attn is installed and needs absent_library"),
        (
            "raise ImportError('flash_attn_2_cuda.so: undefined symbol')",
            "installed and cannot be imported: ImportError: flash_attn_2_cuda.so: undefined symbol",
        ),
        ("", ""),
    ],
)
def test_a_package_of_kernels_counts_if_it_can_be_imported(
    source: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that was built for another torch is installed, but its import fails."""
    if source is not None:
        (tmp_path / "flash_attn.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    reason = flash_import.__wrapped__()
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    assert expected in reason
    assert bool(reason) is bool(expected)


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


def test_a_kernel_that_cannot_run_is_not_told_of_as_the_one_in_force(tmp_path: Path) -> None:
    model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)).eval()
    kernels = [Backbone(copy.deepcopy(model), toys.compute(backend=name), 64).attention for name in BACKENDS]
    assert kernels == ["sdpa", "sdpa", "eager"], "no package of kernels computes on a CPU"
