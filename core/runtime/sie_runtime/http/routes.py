"""Table of routes: one row for each method and path, with all its properties. `Table` finds the row for a request.

    method, path ──Table──► Route ──► its scope, handler, label in metrics, body and replies (`openapi`)

`{name}` in a path matches one segment, `{name:path}` matches one or more segments. If several paths match, `Table`
prefers a path without a placeholder, then the path with the longest literal parts.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from msgspec import Struct

from sie_contracts.api.faults import Error
from sie_contracts.errors import UnsupportedMediaType

SCOPES = ("infer", "read", "metrics", "pools", "config", "admin")
OPEN = ""  # value of `Route.scope`: the route needs no token
ANY = "any"  # value of `Route.scope`: the route needs a valid token, whatever its scopes
JSON, YAML = "application/json", "application/x-yaml"
MSGPACK, RAW, ARROW = "application/msgpack", "application/octet-stream", "application/vnd.apache.arrow.stream"
FORM = "multipart/form-data"
TEXT, HTML = "text/plain", "text/html"
_UNSPECIFIC = frozenset({"", "text/plain", "application/octet-stream", "application/x-www-form-urlencoded"})
_SLASHES = re.compile("//+")
_USUAL_PATH = 256  # largest number of characters of a path whose match is cached
_LIKE = 0.8  # `Table.near` suggests a path only if its similarity, from 0 to 1, is at least this number
_LIKE_PARTS = 3  # `Table.near` compares at most this number of segments at the beginning of two paths
_LIKE_PART = 32  # `Table.near` compares at most this number of characters of each segment


class Parameter(NamedTuple):
    """Parameter of a request. `type`: a type that msgspec supports. A parameter in the path is always required."""

    name: str
    where: str  # part of the request: path, query or header
    type: Any = str
    description: str = ""
    example: Any = None
    required: bool = False


class Content(NamedTuple):
    """Body of a request or of a reply. `type`: a type that msgspec supports, or a tuple of types. `media`: its media
    types. `example`: by default the attribute `EXAMPLE` of the type.
    """

    type: Any = None
    media: tuple[str, ...] = (JSON,)
    description: str = "Success"
    example: Any = None


@dataclass(frozen=True, kw_only=True)
class Route:
    """One method of one path. `endpoint`: its name in metrics and logs. `tag`: its section in the OpenAPI document.

    `reader`: SIE_CONFIG_READ_TOKEN is also accepted. `served`: False if only the config service serves the route and a
    gateway answers with 405. `errors`: type of its error bodies; None for a probe, whose errors are in `replies`.
    `handler` has a different type in each process. `local`: whatever its scope, the route needs no token at a gateway
    that has the auth mode "none" and listens only on loopback.
    """

    method: str
    path: str
    scope: str
    summary: str = ""
    tag: str = ""
    endpoint: str = "other"
    handler: Any = None
    body: Content | None = None
    replies: Mapping[int, Content] = field(default_factory=dict)
    parameters: tuple[Parameter, ...] = ()
    errors: type[Struct] | None = Error
    reader: bool = False
    local: bool = False
    served: bool = True


R = TypeVar("R", bound=Route)


class Match(NamedTuple, Generic[R]):
    """Routes of a path, by method (empty if the path is unknown), and the value of the placeholder in the path."""

    methods: Mapping[str, R]
    parameters: Mapping[str, str]

    def route(self, method: str) -> R | None:
        """Return the route for a method; None if the path does not support it. HEAD is treated as GET."""
        return self.methods.get("GET" if method == "HEAD" else method)

    @property
    def allow(self) -> str:
        """Value of the header `Allow`: the served methods. A path with GET also has HEAD, every path has OPTIONS."""
        served = [name for name, route in self.methods.items() if route.served]
        return ", ".join([*served, *(["HEAD"] if "GET" in served else []), "OPTIONS"])


@dataclass(frozen=True, slots=True)
class _Pattern(Generic[R]):
    """Path: `head`, one placeholder, `tail`. `is_rest`: the value of the placeholder may have slashes."""

    head: str
    tail: str
    name: str
    is_rest: bool
    methods: dict[str, R]

    def match(self, path: str) -> Match[R] | None:
        if (
            not path.startswith(self.head)
            or not path.endswith(self.tail)
            or len(path) <= len(self.head) + len(self.tail)
        ):
            return None
        value = path[len(self.head) : len(path) - len(self.tail)]
        return Match(self.methods, {self.name: value}) if self.is_rest or "/" not in value else None


class Table(Generic[R]):
    """Routes by path. Raises ValueError for two routes with the same method and path, and for an unknown scope."""

    def __init__(self, routes: Sequence[R]) -> None:
        self._exact: dict[str, dict[str, R]] = {}
        patterns: dict[str, dict[str, R]] = {}
        for route in routes:
            methods = (patterns if "{" in route.path else self._exact).setdefault(route.path, {})
            if route.method in methods or route.scope not in (OPEN, ANY, *SCOPES):
                raise ValueError(
                    f"{route.method} {route.path}: the table has this route twice, or {route.scope!r} is no scope"
                )
            methods[route.method] = route
        self._patterns = sorted(self._compiled(patterns), key=lambda pattern: -len(pattern.head) - len(pattern.tail))
        served = [route.path for route in routes if route.served and route.path.count("/") < _LIKE_PARTS + 2]
        self._heads = {
            head: path.replace(":path", "") for path in reversed(served) if (head := path.partition("{")[0].strip("/"))
        }
        # cached, because a search through all patterns takes 10 us
        self._remembered = functools.lru_cache(1024)(self._search)

    @staticmethod
    def _compiled(patterns: dict[str, dict[str, R]]) -> Iterator[_Pattern[R]]:
        for path, methods in patterns.items():
            head, _, rest = path.partition("{")
            placeholder, _, tail = rest.partition("}")
            name, is_rest, _ = placeholder.partition(":path")
            yield _Pattern(head, tail, name, bool(is_rest), methods)

    def match(self, path: str) -> Match[R]:
        """Return the routes of a path, by method. One slash at its end is ignored."""
        return (self._remembered if len(path) <= _USUAL_PATH else self._search)(path)

    def _search(self, path: str) -> Match[R]:
        if path.endswith("/") and path != "/":
            path = path[:-1]
        if (methods := self._exact.get(path)) is not None:
            return Match(methods, {})
        return next((match for pattern in self._patterns if (match := pattern.match(path)) is not None), Match({}, {}))

    def near(self, path: str) -> str:
        """Return the path of a served route that is similar to an unknown path, for example `/v1/encode/{model}`; empty
        if none is similar.

        Only routes of at most four segments are compared, and only their parts before the placeholder. Three forms of
        the path are tried: unchanged, with `/v1` in front, and, if it begins with `/v1/v1`, with one `/v1` removed.
        """
        parts = [part[:_LIKE_PART] for part in path.split("/", _LIKE_PARTS + 1)[1:] if part]
        begins = [parts, ["v1", *parts], parts[1:] if parts[:2] == ["v1", "v1"] else []]
        starts = {"/".join(parts[:count]) for parts in begins for count in range(1, _LIKE_PARTS + 1)} - {"", "v1"}
        # prefer a route with the same beginning; look for similar beginnings only if there is no such route
        exact = next((head for head in self._heads if head in starts), None)
        like = (head for start in sorted(starts) for head in difflib.get_close_matches(start, self._heads, 1, _LIKE))
        head = exact if exact is not None else next(like, None)
        return self._heads[head] if head is not None else ""


def plain_path(path: str, raw_path: bytes = b"") -> str:
    """Return the path of a request with single slashes, and without a slash at its end. Authorisation and handlers both
    use this path. A path with an escaped slash (in `raw_path`) is not changed, because that slash is part of a name.
    """
    if b"%2f" in raw_path.lower():
        return path
    if "//" in path:
        path = _SLASHES.sub("/", path)
    return path[:-1] if len(path) > 1 and path.endswith("/") else path


def bearer(authorization: str) -> str:
    """Return the token of an Authorization header. The scheme `Bearer` in front of the token is optional."""
    return (authorization[7:] if authorization[:7].lower() == "bearer " else authorization).strip()


def check_type(headers: Mapping[str, str], media: Sequence[str]) -> None:
    """Raise UnsupportedMediaType if Content-Type names a format that is not in `media`.

    The types in _UNSPECIFIC are accepted too, because clients send them by default: curl sends the type of forms with
    every body.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in _UNSPECIFIC or kind in media:
        return
    formats = {name.rpartition("/")[2].removeprefix("x-") for name in media}
    # the format without its prefix: msgpack in application/x-msgpack, json in application/vnd.api+json
    if kind.rpartition("/")[2].rpartition("+")[2].removeprefix("x-").removeprefix("vnd.") not in formats:
        raise UnsupportedMediaType(
            f"Content-Type: expected {' or '.join(media)}", reason="content_type", param="Content-Type"
        )
