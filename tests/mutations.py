"""Change the product in random places, and show which changes the tests notice.

    python tests/mutations.py map                      run the tests once, and store which lines each test executes
    python tests/mutations.py run --seed 7 --count 60  one line for each change: the test that noticed it, or `survived`

A change is a swapped operator, a changed constant or default, a dropped await, or a swapped branch, in a function of
the core (--extras: of the extras). It is made in a forked process that has imported the product: the code objects of
functions are replaced, so each change costs only the tests that execute its line. These run until the first failure,
the tests that execute the fewest lines first. Tests in other processes, such as whole clusters, are not run.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import gc
import io
import os
import random
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ("core", "gateway", "sidecar", "adapter", "config_service")
TESTS = ("tests/unit", "tests/contract", "tests/parity", "tests/simulation", "extras")
LINES = ROOT / "build" / "tests" / "lines.sqlite"
MAX_TESTS, LIMIT_S = 300, 150.0  # tests and seconds for one change
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}


class Change(NamedTuple):
    """A change of a module. `function`: outermost function with it. `index`: which of its changeable nodes."""

    path: str
    function: str
    line: int
    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}: {self.kind}"


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the outermost functions and methods of a module, with their qualified names."""
    nodes: list[tuple[str, ast.AST]] = [("", node) for node in tree.body]
    while nodes:
        prefix, node = nodes.pop()
        if isinstance(node, ast.ClassDef):
            nodes += [(f"{prefix}{node.name}.", child) for child in node.body]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node


def _kind(node: ast.AST) -> str:
    """Return the kind of change that a node allows, or an empty text."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        return "operator"
    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in _SWAPS:
        return "operator"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Await):
        return "dropped await"
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        return "swapped branch"
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        return "constant"
    return ""


def _apply(node: Any) -> None:
    if isinstance(node, ast.Compare):
        node.ops[0] = _SWAPS[type(node.ops[0])]()
    elif isinstance(node, (ast.BinOp, ast.BoolOp)):
        node.op = _SWAPS[type(node.op)]()
    elif isinstance(node, ast.Expr):
        node.value = ast.Constant(None)
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    else:
        node.test = ast.UnaryOp(ast.Not(), node.test)


def _sites(function: ast.AST) -> list[ast.AST]:
    return [node for node in ast.walk(function) if _kind(node)]


def draw(seed: int, count: int, folders: Sequence[str]) -> list[Change]:
    """Draw changes, each site with the same probability."""
    changes = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if "/tests/" in name:
                continue
            for function, node in _functions(ast.parse(path.read_text("utf-8"))):
                changes += [
                    Change(name, function, getattr(site, "lineno", 0), _kind(site), index)
                    for index, site in enumerate(_sites(node))
                ]
    return sorted(random.Random(seed).sample(changes, count))


def _codes(code: CodeType, prefix: str = "") -> Iterator[tuple[str, CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            if constant.co_flags & 0x2 == 0:  # the body of a class, not of a function
                yield from _codes(constant)


def make(change: Change) -> int:
    """Replace the code of the function in this process. Return the number of function objects that have it."""
    path = ROOT / change.path
    tree = ast.parse(path.read_text("utf-8"))
    (node,) = [node for name, node in _functions(tree) if name == change.function][-1:]
    _apply(_sites(node)[change.index])
    changed = compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)
    code = [code for name, code in _codes(changed) if name == change.function][-1]
    gc.unfreeze()  # `get_objects` does not return frozen objects
    found = [
        element
        for element in gc.get_objects()
        if isinstance(element, FunctionType)
        and element.__code__.co_qualname == change.function
        and element.__code__.co_filename == str(path)
    ]
    for function in found:
        function.__code__ = code
        if change.kind == "constant":  # perhaps of a default
            defaults = [copy.deepcopy(value) for value in (*node.args.defaults, *filter(None, node.args.kw_defaults))]
            with contextlib.suppress(Exception):  # a default that is no literal stays
                values = [ast.literal_eval(value) for value in defaults]
                positional = len(node.args.defaults)
                function.__defaults__ = tuple(values[:positional]) or None
                names = [
                    argument.arg
                    for argument, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                    if value is not None
                ]
                function.__kwdefaults__ = dict(zip(names, values[positional:], strict=True)) or None
    return len(found)


class Recorder:
    """Plug-in that tells coverage which test runs."""

    def __init__(self, lines: coverage.Coverage) -> None:
        self._lines = lines

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._lines.switch_context(item.nodeid.partition("[")[0])


def _pytest(arguments: Sequence[str], plugins: Sequence[object] = ()) -> int:
    options = (
        "-p",
        "no:cacheprovider",
        "-q",
        "--timeout=120",
        "-o",
        "faulthandler_timeout=0",
        "--ignore-glob=*/tests/system/*",
        "-m",
        "not serial and not debian and not long",
    )
    return int(pytest.main([*options, *arguments], plugins=[*plugins]))


def record(folders: Sequence[str]) -> None:
    """Store which tests execute each line of the product."""
    LINES.parent.mkdir(parents=True, exist_ok=True)
    sources = [str(ROOT / folder) for folder in (*CORE, "extras")]
    lines = coverage.Coverage(data_file=LINES, source=sources, omit=["*/tests/*"], config_file=False, messages=False)
    lines.erase()
    lines.start()
    _pytest(folders, [Recorder(lines)])
    lines.stop()
    lines.save()


def tests_of(change: Change) -> list[str]:
    """Return the tests that execute the changed line, those of the fewest lines first."""
    data = coverage.CoverageData(str(LINES))
    data.read()
    contexts = data.contexts_by_lineno(str(ROOT / change.path)).get(change.line, [])
    return sorted(filter(None, contexts), key=_size().__getitem__)


@functools.cache
def _size() -> Mapping[str, int]:
    """Return by test how many lines it executes."""
    with contextlib.closing(sqlite3.connect(LINES)) as database:
        rows = database.execute(
            "select context.context, sum(length(numbits)) from line_bits join context on context.id = context_id"
            " group by context_id"
        )
        return dict(rows)


class First:
    """Plug-in that remembers the first failure."""

    def __init__(self) -> None:
        self.failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def verdict(change: Change) -> str:
    """Run the tests of a change in a forked process. Return the test that failed, `time-out` or `survived`."""
    tests = tests_of(change)
    if not tests:
        return "survived: no test executes the line"
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.setsid()
        first = First()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            if not make(change):
                os.write(writing, b"no such function in this process")
                os._exit(0)
            _pytest(["-x", *tests[:MAX_TESTS]], [first])
        os.write(writing, (first.failed or "survived").encode())
        os._exit(0)
    os.close(writing)
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s and not os.waitpid(pid, os.WNOHANG)[0]:
        time.sleep(0.1)
    if time.monotonic() >= end_s:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, 9)
        os.waitpid(pid, 0)
        return "time-out"
    with os.fdopen(reading) as stream:
        return stream.read() or "ended"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("map", "run"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--extras", action="store_true")
    parser.add_argument("--tests", nargs="*", default=[*TESTS])
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.chdir(ROOT)
    if arguments.action == "map":
        record(arguments.tests)
        return
    changes = draw(arguments.seed, arguments.count, ("extras",) if arguments.extras else CORE)
    with contextlib.redirect_stdout(io.StringIO()):
        _pytest(["--collect-only", *arguments.tests])
    noticed = 0
    for change in changes:
        found = verdict(change)
        noticed += not found.startswith(("survived", "time-out"))  # a time-out: the tests were too slow, or it hangs
        print(f"{change}: {found}", flush=True)
    print(f"{noticed} of {len(changes)} changes noticed", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    main()
