"""Host names that a listener answers to, and web pages that may change or compute something through it.

A browser sends any request of a page to any address that it can reach. So a foreign page can send a form to this
machine, or a request to a host name that was re-pointed to this machine (DNS rebinding). The browser adds headers that
name the origin of a request, and a page cannot change these headers:

    Host ──► a name of this listener? ──► changes or computes? ──► Origin, Sec-Fetch-Site: its own page, or no page at
    all? ──► application

GET and HEAD need no check of the origin: only the pages of SIE_CORS_ORIGINS get CORS headers, so no other page can read
the reply.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
from collections.abc import Sequence

from sie_contracts.errors import PermissionDenied, SIEError
from sie_contracts.loopback import is_loopback
from sie_runtime.http.asgi import App, Receive, Scope, Send, refuse, refuse_upgrade
from sie_runtime.http.refusals import Refusals

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_FOREIGN_SITES = frozenset({b"cross-site", b"same-site"})
_CLUSTER_NAMES = (".svc", ".cluster.local")  # public DNS has no such names, so no web page has such a host
_ANY = "*"


class HostNames:
    """Host names of a listener. `allowed`: SIE_ALLOWED_HOSTS. If it is None, every name is allowed, but on loopback
    only the names of loopback and of this machine.
    """

    def __init__(self, address: str, allowed: Sequence[str] | None, cors_origins: Sequence[str] = ()) -> None:
        """Take SIE_CORS_ORIGINS as `cors_origins`: pages of these origins have the same rights as pages of this
        server.
        """
        self._origins = frozenset(origin.encode("latin-1") for origin in cors_origins)
        self._is_loopback = is_loopback(address)
        self._address = address
        self._allowed = [name.strip().lower() for name in allowed or ()]
        self._is_any = _ANY in self._allowed or (allowed is None and not self._is_loopback)
        self.has = functools.lru_cache(1024)(self._has)

    def _has(self, host: bytes) -> bool:
        """Return whether `host` is a name of the listener. `host`: the Host header, with or without a port."""
        name, port = parts(host.decode("latin-1").lower())
        return self._is_any or self._is_own(name) or any(matches(each, name, port) for each in self._allowed)

    def _is_own(self, name: str) -> bool:
        """Return whether a name is allowed without a setting. Foreign DNS cannot point such a name to this machine."""
        if name in (self._address, "localhost") or name.endswith(".localhost"):
            return True
        if self._is_loopback:
            return is_loopback(name) or name == socket.gethostname().lower()
        return _is_address(name) or "." not in name or name.endswith(_CLUSTER_NAMES)

    def is_own_page(self, origin: bytes, host: bytes) -> bool:
        """Return whether a page of `origin` may change or compute something. Its host must be the host of the request
        or an allowed host, or SIE_CORS_ORIGINS must list the origin.
        """
        if origin in self._origins:
            return True
        scheme, _, page_host = origin.decode("latin-1").lower().partition("://")
        if scheme not in ("http", "https"):
            return False
        if page_host == host.decode("latin-1").lower():
            return True
        name, port = parts(page_host)
        return any(matches(each, name, port) for each in self._allowed if each != _ANY)

    def check(self, scope: Scope) -> None:
        """Raise PermissionDenied for a foreign host name or a foreign page."""
        host, origins, site = b"", [], b""
        for name, value in scope["headers"]:
            if name == b"host" and value:
                host = value
                if not self.has(value):
                    raise PermissionDenied(
                        "Host: not a name of this server; SIE_ALLOWED_HOSTS lists its further names",
                        reason="host",
                        param="Host",
                    )
            elif name == b"origin":
                origins.append(value)
            elif name == b"sec-fetch-site":
                site = value
        if scope["type"] == "http" and scope["method"] in _READING:
            return
        if not all(self.is_own_page(origin, host) for origin in origins):
            raise PermissionDenied(
                "Origin: a page of another origin may not change or compute anything here; SIE_CORS_ORIGINS lists the "
                "origins whose pages may, SIE_ALLOWED_HOSTS lists the further names of this server",
                reason="origin",
                param="Origin",
            )
        if not origins and site in _FOREIGN_SITES:
            raise PermissionDenied(
                "Sec-Fetch-Site: a page of another site may not change or compute anything here", reason="origin"
            )


class Guarded:
    """Passes requests to `app` if they name this listener and do not come from a foreign page."""

    def __init__(self, app: App, names: HostNames, refusals: Refusals) -> None:
        self.app = app
        self._names = names
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        try:
            self._names.check(scope)
        except SIEError as error:
            self._refusals.note(error.reason, error.message)
            await (refuse if scope["type"] == "http" else refuse_upgrade)(send, error)
            return
        await self.app(scope, receive, send)


def parts(host: str) -> tuple[str, str]:
    """Split a Host header into name and port; the port may be missing. Brackets of an IPv6 address and a dot at the end
    of a name are removed.
    """
    if host.startswith("["):
        name, _, rest = host[1:].partition("]")
        return name, rest.removeprefix(":")
    name, _, port = host.partition(":")
    return name.removesuffix("."), port


def matches(allowed: str, name: str, port: str) -> bool:
    """Return whether `allowed`, an entry of a list, matches a host. `*.example.com` matches every name below
    example.com. The port is compared if the entry has one.
    """
    allowed_name, wanted_port = parts(allowed)
    if wanted_port and wanted_port != port:
        return False
    return name.endswith(allowed_name[1:]) if allowed_name.startswith("*.") else name == allowed_name


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
