"""Replacements for personal data in the styles `mask`, `hash`, `tag` and `synthetic`, and redacted texts with a list of
their replacements.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from sie_contracts.api.inference import RedactionStyle
from sie_redact.patterns import iban_remainder, is_luhn, pattern_of, plain_name
from sie_redact.spans import SensitiveSpan

MASK = "*****"  # the same for every value, so that the mask does not show the length of the value
HASH_DIGITS = 16  # number of hexadecimal digits of a hash in a replacement
_NAME_CHARACTERS = 64
_FIRST_NAMES = (
    "Alex",
    "Blake",
    "Casey",
    "Drew",
    "Ellis",
    "Frankie",
    "Gray",
    "Harper",
    "Indigo",
    "Jordan",
    "Kim",
    "Lee",
)
_NETS = ("192.0.2", "198.51.100", "203.0.113")  # networks that are reserved for documentation (RFC 5737)
_HOSTS = 254  # number of addresses that are used in each of the networks of _NETS
_StandIn = Callable[[str, int], str]  # (original value, its serial number) -> made-up value


class ReplacedValue(NamedTuple):
    """Replacement of a span. `start` and `end`: position of the replacement in the redacted text, in code points.
    `value`: the original text of the span.
    """

    start: int
    end: int
    replacement: str
    value: str


class Replacer:
    """Replacements for the values of one text. Equal values of a kind get the same replacement. Different values get
    different replacements, except in the style `mask`: there, all values get the replacement MASK.
    """

    def __init__(self, style: RedactionStyle, key: bytes = b"") -> None:
        self._style = style
        self._key = key
        self._numbers: dict[str | _StandIn, dict[str, int]] = {}

    def replacement(self, kind: str, value: str) -> str:
        if self._style == "mask":
            return MASK
        name = re.sub(r"\W", "_", plain_name(kind)[:_NAME_CHARACTERS]).upper()
        if self._style == "hash":
            digest = hmac.digest(self._key, f"{name}\0{value}".encode(), hashlib.sha256)
            return f"[{name}_{digest.hex()[:HASH_DIGITS]}]"
        write = _stand_in_of(kind) if self._style == "synthetic" else None
        # kinds with the same `write` share the numbers, so that two values never get the same made-up value
        numbers = self._numbers.setdefault(write or name, {})
        number = numbers.setdefault(value, len(numbers) + 1)
        if write is not None:
            return write(value, number)
        return f"[{name}_{number}]" if self._style == "tag" else f"Example {plain_name(kind)} {number}"


def redacted(text: str, spans: Sequence[SensitiveSpan], replacer: Replacer) -> tuple[str, list[ReplacedValue]]:
    """Return the text with its spans replaced, and the replacements. `spans` are in order and do not overlap."""
    pieces: list[str] = []
    parts: list[ReplacedValue] = []
    end = length = 0
    for span in spans:
        value = text[span.start : span.end]
        replacement = replacer.replacement(span.kind, value)
        start = length + span.start - end
        pieces += [text[end : span.start], replacement]
        end, length = span.end, start + len(replacement)
        parts.append(ReplacedValue(start, length, replacement, value))
    return "".join([*pieces, text[end:]]), parts


# The functions below return made-up values, which are valid but assigned to nobody. `number`: serial number of the
# original value, from 1, among the values that the function replaces.


def _email(value: str, number: int) -> str:
    return f"person{number}@example.com"


def _phone_number(value: str, number: int) -> str:
    extension = f" ext. {number // 1000}" if number >= 1000 else ""
    # numbers for use in films, which the British regulator (Ofcom) assigns to nobody
    return f"+44 7700 900{number % 1000:03}{extension}"


def _card_number(value: str, number: int) -> str:
    digits = f"9999{number:011}"  # no issuer has a number that begins with 9999
    check = next(check for check in "0123456789" if is_luhn(map(int, digits + check)))
    return " ".join(re.findall("....", digits + check))


def _iban(value: str, number: int) -> str:
    account = f"{number:018}"
    return f"XX{98 - iban_remainder(f'XX00{account}'):02}{account}"  # the country code XX is not assigned


def _ip_address(value: str, number: int) -> str:
    net, host = divmod(number - 1, _HOSTS)
    return f"2001:db8::{number:x}" if ":" in value or net >= len(_NETS) else f"{_NETS[net]}.{host + 1}"


def _person(value: str, number: int) -> str:
    again, index = divmod(number - 1, len(_FIRST_NAMES))
    return f"{_FIRST_NAMES[index]} Example" + (f" {again + 1}" if again else "")


def _date(value: str, number: int) -> str:
    return (datetime.date(1900, 1, 1) + datetime.timedelta(days=number)).isoformat()


_STAND_INS: Mapping[str, _StandIn] = {
    "email": _email,
    "phone_number": _phone_number,
    "card_number": _card_number,
    "iban": _iban,
    "ip_address": _ip_address,
    **dict.fromkeys(("person", "name", "full name", "person name", "private person", "per"), _person),
    **dict.fromkeys(("date", "date of birth", "private date", "birthday"), _date),
}


def _stand_in_of(kind: str) -> _StandIn | None:
    return _STAND_INS.get(pattern_of(kind) or plain_name(kind))
