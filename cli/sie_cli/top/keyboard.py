"""Single keys of a terminal, and the terminal left as it was whichever way a program ends or is suspended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator


def takes_keys() -> bool:
    """Whether standard input is a terminal that this process may read. One in the background may not: the kernel would
    stop it.
    """
    try:
        descriptor = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):  # there is none, or it is closed
        return False
    if not os.isatty(descriptor):
        return False
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # not the terminal that controls this process, which so has no background
        return True


@contextlib.contextmanager
def single_keys(on_key: Callable[[str], None]) -> Iterator[None]:
    """Call `on_key` for each key, in the running loop. Ctrl-C and Ctrl-Z remain signals."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        try:
            data = os.read(descriptor, 1024)
        except BlockingIOError:
            return
        except OSError:  # the terminal has gone
            data = b""
        if not data:
            loop.remove_reader(descriptor)
        for key in data.decode(errors="replace"):
            on_key(key)

    before = termios.tcgetattr(descriptor)
    # at once: a terminal that nobody reads would keep output, and with it this process, for ever
    tty.setcbreak(descriptor, termios.TCSANOW)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        with contextlib.suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(descriptor, termios.TCSANOW, before)


def suspend() -> None:
    """Stop this process as Ctrl-Z does to one that does not handle it; returns when it goes on. The kernel does not
    stop one that no shell could let go on.
    """
    before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    try:
        os.kill(os.getpid(), signal.SIGTSTP)
    finally:
        signal.signal(signal.SIGTSTP, before)
