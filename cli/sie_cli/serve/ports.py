"""Choice of free ports for processes that will be started."""

from __future__ import annotations

import contextlib
import random
import socket
import sys

from sie_contracts.settings import SettingError

_BELOW_EPHEMERAL = range(10_000, 32_000)
_TRIED = 200
_descriptors: dict[int, int] = {}  # port -> descriptor of the socket that reserves it


def free_port(count: int = 1) -> int:
    """Return the first of `count` consecutive free loopback ports, and reserve all of them. No later call in this
    process returns a reserved port; on Linux, no call in another process does while this process runs. A server that
    starts later can listen on a reserved port.

    The ports are below the kernel's range for outgoing connections. Otherwise a client that retries while its server is
    down could get the server's port as its source port. The client would connect to itself, and block the server.
    Raises SettingError if none of _TRIED random ports is free.
    """
    for port in random.sample(_BELOW_EPHEMERAL, _TRIED):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            sockets = {number: held.enter_context(socket.socket()) for number in range(port, port + count)}
            for candidate, bound in sockets.items():
                _bind(bound, candidate)
            _descriptors.update((number, bound.detach()) for number, bound in sockets.items())
            return port
    raise SettingError("--port", f"no {count} consecutive free ports were found on this machine")


def _bind(bound: socket.socket, port: int) -> None:
    """Reserve a port. Raises OSError if it is in use, or if this process has reserved it already.

    On Linux, a bound socket that does not listen keeps other sockets from binding to its port, except sockets with the
    option SO_REUSEADDR, which servers set. On other systems a bound socket would also block servers, so this function
    only tests the port.
    """
    if port in _descriptors:
        raise OSError(f"port {port} is already reserved by this process")
    if sys.platform == "linux":
        bound.bind(("127.0.0.1", port))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
