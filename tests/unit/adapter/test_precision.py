"""The requested and the served precision of a model, and the settings that limit a CPU to fewer instructions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sie_adapter.loading.precision import cpu_lacks_bfloat16, resolve_precision

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
