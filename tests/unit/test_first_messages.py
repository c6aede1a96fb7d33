"""Answers to the first mistakes, and the output of a start: each message holds the fix, and none looks like a fault."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sie_cli.refusal import CommandRefused
from sie_cli.serve.output import LineOutput
from sie_cli.serve.supervisor import Child, Supervisor
from sie_runtime.process import QUIET_S, START_S, Trouble


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


def test_a_log_whose_disk_was_full_gets_the_lines_after_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = LineOutput(json=False)
    with open("/dev/full", "w") as log, (tmp_path / "log").open("w") as with_space:
        monkeypatch.setattr(sys, "stderr", log)
        output("serve", "lost")
        assert os.path.samestat(os.fstat(log.fileno()), os.stat("/dev/full")), "nothing would be written any more"
        os.dup2(with_space.fileno(), log.fileno())
        output("serve", "kept")
    assert (tmp_path / "log").read_text().endswith("[serve] kept\n")
