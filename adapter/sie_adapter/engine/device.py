"""Device of this process, a GPU or the CPU, which is chosen once at the start. The modules `precision` and
`attention_backend` choose the precision and the attention of the models on the device.

SIE_DEVICE ──► names_of: the name of a device for each process ──► resolve_device ──► torch.device
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import platform
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie_adapter.engine.engines import NO_TEXTS, TORCH, Choice, EngineFacts
from sie_adapter.packed.attention_backend import AttentionFacts, Backend
from sie_adapter.packed.tower_outputs import TowerOutputs
from sie_contracts.settings import MAX_DEVICES, SettingError
from sie_runtime import control_group
from sie_store.weights.derived import DerivedFiles

_logger = logging.getLogger("sie.adapter")

_STATUS = Path("/proc/self/status")
# device files of the GPU drivers: NVIDIA, NVIDIA under WSL, AMD
_CONTROLS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
_INSTEAD = "or set cpu, or auto for the best device here"
# largest mmap threshold that glibc accepts; allocations of at least the threshold are served by mmap, outside the heap
_MAPPED_BYTES = 32 << 20
# This threshold replaces _MAPPED_BYTES while a model loads, and always if RLIMIT_DATA is set. Allocations of at least
# this size are then outside the heap, so they leave no holes in the heap when they are freed.
_APART_BYTES = 1 << 20
# number of model loads in progress, and the lock for this number; the capture of a CUDA graph holds the lock, so that
# no load begins during the capture
_apart, _apart_lock = 0, threading.Lock()
# bytes that `claim` allocates in addition to `nbytes`: several times the 1 MB or so that oneDNN needs for a new shape
_CLAIM_BYTES = 8 << 20
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # parameters of mallopt in malloc.h


def names_of(setting: str) -> list[str]:
    """Return the device names in SIE_DEVICE; for `all`, the names of all GPUs, or `auto` without a GPU. Each device
    gets an adapter process. Call this while the process has only one thread and has not used CUDA.
    """
    if setting != "all":
        return setting.split(",")
    return [f"cuda:{index}" for index in range(_cuda_devices())] or ["auto"]


def _cuda_devices() -> int:
    """Return the number of GPUs that torch finds, at most MAX_DEVICES. A forked child counts the GPUs, because a
    process that has called CUDA can no longer fork processes that use CUDA.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        return 0
    child = os.fork()
    if child == 0:
        count = 0
        try:
            count = torch.cuda.device_count()
        finally:
            os._exit(min(count, MAX_DEVICES))
    _, status = os.waitpid(child, 0)
    return max(0, os.waitstatus_to_exitcode(status))


def hide_other_gpus(name: str) -> None:
    """Hide all GPUs except `cuda:N` from this process and its children, so that no library uses the GPU of another
    adapter. The visible GPU is then called `cuda:0`. Call this before any use of CUDA. Raises SettingError if
    CUDA_VISIBLE_DEVICES lists at most N GPUs.
    """
    index = int(name.removeprefix("cuda:"))
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    if visible and index >= len(visible):
        raise SettingError("SIE_DEVICE", f"{name} is not available here, CUDA_VISIBLE_DEVICES has {len(visible)} GPUs")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[index] if visible else str(index)


def require(name: str) -> None:
    """Raise SettingError if `name` is a CUDA device, and torch is built without CUDA or the machine has no GPU driver.
    CUDA is not called, because a process that has called CUDA can no longer fork.
    """
    if not name.startswith("cuda"):
        return
    if torch.version.cuda is None and torch.version.hip is None:
        raise SettingError(
            "SIE_DEVICE",
            f"{name} needs a torch that is built for CUDA, torch {torch.__version__} is not: run the image"
            f" sie-adapter-cuda, {_INSTEAD}",
        )
    if platform.machine() == "x86_64" and not any(control.exists() for control in _CONTROLS):
        raise SettingError(
            "SIE_DEVICE",
            f"{name} needs a GPU, there is none ({_CONTROLS[0]} is missing): a pod must request nvidia.com/gpu, on a"
            f" node with NVIDIA's driver, container toolkit and device plugin, {_INSTEAD}",
        )


def resolve_device(name: str) -> torch.device:
    """Return the torch device. `auto` is CUDA if present, else MPS, else the CPU. Raises SettingError if the named
    device is absent.
    """
    require(name)
    # TF32 is switched off, because it has only 10 bits of mantissa, and a float32 model must compute in float32
    torch.backends.cudnn.allow_tf32 = False
    has_mps = torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "mps" if has_mps else "cpu")
    device = torch.device("cuda:0" if name == "cuda" else name)
    if device.type == "mps" and not has_mps:
        raise SettingError("SIE_DEVICE", f"{name} is not available here: set cpu, or auto for the best device here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingError(
            "SIE_DEVICE",
            f"{name} is not available here, torch sees {torch.cuda.device_count()} CUDA devices (see `sie doctor`),"
            f" {_INSTEAD}",
        )
    return device


@dataclass(frozen=True)
class Compute:
    """Settings for the weights and forward passes of one model on this device.

    `requested`: the precision in the model's catalogue entry, else the default. `precision_reason`: the reason why
    `dtype` differs from `requested`; empty if both are equal. `outputs`: the cache of outputs of image encoders.
    `model`: facts about the model, by which its engine is chosen. `engine`: the chosen engine. If this engine cannot
    run the model, torch runs the model, or the load fails if the entry demands the engine (`Choice.demand`). `derived`:
    files that loads of these weights have computed. `int8`: whether weights are stored in 8 bits.
    """

    device: torch.device
    dtype: torch.dtype
    backend: Backend
    reason: str  # reason why the attention backend was chosen
    facts: AttentionFacts
    requested: str = ""
    precision_reason: str = ""
    outputs: TowerOutputs = field(default_factory=TowerOutputs)
    model: EngineFacts = NO_TEXTS
    engine: Choice = TORCH
    derived: DerivedFiles = field(default_factory=DerivedFiles)
    int8: bool = False

    @property
    def precision(self) -> str:
        return "int8" if self.int8 else str(self.dtype).removeprefix("torch.")


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy a host array to the device without waiting for a GPU. CUDA first copies the array to its own buffer, so the
    caller may change the array after the call. On a CPU the tensor shares the array's memory.
    """
    return torch.from_numpy(array).to(device, non_blocking=device.type == "cuda")


def label(device: torch.device) -> str:
    """Return the name of the GPU, or an empty string on a CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"Apple {platform.processor() or 'GPU'}" if device.type == "mps" else ""


def usable_cores() -> int:
    """Return the number of cores in the process's affinity mask, at most its control group's quota, and at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = control_group.cores()
    return max(1, allowed if quota is None else min(allowed, int(quota)))


@dataclass(frozen=True)
class MemoryUse:
    """Used and total bytes of one memory limit: that of the device, the machine, the container or this process."""

    used_bytes: int
    total_bytes: int

    @property
    def percent(self) -> float:
        return 100.0 * self.used_bytes / self.total_bytes


def memory(device: torch.device, more_bytes: int = 0) -> MemoryUse:
    """Return the memory use of the device as if `more_bytes` more bytes were in use. If several limits apply, return
    the limit with the highest share in use.

    The limits are, on CUDA: the memory of the GPU, and the fraction of it that torch lets this process use, if a
    fraction is set. On MPS: the size that Metal recommends. On a CPU: the memory of the machine, the limit of the
    container, and RLIMIT_DATA (`ulimit -d`), which can limit an adapter that has no container of its own.
    """
    return max(
        (MemoryUse(limit.used_bytes + more_bytes, limit.total_bytes) for limit in _limits(device)),
        key=lambda limit: limit.percent,
    )


def capacity_bytes(device: torch.device) -> int:
    """Return the bytes that this process may use on the device: the lowest of the limits that `memory` lists."""
    return min(limit.total_bytes for limit in _limits(device))


def _limits(device: torch.device) -> list[MemoryUse]:
    if device.type == "cuda":
        return _cuda_memory(device)
    if device.type == "mps":
        return [MemoryUse(torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory())]
    return _host_memory()


def _cuda_memory(device: torch.device) -> list[MemoryUse]:
    card = _nvml_memory(device)
    if card is None:
        free, total = torch.cuda.mem_get_info(device)
        card = MemoryUse(total - free, total)
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    if fraction >= 1.0:
        return [card]
    return [card, MemoryUse(torch.cuda.memory_reserved(device), int(fraction * card.total_bytes))]


@functools.cache
def _nvml_handle(device: torch.device) -> object | None:
    """Return NVML's handle of the GPU; None if NVML is absent or does not list the GPU. The GPU is found by its UUID,
    because CUDA_VISIBLE_DEVICES changes the indices of GPUs.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return cast(object, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}"))
    except pynvml.NVMLError as error:
        _logger.info("NVML gives no access to the GPU, so the adapter asks the CUDA driver for memory use: %s", error)
        return None


def _nvml_memory(device: torch.device) -> MemoryUse | None:
    if (handle := _nvml_handle(device)) is None:
        return None
    import pynvml

    try:
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        _logger.warning("NVML gives no memory use of the GPU, so the adapter asks the CUDA driver: %s", error)
        return None
    return MemoryUse(int(info.used), int(info.total))


class UtilisationProbe:
    """Meter for the utilisation of a device by all processes. `percent` may be called from any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._before = _cpu_seconds()

    def percent(self) -> float | None:
        """Return how busy the device is, in percent; None if unknown. On CUDA, this is the value of NVML. On a CPU, it
        is the mean of all cores since the last call (for the first call, since this object was created).
        """
        if self._device.type == "cuda":
            return self._nvml_percent()
        if self._device.type != "cpu":
            return None
        with self._lock:
            (busy, total), (busy_before, total_before) = (now := _cpu_seconds()), self._before
            if total <= total_before:
                return None
            self._before = now
        return round(100.0 * max(0.0, busy - busy_before) / (total - total_before), 1)

    def _nvml_percent(self) -> float | None:
        if (handle := _nvml_handle(self._device)) is None:
            return None
        import pynvml

        try:
            return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except pynvml.NVMLError as error:
            _logger.debug("NVML returned no utilisation of the GPU, so the adapter reports none: %s", error)
            return None


def _cpu_seconds() -> tuple[float, float]:
    """Return the busy seconds and the total seconds of all cores since the machine started."""
    times = psutil.cpu_times()
    # `guest` and `guest_nice` are subtracted, because `user` and `nice` already include both
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total - times.idle - getattr(times, "iowait", 0.0), total


def _host_memory() -> list[MemoryUse]:
    machine = psutil.virtual_memory()
    own = _own_limit()
    return [
        MemoryUse(machine.total - machine.available, machine.total),
        *(MemoryUse(group.used_bytes, group.limit_bytes) for group in control_group.memories()),
        *([own] if own is not None else []),
    ]


def _data_limit() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _own_limit() -> MemoryUse | None:
    limit = _data_limit()
    if limit is None or not _STATUS.exists():
        return None
    # VmData also counts freed memory that the allocator keeps. This memory is subtracted, because the allocator reuses
    # it first.
    return MemoryUse(max(0, 1024 * _status_kib("VmData") - _free_in_allocator()), limit)


class _MallInfo2(ctypes.Structure):
    """Struct mallinfo2 of malloc.h: ten sizes, of which the ninth is the free space of all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t) for name in (*(f"other_{number}" for number in range(8)), "fordblks", "keepcost")
    ]


def _free_in_allocator() -> int:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):  # glibc before 2.33 and musl do not have this function
        return 0
    libc.mallinfo2.restype = _MallInfo2
    return int(cast(Any, libc.mallinfo2()).fordblks)


def peak_of(device: torch.device, run: Callable[[], object]) -> int:
    """Call `run`. Return the bytes by which its peak memory on the device exceeded the memory in use before; 0 if this
    cannot be measured. Allocations of other threads during the call count too, so the result is an upper bound.
    """
    # Without this call, `run` could reuse freed memory of the allocator. This memory is already part of the resident
    # memory, so the result would be too low.
    give_memory_back(device)
    if device.type == "cuda":
        held: int = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return max(0, int(torch.cuda.max_memory_allocated(device)) - held)
    watched = device.type == "cpu" and _reset_high_water()
    before = _status_kib("VmRSS") if watched else 0
    run()
    return max(0, _status_kib("VmHWM") - before) * 1024 if watched else 0


def _reset_high_water() -> bool:
    """Reset the kernel's record of this process's peak memory (proc_pid_clear_refs(5)). Return whether it succeeded."""
    try:
        (_STATUS.parent / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_kib(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def keep_freed_memory() -> None:
    """Let the C allocator keep up to 512 MiB of freed memory in each arena. By default, the allocator returns the
    memory of each layer's states to the kernel, and the page faults of the next layer take 12 to 15 % of a forward pass
    on a CPU (bench/engine.py). `give_memory_back` still returns all freed memory.

    Under RLIMIT_DATA, mmap serves allocations of 1 MiB and more, outside the heap. RLIMIT_DATA also counts freed memory
    inside the heap: after some thousand batches, 150 MiB of freed memory were in holes too small for the tensors of one
    item. The heap grows by 1 MiB at a time, because a step of 64 MiB for a small allocation may exceed the limit.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _mapped_bytes())
        libc.mallopt(_M_TRIM_THRESHOLD, 512 << 20)
        libc.mallopt(_M_TOP_PAD, 1 << 20 if is_limited() else 64 << 20)


def _mapped_bytes() -> int:
    return _APART_BYTES if _apart or is_limited() else _MAPPED_BYTES


@contextlib.contextmanager
def weights_apart() -> Iterator[None]:
    """Make glibc serve allocations of at least 1 MiB by mmap, outside the heap, on all threads while this context is
    open. Freed weights then leave no holes in the heap. While it is open, `without_loads` yields False, so that no
    CUDA graph is captured.
    """
    _count_apart(1)
    try:
        yield
    finally:
        _count_apart(-1)


def _count_apart(more: int) -> None:
    global _apart
    with _apart_lock:
        _apart += more
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _mapped_bytes())


@contextlib.contextmanager
def without_loads() -> Iterator[bool]:
    """Block new model loads, and `give_memory_back` on a GPU, while this context is open. Both synchronise the device,
    which would make the capture of a CUDA graph in this context fail. Yield True if no load is in progress.
    """
    with _apart_lock:
        yield not _apart


def is_limited() -> bool:
    """Return whether RLIMIT_DATA limits this process, so that an allocation may fail."""
    return _data_limit() is not None


def claim(nbytes: int) -> None:
    """Check that `nbytes` plus _CLAIM_BYTES can be allocated: allocate these bytes and free them. Raises the error of
    torch's allocator. Call this before oneDNN, which ends the process if one of its own small allocations for a new
    shape fails. This call reserves nothing: another thread may allocate the memory before oneDNN does.
    """
    torch.empty(nbytes + _CLAIM_BYTES, dtype=torch.uint8)


def give_memory_back(device: torch.device) -> None:
    """Return freed memory to the GPU driver or the operating system, so that other processes can use it."""
    if device.type == "cuda":
        with without_loads():
            torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    elif platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
