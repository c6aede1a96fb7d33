"""Remove extras from a copy of the tree, and check that the core neither needs nor shows them.

    python tools/without_extras.py                  each extra in turn, then all together
    python tools/without_extras.py redact mcp all   only these
    python tools/without_extras.py --tests all      also run `make test ARGS=core` in the copy, which takes minutes
    python tools/without_extras.py --keep FOLDER    keep the copies in FOLDER/NAME, with an environment in .venv

    tracked files ──► copy without extras/NAME and its lines in pyproject.toml ──► environment of its own
        ──► what the copy offers, beside what the whole tree offers ──► `make serve`, encode, score, extract

An extra leaves a trace if a line outside of its folder and of pyproject.toml names it, if the copy still has a route, a
command or a family of it or shows them in a help text or in the OpenAPI document, or if the copy has a schema, setting,
metric or error that only the extra used. Each other route, command and family must stay. Libraries come from the
present environment; no network is used. Status 1: there is a trace or a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import surface
from surface import ROOT, Surface

ALL = "all"
# models of tests/local_models.py by verb, with the body of a request; None: the default model of `sie serve`
REQUESTS: Sequence[tuple[str, str | None, dict[str, Any]]] = (
    ("encode", None, {"items": ["river search"]}),
    ("encode", "dense", {"items": ["river search"]}),
    ("score", "cross", {"query": "river", "items": ["river search", "winter garden"]}),
    ("extract", "tags", {"items": ["river search"]}),
    ("extract", "zero-shot", {"items": ["river search"], "labels": ["music", "river"]}),
)
DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
START_S, STOP_S, ANSWER_S = 180.0, 60.0, 120.0
_AUTHOR = ("-c", "user.name=copy", "-c", "user.email=copy@localhost")
BUILD_MODELS = """
import sys, pathlib
sys.path[:0] = ["tests", *map(str, pathlib.Path("extras").glob("*/tests"))]
import local_models
models = local_models.under(pathlib.Path(sys.argv[1]))
for name in sys.argv[2:]:
    models.build(name)
"""


@dataclass(frozen=True)
class Extra:
    """Folder of extras/. `packages`: names of its packages."""

    name: str
    packages: tuple[str, ...]

    @property
    def pattern(self) -> re.Pattern[str]:
        """Return a pattern of the names of its folder and packages."""
        return re.compile(rf"\bextras/{re.escape(self.name)}(?![\w-])|\b(?:{'|'.join(self.packages)})\b")


def extras() -> dict[str, Extra]:
    found: dict[str, list[str]] = {}
    for package in sorted(ROOT.glob("extras/*/sie_*/__init__.py")):
        found.setdefault(package.parents[1].name, []).append(package.parent.name)
    return {name: Extra(name, tuple(packages)) for name, packages in found.items()}


def copy(tree: Path) -> None:
    """Copy the files that git tracks, and new ones that it does not ignore."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)


def without(text: str, extra: Extra) -> str:
    """Return the text of pyproject.toml without an extra: without each line whose key or value is of the extra, and
    without its names in the other lines.
    """
    packages = "|".join(extra.packages)
    name = rf"(?:extras/{re.escape(extra.name)}(?:/[^\"]*)?|(?:{packages})(?:[.: ][^\"]*)?)"
    pips = own_pips(text, extra)
    lines, section = [], ""
    for line in text.splitlines():
        section = line if line.startswith("[") else section
        is_pip = section == "[project.optional-dependencies]" and line.partition(" = ")[0] in pips
        of_extra = re.match(rf'\s*"?{name}"?,?$|"?{name}"? = |(?:[\w-]+|"[^"]*") = "{name}"', line)
        if of_extra or is_pip:
            continue
        rest = re.sub(rf":extras/{re.escape(extra.name)}(?=[:\"])", "", line)
        rest = re.sub(rf'"{name}"(?:, )?', "", rest)
        rest = re.sub(r"(?<=sie-cluster\[)[^\]]*", lambda names: _less(names[0], pips), rest)
        rest = re.sub(r'"sie-cluster\[\]"(?:, )?', "", rest)
        if rest == line or not re.search(r" = \[\](?:  #|$)", rest):  # a list that is now empty was of the extra
            lines.append(rest)
    return "\n".join(lines) + "\n"


def own_pips(text: str, extra: Extra) -> set[str]:
    """Return the pip extras that are for an extra only: that of its name, and those that modules of it need."""
    tool = tomllib.loads(text)["tool"]["sie"]
    return {extra.name} | {
        pip
        for pip, modules in tool["needs"].items()
        if {name.partition(".")[0] for name in modules} <= {*extra.packages}
    }


def _less(names: str, removed: set[str]) -> str:
    return ",".join(name for name in names.split(",") if name not in removed)


def still_named(text: str, extra: Extra) -> Iterator[str]:
    """Yield the places of pyproject.toml that name an extra. A pip extra of its name is one of them."""
    project = tomllib.loads(text)
    for place, value in surface.flat(project):
        if extra.pattern.search(f"{place} {value}"):
            yield f"pyproject.toml: {place} names it: {value}"
    if extra.name in project["project"]["optional-dependencies"]:
        yield f"pyproject.toml: optional-dependencies.{extra.name}"


def files_that_name(tree: Path, extra: Extra) -> Iterator[str]:
    """Yield lines outside of extras/ that name the folder or packages of a removed extra, except pages and benchmarks:
    pages link to pages of extras, which the site drops, and benchmarks measure the whole product.
    """
    for file in sorted(tree.rglob("*")):
        name = str(file.relative_to(tree))
        if (
            name.startswith((".venv", ".git/", "bench/", "extras/", "build/"))
            or file.suffix == ".md"
            or not file.is_file()
        ):
            continue
        with contextlib.suppress(UnicodeDecodeError):
            for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
                if extra.pattern.search(line):
                    yield f"{name}:{number} names it"


def traces(tree: Path, python: Path, whole: Surface, removed: Sequence[Extra]) -> Iterator[str]:
    """Yield what a copy without the extras still shows of them, and what it has lost that they do not bring. What a row
    of the whole tree is of, its module says; extras that use a removed one may lose their parts.
    """
    rest = surface.of_tree(tree, python)
    packages = {package for extra in removed for package in extra.packages}
    users = {user for user, used in uses().items() if packages & set(used)} - packages
    gone = []
    for row, modules in whole["module"].items():
        kind, _, name = row.partition(" ")
        is_left = name in rest[kind]
        if any(re.search(rf"\b{package}\b", modules) for package in packages):
            gone.append((kind, name))
            if is_left:
                yield f"the {kind} {name} of {modules} is still there"
        elif not is_left and not any(user in modules for user in users):
            yield f"the {kind} {name} of {modules} is lost"
    text = json.dumps({kind: rest[kind] for kind in ("operation", "parameter", "schema")})
    for kind, name in gone:
        if kind == "route":
            path = name.partition(" ")[2].partition("{")[0].rstrip("/")
            pattern = rf"(?<![\w}}]){re.escape(path)}\b"
            if not any(f" {path}" in left for left in rest["route"]) and re.search(pattern, text):
                yield f"the OpenAPI document names {path}"
        elif kind == "command":
            yield from _helps(tree, python, name, rest)
    nobody, before = unused(tree, rest), unused(ROOT, whole)
    for kind, names in nobody.items():
        for name in sorted(names - before[kind]):
            yield f"the {kind} {name} is used by nothing that is left"


def uses() -> dict[str, list[str]]:
    """Return the packages that a package of an extra uses."""
    table: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["sie"]["uses"]
    return table


def _helps(tree: Path, python: Path, command: str, rest: Surface) -> Iterator[str]:
    """Yield each group whose --help still names a removed command of it or below it."""
    words = command.split()
    for end in range(1, len(words)):
        group = " ".join(words[:end])
        if group not in rest["command"]:
            continue
        argv = [str(python.with_name("sie")), *words[1:end], "--help"]
        shown = surface.run(argv, tree, capture_output=True, check=True).stdout
        listed = rf"|^  {words[-1]} " if end == len(words) - 1 else ""
        if command not in rest["command"] and re.search(rf"\b{command}\b{listed}", shown, re.MULTILINE):
            yield f"`{group} --help` names {command}"


def unused(tree: Path, rest: Surface) -> dict[str, set[str]]:
    """Return by kind the settings, metrics and errors of a tree that none of its modules uses beside the table that has
    them, and the schemas that no operation uses.
    """
    tables = ("core/contracts/sie_contracts/settings/", "core/runtime/sie_runtime/metrics_table.py")
    words: set[str] = set()
    errors: set[str] = set()
    for folder in surface.code_folders(tree):
        for file in folder.rglob("*.py"):
            name = str(file.relative_to(tree))
            if "tests" in file.relative_to(tree).parts:
                continue
            own = set(re.findall(r"\w+", file.read_text("utf-8")))
            if not name.startswith(tables):
                words |= own
            if name != "core/contracts/sie_contracts/errors.py":
                errors |= own
    schemas = rest["schema"]
    used = set(_references(rest["operation"]))
    while more := {name for known in used for name in _references(schemas[known])} - used:
        used |= more
    return {
        "setting": {name for name in rest["setting"] if name.removeprefix("SIE_").lower() not in words},
        "metric": {name for name in rest["metric"] if not {name, name.removesuffix("_total")} & words},
        "error": {code for code, (name, _) in rest["error"].items() if name not in errors},
        "schema": schemas.keys() - used,
    }


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            yield reference.rpartition("/")[2]
        value = list(value.values())
    if isinstance(value, list):
        for member in value:
            yield from _references(member)


@contextlib.contextmanager
def serving(tree: Path, models: Path) -> Iterator[str]:
    """Run `make serve` in a tree, with these models beside the catalogue. Yield its URL. Raise RuntimeError with the
    end of its output if it does not become ready.
    """
    port, metrics = _free_ports(2)
    arguments = {
        "--port": port,
        "--worker-metrics-port": metrics,
        "--gateway-metrics-port": 0,
        "--data-dir": tree / "build" / "data",
        "--models-dir": models,
    }
    words = " ".join(f"{flag} {value}" for flag, value in arguments.items())
    log = tree / "build" / "serve.log"
    log.parent.mkdir(exist_ok=True)
    environ = {name: value for name, value in surface.environ().items() if not name.startswith("SIE_")}
    with log.open("wb") as output:
        argv = ["make", "--no-print-directory", "serve", f"ARGS={words} --no-spare"]
        child = subprocess.Popen(
            argv, cwd=tree, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        end_s = time.monotonic() + START_S
        while not _is_ready(f"http://127.0.0.1:{port}/readyz"):
            if child.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"`make serve` is not ready:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as sockets:
        listeners = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def _is_ready(url: str) -> bool:
    try:
        with _opened(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _opened(request: Any, timeout: float) -> Any:
    """Open a URL of this machine, past the proxies of the environment."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout)


def unanswered(url: str) -> Iterator[str]:
    """Yield each request of REQUESTS that is not answered with 200. While its model is loaded, it is repeated."""
    for verb, name, body in REQUESTS:
        model = DEFAULT_MODEL if name is None else f"test/{name}"
        request = urllib.request.Request(  # noqa: S310  the address is of this machine
            f"{url}/v1/{verb}/{model}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        end_s = time.monotonic() + ANSWER_S
        while refusal := _refusal(request):
            if not refusal.startswith("503") or time.monotonic() > end_s:
                yield f"{verb} with {model}: {refusal}"
                break
            time.sleep(0.5)


def _refusal(request: urllib.request.Request) -> str:
    """Send a request. Return the status and the body of an error, or an empty text."""
    try:
        with _opened(request, ANSWER_S) as reply:
            json.load(reply)
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read()[:300].decode()}"
    return ""


def prepare(tree: Path, removed: Sequence[Extra]) -> Path:
    """Make a tree without these extras, with an environment that make takes for complete. Return its Python."""
    copy(tree)
    project = (tree / "pyproject.toml").read_text("utf-8")
    for extra in removed:
        shutil.rmtree(tree / "extras" / extra.name)
        project = without(project, extra)
    (tree / "pyproject.toml").write_text(project, "utf-8")
    python = surface.environment(tree, tree / ".venv")
    if (ROOT / ".venv-sdks").exists():
        (tree / ".venv-sdks").symlink_to((ROOT / ".venv-sdks").resolve())
    for stamp in (".serve", ".large", ".dev"):
        (tree / ".venv" / stamp).touch()
    (tree / ".venv" / ".pip").touch()
    os.utime(tree / ".venv" / ".pip", (0, 0))  # older than all that is made with it
    return python


def findings(tree: Path, whole: Surface, removed: Sequence[Extra], models: Path, tests: bool) -> Iterator[str]:
    """Yield each trace and failure of a tree without these extras."""
    python = prepare(tree, removed)
    text = (tree / "pyproject.toml").read_text("utf-8")
    for extra in removed:
        yield from still_named(text, extra)
        yield from files_that_name(tree, extra)
    yield from traces(tree, python, whole, removed)
    try:
        with serving(tree, models) as url:
            yield from unanswered(url)
    except RuntimeError as error:
        yield str(error)
    if tests:
        for words in (["init", "--quiet"], ["add", "--all"], [*_AUTHOR, "commit", "--quiet", "--message", "A copy"]):
            subprocess.run(["git", *words], cwd=tree, check=True)  # some tests ask git for the files
        if status := surface.run(["make", "test", "ARGS=core"], tree).returncode:
            yield f"`make test ARGS=core` ended with {status}; its output is in {tree / 'build' / 'tests'}"


def build_models(folder: Path) -> Path:
    """Build the models of REQUESTS. Return the folder of their entries."""
    python = prepare(folder / "whole", [])
    names = sorted({name for _, name, _ in REQUESTS if name is not None})
    surface.run([str(python), "-c", BUILD_MODELS, str(folder / "local"), *names], folder / "whole", check=True)
    return folder / "local" / "models"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = extras()
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"{', '.join(every)}; {ALL}: all together")
    parser.add_argument("--tests", action="store_true", help="also run `make test ARGS=core` in each copy")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="an empty folder; the copies stay there")
    options = parser.parse_args()
    names = options.extras or [*every, ALL]
    if unknown := [name for name in names if name not in (*every, ALL)]:
        parser.error(f"no extra {', '.join(unknown)}; there are {', '.join(every)}")
    if options.keep and options.keep.exists() and any(options.keep.iterdir()):
        parser.error(f"{options.keep} is not empty: remove it, or name another folder")
    failed = []
    with contextlib.ExitStack() as stack:
        folder = options.keep.resolve() if options.keep else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        print("the whole tree ...", flush=True)
        models = build_models(folder)
        whole = surface.of_tree(folder / "whole", folder / "whole" / ".venv" / "bin" / "python")
        for name in names:
            began_s = time.monotonic()
            print(f"without {name} ...", flush=True)
            removed = [every[name]] if name != ALL else [*every.values()]
            lines = [*findings(folder / name, whole, removed, models, options.tests)]
            for line in lines:
                print(f"  {line}", flush=True)
            print(f"without {name}: {'FAILED' if lines else 'ok'}, {time.monotonic() - began_s:.0f} s", flush=True)
            failed += [name] if lines else []
            if not options.keep:
                shutil.rmtree(folder / name)
    print(f"failed: {', '.join(failed)}" if failed else "the core needs and shows none of them")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
