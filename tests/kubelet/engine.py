"""Calls of podman with the options that this machine needs.

PODMAN is the command with its own options, such as `podman --root FOLDER --storage-driver overlay`. Further options are
detected: those for a machine without systemd, for control groups of version 1, and for limits that cannot be raised.
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

TIMEOUT_S = 120.0  # limit for one command, high enough for a busy machine
_SYS_RESOURCE = 24  # the number of the capability CAP_SYS_RESOURCE
_PROCESSES = 32768  # the most processes of a container, even without a limit for podman


class EngineError(Exception):
    """Error of podman, with its message."""


@functools.cache
def command() -> tuple[str, ...]:
    words = shlex.split(os.environ.get("PODMAN", "podman"))
    if not Path("/run/systemd/system").is_dir():
        words += ["--cgroup-manager", "cgroupfs"]
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists() and shutil.which("runc"):
        words += ["--runtime", "runc"]  # crun does not support a mix of control groups of versions 1 and 2
    return tuple(words)


@functools.cache
def ulimits() -> tuple[str, ...]:
    """Return options of `create`. Without them podman raises the limits of a container, which needs a capability."""
    (effective,) = (
        int(line.split()[1], 16) for line in Path("/proc/self/status").read_text().splitlines() if "CapEff" in line
    )
    if effective >> _SYS_RESOURCE & 1:
        return ()
    files, processes = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    processes = _PROCESSES if processes == resource.RLIM_INFINITY else min(processes, _PROCESSES)
    return ("--ulimit", f"nofile={files}:{files}", "--ulimit", f"nproc={processes}:{processes}")


def podman(*arguments: str, timeout_s: float = TIMEOUT_S) -> str:
    """Run podman and return its standard output. Raise EngineError, or subprocess.TimeoutExpired."""
    done = run(arguments, timeout_s)
    if done.returncode:
        raise EngineError(f"podman {shlex.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def run(arguments: Sequence[str], timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run podman in the folder for temporary files, because conmon writes a file `oom` there when memory runs out."""
    argv, folder = [*command(), *arguments], tempfile.gettempdir()
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)


def inspect(container: str) -> dict[str, Any]:
    (details,) = json.loads(podman("container", "inspect", container))
    return dict(details)


def has_image(name: str) -> bool:
    return run(["image", "exists", name]).returncode == 0


def missing() -> str:
    """Return the reason why no container can be started here, or an empty string."""
    if os.geteuid():
        return "network namespaces and the users of containers need root"
    absent = [name for name in (command()[0], "nft", "ip") if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""
