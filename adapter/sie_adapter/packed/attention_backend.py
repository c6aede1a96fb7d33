"""Choice of the attention backend: the requested backend if the device can run it in the model's precision, else sdpa.

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
    """Facts that determine the attention backend. `capability`: the compute capability of CUDA, (0, 0) without CUDA.
    `flash_lacks`: the reason why the package flash-attn cannot be used, else an empty string.
    """

    device_type: str
    capability: tuple[int, int] = (0, 0)
    flash_lacks: str = "the package flash-attn is not installed"
    varlen_present: bool = False
    is_16_bit: bool = False


def attention_facts(device: torch.device, dtype: torch.dtype) -> AttentionFacts:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return AttentionFacts(
        device_type=device.type,
        capability=capability,
        # flash-attn is imported, because `find_spec` would also find a build for another torch, whose import fails.
        # Without CUDA, no code uses flash-attn.
        flash_lacks=flash_import() if device.type == "cuda" else "the device is no GPU of NVIDIA",
        varlen_present=importlib.util.find_spec("torch.nn.attention.varlen") is not None,
        is_16_bit=dtype.itemsize == 2,
    )


def resolve_attention(requested: str, facts: AttentionFacts) -> tuple[Backend, str]:
    """Return the attention backend, and the reason. The requests `auto` and `flash_attention_2` give flash_attention_2
    if the device, the precision and the installed package allow it, else sdpa.
    """
    if requested == "eager":
        return "eager", "as requested"
    if requested == "sdpa":
        return "sdpa", "as requested"
    is_auto = requested == "auto"
    if lacks := _flash_lacks(facts):
        return "sdpa", f"auto: {lacks}" if is_auto else f"flash_attention_2 was requested but {lacks}"
    return "flash_attention_2", "auto" if is_auto else "as requested"


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
    """Return the reason why flash-attn cannot be imported, else an empty string."""
    try:
        importlib.import_module("flash_attn")
    except ModuleNotFoundError as error:
        if error.name == "flash_attn":
            return "the package flash-attn is not installed"
        return f"the package flash-attn is installed and needs {error.name}"
    # an extension built for another torch raises these errors
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        text = " ".join(str(error).split())
        return f"the package flash-attn is installed and cannot be imported: {type(error).__name__}: {text[:200]}"
    return ""


def uses_varlen_kernel(facts: AttentionFacts) -> bool:
    """Return whether PyTorch's variable-length kernel may run: on CUDA from capability 8.0 on, in 16 bits, if the
    installed torch has this kernel.
    """
    return facts.device_type == "cuda" and facts.capability >= (8, 0) and facts.varlen_present and facts.is_16_bit
