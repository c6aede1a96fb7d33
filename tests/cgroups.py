"""Limits on the processor time and the memory of processes, by a control group of version 2 or 1. Without a group,
processor time is limited by stopping the processes for a part of the time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PERIOD_S = 0.1
END_S = 60.0


def cgroup() -> Path | None:
    """Return a new control group of version 2 or 1 that limits processor time, or None if none can be made."""
    for parent, quota in ((Path("/sys/fs/cgroup"), "cpu.max"), (Path("/sys/fs/cgroup/cpu"), "cpu.cfs_quota_us")):
        folder = parent / f"sie-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            if (folder / quota).exists():
                return folder
            folder.rmdir()
    return None


@contextlib.contextmanager
def limited(pids: Sequence[int], cores: float) -> Iterator[None]:
    """Limit these processes together to so many cores."""
    folder = cgroup()
    if folder is None:
        with stopping(pids, cores / (os.cpu_count() or 1)):
            yield
        return
    try:
        for pid in pids:
            (folder / "cgroup.procs").write_text(str(pid))
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{int(cores * 1e5)} 100000")
        else:
            (folder / "cpu.cfs_period_us").write_text("100000")
            (folder / "cpu.cfs_quota_us").write_text(str(int(cores * 1e5)))
        yield
    finally:
        for pid in [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]:
            with contextlib.suppress(OSError):  # the process has ended
                (folder.parent / "cgroup.procs").write_text(str(pid))
        folder.rmdir()


@contextlib.contextmanager
def stopping(pids: Sequence[int], share: float) -> Iterator[None]:
    """Let these processes run only for this share of the time."""
    over = threading.Event()

    def send(number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def turn() -> None:
        while not over.is_set():
            send(signal.SIGSTOP)
            over.wait(PERIOD_S * (1 - share))
            send(signal.SIGCONT)
            over.wait(PERIOD_S * share)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class MemoryGroup:
    """A control group of version 2 or 1 for processes of a test, with its memory. Raise OSError if none can be made."""

    def __init__(self, name: str) -> None:
        legacy = Path("/sys/fs/cgroup/memory")
        own = Path("/proc/self/cgroup").read_text().splitlines()[0].split(":", 2)[2].strip("/")
        around = legacy if legacy.exists() else Path("/sys/fs/cgroup") / own
        self.folder = around / f"{name}-{os.getpid()}"
        self.folder.mkdir()

    def limit(self, size: int) -> None:
        self._either("memory.max", "memory.limit_in_bytes").write_text(str(size))

    def held(self) -> int:
        return int(self._either("memory.current", "memory.usage_in_bytes").read_text())

    def kills(self) -> int:
        """Return how many of its processes the kernel killed because memory ran out."""
        text = self._either("memory.events", "memory.oom_control").read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])

    def _either(self, name: str, legacy: str) -> Path:
        path = self.folder / name
        return path if path.exists() else self.folder / legacy

    def inside(self, argv: Sequence[str]) -> list[str]:
        """Return the command that starts `argv` in the group."""
        return ["sh", "-c", f'echo $$ > {self.folder / "cgroup.procs"} && exec "$@"', "sh", *argv]

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the group after its processes have ended. Children of a dead process may end a moment later."""
        until_s = time.monotonic() + END_S
        while (self.folder / "cgroup.procs").read_text() and time.monotonic() < until_s:
            time.sleep(0.01)
        self.folder.rmdir()
