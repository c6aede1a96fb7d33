"""The parent process of the adapter. Its children run code of the test instead of serving, and start fast because they
do not import torch.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sie_runtime.process import EXIT_BAD_SETTING

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="elsewhere the adapter serves in one process"
)
PROGRAM = """
import ctypes, logging, os, signal, sys, threading, time
import psutil
from sie_adapter import forkserver
from sie_runtime import failpoints

logging.basicConfig(stream=sys.stdout, format="%(message)s")
signal.pthread_sigmask(signal.SIG_BLOCK, forkserver.SIGNALS)
{before}
number, status = forkserver.keep_serving({count})
if number is None:
    sys.exit(status)
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
signal.pthread_sigmask(signal.SIG_UNBLOCK, forkserver.SIGNALS)
os.write(1, b"serving %d %d\\n" % (os.getpid(), number))  # print() without a buffer mixes lines of two children
{child}
"""
# short sleeps: Python runs the handler of a signal that comes just before a sleep only after that sleep
WAITS = "while True: time.sleep(0.05)"
WRITTEN = "written = os.memfd_create('written')"  # a file that all children share
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(child: str, before: str = "", count: int = 1) -> subprocess.Popen[str]:
        code = PROGRAM.format(child=textwrap.dedent(child), before=textwrap.dedent(before), count=count)
        started.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        with process:
            process.kill()


def serving(process: subprocess.Popen[str]) -> int:
    """Return the id of the next process that serves."""
    return int(line_with("serving", process).split()[1])


def line_with(text: str, process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"{text!r} was never said, status {process.wait(60)}")


def rest(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.read()


def test_a_child_that_dies_is_replaced_with_longer_and_longer_pauses(start: Start) -> None:
    child = """
    os.write(written, b".")
    os.kill(os.getpid(), signal.SIGKILL) if os.fstat(written).st_size < 3 else os._exit(0)
    """
    parent = start(child, WRITTEN)
    assert parent.wait(60) == 0
    lines = rest(parent).splitlines()
    served = [line.split()[1] for line in lines if line.startswith("serving")]
    pauses = [line.split()[-2] for line in lines if "was killed by signal 9" in line]
    assert len(set(served)) == len(served) == len(pauses) + 1
    assert str(parent.pid) not in served
    assert pauses == ["0.1", "0.2"]


@pytest.mark.parametrize("status", [0, EXIT_BAD_SETTING])
def test_a_child_that_drained_or_refuses_its_settings_ends_the_parent(start: Start, status: int) -> None:
    parent = start(f"os._exit({status})")
    assert parent.wait(60) == status
    assert rest(parent).count("serving") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_childs_status_is_the_parents(start: Start, number: int) -> None:
    parent = start(WAITS)
    serving(parent)
    parent.send_signal(number)
    assert parent.wait(60) == 7
    assert rest(parent) == ""


def test_a_signal_ends_the_parent_between_two_children(start: Start) -> None:
    parent = start("os._exit(1)", "forkserver.FIRST_PAUSE_S = 60.0; forkserver.LONGEST_PAUSE_S = 60.0")
    line_with("a new one starts in 60 s", parent)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(60) == 0


def test_the_child_of_a_killed_parent_ends(start: Start) -> None:
    parent = start(WAITS)
    child = psutil.Process(serving(parent))
    parent.kill()
    assert psutil.wait_procs([child], timeout=60)[1] == []


def test_a_process_with_threads_serves_itself_and_says_so(start: Start) -> None:
    parent = start("os._exit(5)", "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()")
    line_with("the adapter is not forked", parent)
    assert serving(parent) == parent.pid
    assert parent.wait(60) == 5


def test_orphans_are_reaped(start: Start, tmp_path: Path) -> None:
    """In a container the parent is process 1: the children of a dead child become its children."""
    child = f"""
    if not os.path.exists({str(tmp_path / "left")!r}):
        open({str(tmp_path / "left")!r}, "w").close()
        os._exit(1 if os.fork() else time.sleep(0.5) or 0)
    family, end_s = psutil.Process(parent), time.monotonic() + 60
    while len(family.children()) > 1 and time.monotonic() < end_s:
        time.sleep(0.02)
    os._exit(0 if len(family.children()) == 1 else 3)
    """
    parent = start(child, "parent = os.getpid(); ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER")
    assert parent.wait(90) == 0


def test_each_of_several_children_is_replaced_alone(start: Start) -> None:
    """A child goes on while its sibling dies and is replaced. The parent ends when both have drained."""
    child = """
    if number == 0:
        while not os.path.exists(marker + " of the sibling"):
            time.sleep(0.02)
        os._exit(1 if not os.path.exists(marker) and not open(marker, "w").close() else 0)
    open(marker + " of the sibling", "w").close()
    while not os.path.exists(marker):
        time.sleep(0.02)
    os._exit(0)
    """
    parent = start(child, "import tempfile; marker = tempfile.mkdtemp() + '/died'", count=2)
    assert parent.wait(60) == 0
    served = [line.split()[2] for line in rest(parent).splitlines() if line.startswith("serving")]
    assert sorted(served) == ["0", "0", "1"]


def test_one_of_several_children_that_refuses_its_settings_ends_all(start: Start) -> None:
    child = f"os._exit({EXIT_BAD_SETTING}) if number else None\n{WAITS}"
    parent = start(child, count=2)
    assert parent.wait(60) == EXIT_BAD_SETTING


def test_several_children_without_a_fork_are_an_error(start: Start) -> None:
    parent = start("os._exit(5)", "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", count=2)
    line_with("several devices need a process each", parent)
    assert parent.wait(60) == 1
