"""Which route needs which scope: rows, and the table that finds a row by method and path. Every process with an API has
one.

`{name}` in a path is one part of it, `{name:path}` is the rest of it, slashes included; literal parts behind it are
matched first.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SCOPES = ("infer", "read", "metrics", "pools", "config", "admin")
OPEN = ""  # in place of a scope: for everybody, never behind a token
_USUAL_PATH = 256
_LIKE = 0.8  # how alike two paths must be
_LIKE_PARTS = 3  # how many parts of one are looked at
_LIKE_PART = 32  # and how many characters of each


class Row(NamedTuple):
    """`reader`: SIE_CONFIG_READ_TOKEN is enough. `served`: False for what the config service answers and a gateway does
    not (405).
    """

    methods: str
    path: str
    scope: str
    reader: bool = False
    served: bool = True


CONFIG_ROUTES: tuple[Row, ...] = (
    *(Row("GET", f"/v1/configs/{path}", "read") for path in ("models", "models/{id:path}", "models/{id:path}/status")),
    *(Row("GET", f"/v1/configs/{path}", "read") for path in ("bundles", "bundles/{id:path}")),
    Row("POST", "/v1/configs/resolve", "read"),
    Row("POST", "/v1/configs/models", "config", served=False),
    Row("PUT PATCH DELETE", "/v1/configs/models/{id:path}", "config", served=False),
    Row("POST", "/v1/configs/models/{id:path}/rollback", "config", served=False),
    Row("GET", "/v1/configs/models/{id:path}/history", "read", served=False),
    Row("GET", "/v1/configs/epoch", "read", reader=True, served=False),
    Row("GET", "/v1/configs/export", "config", reader=True, served=False),
)


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A path with one open part. The longest literal parts are the best match."""

    head: str
    tail: str
    is_rest: bool
    methods: dict[str, Row]

    def matches(self, path: str) -> bool:
        if (
            not path.startswith(self.head)
            or not path.endswith(self.tail)
            or len(path) <= len(self.head) + len(self.tail)
        ):
            return False
        return self.is_rest or "/" not in path[len(self.head) : len(path) - len(self.tail)]


class Table:
    """Rows by path. Raises ValueError for two rows of one method and path, and for a scope that does not exist."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._exact: dict[str, dict[str, Row]] = {}
        patterns: dict[str, dict[str, Row]] = {}
        for row in rows:
            methods = (patterns if "{" in row.path else self._exact).setdefault(row.path, {})
            for method in row.methods.split():
                if method in methods or row.scope not in (OPEN, *SCOPES):
                    raise ValueError(f"{method} {row.path}: a second row, or no such scope as {row.scope!r}")
                methods[method] = row
        self._patterns = sorted(self._compiled(patterns), key=lambda each: -len(each.head) - len(each.tail))
        served = [row.path for row in rows if row.served and row.path.count("/") < _LIKE_PARTS + 2]
        self._heads = {
            head: path.replace(":path", "") for path in reversed(served) if (head := path.partition("{")[0].strip("/"))
        }
        self._remembered = functools.lru_cache(1024)(self._look)  # a look through all patterns takes 10 us

    @staticmethod
    def _compiled(patterns: dict[str, dict[str, Row]]) -> Iterator[_Pattern]:
        for path, methods in patterns.items():
            head, _, rest = path.partition("{")
            name, _, tail = rest.partition("}")
            yield _Pattern(head, tail, name.endswith(":path"), methods)

    def methods(self, path: str) -> dict[str, Row]:
        """What is known of a path, by method. One final slash says nothing."""
        return (self._remembered if len(path) <= _USUAL_PATH else self._look)(path)

    def _look(self, path: str) -> dict[str, Row]:
        if path.endswith("/") and path != "/":
            path = path[:-1]
        found = self._exact.get(path)
        if found is None:
            found = next((pattern.methods for pattern in self._patterns if pattern.matches(path)), {})
        return found

    def near(self, path: str) -> str:
        """The served route that a path which is none may mean, as `/v1/encode/{model}`; empty if none is like it.

        Compared are the parts before a placeholder: with what a path begins with, as it is, below `/v1`, and without a
        first `/v1` of two.
        """
        parts = [part[:_LIKE_PART] for part in path.split("/", _LIKE_PARTS + 1)[1:] if part]
        begins = [parts, ["v1", *parts], parts[1:] if parts[:2] == ["v1", "v1"] else []]
        asked = {"/".join(each[:count]) for each in begins for count in range(1, _LIKE_PARTS + 1)} - {"", "v1"}
        # the right beginning, with nothing or too much behind it
        exact = next((head for head in self._heads if head in asked), None)
        like = (found for each in sorted(asked) for found in difflib.get_close_matches(each, self._heads, 1, _LIKE))
        head = exact if exact is not None else next(like, None)
        return self._heads[head] if head is not None else ""


def row_of(methods: dict[str, Row], method: str) -> Row | None:
    """The row of a method; HEAD is GET."""
    return methods.get("GET" if method == "HEAD" else method)


def bearer(authorization: str) -> str:
    """The token of an Authorization header, with or without its scheme."""
    return (authorization[7:] if authorization[:7].lower() == "bearer " else authorization).strip()
