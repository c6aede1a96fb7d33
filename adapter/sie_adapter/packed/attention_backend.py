"""With which attention a model computes: what this machine has, what was asked for, and why the two differ.

SIE_ATTENTION_BACKEND + facts of the device ──► resolve_attention ──► backend and the reason for it
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch

Backend = Literal["flash_attention_2", "sdpa", "eager"]


@dataclass(frozen=True)
class AttentionFacts:
    """The facts that decide the attention backend. `capability` is CUDA's compute capability, (0, 0) elsewhere.
    `flash_lacks`: why the package flash-attn cannot be used, empty if it can.
    """

    device_type: str
    capability: tuple[int, int] = (0, 0)
    flash_lacks: str = "the package flash-attn is not installed"
    varlen_present: bool = False
    is_16_bit: bool = False


def attention_facts(device: torch.device, dtype: torch.dtype) -> AttentionFacts:
    """The facts of this machine."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return AttentionFacts(
        device_type=device.type,
        capability=capability,
        # imported, since one that was built for another torch is there and is of no use; not where nothing would use it
        flash_lacks=flash_import() if device.type == "cuda" else "the device is no GPU of NVIDIA",
        varlen_present=importlib.util.find_spec("torch.nn.attention.varlen") is not None,
        is_16_bit=dtype.itemsize == 2,
    )


def resolve_attention(requested: str, facts: AttentionFacts) -> tuple[Backend, str]:
    """The backend, and why. `auto`: flash_attention_2 where everything for it is there, else sdpa. An impossible demand
    becomes sdpa.
    """
    lacks = _flash_lacks(facts)
    if requested == "eager":
        return "eager", "as requested"
    if requested == "flash_attention_2":
        return (
            ("sdpa", f"flash_attention_2 was requested but {lacks}") if lacks else ("flash_attention_2", "as requested")
        )
    if requested == "sdpa":
        return "sdpa", "as requested"
    return ("sdpa", f"auto: {lacks}") if lacks else ("flash_attention_2", "auto")


def _flash_lacks(facts: AttentionFacts) -> str:
    if facts.device_type != "cuda":
        return f"the device is {facts.device_type}, not cuda"
    if facts.capability < (8, 0):
        return f"compute capability {facts.capability[0]}.{facts.capability[1]} is below 8.0"
    if facts.flash_lacks:
        return facts.flash_lacks
    return "" if facts.is_16_bit else "the precision is float32"


@functools.cache
def flash_import() -> str:
    """Why flash-attn cannot be imported, empty if it can."""
    try:
        importlib.import_module("flash_attn")
    except ModuleNotFoundError as error:
        if error.name == "flash_attn":
            return "the package flash-attn is not installed"
        return f"the package flash-attn is installed and needs {error.name}"
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # as an extension of another torch raises
        text = " ".join(str(error).split())
        return f"the package flash-attn is installed and cannot be imported: {type(error).__name__}: {text[:200]}"
    return ""


def uses_varlen_kernel(facts: AttentionFacts) -> bool:
    """Whether `sdpa` may run PyTorch's own variable-length kernel: CUDA from capability 8.0 on, in 16 bit."""
    return facts.device_type == "cuda" and facts.capability >= (8, 0) and facts.varlen_present and facts.is_16_bit
