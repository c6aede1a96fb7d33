"""Checks of this machine before `sie serve` starts a process: folders, ports, disk, open files, memory.

Each fault is one line: the present state, the need, and the remedy. Without these checks, a process would fail after
its start and be restarted several times, and only its output would have the reason.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sie_cli.display import size
from sie_contracts.models.trust import is_bucket
from sie_contracts.settings import Settings
from sie_contracts.wire import topology
from sie_runtime import control_group
from sie_runtime.descriptors import SPARE_FILES, raise_limit

# bytes of disk space that are kept free for the catalogue's streams, the broker's files, and files written at a start
RESERVE_BYTES = 8 << 20
# Bytes of address space that the largest process needs: an adapter with torch and a small model. 1.8 GiB were measured
# on 2 cores; more threads need more.
MIN_ADDRESS_BYTES = 3 << 30
# Bytes of memory that `sie serve` needs before a model is loaded. MIN_MEMORY_BYTES: with one worker and one gateway
# (0.55 GiB were measured on 2 cores). WORKER_BYTES and GATEWAY_BYTES: for each further worker and each further gateway.
MIN_MEMORY_BYTES, WORKER_BYTES, GATEWAY_BYTES = 640 << 20, 320 << 20, 64 << 20


@dataclass(frozen=True)
class PortListener:
    """Consecutive ports that one flag sets: `port` is the first of `count`."""

    flag: str
    host: str
    port: int
    count: int = 1


@dataclass(frozen=True)
class MachineNeeds:
    """Resources that one `sie serve` needs. `has_broker`: it starts a broker, which stores streams in `data_dir`."""

    listeners: tuple[PortListener, ...]
    data_dir: Path
    has_broker: bool
    gateways: int
    workers: int
    settings: Settings


def faults(needs: MachineNeeds) -> list[str]:
    """Return the faults of this machine, each as a line with the remedy. Also raise the soft limit of open files."""
    return [*_folders(needs), *_ports(needs), *_disk(needs), *_open_files(needs), *_memory(needs)]


def _folders(needs: MachineNeeds) -> Iterator[str]:
    named = needs.settings.models_dir
    if named and not is_bucket(named) and not Path(named).is_dir():
        yield f"--models-dir (SIE_MODELS_DIR): {named} is not a folder: make it, or name another one"


def _ports(needs: MachineNeeds) -> Iterator[str]:
    for listener in needs.listeners:
        for port in range(listener.port, listener.port + listener.count):
            if reason := _cannot_listen(listener.host, port):
                yield f"{listener.flag}: cannot listen on {listener.host}:{port}: {_remedy(listener, port, reason)}"


def _cannot_listen(host: str, port: int) -> OSError | None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            # servers set this option too; with it, old connections in TIME_WAIT do not block the port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error
    return None


def _remedy(listener: PortListener, port: int, reason: OSError) -> str:
    if reason.errno == errno.EADDRINUSE:
        alternative = f"choose another one, such as {listener.flag} {_next_free(listener)}"
        return f"another program uses it; end that program (`ss -ltnp 'sport = :{port}'` names it), or {alternative}"
    if reason.errno == errno.EACCES:
        return f"ports below 1024 need privileges; choose another one, such as {listener.flag} 8080"
    if reason.errno in (errno.EADDRNOTAVAIL, None) or isinstance(reason, socket.gaierror):
        return "that is no address of this machine; choose --host 127.0.0.1, or 0.0.0.0 for all addresses"
    return f"{reason.strerror}; choose another {listener.flag} or --host"


def _next_free(listener: PortListener) -> int:
    for first in range(listener.port + 1, min(listener.port + 1000, 65536 - listener.count)):
        if not any(_cannot_listen(listener.host, first + number) for number in range(listener.count)):
            return first
    return listener.port + 1


def store_bytes(data_dir: Path) -> int:
    """Return the bytes that the broker's streams may use on the disk of the data directory: what they use now, plus the
    free space, minus RESERVE_BYTES.
    """
    return max(0, shutil.disk_usage(data_dir).free + held_bytes(data_dir / "nats") - RESERVE_BYTES)


def held_bytes(folder: Path) -> int:
    """Return the total size of the files below a folder, in bytes. Files that are removed meanwhile are skipped."""
    total = 0
    for base, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(base) / name).stat().st_size
    return total


def _disk(needs: MachineNeeds) -> Iterator[str]:
    queue = needs.settings.queue_max_bytes
    room = shutil.disk_usage(needs.data_dir).free
    if not needs.has_broker or needs.settings.stream_storage == "memory":
        if room < RESERVE_BYTES:
            yield (
                f"--data-dir: the disk of {needs.data_dir} has {size(room)} ({room} bytes) free, {size(RESERVE_BYTES)} "
                "are needed: free some space there, or name a folder on another disk with --data-dir"
            )
        return
    needed = queue + topology.dead_letter_stream("_default", replicas=1, queue_bytes=queue).max_bytes
    room = store_bytes(needs.data_dir)
    if room >= needed:
        return
    least = 1 << 20  # smallest value that SIE_QUEUE_MAX_BYTES accepts
    fitting = room * 4 // 5
    smaller = f", or limit the queue: --queue-max-bytes {fitting}" if fitting >= least else ""
    yield (
        f"--data-dir: the streams of the queue need {size(needed)} ({needed} bytes) in {needs.data_dir / 'nats'}, and "
        f"that disk has room for {size(room)} ({room} bytes): free some space there, name a folder on another disk "
        f"with --data-dir{smaller}"
    )


def _open_files(needs: MachineNeeds) -> Iterator[str]:
    soft = raise_limit()  # child processes inherit the raised limit of open files
    requests = needs.settings.max_concurrent_requests
    needed = requests + SPARE_FILES
    if soft >= needed:
        return
    fitting = int(soft) - SPARE_FILES
    fewer = f", or accept fewer requests at once: --max-concurrent-requests {fitting}" if fitting >= 1 else ""
    yield (
        f"ulimit -n: a process may open {int(soft)} files, and a gateway of {requests} concurrent requests needs "
        f"{needed}: raise the hard limit (`ulimit -Hn`; LimitNOFILE= of a systemd unit, --ulimit nofile={needed} of "
        f"docker, /etc/security/limits.conf){fewer}"
    )


def _memory(needs: MachineNeeds) -> Iterator[str]:
    address = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address != resource.RLIM_INFINITY and address < MIN_ADDRESS_BYTES:
        yield (
            f"ulimit -v: a process may map {size(address)} ({address // 1024} KiB) of memory, and an adapter maps up to"
            f" {size(MIN_ADDRESS_BYTES)} with a small model: start it in a shell with `ulimit -v unlimited`, or at "
            f"least `ulimit -v {MIN_ADDRESS_BYTES // 1024}`"
        )
    limit = control_group.memory_limit()
    needed = MIN_MEMORY_BYTES + (needs.workers - 1) * WORKER_BYTES + (needs.gateways - 1) * GATEWAY_BYTES
    if limit is not None and limit < needed:
        fewer = ", or start fewer with --workers and --gateways" if needs.workers + needs.gateways > 2 else ""
        yield (
            f"memory: this control group (container, systemd unit) may use {size(limit)}, and the processes use "
            f"{size(needed)} before a model is loaded: raise its limit (--memory of docker, MemoryMax= of systemd, "
            f"limits.memory of a pod){fewer}"
        )
