"""Install SIE into a virtual environment, for `make install`: `python3 tools/installation.py VENV`.

    environment ─► torch ─► SIE       prints one line for each step; the output of pip is in VENV/install.log

    machine                       build of torch
    with an NVIDIA GPU            from the indexes that pip is configured for; on Linux this build has CUDA
    Linux without an NVIDIA GPU   VERSION+cpu, from the configured indexes and wheel folders, else from CPU_INDEX
    any other machine             from the configured indexes, whose builds for this machine have no CUDA

If the environment variable TORCH_INDEX is set, its value is the only index for torch, on every machine. If the value is
empty, torch comes from the configured indexes on every machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LOG = "install.log"
TICK_S = 1.0
# pip's messages if no index has this build of torch; pip prints the second one if its constraints also name torch
_ABSENT = re.compile(
    r"No matching distribution found for torch\b|no matching distributions available for your environment:\s+torch\b"
)


class StepFailed(Exception):
    """Error for a step that failed. The message says what the user can do."""


def has_gpu() -> bool:
    """Return whether the machine has an NVIDIA GPU: a device file, or (in WSL) an entry in the list of nvidia-smi."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.stdout.startswith("GPU ")


class Installer:
    """Installer that runs the steps with the pip of the environment `venv`."""

    def __init__(self, venv: Path, environ: Mapping[str, str]) -> None:
        self.pip: Sequence[str] = [str(venv / "bin/python"), "-m", "pip"]
        self._log = venv / LOG
        self._environ = environ

    def install_torch(self, version: str) -> None:
        """Install the build of torch that fits this machine. Raise StepFailed if pip fails."""
        index = self._environ.get("TORCH_INDEX")
        if index:
            self._install_torch(f"torch {version} of {index}", f"torch=={version}", index)
        elif index is None and sys.platform == "linux" and not has_gpu():
            self._install_cpu_torch(version)
        else:
            build = "build with CUDA, for the NVIDIA GPU here" if index is None and has_gpu() else "default build"
            self._install_torch(f"torch {version}, {build}", f"torch=={version}")

    def _install_cpu_torch(self, version: str) -> None:
        title, named = f"torch {version}, build for CPUs: no NVIDIA GPU is here", f"torch=={version}+cpu"
        try:
            self._install_torch(title, named)
        except StepFailed:
            if not _ABSENT.search(self._tail()):
                raise
            self._install_torch(f"torch {version}+cpu of {CPU_INDEX}", named, CPU_INDEX)

    def _install_torch(self, title: str, named: str, index: str = "") -> None:
        """Install one build of torch. The next step installs the dependencies of torch, with constraints.txt."""
        source = ["--index-url", index, "--retries", "2", "--timeout", "30"] if index else []
        try:
            self.run(title, "--no-deps", *source, named)
        except StepFailed as error:
            if index and _ABSENT.search(self._tail()):
                raise StepFailed(
                    f"no index here offers {named}: neither a configured one nor {index}, which may be out of reach; "
                    f"set TORCH_INDEX to an index that has it. TORCH_INDEX= (empty) installs the build of the "
                    f"configured index; on Linux it has gigabytes of CUDA libraries. The log is {self._log}"
                ) from error
            raise

    def run(self, title: str, *arguments: str) -> None:
        """Run one `pip install`, and print a line with its duration. Raise StepFailed if pip fails."""
        options = ["--disable-pip-version-check", "--no-compile", "--progress-bar", "off"]
        started_s = time.monotonic()
        is_terminal = sys.stdout.isatty()
        with self._log.open("ab") as log:
            log.write(f"== {title}\n".encode())
            log.flush()
            process = subprocess.Popen([*self.pip, "install", *options, *arguments], stdout=log, stderr=log)
            print(f"{title} ...", end=" ", flush=True)
            while True:
                try:
                    status = process.wait(TICK_S)
                    break
                except subprocess.TimeoutExpired:
                    if is_terminal:
                        print(f"\r{title} ... {time.monotonic() - started_s:.0f} s", end=" ", flush=True)
        print(f"\r{title} ... " if is_terminal else "", end="")
        print(f"{time.monotonic() - started_s:.0f} s" if status == 0 else "failed", flush=True)
        if status:
            reasons = [line for line in self._tail().splitlines() if line.startswith("ERROR:")]
            raise StepFailed(f"{reasons[-1] if reasons else f'pip ended with {status}'}; the log is {self._log}")

    def _tail(self) -> str:
        return self._log.read_text("utf-8", "replace").rpartition("\n== ")[2]


def torch_version(root: Path) -> str:
    """Return the version of torch that pyproject.toml requires."""
    match = re.search(r'"torch==([\w.]+)"', (root / "pyproject.toml").read_text("utf-8"))
    assert match is not None
    return match[1]


def main(arguments: Sequence[str]) -> int:
    """Install this checkout of SIE with the extra `serve`. Return the exit status."""
    venv = Path(arguments[0])
    (venv / LOG).unlink(missing_ok=True)
    installer = Installer(venv, os.environ)
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    try:
        installer.install_torch(torch_version(ROOT))
        editable = ["--editable", f"{ROOT}[serve]", "--editable", str(ROOT / "sdk/alias")]
        installer.run("SIE and its libraries", *constraints, *editable)
    except StepFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
