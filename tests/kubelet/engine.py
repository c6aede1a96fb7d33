"""podman, and how it must be called on this machine.

PODMAN: the command and its own options, such as `podman --root FOLDER --storage-driver overlay`. What a machine
needs beside them is found out: a machine without systemd, control groups of version 1, limits that nobody may raise.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0  # of one command, on a machine that others use
_SYS_RESOURCE = 24  # the capability's number
_PROCESSES = 32768  # that podman itself may have, whatever its own limit was


class EngineError(Exception):
    """Error of podman, with its message."""


@functools.cache
def command() -> tuple[str, ...]:
    words = shlex.split(os.environ.get("PODMAN", "podman"))
    if not Path("/run/systemd/system").is_dir():
        words += ["--cgroup-manager", "cgroupfs"]
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists() and shutil.which("runc"):
        words += ["--runtime", "runc"]  # crun takes control groups of version 2 alone, or of version 1 alone
    return tuple(words)


@functools.cache
def ulimits() -> tuple[str, ...]:
    """Options of `create`: podman raises the limits of a container unless it is told, which takes a capability."""
    (effective,) = (
        int(line.split()[1], 16) for line in Path("/proc/self/status").read_text().splitlines() if "CapEff" in line
    )
    if effective >> _SYS_RESOURCE & 1:
        return ()
    files, processes = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    processes = _PROCESSES if processes == resource.RLIM_INFINITY else min(processes, _PROCESSES)
    return ("--ulimit", f"nofile={files}:{files}", "--ulimit", f"nproc={processes}:{processes}")


def podman(*arguments: str, timeout_s: float = TIMEOUT_S) -> str:
    """Its standard output. Raises EngineError, or subprocess.TimeoutExpired."""
    done = run(arguments, timeout_s)
    if done.returncode:
        raise EngineError(f"podman {shlex.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def run(arguments: Sequence[str], timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """In the folder for temporary files: where memory ends, conmon writes a file `oom` where podman was called."""
    argv, folder = [*command(), *arguments], tempfile.gettempdir()
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)


def inspect(container: str) -> dict[str, Any]:
    (details,) = json.loads(podman("container", "inspect", container))
    return dict(details)


def has_image(name: str) -> bool:
    return run(["image", "exists", name]).returncode == 0


def missing() -> str:
    """Why no container can be started here; nothing if one can."""
    if os.geteuid():
        return "network namespaces and the users of containers need root"
    absent = [name for name in (command()[0], "nft", "ip") if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""
