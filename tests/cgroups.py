"""A bound on the processor time of some processes: a control group of version 2 or 1, or stopping them for a part of
the time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

PERIOD_S = 0.1


def cgroup() -> Path | None:
    """A new control group of version 2 or 1 that limits processor time, None where none can be made."""
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
    """These processes have so many cores in all."""
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
            with contextlib.suppress(OSError):  # it has ended
                (folder.parent / "cgroup.procs").write_text(str(pid))
        folder.rmdir()


@contextlib.contextmanager
def stopping(pids: Sequence[int], share: float) -> Iterator[None]:
    """They run for this share of the time."""
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
