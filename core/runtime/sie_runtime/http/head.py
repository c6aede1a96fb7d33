"""Rules of RFC 9110 and 9112 for the head of a request: its target, `Host`, the transfer coding of its body, and
headers that may occur only once.
"""

from __future__ import annotations

import re

from sie_contracts.errors import InvalidInput, UnsupportedMediaType

Headers = list[tuple[bytes, bytes]]

# headers of which this server reads one value, in addition to all headers that begin with _OWN. Which of two values
# counts would depend on the reader, and a proxy in front may read the other one. The parser refuses a second
# Content-Length.
SINGLE = frozenset(
    {
        b"authorization",
        b"content-type",
        b"host",
        b"idempotency-key",
        b"if-match",
        b"mcp-session-id",
        b"origin",
        b"sec-fetch-site",
    }
)
_OWN = b"x-sie-"
WHOLE_SERVER = "*"  # target of an OPTIONS that asks about the server, not about a path
_VERSIONS = ("1.1", "1.0")
_AUTHORITY = re.compile(rb"(?:\[[0-9a-f:.]+\]|[a-z0-9._~!$&'()*+,;=%-]+)(?::[0-9]*)?", re.IGNORECASE)
_ABSOLUTE = re.compile(rb"https?://([^/?]*)(.*)", re.IGNORECASE | re.DOTALL)


def checked_target(method: str, target: bytes, version: str, headers: Headers) -> bytes:
    """Check a head. Return its target as a path with a query, or WHOLE_SERVER. If the target
    is an absolute URL, its host replaces `Host` in `headers` (RFC 9112, 3.2.2). `headers` has names in lower case.

    Raises InvalidInput, which names the header, and UnsupportedMediaType for a transfer coding except chunked.
    """
    if version not in _VERSIONS:
        raise _malformed("version", "expected HTTP/1.1 or HTTP/1.0")
    values = dict(headers)
    if len(values) < len(headers):
        _check_repeated(headers)
    host = values.get(b"host")
    if host is None and version == "1.1":
        raise _malformed("Host", "missing, and HTTP/1.1 requires it")
    if host and not _AUTHORITY.fullmatch(host):
        raise _malformed("Host", "expected a host name, with or without a port")
    if b"transfer-encoding" in values:
        _check_codings(version, headers)
    if target.startswith(b"/") and b"#" not in target:
        return target
    if target == WHOLE_SERVER.encode() and method == "OPTIONS":
        return target
    url = _ABSOLUTE.fullmatch(target)
    if url is None or b"#" in target or not _AUTHORITY.fullmatch(url[1]):
        raise _malformed("target", "expected a path such as /v1/models, or a URL with http:// and no fragment")
    headers[:] = [(b"host", url[1]), *(pair for pair in headers if pair[0] != b"host")]
    return url[2] if url[2].startswith(b"/") else b"/" + url[2]


def _check_repeated(headers: Headers) -> None:
    met = set[bytes]()
    for name, _ in headers:
        if name in met and (name in SINGLE or name.startswith(_OWN)):
            raise _malformed(name.decode("latin-1").title(), "expected once, this head has it several times")
        met.add(name)


def _check_codings(version: str, headers: Headers) -> None:
    if version != "1.1":
        raise _malformed("Transfer-Encoding", "HTTP/1.0 has no transfer codings")
    values = b",".join(value for name, value in headers if name == b"transfer-encoding").lower().split(b",")
    codings = [coding for value in values if (coding := value.strip())]
    if codings.count(b"chunked") != 1 or codings[-1] != b"chunked":
        raise _malformed("Transfer-Encoding", "expected chunked once, at the end")
    if len(codings) > 1:
        raise UnsupportedMediaType(
            "Transfer-Encoding: expected chunked alone; a gzip body is announced in Content-Encoding",
            reason="transfer_encoding",
            param="Transfer-Encoding",
            status=501,
        )


def _malformed(param: str, message: str) -> InvalidInput:
    return InvalidInput.at(param, message, reason="malformed")
