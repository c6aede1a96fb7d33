"""What this process computes on, and in which precision and with which attention: resolved once, logged, reported.

SIE_DEVICE ──► resolve_device ──► torch.device
precision of the entry, else SIE_DEFAULT_COMPUTE_PRECISION ──► resolve_precision ──► dtype
SIE_ATTENTION_BACKEND + facts of the device ──► resolve_attention ──► backend and the reason for it
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from sie_contracts.catalogue import Precision
from sie_contracts.settings import SettingError

Backend = Literal["flash_attention_2", "sdpa", "eager"]

_DTYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_CGROUP = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # of malloc.h


def resolve_device(name: str) -> torch.device:
    """`auto` takes CUDA, then MPS, then CPU. Raises SettingError for a named device that is absent."""
    has_mps = torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "mps" if has_mps else "cpu")
    device = torch.device("cuda:0" if name == "cuda" else name)
    if device.type == "mps" and not has_mps:
        raise SettingError("SIE_DEVICE", f"{name} is not available here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingError("SIE_DEVICE", f"{name} is not available here, {torch.cuda.device_count()} CUDA devices are")
    return device


def resolve_precision(own: Precision | None, default: Precision, device_type: str, *, has_bfloat16: bool) -> torch.dtype:
    """The entry's own precision, else the default. A CPU computes 16-bit models in bfloat16 where it has the instructions, else float32.

    `has_bfloat16`: whether this CPU has AVX512-BF16 or AMX; not looked at elsewhere.
    """
    dtype = _DTYPES[own or default]
    if device_type != "cpu" or dtype is torch.float32:
        return dtype
    return torch.bfloat16 if has_bfloat16 else torch.float32


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


@dataclass(frozen=True)
class AttentionFacts:
    """What the choice of attention depends on. `capability` is CUDA's compute capability, (0, 0) elsewhere."""

    device_type: str
    capability: tuple[int, int] = (0, 0)
    flash_present: bool = False
    varlen_present: bool = False
    is_16_bit: bool = False


def attention_facts(device: torch.device, dtype: torch.dtype) -> AttentionFacts:
    """The facts of this machine."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return AttentionFacts(
        device_type=device.type,
        capability=capability,
        flash_present=importlib.util.find_spec("flash_attn") is not None,
        varlen_present=importlib.util.find_spec("torch.nn.attention.varlen") is not None,
        is_16_bit=dtype.itemsize == 2,
    )


def resolve_attention(requested: str, facts: AttentionFacts) -> tuple[Backend, str]:
    """The backend, and why. `auto`: flash_attention_2 where everything for it is there, else sdpa. An impossible demand becomes sdpa."""
    lacks = _flash_lacks(facts)
    if requested == "eager":
        return "eager", "as requested"
    if requested == "flash_attention_2":
        return ("sdpa", f"flash_attention_2 was requested but {lacks}") if lacks else ("flash_attention_2", "as requested")
    if requested == "sdpa":
        return "sdpa", "as requested"
    return ("sdpa", f"auto: {lacks}") if lacks else ("flash_attention_2", "auto")


def _flash_lacks(facts: AttentionFacts) -> str:
    if facts.device_type != "cuda":
        return f"the device is {facts.device_type}, not cuda"
    if facts.capability < (8, 0):
        return f"compute capability {facts.capability[0]}.{facts.capability[1]} is below 8.0"
    if not facts.flash_present:
        return "the package flash-attn is not installed"
    return "" if facts.is_16_bit else "the precision is float32"


@dataclass(frozen=True)
class Compute:
    """Everything that the weights and passes of one model run with on this device."""

    device: torch.device
    dtype: torch.dtype
    backend: Backend
    reason: str  # why this backend
    facts: AttentionFacts

    @property
    def precision(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def uses_varlen_kernel(facts: AttentionFacts) -> bool:
    """Whether `sdpa` may run PyTorch's own variable-length kernel: CUDA from capability 8.0 on, in 16 bit."""
    return facts.device_type == "cuda" and facts.capability >= (8, 0) and facts.varlen_present and facts.is_16_bit


def label(device: torch.device) -> str:
    """The GPU's name, empty on a CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"Apple {platform.processor() or 'GPU'}" if device.type == "mps" else ""


def usable_cores() -> int:
    """Cores this process may use: its affinity, cut to the cgroup's quota. At least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return max(1, allowed)
    return max(1, allowed if quota == "max" else min(allowed, int(quota) // int(period)))


@dataclass(frozen=True)
class Memory:
    """Memory of the device models live on, in bytes, whoever holds it."""

    used_bytes: int
    total_bytes: int

    @property
    def percent(self) -> float:
        return 100.0 * self.used_bytes / self.total_bytes


def memory(device: torch.device) -> Memory:
    """What the device holds now. On a CPU: the container's limit where there is one, else the machine."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total - free, total)
    machine = psutil.virtual_memory()
    if device.type == "mps":
        return Memory(torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory())
    return _container_memory(machine.total) or Memory(machine.total - machine.available, machine.total)


def _container_memory(machine_bytes: int) -> Memory | None:
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        counters = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return None
    # file pages that nobody used lately are counted as used by the kernel but are given back before anything fails
    return Memory(used - int(counters.get("inactive_file", 0)), limit) if limit < machine_bytes else None


def keep_freed_memory() -> None:
    """Let the C allocator keep what is freed, up to 512 MiB in each arena, instead of returning the states of each layer to the kernel.

    Without it page faults take 12 to 15 % of a forward pass on a CPU (bench/engine.py). `give_memory_back` still returns all of it.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for parameter, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 512 << 20), (_M_TOP_PAD, 64 << 20)):
            libc.mallopt(parameter, value)


def give_memory_back(device: torch.device) -> None:
    """Return freed memory to the driver or the system, so that other processes, and the next measurement, see it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    elif platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
