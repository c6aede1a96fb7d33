"""Addresses of this machine. No proxy is used for them, because a proxy on another machine would connect to itself.

a client of httpx    ──► direct(url, transport)     used by SIEClient and by the commands of `sie`
a process of `sie`   ──► bypass_proxies(environ)    once, for the other libraries in it and in its child processes
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")
MAX_CAUSE = 200  # maximum number of characters of a cause in an error message

# only names and addresses: httpx and the standard library do not understand networks in NO_PROXY
_HOSTS = ("localhost", "127.0.0.1", "::1")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "ws_proxy", "wss_proxy", "grpc_proxy")
# set both names: some libraries read only one of them (gRPC reads only the first)
_EXCEPTIONS = ("no_proxy", "NO_PROXY")


def is_loopback(host: str) -> bool:
    """Return whether `host`, a name or an address, is the loopback interface of this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # `host` is a name
        return False


def is_local(url: str) -> bool:
    """Return whether the host of a URL is the loopback interface of this machine."""
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:  # not a valid URL
        return False


def is_refused(error: BaseException) -> bool:
    """Return whether a call failed because the port refused the connection, so no program listens there."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return True
        # an exception group has one exception for each address of the host name
        causes = [exception for exception in getattr(cause, "exceptions", ()) if isinstance(exception, BaseException)]
        if causes and all(map(is_refused, causes)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def cause_of(error: BaseException) -> str:
    """Return the original cause of a failed call as one line, without the messages of the exceptions that wrap it."""
    while error.__cause__ is not None and not isinstance(error, OSError):
        error = error.__cause__
    return " ".join(str(error).split())[:MAX_CAUSE] or type(error).__name__


def direct(url: str, transport: Callable[..., T], **options: Any) -> T | None:
    """Return an httpx transport, created with `options`, if `url` is on this machine. Return None for any other server:
    httpx then creates its own transports, which use the proxies of the environment.
    """
    return transport(**options) if is_local(url) else None


def bypass_proxies(environ: MutableMapping[str, str]) -> None:
    """Add the loopback addresses to NO_PROXY, if a variable in `environ` sets a proxy."""
    if not any(environ.get(name) or environ.get(name.upper()) for name in _PROXIES):
        return
    values = [environ.get(name, "") for name in _EXCEPTIONS]
    for name, value in zip(_EXCEPTIONS, values, strict=True):
        hosts = [host for host in (value or values[0] or values[1]).split(",") if host.strip()]
        if hosts != ["*"]:  # `*` covers all hosts
            environ[name] = ",".join(dict.fromkeys([*hosts, *_HOSTS]))
