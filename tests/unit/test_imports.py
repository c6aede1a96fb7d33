"""Imports that are allowed between packages, modules that stay out of a process, and the public names of the SDK."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import measure
import pytest
from measure import CORE as CORE_PACKAGES
from measure import FOLDERS

pytestmark = pytest.mark.xdist_group("sources")  # one process reads them
# package of an extra -> packages of the extras that it may use
USES = measure.OF_EXTRAS.get("uses", {})
# contracts < broker < runtime < store < components < cli: what each package may import
SHARED = ("sie_contracts", "sie_broker", "sie_runtime", "sie_store")
BELOW = {
    "sie_contracts": (),
    "sie_broker": SHARED[:1],
    "sie_runtime": SHARED[:2],
    "sie_store": ("sie_contracts", "sie_runtime"),
    "sie_gateway": SHARED,
    "sie_sidecar": SHARED,
    "sie_adapter": ("sie_contracts", "sie_runtime", "sie_store"),
    "sie_config_service": SHARED,
    "sie_client": SHARED[:1],
    "sie_cli": tuple(CORE_PACKAGES),
    **{extra: (*CORE_PACKAGES, *USES.get(extra, ())) for extra in FOLDERS.keys() - CORE_PACKAGES},
}
WITHOUT_TORCH = (
    "sie_contracts",
    "sie_broker",
    "sie_runtime",
    "sie_store",
    "sie_gateway",
    "sie_sidecar",
    "sie_config_service",
    "sie_client",
    "sie_cli",
)
HEAVY = {"torch", "transformers", "safetensors", "sentence_transformers"}


def files(package: str) -> Iterator[tuple[str, ast.Module]]:
    """Every module of a package, by its dotted name."""
    for module in measure.modules(FOLDERS[package]):
        yield module.name, module.tree


def imported(tree: ast.AST) -> set[str]:
    """Return all modules that the tree imports, inside functions too."""
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            modules.add(node.module or "")
    return modules


def tops(tree: ast.AST) -> set[str]:
    return {name.partition(".")[0] for name in imported(tree)}


@pytest.mark.parametrize("package", FOLDERS)
def test_imports_go_down_the_layers_and_never_to_another_component(package: str) -> None:
    """The command line starts all components and may know them."""
    allowed = {package, *BELOW[package]}
    for module, tree in files(package):
        assert tops(tree) & FOLDERS.keys() <= allowed, module


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_only_the_adapter_imports_what_is_heavy(package: str) -> None:
    for module, tree in files(package):
        assert tops(tree) & HEAVY == set(), module


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "packages",
    [("sie_gateway",), ("sie_sidecar",), ("sie_config_service",), ("sie_client",)],
    ids=lambda names: names[0],
)
def test_torch_is_not_even_imported_by_what_is_imported(packages: tuple[str, ...]) -> None:
    """A separate process imports every module of the component, of the contracts and of the store."""
    modules = [module for package in (*packages, "sie_contracts", "sie_store") for module, _ in files(package)]
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\nprint(*sorted({HEAVY!r} & "
        "sys.modules.keys()))"
    )
    assert python(code).split() == []


UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
UNSAFE_NAMES = {"eval", "exec"}
UNSAFE_LOADS = {("np", "load"), ("numpy", "load"), ("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load")}


@pytest.mark.parametrize("package", FOLDERS)
def test_nothing_can_execute_what_was_received(package: str) -> None:
    """No module uses eval or a loader that runs code. A module may name the error of pickle, and load only tensors with
    torch.load.
    """
    for module, tree in files(package):
        safe: set[ast.AST] = set()  # walking is breadth first: a call comes before its function
        assert not tops(tree) & UNSAFE_MODULES - {"pickle"}, module
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.module != "pickle", f"{module}:{node.lineno}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert "weights_only=True" in map(ast.unparse, node.keywords), f"{module}:{node.lineno}"
                safe.add(node.func)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in UNSAFE_NAMES, f"{module}:{node.lineno}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in UNSAFE_LOADS or node in safe, f"{module}:{node.lineno}"
                assert node.value.id != "pickle" or node.attr == "UnpicklingError", f"{module}:{node.lineno}"


@pytest.mark.parametrize("package", ["sie_gateway", "sie_sidecar", "sie_config_service"])
def test_a_process_does_not_import_what_only_few_requests_need(package: str) -> None:
    """These libraries would add 3 to 15 MB to each process, and up to 0.3 s to its start."""
    program = (
        "import sys, sie_cli.entry, sie_cli.main; sie_cli.main.main = lambda: None; sie_cli.entry.main(); "
        f"import {package}.process; "
        "rare = {'phonenumbers', 'sentencex', 'regex', 'markdown_it', 'rich', 'pygments', 'fastapi', 'pydantic'}; "
        "print(*(rare & sys.modules.keys()))"
    )
    assert python(program).split() == []
