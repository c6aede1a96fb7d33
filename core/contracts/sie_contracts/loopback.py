"""Rules for loopback addresses: connections to them use no proxy, because a proxy on another machine would connect to
its own loopback address.

a client of httpx    ──► client_options(url, transport)  used by SIEClient and by the commands of `sie`
a process of `sie`   ──► bypass_proxies(environ)         called once, for other libraries and for child processes
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import ssl

MAX_CAUSE = 200  # maximum number of characters of a cause in an error message

# hosts for NO_PROXY, without networks such as 127.0.0.0/8: httpx and the standard library do not understand networks
_HOSTS = ("localhost", "127.0.0.1", "::1")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "ws_proxy", "wss_proxy", "grpc_proxy")
# both names are set, because some libraries read only one name: gRPC reads only `no_proxy`
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
    """Return whether a call failed because the port refused the connection: no program listens on the port."""
    for cause in causes(error):
        if isinstance(cause, ConnectionRefusedError):
            return True
        # an exception group has one exception for each address of the host name
        members = [member for member in getattr(cause, "exceptions", ()) if isinstance(member, BaseException)]
        if members and all(map(is_refused, members)):
            return True
    return False


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, then the exceptions that led to it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def cause_of(error: BaseException) -> str:
    """Return the original cause of a failed call as one line, without the messages of the exceptions that wrap it."""
    while error.__cause__ is not None and not isinstance(error, OSError):
        error = error.__cause__
    return " ".join(str(error).split())[:MAX_CAUSE] or type(error).__name__


def client_options(url: str, transport: Callable[..., object], **options: Any) -> dict[str, Any]:
    """Return the options of an httpx client for the server at `url`. For a server on this machine, `transport` creates
    a transport without proxies. For other servers, httpx creates transports with the proxies of the environment.
    """
    verify = verification(url)
    return {"transport": transport(verify=verify, **options)} if is_local(url) else {"verify": verify, **options}


def verification(url: str) -> ssl.SSLContext | bool:
    """Return the option `verify` of an httpx client for the server at `url`. For http://, return a context without
    certificates, because http:// needs none, and loading them takes 30 ms of CPU time. A TLS connection with this
    context fails.
    """
    import ssl

    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if url.startswith("http://") else True


def bypass_proxies(environ: MutableMapping[str, str]) -> None:
    """Add the loopback addresses to NO_PROXY, if a variable in `environ` sets a proxy."""
    if not any(environ.get(name) or environ.get(name.upper()) for name in _PROXIES):
        return
    values = [environ.get(name, "") for name in _EXCEPTIONS]
    for name, value in zip(_EXCEPTIONS, values, strict=True):
        hosts = [host for host in (value or values[0] or values[1]).split(",") if host.strip()]
        if hosts != ["*"]:  # `*` covers all hosts
            environ[name] = ",".join(dict.fromkeys([*hosts, *_HOSTS]))
