"""Clients of the gateway for commands: the client of the SDK, and one for administrators' routes. `gateway_client` and
`AdminClient.first` end the command if the gateway does not answer.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

import httpx
import msgspec

from sie_cli.bodies import LimitedBody
from sie_cli.cluster import Cluster
from sie_cli.display import printable
from sie_cli.options import refuse
from sie_cli.refusal import CommandRefused
from sie_contracts.errors import UNDECODABLE
from sie_contracts.loopback import client_options
from sie_contracts.settings import public_url

if TYPE_CHECKING:
    from sie_client import SIEClient


T = TypeVar("T")
TIMEOUT_S = 15.0  # seconds to wait for an answer; longer than the 10 s after which a config service ends a write
_OTHER_FORM = "in another form than a gateway of this version: name the address of such a gateway with --url"
_NEXT = {
    "UNAUTHENTICATED": "set SIE_ADMIN_TOKEN to the gateway's value, or SIE_API_KEY to a key with the scope admin",
    "PERMISSION_DENIED": "this needs the scope admin: SIE_ADMIN_TOKEN, or a key of `sie keys create --scopes admin`",
}


class _Served(msgspec.Struct, frozen=True):
    served: tuple[str, ...] = ()


class ModelDescription(msgspec.Struct, frozen=True):
    """Fields of a gateway's description of a model (`ModelInfo`) that commands read."""

    name: str
    tasks: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dims: dict[str, int]
    loaded: bool
    score_scale: str | None = None
    needs_labels: bool = False
    engine: _Served = _Served()
    precision: _Served = _Served()


class GatewayUnready(CommandRefused):
    """Raised for status 502, 503 or 504: the gateway is starting or stopping, and may answer the request later."""


class _AdminError(msgspec.Struct):
    message: str | None = None
    code: str | int | None = None  # null or a number if another server or a proxy sent the error


class _AdminErrorBody(msgspec.Struct):
    error: _AdminError


def checked_url(url: str) -> str:
    """Return `url` if it is a valid address of an HTTP server. The host need not exist. Raises CommandRefused."""
    try:
        parsed = httpx.URL(url)
        # Encode the host here: during a request, an invalid host would raise UnicodeError, which is no httpx error.
        is_usable = parsed.scheme in ("http", "https") and bool(parsed.host.encode("idna"))
    except (httpx.InvalidURL, UnicodeError):
        is_usable = False
    if not is_usable:
        raise CommandRefused(f"{public_url(url)} is no URL of a service: expected http://host:port")
    return url


def checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers if a client can send them. Raises CommandRefused. Its message does not have the header's
    value, which may be a token.
    """
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise CommandRefused(f"header {name}: expected printable ASCII in one line")
    return dict(headers)


class HttpConnection:
    """Base of the clients for one server. A client sends `token` as a bearer token, unless `token` is empty."""

    def __init__(self, url: str, token: str, transport: httpx.BaseTransport | None = None) -> None:
        self.url = checked_url(url.rstrip("/"))
        headers = checked_headers({"authorization": f"Bearer {token}"} if token else {})
        options = {"transport": transport} if transport else client_options(self.url, httpx.HTTPTransport)
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def _exchange(self, method: str, path: str, **content: Any) -> httpx.Response:
        """Send a request and return the reply. Raises httpx.TransportError, httpx.DecodingError, and CommandRefused for
        a body beyond the limits of `LimitedBody`.
        """
        with self._client.stream(method, path, **content) as answer:
            body = LimitedBody()
            try:
                for piece in answer.iter_bytes():
                    body.receive(piece)
            except ValueError as error:
                raise CommandRefused(f"{public_url(self.url)}: {error}") from error
        headers = [(name, value) for name, value in answer.headers.raw if name.lower() != b"content-encoding"]
        return httpx.Response(answer.status_code, headers=headers, content=bytes(body), request=answer.request)


class AdminClient(HttpConnection):
    """Client of a gateway's routes for administrators. It sends `Cluster.gateway_admin_token`."""

    def __init__(self, cluster: Cluster) -> None:
        token = cluster.gateway_admin_token
        super().__init__(cluster.gateway_urls[0], token.reveal() if token else "")
        self._cluster = cluster

    def request(self, method: str, path: str, body_type: type[T], **content: Any) -> T:
        """Send a request and return the body of a successful reply. `content`: arguments of `httpx.Client.stream`.
        Raises CommandRefused, httpx.TransportError.
        """
        try:
            answer = self._exchange(method, path, **content)
        except httpx.DecodingError as error:
            raise CommandRefused(f"{public_url(self.url)} replied {_OTHER_FORM}") from error
        refused = GatewayUnready if answer.status_code in (502, 503, 504) else CommandRefused
        try:
            if answer.is_success:
                return msgspec.json.decode(answer.content, type=body_type)
            refusal = msgspec.json.decode(answer.content, type=_AdminErrorBody).error
        except UNDECODABLE as error:
            status = answer.status_code
            raise refused(f"{public_url(self.url)} replied with status {status}, {_OTHER_FORM}\n{error}") from error
        message = refusal.message or f"status {answer.status_code}"
        following = _NEXT.get(str(refusal.code))
        raise refused(f"{message}\n{following}" if following else message)

    def first(self, method: str, path: str, body_type: type[T], **content: Any) -> T:
        """Send the first request of a command. Raises CommandRefused, also if no gateway answers."""
        try:
            return self.request(method, path, body_type, **content)
        except httpx.TransportError as error:
            raise CommandRefused(self._cluster.without_gateway(self.url, error)) from error


@contextlib.contextmanager
def gateway_client(cluster: Cluster, scopes: str, *, is_patient: bool = False) -> Iterator[SIEClient]:
    """Open a client for a command. `gateway_errors` handles its errors. `scopes`: the scopes that the token needs, in
    words for an error message. `is_patient`: True to wait while the gateway restarts, False to wait at most
    `Cluster.first_patience_s`.
    """
    from sie_client import SIEClient

    secret = cluster.gateway_token
    with (
        gateway_errors(cluster, scopes),
        SIEClient(
            cluster.gateway_urls[0],
            api_key=secret.reveal() if secret else None,
            connection_budget_s=None if is_patient else cluster.first_patience_s,
        ) as client,
    ):
        yield client


def described(info: object, fields: type[T]) -> T:
    """Convert a gateway's description of a model to `fields`. Raises ServerError that names a missing field."""
    from sie_client.core import reading

    with reading({}):
        return msgspec.convert(info, fields)


@contextlib.contextmanager
def gateway_errors(cluster: Cluster, scopes: str) -> Iterator[None]:
    """End the command with status 2 if no gateway answers, or if the gateway refuses the token. Raises CommandRefused
    for other errors of the client.
    """
    from sie_client.errors import AuthenticationError, ModelNotFoundError, SIEConnectionError, SIEError

    try:
        yield
    except AuthenticationError as error:
        refuse(printable(f"{error}: set SIE_API_KEY to a token with {scopes}"))
    except SIEConnectionError as error:
        refuse(printable(cluster.without_gateway(cluster.gateway_urls[0], error)))
    except ModelNotFoundError as error:
        raise CommandRefused(f"{printable(str(error))} (`sie models list` shows all)") from error
    except SIEError as error:
        # the cause of a status of 200 is a reply in which a field is missing or has another type (`reading`)
        is_unreadable = error.status == 200 and error.__cause__ is not None
        where = f"\n{public_url(cluster.gateway_urls[0])} replied {_OTHER_FORM}" if is_unreadable else ""
        raise CommandRefused(printable(str(error)) + where) from error


@contextlib.contextmanager
def quiet_client() -> Iterator[None]:
    """Hide the client's warnings about retries. They would disturb the display, and the final error has the reason."""
    logger = logging.getLogger("sie_client")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
