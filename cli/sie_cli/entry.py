"""Entry point of the command `sie`, with the steps that must run before the imports, which take seconds.

The kernel drops each signal that process 1 has no handler for. A signal during the imports would be lost, and a pod
that is deleted or restarted during its start would need its whole grace period to end.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any


def main() -> None:
    interrupt = _end_on_signals()
    from sie_contracts.loopback import bypass_proxies

    bypass_proxies(os.environ)
    # Hide the command line of httpx, so that httpx imports neither rich nor pygments: 2.4 MB less memory per process.
    sys.modules["httpx._main"] = None  # type: ignore[assignment]
    from sie_cli.home import settle
    from sie_contracts.settings import SettingError

    try:
        settle(os.environ)
    except SettingError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    from sie_cli.main import main as command

    if interrupt is not None:
        signal.signal(signal.SIGINT, interrupt)
    command()


def _end_on_signals() -> Any:
    """End the process at once on Ctrl-C, without the traceback of an import. If this is process 1, for which the kernel
    drops signals without a handler, also end it on SIGTERM and SIGHUP, until the command sets its own handlers. Return
    the SIGINT handler for the command; None if SIGINT is ignored.
    """
    if os.getpid() == 1:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _end)
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return None
    return signal.signal(signal.SIGINT, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)
