"""Addresses and credentials of servers, pauses between attempts to connect, and the TCP transport of the client."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from nats.aio.transport import TcpTransport

if TYPE_CHECKING:
    from sie_contracts.settings import Secret

log = logging.getLogger("sie.broker")

HANG_UP_S = 1.0  # seconds for which a close waits before it aborts the transport, and again after the abort
FIRST_RETRY_S, MAX_RETRY_S = 0.1, 2.0
_NO_TOKEN = re.compile(r"[^A-Za-z0-9_-]")


class Transport(TcpTransport):  # type: ignore[misc]
    """TCP transport of the client. Its close does not wait until a silent peer has read the unsent bytes, because this
    would delay the reconnect by minutes.
    """

    def __bool__(self) -> bool:
        # The client replaces a transport whose truth value is False by a transport of its own class (nats-py 2.16).
        return True

    async def connect(self, *arguments: Any, **options: Any) -> None:
        self.abort()  # the client does not close the socket of a failed attempt (nats-py 2.16)
        await super().connect(*arguments, **options)

    def abort(self) -> None:
        if self._io_writer is not None:
            self._io_writer.transport.abort()

    async def wait_closed(self) -> None:
        if self._io_writer is None:
            return
        # A separate task waits, because a cancellation of `super().wait_closed()` would also cancel the waits of other
        # tasks (Python 3.11).
        closed = asyncio.get_running_loop().create_task(super().wait_closed())
        await asyncio.wait({closed}, timeout=HANG_UP_S)
        self.abort()
        await asyncio.wait({closed}, timeout=HANG_UP_S)
        if closed.done() and not closed.cancelled() and closed.exception() is not None:
            log.debug("a connection to the broker was closed with the error %r", closed.exception())


def split(url: str, password: Secret | None = None) -> tuple[list[str], dict[str, str]]:
    """Return (server addresses without credentials, credentials). All servers use the same credentials, because the
    broker announces further addresses without credentials.

    `password`: password of a user name in `url` that has none. If `password` is None, such a user name is a token.
    Raises ValueError for an invalid URL.
    """
    servers: list[str] = []
    credentials: dict[str, str] = {}
    for part in url.split(","):
        parsed = urlsplit(part.strip() if "://" in part else f"nats://{part.strip()}")
        try:
            port = parsed.port or 4222
        except ValueError:
            raise ValueError("the port in a broker URL is not a number from 0 to 65535") from None
        host = parsed.hostname
        if not host or parsed.scheme not in ("nats", "tls"):
            raise ValueError("a broker URL must be nats://host:port or tls://host:port")
        servers.append(f"{parsed.scheme}://{f'[{host}]' if ':' in host else host}:{port}")
        if parsed.username and parsed.password is not None:
            credentials = {"user": unquote(parsed.username), "password": unquote(parsed.password)}
        elif parsed.username and password is not None:
            credentials = {"user": unquote(parsed.username), "password": password.reveal()}
        elif parsed.username:
            credentials = {"token": unquote(parsed.username)}
    return servers, credentials


def inbox_prefix(credentials: Mapping[str, str]) -> str:
    """Return the prefix of a user's inboxes. The prefix contains the user's name, so that the server's permissions can
    forbid other users to read these inboxes.

    Characters that are not allowed in a subject become `-`. Without a user, the prefix is the client library's default.
    """
    user = _NO_TOKEN.sub("-", credentials.get("user", ""))
    return f"_INBOX.{user}" if user else "_INBOX"
