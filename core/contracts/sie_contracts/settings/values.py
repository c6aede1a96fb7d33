"""Types of setting values. Each type has a function that parses a text, and words for the message "expected ..."."""

from __future__ import annotations

import hmac
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from sie_contracts.wire.topology import pool_name

Parse = Callable[[str], Any]
Kind = tuple[str, Parse]  # (words after "expected" in an error message, function that parses or raises ValueError)

MAX_DEVICES = 16  # maximum number of devices of one worker


class Secret:
    """A string that is never printed. `matches` takes the same time for every wrong value of the same length."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def matches(self, candidate: str) -> bool:
        return hmac.compare_digest(self._value.encode(), candidate.encode())

    def __repr__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self.matches(other._value)

    def __hash__(self) -> int:
        return hash(self._value)


def _boolean(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("true", "1", "yes", "on"):
        return True
    if lowered in ("false", "0", "no", "off"):
        return False
    raise ValueError


def whole(low: int, high: int | None = None) -> Kind:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text):
            raise ValueError
        value = int(text)
        if value < low or (high is not None and value > high):
            raise ValueError
        return value

    return (f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"), parse


def number(low: float, high: float = math.inf, *, open_low: bool = False) -> Kind:
    def parse(text: str) -> float:
        value = float(text)
        if math.isnan(value) or value < low or value > high or (open_low and value == low) or math.isinf(value):
            raise ValueError
        return value

    bound = f"{'above' if open_low else 'of at least'} {low:g}"
    return f"a number {bound}" + ("" if math.isinf(high) else f" and at most {high:g}"), parse


def choice(*values: str) -> Kind:
    def parse(text: str) -> str:
        if text.lower() not in values:
            raise ValueError
        return text.lower()

    return "one of " + ", ".join(values), parse


def choices(*values: str) -> Kind:
    def parse(text: str) -> tuple[str, ...]:
        names = _list_of(text.lower())
        if not set(names) <= set(values):
            raise ValueError
        return names

    return "a comma-separated list of " + ", ".join(values), parse


def pattern(expected: str, pattern: str, *, lower: bool = False) -> Kind:
    compiled = re.compile(pattern)

    def parse(text: str) -> str:
        value = text.lower() if lower else text
        if not compiled.fullmatch(value):
            raise ValueError
        return value

    return expected, parse


def _devices(text: str) -> str:
    names = [name.strip() for name in text.lower().split(",")]
    if len(names) == 1:
        pattern = r"auto|all|cpu|mps|cuda(:\d+)?"
    elif names[0] == "cpu":
        pattern = "cpu"
    else:  # a GPU may be listed only once: two adapters on one GPU would evict each other's models
        pattern = r"cuda:(0|[1-9]\d*)" if len(set(names)) == len(names) else ""
    if len(names) > MAX_DEVICES or not all(re.fullmatch(pattern, name) for name in names):
        raise ValueError
    return ",".join(names)


def _list_of(text: str) -> tuple[str, ...]:
    values = tuple(part.strip() for part in text.split(",") if part.strip())
    if not values:
        raise ValueError
    return values


def _checked_list(check: Parse) -> Parse:
    """Return the parser of a list whose values `check` accepts. The values are returned unchanged."""

    def parse(text: str) -> tuple[str, ...]:
        values = _list_of(text)
        for value in values:
            check(value)
        return values

    return parse


# an origin as browsers send it: scheme, host, and perhaps a port
_ORIGIN = re.compile(r"https?://([a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:]+\])(:\d{1,5})?")
_HOST = r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*(:\d{1,5})?|\[[0-9a-f:.]+\](:\d{1,5})?"


def _secret(text: str) -> Secret:
    return Secret(_text(text))


def password(text: str) -> Secret:
    """Return a password unchanged, with any spaces at its beginning or end."""
    return Secret(text)


def _secrets(text: str) -> tuple[Secret, ...]:
    return tuple(Secret(part) for part in _list_of(text))


def _url(*schemes: str) -> Kind:
    def parse(text: str) -> str:
        for part in text.split(","):
            pieces = urlsplit(part.strip())
            if pieces.scheme not in schemes or not pieces.netloc:
                raise ValueError
            _ = pieces.port  # reading the port raises ValueError if it is out of range
        return text

    return "a URL of the form " + " or ".join(f"{scheme}://..." for scheme in schemes), parse


def _worker(url: str) -> None:
    _, check = _url("http", "https", "ws", "wss")
    check(url if "//" in url else f"http://{url}")


@dataclass(frozen=True)
class StoreUrl:
    """Parsed address of an object store. `path`: the prefix in `bucket`, or for scheme `file` an absolute path."""

    scheme: Literal["s3", "gs", "file"]
    bucket: str
    path: str


def store_url(text: str) -> StoreUrl:
    """Parse `s3://bucket/prefix`, `gs://bucket/prefix`, `file:///path` or a path. Raises ValueError."""
    pieces = urlsplit(text)
    if not pieces.scheme and text.strip():
        return StoreUrl("file", "", os.path.abspath(_path(text)))
    if pieces.query or pieces.fragment:
        raise ValueError("the URL must have neither a query nor a fragment")
    if pieces.scheme == "file" and pieces.netloc in ("", "localhost") and pieces.path.strip("/"):
        return StoreUrl("file", "", os.path.abspath(unquote(pieces.path)))
    if pieces.scheme in ("s3", "gs") and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", pieces.netloc):
        return StoreUrl("s3" if pieces.scheme == "s3" else "gs", pieces.netloc, unquote(pieces.path).strip("/"))
    raise ValueError


def _store(*, file_urls: bool = True, paths: bool = True) -> Parse:
    def parse(text: str) -> str:
        if store_url(text).scheme == "file" and not (file_urls if text.startswith("file:") else paths):
            raise ValueError
        return text

    return parse


def _socket_path(text: str) -> str:
    if not text.startswith("/") or len(text.encode()) > 100:
        raise ValueError
    return text


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    allowed = ("embed", "embed_sparse", "embed_all", "rerank", "predict", "transcribe")
    pairs = []
    for part in _list_of(text):
        operation, equals, model = part.partition("=")
        if not equals or operation not in allowed or not model:
            raise ValueError
        pairs.append((operation, model))
    return tuple(pairs)


def _text(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _path(text: str) -> str:
    if os.path.expanduser(_text(text)).startswith("~"):
        raise ValueError("there is no such user")
    return text


def _collector(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9._-]+:\d{1,5}", text) else str(HTTP[1](text))


BOOL = ("true or false", _boolean)
TEXT = ("some text", _text)
LIST = ("a comma-separated list", _list_of)
SECRET = ("a secret", _secret)
SECRETS = ("a comma-separated list of secrets", _secrets)
PASSWORD = ("a password", password)
PATH = ("a path", _path)
PORT = whole(0, 65535)
HTTP = _url("http", "https")
WORKERS = "a comma-separated list of http://..., https://..., ws://..., wss://... or host:port", _checked_list(_worker)
COLLECTOR = "a URL of the form http://... or https://..., or host:port", _collector
PROTOCOL = choice("grpc", "http/protobuf")
LABEL = pattern("a label of letters, digits, ., _ and -", r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}|_default", lower=True)
DEVICE = (
    f"auto, all, cuda, cuda:N, mps or cpu, or a comma-separated list of at most {MAX_DEVICES}: cuda:N with different N, or only cpu",
    _devices,
)
STORE = "s3://bucket/prefix, gs://bucket/prefix or a path", _store(file_urls=False)
CLUSTER_STORE = "s3://bucket/prefix or gs://bucket/prefix", _store(file_urls=False, paths=False)
STORES = (
    "a comma-separated list of s3://bucket/prefix, gs://bucket/prefix, file:///path or paths",
    _checked_list(store_url),
)
PAYLOAD_STORE = "s3://bucket/prefix, gs://bucket/prefix, file:///path or a path", _store()
POOL = "1 to 63 letters, digits, _ or -", pool_name
NATS = _url("nats", "tls")


def _origins(text: str) -> tuple[str, ...]:
    origins = tuple(origin.strip() for origin in text.split(","))
    if any(not _ORIGIN.fullmatch(origin) for origin in origins):
        raise ValueError
    return origins


ORIGINS = (
    "a comma-separated list of origins, each http:// or https://, a host in lower case and a port if it has one",
    _origins,
)
HOSTS = "a comma-separated list of host names, *.suffixes or *", _checked_list(pattern("", _HOST, lower=True)[1])
SOCKET = "an absolute path of at most 100 bytes", _socket_path
DEFAULT_MODELS = (
    "a list of operation=model with operation embed, embed_sparse, embed_all, rerank, predict or transcribe",
    _pairs,
)
SECRETIVE = frozenset({_secret, _secrets, password})  # parsers of secret values, which are never shown
