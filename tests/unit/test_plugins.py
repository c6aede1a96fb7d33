"""Packages that add to the product by entry points: what they add is found, and a broken one stops nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import click
import pytest
from click.testing import CliRunner
from inprocess import InProcess

from sie_cli.options import Commands
from sie_contracts import entry_points
from sie_contracts.settings import SettingError
from sie_gateway import plugin
from sie_gateway.http import app
from sie_gateway.http.routes import CORE

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
from sie_gateway.http import app
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
    monkeypatch.setattr(entry_points, "FAULTS", {})
    with caplog.at_level("INFO", "sie.entry_points"):
        loaded = plugin.load(CORE)
    assert "/v1/hello" in {route.path for route in loaded.routes}
    assert loaded.faults.keys() == {"faulty", "twice"}
    assert loaded.faults["faulty"] == "ValueError: out of order"
    assert entry_points.FAULTS.keys() == {"sie.gateway faulty", "sie.gateway twice"}
    assert "pip install 'stranger[more]'" in loaded.missing["apart"]
    told = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert [line for line in told if "pip install 'stranger[more]'" in line]


class _Greeter(plugin.Service):
    pass


def test_gateway_serves_without_a_service_that_raises() -> None:
    """A wrong setting is no fault of the package, and ends the process as that of the core does."""
    context = cast(plugin.PluginContext, None)

    def raises(_: plugin.PluginContext) -> plugin.Service:
        raise ValueError("out of order")

    def refuses(_: plugin.PluginContext) -> plugin.Service:
        raise SettingError("SIE_GREETING", "expected a word")

    greeter, faults = _Greeter(), dict[str, str]()
    sound = {"greets": plugin.Plugin(build=lambda _: greeter), "rows": plugin.Plugin()}
    loaded = plugin.Plugins({**sound, "raises": plugin.Plugin(build=raises)}, {}, {})
    assert loaded.build(context, faults) == (greeter,)
    assert faults == {"raises": "ValueError: out of order"}
    with pytest.raises(SettingError, match="SIE_GREETING"):
        plugin.Plugins({"refuses": plugin.Plugin(build=refuses)}, {}, {}).build(context, {})


async def test_paths_of_a_plugin_that_is_not_installed_say_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = {"greetings": "the package hello is not installed: pip install 'stranger[more]'"}
    monkeypatch.setattr(app, "PLUGINS", plugin.Plugins({}, missing, {}))
    async with InProcess(tmp_path) as cluster:
        client = (await cluster.gateway(ready=False)).client
        answer = await client.get("/v1/greetings/today")
        assert (answer.status_code, "pip install 'stranger[more]'" in answer.text) == (404, True)
        assert "pip" not in (await client.get("/v1/other")).text


TABLES = """
from dataclasses import dataclass
from sie_contracts.settings.rows import row
from sie_contracts.settings.values import whole
from sie_runtime.metrics_table import Metric
@dataclass(frozen=True, kw_only=True, repr=False)
class Settings:
    greetings: int = row(3, "gateway", whole(1), "Greetings a minute.")
METRICS = {"gateway": (Metric("sie_gateway_greetings", "counter", "Greetings"),)}
"""
SHOWN = """
import sys
from sie_contracts.settings import BY_NAME, GROUPS, load
from sie_runtime.metrics import MetricMaker
import stranger
loaded = load(environ={"SIE_GREETINGS": "7"})
assert isinstance(loaded.settings, stranger.Settings) and "greetings=7" in repr(loaded.settings)
assert BY_NAME["SIE_GREETINGS"].heading == list(GROUPS)[-1] == "stranger"
MetricMaker("gateway").counter("sie_gateway_greetings").inc()
print(loaded.settings.greetings, loaded.sources["SIE_GREETINGS"], loaded.warnings)
"""


def test_settings_and_metrics_of_packages_join_the_tables(tmp_path: Path) -> None:
    about = tmp_path / "stranger-1.0.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text("Metadata-Version: 2.4\nName: stranger\nVersion: 1.0\n")
    about.joinpath("entry_points.txt").write_text(
        "[sie.settings]\nstranger = stranger:Settings\n[sie.metrics]\nstranger = stranger:METRICS\n"
    )
    tmp_path.joinpath("stranger.py").write_text(TABLES)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    shown = subprocess.run(
        [sys.executable, "-c", SHOWN],
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert (shown.returncode, shown.stdout.strip()) == (0, "7 environment ()"), shown.stderr


def test_what_an_extra_lacks_is_found_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, "sie.commands", {"stranger_hello": "raise ValueError"})
    about = tmp_path / "stranger-1.0.dist-info" / "METADATA"
    about.write_text(
        "Metadata-Version: 2.4\nName: stranger\nVersion: 1.0\nProvides-Extra: more\nProvides-Extra: else\n"
        'Requires-Dist: click>=8; extra == "more"\nRequires-Dist: no-such-package>=2; extra == "more"\n'
        "Requires-Dist: nor-this-one; extra == 'else'\n"
    )
    found = dict(entry_points.lacking("sie.commands"))
    assert found["hello"] == "no-such-package not installed: pip install 'stranger[more]'"
