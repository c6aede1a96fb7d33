"""The core answers encode, score and extract. It knows no extra, and what is optional in it leaves it."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import measure
import pytest
import without_extras

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("sources")  # one process reads them
EXTRAS = measure.PACKAGES.keys() - {measure.FOLDERS[package] for package in measure.CORE}
# modules that are optional and still in the packages of the core, and the imports of them from the rest of the core.
# A number may only fall; a row without imports leaves for extras/
OPTIONAL = {
    "sie_cli.jobs": 0,
    "sie_gateway.dialects.cohere": 1,
    "sie_gateway.dialects.contextual": 1,
    "sie_gateway.dialects.infinity": 1,
    "sie_gateway.dialects.ollama": 3,
    "sie_gateway.dialects.tei": 2,
    "sie_gateway.dialects.transcriptions": 1,
    "sie_gateway.dialects.voyage": 2,
    "sie_gateway.jobs": 0,
    "sie_gateway.operations.doctor": 2,
    "sie_gateway.operations.history": 2,
    "sie_gateway.operations.ollama": 1,
    "sie_gateway.operations.overview": 1,
    "sie_store.datasets": 0,
    "sie_store.sinks": 0,
}


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


def test_core_has_no_more_imports_of_what_is_optional() -> None:
    edges = Counter(dict.fromkeys(OPTIONAL, 0))
    for module in _core():
        if not any(_within(module.name, room) for room in OPTIONAL):
            imported = set(_imported(module.tree))
            edges.update(room for room in OPTIONAL if any(_within(name, room) for name in imported))
    assert dict(edges) == OPTIONAL


def test_extra_leaves_pyproject_with_its_lines() -> None:
    """tools/without_extras.py removes them, and then starts what is left."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    for extra in without_extras.extras().values():
        assert list(without_extras.still_named(text, extra))
        assert list(without_extras.still_named(without_extras.without(text, extra), extra)) == []


def test_extra_has_its_code_its_tests_and_its_page() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    wheel = project["tool"]["hatch"]["build"]
    for folder in EXTRAS:
        place = ROOT / folder
        assert any(place.glob("tests/**/test_*.py")), folder
        assert any(place.glob("*.md")), folder
        assert folder in wheel["dev-mode-dirs"]
        assert f"{folder}/{measure.PACKAGES[folder]}" in wheel["targets"]["wheel"]["packages"]
