"""The TypeScript client as a package that is installed and built, and programs that use it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

CLIENT = Path(__file__).parents[1] / "sdk-ts"


def copied(folder: Path) -> Path:
    """A copy of the package, with what it needs."""
    package = folder / "sdk-ts"
    shutil.copytree(CLIENT, package, ignore=shutil.ignore_patterns("node_modules", "dist", "build"))
    ran(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], package)
    ran(["npm", "run", "build"], package)
    return package


def compiled(package: Path) -> None:
    """Compile the programs in its folder `test` to `build/test`, as a user's compiler does it."""
    ran(["npx", "tsc", "--project", "tsconfig.test.json", "--noUncheckedIndexedAccess", "false"], package)


def ran(command: Sequence[str], package: Path, **environ: str) -> str:
    """What a command says. Raises AssertionError when it fails."""
    env = {**os.environ, **environ}
    done = subprocess.run(command, cwd=package, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout
