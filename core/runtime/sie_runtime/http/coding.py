"""Content-Encoding and Content-Type (RFC 9110, 8.3 and 8.4): requests may have gzip bodies, replies are compressed.

    request ──► Content-Type, Content-Encoding ──► decoded ──► limits on size and time ──► handler
    reply   ──► compressed, if `CompressedReply` decides so ──► connection

Limits on a body count decompressed bytes. A body is decompressed in pieces, and reading stops at the piece that exceeds
the limit. So a small gzip body that decompresses to a huge size cannot fill the memory.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from sie_contracts.errors import InvalidInput, UnsupportedMediaType
from sie_runtime.http.asgi import Receive, Scope, Send, accept_weights, headers_of

# Replies that come in one piece of at most this number of bytes are not compressed, because gzip saves little.
GZIP_OVER = 4096
# largest number of bytes that the event loop itself compresses or decompresses at a time, in about 2 ms
INLINE_BYTES = 64 << 10
PIECE_BYTES = 1 << 20
MAX_MEMBERS = 1 << 14  # largest number of gzip members in one body; even an empty member takes about 10 us
LEVEL = 1  # compression level of gzip, from 1 (fast) to 9 (small)
_GZIP = 16 + zlib.MAX_WBITS
_HEAD = b"\x1f\x8b"  # first bytes of each gzip member (RFC 1952)
_BODILESS = frozenset({"GET", "HEAD", "OPTIONS"})
_TEXTUAL = ("json", "yaml", "xml", "javascript", "openmetrics-text")


def decoded(method: str, headers: Mapping[str, str], receive: Receive) -> Receive:
    """Return a `receive` that decompresses the body, if Content-Encoding is gzip. Return `receive` itself for a body
    without an encoding, and for GET, HEAD and OPTIONS.

    Raises UnsupportedMediaType for any other encoding. The returned function raises InvalidInput for invalid gzip data,
    and for more than MAX_MEMBERS gzip members.
    """
    named = (name.strip() for name in headers.get("content-encoding", "").lower().split(","))
    codings = [name for name in named if name not in ("", "identity")]
    if not codings or method in _BODILESS:
        return receive
    if codings not in (["gzip"], ["x-gzip"]):
        raise UnsupportedMediaType(
            "Content-Encoding: expected gzip once, or no encoding", reason="content_encoding", param="Content-Encoding"
        )
    return _Gunzipped(receive).receive


class _Gunzipped:
    """ASGI `receive` of a gzip body: its messages have decompressed bytes."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._inflating = zlib.decompressobj(_GZIP)
        self._members = 1
        self._pending = b""  # received bytes that are not decompressed yet
        self._is_last = self._is_complete = False

    async def receive(self) -> MutableMapping[str, Any]:
        if self._is_complete:
            return await self._receive()
        if not self._pending and not self._is_last:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._pending = message.get("body", b"")
            self._is_last = not message.get("more_body", False)
            piece = self._inflate(INLINE_BYTES, members=1)
        else:
            piece = await asyncio.to_thread(self._inflate, PIECE_BYTES, members=MAX_MEMBERS)
        self._is_complete = self._is_last and not self._pending
        if self._is_complete and not self._inflating.eof:
            raise _corrupt("it ends before its gzip data is complete")
        return {"type": "http.request", "body": piece, "more_body": not self._is_complete}

    def _inflate(self, most: int, *, members: int) -> bytes:
        """Decompress bytes at the start of `_pending`, and remove them from `_pending`. Returns at most `most`
        decompressed bytes, and begins at most `members` gzip members.
        """
        plain = b""
        try:
            while self._pending and len(plain) < most:
                if self._inflating.eof:
                    if not _HEAD.startswith(self._pending[: len(_HEAD)]):
                        raise _corrupt("its gzip data is followed by other bytes")
                    if not members:
                        break
                    if self._members == MAX_MEMBERS:
                        raise _corrupt(f"its gzip data has more than {MAX_MEMBERS} members")
                    self._members += 1
                    members -= 1
                    self._inflating = zlib.decompressobj(_GZIP)
                plain += self._inflating.decompress(self._pending, most - len(plain))
                self._pending = self._inflating.unconsumed_tail or self._inflating.unused_data
        except zlib.error as error:
            raise _corrupt("its gzip data is corrupt") from error
        return plain


def _corrupt(why: str) -> InvalidInput:
    return InvalidInput.at("body", why, reason="malformed")


def accepts_gzip(accepted: str) -> bool:
    """Return whether an Accept-Encoding header accepts gzip (RFC 9110, 12.5.3)."""
    weights = accept_weights(accepted)
    return 0.0 < weights.get("gzip", weights.get("x-gzip", weights.get("*", 0.0))) <= 1.0


class CompressedReply:
    """Reply that is compressed by gzip if it is text (`_is_text`) and `_pays` returns True. The head is sent with the
    first piece of the body, because only this piece shows whether the body is short.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._start: MutableMapping[str, Any] | None = None
        self._gzip: zlib._Compress | None = None

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message.get("headers", ()))
            if _is_text(headers.get(b"content-type", b"")):
                self._start = {**message, "headers": _varying(message["headers"])}
                return
        elif message["type"] == "http.response.body":
            body, is_last = message.get("body", b""), not message.get("more_body", False)
            if self._start is not None:
                start, self._start = self._start, None
                if self._pays(start, len(body), is_last=is_last):
                    self._gzip = zlib.compressobj(LEVEL, zlib.DEFLATED, _GZIP)
                    body = await self._compressed(body, is_last=is_last)
                    names = [b"content-length", b"content-encoding"]
                    start["headers"] = [pair for pair in start["headers"] if pair[0] not in names]
                    start["headers"].append((b"content-encoding", b"gzip"))
                    if is_last:
                        start["headers"].append((b"content-length", b"%d" % len(body)))
                await self._send(start)
            elif self._gzip is not None:
                body = await self._compressed(body, is_last=is_last)
            message = {**message, "body": body}
        await self._send(message)

    def _pays(self, start: MutableMapping[str, Any], size: int, *, is_last: bool) -> bool:
        """Return whether to compress the reply: the client accepts gzip, and the body has more than GZIP_OVER bytes or
        comes in pieces. A reply with an ETag is not compressed, because a strong ETag identifies exact bytes. A reply
        that already has a Content-Encoding, and a reply with a part of a resource (206), are not compressed either.
        """
        names = {name for name, _ in start["headers"]}
        return (
            (size > GZIP_OVER or not is_last)
            and start["status"] != 206
            and names.isdisjoint((b"etag", b"content-encoding"))
            and accepts_gzip(headers_of(self._scope).get("accept-encoding", ""))
        )

    async def _compressed(self, body: bytes, *, is_last: bool) -> bytes:
        if len(body) > INLINE_BYTES:
            return await asyncio.to_thread(self._compress, body, is_last=is_last)
        return self._compress(body, is_last=is_last)

    def _compress(self, body: bytes, *, is_last: bool) -> bytes:
        assert self._gzip is not None
        return self._gzip.compress(body) + (self._gzip.flush() if is_last else b"")


def _is_text(content_type: bytes) -> bool:
    kind = content_type.decode("latin-1").partition(";")[0].strip().lower()
    return kind.startswith("text/") or kind.endswith(_TEXTUAL)


def _varying(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    varies = [value for name, value in headers if name == b"vary"]
    return [*(pair for pair in headers if pair[0] != b"vary"), (b"vary", b", ".join([*varies, b"Accept-Encoding"]))]
