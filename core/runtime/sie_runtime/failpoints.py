"""Failpoints: named lines of the code at which a test can kill, stop or fail a process. They do nothing in a process
that was started without the option --failpoints.

    --failpoints sidecar.before_ack=crash,gateway.published=error:2     `:2`: only the first two calls raise the error

crash: exit at once with status 70, without flushing any file. stop: SIGSTOP to the process itself. error: raise
FailpointError. tests/armed.py lists every failpoint and the test setup that reaches it; tests/system/test_failpoints.py
arms each of them once.
"""

from __future__ import annotations

import logging
import os
import re
import signal

CRASHED = 70
_ONE = re.compile(r"([a-z_]+(?:\.[a-z_]+)+)=(crash|stop|error)(?::([1-9][0-9]*))?")
_ARMED: dict[str, tuple[str, int]] = {}
_logger = logging.getLogger("sie.failpoints")


class FailpointError(Exception):
    """Error that a failpoint with the action `error` raises."""


def parse(spec: str) -> dict[str, tuple[str, int]]:
    """Return (action, number of times) by name of the failpoint. Raises ValueError if `spec` cannot be parsed."""
    actions = {}
    for part in filter(None, (piece.strip() for piece in spec.split(","))):
        match = _ONE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r}: expected COMPONENT.PLACE=ACTION[:COUNT], where ACTION is crash, stop or error")
        actions[match[1]] = (match[2], int(match[3] or 1))
    return actions


def arm(spec: str) -> None:
    """Arm the failpoints in `spec`, and disarm all others. Raises ValueError if `spec` cannot be parsed."""
    _ARMED.clear()
    _ARMED.update(parse(spec))
    if _ARMED:
        _logger.warning("failpoints are armed: %s", ", ".join(sorted(_ARMED)))


def failpoint(name: str) -> None:
    """Do the action of the failpoint `name`, if this failpoint is armed. Calls are cheap in production: if no failpoint
    is armed, a call only tests an empty dict.
    """
    if _ARMED and name in _ARMED:
        _hit(name)


def _hit(name: str) -> None:
    action, left = _ARMED.pop(name)
    if left > 1:
        _ARMED[name] = (action, left - 1)
    if action == "crash":
        os._exit(CRASHED)
    if action == "error":
        raise FailpointError(name)
    os.kill(os.getpid(), signal.SIGSTOP)
