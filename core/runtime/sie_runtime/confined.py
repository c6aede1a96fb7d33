"""Confinement of a process that will read untrusted files: limits, no output, and an end when its parent ends. The
process calls these functions before it reads the first file. Only the standard library is used.
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
    """Limit the address space of this process, and have the kernel kill it before other processes if memory runs
    out.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would contain input of clients
    if sys.platform.startswith("linux"):  # other systems refuse or ignore this limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        with contextlib.suppress(OSError):  # if memory runs out, the kernel kills this process and not its parent
            Path("/proc/self/oom_score_adj").write_text("1000")


def die_with(parent: int) -> None:
    """End this process when the thread that started it ends. `parent` is the id of the parent process. Call it before
    the first file is read: code that hangs on a file does not notice a closed socket.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call of prctl
        os._exit(1)


def silence() -> None:
    """Send the output of libraries to /dev/null. After this call the process reads files of clients, and a library
    might print parts of them.
    """
    null_file = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_file, 1)
    os.dup2(null_file, 2)
    os.close(null_file)
