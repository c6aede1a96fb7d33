"""Packages that add to the product by entry points: what they add is found, and a broken one stops nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from sie_cli.options import Commands
from sie_gateway import plugin
from sie_gateway.http.routes import CORE
from sie_gateway.operations.findings import of_plugins

COMMAND = 'import click\n@click.command(short_help="Says hello.")\ndef hello():\n    click.echo("hello")\n'


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, group: str, modules: Mapping[str, str]) -> None:
    """Install a package `stranger`, with one module and one entry point for each of `modules`."""
    about = folder / "stranger-1.0.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text("Metadata-Version: 2.4\nName: stranger\nVersion: 1.0\n")
    rows = [f"{name.removeprefix('stranger_')} = {name}:hello [more]" for name in modules]
    about.joinpath("entry_points.txt").write_text("\n".join([f"[{group}]", *rows]))
    for name, code in modules.items():
        folder.joinpath(f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(folder)


def test_commands_of_packages_run_and_a_broken_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "stranger_hello": COMMAND,
        "stranger_raises": "raise ValueError('out of order')",
        "stranger_lacks": "import no_such_package\n" + COMMAND,
    }
    _install(tmp_path, monkeypatch, "sie.commands", modules)
    own = click.Command("own", callback=lambda: click.echo("own"))
    program = click.Group("sie", commands=Commands({"own": own}, "sie.commands"))
    run = CliRunner().invoke
    assert {"own", "hello", "raises", "lacks"} <= set(program.commands)
    assert run(program, ["hello"]).output == "hello\n"
    assert run(program, ["own"]).output == "own\n"
    assert run(program, ["--help"]).exit_code == 0
    raised = run(program, ["raises", "--any", "thing"])
    assert (raised.exit_code, "ValueError: out of order" in raised.output) == (2, True)
    lacking = run(program, ["lacks"])
    assert (lacking.exit_code, "pip install 'stranger[more]'" in lacking.output) == (2, True)


ROUTE = """
from sie_gateway.http.route_kinds import control
from sie_gateway.plugin import Plugin
async def answer(gateway, request): return {}
hello = Plugin(routes=(control("GET", "%s", "hello", answer, ("Stranger", "Hello"), dict),))
"""


def test_gateway_takes_routes_of_packages_and_names_those_that_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    modules = {
        "stranger_route": ROUTE % "/v1/hello",
        "stranger_twice": ROUTE % "/v1/models",
        "stranger_faulty": "raise ValueError('out of order')",
        "stranger_apart": "import no_such_package\n",
    }
    _install(tmp_path, monkeypatch, plugin.GROUP, modules)
    monkeypatch.setattr(plugin, "_entries", plugin._entries.__wrapped__)
    with caplog.at_level("INFO", "sie.gateway.plugins"):
        loaded = plugin.load(CORE)
    assert "/v1/hello" in {route.path for route in loaded.routes}
    assert loaded.faults.keys() == {"faulty", "twice"}
    assert loaded.faults["faulty"] == "ValueError: out of order"
    told = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert [line for line in told if "pip install 'stranger[more]'" in line]
    assert [finding.check for finding in of_plugins(loaded.faults)] == ["gateway", "gateway"]
