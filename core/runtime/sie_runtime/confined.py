"""Confinement of a process that will read files of strangers: limits, and an end when its parent ends. It comes first
in the process. Only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def limit(memory_bytes: int) -> None:
    """Bound the address space of this process, and have the kernel end it before others."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core holds what clients sent
    if sys.platform.startswith("linux"):  # elsewhere the limit is refused or ignored
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        with contextlib.suppress(OSError):  # without memory the kernel ends this process first, not its parent
            Path("/proc/self/oom_score_adj").write_text("1000")


def die_with(parent: int) -> None:
    """End when the thread that started this process ends. To be called before the first file: code that hangs does not
    read the socket.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(1)


def silence() -> None:
    """Silence the output of libraries. From now on this process reads what clients sent, and a library might quote
    it.
    """
    null_file = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_file, 1)
    os.dup2(null_file, 2)
    os.close(null_file)
