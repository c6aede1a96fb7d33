"""Commands whose gateway does not answer: one line with the address and what to do, at once where nothing runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from sie_cli.main import main
from sie_cli.serve.ports import free_port

REMEDY = "start one with `sie serve`, or name another address with --url"
COMMANDS = {"run": ("run", "m", "a"), "try": ("try", "m", "a"), "load": ("models", "load", "m"), "status": ("status",)}


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an address of this machine where nothing listens, for a user without a `sie serve`."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return f"http://127.0.0.1:{free_port()}"


def ends_at_once(arguments: Sequence[str], url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command at an address where nothing listens."""
    monkeypatch.setattr("sie_cli.cluster.FIRST_S", 40.0)
    began_s = time.monotonic()
    result = CliRunner().invoke(main, [*arguments, "--url", url])
    assert result.exit_code in (1, 2), result.output
    assert "attempt" not in result.stderr
    assert result.stderr.strip().lower() == f"error: no gateway answers at {url}: {REMEDY}".lower()
    assert time.monotonic() - began_s < 30, "it is tried once"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_refused_connection_is_one_line_at_once(name: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends_at_once(COMMANDS[name], url, monkeypatch)
