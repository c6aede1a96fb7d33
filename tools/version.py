"""Version of SIE. pyproject.toml defines the version; this script copies it to other files.

    python tools/version.py            print the version; status 1, and a line for each file with another version
    python tools/version.py 0.2.0      write this version to all files

COPIES lists these files, with a pattern for the text before the version.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "pyproject.toml"
_IMAGE = r"\bsie-(?:gateway|config|sidecar|adapter-cpu|adapter-cuda|\$image|\$name):"
# glob of files -> regular expression for the text before a version in these files
COPIES = {
    "core/contracts/sie_contracts/__init__.py": r'^__version__ = "',
    "sdk/alias/pyproject.toml": r'^version = "',
    "charts/sie-cluster/Chart.yaml": r'^(?:version: |appVersion: ")',
    "docker-compose.yml": _IMAGE,
    "README.md": _IMAGE + r"|\bsie[-_]cluster-",
    "docs/*.md": _IMAGE + r"|\bsie[-_]cluster-",
}
_VERSION = r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?"


def current(root: Path = ROOT) -> str:
    return str(tomllib.loads((root / SOURCE).read_text("utf-8"))["project"]["version"])


def copies(root: Path = ROOT) -> Iterator[tuple[Path, re.Pattern[str]]]:
    """Yield each file with copies of the version, and a pattern of a copy; group 2 of a match is the version."""
    for places, before in COPIES.items():
        for path in sorted(root.glob(places)):
            yield path, re.compile(f"({before})({_VERSION})", re.MULTILINE)


def found(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yield the place (file:line) and the version of each copy."""
    for path, pattern in copies(root):
        text = path.read_text("utf-8")
        for match in pattern.finditer(text):
            yield f"{path.relative_to(root)}:{text.count(chr(10), 0, match.start(2)) + 1}", match[2]


def write(version: str, root: Path = ROOT) -> None:
    """Write the version to all files. Raise ValueError for a version of another form than 0.2.0 or 0.2.0rc1."""
    if not re.fullmatch(_VERSION, version):
        raise ValueError(f"{version}: expected a version such as 0.2.0 or 0.2.0rc1")
    source = root / SOURCE
    text = source.read_text("utf-8")
    source.write_text(re.sub(r'(?m)^version = ".*"$', f'version = "{version}"', text, count=1), "utf-8")
    for path, pattern in copies(root):
        text = path.read_text("utf-8")
        path.write_text(pattern.sub(rf"\g<1>{version}", text), "utf-8")


def main(arguments: list[str]) -> int:
    if arguments:
        write(arguments[0])
    version = current()
    wrong = [f"{place} has {copy_version}" for place, copy_version in found() if copy_version != version]
    print(version, *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
