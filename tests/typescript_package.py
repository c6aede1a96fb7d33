"""The TypeScript client as an installed and built package, and programs that use it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from made_once import made_once

CLIENT = Path(__file__).parents[1] / "sdk-ts"


def copied(factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package, to which a file of tests may write. A run of the tests builds the package once."""
    package = factory.mktemp("typescript") / "sdk-ts"
    shutil.copytree(made_once(factory, "sdk-ts", _build), package, symlinks=True)
    return package


def _build(package: Path) -> None:
    ignored = shutil.ignore_patterns("node_modules", "dist", "build")
    shutil.copytree(CLIENT, package, ignore=ignored, dirs_exist_ok=True)
    ran(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], package)
    ran(["npm", "run", "build"], package)


def compiled(package: Path) -> None:
    """Compile the programs in the folder `test` to `build/test`, as a user's compiler does. Only changed programs are
    compiled again.
    """
    options = ["--noUncheckedIndexedAccess", "false", "--incremental", "--tsBuildInfoFile", "build/test.json"]
    ran(["npx", "tsc", "--project", "tsconfig.test.json", *options], package)


def ran(command: Sequence[str], package: Path, **environ: str) -> str:
    """Run a command and return its output. Raise AssertionError if it fails."""
    env = {**os.environ, **environ}
    done = subprocess.run(command, cwd=package, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout
