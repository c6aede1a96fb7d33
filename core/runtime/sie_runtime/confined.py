"""Restrictions for a process that will read untrusted files: a memory limit, no output, and its end when its parent
ends. It calls these functions before it reads the first file. Only the standard library is used.
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
    """Limit this process's address space. If the machine runs out of memory, the kernel kills this process first."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would contain input of clients
    if sys.platform.startswith("linux"):  # other systems refuse or ignore RLIMIT_AS
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        with contextlib.suppress(OSError):  # the highest score: the kernel kills this process rather than its parent
            Path("/proc/self/oom_score_adj").write_text("1000")


def die_with(parent: int) -> None:
    """Make the kernel kill this process when the thread that started it ends. `parent`: process id of the parent. Call
    this before the first file is read: a process that hangs while it reads a file would not notice a closed socket.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent had already ended before prctl was called
        os._exit(1)


def silence() -> None:
    """Redirect standard output and error to /dev/null: libraries may print parts of a client's file."""
    null_file = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_file, 1)
    os.dup2(null_file, 2)
    os.close(null_file)
