"""A forked process behaves as the process that its command would have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from cluster import SIE
from stack import Device, Part, listens
from zygote import Forked

from sie_cli.serve.ports import free_port

WAIT_S = 30.0


def test_output_environment_and_status_are_those_of_the_command() -> None:
    environ = {**os.environ, "SIE_ACK_WAIT_S": "17"}
    argv = [SIE, "settings", "--json"]
    forked = Forked("sie", argv, environ)
    with forked.stdout as output:
        shown = output.read()
    assert (forked.wait(WAIT_S), shown) == (
        0,
        subprocess.run([sys.executable, *argv], env=environ, capture_output=True, text=True, check=True).stdout,
    )
    refused = Forked("sie", [SIE, "gateway", "--port", "none"], environ)
    with refused.stdout as output:
        assert "Invalid value for '--port'" in output.read()
    assert refused.wait(WAIT_S) == 2


def test_a_signal_ends_it_and_is_its_status(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    part = Part("adapter", "adapter", Device().argv(path), os.environ, lambda: listens(path))
    part.start()
    part.wait_ready()
    assert psutil.Process(part.pid).parent() != psutil.Process()
    assert os.getsid(part.pid) == part.pid
    part.kill()
    assert (part.status, part.alive) == (-signal.SIGKILL, False)
    part.start()
    part.wait_ready()
    part.stop()
    assert part.status == 0
    assert "listening on" in part.log[-1]


def test_it_ends_with_the_tests_that_started_it(tmp_path: Path) -> None:
    """The forked process ends also when the tests are killed and cannot stop it."""
    code = (
        "import sys, os; sys.path.insert(0, sys.argv[1]); from zygote import Forked; from cluster import SIE\n"
        "forked = Forked('sie', [SIE, 'config', '--port', sys.argv[2]], os.environ)\n"
        "print(forked.pid, flush=True); forked.wait(60)"
    )
    argv = [sys.executable, "-c", code, str(Path(__file__).parents[1]), str(free_port())]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        forked = psutil.Process(int(tests.stdout.readline()))
        assert forked.is_running()
        tests.kill()
        psutil.wait_procs([forked], timeout=WAIT_S)
        assert not forked.is_running() or forked.status() == psutil.STATUS_ZOMBIE


def test_the_folder_of_a_process_that_was_killed_is_removed_by_the_next_one(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from zygote import folder_of_this_process\n"
        "print(folder_of_this_process('sie-tests'), flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", code, str(Path(__file__).parents[1])]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    folders = []
    for _ in range(3):  # the first one is alive throughout, the second one is killed
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        folders.append((process, Path(process.stdout.readline().strip())))
        if len(folders) == 2:
            process.kill()
            process.wait()
            assert folders[-1][1].is_dir()
    assert [folder.is_dir() for _, folder in folders] == [True, False, True]
    for process, _ in folders:
        process.communicate()
