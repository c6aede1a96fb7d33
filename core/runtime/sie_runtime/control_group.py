"""Control groups of this process: the memory and the cores that a container, a pod or a systemd unit may use. Supports
both versions of the kernel's interface, and machines with version 1 for some controllers and version 2 for others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOUNTS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_NO_LIMIT_BYTES = 1 << 60  # version 1 of cgroups reports this number or a larger one if there is no limit


@dataclass(frozen=True)
class Memory:
    """Memory of one group: its limit, and the bytes that its processes use without the file pages that the kernel frees
    first.
    """

    used_bytes: int
    limit_bytes: int


def memories() -> list[Memory]:
    """Read the memory of the group of this process and of its parent groups. Groups without a limit are left out."""
    groups = []
    for folder, version in _groups("memory"):
        limit, used, dropped = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        with contextlib.suppress(OSError, ValueError):  # the file does not exist, or has "max", which means no limit
            limit_bytes = int((folder / limit).read_text())
            if limit_bytes >= _NO_LIMIT_BYTES:
                continue
            counters = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # inactive file pages are counted as used, but the kernel frees them before an allocation fails
            used_bytes = int((folder / used).read_text()) - int(counters.get(dropped, 0))
            groups.append(Memory(used_bytes, limit_bytes))
    return groups


def memory_limit() -> int | None:
    """Return the smallest memory limit of these groups in bytes; None if no group has a limit."""
    return min((memory.limit_bytes for memory in memories()), default=None)


def oom_kills() -> int:
    """Return the number of processes of this group that the kernel killed because memory ran out; 0 if the kernel does
    not count them.
    """
    for folder, version in _groups("memory"):
        name = "memory.events" if version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError, ValueError):  # this error means that the file does not exist
            counters = dict(line.split() for line in (folder / name).read_text().splitlines())
            return int(counters.get("oom_kill", 0))
    return 0


def cores() -> float | None:
    """Return the smallest CPU quota of this group and its parent groups, in cores; None if no group has a quota."""
    quotas = []
    for folder, version in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # the files do not exist, or have "max", which means no limit
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0:
                quotas.append(quota / period)
    return min(quotas, default=None)


def _groups(controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folders from the group of this process up to the root, each with the version of its cgroup
    interface.
    """
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return  # the system is not Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, version = _MOUNTS, 2
        elif controller in controllers.split(","):
            root, version = _MOUNTS / controller, 1
        else:
            continue
        # in a container the root is the container's own group, and `path` may exist only on the host
        folder = root / path.strip("/")
        while True:
            yield folder, version
            if folder == root:
                break
            folder = folder.parent
