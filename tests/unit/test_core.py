"""The core answers encode, score and extract. It knows no extra, and what is optional in it leaves it."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path

import measure
import pytest
import without_extras

from sie_contracts.models import families

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("sources")  # one process reads them
EXTRAS = measure.PACKAGES.keys() - {measure.FOLDERS[package] for package in measure.CORE}


def _core() -> Iterator[measure.Module]:
    for package in sorted(measure.CORE):
        yield from measure.modules(measure.FOLDERS[package])


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _within(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


def test_core_names_no_package_of_an_extra() -> None:
    """Neither an import nor a string of the core, of its tests or of the tools names one."""
    pattern = re.compile("|".join(rf"\b{measure.PACKAGES[folder]}\b" for folder in EXTRAS) or r"(?!)")
    folders = [*(measure.FOLDERS[package] for package in measure.CORE), "tests", "tools"]
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    assert files
    assert [str(file.relative_to(ROOT)) for file in files if pattern.search(file.read_text("utf-8"))] == []


_OF_PARAMETERS = frozenset({"sie_contracts.api.inference"})
# modules of the core by the names of extras that their strings have, docstrings aside, and why
NAMED: dict[str, Collection[str]] = {
    # remedies for an operator, who has every command in each image
    "doctor": {"sie_adapter.engine.device"},
    "dlq": {"sie_broker.limits", "sie_sidecar.dead_letters"},
    "repair": {
        "sie_broker.nats.keyvalue",
        "sie_cli.serve.processes",
        "sie_config_service.aliases",
        "sie_config_service.mirror",
        "sie_runtime.keys",
    },
    "migrate": {"sie_contracts.settings.cluster"},
    # a purpose of a file, which the client sends
    "jobs": {"sie_contracts.api.batches"},
    # an exporter of spans
    "console": {"sie_contracts.settings.telemetry", "sie_runtime.spans"},
    # a folder of published models, in a format that nothing reads
    "openvino": {"sie_adapter.loading.weight_files", "sie_store.weights.selection"},
    # the parameters of a request are one structure for all families, and their descriptions name those that read them
    **dict.fromkeys(
        ("detector", "document-reader", "docling", "gliclass", "gliner", "gliner2", "laya", "sound-reader"),
        _OF_PARAMETERS,
    ),
    # a capability of models, by which a default model is chosen
    "redact": {"sie_gateway.dialects.selection", "sie_gateway.fleet.capabilities"},
}
UNNAMED = ("sie_client",)  # the client has the verbs of all servers


def test_core_names_no_family_engine_or_command_of_an_extra() -> None:
    points = measure.POINTS
    names = {*points.get("sie.gateway", {}), *points.get("sie.engines", {})} | (
        families.rows().keys() - families.FAMILIES
    )
    commands = {*points.get("sie.commands", {}), *points.get("sie.commands.models", {})}
    names = {name.lower() for name in names}
    pattern = re.compile(
        rf"(?<![\w/.-])({'|'.join(sorted(names, key=len, reverse=True)) or '(?!)'})(?![\w-])"
        rf"|`sie (?:models )?({'|'.join(sorted(commands)) or '(?!)'})\b",
        re.IGNORECASE,
    )
    found: dict[str, set[str]] = {}
    for module in _core():
        if any(_within(module.name, room) for room in UNNAMED):
            continue
        docstrings = {id(node.value) for node in ast.walk(module.tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                for match in pattern.finditer(node.value):
                    found.setdefault((match[1] or match[2]).lower(), set()).add(module.name)
    unexplained = {name: modules - {*NAMED.get(name, ())} for name, modules in found.items()}
    assert {name: modules for name, modules in unexplained.items() if modules} == {}


def test_core_imports_no_package_of_an_extra() -> None:
    packages = {measure.PACKAGES[folder] for folder in EXTRAS}
    edges = [
        f"{module.name} imports {name}"
        for module in _core()
        for name in _imported(module.tree)
        if name.partition(".")[0] in packages
    ]
    assert edges == []


def test_installed_entry_points_are_those_of_pyproject() -> None:
    named = {(group, *entry) for group, entries in measure.POINTS.items() for entry in entries.items()}
    points = importlib.metadata.distribution("sie-cluster").entry_points
    installed = {(point.group, point.name, point.value) for point in points if point.group.startswith("sie.")}
    assert installed == named, "`make test` installs those of pyproject.toml"


def test_extra_leaves_pyproject_with_its_lines() -> None:
    """tools/without_extras.py removes them, and then starts what is left."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    for extra in without_extras.extras().values():
        assert list(without_extras.still_named(text, extra))
        assert list(without_extras.still_named(without_extras.without(text, extra), extra)) == []


def test_extra_has_its_code_its_tests_and_its_page() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    wheel, mypy = project["tool"]["hatch"]["build"], project["tool"]["mypy"]
    for folder in EXTRAS:
        place = ROOT / folder
        assert any(place.glob("tests/**/test_*.py")), folder
        assert any(place.glob("*.md")), folder
        assert folder in wheel["dev-mode-dirs"]
        assert f"{folder}/{measure.PACKAGES[folder]}" in wheel["targets"]["wheel"]["packages"]
        assert f"{folder}/{measure.PACKAGES[folder]}" in mypy["files"]
        assert folder in mypy["mypy_path"].split(":")
