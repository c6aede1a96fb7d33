"""An armed failpoint does its action as often as the setting states, and no other failpoint acts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from sie_cli.main import main
from sie_runtime.failpoints import CRASHED, FailpointError, arm, failpoint


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    arm("")


def test_an_armed_place_fails_as_often_as_it_was_armed_for_and_others_pass() -> None:
    arm("sidecar.before_ack=error:2, gateway.published=error")
    failpoint("sidecar.after_ack")
    for name in ("sidecar.before_ack", "gateway.published", "sidecar.before_ack"):
        with pytest.raises(FailpointError, match=name):
            failpoint(name)
    failpoint("sidecar.before_ack")
    failpoint("gateway.published")


@pytest.mark.parametrize(("action", "status"), [("crash", CRASHED), ("stop", -signal.SIGKILL)])
def test_a_process_dies_or_stands_still_there(action: str, status: int) -> None:
    code = f"from sie_runtime.failpoints import *; arm('a.b={action}'); failpoint('a.b'); print('passed')"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if action == "stop":
        _, state = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(state)
        process.kill()
    assert process.communicate(timeout=60)[0] == b""
    assert process.returncode == status


@pytest.mark.parametrize("spec", ["x", "a.b=maybe", "a.b=crash:0", "nodot=crash"])
def test_a_spec_that_cannot_be_read_ends_the_start(spec: str) -> None:
    answer = CliRunner().invoke(main, ["sidecar", "--failpoints", spec])
    assert answer.exit_code == 2
    assert "--failpoints" in answer.output
