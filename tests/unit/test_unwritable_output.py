"""`sie` whose output, file or argument cannot be used: a line and a status, without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import click
import pytest

from sie_cli.main import main

RUN = [sys.executable, "-c", "from sie_cli.entry import main; main()"]
COMMANDS = [["--version"], ["settings", "--json"], ["nosuch"]]


def ran(arguments: list[str], stdout: str, before: Callable[[], None] | None = None) -> tuple[int, str]:
    """Run `sie` with standard output in this file. Return its status and what it wrote to standard error."""
    with open(stdout, "w") as file:
        done = subprocess.run(
            [*RUN, *arguments],
            stdout=file,
            stderr=subprocess.PIPE,
            preexec_fn=before,
            text=True,
            timeout=60,
            check=False,
        )
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", COMMANDS[:2])
def test_a_full_disk_under_standard_output_is_one_line(arguments: list[str]) -> None:
    assert ran(arguments, "/dev/full") == (1, "Error: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("arguments", COMMANDS[:2])
def test_a_command_without_a_standard_output_ends_as_usual(arguments: list[str]) -> None:
    assert ran(arguments, os.devnull, lambda: os.close(1)) == (0, "")


def test_an_argument_that_is_no_text_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A caller of the program may give it any bytes. Python replaces those that are not UTF-8 by surrogates."""
    monkeypatch.setattr(click.Command, "invoke", lambda *_: "\udcff".encode())
    monkeypatch.setattr(sys, "argv", ["sie", "settings", "\u00e9", "a\udcffb"])
    with pytest.raises(SystemExit) as ended:
        main._call(["settings"])
    assert (ended.value.code, capsys.readouterr().err) == (2, "error: the argument a?b is no text in UTF-8\n")
    monkeypatch.setattr(sys, "argv", ["sie", "settings", "\u00e9"])
    with pytest.raises(UnicodeEncodeError):
        main._call(["settings"])
