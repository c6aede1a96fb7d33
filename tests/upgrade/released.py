"""The version that an upgrade starts from: the commit in `FROM`, and its processes in an environment of their own.

FROM ──► git archive ──► .venv-upgrade, installed as `make install` does, with that version's own pins
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cluster import SIE

ROOT = Path(__file__).parents[2]
COMMIT = Path(__file__).with_name("FROM").read_text().splitlines()[-1]
VENV = ROOT / ".venv-upgrade"
INSTALL_S = 1200.0


@dataclass(frozen=True)
class Version:
    """`sie` is the command line that starts its processes."""

    name: str
    sie: tuple[str, ...]


NEW = Version("new", (sys.executable, SIE))


def absent() -> str:
    """Why the commit cannot be had, or nothing."""
    if shutil.which("git") is None:
        return "git is not installed"
    done = subprocess.run(
        ["git", "-C", str(ROOT), "cat-file", "-e", f"{COMMIT}^{{commit}}"], capture_output=True, text=True, check=False
    )
    return (
        f"this clone has no commit {COMMIT}, from which the upgrade starts: git fetch --unshallow"
        if done.returncode
        else ""
    )


def files_under(folder: str) -> dict[str, bytes]:
    """Name and content of the files below a folder, as they were; of a file itself under its whole name."""
    names = _git("ls-tree", "-r", "--name-only", COMMIT, "--", folder).decode().splitlines()
    return {name.removeprefix(f"{folder}/"): _git("show", f"{COMMIT}:{name}") for name in names}


def extract(into: Path, *paths: str) -> None:
    """Write its files below `paths`, all of them without any, into a folder."""
    archive = io.BytesIO(_git("archive", COMMIT, *paths))
    with tarfile.open(fileobj=archive) as packed:
        packed.extractall(into, filter="data")


def installed() -> Version:
    """The old version, installed where it is not: some 1.4 GB, once. Raises CalledProcessError, TimeoutExpired."""
    marker = VENV / ".installed"
    if not (marker.exists() and marker.read_text() == COMMIT):
        shutil.rmtree(VENV, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], timeout=INSTALL_S, check=True)
        with tempfile.TemporaryDirectory() as folder:
            extract(Path(folder))
            torch = next(
                line for line in Path(folder, "constraints.txt").read_text().splitlines() if line.startswith("torch==")
            )
            for what in ([torch], ["--constraint", f"{folder}/constraints.txt", f"{folder}[serve]"]):
                pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
                subprocess.run([*pip, *what], timeout=INSTALL_S, check=True)
        marker.write_text(COMMIT)
    return Version("old", (str(VENV / "bin" / "python"), str(VENV / "bin" / "sie")))


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, timeout=60, check=True).stdout
