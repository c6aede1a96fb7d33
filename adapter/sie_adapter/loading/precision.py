"""Choice of the dtype in which a model computes. A device that does not support the requested precision computes in
another dtype.

    precision of the entry, else SIE_DEFAULT_COMPUTE_PRECISION ──► resolve_precision ──► dtype, and why it differs

Environment variables can limit the instructions that a library uses. With ATEN_CPU_CAPABILITY=avx2 (torch) or
ONEDNN_MAX_CPU_ISA=AVX2 (oneDNN), this module treats a CPU as one that has only AVX2.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

import torch

from sie_contracts.models.entries import Precision

# precision in an entry -> dtype of a forward pass on a GPU; on a CPU, `resolve_precision` may replace 16-bit dtypes.
# int8 is the precision of weights only.
_DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.bfloat16,
}
# values of ONEDNN_MAX_CPU_ISA that switch AVX512-BF16 off (oneDNN's documentation, "CPU Dispatcher Control"); oneDNN
# ignores an unknown value
_ONEDNN_BELOW = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"})
# environment variables of oneDNN, which reads the first that is set
_ONEDNN_NAMES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_ATEN_BELOW = frozenset({"DEFAULT", "AVX2"})


def resolve_precision(
    own: Precision | None, default: Precision, device_type: str, *, lacks: str
) -> tuple[torch.dtype, str]:
    """Return the dtype to compute in, and the reason why this dtype is not the requested precision. The reason is empty
    if the dtype is the requested precision, and for int8. The requested precision is `own`, the precision of the entry,
    or `default` if `own` is None.

    A CPU computes 16-bit models in bfloat16 if the CPU supports bfloat16, else in float32. `lacks`: the reason why this
    CPU does not support bfloat16; empty if the CPU supports bfloat16. Other devices ignore `lacks`.
    """
    dtype = _DTYPES[own or default]
    if device_type != "cpu" or dtype is torch.float32:
        return dtype, ""
    if lacks:
        return torch.float32, "" if own == "int8" else lacks
    return torch.bfloat16, "" if dtype is torch.bfloat16 else "a CPU computes 16-bit models in bfloat16"


@functools.cache
def bfloat16_lacks() -> str:
    """Return the reason why this CPU does not multiply bfloat16 matrices in hardware; empty if it does."""
    return cpu_lacks_bfloat16(torch.cpu.get_capabilities(), torch.backends.cpu.get_cpu_capability(), os.environ)


def cpu_lacks_bfloat16(instructions: Mapping[str, bool], capability: str, environ: Mapping[str, str]) -> str:
    """Return the reason why a CPU does not multiply bfloat16 matrices in hardware; empty if it does. `capability`: the
    instructions that torch uses. `environ`: environment variables with limits.
    """
    if not (instructions.get("avx512_bf16") or instructions.get("amx_bf16")):
        return "this CPU has neither AVX512-BF16 nor AMX instructions"
    if capability.upper() in _ATEN_BELOW:
        return f"ATEN_CPU_CAPABILITY limits torch to {capability}, which excludes the bfloat16 instructions of this CPU"
    name = next((name for name in _ONEDNN_NAMES if environ.get(name)), "")
    if name and environ[name].upper() in _ONEDNN_BELOW:
        return f"{name}={environ[name]} excludes the bfloat16 instructions of this CPU"
    return ""
