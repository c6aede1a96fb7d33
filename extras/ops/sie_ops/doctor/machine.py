"""Checks of this machine: the workers' sockets, the disks, the ports for probes and metrics, and the GPU."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from sie_cli.display import counted, size
from sie_cli.serve.preflight import held_bytes
from sie_contracts.errors import UNDECODABLE
from sie_contracts.settings import BY_NAME, store_url
from sie_ops.doctor.checks import READY_FIX
from sie_ops.doctor.probe import CheckResult, CheckSkipped, ClusterProbe, NotApplicable
from sie_ops.doctor.report import DoctorFinding as Finding
from sie_store.weights.disk import usage

MIN_FREE_BYTES = 256 << 20


async def sockets(probe: ClusterProbe) -> CheckResult:
    """Check each socket over which a sidecar reaches its adapter."""
    probed = await probe.sockets()
    findings = [Finding(socket.wrong, socket.fix) for socket in probed if socket.wrong]
    unseen = [str(socket.path) for socket in probed if socket.is_unseen]
    if unseen and not findings:
        raise CheckSkipped(f"other users own the sockets {', '.join(unseen)}: run this as the worker's user")
    return f"{counted(len(probed), 'adapter')} answer" + ("s" if len(probed) == 1 else ""), findings


async def disk(probe: ClusterProbe) -> CheckResult:
    """Check the free space for weights, payloads and the queue on the disks of this machine."""
    return await asyncio.to_thread(_disks, probe)


def _disks(probe: ClusterProbe) -> CheckResult:
    settings, findings, notes = probe.settings, [], []
    cache = settings.cache_folder
    used, free = usage(cache, settings.disk_cache_bytes)
    percent = 100 * used / (used + free) if used + free else 100.0
    notes.append(f"weights {cache} {percent:.0f} % used")
    if percent > settings.disk_pressure_threshold_percent:
        findings.append(
            Finding(
                f"the disk of the weights ({cache}) is {percent:.1f} % full, above "
                f"{settings.disk_pressure_threshold_percent:g} %: each download first removes cached weights",
                "free space there, set SIE_LOCAL_CACHE to a larger disk, or raise SIE_DISK_PRESSURE_THRESHOLD_PERCENT",
            )
        )
    payloads = _payload_folder(probe)
    if payloads is not None:
        free = usage(payloads).free
        notes.append(f"payloads {size(free)} free")
        if free < MIN_FREE_BYTES:
            fix = "free space there, or set SIE_PAYLOAD_STORE_URL to a larger folder or a bucket"
            wrong = (
                f"the disk of the payload store ({payloads}) has {size(free)} left: {_filled(payloads, probe.data_dir)}"
            )
            findings.append(Finding(wrong, fix))
        elif payloads.exists() and not os.access(payloads, os.W_OK):
            fix = f"`chown` {payloads} to the user of gateways and workers, or set SIE_PAYLOAD_STORE_URL"
            findings.append(Finding(f"the payload store {payloads} cannot be written by this user", fix))
    store = probe.data_dir / "nats"
    if store.exists():
        free, room = usage(store).free, settings.queue_max_bytes - held_bytes(store)
        notes.append(f"queue {size(free)} free")
        if free < room:
            fix = "free space there, give `sie serve` a --data-dir on a larger disk, or lower SIE_QUEUE_MAX_BYTES"
            wrong = f"the queue may grow by {size(room)}, but its disk ({store}) has {size(free)} left"
            findings.append(Finding(f"{wrong}: {_filled(store, probe.data_dir)}", fix))
    return ", ".join(notes), findings


def _filled(folder: Path, data_dir: Path) -> str:
    """Describe the file system of a folder: its size, its free bytes, and the bytes that the data directory uses."""
    place = folder.absolute()
    while not os.path.ismount(place):
        place = place.parent
    whole = shutil.disk_usage(place)
    own = held_bytes(data_dir) if place in (data_dir, *data_dir.parents) else 0
    return (
        f"the file system {place} of {size(whole.total)} has {whole.free} bytes free; of the rest, the data directory "
        f"{data_dir} uses {size(own)}, and other files use {size(max(0, whole.used - own))}"
    )


def _payload_folder(probe: ClusterProbe) -> Path | None:
    if probe.settings.payload_store_url:
        store = store_url(probe.settings.payload_store_url)
        return Path(store.path) if store.scheme == "file" else None
    return probe.data_dir / "payloads" if (probe.data_dir / "payloads").exists() else None


async def ports(probe: ClusterProbe) -> CheckResult:
    """Check that the processes of SIE answer at their ports for probes and metrics, and are ready. Check the ports that
    the user set and the ports of the running `sie serve`. Do not check default ports, because another program may
    listen there.
    """
    findings, notes = [], []
    addresses = [
        (f"http://127.0.0.1:{port}", name)
        for name, port in (
            ("SIE_GATEWAY_METRICS_PORT", probe.settings.gateway_metrics_port),
            ("SIE_WORKER_METRICS_PORT", probe.settings.worker_metrics_port),
        )
        if port and probe.cluster.is_given(name)
    ]
    named = {url for url, _ in addresses}
    local = probe.cluster.local()
    addresses += [(url, "") for url in (local.metrics_urls if local is not None else ()) if url not in named]
    for url, name in addresses:
        port = int(url.rpartition(":")[2])
        ready, metrics = await asyncio.gather(probe.get(url, "/readyz"), probe.get(url, "/metrics"))
        if ready.trouble and metrics.trouble:
            if await _is_open(port):
                findings.append(_port_taken(name, port, probe.serve))
            elif name:
                notes.append(f"{port} is free")
            else:
                wrong = f"nothing listens on port {port}, which `sie serve` wrote down in {probe.data_dir}"
                findings.append(Finding(wrong, f"run `{probe.serve}` again: it replaces a `sie serve` that was killed"))
        elif metrics.trouble and ready.is_sie:
            wrong = f"port {port}{f' ({name})' if name else ''}: /metrics does not answer: {metrics.trouble}"
            findings.append(Finding(wrong, READY_FIX))
        elif b"\nsie_" not in metrics.body and not metrics.body.startswith(b"sie_"):
            findings.append(_port_taken(name, port, probe.serve))
        elif ready.status != 200:
            reason = ready.trouble or ready.body.decode(errors="replace").strip()[:300]
            findings.append(Finding(f"port {port}{f' ({name})' if name else ''}: {reason or 'not ready'}", READY_FIX))
        else:
            notes.append(f"{port} is ready")
    if not notes and not findings:
        raise NotApplicable(
            "neither SIE_GATEWAY_METRICS_PORT nor SIE_WORKER_METRICS_PORT is set, and no `sie serve` stored its ports"
        )
    return ", ".join(notes), findings


def _port_taken(name: str, port: int, serve: str) -> Finding:
    if not name:
        wrong = f"port {port} of `sie serve` is used by a program that is not SIE's"
        return Finding(wrong, f"run `{serve}` again: it takes other ports")
    row = BY_NAME[name]
    return Finding(
        f"port {port}, which {name} sets, is used by a program that is not SIE's",
        f"end that program (`ss -ltnp 'sport = :{port}'` names it), or start the {row.components[0]} with {row.flag} "
        "and a free port",
    )


async def _is_open(port: int) -> bool:
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


PROBE_S = 60.0  # limit in seconds for `import torch`, which is slow if the kernel has not cached torch's files
_CONTROL = Path("/dev/nvidiactl")  # this device file exists once the NVIDIA driver has been loaded
_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # PCI ids: vendor NVIDIA, and the class of display controllers
_TORCH = (
    "import json,torch;print(json.dumps({'version':torch.__version__,'cuda':torch.version.cuda or '',"
    "'usable':torch.cuda.is_available(),'count':torch.cuda.device_count()}))"
)


async def gpu(probe: ClusterProbe) -> CheckResult:
    """Check the GPU driver, torch, and torch's CUDA version, if a GPU exists or SIE_DEVICE requires a GPU."""
    device = probe.settings.device
    driver, trouble = _driver()
    has_device = driver is not None or await asyncio.to_thread(_CONTROL.exists)
    is_requested, has_torch = device.startswith("cuda"), importlib.util.find_spec("torch") is not None
    if device.startswith("cpu"):
        return f"SIE_DEVICE={device} needs no GPU", []
    if not is_requested and not has_device:
        if not has_torch or not await asyncio.to_thread(has_nvidia_card, _PCI):
            return f"this machine has no GPU, and SIE_DEVICE={device} needs none", []
        fix = "install the driver of NVIDIA (`nvidia-smi` has to work), or set SIE_DEVICE=cpu to use the CPU"
        return "", [Finding(f"this machine has an NVIDIA GPU, but no driver answers: {trouble}", fix)]
    if not is_requested and not has_torch:
        raise NotApplicable("this machine has a GPU, but torch is not installed, so no adapter runs here")
    if not has_torch:
        return "", [Finding(f"SIE_DEVICE={device}, but torch is not installed", "pip install 'sie-cluster[adapter]'")]
    torch = await _torch()
    return (
        f"torch {torch.version}, CUDA {torch.cuda or 'none'}, driver {driver or 'none'}, {counted(torch.count, 'GPU')}",
        gpu_faults(device, torch, driver, trouble),
    )


def has_nvidia_card(devices: Path) -> bool:
    return any(
        vendor.read_text().strip() == _NVIDIA and vendor.with_name("class").read_text().startswith(_DISPLAY)
        for vendor in devices.glob("*/vendor")
    )


class GpuDriver(NamedTuple):
    """Driver of a GPU: its version, and the newest CUDA version that it supports, as (major, minor)."""

    version: str
    cuda: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.version} (CUDA {self.cuda[0]}.{self.cuda[1]})"


class TorchBuild(msgspec.Struct, frozen=True):
    """Facts about the installed torch. `cuda`: the CUDA version of its build; empty for a build without CUDA."""

    version: str
    cuda: str
    usable: bool
    count: int


def gpu_faults(device: str, torch: TorchBuild, driver: GpuDriver | None, trouble: str) -> list[Finding]:
    """Return a list with the first fault of torch and the driver for this SIE_DEVICE; empty if there is no fault.
    `trouble`: why no driver was found.
    """
    instead = "or set SIE_DEVICE=cpu" if device.startswith("cuda") else "or set SIE_DEVICE=cpu to use the CPU"
    if not torch.cuda:
        number = torch.version.partition("+")[0]
        return [
            Finding(
                f"torch {torch.version} is built without CUDA"
                + (f", but SIE_DEVICE={device}" if device.startswith("cuda") else ""),
                f"install the build for this driver (`pip install --force-reinstall torch=={number}` gets PyPI's "
                f"build, which has CUDA), {instead}",
            )
        ]
    if driver is None and "mismatch" in trouble:
        fix = "restart the machine: its kernel runs the module of the old driver until the restart"
        return [Finding(f"the NVIDIA driver does not answer: {trouble}", fix)]
    if driver is None:
        fix = f"install it (`nvidia-smi` has to work), give the container the GPU, {instead}"
        return [Finding(f"no NVIDIA driver answers: {trouble}", fix)]
    built = tuple(int(part) for part in re.findall(r"\d+", torch.cuda)[:2])
    if not torch.usable:
        if built[:1] > driver.cuda[:1]:
            wrong = f"torch {torch.version} is built for CUDA {torch.cuda}, newer than driver {driver} supports"
            return [Finding(wrong, f"update the driver, or install a torch for CUDA {driver.cuda[0]}")]
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None:
            fix = "unset CUDA_VISIBLE_DEVICES, or name a GPU of `nvidia-smi -L` in it"
            return [Finding(f"CUDA_VISIBLE_DEVICES={hidden} leaves no GPU", fix)]
        fix = f"look for the cause in `nvidia-smi` and in the adapter's log, {instead}"
        return [Finding(f"torch {torch.version} cannot use the GPU of driver {driver}", fix)]
    places = [int(name.partition(":")[2] or 0) for name in device.split(",")]
    if max(places) >= torch.count:
        names = ", ".join(f"cuda:{number}" for number in range(torch.count))
        return [Finding(f"SIE_DEVICE={device}, but this machine has only {names}", f"set SIE_DEVICE to {names}")]
    return []


def _driver() -> tuple[GpuDriver | None, str]:
    """Return the driver, or the reason why no driver was found."""
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
    """Describe the installed torch. To save memory, only a child process imports torch. Raises CheckSkipped."""
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
    except UNDECODABLE as error:
        last = (err.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise CheckSkipped(f"torch cannot be imported: {last[:200]}") from error
