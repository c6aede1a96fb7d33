"""Counts what the structure of the product is held to: lines, files, classes, constructors, layers, import circles.

    python tools/measure.py            a table, and what is over its bound
    python tools/measure.py --all      every file, class and constructor over its bound, not the first few

Lines are those of the files as they are, which `make lint` has formatted at 120 columns. A circle is a set of modules
of one package of which each imports the others, directly or through others, when it is loaded: imports within
functions and under TYPE_CHECKING do not count. The layers of a package are the modules on its longest chain of imports.
"""

import argparse
import ast
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {  # by the folder that each is in
    "core/contracts": "sie_contracts",
    "core/broker": "sie_broker",
    "core/runtime": "sie_runtime",
    "core/store": "sie_store",
    "gateway": "sie_gateway",
    "sidecar": "sie_sidecar",
    "adapter": "sie_adapter",
    "config_service": "sie_config_service",
    "sdk": "sie_client",
    "cli": "sie_cli",
}
FOLDERS = {package: folder for folder, package in PACKAGES.items()}
MAX_PRODUCT_LINES = 45_000
MAX_FILE_LINES = 450
MAX_METHODS = 25
MAX_ARGUMENTS = 8
MAX_GATEWAY_LAYERS = 10
SHOWN = 8


@dataclass(frozen=True)
class Module:
    name: str
    file: Path
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")


@functools.cache
def modules(folder: str) -> Sequence[Module]:
    """Of the package in one of the folders of `PACKAGES`, in the order of their paths."""
    base = ROOT / folder
    found = []
    for file in sorted((base / PACKAGES[folder]).rglob("*.py")):
        name = ".".join(file.relative_to(base).with_suffix("").parts).removesuffix(".__init__")
        text = file.read_text("utf-8")
        found.append(Module(name, file, text, ast.parse(text)))
    return found


def loaded(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when the module is loaded."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def imports(found: Sequence[Module]) -> dict[str, set[str]]:
    """What each module of a package imports of that package. A package is imported for the names of its own file."""
    names = {module.name for module in found}
    graph: dict[str, set[str]] = {}
    for module in found:
        used: set[str] = set()
        for node in loaded(module.tree):
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif node.module:
                parts = {f"{node.module}.{alias.name}" for alias in node.names}
                used |= parts & names or {node.module}
        graph[module.name] = (used & names) - {module.name}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The circles that are left when each one found is cut at its last import."""
    graph = {name: set(used) for name, used in graph.items()}
    found = []
    while True:
        try:
            tuple(TopologicalSorter(graph).static_order())
        except CycleError as error:
            circle = error.args[1]
            found.append(circle)
            graph[circle[1]].discard(circle[0])
        else:
            return found


def layers(graph: Mapping[str, set[str]]) -> int:
    """The modules on the longest chain; where there is a circle, of the chains that end at it."""
    depth: dict[str, int] = {}

    def of(name: str, above: frozenset[str]) -> int:
        if name not in depth:
            depth[name] = 1 + max((of(used, above | {name}) for used in graph[name] - above), default=0)
        return depth[name]

    return max((of(name, frozenset()) for name in graph), default=0)


def classes(module: Module) -> Iterator[tuple[str, int, int]]:
    """Each class with its number of methods and the arguments of its constructor, `self` apart. The fields of a
    dataclass or a struct are data, no arguments of a constructor.
    """
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            made = [each.args for each in methods if each.name == "__init__"]
            arguments = [len(each.posonlyargs) + len(each.args) + len(each.kwonlyargs) - 1 for each in made]
            yield f"{module.name}.{node.name}", len(methods), max(arguments, default=0)


def assigned(module: Module) -> Iterator[str]:
    """Attributes of another object that are set: `a.b = ...` where `a` is neither self nor made in the function."""
    for function in ast.walk(module.tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        own = {"self", "cls"}
        for node in ast.walk(function):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.For | ast.NamedExpr | ast.comprehension):
                own |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                of_self = isinstance(node.value, ast.Attribute) and not node.attr.startswith("_")
                of_argument = isinstance(node.value, ast.Name) and node.value.id not in own
                if of_self or of_argument:
                    yield f"{module.name}:{node.lineno} {ast.unparse(node)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every one over a bound, not the first few")
    shown = None if parser.parse_args().all else SHOWN
    over: dict[str, list[tuple[int, str]]] = {}
    total = files = 0
    print(f"{'package':16}{'files':>6}{'lines':>8}{'largest':>8}{'layers':>8}{'circles':>8}")
    for package in PACKAGES:
        found = modules(package)
        graph = imports(found)
        there = circles(graph)
        depth = layers(graph)
        lines = sum(module.lines for module in found)
        total, files = total + lines, files + len(found)
        largest = max(module.lines for module in found)
        print(f"{package:16}{len(found):6}{lines:8,}{largest:8,}{depth:8}{len(there):8}")
        over.setdefault("import circles", []).extend((len(circle), " > ".join(circle)) for circle in there)
        if package == "gateway" and depth > MAX_GATEWAY_LAYERS:
            over["layers of the gateway"] = [(depth, f"bound {MAX_GATEWAY_LAYERS}")]
        for module in found:
            if module.lines > MAX_FILE_LINES:
                name = str(module.file.relative_to(ROOT))
                over.setdefault(f"files over {MAX_FILE_LINES} lines", []).append((module.lines, name))
            for name, methods, arguments in classes(module):
                if methods > MAX_METHODS:
                    over.setdefault(f"classes over {MAX_METHODS} methods", []).append((methods, name))
                if arguments > MAX_ARGUMENTS:
                    over.setdefault(f"constructors over {MAX_ARGUMENTS} arguments", []).append((arguments, name))
            for place in assigned(module):
                over.setdefault("attributes of other objects that are set", []).append((1, place))
    print(f"{'all':16}{files:6}{total:8,}")
    if total > MAX_PRODUCT_LINES:
        over["lines of product"] = [(total, f"bound {MAX_PRODUCT_LINES:,}")]
    for what, rows in over.items():
        if rows:
            print(f"\n{what}: {len(rows)}")
            for count, name in sorted(rows, reverse=True)[:shown]:
                print(f"  {count:6,}  {name}")
    return int(any(over.values()))


if __name__ == "__main__":
    sys.exit(main())
