"""The options of all commands: one name for one thing, in any position."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from sie_cli.main import main
from sie_cli.options import behind
from sie_cli.serve.ports import free_port

ADDRESSES = {"--nats-url", "--gateway-url", "--config-service-url"}
PROCESSES = {"serve", "gateway", "config", "sidecar", "adapter", "settings", "standalone"}
BROWSED = {"sie keys", "sie status", "sie try", "sie models list", "sie models history"}
NOWHERE = "nats://127.0.0.1:1"


def commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        for name, subcommand in command.commands.items():
            yield from commands(subcommand, (*path, name))
    else:
        yield path, command


def options(command: click.Command) -> set[str]:
    return {
        name
        for param in command.params
        if isinstance(param, click.Option)
        for name in (*param.opts, *param.secondary_opts)
    }


def test_whatever_asks_a_server_takes_its_address_as_url_or_a_data_directory() -> None:
    names = set()
    for path, command in commands(main, ("sie",)):
        if path[1] in PROCESSES:
            continue
        flags = options(command)
        assert "--gateway" not in flags, path
        if flags & ADDRESSES or "--url" in flags:
            names |= {" ".join(path), " ".join(path[:2])}
            assert {"--url", "--data-dir"} <= flags, path
    assert names >= BROWSED


@pytest.mark.parametrize(
    ("args", "moved"),
    [
        (["--url", "u", "keys", "list"], ["keys", "list", "--url", "u"]),
        (["--url=u", "--data-dir", "d", "list", "--yes"], ["list", "--yes", "--url=u", "--data-dir", "d"]),
        (["show", "--url", "u", "id"], ["show", "--url", "u", "id"]),
        (["--pool", "p", "show", "--", "-id"], ["show", "--pool", "p", "--", "-id"]),
        (["--url", "u"], ["--url", "u"]),
        (["--help"], ["--help"]),
    ],
)
def test_where_to_look_may_be_said_before_the_command(args: list[str], moved: list[str]) -> None:
    assert behind(args) == moved


@pytest.mark.parametrize(
    "line", ["--url {} keys list", "keys --url {} list", "keys --nats-url {} list", "keys list --url {}"]
)
def test_each_position_means_the_same(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sie_cli.cluster.CONNECT_S", 0.2)
    result = CliRunner().invoke(main, line.format(NOWHERE).split())
    assert (result.exit_code, NOWHERE in result.output) == (2, True), result.output


def says_how_to_start(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sie_cli.cluster.default_data_dir", lambda: tmp_path)
    monkeypatch.setattr("sie_cli.cluster.GATEWAY", f"http://127.0.0.1:{free_port()}")
    result = CliRunner().invoke(main, line.split())
    assert result.exit_code in (1, 2), result.output
    assert re.search(
        "no `sie serve` runs with the data directory|no gateway answers at http://127.0.0.1", result.output
    )
    assert "start one with `sie serve`" in result.output
    assert "--url" in result.output
