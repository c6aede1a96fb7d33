"""One row of the table of settings, and how its values are read and shown."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from sie_contracts.settings.values import SECRETIVE, Kind, Parse, password

Mode = Literal["queue", "standalone"]
COMPONENTS = ("gateway", "config", "sidecar", "adapter")


class SettingError(Exception):
    """A variable holds what it must not. `name` is the variable; the message never repeats a secret."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


@dataclass(frozen=True)
class SettingRow:
    """Definition of one setting. `expected` completes "expected ..."; `waits_for` names the capability that will read
    it.
    """

    name: str
    field: str
    default: Any
    components: tuple[str, ...]
    expected: str
    parse: Parse
    meaning: str
    mode: Mode | None = None
    secret: bool = False
    waits_for: str = ""
    heading: str = ""  # under which documents and --help show it

    @property
    def is_standard(self) -> bool:
        """Whether OpenTelemetry defines the variable: a value of it that means nothing here is ignored with a warning,
        as its specification says, since what sets it for many programs does not know this one.
        """
        return self.name.startswith("OTEL_")

    @property
    def flag(self) -> str:
        return "--" + self.name.removeprefix("SIE_").lower().replace("_", "-")

    def read(self, raw: str) -> Any:
        """The value of a flag or variable. Empty means unset where unset is the default, and is an error elsewhere."""
        text = raw.strip()
        if not text and self.default is None:
            return None
        if self.parse is password:
            text = raw
        try:
            return self.parse(text)
        except ValueError as error:
            hidden = self.secret or "@" in text  # a URL may hold a password, and the parser's own message a part of it
            got = "***" if hidden else repr(text[:100])
            detail = f" ({error})" if str(error) and not hidden else ""
            raise SettingError(self.name, f"got {got}, expected {self.expected}{detail}") from error


def row(
    default: Any,
    name: str,
    components: str,
    kind: Kind,
    meaning: str,
    *,
    mode: Mode | None = None,
    waits_for: str = "",
) -> Any:
    expected, parse = kind
    readers = COMPONENTS if components == "all" else tuple(components.split())
    meta = SettingRow(name, "", default, readers, expected, parse, meaning, mode, parse in SECRETIVE, waits_for)
    return dataclasses.field(default=default, metadata={"row": meta})


def shown(row: SettingRow, value: Any) -> str:
    """A value as operators may see it: secrets as stars, URLs without credentials."""
    if value is None:
        return "(unset)"
    if row.secret:
        return "***"
    if isinstance(value, tuple):
        return ",".join("=".join(part) if isinstance(part, tuple) else str(part) for part in value)
    if isinstance(value, bool):
        return str(value).lower()
    if row.name.endswith(("_URL", "_ENDPOINT")):
        return public_url(str(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def public_url(url: str) -> str:
    """The URLs of a comma-separated list without user names and passwords."""
    shown_urls = []
    for part in url.split(","):
        pieces = urlsplit(part.strip())
        host = pieces.netloc.rpartition("@")[2]
        shown_urls.append(urlunsplit(pieces._replace(netloc=host)))
    return ",".join(shown_urls)
