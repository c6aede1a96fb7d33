"""Answers to the first mistakes, and the output of a start: each message holds the fix, and none looks like a fault."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import click
import msgspec
import pytest
from click.testing import CliRunner

from sie_cli.main import main
from sie_cli.refusal import CommandRefused
from sie_cli.serve import processes
from sie_cli.serve.output import LineOutput
from sie_cli.serve.ports import free_port
from sie_cli.serve.supervisor import Child, Supervisor
from sie_client import SIEAsyncClient, SIEClient
from sie_contracts.errors import NotFound, SIEError
from sie_contracts.models.entries import ModelEntry, Weights
from sie_contracts.settings import load
from sie_gateway.http.app import Gate
from sie_runtime.process import QUIET_S, START_S, Trouble
from sie_store.weights.sources import WeightSources


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/v1/encode", "/v1/encode/{model}"),
        ("/encode/org/model", "/v1/encode/{model}"),
        ("/v1/encdoe/org/model", "/v1/encode/{model}"),
        ("/v1/model", "/v1/models"),
        ("/embeding", "/embeddings"),
        ("/helth", "/health"),
        ("//health", "/health"),
        ("/v1//embeddings", "/v1/embeddings"),
    ],
)
def test_a_path_that_is_none_names_the_route_that_is_like_it(path: str, near: str) -> None:
    with pytest.raises(NotFound) as caught:
        Gate(load(environ={}).settings).check("POST", path, "")
    assert caught.value.message == f"no such path; did you mean {near}?"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "/v1/v1/encode/org/model",
            "no such path: it begins with /v1 twice; did you mean /v1/encode/{model}, and a base URL without /v1?",
        ),
        ("/v1/v1/none", "no such path: it begins with /v1 twice; see /docs"),
        (
            "/v1/embed/org/model",
            "no such path; did you mean /v1/encode/{model}? /v1/embeddings takes the model in the body",
        ),
        (
            "/embeddings/org/model",
            "no such path; did you mean /v1/encode/{model}? /v1/embeddings takes the model in the body",
        ),
        ("/v1/rerank/m", "no such path; did you mean /v1/score/{model}? /v1/rerank takes the model in the body"),
    ],
)
def test_a_path_with_a_part_too_many_names_the_route_that_has_it_there(path: str, message: str) -> None:
    with pytest.raises(NotFound) as caught:
        Gate(load(environ={}).settings).check("POST", path, "")
    assert caught.value.message == message


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/generate/org/m", "/v1/estimate", "/v1/recommend"],
)
def test_a_route_of_language_models_names_what_this_server_does(path: str) -> None:
    with pytest.raises(NotFound) as caught:
        Gate(load(environ={}).settings).check("POST", path, "")
    assert caught.value.message.startswith("this server does not generate text: use /v1/encode, /v1/score or /v1/extr")


@pytest.mark.parametrize("path", ["/v1/chat", "/none", "/v1", "/x" * 5000, "/" + "é" * 300])
def test_a_path_that_is_like_no_route_names_the_page_of_all(path: str) -> None:
    with pytest.raises(NotFound) as caught:
        Gate(load(environ={}).settings).check("GET", path, "")
    assert caught.value.message == "no such path; see /docs"


def test_a_wait_that_every_start_has_is_not_told_and_one_that_lasts_is(caplog: pytest.LogCaptureFixture) -> None:
    """A short wait logs nothing, a longer one an INFO line, a wait of START_S a WARNING. The next wait starts over."""
    now_s = 0.0
    trouble = Trouble(logging.getLogger("test"), "waiting", START_S, lambda: now_s)
    with caplog.at_level(logging.INFO):
        for now_s, line_count in (
            (0.0, 0),
            (QUIET_S - 0.1, 0),
            (QUIET_S, 1),
            (START_S - 0.1, 1),
            (START_S, 2),
            (2 * START_S, 2),
        ):
            trouble.met("nobody is there")
            assert len(caplog.records) == line_count, now_s
        trouble.passed()
        trouble.met("nobody is there")
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_a_failure_without_a_text_is_logged_by_its_class(caplog: pytest.LogCaptureFixture) -> None:
    Trouble(logging.getLogger("test"), "cannot read", 0.0, lambda: 0.0).met(TimeoutError())
    assert [record.getMessage() for record in caplog.records] == ["cannot read: TimeoutError"]


async def test_the_last_line_of_a_start_that_failed_says_which_setting_it_was() -> None:
    """Other processes log while they drain, so the line of the failed process is far above the end."""
    log_lines: list[tuple[str, Sequence[str]]] = []
    supervisor = Supervisor(lambda child, lines, level: log_lines.append((child, lines)))
    code = "import sys; print('error: SIE_DEVICE: there is none\\nmore', end=''); sys.exit(2)"
    await supervisor.start(Child("adapter", [sys.executable, "-c", code], os.environ))
    assert await asyncio.wait_for(supervisor.fatal, 30) == "adapter error: SIE_DEVICE: there is none"
    assert [line for _, lines in log_lines for line in lines] == ["error: SIE_DEVICE: there is none", "more"]


async def test_a_first_start_that_fails_is_refused_with_the_name_of_the_child(tmp_path: Path) -> None:
    (program := tmp_path / "nats-server").write_text("")
    supervisor = Supervisor(lambda child, lines, level: None)
    child = Child("nats-server", [str(program)], os.environ)
    with pytest.raises(CommandRefused, match="nats-server cannot be started: "):
        await supervisor.start(child)
    await supervisor.stop([child])


def test_a_line_has_the_level_of_its_process_or_of_its_event(capsys: pytest.CaptureFixture[str]) -> None:
    output = LineOutput(json=True)
    output("sidecar", "was killed by signal 9; starting again in 1 s", level="WARNING")
    told = ("[ERR] JetStream has no room", "[INF] Server is ready")
    output("nats-server", *(f"[1] 2026/11/26 08:00:00 {line}" for line in told))
    output("adapter", "a line that is not JSON")
    entries = [msgspec.json.decode(line) for line in capsys.readouterr().err.splitlines()]
    assert [(entry["logger"], entry["level"]) for entry in entries] == [
        ("sidecar", "WARNING"),
        ("nats-server", "ERROR"),
        ("adapter", "INFO"),
    ]


def test_a_log_whose_disk_was_full_gets_the_lines_after_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = LineOutput(json=False)
    with open("/dev/full", "w") as log, (tmp_path / "log").open("w") as with_space:
        monkeypatch.setattr(sys, "stderr", log)
        output("serve", "lost")
        assert os.path.samestat(os.fstat(log.fileno()), os.stat("/dev/full")), "nothing would be written any more"
        os.dup2(with_space.fileno(), log.fileno())
        output("serve", "kept")
    assert (tmp_path / "log").read_text().endswith("[serve] kept\n")


@pytest.mark.parametrize("client", [SIEClient, SIEAsyncClient])
def test_an_address_without_a_scheme_is_told_before_anything_is_sent(
    client: type[SIEClient] | type[SIEAsyncClient],
) -> None:
    with pytest.raises(
        ValueError, match=r"base_url: expected a URL that begins with http:// or https://, such as http"
    ):
        client("127.0.0.1:8080")


def test_a_lora_that_is_no_folder_and_no_repository_says_what_was_looked_for(tmp_path: Path) -> None:
    """A name without an organisation is the name of a folder: no hub is contacted."""
    entry = ModelEntry(
        id="toy/one", weights=Weights(path="/toy"), family="text-encoder", outputs={"dense": 8}, max_tokens=8
    )
    with pytest.raises(SIEError) as caught:
        WeightSources(tmp_path, True).locate_lora("my-lora", entry, str(tmp_path))
    assert caught.value.reason == "lora_not_found"
    assert (
        "there is no such folder in the models folder, and a hub repository has the form organisation/name"
        in caught.value.message
    )
    with pytest.raises(SIEError) as caught:
        WeightSources(tmp_path, False).locate_lora(f"org/lora@{'a' * 40}", entry, str(tmp_path))
    assert "a LoRA of a client" not in caught.value.message, "the name that logs have for it"
    assert str(tmp_path) not in caught.value.message


def test_no_command_of_the_overview_is_cut_off() -> None:
    """The terminal has 80 columns."""
    with click.Context(main, info_name="sie", terminal_width=80) as context:
        overview = main.get_help(context).partition("Commands:\n")[2]
    assert {line.split()[0] for line in overview.splitlines()} == {
        name for name, command in main.commands.items() if not command.hidden
    }
    assert "..." not in overview


def greeting(folder: Path, environ: dict[str, str], *args: str, has_page: bool = True) -> dict[str, str]:
    """Return the output of `sie serve` when everything is ready, by the first word of each line."""
    lines: list[str] = []

    async def greeted(run: Any) -> int:
        run._set_defaults()
        run._children()
        run._say = lambda _name, line, level="INFO": lines.append(line)
        run._greet(has_page=has_page)
        return 0

    base_environ = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    argv = ["serve", "--standalone", "--port", str(free_port()), "--data-dir", str(folder / "data"), *args]
    with (
        mock.patch.dict(os.environ, base_environ | environ, clear=True),
        mock.patch.object(processes.LocalCluster, "run", greeted),
    ):
        done = CliRunner().invoke(main, argv)
    assert done.exit_code == 0, done.output
    return {line.partition(" ")[0]: line for line in lines}


@pytest.mark.parametrize(
    ("environ", "host", "warns"),
    [
        ({}, "127.0.0.1", False),
        ({}, "localhost", False),
        ({}, "0.0.0.0", True),
        ({"SIE_AUTH_MODE": "static", "SIE_AUTH_TOKEN": "x" * 32}, "0.0.0.0", False),
    ],
)
def test_a_server_that_everybody_may_use_says_so(
    tmp_path: Path, environ: dict[str, str], host: str, warns: bool
) -> None:
    assert ("warning:" in greeting(tmp_path, environ, "--host", host)) == warns


@pytest.mark.parametrize(
    ("environ", "example"),
    [
        ({}, f"/v1/encode/{processes.EXAMPLE_MODEL} "),
        ({"SIE_BUNDLE": "search"}, "/v1/models"),
        ({"SIE_MODEL_FILTER": "BAAI/bge-m3"}, "/v1/models"),
    ],
)
def test_the_request_to_try_is_one_that_this_server_answers(
    tmp_path: Path, environ: dict[str, str], example: str
) -> None:
    assert example in greeting(tmp_path, environ)["try"]


@pytest.mark.parametrize(("mode", "has_keys"), [("none", False), ("static", False), ("token", True)])
def test_how_a_key_is_made_is_said_where_there_are_keys(tmp_path: Path, mode: str, has_keys: bool) -> None:
    hints = greeting(tmp_path, {"SIE_AUTH_MODE": mode, "SIE_AUTH_TOKEN": "x" * 32})
    assert ("sie keys create" in hints.get("keys", "")) == has_keys
    assert ("-H 'Authorization: Bearer TOKEN'" in hints["try"]) == (mode != "none")


@pytest.mark.parametrize("has_page", [True, False])
def test_a_start_names_the_page_of_a_gateway_that_has_one(tmp_path: Path, has_page: bool) -> None:
    assert ("live status: http://127.0.0.1:" in greeting(tmp_path, {}, has_page=has_page)["API"]) == has_page
