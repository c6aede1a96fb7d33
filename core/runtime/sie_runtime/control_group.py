"""Memory and CPU cores that the control group (cgroup) of this process, for example its container, pod or systemd unit,
allows. Versions 1 and 2 of the kernel's cgroup interface are supported, even if memory and CPU use different ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOUNTS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_NO_LIMIT_BYTES = 1 << 60  # cgroups of version 1 report at least this number of bytes if there is no limit


@dataclass(frozen=True)
class Memory:
    """Memory of a control group. `used_bytes` does not count inactive pages of files, which the kernel can free."""

    used_bytes: int
    limit_bytes: int


def memories() -> list[Memory]:
    """Return the memory of this process's group and of its parent groups. Groups without a limit are omitted."""
    groups = []
    for folder, version in _groups("memory"):
        limit, used, dropped = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        with contextlib.suppress(OSError, ValueError):  # no limit: the file does not exist, or contains "max"
            limit_bytes = int((folder / limit).read_text())
            if limit_bytes >= _NO_LIMIT_BYTES:
                continue
            counters = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # the kernel counts inactive file pages as used; subtract them, because it frees them before an allocation
            # fails
            used_bytes = int((folder / used).read_text()) - int(counters.get(dropped, 0))
            groups.append(Memory(used_bytes, limit_bytes))
    return groups


def memory_limit() -> int | None:
    """Return the smallest memory limit of this process's group and its parents, in bytes; None if not limited."""
    return min((memory.limit_bytes for memory in memories()), default=None)


def oom_kills() -> int:
    """Return how many processes of this group the kernel killed for lack of memory; 0 if the kernel has no counter."""
    for folder, version in _groups("memory"):
        name = "memory.events" if version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError, ValueError):  # no counter: the file does not exist
            counters = dict(line.split() for line in (folder / name).read_text().splitlines())
            return int(counters.get("oom_kill", 0))
    return 0


def cores() -> float | None:
    """Return the smallest CPU quota of this group and its parents, in cores; None if no group has a quota."""
    quotas = []
    for folder, version in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # no quota: the files do not exist, or contain "max"
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0:
                quotas.append(quota / period)
    return min(quotas, default=None)


def _groups(controller: str) -> Iterator[tuple[Path, int]]:
    """Yield (folder, version of the cgroup interface) for the group of this process and all its parents."""
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
        # In a container, `root` is the container's own group, and the folder for `path` may not exist. Callers skip a
        # folder that does not exist, and `root` comes last.
        folder = root / path.strip("/")
        while True:
            yield folder, version
            if folder == root:
                break
            folder = folder.parent
