"""Imports that are allowed between packages, modules that stay out of a process, and the public names of the SDK."""

from __future__ import annotations

import ast
import functools
import re
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import measure
import pytest
from measure import CORE as CORE_PACKAGES
from measure import FOLDERS

import sie_client

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize(
    "package", [package for package in FOLDERS if package not in ("sie_contracts", "sie_broker", "sie_client")]
)
def test_a_component_has_no_other_surface_than_its_modules(package: str) -> None:
    (body,) = (tree.body for module, tree in files(package) if module == package)
    assert [type(node) for node in body] == [ast.Expr], "a docstring and nothing else"


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


@pytest.mark.parametrize(
    ("module", "most"), [("sie_gateway", 1.0), pytest.param("sie_gateway.process", 4.0, marks=pytest.mark.long)]
)
def test_the_gateway_imports_quickly(module: str, most: float) -> None:
    """The test compares the processor time of the import with that of FastAPI, by medians of three interpreters each.
    Measured ratios are 0.02 and 2.2.
    """

    def seconds(name: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        python(f"import {name}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    timings = [(seconds(module), seconds("fastapi")) for _ in range(3)]
    ours, framework = (statistics.median(series) for series in zip(*timings, strict=True))
    assert ours < most * framework


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


def test_the_public_surface_of_the_sdk() -> None:
    assert sie_client.__all__ == [
        "AllItemsFailedError",
        "AsyncJob",
        "AuthenticationError",
        "BundleConflictError",
        "Capacity",
        "ConflictError",
        "ContentConflictError",
        "EncodeResult",
        "ExtractResult",
        "FileObject",
        "IdempotencyMismatchError",
        "InferenceError",
        "InternalServerError",
        "InvalidInputError",
        "Item",
        "ItemUsage",
        "Job",
        "JobFailedError",
        "JobInfo",
        "JobManifest",
        "JobPart",
        "JobTimeoutError",
        "LoraLoadFailedError",
        "LoraLoadingError",
        "MethodNotAllowedError",
        "ModelLoadFailedError",
        "ModelLoadingError",
        "ModelNotFoundError",
        "NotFoundError",
        "NotReadyError",
        "PayloadTooLargeError",
        "PermissionDeniedError",
        "Pool",
        "PoolConflictError",
        "PoolNotFoundError",
        "PoolOperationForbiddenError",
        "Progress",
        "ProvisioningError",
        "QueueFullError",
        "QueueUnavailableError",
        "Ranked",
        "RateLimitedError",
        "RedactResult",
        "RequestError",
        "RequestTimeoutError",
        "ResourceExhaustedError",
        "RestoreMap",
        "Results",
        "SIEAsyncClient",
        "SIEClient",
        "SIEConnectionError",
        "SIEError",
        "SchemaResult",
        "ScoreResult",
        "ServerError",
        "ShuttingDownError",
        "UnsupportedMediaTypeError",
        "Usage",
        "ValidationFailedError",
        "__version__",
        "draw",
        "maxsim",
        "region",
        "restore",
    ]
    public = {name for name in vars(sie_client) if not name.startswith("_")} | {"__version__"}
    modules = {
        "async_client",
        "chunker",
        "client",
        "cluster",
        "core",
        "drawing",
        "errors",
        "files",
        "jobs",
        "late_interaction",
        "media",
        "progress",
        "tasks",
        "threads",
        "transport",
        "types",
        "verbs",
        "watching",
        "wire",
    }
    assert public - modules == set(sie_client.__all__)


def test_a_process_of_the_cluster_does_not_import_the_operators_commands() -> None:
    """The imports of these commands would take a third of the processor time of a start."""
    program = (
        "import sys, sie_cli.main; print(*(m for m in ('httpx', 'numpy', 'rich', 'sie_broker') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


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


def test_the_adapter_imports_no_scipy_before_it_clusters_vectors() -> None:
    """The losses of transformers would import it. Later, transformers still says that scipy is installed."""
    program = (
        "import sys, sie_adapter.process; sie_adapter.process._import(); "
        "print('scipy' in sys.modules); from transformers.utils import is_scipy_available; print(is_scipy_available())"
    )
    assert python(program).split() == ["False", "True"]


_IMPORT = re.compile(r"\bfrom (sie_\w+)((?:\.\w+)*) import ((?:\w+(?: as \w+)?(?:, )?)+)")


@functools.cache
def _names(package: str, path: str) -> set[str]:
    """Return the names that a module defines or imports, and its submodules."""
    module = ROOT.joinpath(FOLDERS[package], package, *path.split(".")[1:])
    file = module.with_suffix(".py") if module.with_suffix(".py").exists() else module / "__init__.py"
    names = {entry.stem for entry in module.glob("*")}
    statements = list(ast.parse(file.read_text("utf-8")).body)
    while statements:
        match node := statements.pop():
            case ast.If() | ast.Try():
                statements += [*node.body, *node.orelse]
            case ast.Import() | ast.ImportFrom():
                statements += node.names
            case ast.Assign() | ast.AnnAssign():
                names |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.alias():
                names |= {node.name, getattr(node, "asname", None) or node.name}
    return names


def test_benchmarks_and_programs_in_strings_of_tests_import_names_that_exist() -> None:
    """mypy reads neither, and most of them do not run in CI."""
    unknown = [
        f"{path.relative_to(ROOT)}: {package}{module}.{name}"
        for folder in ("bench", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for package, module, names in _IMPORT.findall(path.read_text("utf-8"))
        if package in FOLDERS
        for name in re.findall(r"(\w+)(?: as \w+)?", names)
        if name not in _names(package, module)
    ]
    assert unknown == []
