"""Ports for processes that are about to start."""

from __future__ import annotations

import contextlib
import random
import socket
import sys

from sie_contracts.settings import SettingError

_BELOW_EPHEMERAL = range(10_000, 32_000)
_TRIED = 200
_descriptors: dict[int, int] = {}  # by port, the file descriptor that keeps it


def free_port(count: int = 1) -> int:
    """The first of `count` consecutive loopback ports that nobody listens on now and that no other call was given: in
    this process, and on Linux in any process that still runs. Who is given a port listens on it only later.

    Below those that the system gives to outgoing connections: a client that tries again and again while its server is
    away would in the end be given the server's own port, connect to itself and keep the server out. Raises SettingError
    if none is found.
    """
    for port in random.sample(_BELOW_EPHEMERAL, _TRIED):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            sockets = {number: held.enter_context(socket.socket()) for number in range(port, port + count)}
            for candidate, bound in sockets.items():
                _bind(bound, candidate)
            _descriptors.update((number, bound.detach()) for number, bound in sockets.items())
            return port
    raise SettingError("--port", f"no {count} free ports were found on this machine")


def _bind(bound: socket.socket, port: int) -> None:
    """Raises OSError if the port was given or has a listener.

    On Linux a socket that is bound and does not listen keeps every other one away but those that set SO_REUSEADDR, as
    servers do. Elsewhere it would keep a server away too.
    """
    if port in _descriptors:
        raise OSError(f"port {port} was given before")
    if sys.platform == "linux":
        bound.bind(("127.0.0.1", port))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
