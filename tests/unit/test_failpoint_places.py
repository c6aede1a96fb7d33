"""A test with real processes arms every failpoint of the product, whose name states its place."""

from __future__ import annotations

import ast
import functools
from collections import Counter

import measure
import pytest
from armed import PLACES

pytestmark = pytest.mark.xdist_group("sources")  # one process reads them


def calls(tree: ast.AST) -> list[ast.Call]:
    all_calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in all_calls if getattr(call.func, "id", getattr(call.func, "attr", "")) == "failpoint"]


@functools.cache
def names() -> list[tuple[str, str]]:
    """Folder and name of every failpoint in the product."""
    failpoints = []
    for folder in measure.PACKAGES:
        for module in measure.modules(folder):
            for call in calls(module.tree):
                (argument,) = call.args
                assert isinstance(argument, ast.Constant), f"{module.file}:{call.lineno}: its name is not written there"
                failpoints.append((folder, argument.value))
    return failpoints


def test_every_failpoint_is_armed_by_a_test_and_nothing_else_is() -> None:
    assert {name for _, name in names()} == PLACES.keys()
    assert len(PLACES) >= 25


def test_a_name_is_that_of_one_place() -> None:
    assert [name for name, count in Counter(name for _, name in names()).items() if count > 1] == []


def test_a_name_begins_with_its_component_or_its_module() -> None:
    for folder, name in names():
        component = measure.PACKAGES[folder].removeprefix("sie_").removesuffix("_service")
        assert name.split(".")[0] in {component, *(module.file.stem for module in measure.modules(folder))}, name
