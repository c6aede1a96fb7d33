"""Count what makes code hard to read: import circles, full folders, reused class names, vague names and docstrings.

    python tools/measure.py          a table, and the first findings of each kind
    python tools/measure.py --all    every finding

A circle is a set of modules of one package, in which each module imports every other module, directly or through
further modules. Imports within functions and under TYPE_CHECKING count.
"""

import argparse
import ast
import builtins
import functools
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {  # package name by folder
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
CORE = frozenset(PACKAGES.values())
# the packages of the extras: extras/NAME/PACKAGE
PACKAGES |= {
    str(place.parent.relative_to(ROOT)): place.name for place in sorted(ROOT.glob("extras/*/sie_*")) if place.is_dir()
}
FOLDERS = {package: folder for folder, package in PACKAGES.items()}
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
OF_EXTRAS: Mapping[str, Any] = _PROJECT["tool"].get("sie", {})  # rows of the extras for the tests of this repository
POINTS: Mapping[str, Mapping[str, str]] = _PROJECT["project"].get("entry-points", {})
# participles and pronouns that are used as names instead of a noun of the field
_PARTICIPLES = """
told found given asked wanted each kept known made seen heard spoilt taken said gone been meant what who whom
other others another one ones something anything nothing whoever afresh anew
"""
VAGUE_VALUES = frozenset(_PARTICIPLES.split())
VAGUE_FUNCTIONS = frozenset(["of", "take", "forget", "look", "tell", "say", "ask", "hear", "told", "heard", "given"])
NO_SUBJECT = re.compile(r"^(What|Of|Who|Whom|That|Those|Which|Where|As|Else|None of|Nothing|Such)\b")
# first words of docstrings that leave open what the function does, or which object it changes
VAGUE_BEGINNING = re.compile(
    r"^(Forget|Note|Tell|Hear|Say|Return when|To be \w+ed|(\w+ )?(it|its|they|them|their))\b", re.I
)
RIDDLE = re.compile(
    r"\b(?:None|empty|infinite) without (?:one|an?|it|the)\b|\b(?:anew|thereby|whereupon)\b|\bTo be \w+ed\b|"
    r"\bas (?:the )?[`\w.]+ does\b"
)
FILE = re.compile(r"(?<![\w/.-])[a-z_]+\.py\b")
RAISES = re.compile(r"\bRaises ((?:[A-Z]\w+(?:, and | and |, )?)+)")
FOREIGN_EXCEPTIONS = frozenset(
    ["BadParameter", "ClickException", "DecodeError", "PackageNotFoundError", "UsageError", "ValidationError"]
)
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
    """Return the modules of the package in a folder of `PACKAGES`, in the order of their paths."""
    base = ROOT / folder
    parsed_modules = []
    for file in sorted((base / PACKAGES[folder]).rglob("*.py")):
        name = ".".join(file.relative_to(base).with_suffix("").parts).removesuffix(".__init__")
        text = file.read_text("utf-8")
        parsed_modules.append(Module(name, file, text, ast.parse(text)))
    return parsed_modules


def nodes() -> Iterator[tuple[Module, ast.AST]]:
    """Yield each node of the syntax trees of all packages, with its module."""
    for package in PACKAGES:
        for module in modules(package):
            for node in ast.walk(module.tree):
                yield module, node


def names_that_are_gone(module: Module) -> Iterator[str]:
    """Yield the names of files and exceptions that do not exist, but that the module's docstrings mention as `name.py`
    or `Raises Name`.
    """
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node) or ""
        raised = {name for names in RAISES.findall(text) for name in re.findall(r"\w+", names) if name != "and"}
        for name in (*sorted(set(FILE.findall(text)) - _file_names()), *sorted(raised - _exceptions())):
            yield f"{module.name}:{getattr(node, 'lineno', 1)} {name}"


@functools.cache
def _file_names() -> set[str]:
    return {
        file.name
        for folder in (*PACKAGES, "tests", "bench", "tools", "catalog")
        for file in (ROOT / folder).rglob("*.py")
    }


@functools.cache
def _exceptions() -> set[str]:
    """Return the names of all exception classes of the product, of Python, and of FOREIGN_EXCEPTIONS."""
    builtin = {
        name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
    }
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for folder in PACKAGES
        for module in modules(folder)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }
    names = builtin | FOREIGN_EXCEPTIONS
    while more := {name for name, parents in bases.items() if parents & names} - names:
        names |= more
    return names


def imports(parsed_modules: Sequence[Module]) -> dict[str, set[str]]:
    """Return, for each module, the modules of the same package that the module imports. An import of a package counts
    as an import of its __init__ file only.
    """
    names = {module.name for module in parsed_modules}
    graph: dict[str, set[str]] = {}
    for module in parsed_modules:
        used: set[str] = set()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                parts = {f"{node.module}.{alias.name}" for alias in node.names}
                used |= parts & names or {node.module}
        graph[module.name] = (used & names) - {module.name}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the circles of imports. The search removes one import of each circle from a copy of the graph."""
    graph = {name: set(used) for name, used in graph.items()}
    cycles = []
    while True:
        try:
            tuple(TopologicalSorter(graph).static_order())
        except CycleError as error:
            circle = error.args[1]
            cycles.append(circle)
            graph[circle[1]].discard(circle[0])
        else:
            return cycles


def reused_classes() -> dict[str, list[str]]:
    """Return names that several classes have, with module and line of each class. Leading underscores do not count."""
    places = defaultdict(list)
    for package in PACKAGES:
        for module in modules(package):
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef):
                    places[node.name.lstrip("_")].append(f"{module.name}:{node.lineno}")
    return {name: class_places for name, class_places in places.items() if len(class_places) > 1}


def within_a_package(places: Sequence[str]) -> bool:
    return max(Counter(place.partition(".")[0] for place in places).values()) > 1


def vague_names(module: Module) -> Iterator[str]:
    """Yield the functions, arguments and assigned variables whose name is a participle or pronoun."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.strip("_") in VAGUE_FUNCTIONS | VAGUE_VALUES:
                yield f"{module.name}:{node.lineno} {node.name}()"
            arguments = node.args
            names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = [node.id]
        else:
            continue
        for name in names:
            if name.strip("_") in VAGUE_VALUES:
                yield f"{module.name}:{node.lineno} {name}"


def docstrings_without_subject(module: Module) -> Iterator[str]:
    """Yield docstrings that begin with neither a verb nor the noun that they describe."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if NO_SUBJECT.match(text):
                yield f"{module.name}:{getattr(node, 'lineno', 1)} {text[:60]!r}"


def is_command(node: ast.AST) -> bool:
    """Return True if the function is a command of `sie`: its docstring is the help text."""
    decorators = getattr(node, "decorator_list", [])
    return any(re.search(r"\b(command|group)\(", ast.unparse(decorator)) for decorator in decorators)


def vague_docstrings(module: Module) -> Iterator[str]:
    """Yield docstrings that begin vaguely or contain a phrase that is hard to understand, except help texts."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not is_command(
            node
        ):
            text = " ".join((ast.get_docstring(node) or "").split())
            if phrase := VAGUE_BEGINNING.match(text) or RIDDLE.search(text):
                yield f"{module.name}:{getattr(node, 'lineno', 1)} {phrase[0]!r}"


def files_by_folder() -> Counter[str]:
    """Return the number of modules in each folder of the product, without its subfolders."""
    return Counter(str(module.file.parent.relative_to(ROOT)) for package in PACKAGES for module in modules(package))


def assigned(module: Module) -> Iterator[str]:
    """Yield assignments `a.b = ...` to attributes of objects that are neither self nor created in the function."""
    for function in ast.walk(module.tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        own = {"self", "cls"}
        for node in ast.walk(function):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.For | ast.NamedExpr | ast.comprehension):
                own |= {
                    name_node.id
                    for target in targets
                    for name_node in ast.walk(target)
                    if isinstance(name_node, ast.Name)
                }
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                of_self = isinstance(node.value, ast.Attribute) and not node.attr.startswith("_")
                of_argument = isinstance(node.value, ast.Name) and node.value.id not in own
                if of_self or of_argument:
                    yield f"{module.name}:{node.lineno} {ast.unparse(node)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="show every finding")
    shown = None if parser.parse_args().all else SHOWN
    places: dict[str, list[str]] = defaultdict(list)
    total = files = 0
    print(f"{'package':16}{'files':>6}{'lines':>8}{'circles':>8}")
    for package in PACKAGES:
        own = modules(package)
        package_circles = circles(imports(own))
        lines = sum(module.lines for module in own)
        total, files = total + lines, files + len(own)
        print(f"{package:16}{len(own):6}{lines:8,}{len(package_circles):8}")
        places["import circles"] += [" > ".join(circle) for circle in package_circles]
        for module in own:
            places["values and functions named by a participle or pronoun"] += vague_names(module)
            places["docstrings without a subject"] += docstrings_without_subject(module)
            places["docstrings with a vague phrase"] += vague_docstrings(module)
            places["attributes of other objects that are set"] += assigned(module)
    print(f"{'all':16}{files:6}{total:8,}")
    reused = reused_classes()
    places["class names used more than once"] = [f"{name}: {', '.join(where)}" for name, where in reused.items()]
    places["largest folders"] = [f"{count} {folder}" for folder, count in files_by_folder().most_common(SHOWN)]
    for title, rows in places.items():
        print(f"\n{title}: {len(rows)}")
        for row in rows[:shown]:
            print(f"  {row}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
