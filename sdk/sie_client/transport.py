"""HTTP options, addresses and arguments of calls, shared by the blocking and the asyncio client."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypeGuard, cast

import httpx

from sie_client.core import Answer, BodySink, Received, Send, Session, TransportFailed, UploadStream
from sie_client.types import Item
from sie_contracts import client_environment
from sie_contracts.loopback import causes, client_options, is_local, is_refused

CONNECT_S = 10.0
PIECE_BYTES = 1 << 20  # largest number of bytes of a response's body that a BodySink gets in one call
CLOSE_S = 5.0  # seconds that the end of a `with client.reserve()` block waits for a renewal that is running
_logger = logging.getLogger("sie_client")

# exceptions that a request raises: those of httpx, RuntimeError if the client is closed, ValueError for a bad header
FAILURES = (httpx.HTTPError, httpx.InvalidURL, RuntimeError, ValueError)
_NEVER_SENT = (httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.InvalidURL, RuntimeError, ValueError)


class Ended(Exception):
    """Raised by a driver that stops a plan before its end."""


class BodyFailed(Exception):
    """Raised in place of `error`, an exception of code that reads or writes a body, such as the caller's `on_progress`.
    Without this class, a ValueError of that code would count as a failure of the connection.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def body_code() -> Iterator[None]:
    """Context manager for code that reads or writes a body: an exception of a type in FAILURES becomes BodyFailed."""
    try:
        yield
    except FAILURES as error:
        raise BodyFailed(error) from None


def options(url: str, session: Session, transport: Callable[..., object]) -> dict[str, Any]:
    """Return the options of an httpx client for the server at `url`. No option limits the number of connections,
    because `concurrency` already limits the requests of a call. Up to 20 idle connections, or twice the concurrency if
    that is more, stay open for a minute.
    """
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=max(20, 2 * session.concurrency), keepalive_expiry=60.0
    )
    return client_options(url, transport, limits=limits)


def with_key(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return client options with an `api_key`. If the option is missing, the key of the environment is used; if it is
    None, no key is sent.
    """
    return {"api_key": client_environment.api_key(), **options}


def timeout(request: Send) -> httpx.Timeout:
    return httpx.Timeout(request.within_s, connect=min(CONNECT_S, request.within_s))


def received(response: httpx.Response, started_s: float, body: bytes) -> Received:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Received(response.status_code, headers, body, time.monotonic() - started_s)


def sink_of(request: Send, response: httpx.Response) -> BodySink | None:
    """Return the sink of the request; None if the response is an error, whose body is read into memory."""
    return request.sink if response.status_code == 200 else None


def sent_headers(request: Send) -> dict[str, str]:
    """Return the headers of a request. For a streamed body, `content-length` prevents the chunked encoding of httpx."""
    length = {"content-length": str(request.body.size_bytes)} if isinstance(request.body, UploadStream) else {}
    return {**request.headers, **length}


def failed(error: Exception, started_s: float, url: str, *, has_answered: bool) -> TransportFailed:
    """Convert an exception of a request. The failure is permanent if a retry is useless: the client is closed, the URL
    or a header cannot be sent, the host is unknown, its certificate is not trusted, or the URL is https and the port
    speaks plain http. `is_nobody` is True if a port of this machine refuses the connection and no server has answered
    on this port before (`has_answered`): a server that has answered before may only be restarting.
    """
    is_permanent = isinstance(error, _NEVER_SENT) or is_unknown_host(error) or _is_refused_by_tls(error)
    is_nobody = not has_answered and is_refused(error) and is_local(url)
    return TransportFailed(error, time.monotonic() - started_s, is_permanent, public(url), is_nobody)


def address(base_url: str | None) -> str:
    """Return the base URL without a slash at its end. None means SIE_BASE_URL of the environment; if this is not set, a
    URL on this machine. Raises ValueError if the URL does not begin with http:// or https://.
    """
    url = str((client_environment.base_url() or client_environment.LOOPBACK) if base_url is None else base_url).rstrip(
        "/"
    )
    if not url.startswith(("http://", "https://")):
        raise ValueError("base_url: expected a URL that begins with http:// or https://, such as http://127.0.0.1:8080")
    return url


def public(url: str) -> str:
    """Return a URL without the user name and password in it."""
    scheme, mark, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}"


def is_unknown_host(error: BaseException) -> bool:
    """Return True if the host name cannot be resolved, but False if only the DNS server sent no reply (EAI_AGAIN)."""
    fault = next((cause for cause in causes(error) if isinstance(cause, socket.gaierror)), None)
    return fault is not None and fault.errno != socket.EAI_AGAIN


def _is_refused_by_tls(error: BaseException) -> bool:
    """Return True if the certificate is not trusted, or if the port answered the TLS handshake with something that is
    not TLS, for example plain http.
    """
    fault = next((cause for cause in causes(error) if isinstance(cause, ssl.SSLError)), None)
    return fault is not None and fault.reason in ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")


def is_good(answer: Answer) -> bool:
    """Return True for a success. The driver then waits for no other copy of the request (see `hedge_after_s`)."""
    return isinstance(answer, Received) and answer.status == 200


def best(answers: Iterable[Answer]) -> Answer:
    """Return a successful answer if one exists; if none exists, any failed answer."""
    return max(answers, key=is_good)


def log_of_background(error: BaseException | None) -> None:
    """Log the error of a background plan. Nothing is logged for a plan that the driver has stopped."""
    if error is not None and not isinstance(error, Ended):
        _logger.error("the renewal of a pool stopped with an error", exc_info=error)


def is_single(items: Item | str | Iterable[Item | str]) -> TypeGuard[Item | str]:
    return isinstance(items, Mapping | str) or hasattr(items, "as_py")


def as_list(items: Item | str | Sequence[Item | str]) -> list[Item | str]:
    """Return the items of a call as a list. A single value becomes a list with one item; `wire.mapped` checks later
    whether it is a valid item. Raises TypeError for a table (DataFrame), because iteration over a table gives column
    names.
    """
    iterable: Iterable[Any] = as_iterable(items)[0]
    return [item.as_py() if hasattr(item, "as_py") else item for item in iterable]


def as_iterable(items: Item | str | Iterable[Item | str]) -> tuple[Iterable[Item | str], int | None]:
    """Return the items of a call and their number (None: unknown). Unlike `as_list`, leave an iterator unread."""
    if hasattr(items, "columns") and len(getattr(items, "shape", ())) == 2:
        column = f"df[{_column_of_texts(items)!r}]"
        raise TypeError(
            f"items: expected texts, got a {type(items).__name__}: pass one of its columns, such as {column}"
        )
    if hasattr(items, "to_pylist"):  # a column of pyarrow or nanoarrow: iterating over it gives Arrow scalars, not str
        items = items.to_pylist()
    if not isinstance(items, Iterable) or isinstance(items, Mapping | str | bytes | bytearray):
        return [cast("Item | str", items)], 1
    return items, len(items) if isinstance(items, Sized) else None


def _column_of_texts(table: Any) -> object:
    """Return the name of the first column of texts in a table of pandas, pyarrow or polars; if no column has texts, the
    name of the first column.
    """
    if hasattr(table, "iloc"):
        kinds = dict(zip(table.columns, table.dtypes, strict=True))
    elif hasattr(table, "column_names"):
        kinds = dict(zip(table.column_names, table.schema.types, strict=True))
    else:
        kinds = dict(getattr(table, "schema", {}))
    texts = [name for name, kind in kinds.items() if str(kind).lower() in _TEXT_KINDS]
    return next(iter([*texts, *kinds]), "text")


_TEXT_KINDS = frozenset({"object", "str", "string", "utf8", "large_string", "string_view"})
