"""HTTP and arguments of calls, shared by the sync and the async client."""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, TypeGuard, cast

import httpx

from sie_client.core import BodySink, Received, Send, Session, TransportFailed, UploadStream
from sie_client.types import Item
from sie_contracts import client_environment
from sie_contracts.loopback import direct, is_local, is_refused

CONNECT_S = 10.0
PIECE_BYTES = 1 << 20  # bytes of a piece of a body for a sink
CLOSE_S = 5.0  # seconds that the end of a reservation waits for a running renewal
_logger = logging.getLogger("sie_client")

# exceptions of httpx, and exceptions that httpx does not convert: for a closed client, and for an invalid URL or header
FAILURES = (httpx.HTTPError, httpx.InvalidURL, RuntimeError, ValueError)
_NEVER_SENT = (httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.InvalidURL, RuntimeError, ValueError)


class Ended(Exception):
    """The driver ended a plan because the surrounding work has ended."""


def options(url: str, session: Session, transport: Callable[..., object]) -> dict[str, Any]:
    """Return options of an httpx client for the server at `url`. The number of its connections is limited to the number
    of concurrent requests.
    """
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=max(20, 2 * session.concurrency), keepalive_expiry=60.0
    )
    return {"limits": limits, "transport": direct(url, transport, limits=limits)}


def with_key(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a client. The key of the environment is added, unless the options have a key, or None for no
    key.
    """
    return {"api_key": client_environment.api_key(), **options}


def timeout(request: Send) -> httpx.Timeout:
    return httpx.Timeout(request.within_s, connect=min(CONNECT_S, request.within_s))


def received(response: httpx.Response, started_s: float, body: bytes) -> Received:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Received(response.status_code, headers, body, time.monotonic() - started_s)


def sink_of(request: Send, response: httpx.Response) -> BodySink | None:
    """Return the sink for a response's body; None for an error response, whose body is read into memory."""
    return request.sink if response.status_code == 200 else None


def sent_headers(request: Send) -> dict[str, str]:
    """Return the headers of a request. A streamed body needs its length: without it httpx would send chunks."""
    length = {"content-length": str(request.body.size_bytes)} if isinstance(request.body, UploadStream) else {}
    return {**request.headers, **length}


def failed(error: Exception, started_s: float, url: str, *, has_answered: bool) -> TransportFailed:
    """Return the TransportFailed for an error. Some errors are permanent: a URL or header that cannot be sent, a host
    name that does not exist, and https to a port with plain http.

    If a port of this machine refuses the connection, no server runs there (`is_nobody`). But if a server has answered
    before (`has_answered`), it may be restarting.
    """
    is_permanent = isinstance(error, _NEVER_SENT) or is_unknown_host(error) or _is_without_tls(error)
    is_nobody = not has_answered and is_refused(error) and is_local(url)
    return TransportFailed(error, time.monotonic() - started_s, is_permanent, public(url), is_nobody)


def address(base_url: str | None) -> str:
    """Return the address of a server without a final slash. For None, return SIE_BASE_URL, else the address of a server
    on this machine. Raises ValueError if the address has no scheme.
    """
    url = str((client_environment.base_url() or client_environment.LOOPBACK) if base_url is None else base_url).rstrip(
        "/"
    )
    if not url.startswith(("http://", "https://")):
        raise ValueError(
            "base_url: expected an address such as http://127.0.0.1:8080, which begins with http:// or https://"
        )
    return url


def public(url: str) -> str:
    """Return the address without user and password."""
    scheme, mark, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}"


def is_unknown_host(error: BaseException) -> bool:
    """Return whether the resolver answered that the name does not exist, and not only that it cannot answer now."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror):
            return cause.errno != socket.EAI_AGAIN
        cause = cause.__cause__ or cause.__context__
    return False


def _is_without_tls(error: BaseException) -> bool:
    """Return whether the port answered the TLS handshake with something other than TLS."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return cause.reason == "WRONG_VERSION_NUMBER"
        cause = cause.__cause__ or cause.__context__
    return False


def is_good(answer: Received | TransportFailed) -> bool:
    """Return whether the second copy of a request is not needed any more."""
    return isinstance(answer, Received) and answer.status == 200


def best(answers: Iterable[Received | TransportFailed]) -> Received | TransportFailed:
    """Return a successful answer if there is one, else any answer."""
    return max(answers, key=is_good)


def log_of_background(error: BaseException | None) -> None:
    """Log the error of a background plan that ended without being stopped."""
    if error is not None and not isinstance(error, Ended):
        _logger.error("a background task has ended with an error", exc_info=error)


def is_single(items: Item | str | Iterable[Item | str]) -> TypeGuard[Item | str]:
    return isinstance(items, Mapping | str) or hasattr(items, "as_py")


def as_list(items: Item | str | Sequence[Item | str]) -> list[Item | str]:
    """Return the items of a call as a list. A value that is not a list becomes one item; if that value is not an item,
    `wire.mapped` raises an error later. Raises TypeError for a table, whose elements are the names of its columns.
    """
    iterable: Iterable[Any] = as_iterable(items)[0]
    return [item.as_py() if hasattr(item, "as_py") else item for item in iterable]


def as_iterable(items: Item | str | Iterable[Item | str]) -> tuple[Iterable[Item | str], int | None]:
    """Return the items of a call, and their number if it is known: as `as_list`, but without reading them. A column of
    Arrow is converted to a list.
    """
    if hasattr(items, "columns") and len(getattr(items, "shape", ())) == 2:
        column = f"df[{_column_of_texts(items)!r}]"
        raise TypeError(
            f"items: expected texts, got a {type(items).__name__}: pass one of its columns, such as {column}"
        )
    if hasattr(items, "to_pylist"):  # a column of pyarrow or nanoarrow, whose elements are no texts but scalars
        items = items.to_pylist()
    if not isinstance(items, Iterable) or isinstance(items, Mapping | str | bytes | bytearray):
        return [cast("Item | str", items)], 1
    return items, len(items) if isinstance(items, Sized) else None


def _column_of_texts(table: Any) -> object:
    """Return the name of the first text column of a pandas, pyarrow or polars table; else of the first column."""
    if hasattr(table, "iloc"):
        kinds = dict(zip(table.columns, table.dtypes, strict=True))
    elif hasattr(table, "column_names"):
        kinds = dict(zip(table.column_names, table.schema.types, strict=True))
    else:
        kinds = dict(getattr(table, "schema", {}))
    texts = [name for name, kind in kinds.items() if str(kind).lower() in _TEXT_KINDS]
    return next(iter([*texts, *kinds]), "text")


_TEXT_KINDS = frozenset({"object", "str", "string", "utf8", "large_string", "string_view"})
