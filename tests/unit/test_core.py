"""The core answers encode, score and extract. It knows no extra, and what is optional in it leaves it."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Iterator

import measure
import pytest

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
