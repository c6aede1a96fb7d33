"""Detection of a process's control groups, of both versions of the kernel's interface."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from sie_adapter.engine import device
from sie_runtime import control_group
from sie_runtime.control_group import Memory


def holding(text: str, inactive: int, *, version: int) -> dict[str, str]:
    used, limit, key = (
        ("memory.current", "memory.max", "inactive_file")
        if version == 2
        else ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file")
    )
    events = {2: ("memory.events", "oom 9\noom_kill 3"), 1: ("memory.oom_control", "under_oom 0\noom_kill 3")}[version]
    return {used: "100", limit: text, "memory.stat": f"cache 1\n{key} {inactive}", events[0]: events[1]}


def quota(text: str, period: int = 100_000) -> dict[str, str]:
    return {"cpu.cfs_quota_us": text, "cpu.cfs_period_us": str(period)}


UNLIMITED = "9223372036854771712"  # no limit, in version 1
# /proc/self/cgroup, files by folder, memories, cores
CASES = {
    "version 2, the one around binds as well": (
        "0::/a/b\n",
        {"a/b": {**holding("700", 10, version=2), "cpu.max": "max 100000"}, "a": {"cpu.max": "150000 100000"}},
        [Memory(90, 700)],
        1.5,
    ),
    "version 2, limits around": (
        "0::/a/b\n",
        {"a/b": holding("700", 0, version=2), "a": holding("500", 20, version=2), "": holding("max", 0, version=2)},
        [Memory(100, 700), Memory(80, 500)],
        None,
    ),
    "version 1, in a container that sees the path of the host": (
        "12:cpu,cpuacct:/pods/one\n4:memory:/pods/one\n1:name=systemd:/\n0::/\n",
        {"memory": holding("900", 30, version=1), "cpu": quota("50000")},
        [Memory(70, 900)],
        0.5,
    ),
    "version 1, without limits": (
        "12:cpu,cpuacct:/\n4:memory:/\n",
        {"memory": holding(UNLIMITED, 0, version=1), "cpu": quota("-1")},
        [],
        None,
    ),
    "not Linux": (None, {}, [], None),
}


@pytest.mark.parametrize(("own", "folders", "memories", "cores"), CASES.values(), ids=CASES)
def test_the_limits_of_a_group_and_those_around_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: str | None,
    folders: Mapping[str, Mapping[str, str]],
    memories: list[Memory],
    cores: float | None,
) -> None:
    for folder, files in folders.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / folder / name).write_text(f"{text}\n")
    if own is not None:
        (tmp_path / "own").write_text(own)
    monkeypatch.setattr(control_group, "_MOUNTS", tmp_path)
    monkeypatch.setattr(control_group, "_OWN", tmp_path / "own")
    assert control_group.memories() == memories
    assert control_group.memory_limit() == min((memory.limit_bytes for memory in memories), default=None)
    assert control_group.cores() == cores
    assert control_group.oom_kills() == (3 if own is not None else 0)


@pytest.mark.parametrize(("quota", "lanes"), [(None, 4), (0.5, 1), (1.0, 1), (2.5, 2), (64.0, 4)])
def test_an_adapter_runs_as_many_lanes_as_whole_cores(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, lanes: int
) -> None:
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    monkeypatch.setattr(control_group, "cores", lambda: quota)
    assert device.usable_cores() == lanes
