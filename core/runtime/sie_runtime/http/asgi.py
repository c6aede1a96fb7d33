"""Builds HTTP replies: the headers of all replies, error bodies, and the Content-Security-Policy of the page that shows
the OpenAPI document.
"""

from __future__ import annotations

import asyncio
import base64
import email.utils
import functools
import hashlib
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

import msgspec

from sie_contracts import __version__, sdk_versions
from sie_contracts.errors import MethodNotAllowed, SIEError, envelope

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Body = bytes | Iterable[bytes | memoryview]

MAX_ID_CHARS = 128
_NO_FRAMES = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
REQUEST_ID = "sie.request_id"  # key in an ASGI scope: id of the request, created when the request arrives
TRACE_ID = "sie.trace_id"  # key in an ASGI scope: trace id of the request, if it is traced
# key in an ASGI scope: whether the reply stays uncompressed, for example because gzip hardly compresses vectors
INCOMPRESSIBLE = "sie.incompressible"
# key in an ASGI scope: time when the first byte of the request arrived, by time.perf_counter
FIRST_BYTE = "sie.first_byte_s"
# key in an ASGI scope: present if the whole body had arrived before the application was called
BODY_ARRIVED = "sie.body_arrived"
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", f"default-src 'none'; {_NO_FRAMES}".encode()),
)
_SECURITY = dict(SECURITY_HEADERS)
FAILED = "the server failed; its log has the details"
_VERSION = __version__.encode()
_SDK_VERSION = sdk_versions.HEADER.encode()
_INLINE = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


def uuid7() -> str:
    """Return a time-ordered UUID (RFC 9562, version 7), as text."""
    chance = secrets.randbits(74)
    value = (
        (time.time_ns() // 1_000_000 << 80)
        | (0x7 << 76)
        | (chance >> 62 << 64)
        | (0b10 << 62)
        | (chance & (1 << 62) - 1)
    )
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


@functools.lru_cache(1)
def _date(second: int) -> bytes:
    return email.utils.formatdate(second, usegmt=True).encode()


def common_headers(scope: Scope, headers: Iterable[tuple[bytes, bytes]] = ()) -> list[tuple[bytes, bytes]]:
    """Return `headers` in their order, then the headers of every reply, including probes, preflights and refusals:
    date, ids, trace, versions, and security headers for browsers. A header in `headers` replaces the common header of
    the same name. A name must have only a-z, 0-9 and -: if a name has other characters, such as upper case, uvicorn
    sends the reply in two writes, which takes longer.

    `x-request-id` is the client's id if this id has at most MAX_ID_CHARS characters of printable ASCII; otherwise the
    server's id.
    """
    request_id = client_id = scope[REQUEST_ID].encode()
    server_version = sdk_versions.SERVER_VERSION
    sent_ids = []
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            sent_ids.append(value)
        elif name == _SDK_VERSION:
            server_version = sdk_versions.server_version(value.decode("latin-1"))
    if sent_ids:
        sent_id = b", ".join(sent_ids)  # several headers of this name are read as one value (RFC 9110)
        if 0 < len(sent_id) <= MAX_ID_CHARS and sent_id.isascii() and sent_id.decode().isprintable():
            client_id = sent_id
    common = {
        b"date": _date(int(time.time())),
        b"x-sie-request-id": request_id,
        b"x-request-id": client_id,
        b"x-sie-version": _VERSION,
        b"x-sie-server-version": server_version.encode(),
        **_SECURITY,
    }
    if trace_id := scope.get(TRACE_ID):
        common[b"x-trace-id"] = trace_id.encode()
    merged = list(headers)
    for name, _ in merged:
        common.pop(name, None)
    merged.extend(common.items())
    return merged


def error_headers(error: SIEError) -> dict[str, str]:
    """Return the headers of an error reply: error code, whether to retry and after how many seconds."""
    headers = {
        "X-SIE-Error-Code": error.code,
        "x-should-retry": "true" if error.retryable else "false",
    }
    if error.retryable:
        headers["Retry-After"] = str(max(1, error.retry_after_s))
    if error.reason == "content_encoding":
        headers["Accept-Encoding"] = "gzip"  # RFC 7694: the reply names the supported encodings
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = error.allow
    return headers


def refusal(error: SIEError, request_id: str) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of an error reply in SIE's own format (`envelope`)."""
    return msgspec.json.encode(envelope(error, request_id)), error_headers(error)


def documented(send: Send, elsewhere: str = "") -> Send:
    """Return a `send` that adds a Content-Security-Policy to the page that shows the OpenAPI document. The page may
    load files and run scripts of this server and of the origins `elsewhere`. The policy allows the inline scripts of
    the page by their digests.
    """
    start: MutableMapping[str, Any] = {}

    async def send_page(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start" and dict(message["headers"]).get(b"content-type", b"").startswith(
            b"text/html"
        ):
            start.update(message)
            return
        if start:
            digests = (base64.b64encode(hashlib.sha256(text).digest()) for text in _INLINE.findall(message["body"]))
            scripts = " ".join(f"'sha256-{digest.decode()}'" for digest in digests)
            policy = (
                f"default-src 'none'; script-src 'self' {elsewhere} {scripts}; style-src 'self' {elsewhere} "
                f"'unsafe-inline'; img-src 'self' data: {elsewhere}; connect-src 'self'; {_NO_FRAMES}"
            )
            start["headers"] = [*start["headers"], (b"content-security-policy", " ".join(policy.split()).encode())]
            await send({**start})
            start.clear()
        await send(message)

    return send_page


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the request's headers by lower-case name. Values of a repeated header are joined by commas (RFC 9110)."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    if len(headers) < len(scope["headers"]):
        lines: dict[str, list[str]] = {name: [] for name in headers}
        for name, value in scope["headers"]:
            lines[name.decode("latin-1")].append(value.decode("latin-1"))
        headers = {name: ", ".join(values) for name, values in lines.items()}
    return headers


def accept_weights(accept: str) -> dict[str, float]:
    """Return the weight of each name in an Accept or Accept-Encoding header, by lower-case name (RFC 9110, 12.4.2): its
    `q`, 1 without `q`, 0 if `q` is not a number.
    """
    weights: dict[str, float] = {}
    for part in accept.split(","):
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        weights[name] = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "q":
                try:
                    weights[name] = float(value)
                except ValueError:
                    weights[name] = 0.0
    return weights


async def reply(
    send: Send,
    status: int,
    body: Body,
    content_type: str = "text/plain; charset=utf-8",
    extra: Mapping[str, str] | None = None,
) -> None:
    """Send one response, to which the server protocol adds the common headers (`common_headers`). An iterable `body`
    yields its next piece only when the connection accepts more bytes.
    """
    headers = [(b"content-type", content_type.encode())]
    if isinstance(body, bytes):
        headers.append((b"content-length", b"%d" % len(body)))
    for name, value in (extra or {}).items():
        headers.append((name.lower().encode("latin-1"), value.encode("latin-1")))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if not isinstance(body, bytes):
        for piece in body:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": body if isinstance(body, bytes) else b""})


async def refuse(scope: Scope, send: Send, error: SIEError) -> None:
    body, headers = refusal(error, scope[REQUEST_ID])
    await reply(send, error.status, body, "application/json", headers)


async def reply_to_options(send: Send, allow: str = "") -> None:
    """Send the reply to an OPTIONS request. `allow`: methods of the path; empty for the whole server."""
    headers = [(b"allow", allow.encode())] if allow else []
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def refuse_upgrade(scope: Scope, send: Send, error: SIEError) -> None:
    """Reject the handshake of a websocket with an error, as a plain HTTP response."""
    body, own = refusal(error, scope[REQUEST_ID])
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.lower().encode(), value.encode()) for name, value in own.items()]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})
