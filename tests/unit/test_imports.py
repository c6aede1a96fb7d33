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

# modules of pure functions and plain data, which import only the standard library, msgspec, numpy and each other
CORE = {
    "sie_contracts.models.alias_checks",
    "sie_contracts.models.aliases",
    "sie_contracts.api.inference",
    "sie_contracts.api.shapes",
    "sie_contracts.models.costs",
    "sie_contracts.models.bundles",
    "sie_contracts.media.documents",
    "sie_contracts.names",
    "sie_contracts.body_values",
    "sie_contracts.json_faults",
    "sie_contracts.plain",
    "sie_contracts.wire.trace_context",
    "sie_contracts.wire.messages",
    "sie_contracts.models.option_values",
    "sie_contracts.models.options",
    "sie_contracts.models.output_schemas",
    "sie_contracts.wire.heartbeats",
    "sie_contracts.media.images",
    "sie_contracts.media.media",
    "sie_contracts.media.sounds",
    "sie_contracts.wire.device_reports",
    "sie_contracts.wire.ipc",
    "sie_contracts.wire.records",
    "sie_contracts.wire.topology",
    "sie_contracts.models.catalogue",
    "sie_contracts.wire.child_frames",
    "sie_contracts.models.entries",
    "sie_contracts.entry_points",
    "sie_contracts.errors",
    "sie_contracts.models.families",
    "sie_contracts.arrays",
    "sie_contracts.settings",
    "sie_contracts.settings.batching",
    "sie_contracts.settings.cluster",
    "sie_contracts.settings.models",
    "sie_contracts.settings.rows",
    "sie_contracts.settings.telemetry",
    "sie_contracts.settings.values",
    "sie_contracts.settings.worker",
    "sie_contracts.models.muvera",
    "sie_sidecar.batch",
    "sie_sidecar.prepare.media_frames",
    "sie_contracts.wire.placement",
    "sie_gateway.inference.chunk_fields",
    "sie_gateway.inference.body",
    "sie_gateway.inference.images",
    "sie_gateway.admission.model_queue",
    "sie_gateway.admission.retry_slots",
}
CORE_MAY_USE = {"msgspec", "numpy", "sie_contracts"}
# modules that turn texts into rows of ids, which also import libraries of tokens, sentences and graphemes
TOKENISING = {
    "sie_contracts.chunker",
    "sie_sidecar.prepare.chunk_rows",
    "sie_sidecar.prepare.image_rows",
    "sie_sidecar.prepare.rows",
    "sie_sidecar.prepare.layouts",
    "sie_sidecar.prepare.long_text",
    "sie_sidecar.prepare.tokenizer_requests",
}
LIBRARIES = {"tokenizers", "sentencex", "markdown_it", "regex"}


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


def test_the_core_is_pure() -> None:
    """A module of the core imports no broker, no HTTP and no torch."""
    trees = {module: tree for package in FOLDERS for module, tree in files(package) if module in CORE | TOKENISING}
    assert trees.keys() == CORE | TOKENISING
    for module, tree in trees.items():
        own = LIBRARIES | {"sie_sidecar"} if module in TOKENISING else {module.partition(".")[0]}
        foreign = {name for name in tops(tree) if name not in sys.stdlib_module_names}
        assert foreign <= CORE_MAY_USE | own, module
        ours = {name for name in imported(tree) if name.startswith("sie_")}
        # the broker's interface is a contract too: protocols and plain data
        allowed_modules = CORE | {"sie_broker"} | (TOKENISING if module in TOKENISING else set())
        allowed_modules |= {name.rpartition(".")[0] for name in allowed_modules}  # `from package import module`
        assert {name for name in ours if name.count(".")} <= allowed_modules, module


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
