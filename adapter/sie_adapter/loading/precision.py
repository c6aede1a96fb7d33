"""In which precision a model computes: what its entry asks for, what this device has, and why the two differ.

precision of the entry, else SIE_DEFAULT_COMPUTE_PRECISION ──► resolve_precision ──► dtype and the reason for another
one

The limits of the libraries count as the CPU does: with ATEN_CPU_CAPABILITY=avx2 (torch) or ONEDNN_MAX_CPU_ISA=AVX2
(oneDNN) a machine serves as one with AVX2 does.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

import torch

from sie_contracts.models.entries import Precision

# of passes: with weights in 8 bits these are computed as with weights in 16
_DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.bfloat16,
}
# the limits of oneDNN's documentation ("CPU Dispatcher Control") that exclude AVX512-BF16; an unknown name limits
# nothing there either
_ONEDNN_BELOW = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"})
_ONEDNN_NAMES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the first that is set counts
_ATEN_BELOW = frozenset({"DEFAULT", "AVX2"})


def resolve_precision(
    own: Precision | None, default: Precision, device_type: str, *, lacks: str
) -> tuple[torch.dtype, str]:
    """The precision that is served, and why it is not the entry's own, or the default; the reason is empty where it is.

    A CPU computes 16-bit models in bfloat16 where it can, else in float32. `lacks`: why this CPU does not compute in
    bfloat16, empty if it does; not looked at elsewhere.
    """
    dtype = _DTYPES[own or default]
    if device_type != "cpu" or dtype is torch.float32:
        return dtype, ""
    if lacks:
        return torch.float32, "" if own == "int8" else lacks
    return torch.bfloat16, "" if dtype is torch.bfloat16 else "a CPU computes 16-bit models in bfloat16"


@functools.cache
def bfloat16_lacks() -> str:
    """Why this process does not multiply bfloat16 matrices in hardware on its CPU; empty if it does."""
    return cpu_lacks_bfloat16(torch.cpu.get_capabilities(), torch.backends.cpu.get_cpu_capability(), os.environ)


def cpu_lacks_bfloat16(instructions: Mapping[str, bool], capability: str, environ: Mapping[str, str]) -> str:
    """The same for a CPU with these `instructions`, of which torch uses those of `capability`, with the limits in
    `environ`.
    """
    if not (instructions.get("avx512_bf16") or instructions.get("amx_bf16")):
        return "this CPU has neither AVX512-BF16 nor AMX instructions"
    if capability.upper() in _ATEN_BELOW:
        return f"ATEN_CPU_CAPABILITY limits torch to {capability}, which excludes the bfloat16 instructions of this CPU"
    name = next((name for name in _ONEDNN_NAMES if environ.get(name)), "")
    if name and environ[name].upper() in _ONEDNN_BELOW:
        return f"{name}={environ[name]} excludes the bfloat16 instructions of this CPU"
    return ""
