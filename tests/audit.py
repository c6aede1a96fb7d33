"""List the versions of constraints.txt that have known vulnerabilities, from a folder of advisories in the OSV format,
which OSV and PyPA publish.

    python tests/audit.py ADVISORIES

The program uses no network. Without a folder it prints that and ends with status 0; with findings it ends with 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def pinned(text: str) -> dict[str, Version]:
    """Return the versions by canonical name. Raise ValueError for a line that pins no version."""
    versions: dict[str, Version] = {}
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        requirement = Requirement(line)
        pins = [specifier.version for specifier in requirement.specifier if specifier.operator == "=="]
        if len(pins) != 1:
            raise ValueError(f"{line}: expected one version, pinned by ==")
        versions[canonicalize_name(requirement.name)] = Version(pins[0])
    return versions


def advisories(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yield all advisories of a folder, in JSON or YAML, at any depth. Raise ValueError if it has no files, because an
    empty folder proves nothing.
    """
    files = sorted(file for file in folder.rglob("*") if file.suffix in (".json", ".yaml", ".yml"))
    if not files:
        raise ValueError(f"{folder} has no advisories")
    for file in files:
        text = file.read_text("utf-8")
        advisory = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
        if isinstance(advisory, dict) and "affected" in advisory and not advisory.get("withdrawn"):
            yield advisory


def is_affected(affected: Mapping[str, Any], version: Version) -> bool:
    """Return True if a version is listed, or lies in a range of events: from `introduced` on, before `fixed`, up to
    `last_affected`.
    """
    if any(_version(affected_version) == version for affected_version in affected.get("versions") or ()):
        return True
    ranges = [
        version_range for version_range in affected.get("ranges") or () if version_range.get("type") == "ECOSYSTEM"
    ]
    return any(_is_within(version_range["events"], version) for version_range in ranges)


def _is_within(events: list[Mapping[str, str]], version: Version) -> bool:
    inside = False
    for event in events:  # the format requires the order of versions
        ((kind, text),) = event.items()
        at = Version("0") if text == "0" else _version(text)
        if at is None:
            continue
        if kind == "introduced" and version >= at:
            inside = True
        elif (kind == "fixed" and version >= at) or (kind == "last_affected" and version > at):
            inside = False
    return inside


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def findings(pins: Mapping[str, Version], records: Iterator[Mapping[str, Any]]) -> list[str]:
    """Return a line for each advisory that affects a pinned version."""
    lines = []
    for advisory in records:
        for affected in advisory["affected"]:
            package = affected.get("package") or {}
            version = pins.get(canonicalize_name(package.get("name", "")))
            if package.get("ecosystem") == "PyPI" and version is not None and is_affected(affected, version):
                lines.append(f"{package['name']}=={version}: {advisory['id']} {advisory.get('summary', '')}".strip())
    return sorted(set(lines))


def age(records: Sequence[Mapping[str, Any]], now: datetime) -> str:
    """Return a line with the number of advisories and the age of the newest, which shows whether the copy is old."""
    changed = [datetime.fromisoformat(str(record["modified"])) for record in records if record.get("modified")]
    if not changed:
        return f"advisories: {len(records)}, of unknown age"
    newest = max(moment if moment.tzinfo else moment.replace(tzinfo=UTC) for moment in changed)
    return f"advisories: {len(records)}, the newest of {newest:%Y-%m-%d}, {(now - newest).days} days ago"


def main(arguments: list[str]) -> int:
    if not arguments or not Path(arguments[0]).is_dir():
        print("no audit: no folder of advisories is at hand (make audit ADVISORIES=folder)")
        return 0
    records = list(advisories(Path(arguments[0])))
    print(age(records, datetime.now(UTC)))
    lines = findings(pinned(CONSTRAINTS.read_text("utf-8")), iter(records))
    print("\n".join(lines) or "no pinned version has a known vulnerability")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
