"""The images of the Dockerfiles under docker/, and their instructions."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALL = sorted((ROOT / "docker").glob("*Dockerfile"))
VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
_SHARED = ROOT / "docker" / "Dockerfile"
Instruction = tuple[str, str]


def _instructions(path: Path) -> list[Instruction]:
    """Return keyword and rest of each instruction, with continued lines joined and without comments."""
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", path.read_text()))
    return [
        (word, " ".join(rest.split()))
        for word, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())
    ]


def stages(path: Path) -> dict[str, list[Instruction]]:
    """Return the stages by name, each with its FROM, without instructions before them. The last name may be empty."""
    stages_by_name: dict[str, list[Instruction]] = {}
    name: str | None = None
    for word, rest in _instructions(path):
        if word == "FROM":
            name = rest.partition(" AS ")[2]
            stages_by_name[name] = []
        if name is not None:
            stages_by_name[name].append((word, rest))
    return stages_by_name


def dockerfile(image: str) -> Path:
    own = _SHARED.with_name(f"{image}.Dockerfile")
    return own if own in ALL else _SHARED


def last_stage(image: str) -> list[Instruction]:
    """Return the instructions that build the image: its last stage after the stages that it is built on."""
    stages_by_name = stages(dockerfile(image))
    lines, name = [], ""
    while name in stages_by_name:
        lines[:0] = stages_by_name[name][1:]
        name = stages_by_name[name][0][1].partition(" AS ")[0].replace("${COMPONENT}", image)
    return lines


def images() -> list[str]:
    """Return the names of the images. Those of the shared Dockerfile are its stages with an ENTRYPOINT."""
    shared = [name for name, stage in stages(_SHARED).items() if "ENTRYPOINT" in dict(stage)]
    return sorted([*shared, *(path.name.removesuffix(".Dockerfile") for path in ALL if path != _SHARED)])


def health_check(image: str) -> list[str]:
    command: list[str] = json.loads(dict(last_stage(image))["HEALTHCHECK"].partition("CMD ")[2])
    return command


def installed(image: str) -> list[str]:
    """Return the requirements that an image installs; `.` is the project."""
    steps = " && ".join(rest for word, rest in stages(dockerfile(image))["dependencies"] if word == "RUN")
    steps = steps.replace("$COMPONENT", image)
    if not image.startswith("adapter-") and image != "serve":
        steps = re.sub(r"case .*? esac", "", steps)
    words = [word.strip("\"';") for command in steps.split("&&") for word in _requirements(command)]
    return [word for word in words if re.match(r"\.\[|[a-z][a-z-]*==", word)]


def _requirements(command: str) -> list[str]:
    match = re.search(r"pip --python /opt/sie/bin/python install (.*)", command)
    return match[1].split() if match else []


def budgets() -> dict[str, int]:
    """Return the bytes that each image may add to its base, from the table in docs/kubernetes.md."""
    page = (ROOT / "docs" / "kubernetes.md").read_text("utf-8")
    rows = re.findall(r"^\| `sie-([a-z-]+)` \| [\d ]+ \| ([\d ]+) \|$", page, re.MULTILINE)
    return {image: int(mb.replace(" ", "")) * 1_000_000 for image, mb in rows}
