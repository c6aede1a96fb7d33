"""Definition of one setting, and how its value is read and shown."""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Any, Literal

from sie_contracts.settings.values import SECRETIVE, Kind, Parse, password

Mode = Literal["queue", "standalone"]
# part of a URL before the host: the scheme, the user name and the password; a password may contain an @
_CREDENTIALS = re.compile(r"^([^/?#@]*//)?[^/?#]*@")
COMPONENTS = ("gateway", "config", "sidecar", "adapter")


class SettingError(Exception):
    """Error for a variable with an invalid value. `name`: the variable. The message never repeats a secret."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


@dataclass(frozen=True)
class SettingRow:
    """Definition of one setting. `field`: its field in `Settings`. `expected`: words after "expected" in an error."""

    field: str
    default: Any
    components: tuple[str, ...]
    expected: str
    parse: Parse
    meaning: str
    mode: Mode | None = None
    secret: bool = False
    heading: str = ""  # heading of the setting's group (key of GROUPS) in documents and in --help

    @functools.cached_property
    def name(self) -> str:
        """Return the name of the variable: SIE_ and the field, except for variables that other programs also read."""
        name = self.field.upper()
        return name if name.startswith("OTEL_") or name == "HF_HOME" else f"SIE_{name}"

    @property
    def is_standard(self) -> bool:
        """Return whether OpenTelemetry defines the variable. An operator may set such a variable for many programs
        together, so OpenTelemetry requires that each program ignores unsupported values with a warning.
        """
        return self.name.startswith("OTEL_")

    @property
    def flag(self) -> str:
        return "--" + self.name.removeprefix("SIE_").lower().replace("_", "-")

    def read(self, raw: str) -> Any:
        """Return the value of a flag or variable. An empty text means None if the default of the setting is None. With
        any other default, it is parsed like any other text. Raises SettingError.
        """
        text = raw.strip()
        if not text and self.default is None:
            return None
        if self.parse is password:
            text = raw
        try:
            if self.secret:
                text.encode()  # ValueError for a text that is not UTF-8, which `Secret.matches` could not encode
            return self.parse(text)
        except ValueError as error:
            # a URL may contain a password, and the parser's message may repeat the URL, so the message is hidden too
            hidden = self.secret or "@" in text
            got = "***" if hidden else repr(text[:100])
            detail = f" ({error})" if str(error) and not hidden else ""
            raise SettingError(self.name, f"got {got}, expected {self.expected}{detail}") from error


def row(
    default: Any, components: str, kind: Kind, meaning: str, *, mode: Mode | None = None, secret: bool = False
) -> Any:
    """Return the field of a setting. `secret`: the value is never shown, as those of the kinds in SECRETIVE."""
    expected, parse = kind
    readers = COMPONENTS if components == "all" else tuple(components.split())
    meta = SettingRow("", default, readers, expected, parse, meaning, mode, secret or parse in SECRETIVE)
    return dataclasses.field(default=default, metadata={"row": meta})


def shown(row: SettingRow, value: Any) -> str:
    """Return a value as an operator may see it: `***` for a secret, URLs without user names and passwords."""
    if value is None:
        return "(unset)"
    if row.secret:
        return "***"
    if isinstance(value, tuple):
        value = ",".join("=".join(part) if isinstance(part, tuple) else str(part) for part in value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return public_url(value) if "://" in value else value
    return f"{value:g}" if isinstance(value, float) else str(value)


def public_url(url: str) -> str:
    """Return the URLs of a comma-separated list without user names and passwords. The URLs may be invalid."""
    return ",".join(_CREDENTIALS.sub(r"\1", part.strip()) for part in url.split(","))
