"""What this process computes on: resolved once, logged, reported. Its precision: `precision`, its attention:
`attention_backend`.

SIE_DEVICE ──► resolve_device ──► torch.device
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
from sie_contracts.settings import SettingError
from sie_runtime import control_group

_logger = logging.getLogger("sie.adapter")

_STATUS = Path("/proc/self/status")
# of the drivers of NVIDIA, of NVIDIA under WSL, and of AMD
_CONTROLS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
_INSTEAD = "or name cpu, or auto for what there is"
_MAPPED_BYTES = 32 << 20  # from here on an allocation has pages of its own; glibc takes no more
_APART_BYTES = 1 << 20  # the same for what leaves holes in the heap
_apart, _apart_lock = 0, threading.Lock()  # loads that are going on
_CLAIM_BYTES = 8 << 20  # several times what oneDNN takes for one new shape, about 1 MB
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # of malloc.h


def require(name: str) -> None:
    """Look for a CUDA device that is named without asking CUDA, which a process that forks later cannot. Raises
    SettingError, which says what is missing.
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
            f"{name} needs a GPU, there is none ({_CONTROLS[0]} is missing): in a pod request nvidia.com/gpu, on a node"
            f" with NVIDIA's driver, container toolkit and device plugin, {_INSTEAD}",
        )


def resolve_device(name: str) -> torch.device:
    """`auto` takes CUDA, then MPS, then CPU. Raises SettingError for a named device that is absent."""
    require(name)
    torch.backends.cudnn.allow_tf32 = False  # a model that is to compute in float32 does: TF32 has 10 bits of mantissa
    has_mps = torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "mps" if has_mps else "cpu")
    device = torch.device("cuda:0" if name == "cuda" else name)
    if device.type == "mps" and not has_mps:
        raise SettingError("SIE_DEVICE", f"{name} is not available here, {_INSTEAD}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingError(
            "SIE_DEVICE",
            f"{name} is not available here, torch sees {torch.cuda.device_count()} CUDA devices (see `sie doctor`),"
            f" {_INSTEAD}",
        )
    return device


@dataclass(frozen=True)
class Compute:
    """Everything that the weights and passes of one model run with on this device.

    `requested`: the precision that its entry asks for, else the default. `precision_reason`: why `dtype` is another
    one, else empty. `outputs`: what towers made of images. `model`: what the rules of engines look at. `engine`: by
    these rules; a model that it does not serve falls back to torch, unless its entry demands it (`Choice.demand`).
    `scratch`: the folder of files that a load writes for itself, None for that of the system. `int8`: weights are kept
    in 8 bits.
    """

    device: torch.device
    dtype: torch.dtype
    backend: Backend
    reason: str  # why this backend
    facts: AttentionFacts
    requested: str = ""
    precision_reason: str = ""
    outputs: TowerOutputs = field(default_factory=TowerOutputs)
    model: EngineFacts = NO_TEXTS
    engine: Choice = TORCH
    scratch: Path | None = None
    int8: bool = False

    @property
    def precision(self) -> str:
        return "int8" if self.int8 else str(self.dtype).removeprefix("torch.")


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A host array on the device, on a CPU the array itself. Does not wait for CUDA, which stages pageable memory at
    the call.
    """
    return torch.from_numpy(array).to(device, non_blocking=device.type == "cuda")


def label(device: torch.device) -> str:
    """The GPU's name, empty on a CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"Apple {platform.processor() or 'GPU'}" if device.type == "mps" else ""


def usable_cores() -> int:
    """Cores this process may use: its affinity, cut to the whole cores of its control group's quota. At least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = control_group.cores()
    return max(1, allowed if quota is None else min(allowed, int(quota)))


@dataclass(frozen=True)
class MemoryUse:
    """Memory of the device models live on, in bytes, whoever holds it."""

    used_bytes: int
    total_bytes: int

    @property
    def percent(self) -> float:
        return 100.0 * self.used_bytes / self.total_bytes


def memory(device: torch.device, more_bytes: int = 0) -> MemoryUse:
    """What the device would hold with `more_bytes` more, under the tightest of the limits that bind this process.

    CUDA: the card, and the fraction of it that this process may use. MPS: what Metal recommends. CPU: the machine, the
    container, and the limit on this process's own data (RLIMIT_DATA, `ulimit -d`), which bounds one adapter among
    others without a container.
    """
    return max(
        (MemoryUse(limit.used_bytes + more_bytes, limit.total_bytes) for limit in _limits(device)),
        key=lambda limit: limit.percent,
    )


def capacity_bytes(device: torch.device) -> int:
    """What the tightest of these limits lets this process have, if it has all of it."""
    return min(limit.total_bytes for limit in _limits(device))


def _limits(device: torch.device) -> list[MemoryUse]:
    if device.type == "cuda":
        return _cuda_memory(device)
    return _mps_memory() if device.type == "mps" else _host_memory()


def _cuda_memory(device: torch.device) -> list[MemoryUse]:
    card = _nvml_memory(device)
    if card is None:
        free, total = torch.cuda.mem_get_info(device)
        card = MemoryUse(total - free, total)
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    return (
        [card]
        if fraction >= 1.0
        else [card, MemoryUse(torch.cuda.memory_reserved(device), int(fraction * card.total_bytes))]
    )


@functools.cache
def _nvml_handle(device: torch.device) -> object | None:
    """The card in NVML, by the id that CUDA_VISIBLE_DEVICES does not renumber. None without package or library."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return cast(object, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}"))
    except pynvml.NVMLError as error:
        _logger.info("NVML does not know the card, the CUDA driver is asked for memory: %s", error)
        return None


def _nvml_memory(device: torch.device) -> MemoryUse | None:
    if (handle := _nvml_handle(device)) is None:
        return None
    import pynvml

    try:
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        _logger.warning("NVML gave no memory information, the CUDA driver is asked: %s", error)
        return None
    return MemoryUse(int(info.used), int(info.total))


class UtilisationProbe:
    """How busy a device is, whoever uses it. May be asked from any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._before = _cpu_seconds()

    def percent(self) -> float | None:
        """CUDA: by NVML, where its package is. CPU: of the machine's cores, since the last question. None where nothing
        tells.
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
            _logger.debug("NVML gave no utilisation: %s", error)
            return None


def _cpu_seconds() -> tuple[float, float]:
    """Busy and all seconds of all cores since the machine started."""
    times = psutil.cpu_times()
    # which `user` and `nice` count as well
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total - times.idle - getattr(times, "iowait", 0.0), total


def _mps_memory() -> list[MemoryUse]:
    return [MemoryUse(torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory())]


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
    # what the allocator has free counts against the limit, and is used again before the limit is met
    return MemoryUse(max(0, 1024 * _status_kib("VmData") - _free_in_allocator()), limit)


class _MallInfo2(ctypes.Structure):
    """struct mallinfo2 of malloc.h: ten sizes, of which the ninth is the free space of all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t) for name in (*(f"other_{number}" for number in range(8)), "fordblks", "keepcost")
    ]


def _free_in_allocator() -> int:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):  # glibc before 2.33, musl
        return 0
    libc.mallinfo2.restype = _MallInfo2
    return int(cast(Any, libc.mallinfo2()).fordblks)


def peak_of(device: torch.device, run: Callable[[], object]) -> int:
    """Run it and return the bytes it needed at most on the device, above what was held before. 0 where that is not to
    be known.

    What other threads take meanwhile is counted as well: an upper bound while the device is shared.
    """
    give_memory_back(device)  # what the allocator keeps would be used again unseen
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
    """Set the process's high-water mark to what it holds now: proc_pid_clear_refs(5)."""
    try:
        (_STATUS.parent / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_kib(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def keep_freed_memory() -> None:
    """Let the C allocator keep what is freed, up to 512 MiB in each arena, instead of returning the states of each
    layer to the kernel.

    Without it page faults take 12 to 15 % of a forward pass on a CPU (bench/engine.py). `give_memory_back` still
    returns all of it. Under a limit on data nothing is kept: holes between what lives on count as data, and after some
    thousand batches no tensor of one item found room in 150 MiB of them. The heap grows by 1 MiB at a time then: by 64
    a small allocation would fail while there is room for it.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        pad = 1 << 20 if is_limited() else 64 << 20
        for parameter, value in (
            (_M_MMAP_THRESHOLD, _mapped_bytes()),
            (_M_TRIM_THRESHOLD, 512 << 20),
            (_M_TOP_PAD, pad),
        ):
            libc.mallopt(parameter, value)


def _mapped_bytes() -> int:
    """From which size on an allocation gets pages of its own."""
    return _APART_BYTES if _apart or is_limited() else _MAPPED_BYTES


@contextlib.contextmanager
def weights_apart() -> Iterator[None]:
    """Give every allocation of 1 MiB and more pages of its own meanwhile, on all threads: weights that are freed later
    then leave no holes in the heap, which a model of other shapes could not use.
    """
    global _apart
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    with _apart_lock:
        _apart += 1
        libc.mallopt(_M_MMAP_THRESHOLD, _mapped_bytes())
    try:
        yield
    finally:
        with _apart_lock:
            _apart -= 1
            libc.mallopt(_M_MMAP_THRESHOLD, _mapped_bytes())


def is_limited() -> bool:
    """Whether this process's data is limited, so that an allocation may fail."""
    return _data_limit() is not None


def claim(nbytes: int) -> None:
    """Fail as torch's allocator does unless `nbytes` and _CLAIM_BYTES more can be had now. Nothing is held: another
    lane may still take it.

    For oneDNN, which does not check its own small allocations: one that fails for a shape that is new ends the process.
    """
    torch.empty(nbytes + _CLAIM_BYTES, dtype=torch.uint8)


def give_memory_back(device: torch.device) -> None:
    """Return freed memory to the driver or the system, so that other processes, and the next measurement, see it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    elif platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
