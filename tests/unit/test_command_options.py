"""The options of all commands: one name for one thing, in any position; and commands that `sie doctor` tells people to
run.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from diagnosis import commands as commands_of
from diagnosis import doctor_templates

from sie_cli import access
from sie_cli.access import Access
from sie_cli.main import main
from sie_cli.models import _who_reads
from sie_cli.options import behind

ADDRESSES = {"--nats-url", "--gateway-url", "--config-service-url"}
PROCESSES = {"serve", "gateway", "config", "sidecar", "adapter", "settings", "standalone"}
BROWSED = {
    "sie keys",
    "sie dlq",
    "sie topology",
    "sie top",
    "sie doctor",
    "sie models list",
    "sie models compare",
    "sie models history",
}
NOWHERE = "nats://127.0.0.1:1"


def commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from commands(each, (*path, name))
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
    seen = set()
    for path, command in commands(main, ("sie",)):
        if path[1] in PROCESSES:
            continue
        given = options(command)
        assert "--gateway" not in given, path
        if given & ADDRESSES or "--url" in given:
            seen |= {" ".join(path), " ".join(path[:2])}
            assert {"--url", "--data-dir"} <= given, path
    assert seen >= BROWSED


@pytest.mark.parametrize(
    ("args", "moved"),
    [
        (["--url", "u", "dlq", "list"], ["dlq", "list", "--url", "u"]),
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
    "line", ["--url {} dlq list", "dlq --url {} list", "dlq --nats-url {} list", "dlq list --url {}"]
)
def test_each_position_means_the_same(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sie_cli.options.CONNECT_S", 0.2)
    found = CliRunner().invoke(main, line.format(NOWHERE).split())
    assert (found.exit_code, NOWHERE in found.output) == (2, True), found.output


def test_commands_that_doctor_tells_people_to_run_exist_with_their_options() -> None:
    """Every command in backticks in what it may print: each name and each option of it."""
    told = {line for text in doctor_templates() for line in commands_of(text)}
    assert {line.split()[1] for line in told} >= {"keys", "topology", "serve", "settings"}
    for line in told:
        command: click.Command = main
        words = shlex.split(line)[1:]
        while words and isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        for word in words:
            assert not word.startswith("--") or word in options(command), line


def test_it_is_said_who_reads_the_file_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, data_dir = tmp_path / "models", tmp_path / "data"
    folder.mkdir()
    data_dir.mkdir(mode=0o700)
    monkeypatch.setattr("sie_cli.models.default_data_dir", lambda: data_dir)
    assert "no `sie serve` runs" in _who_reads(folder, None)
    assert f"SIE_MODELS_DIR={folder}" in _who_reads(folder, None)
    with access.published(data_dir, Access(gateway_url="http://127.0.0.1:1", models_dir=str(folder))):
        assert (
            _who_reads(folder, None)
            == "the `sie serve` that runs reads this folder: it serves the model within seconds"
        )
    with access.published(data_dir, Access(gateway_url="http://127.0.0.1:1", models_dir=str(tmp_path / "other"))):
        told = _who_reads(folder, None)
    assert f"does not read this folder, it reads {tmp_path / 'other'}" in told


def test_a_command_of_a_group_is_found_without_it() -> None:
    told = CliRunner().invoke(main, ["inspect", "folder"]).output
    assert "Did you mean `sie models inspect`?" in told
    assert "Did you mean" not in CliRunner().invoke(main, ["nonsense"]).output
