"""HTTP transport of `sie mcp`. The bearer token of a request is the API key of its caller. `sie mcp` sends this key
only to the gateway.

request ──► Host and Origin ──► key known to the gateway? ──► session of the same key ──► AgentServer
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser, AuthorizationContext
from mcp.server.auth.provider import AccessToken
from mcp.server.context import ServerRequestContext
from mcp.server.streamable_http import MCP_SESSION_ID_HEADER, StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from sie_cli.mcp.callers import AgentCaller, KeyNames
from sie_cli.mcp.sentences import GATEWAY_AWAY, sentence_of
from sie_cli.mcp.server import AgentServer
from sie_client import AuthenticationError, InvalidInputError
from sie_client import SIEError as ClientError
from sie_contracts.errors import NotReady, PermissionDenied, SIEError, Unauthenticated
from sie_runtime.http.asgi import Receive, Scope, Send, headers_of, refuse
from sie_runtime.http.protocol import HostNames
from sie_runtime.http.server import HttpServer, probes
from sie_runtime.keys import digest_of
from sie_runtime.process import Stop

PATH = "/mcp"
MAX_BODY_BYTES = 4 << 20
MAX_SESSIONS, MAX_SESSIONS_OF_KEY = 1_000, 32
IDLE_S = 1_800.0
STOP_S = 5.0
_CALLER = "sie.caller"  # key of the AgentCaller in an ASGI scope
_logger = logging.getLogger("sie.mcp")


class _Sessions(StreamableHTTPSessionManager):
    """Sessions of agents, at most MAX_SESSIONS_OF_KEY for an API key. An agent has a session only if its revision of
    MCP has sessions.
    """

    def _admit_session(self, requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        """Open a session. Return None if there are too many sessions."""
        if sum(owner == requestor for owner in self._session_owners.values()) >= MAX_SESSIONS_OF_KEY:
            return None
        return super()._admit_session(requestor)


def caller_of(context: ServerRequestContext[Any]) -> AgentCaller:
    assert context.request is not None
    caller: AgentCaller = context.request.scope[_CALLER]
    return caller


class HttpTransport:
    """ASGI application with the path /mcp and the probes."""

    def __init__(
        self, server: AgentServer, keys: KeyNames, names: HostNames, not_ready: Callable[[], str | None]
    ) -> None:
        self._keys = keys
        self._names = names
        self._probes = probes(not_ready, None)
        self.sessions = _Sessions(
            server.protocol,
            session_idle_timeout=IDLE_S,
            max_request_body_size=MAX_BODY_BYTES,
            max_sessions=MAX_SESSIONS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # an ingress may put a prefix before the path
        if scope["type"] != "http" or not scope["path"].endswith(PATH):
            await self._probes(scope, receive, send)
            return
        try:
            caller = await self._caller(scope)
        except SIEError as error:
            await refuse(scope, send, error)
            return
        user = AuthenticatedUser(AccessToken(token="", client_id=caller.owner, scopes=[]))
        await self.sessions.handle_request({**scope, "user": user, _CALLER: caller}, receive, send)

    async def _caller(self, scope: Scope) -> AgentCaller:
        """Return the caller of a request. Raises PermissionDenied for a page of another origin, Unauthenticated for a
        key that is refused or invalid, and NotReady if the gateway cannot check the key.
        """
        headers = headers_of(scope)
        # The listener does not check the origin of a GET. Here a GET reads a stream of events, so check its origin.
        origin = headers.get("origin")
        if origin is not None and not self._names.is_own_page(
            origin.encode("latin-1"), scope, headers.get("host", "").encode("latin-1")
        ):
            raise PermissionDenied("Origin: a page of another origin may not call this server", param="Origin")
        api_key = _bearer(headers.get("authorization", ""))
        try:
            name = await self._keys.name_of(api_key)
        except (AuthenticationError, InvalidInputError) as error:
            raise Unauthenticated(sentence_of(error)) from error
        except ClientError as error:
            raise NotReady(GATEWAY_AWAY) from error
        return AgentCaller(api_key or None, digest_of(api_key), headers.get(MCP_SESSION_ID_HEADER, ""), name)


def _bearer(authorization: str) -> str:
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def serve(
    server: AgentServer,
    keys: KeyNames,
    stop: Stop,
    *,
    host: str,
    port: int,
    allowed_hosts: Sequence[str] | None,
    lame_duck_s: float,
    drain_s: float,
) -> int:
    """Serve the protocol over HTTP until `stop` is requested, and return the exit status. Calls in progress then have
    `drain_s` seconds to end. Raises SettingError.
    """
    is_leaving = False
    names = HostNames(host, allowed_hosts)
    transport = HttpTransport(server, keys, names, lambda: "it is ending" if is_leaving else None)
    listener = HttpServer(transport, host, port, setting="--port", allowed_hosts=allowed_hosts)
    try:
        async with transport.sessions.run():
            await listener.start()
            _logger.info("sie mcp listening on %s:%d%s", host, listener.port, PATH)
            await stop.wait()
            is_leaving = True
            listener.leave()
            if lame_duck_s:
                await stop.lame_duck(lame_duck_s)
            await listener.hang_up()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await server.idle.wait()
            # stop the listener before the sessions end, because the end of a session cancels its remaining calls
            await listener.stop(STOP_S)
    except BaseException:
        await listener.stop()
        raise
    return 0
