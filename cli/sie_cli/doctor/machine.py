"""This machine: sockets of its workers, and its disks."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from sie_cli.display import counted, size
from sie_cli.doctor.finding import CheckResult, Finding
from sie_cli.doctor.look import CheckSkipped, ClusterProbe
from sie_cli.serve.preflight import held_bytes
from sie_contracts.settings import store_url

MIN_FREE_BYTES = 256 << 20


async def sockets(look: ClusterProbe) -> CheckResult:
    """The sockets between sidecars and adapters."""
    probed = await look.sockets()
    findings = [Finding(socket.wrong, socket.fix) for socket in probed if socket.wrong]
    unseen = [str(socket.path) for socket in probed if socket.is_unseen]
    if unseen and not findings:
        raise CheckSkipped(f"another user's: {', '.join(unseen)}; run as the worker's user")
    return f"{counted(len(probed), 'adapter')} answer" + ("s" if len(probed) == 1 else ""), findings


async def disk(look: ClusterProbe) -> CheckResult:
    """Room for weights, payloads and the queue, on the disks of this machine."""
    return await asyncio.to_thread(_disks, look)


def _disks(look: ClusterProbe) -> CheckResult:
    from sie_store.disk import usage

    settings, findings, notes = look.settings, [], []
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
    payloads = _payload_folder(look)
    if payloads is not None:
        free = usage(payloads).free
        notes.append(f"payloads {size(free)} free")
        if free < MIN_FREE_BYTES:
            fix = "free space there, or set SIE_PAYLOAD_STORE_URL to a larger folder or a bucket"
            wrong = (
                f"the disk of the payload store ({payloads}) has {size(free)} left: {_filled(payloads, look.data_dir)}"
            )
            findings.append(Finding(wrong, fix))
        elif payloads.exists() and not os.access(payloads, os.W_OK):
            fix = f"`chown` {payloads} to the user of gateways and workers, or set SIE_PAYLOAD_STORE_URL"
            findings.append(Finding(f"the payload store {payloads} cannot be written by this user", fix))
    store = look.data_dir / "nats"
    if store.exists():
        free, room = usage(store).free, settings.queue_max_bytes - held_bytes(store)
        notes.append(f"queue {size(free)} free")
        if free < room:
            fix = "free space there, give `sie serve` a --data-dir on a larger disk, or lower SIE_QUEUE_MAX_BYTES"
            wrong = f"the queue may grow by {size(room)}, but its disk ({store}) has {size(free)} left"
            findings.append(Finding(f"{wrong}: {_filled(store, look.data_dir)}", fix))
    return ", ".join(notes), findings


def _filled(folder: Path, data_dir: Path) -> str:
    """The file system of a folder, and how much of it `sie serve` has filled itself."""
    place = folder.absolute()
    while not os.path.ismount(place):
        place = place.parent
    whole = shutil.disk_usage(place)
    own = held_bytes(data_dir) if place in (data_dir, *data_dir.parents) else 0
    return (
        f"the file system {place} of {size(whole.total)} has {whole.free} bytes free, the data directory {data_dir} "
        f"holds {size(own)} of it, other files {size(max(0, whole.used - own))}"
    )


def _payload_folder(look: ClusterProbe) -> Path | None:
    if look.settings.payload_store_url:
        store = store_url(look.settings.payload_store_url)
        return Path(store.path) if store.scheme == "file" else None
    return look.data_dir / "payloads" if (look.data_dir / "payloads").exists() else None
