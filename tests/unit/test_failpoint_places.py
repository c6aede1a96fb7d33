"""Every failpoint of the product is one that a test with real processes arms, and has a name that says where it is."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from armed import PLACES

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "contracts/sie_contracts": "contracts",
    "broker/sie_broker": "broker",
    "runtime/sie_runtime": "runtime",
    "store/sie_store": "store",
    "gateway/sie_gateway": "gateway",
    "sidecar/sie_sidecar": "sidecar",
    "adapter/sie_adapter": "adapter",
    "config_service/sie_config": "config",
    "cli/sie_cli": "cli",
    "sdk/sie_sdk": "sdk",
}


def calls(file: Path) -> list[ast.Call]:
    found = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    return [call for call in found if getattr(call.func, "id", getattr(call.func, "attr", "")) == "failpoint"]


def names() -> list[tuple[str, str]]:
    """Package and name of every failpoint in the product."""
    found = []
    for folder in PACKAGES:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for call in calls(file):
                (argument,) = call.args
                assert isinstance(argument, ast.Constant), f"{file}:{call.lineno}: its name is not written there"
                found.append((folder, argument.value))
    return found


def test_every_failpoint_is_armed_by_a_test_and_nothing_else_is() -> None:
    assert {name for _, name in names()} == PLACES.keys()
    assert len(PLACES) >= 25


def test_a_name_is_that_of_one_place() -> None:
    assert [name for name, count in Counter(name for _, name in names()).items() if count > 1] == []


def test_a_name_begins_with_its_component_or_its_module() -> None:
    for folder, name in names():
        modules = {file.stem for file in (ROOT / folder).rglob("*.py")}
        assert name.split(".")[0] in {PACKAGES[folder], *modules}, name
