"""Compare what SIE offers with what it offered at another revision: routes, commands, settings, metrics, error codes,
the OpenAPI document, model families, entry points and values of the chart.

    python tools/surface.py                  compare with v0.1.0
    python tools/surface.py REVISION         compare with another revision
    python tools/surface.py --json           print what the tree of this folder offers

Each tree is installed into an environment of its own, with the libraries of the present one and without network. MEANT
lists the differences that are meant, each with its reason. Status 1: there is another difference.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import functools
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections import defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TAG = "v0.1.0"
Surface = dict[str, dict[str, Any]]
# reason -> patterns of the lines, such as `removed command: sie top`
MEANT: Mapping[str, tuple[str, ...]] = {
    "extras register by entry points": ("added entry point: sie.*", "changed schema: Readiness"),
    "deleted: sie airgap; a page says how to mirror images, wheels and models": ("removed *: sie airgap*",),
    "deleted: sie top; sie status, the console and metrics show the same": (
        "removed *: sie top*",
        "added *: sie status*",
    ),
    "deleted: the replay and the recording of traffic; bench/ replays the scheduler": (
        "removed *: sie bench*",
        "removed option: sie sidecar --record-trace",
    ),
    "deleted: the dialect of NeMo Guardrails and its default model of redactions": (
        "removed *: POST /v1/extract",
        "removed schema: Guardrail*",
        "changed setting: SIE_DEFAULT_MODELS",
    ),
    "deleted: remote servers; a proxy in front of the cluster is the place for another server": (
        "removed *: SIE_REMOTES",
        "removed option: sie * --remotes",
        "removed option: sie keys create --remote",
        "removed metric: sie_gateway_remote_*",
        "changed parameter: header X-SIE-Remote",
        "changed schema: Cluster*",
    ),
    "added: routes and fields of today's public clients": (
        "added [ro]*: POST */pooling",
        "added [ro]*: POST */multi-vector",
        "added [ro]*: POST */score",
        "added [ro]*: POST */rerank*",
        "added [ro]*: * /tei/{model*}/*",
        "added schema: *",
        "changed operation: * /models*",
        "changed operation: * /v1/models*",
        "changed operation: POST */embed*",
        "changed operation: POST */tokenize",
        "changed operation: POST /v1/contextualizedembeddings",
        "changed parameter: header X-SIE-Explain",
        "changed parameter: header X-SIE-Strict",
        "changed parameter: query output",
        "changed schema: Classify",
        "changed schema: Contextualized*",
        "changed schema: Embed*",
        "changed schema: ExtractParams",
        "changed schema: ModelInfo",
        "changed schema: OllamaEmbed",
        "changed schema: Re[qr]*",
        "changed schema: SegmentInfo",
        "changed schema: Tei*",
        "changed schema: Usage",
    ),
    "changed: an input is poison after two deaths alone": ("changed operation: GET /v1/dead-letters*",),
    "added: the config service makes the queues of the pool of the installation only": (
        "added option: sie config --pool",
        "changed setting: SIE_POOL",
        "added metric: sie_config_foreign_key_records_total",
    ),
    "added: networks and spot machines of the chart": (
        "added chart value: machineProfiles.l4-spot.*",
        "added chart value: network*",
    ),
}
SHOWN_LINES = 12  # of the difference of two values


def environment(tree: Path, folder: Path) -> Path:
    """Install the code of a tree, with its entry points, into a new environment in `folder`, which also has the
    libraries and programs of the present environment. Return its Python.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python3*/site-packages")
    # files *.pth of these folders are not read, so the code of the present environment stays out
    libraries = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "libraries.pth").write_text("\n".join(libraries))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed", "--no-compile"]
    subprocess.run([*pip, *options, "-e", str(tree), "-e", str(tree / "sdk" / "alias")], env=environ(), check=True)
    for program in Path(sys.executable).parent.iterdir():
        if not (own := folder / "bin" / program.name).exists():
            own.symlink_to(program)
    return python


def environ() -> dict[str, str]:
    """Return the environment of a process that has the code of its own environment only."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run(argv: list[str], tree: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=tree, env=environ(), text=True, **options)


def of_tree(tree: Path, python: Path) -> Surface:
    """Return what a tree offers. A process of its environment collects it. Raise SystemExit with its error."""
    done = run([str(python), __file__, "--json"], tree, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{tree}: what it offers cannot be read:\n{done.stderr[-4000:]}")
    surface: Surface = json.loads(done.stdout)
    return surface


def collect(tree: Path) -> Surface:
    """Return what the tree of the present environment offers. Its scripts of generated pages name settings, metrics and
    the OpenAPI document.
    """
    sys.path.insert(0, str(tree / "tests"))
    import api_page
    import metrics_page
    import settings_page
    import yaml

    from sie_contracts import errors
    from sie_contracts.models import families
    from sie_gateway.http import routes

    every_family: Any = getattr(families, "rows", lambda: families.FAMILIES)  # older trees have no packages of families
    project = tomllib.loads((tree / "pyproject.toml").read_text("utf-8"))["project"]
    plugins: Mapping[str, Any] = getattr(getattr(routes, "PLUGINS", None), "loaded", {})  # older trees have none
    # a row of a plug-in may have a handler of the core
    brought = {
        id(row): project["entry-points"]["sie.gateway"][name] for name in plugins for row in plugins[name].routes
    }
    modules = {f"route {row.method} {row.path}": brought.get(id(row)) or _modules(row.handler) for row in routes.ROUTES}
    modules |= {f"family {name}": family.implementation for name, family in every_family().items()}
    document = asyncio.run(api_page.document())
    values = yaml.safe_load((tree / "charts" / "sie-cluster" / "values.yaml").read_text("utf-8"))
    return {
        "route": {f"{row.method} {row.path}": {"scope": row.scope, "endpoint": row.endpoint} for row in routes.ROUTES},
        **_openapi(document),
        **_commands(modules),
        "setting": {cells[0]: cells[1:4] for cells in _cells(settings_page.tables())},
        "metric": {cells[0]: cells[1:3] for cells in _cells(metrics_page.metrics())},
        "error": {leaf.code: [leaf.__name__, leaf.status] for leaf in errors.catalogue()},
        "family": {name: family.extra for name, family in every_family().items()},
        "entry point": {
            f"{group} {name}": value
            for group, entries in {"console_scripts": project["scripts"], **project.get("entry-points", {})}.items()
            for name, value in entries.items()
        },
        "chart value": dict(flat(values)),
        "module": modules,
    }


def code_folders(tree: Path) -> list[Path]:
    """Return the folders whose packages the installation of a tree has."""
    build = tomllib.loads((tree / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]
    return [tree / folder for folder in build["dev-mode-dirs"]]


def _openapi(document: Mapping[str, Any]) -> Surface:
    """Return the operations of a document, and apart from them the parameters and schemas that many of them share."""
    operations, parameters = {}, defaultdict[str, list[Any]](list)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            names = []
            for parameter in operation.pop("parameters", ()):
                name = f"{parameter['in']} {parameter['name']}"
                names.append(name)
                parameters[name] += [parameter] if parameter not in parameters[name] else []
            operations[f"{method.upper()} {path}"] = {**operation, "parameters": names}
    sorted_forms = {name: sorted(forms, key=json.dumps) for name, forms in parameters.items()}
    return {"operation": operations, "parameter": sorted_forms, "schema": document["components"]["schemas"]}


def _cells(table: str) -> Iterator[list[str]]:
    """Yield the cells of the rows of tables in Markdown that begin with a name."""
    for line in table.splitlines():
        if line.startswith("| `"):
            first, *rest = (cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|")))
            yield [first.strip("`"), *rest]


def _modules(handler: Any) -> str:
    """Return the modules of a function, and of the functions that a partial one binds."""
    parts = [handler.func, *handler.args] if isinstance(handler, functools.partial) else []
    return " ".join(filter(None, [getattr(handler, "__module__", ""), *map(_modules, parts)]))


def _commands(modules: dict[str, str]) -> Surface:
    """Return all commands, and their options and arguments. Add the module of each command to `modules`."""
    import click

    from sie_cli.main import main

    commands: Surface = {"command": {}, "option": {}}
    waiting: list[tuple[str, click.Command]] = [("sie", main)]
    while waiting:
        name, command = waiting.pop()
        commands["command"][name] = ""
        modules[f"command {name}"] = _modules(command.callback)
        commands["option"] |= {f"{name} {option.opts[0]}": _option(option) for option in command.params}
        if isinstance(command, click.Group):
            context = click.Context(command)
            waiting += [
                (f"{name} {word}", below)
                for word in command.list_commands(context)
                if (below := command.get_command(context, word)) is not None
            ]
    return commands


def _option(option: Any) -> dict[str, Any]:
    return {
        "names": [*option.opts, *option.secondary_opts],
        "type": [option.type.name, *map(str, getattr(option.type, "choices", ()))],
        "default": None if callable(option.default) else str(option.default),
        "count": [option.required, option.nargs, option.multiple],
    }


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested maps, with their keys joined by dots."""
    if isinstance(value, dict) and value:
        for key, member in value.items():
            yield from flat(member, f"{name}.{key}" if name else key)
    else:
        yield name, value


def differences(before: Surface, after: Surface) -> Iterator[tuple[str, str]]:
    """Yield a line and the details for everything that was removed, added or changed. Modules do not count."""
    for kind, new in after.items():
        if kind == "module":
            continue
        old = before.get(kind, {})
        for name in old.keys() - new.keys():
            yield f"removed {kind}: {name}", ""
        for name in new.keys() - old.keys():
            yield f"added {kind}: {name}", ""
        for name in old.keys() & new.keys():
            if old[name] != new[name] and kind != "entry point":
                yield f"changed {kind}: {name}", _details(old[name], new[name])


def _details(old: Any, new: Any) -> str:
    before, after = (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) for value in (old, new))
    diff = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1)
    lines = [line for line in diff if line[:3] not in ("---", "+++", "@@ ")]
    more = [f"... {len(lines) - SHOWN_LINES} more lines"] if len(lines) > SHOWN_LINES else []
    return "\n".join(f"    {line}" for line in [*lines[:SHOWN_LINES], *more])


def _at_revision(revision: str, folder: Path) -> Surface:
    """Return what a revision offers, from a temporary worktree."""
    tree = folder / "tree"
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
    try:
        return of_tree(tree, environment(tree, folder / "before"))
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def _reason(line: str) -> str | None:
    return next((reason for reason in MEANT if any(fnmatchcase(line, each) for each in MEANT[reason])), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", default=TAG, help=f"the revision to compare with; default: {TAG}")
    parser.add_argument("--json", action="store_true", help="print what the tree of the present folder offers")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(collect(Path.cwd()), sort_keys=True))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = _at_revision(options.revision, folder)
        after = of_tree(ROOT, environment(ROOT, folder / "after"))
    lines = sorted(differences(before, after), key=lambda row: (_reason(row[0]) is None, row))
    unmeant = 0
    for line, details in lines:
        reason = _reason(line)
        unmeant += reason is None
        print(f"{line}  (meant: {reason})" if reason else line)
        if details and not reason:
            print(details)
    print(f"{len(lines)} differences to {options.revision}, of which {unmeant} are not in MEANT")
    return 1 if unmeant else 0


if __name__ == "__main__":
    sys.exit(main())
