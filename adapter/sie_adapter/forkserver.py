"""Parent process that has finished the imports and forks the process that serves. If this child dies, a new child
starts within milliseconds.

    imports ──► fork ──► a child serves ──► it dies ──► fork again
                                └──► it drained, or refuses its settings ──► the parent ends with its status

The kernel shares the pages of the imported modules between the processes, so the parent needs little memory and, while
no child dies, no processor time. A fork copies only one thread, so the parent has no second thread. The parent also
makes no CUDA call, since a child could not use a CUDA context of its parent. Only Linux is supported: the module needs
PR_SET_PDEATHSIG, and Apple's frameworks do not survive a fork.
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

STEADY_S = 5.0  # seconds: a child that lived longer is replaced without a pause
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
SIGNALS = frozenset({*end_signals(), signal.SIGCHLD})
_PR_SET_PDEATHSIG = 1
_TASKS = Path("/proc/self/task")
_LOOKS, _LOOK_S = 100, 0.001
_logger = logging.getLogger("sie.adapter")
_NOT_FORKED = "the adapter is not forked, so a new one starts with its imports"


def keep_one_serving(died: Callable[[], None] = lambda: None) -> int | None:
    """Fork a child that serves, and fork again whenever it dies. Return None in the process that must serve: in each
    child, or in this process if it cannot fork. Return the exit status in the parent, after a child drained or refused
    its settings, or a signal ended it. `died` is called before a dead child is replaced.

    Call it while the process has only one thread, with SIGNALS blocked; they are blocked in the child too.
    """
    parent, pause_s, stopping = os.getpid(), 0.0, False
    # an inherited setting may ignore SIGCHLD; then no process could wait for a child
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    while True:
        child = _fork()
        if child is None:
            return None
        if child == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the parent died before the call of prctl
                os._exit(1)
            return None
        failpoints.arm("")  # failpoints apply to the first child only
        started_s = time.monotonic()
        status, stopping = _ended(child)
        if stopping or status in (0, EXIT_BAD_SETTING):
            return status if status >= 0 else 128 - status
        pause_s = (
            0.0 if time.monotonic() - started_s > STEADY_S else min(max(FIRST_PAUSE_S, 2 * pause_s), LONGEST_PAUSE_S)
        )
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        _logger.warning("the adapter's process %d %s; a new one starts in %g s", child, how, pause_s)
        died()
        if signal.sigtimedwait(SIGNALS - {signal.SIGCHLD}, pause_s) is not None:
            return 0


def _fork() -> int | None:
    """Call os.fork. Return None, with a log line, if a fork is impossible or not safe."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        if _is_alone():
            return os.fork()
        _logger.warning("%s: an imported library runs threads, and a fork would copy their locks", _NOT_FORKED)
        return None
    except OSError as error:
        _logger.warning("%s: %s", _NOT_FORKED, error)
        return None


def _is_alone() -> bool:
    """Return whether this process has one thread."""
    if len(os.listdir(_TASKS)) > 1:
        # the threads of OpenBLAS, started by the import of numpy, end before a fork and start again at the next matrix
        # product
        end_of = os.fork()
        if end_of == 0:
            os._exit(0)
        os.waitpid(end_of, 0)
    for _ in range(_LOOKS):
        if len(os.listdir(_TASKS)) == 1:
            return True
        time.sleep(_LOOK_S)  # the kernel removes an ended thread from the list with a short delay
    return False


def _ended(child: int) -> tuple[int, bool]:
    """Wait for a child. Return its exit status, negative for a signal, and whether this process got a signal to end.
    Forward that signal to the child as SIGTERM. Reap all other processes that end: in a container this process inherits
    every orphan.
    """
    stopping = False
    while True:
        if signal.sigwait(SIGNALS) != signal.SIGCHLD:
            stopping = True
            os.kill(child, signal.SIGTERM)  # the child's pid stays valid until it is reaped, below
            continue
        pid = -1
        while pid not in (0, child):
            pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status), stopping
