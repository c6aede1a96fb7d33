"""Ports for processes that are about to start."""

from __future__ import annotations

import contextlib
import random
import socket
import sys
from collections.abc import Iterable

from sie_contracts.settings import SettingError

_BELOW_EPHEMERAL = range(10_000, 32_000)
_TRIED = 200
_reserved: dict[int, int] = {}  # by port, a file descriptor that stays open


def free_port(count: int = 1) -> int:
    """The first of `count` consecutive loopback ports that nobody listens on now and that no other call was given: in
    this process, and on Linux in any process that still runs. Who is given a port listens on it only later.

    Below those that the system gives to outgoing connections: a client that tries again and again while its server is
    away would in the end be given the server's own port, connect to itself and keep the server out. Raises SettingError
    if none is found.
    """
    for port in random.sample(_BELOW_EPHEMERAL, _TRIED):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            ports = range(port, port + count)
            for each in ports:
                held.enter_context(socket.socket()).bind(("127.0.0.1", each))
            _reserve(ports)
            return port
    raise SettingError("--port", f"no {count} free ports were found on this machine")


def _reserve(ports: Iterable[int]) -> None:
    """Until this process ends. Raises OSError if one of them is reserved."""
    with contextlib.ExitStack() as held:
        names = {port: held.enter_context(socket.socket(socket.AF_UNIX)) for port in ports}
        for port, name in names.items():
            if port in _reserved:
                raise OSError(f"port {port} was given before")
            if sys.platform == "linux":
                name.bind(f"\0sie-port-{port}")  # abstract: no file, gone with the process, one per network namespace
        _reserved.update((port, name.detach()) for port, name in names.items())
