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
from sie_contracts.loopback import direct, is_local

CONNECT_S = 10.0
PIECE_BYTES = 1 << 20  # of a body that goes into a sink
CLOSE_S = 5.0  # what the end of a reservation waits, for a renewal that is under way and then for its own call
_logger = logging.getLogger("sie_client")

# httpx's own; what it lets through of a client that was closed, and of a URL or header that cannot be written
FAILURES = (httpx.HTTPError, httpx.InvalidURL, RuntimeError, ValueError)
_NEVER_SENT = (httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.InvalidURL, RuntimeError, ValueError)


class Ended(Exception):
    """A plan was given up, because what it is a part of has ended."""


def options(url: str, session: Session, transport: Callable[..., object]) -> dict[str, Any]:
    """Options of an httpx client for the server at `url`. The number of concurrent requests bounds its connections."""
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=max(20, 2 * session.concurrency), keepalive_expiry=60.0
    )
    return {"limits": limits, "transport": direct(url, transport, limits=limits)}


def with_key(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a client, with the key of the environment unless they name one, or None for no key."""
    return {"api_key": client_environment.api_key(), **options}


def timeout(request: Send) -> httpx.Timeout:
    return httpx.Timeout(request.within_s, connect=min(CONNECT_S, request.within_s))


def received(response: httpx.Response, started_s: float, body: bytes) -> Received:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Received(response.status_code, headers, body, time.monotonic() - started_s)


def sink_of(request: Send, response: httpx.Response) -> BodySink | None:
    """The sink of a response's body, if it has one: errors have none."""
    return request.sink if response.status_code == 200 else None


def sent_headers(request: Send) -> dict[str, str]:
    """Headers of a request. A streamed body gets its length: without one it would be sent in chunks."""
    length = {"content-length": str(request.body.size_bytes)} if isinstance(request.body, UploadStream) else {}
    return {**request.headers, **length}


def failed(error: Exception, started_s: float, url: str, *, has_answered: bool) -> TransportFailed:
    """A URL or header that cannot be sent at all, a name that nobody has, and https at a port of plain http will not
    get better by waiting.

    A port of this machine that refuses will hardly: a server that restarts is waited for (`has_answered`), one that is
    not there is told.
    """
    is_permanent = isinstance(error, _NEVER_SENT) or is_unknown_host(error) or _is_without_tls(error)
    is_nobody = not has_answered and _is_refused(error) and is_local(url)
    return TransportFailed(error, time.monotonic() - started_s, is_permanent, public(url), is_nobody)


def address(base_url: str | None) -> str:
    """The address of a server, without a final slash; of None that of SIE_BASE_URL, else of this machine. Raises
    ValueError unless it names its scheme.
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
    """The address without a user and a password."""
    scheme, mark, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}"


def _is_refused(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return True
        # of each address of a name
        causes = [exception for exception in getattr(cause, "exceptions", ()) if isinstance(exception, BaseException)]
        if causes and all(map(_is_refused, causes)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def is_unknown_host(error: BaseException) -> bool:
    """Whether the resolver said that there is no such name, rather than that it could not tell now."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror):
            return cause.errno != socket.EAI_AGAIN
        cause = cause.__cause__ or cause.__context__
    return False


def _is_without_tls(error: BaseException) -> bool:
    """Whether the port answered the greeting of TLS with something else."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return cause.reason == "WRONG_VERSION_NUMBER"
        cause = cause.__cause__ or cause.__context__
    return False


def is_good(answer: Received | TransportFailed) -> bool:
    """Whether the other copy of a request need not be waited for."""
    return isinstance(answer, Received) and answer.status == 200


def best(answers: Iterable[Received | TransportFailed]) -> Received | TransportFailed:
    """A good one if there is one."""
    return max(answers, key=is_good)


def log_of_background(error: BaseException | None) -> None:
    """A plan in the background that did not end because it was told to."""
    if error is not None and not isinstance(error, Ended):
        _logger.error("what ran in the background has ended", exc_info=error)


def is_single(items: Item | str | Iterable[Item | str]) -> TypeGuard[Item | str]:
    return isinstance(items, Mapping | str)


def as_list(items: Item | str | Sequence[Item | str]) -> list[Item | str]:
    """The items of a call. What is no list is one item, also where it is none: `wire.mapped` tells what
    was expected. Raises TypeError for a table, whose elements are the names of its columns.
    """
    iterable, _ = as_iterable(items)
    return list(iterable)


def as_iterable(items: Item | str | Iterable[Item | str]) -> tuple[Iterable[Item | str], int | None]:
    """The items of a call, and their number if it is known: as `as_list`, and nothing is read."""
    if hasattr(items, "columns") and len(getattr(items, "shape", ())) == 2:
        column = f"df[{_column_of_texts(items)!r}]"
        raise TypeError(
            f"items: expected texts, got a {type(items).__name__}: pass one of its columns, such as {column}"
        )
    if not isinstance(items, Iterable) or isinstance(items, Mapping | str | bytes | bytearray):
        return [cast("Item | str", items)], 1
    return items, len(items) if isinstance(items, Sized) else None


def _column_of_texts(table: Any) -> object:
    """The name of the first column of texts of a table of pandas, pyarrow or polars; else of the first column."""
    if hasattr(table, "iloc"):
        kinds = dict(zip(table.columns, table.dtypes, strict=True))
    elif hasattr(table, "column_names"):
        kinds = dict(zip(table.column_names, table.schema.types, strict=True))
    else:
        kinds = dict(getattr(table, "schema", {}))
    texts = [name for name, kind in kinds.items() if str(kind).lower() in _TEXT_KINDS]
    return next(iter([*texts, *kinds]), "text")


_TEXT_KINDS = frozenset({"object", "str", "string", "utf8", "large_string", "string_view"})
