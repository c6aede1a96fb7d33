"""Addresses and credentials of servers, the pauses between connection attempts, and a TCP transport whose close does
not wait for a silent peer.
"""

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

HANG_UP_S = 1.0
FIRST_RETRY_S, MAX_RETRY_S = 0.1, 2.0
_NO_TOKEN = re.compile(r"[^A-Za-z0-9_-]")


class Transport(TcpTransport):  # type: ignore[misc]
    """TCP transport whose close does not wait for a silent peer, because a wait for unsent bytes would delay the
    reconnect by minutes.
    """

    def __bool__(self) -> bool:
        # The client would replace a transport that is not connected yet by a transport of its own class (nats-py 2.16).
        return True

    async def connect(self, *arguments: Any, **options: Any) -> None:
        self.abort()  # the client does not close a failed attempt that is only partly connected (nats-py 2.16)
        await super().connect(*arguments, **options)

    def abort(self) -> None:
        if self._io_writer is not None:
            self._io_writer.transport.abort()

    async def wait_closed(self) -> None:
        if self._io_writer is None:
            return
        # This needs a separate task: a cancelled wait would cancel `wait_closed` for all other waiters (Python 3.11).
        closed = asyncio.get_running_loop().create_task(super().wait_closed())
        await asyncio.wait({closed}, timeout=HANG_UP_S)
        self.abort()
        await asyncio.wait({closed}, timeout=HANG_UP_S)
        if closed.done() and not closed.cancelled() and closed.exception() is not None:
            log.debug("a connection ended with %r", closed.exception())


def split(url: str, password: Secret | None = None) -> tuple[list[str], dict[str, str]]:
    """Return the server addresses without credentials, and one set of credentials for all of them: the addresses that
    the broker announces have no credentials.

    `password` is the password of a user whom the URL names without one. Without a password, a single name is a token.
    """
    servers: list[str] = []
    credentials: dict[str, str] = {}
    for part in url.split(","):
        parsed = urlsplit(part.strip() if "://" in part else f"nats://{part.strip()}")
        try:
            port = parsed.port or 4222
        except ValueError:
            raise ValueError("a broker URL has a port that is not a number") from None
        host = parsed.hostname
        if not host or parsed.scheme not in ("nats", "tls"):
            raise ValueError("a broker URL is nats://host:port or tls://host:port")
        servers.append(f"{parsed.scheme}://{f'[{host}]' if ':' in host else host}:{port}")
        if parsed.username and parsed.password is not None:
            credentials = {"user": unquote(parsed.username), "password": unquote(parsed.password)}
        elif parsed.username and password is not None:
            credentials = {"user": unquote(parsed.username), "password": password.reveal()}
        elif parsed.username:
            credentials = {"token": unquote(parsed.username)}
    return servers, credentials


def inbox_prefix(credentials: Mapping[str, str]) -> str:
    """Return the inbox prefix of a user. It contains the user's name, so that permissions of the server can exclude
    other users.

    A character of the name that is not allowed in a token of a subject becomes `-`. Without a user, the prefix is the
    default of the client library.
    """
    user = _NO_TOKEN.sub("-", credentials.get("user", ""))
    return f"_INBOX.{user}" if user else "_INBOX"
