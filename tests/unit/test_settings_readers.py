"""One place reads the environment, every setting has a reader where its row says, and every setting has a test."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import distribution
import measure
import pytest

from sie_contracts import settings
from sie_contracts.settings import BY_NAME, COMPONENTS, ROWS, SettingRow

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("sources")  # one process parses all files

# (setting, component): its value is only checked there, against that of another setting, when the process starts
CHECKED_ONLY = {("SIE_HEARTBEAT_TIMEOUT_MS", "sidecar")}

# files that may read or write the environment or the home folder, each with its reason
READS_ENVIRON = {
    "adapter/sie_adapter/engine/device.py": "CUDA_VISIBLE_DEVICES: hides the GPUs of other adapters from all libraries",
    "core/contracts/sie_contracts/settings/__init__.py": "the one reader",
    "core/contracts/sie_contracts/client_environment.py": "SIE_BASE_URL and SIE_API_KEY, which no server reads",
    "cli/sie_cli/entry.py": "HTTP_PROXY and the like, to which it adds addresses that need no proxy; HOME and USER",
    "cli/sie_cli/home.py": "TMPDIR, where the home of a user without one would be",
    "cli/sie_cli/serve/command.py": "hands its whole environment on to the processes that it starts",
    "adapter/sie_adapter/process.py": "TMPDIR, where a folder is named that cannot be written to",
    "adapter/sie_adapter/loading/precision.py": "ONEDNN_MAX_CPU_ISA, which excludes instructions that torch would use",
    "core/runtime/sie_runtime/tracing.py": "OTEL_*, which OpenTelemetry's SDK reads by itself",
    "cli/sie_cli/data_dir.py": "XDG_DATA_HOME, the user's folder for data of all programs",
}
ENVIRON_CHANGES = {"update", "setdefault", "pop", "popitem", "clear", "__setitem__", "__delitem__"}
WRITES_ENVIRON = {
    "adapter/sie_adapter/engine/device.py": "CUDA_VISIBLE_DEVICES: hides the GPUs of other adapters from all libraries",
    "adapter/sie_adapter/engine/engine.py": (
        "ORT_DISABLE_TELEMETRY and the sizes of oneDNN's caches: nothing else keeps onnxruntime from reporting as it is"
        " imported, and bounds the memory of products that were met"
    ),
    "adapter/sie_adapter/process.py": (
        "TORCHINDUCTOR_CACHE_DIR: nothing else keeps torch from making a folder as it is imported"
    ),
    "core/runtime/sie_runtime/tracing.py": "takes out OTEL_* that are empty, which OpenTelemetry's SDK refuses",
}
READS_HOME = {
    "core/contracts/sie_contracts/settings/__init__.py": "~ in SIE_LOCAL_CACHE and HF_HOME",
    "core/contracts/sie_contracts/settings/values.py": "refuses ~ of a user who does not exist, in any setting",
    "core/store/sie_store/weights/sources.py": "~ in the path of a catalogue entry",
    "adapter/sie_adapter/loading/dependencies.py": "~ in SIE_MODELS_DIR",
    "config_service/sie_config_service/overlay.py": "~ in SIE_MODELS_DIR",
    "core/store/sie_store/models_folder.py": "~ in SIE_MODELS_DIR and SIE_MODEL_PATHS",
    "core/contracts/sie_contracts/models/trust.py": "~ in SIE_MODELS_DIR, SIE_MODEL_PATHS and the paths of an entry",
    "cli/sie_cli/data_dir.py": "the default data directory",
    "cli/sie_cli/models/add.py": "~ in a folder that is named on the command line",
    "cli/sie_cli/models/lookup.py": "~ in SIE_MODELS_DIR, in the folder that a command names and in that of an entry",
    "cli/sie_cli/models/inspect.py": "~ in a folder that is named on the command line",
    "cli/sie_cli/models/weights.py": "~ in a folder that is named on the command line",
}

# the same files of extras
OF_EXTRAS = measure.OF_EXTRAS.get("reads", {"environ": {}, "home": {}})

ENVIRON_READS = {"environ", "environb", "getenv", "getenvb"}
ENVIRON_WRITES = {"putenv", "unsetenv"}
HOME_READS = {"expanduser", "expandvars", "home"}


def trees(folder: str) -> Iterator[tuple[str, ast.Module]]:
    for module in measure.modules(folder):
        yield str(module.file.relative_to(ROOT)), module.tree


def all_trees() -> Iterator[tuple[str, ast.Module]]:
    for folder in measure.PACKAGES:
        yield from trees(folder)


def names_used(tree: ast.AST) -> set[str]:
    """Return the attributes and the imported names in a tree."""
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.alias):
            used.add(node.name)
    return used


def test_nothing_but_the_settings_reads_the_environment() -> None:
    """Every exception is listed by file, with the reason, and is used."""
    reads = {file for file, tree in all_trees() for node in ast.walk(tree) if _is_os(node, ENVIRON_READS)}
    assert reads == {*READS_ENVIRON, *OF_EXTRAS["environ"]}
    assert {file for file, tree in all_trees() if names_used(tree) & HOME_READS} == {*READS_HOME, *OF_EXTRAS["home"]}


def test_nothing_writes_the_environment() -> None:
    """Every exception is listed by file, with the reason, and is used."""
    assert {file for file, tree in all_trees() if any(writes_environ(node) for node in ast.walk(tree))} == set(
        WRITES_ENVIRON
    )


def writes_environ(node: ast.AST) -> bool:
    if _is_os(node, ENVIRON_WRITES):
        return True
    is_changed = isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
    if is_changed or (isinstance(node, ast.Attribute) and node.attr in ENVIRON_CHANGES):
        return _is_os(node, ENVIRON_READS) or _is_os(node.value, ENVIRON_READS)
    return False


def _is_os(node: ast.AST, names: set[str]) -> bool:
    """Return True for `os.<name>`, and for an import of such a name from os."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in names for alias in node.names)
    return (
        isinstance(node, ast.Attribute)
        and node.attr in names
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    )


@functools.cache
def fields_by_attribute() -> dict[str, frozenset[str]]:
    """Return the fields behind each attribute of Settings: a field itself, or the fields that a property reads."""
    fields_by_name = {row.field: frozenset({row.field}) for row in ROWS}
    tree = ast.parse(Path(settings.__file__).read_text("utf-8"))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "CoreSettings")
    for node in body:
        if isinstance(node, ast.FunctionDef) and any(
            isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in node.decorator_list
        ):
            used = {
                child.attr
                for child in ast.walk(node)
                if isinstance(child, ast.Attribute) and child.attr in fields_by_name
            }
            fields_by_name[node.name] = frozenset(used)
    return fields_by_name


def fields_read(tree: ast.AST) -> set[str]:
    """Return the fields that are read as attributes of a name `settings` or `_settings`."""
    field_sets = fields_by_attribute()
    read: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in field_sets:
            place = node.value
            if isinstance(place, ast.Call) and isinstance(place.func, ast.Name) and place.func.id == "cast":
                place = place.args[1]
            owner = place.id if isinstance(place, ast.Name) else getattr(place, "attr", "")
            if owner in ("settings", "_settings"):
                read |= field_sets[node.attr]
    return read


def _is_of_command(tree: ast.Module) -> bool:
    """Return whether a module imports the command line, which no other process does."""
    return any(isinstance(node, ast.ImportFrom) and str(node.module).startswith("sie_cli") for node in ast.walk(tree))


@functools.cache
def readers() -> dict[str, frozenset[str]]:
    """Return the components that read each field: in their package, in those of the extras that they load, in a module
    of the store that they import, or in the command that starts their process.
    """
    field_components: dict[str, set[str]] = defaultdict(set)
    commands = {
        node.name: node
        for file, tree in trees("cli")
        if file.endswith("/main.py")
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name in COMPONENTS
    }
    assert set(commands) == set(COMPONENTS)
    for component in COMPONENTS:
        folder = next(folder for folder in measure.PACKAGES if folder.partition("_")[0] == component)
        beside = [measure.FOLDERS[package] for package in distribution.LOADED_BY.get(component, ())]
        loaded = [tree for place in beside for _, tree in trees(place) if not _is_of_command(tree)]
        own = [commands[component], *(tree for _, tree in trees(folder)), *loaded]
        imported = {node.module for tree in own for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        stores = [tree for file, tree in trees("core/store") if f"sie_store.{Path(file).stem}" in imported]
        for tree in own + stores:
            for field in fields_read(tree):
                field_components[field].add(component)
    return {field: frozenset(components) for field, components in field_components.items()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_setting_is_read_where_its_row_says_and_nowhere_else(row: SettingRow) -> None:
    expected = {component for component in row.components if (row.name, component) not in CHECKED_ONLY}
    assert readers().get(row.field, frozenset()) == expected


def test_what_is_only_checked_is_checked() -> None:
    tree = ast.parse(Path(settings.__file__).read_text("utf-8"))
    (check,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "_cross_check")
    assert {BY_NAME[name].field for name, _ in CHECKED_ONLY} <= fields_read(check)


def test_every_setting_is_named_by_a_test_beside_those_of_all_settings() -> None:
    """Its name stands in the environment or in the docstring of a test."""
    files = [file for folder in ("tests", "extras") for file in (ROOT / folder).rglob("test_*.py")]
    text = "\n".join(file.read_text("utf-8") for file in files if not file.name.startswith("test_settings"))
    effects = "\n".join(file.read_text("utf-8") for file in files if file.name.startswith("test_settings_effects"))
    named = set(re.findall(r"\w+", text + effects))
    assert [name for name in BY_NAME if name not in named] == []
