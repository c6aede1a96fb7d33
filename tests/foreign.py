"""Virtual environments for unmodified public distributions, with the Python that runs the tests.

The public SDK declares a newer Python than it needs. So pip installs the requirements of a distribution by its rules,
and the distribution itself without a check of the Python version.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
ANY_PYTHON = ("--no-deps", "--ignore-requires-python")
PUBLIC = re.compile(r"sie-[a-z]+$")  # distributions of the public SDK's authors


class Environment:
    """A virtual environment in `folder`, without a pip of its own."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / "bin" / "python"
        self._wheels = folder / "wheels"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)

    def install(self, *requirements: str, options: tuple[str, ...] = ()) -> None:
        self._pip("install", "--no-compile", *options, *requirements)

    def uninstall(self, *names: str) -> None:
        self._pip("uninstall", "--yes", *names)

    def install_public(self, *pins: str) -> None:
        """Install public distributions, `name==version`, and what they require."""
        wheels = self._downloaded(*pins)
        self.install(*(need for wheel in wheels for need in _requirements(wheel)))
        self.install(*map(str, wheels), options=ANY_PYTHON)

    def solve(self, *requirements: str, public: tuple[str, ...]) -> None:
        """Fail if pip finds no versions that `requirements` and the requirements of public distributions accept."""
        needs = (need for wheel in self._downloaded(*public) for need in _requirements(wheel))
        self.install(*requirements, *needs, options=("--dry-run",))

    def _downloaded(self, *pins: str) -> list[Path]:
        self._pip("download", *ANY_PYTHON, "--dest", str(self._wheels), *pins)
        names = {pin.partition("==")[0].replace("-", "_") for pin in pins}
        return [path for path in sorted(self._wheels.glob("*.whl")) if path.name.split("-")[0] in names]

    def _pip(self, *arguments: str) -> None:
        done = subprocess.run(
            [*PIP[:3], "--python", str(self.python), *PIP[3:], *arguments], capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout + done.stderr


def _requirements(wheel: Path) -> list[str]:
    """Return the requirements of a wheel without extras and without other public distributions."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(member for member in archive.namelist() if member.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    return [line for line in lines if "extra ==" not in line and not PUBLIC.match(re.split(r"[^a-z0-9-]", line)[0])]
