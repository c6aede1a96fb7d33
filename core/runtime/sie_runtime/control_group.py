"""The control groups of this process: what a container, a pod or a unit of systemd leaves it of the machine. Both
versions of the kernel's interface, and machines that have version 1 for some controllers beside version 2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOUNTS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_NO_LIMIT_BYTES = 1 << 60  # what version 1 calls no limit


@dataclass(frozen=True)
class Memory:
    """Memory of one group: the bytes of all of its processes, without those that the kernel gives back first, and its
    limit.
    """

    used_bytes: int
    limit_bytes: int


def memories() -> list[Memory]:
    """Read the memory of the group of this process and of those around it, where they have a limit."""
    groups = []
    for folder, version in _groups("memory"):
        limit, used, dropped = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        with contextlib.suppress(OSError, ValueError):  # not one of this version, or "max"
            limit_bytes = int((folder / limit).read_text())
            if limit_bytes >= _NO_LIMIT_BYTES:
                continue
            counters = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # file pages that nobody used lately are counted as used, but are given back before anything fails
            used_bytes = int((folder / used).read_text()) - int(counters.get(dropped, 0))
            groups.append(Memory(used_bytes, limit_bytes))
    return groups


def memory_limit() -> int | None:
    """The tightest, in bytes. None without one."""
    return min((memory.limit_bytes for memory in memories()), default=None)


def oom_kills() -> int:
    """Return the number of processes of this group that the kernel killed because memory had ended. 0 where it does not
    tell.
    """
    for folder, version in _groups("memory"):
        name = "memory.events" if version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError, ValueError):  # not one of this version
            counters = dict(line.split() for line in (folder / name).read_text().splitlines())
            return int(counters.get("oom_kill", 0))
    return 0


def cores() -> float | None:
    """Read how many of the machine's cores the quota of this group, or of one around it, leaves. None without a
    quota.
    """
    quotas = []
    for folder, version in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # not one of this version, or "max"
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0:
                quotas.append(quota / period)
    return min(quotas, default=None)


def _groups(controller: str) -> Iterator[tuple[Path, int]]:
    """Folders from the group of this process up to the root, each with the version of its interface."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, version = _MOUNTS, 2
        elif controller in controllers.split(","):
            root, version = _MOUNTS / controller, 1
        else:
            continue
        # in a container the root is its own group, and the path may be one of the host's
        folder = root / path.strip("/")
        while True:
            yield folder, version
            if folder == root:
                break
            folder = folder.parent
