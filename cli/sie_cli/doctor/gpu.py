"""The GPU of this machine: driver, torch and its CUDA."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from sie_cli.display import counted
from sie_cli.doctor.finding import CheckResult, Finding
from sie_cli.doctor.look import CheckSkipped, ClusterProbe, NotApplicable

PROBE_S = 60.0  # of `import torch` on a cold disk
_CONTROL = Path("/dev/nvidiactl")  # there as soon as a driver is loaded, or was
_TORCH = (
    "import json,torch;print(json.dumps({'version':torch.__version__,'cuda':torch.version.cuda or '',"
    "'usable':torch.cuda.is_available(),'count':torch.cuda.device_count()}))"
)


async def gpu(look: ClusterProbe) -> CheckResult:
    """Driver, torch and its CUDA, where a GPU is there or asked for."""
    device = look.settings.device
    driver, trouble = _driver()
    has_device = driver is not None or await asyncio.to_thread(_CONTROL.exists)
    is_requested = device.startswith("cuda")
    if not is_requested and not has_device:
        return f"none is here, and SIE_DEVICE={device} asks for none", []
    if device == "cpu":
        return "SIE_DEVICE=cpu asks for none", []
    if not is_requested and importlib.util.find_spec("torch") is None:
        raise NotApplicable("a GPU is here, but no torch: no adapter runs in this environment")
    if importlib.util.find_spec("torch") is None:
        return "", [Finding(f"SIE_DEVICE={device}, but torch is not installed", "pip install 'sie-cluster[adapter]'")]
    torch = await _torch()
    return (
        f"torch {torch.version}, CUDA {torch.cuda or 'none'}, driver {driver or 'none'}, {counted(torch.count, 'GPU')}",
        gpu_faults(device, torch, driver, trouble),
    )


class GpuDriver(NamedTuple):
    """Its version, and the newest CUDA that it runs, as (major, minor)."""

    version: str
    cuda: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.version} (CUDA {self.cuda[0]}.{self.cuda[1]})"


class TorchBuild(msgspec.Struct, frozen=True):
    """What torch says of itself. `cuda`: the version that it was built for, empty without."""

    version: str
    cuda: str
    usable: bool
    count: int


def gpu_faults(device: str, torch: TorchBuild, driver: GpuDriver | None, trouble: str) -> list[Finding]:
    """Of SIE_DEVICE `device`. `trouble`: why there is no driver."""
    instead = "or set SIE_DEVICE=cpu" if device.startswith("cuda") else "or set SIE_DEVICE=cpu if that is meant"
    if not torch.cuda:
        return [
            Finding(
                f"torch {torch.version} is built without CUDA"
                + (f", but SIE_DEVICE={device}" if device.startswith("cuda") else ""),
                "install the build for this driver (`pip install torch --index-url "
                f"https://download.pytorch.org/whl/...`), {instead}",
            )
        ]
    if driver is None:
        fix = f"install it (`nvidia-smi` has to work), give the container the GPU, {instead}"
        return [Finding(f"no NVIDIA driver answers: {trouble}", fix)]
    built = tuple(int(part) for part in re.findall(r"\d+", torch.cuda)[:2])
    if not torch.usable:
        if built[:1] > driver.cuda[:1]:
            wrong = f"torch {torch.version} is built for CUDA {torch.cuda}, more than driver {driver} runs"
            return [Finding(wrong, f"update the driver, or install a torch for CUDA {driver.cuda[0]}")]
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None:
            fix = "unset CUDA_VISIBLE_DEVICES, or name a GPU of `nvidia-smi -L` in it"
            return [Finding(f"CUDA_VISIBLE_DEVICES={hidden} leaves no GPU", fix)]
        fix = f"`nvidia-smi` and the adapter's log say more, {instead}"
        return [Finding(f"torch {torch.version} cannot use the GPU of driver {driver}", fix)]
    number = int(device.partition(":")[2] or 0)
    if number >= torch.count:
        names = ", ".join(f"cuda:{number}" for number in range(torch.count))
        return [Finding(f"SIE_DEVICE={device}, but there is {names} alone", f"set SIE_DEVICE to {names}")]
    return []


def _driver() -> tuple[GpuDriver | None, str]:
    """The driver, or why there is none."""
    try:
        import pynvml
    except ImportError:
        return None, "the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, str(error)
    try:
        version, number = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion()
        return GpuDriver(str(version), (number // 1000, number % 1000 // 10)), ""
    except pynvml.NVMLError as error:
        return None, str(error)
    finally:
        pynvml.nvmlShutdown()


async def _torch() -> TorchBuild:
    """Asked in a process of its own, which ends with what it took. Raises CheckSkipped."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _TORCH, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(PROBE_S):
            out, err = await child.communicate()
    except TimeoutError as error:
        raise CheckSkipped(f"torch was not imported within {PROBE_S:g} s") from error
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    try:
        return msgspec.json.decode(out, type=TorchBuild)
    except msgspec.DecodeError as error:
        last = (err.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise CheckSkipped(f"torch cannot be imported: {last[:200]}") from error
