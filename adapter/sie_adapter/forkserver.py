"""Parent process of the adapters: imports their modules, then forks one serving child process for each device. If a
child dies, the parent forks a new child: within milliseconds, or after a pause if the dead child lived for at most
STEADY_S. The children of other devices continue.

    imports ──► fork ──► a child serves ──► the child dies ──► fork again
                                └──► all children drained, a child refused its settings, or a signal ──► the parent ends

The processes share the memory pages of the imported modules, so the parent adds little memory. While no child dies, the
parent uses no processor time. A fork copies only the thread that calls it, so the parent runs no second thread. The
parent makes no CUDA call, since a child could not use the parent's CUDA context. Only Linux is supported: the module
needs PR_SET_PDEATHSIG, and Apple's frameworks do not survive a fork.
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
from typing import NamedTuple

from sie_runtime import failpoints
from sie_runtime.process import EXIT_BAD_SETTING, end_signals

STEADY_S = 5.0  # seconds; if a child lived longer, the parent replaces the child without a pause
# Pause before the fork that replaces a child that lived for at most STEADY_S: 0.1 s at first. If the new child dies as
# early, the next pause is twice as long, up to 5 s.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
SIGNALS = frozenset({*end_signals(), signal.SIGCHLD})
_PR_SET_PDEATHSIG = 1
_TASKS = Path("/proc/self/task")
_LOOKS, _LOOK_S = 100, 0.001  # number of checks whether other threads have ended, and seconds between two checks
_logger = logging.getLogger("sie.adapter")
_NO_FORK = 1  # exit status of a parent that cannot fork, although several devices need a process each


class ForkResult(NamedTuple):
    """Result of `keep_serving`. `number`: in a child, the number of the device that it must serve; None in the parent,
    after all children have ended. `status`: the exit status of the parent.
    """

    number: int | None
    status: int = 0


def keep_serving(count: int = 1, died: Callable[[int], None] = lambda number: None) -> ForkResult:
    """Fork `count` child processes, and fork a new child when a child dies. In a child, return at once: the caller then
    serves. In the parent, return when no child runs and no fork is due.

    Do not replace a child that exits with status 0: the child has drained. After a signal to end, or if a child exits
    with EXIT_BAD_SETTING, end all children. If this process cannot fork and `count` is 1, return what child 0 would
    return, so that this process serves. Before the fork of a new child, call `died` with the number of the dead child.

    Call this while the process has only one thread, with SIGNALS blocked. SIGNALS stay blocked in the children.
    """
    # this process may have inherited an ignored SIGCHLD; the kernel then does not report ended children
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parent, children = os.getpid(), _Children(count, died)
    while children.are_left:
        while (number := children.next_due()) is not None:
            pid = _fork()
            if pid is None:
                if count == 1:
                    return ForkResult(0)
                children.not_forked(number)
                continue
            if pid == 0:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                # a parent that died before the call of prctl sends no signal, so the child ends itself
                if os.getppid() != parent:
                    os._exit(1)
                return ForkResult(number)
            children.started(number, pid)
        if not children.are_left:
            break
        timeout_s = children.pause_s()
        news = signal.sigwaitinfo(SIGNALS) if timeout_s is None else signal.sigtimedwait(SIGNALS, timeout_s)
        if news is None:
            continue
        if news.si_signo != signal.SIGCHLD:
            children.end(0)
        children.reap()
    return ForkResult(None, children.status)


class _Children:
    def __init__(self, count: int, died: Callable[[int], None]) -> None:
        self._died = died
        # number of a child that must be forked -> time of the fork on the monotonic clock, seconds
        self._due_s = dict.fromkeys(range(count), 0.0)
        self._pauses_s = dict.fromkeys(range(count), 0.0)
        # process id -> number of the child, and its start on the monotonic clock, seconds
        self._running: dict[int, tuple[int, float]] = {}
        self._is_ending = False
        self.status = 0

    @property
    def are_left(self) -> bool:
        return bool(self._running or self._due_s)

    def next_due(self) -> int | None:
        now_s = time.monotonic()
        return next((number for number, due_s in self._due_s.items() if due_s <= now_s), None)

    def pause_s(self) -> float | None:
        """Return the seconds until the next child must be forked; None if all children run."""
        return max(0.0, min(self._due_s.values()) - time.monotonic()) if self._due_s else None

    def started(self, number: int, pid: int) -> None:
        """Record the fork of a child. Failpoints (crashes for tests) apply only to the first fork of each child."""
        del self._due_s[number]
        self._running[pid] = number, time.monotonic()
        if not self._due_s:
            failpoints.arm("")

    def not_forked(self, number: int) -> None:
        """Try the fork again later if other children run. If no child runs, end with an error: without a fork, this
        process could serve only one of the devices.
        """
        if self._running:
            self._due_s[number] = time.monotonic() + LONGEST_PAUSE_S
            return
        _logger.error("several devices need a process each, and this process cannot fork, so it ends")
        self.end(_NO_FORK)

    def end(self, status: int) -> None:
        """Stop forking, and send SIGTERM to all children. `status`: the parent's exit status if no child fails."""
        self._is_ending, self.status = True, status
        self._due_s.clear()
        for pid in self._running:
            # the id cannot belong to another process, because the id of a dead child stays reserved until waitpid
            os.kill(pid, signal.SIGTERM)

    def reap(self) -> None:
        """Call waitpid for all children that have ended. Ignore unknown process ids: if this process is process 1 of a
        container, it is also the parent of orphans of other processes.
        """
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in self._running:
                number, started_s = self._running.pop(pid)
                self._ended(number, pid, os.waitstatus_to_exitcode(status), time.monotonic() - started_s)

    def _ended(self, number: int, pid: int, status: int, lived_s: float) -> None:
        if self._is_ending:
            self.status = self.status or (status if status >= 0 else 128 - status)
            return
        if status == EXIT_BAD_SETTING:
            self.end(status)
            return
        if status == 0:  # status 0: the child has drained, so fork no new child
            return
        pause_s = self._pauses_s[number]
        pause_s = 0.0 if lived_s > STEADY_S else min(max(FIRST_PAUSE_S, 2 * pause_s), LONGEST_PAUSE_S)
        self._pauses_s[number] = pause_s
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        _logger.warning("the adapter's process %d %s; a new one starts in %g s", pid, how, pause_s)
        self._died(number)
        self._due_s[number] = time.monotonic() + pause_s


def _fork() -> int | None:
    """Call os.fork and return its result. If a fork is impossible or not safe, write a log line and return None."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        if _is_alone():
            return os.fork()
        cause = "an imported library runs threads, and a fork would copy the locks that they hold"
    except OSError as error:
        cause = str(error)
    _logger.warning("the adapter is not forked, so every restart repeats its imports. Cause: %s", cause)
    return None


def _is_alone() -> bool:
    if len(os.listdir(_TASKS)) > 1:
        # The import of numpy starts threads of OpenBLAS, which would make a fork unsafe. OpenBLAS ends its threads
        # before a fork, and starts threads again only at the next matrix product. So this fork ends these threads. Its
        # child has nothing to do and exits.
        end_of = os.fork()
        if end_of == 0:
            os._exit(0)
        os.waitpid(end_of, 0)
    for _ in range(_LOOKS):
        if len(os.listdir(_TASKS)) == 1:
            return True
        time.sleep(_LOOK_S)  # the kernel removes an ended thread from /proc/self/task with a short delay
    return False
