"""The options of all commands: one name for one thing, in any position."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from sie_cli import access
from sie_cli.access import Access
from sie_cli.cluster import Cluster
from sie_cli.main import main
from sie_cli.models.add import who_reads
from sie_cli.models.service import service_of
from sie_cli.options import behind
from sie_cli.serve.command import FIRST
from sie_cli.serve.ports import free_port
from sie_contracts.settings import ROWS, load

ADDRESSES = {"--nats-url", "--gateway-url", "--config-service-url"}
PROCESSES = {"serve", "gateway", "config", "sidecar", "adapter", "settings", "standalone"}
BROWSED = {
    "sie keys",
    "sie status",
    "sie try",
    "sie models list",
    "sie models history",
}
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


@pytest.mark.parametrize(
    "line",
    [
        "keys list",
        "status",
        "try m text",
        "models list",
        "models show a",
    ],
)
def test_without_a_server_each_command_says_that_none_runs_and_how_to_start_one(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says_how_to_start(line, tmp_path, monkeypatch)


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


def test_a_server_without_the_part_that_is_asked_is_named(tmp_path: Path) -> None:
    """A `sie serve --standalone` is such a server; its gateway answers the routes that only read the catalogue."""
    with access.published(tmp_path, Access(gateway_url="http://127.0.0.1:1", admin_token="t")):
        for line in ("keys list", "models rm a"):
            result = CliRunner().invoke(main, [*line.split(), "--data-dir", str(tmp_path)])
            assert result.exit_code == 2
            assert "the `sie serve` at http://127.0.0.1:1 did not start" in result.output
        cluster = Cluster.locate(load(environ={}), tmp_path)
        with service_of(cluster, writes=False) as service:
            assert service.url == "http://127.0.0.1:1"


def sections(command: click.Command) -> dict[str, list[str]]:
    """Return the options that --help-all shows, by heading."""
    lines = CliRunner().invoke(main, [str(command.name), "--help-all"]).output.splitlines()
    groups: dict[str, list[str]] = {}
    for line in lines:
        if re.fullmatch(r"[A-Z].*:", line):
            groups[line.removesuffix(":")] = []
        elif line.startswith("  -") and groups:
            groups[list(groups)[-1]].append(line.split()[0].strip(","))
    return groups


def test_the_help_of_serve_begins_with_what_is_needed_first_and_groups_the_rest() -> None:
    groups = sections(main.commands["serve"])
    headings = list(dict.fromkeys(row.heading for row in ROWS))
    assert list(groups) == ["Most used options", "Options", *headings]
    assert tuple(groups["Most used options"]) == FIRST
    for heading in headings:
        assert groups[heading] == sorted(groups[heading])
        flags = {row.flag for row in ROWS if row.heading == heading and row.name.startswith("SIE_") and not row.secret}
        assert flags - set(FIRST) == set(groups[heading]), heading


# decisions of a user who starts a server: where it listens and who may call it, where its files and models are, what it
# loads and on which device, how much of it runs
TEN = {
    "listens": {"--host", "--port", "--auth-mode"},
    "keeps": {"--data-dir", "--models-dir", "--local-cache"},
    "computes": {"--preload-models", "--device", "--workers", "--standalone"},
}


@pytest.mark.parametrize("width", [40, 80, 140])
def test_ten_options_of_serve_come_before_all_others_in_a_terminal_of_any_width(width: int) -> None:
    short = CliRunner().invoke(main, ["serve", "--help"], terminal_width=width).output
    result = CliRunner().invoke(main, ["serve", "--help-all"], terminal_width=width)
    assert result.output.startswith(short.rstrip()), "--help is its beginning"
    assert len(short.splitlines()) < len(result.output.splitlines()) / 3
    assert "--help-all" in short
    shown = re.findall(r"^  (--?[a-z][a-z-]*)", result.output, re.MULTILINE)
    assert len(set(FIRST)) == 10
    assert set(FIRST) == set().union(*TEN.values())
    assert tuple(shown[:10]) == FIRST
    assert not set(FIRST) & set(shown[10:]), "each stands once"
    assert result.output.index("Most used options:") < result.output.index("\nOptions:")


def test_it_is_said_who_reads_the_file_of_a_model(tmp_path: Path) -> None:
    folder, data_dir = tmp_path / "my models", tmp_path / "data"
    folder.mkdir()
    data_dir.mkdir(mode=0o700)
    cluster = Cluster(load(environ={}).settings, {}, data_dir)
    assert "no `sie serve` runs" in who_reads(folder, cluster)
    assert f"SIE_MODELS_DIR='{folder}' sie serve" in who_reads(folder, cluster)
    with access.published(data_dir, Access(gateway_url="http://127.0.0.1:1", models_dir=str(folder))):
        assert (
            who_reads(folder, cluster)
            == "the running `sie serve` reads this folder: it serves the model within seconds"
        )
    with access.published(data_dir, Access(gateway_url="http://127.0.0.1:1", models_dir=str(tmp_path / "other"))):
        advice = who_reads(folder, cluster)
    assert f"does not read this folder, it reads {tmp_path / 'other'}" in advice


def test_a_command_of_a_group_is_found_without_it() -> None:
    output = CliRunner().invoke(main, ["inspect", "folder"]).output
    assert "Did you mean `sie models inspect`?" in output
    assert "Did you mean" not in CliRunner().invoke(main, ["nonsense"]).output


def test_a_mistyped_command_is_told_the_nearest_name() -> None:
    for typed, suggestion in (("serv", "serve"), ("setings", "settings"), ("stauts", "status")):
        result = CliRunner().invoke(main, [typed])
        assert result.exit_code == 2
        assert f"Did you mean `sie {suggestion}`?" in result.output


def test_version_is_a_command_too() -> None:
    assert CliRunner().invoke(main, ["version"]).output == CliRunner().invoke(main, ["--version"]).output
