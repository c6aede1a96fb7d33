"""A parent that has done the imports and forks the process that serves: when that one dies, the next one is there in
milliseconds.

    imports ──► fork ──► a child serves ──► it dies ──► fork again
                                └──► it drained, or refuses its settings ──► the parent ends with its status

The kernel shares the pages of what was imported, so this costs little memory and, while nothing dies, no processor
time. A fork copies one thread: the parent has no other, and has not touched CUDA, whose context no child could use.
Linux only: it needs PR_SET_PDEATHSIG, and Apple's frameworks do not survive a fork.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sie_runtime import failpoints
from sie_runtime.process import EXIT_BAD_SETTING, end_signals

STEADY_S = 5.0  # a child that lived this long is replaced without a pause
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
SIGNALS = frozenset({*end_signals(), signal.SIGCHLD})
_PR_SET_PDEATHSIG = 1
_TASKS = Path("/proc/self/task")
_LOOKS, _LOOK_S = 100, 0.001
_logger = logging.getLogger("sie.adapter")


def keep_one_serving(died: Callable[[], None] = lambda: None) -> int | None:
    """Have a child serve, and another one whenever one dies. Returns None in the process that is to serve: each child,
    or this process itself where it cannot fork. Returns the exit status in the parent, once a child drained or refused
    its settings, or was told to end. `died` is called before a child that died is replaced.

    To be called on the only thread, with SIGNALS blocked; they are blocked in the child as well.
    """
    parent, pause_s, stopping = os.getpid(), 0.0, False
    # were it ignored, as it may have been inherited, nobody could wait for a child
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    while True:
        child = _fork()
        if child is None:
            return None
        if child == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before the kernel was told
                os._exit(1)
            return None
        failpoints.arm("")  # they are those of the first start
        started_s = time.monotonic()
        status, stopping = _ended(child)
        if stopping or status in (0, EXIT_BAD_SETTING):
            return status if status >= 0 else 128 - status
        pause_s = (
            0.0 if time.monotonic() - started_s > STEADY_S else min(max(FIRST_PAUSE_S, 2 * pause_s), LONGEST_PAUSE_S)
        )
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        _logger.warning("the adapter's process %d %s; another one starts in %g s", child, how, pause_s)
        died()
        if signal.sigtimedwait(SIGNALS - {signal.SIGCHLD}, pause_s) is not None:
            return 0


def _fork() -> int | None:
    """Call os.fork; None, with a log line, where that is impossible or not safe."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        if _is_alone():
            return os.fork()
        _logger.warning(
            "there is no warm spare: a library that was imported runs threads, and a fork would copy their locks"
        )
        return None
    except OSError as error:
        _logger.warning("there is no warm spare: %s", error)
        return None


def _is_alone() -> bool:
    """Whether this process has one thread."""
    if len(os.listdir(_TASKS)) > 1:
        # those of OpenBLAS, started when numpy was imported, end before a fork and come back when a matrix is
        # multiplied
        end_of = os.fork()
        if end_of == 0:
            os._exit(0)
        os.waitpid(end_of, 0)
    for _ in range(_LOOKS):
        if len(os.listdir(_TASKS)) == 1:
            return True
        time.sleep(_LOOK_S)  # the kernel takes a thread that ended off the list a moment later
    return False


def _ended(child: int) -> tuple[int, bool]:
    """Wait for a child: its exit status, negative for a signal, and whether it had been told to end. Passes those of
    the end on, as SIGTERM, and reaps what else ends: in a container this process inherits every orphan.
    """
    stopping = False
    while True:
        if signal.sigwait(SIGNALS) != signal.SIGCHLD:
            stopping = True
            os.kill(child, signal.SIGTERM)  # it is there until it is reaped, below
            continue
        pid = -1
        while pid not in (0, child):
            pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status), stopping
