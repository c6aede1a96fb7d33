"""Compare what SIE offers with what it offered at another revision: routes, commands, settings, metrics, error codes,
the OpenAPI document, model families, entry points and values of the chart.

    python tools/surface.py                  compare with v0.1.0
    python tools/surface.py REVISION         compare with another revision
    python tools/surface.py --json           print what this tree offers, in the present environment

Each tree is installed into an environment of its own, which takes the libraries of the present one and no network. MEANT
lists the differences that are meant, with their reasons. Status 1: there is another difference.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import fnmatch
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TAG = "v0.1.0"
Surface = dict[str, dict[str, Any]]
# pattern of a line `removed command: sie top` -> the reason
MEANT: Mapping[str, str] = {}
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
    subprocess.run([*pip, *options, "-e", str(tree), "-e", str(tree / "sdk" / "alias")], env=_environ(), check=True)
    for program in Path(sys.executable).parent.iterdir():
        if not (own := folder / "bin" / program.name).exists():
            own.symlink_to(program)
    return python


def _environ() -> dict[str, str]:
    """Return the environment of a process that has the code of its own environment only."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run(argv: list[str], tree: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=tree, env=_environ(), text=True, **options)


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
    from sie_gateway.http.routes import ROUTES

    every_family: Any = getattr(families, "rows", lambda: families.FAMILIES)
    document = asyncio.run(api_page.document())
    project = tomllib.loads((tree / "pyproject.toml").read_text("utf-8"))["project"]
    values = yaml.safe_load((tree / "charts" / "sie-cluster" / "values.yaml").read_text("utf-8"))
    return {
        "route": {f"{row.method} {row.path}": {"scope": row.scope, "endpoint": row.endpoint} for row in ROUTES},
        "operation": {
            f"{method.upper()} {path}": operation
            for path, methods in api_page.inlined(document).items()
            for method, operation in methods.items()
        },
        "schema": document["components"]["schemas"],
        "command": dict(_commands()),
        "setting": {cells[0]: cells[1:4] for cells in _cells(settings_page.tables())},
        "metric": {cells[0]: cells[1:3] for cells in _cells(metrics_page.metrics())},
        "error": {leaf.code: [leaf.__name__, leaf.status] for leaf in errors.catalogue()},
        "family": {name: family.extra for name, family in every_family().items()},
        "entry point": {
            f"{group} {name}": value
            for group, entries in {"console_scripts": project["scripts"], **project.get("entry-points", {})}.items()
            for name, value in entries.items()
        },
        "chart value": dict(_flat(values)),
    }


def _cells(table: str) -> Iterator[list[str]]:
    """Yield the cells of the rows of tables in Markdown that begin with a name."""
    for line in table.splitlines():
        if line.startswith("| `"):
            first, *rest = (cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|")))
            yield [first.strip("`"), *rest]


def _commands() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all commands with their options and arguments."""
    import click

    from sie_cli.main import main

    waiting: list[tuple[str, click.Command]] = [("sie", main)]
    while waiting:
        name, command = waiting.pop()
        yield name, {" ".join(option.opts): _parameter(option) for option in command.params}
        if isinstance(command, click.Group):
            context = click.Context(command)
            waiting += [
                (f"{name} {word}", below)
                for word in command.list_commands(context)
                if (below := command.get_command(context, word)) is not None
            ]


def _parameter(option: Any) -> list[Any]:
    choices = [str(choice) for choice in getattr(option.type, "choices", ())]
    default = None if callable(option.default) else str(option.default)
    return [option.type.name, choices, default, option.required, option.nargs, option.multiple, option.secondary_opts]


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, member in value.items():
            yield from _flat(member, f"{name}.{key}" if name else key)
    else:
        yield name, value


def differences(before: Surface, after: Surface) -> Iterator[tuple[str, str]]:
    """Yield a line and the details for everything that was removed, added or changed. Names of schemas and modules are
    not offered to anybody, so they do not count.
    """
    for kind in (kind for kind in after if kind != "schema"):
        old, new = before.get(kind, {}), after[kind]
        for name in old.keys() - new.keys():
            yield f"removed {kind}: {name}", ""
        for name in new.keys() - old.keys():
            yield f"added {kind}: {name}", ""
        for name in old.keys() & new.keys():
            if old[name] != new[name] and kind != "entry point":
                yield f"changed {kind}: {name}", _details(old[name], new[name])


def _details(old: Any, new: Any) -> str:
    texts = [json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False).splitlines() for value in (old, new)]
    lines = [line for line in difflib.unified_diff(*texts, lineterm="", n=1) if line[:3] not in ("---", "+++", "@@ ")]
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
    lines = sorted(differences(before, after))
    unmeant = 0
    for line, details in lines:
        reason = next((MEANT[pattern] for pattern in MEANT if fnmatch.fnmatchcase(line, pattern)), None)
        unmeant += reason is None
        print(f"{line}  (meant: {reason})" if reason else line)
        if details and not reason:
            print(details)
    print(f"{len(lines)} differences to {options.revision}, of which {unmeant} are not meant")
    return 1 if unmeant else 0


if __name__ == "__main__":
    sys.exit(main())
