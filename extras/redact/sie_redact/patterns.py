"""Kinds of personal data with a fixed form: card numbers, IBANs, e-mail and IP addresses, phone numbers.

A regular expression finds candidates. A check then accepts or rejects a candidate: it computes check digits, or the
octets of the IP address. E-mail addresses have no check. The library phonenumbers finds phone numbers that are in an
assigned range. The patterns search a text and its normalised copy (`normalise`); they are written for the characters of
the copy. Every repetition in an expression has a limit, so that the time for a text is proportional to its length. A
text is searched in pieces of WINDOW characters, so that the search can end between them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from sie_redact.normalise import copies_of

if TYPE_CHECKING:
    from phonenumbers import PhoneMetadata, PhoneNumberDesc, PhoneNumberMatcher

Range = tuple[int, int]  # start and end of a piece of personal data (a value), in code points
# gets a candidate (text that matches the regular expression of a kind), and returns how many of its first characters
# are the value; 0 if the candidate is not a value of this kind
Check = Callable[[str], int]
Proceed = Callable[[], None]  # is called often during a search, and ends it with an exception
# returns the ranges of a kind in a text; the second argument is the region in which national phone numbers are valid
Finder = Callable[[str, str, Proceed], Iterator[Range]]

WINDOW = 1 << 14  # code points that are searched between two calls of `proceed`
# A lookup in the tables of phonenumbers takes time for about LOOKUP_COST characters and those of the candidate. All
# lookups of a window have at most FREE_COST, and COST_PER_CHARACTER for each character. Tables of short numbers in
# groups, where each group is looked up, cost half as much.
LOOKUP_COST, FREE_COST, COST_PER_CHARACTER = 16, 4096, 6

# one to three separators between groups of digits or letters of a value: spaces, line breaks, hyphens, dashes, dots,
# slashes, underscores. Several are allowed because the text of a PDF file may have doubled spaces
_JOINT = r"[\s./_\-\u2013]{1,3}"
_CARD_GROUPS = ((4, 4, 4, 4), (4, 4, 4, 4, 3), (4, 6, 5), (4, 6, 4), (8, 8))
# digits of a card number after the first one
_CARDS = (
    r"\d{12,18}",
    *(rf"\d{{{first - 1}}}" + "".join(rf"{_JOINT}\d{{{size}}}" for size in sizes) for first, *sizes in _CARD_GROUPS),
)
# Expressions of digits begin with the first digit of a value, and then look behind it: `re` searches fast for an
# expression that begins with a set of characters. The rest of the value is in a look-ahead, so that candidates may
# overlap: a valid value may begin inside an invalid candidate.
_IBAN = rf"(?<![A-Za-z0-9])(?=([A-Za-z]{{2}}[0-9]{{2}}(?:(?:{_JOINT})?[A-Za-z0-9]){{11,30}}))"
_LABEL = r"[\w\u0300-\u036f-]{1,63}+"  # \u0300-\u036f: combining marks, which \w does not match
_BREAK = r"[ \t]{0,4}\r?\n[ \t]{0,4}"
# from the at sign on. A line may break behind that sign, and behind the first dot before a lower-case letter
_HOST = re.compile(rf"@(?:{_BREAK})?{_LABEL}\.(?:\r?\n(?=[a-z]))?{_LABEL}(?:\.{_LABEL}){{0,7}}")
# up to the last character that does not belong to the local part before an at sign
_BEFORE_LOCAL = re.compile(r"(?s:.*)[^\w.!#$%&'*+/=?^`{|}~\u0300-\u036f-]")
_QUOTED = 256  # largest number of code points of a local part in quotes
_IPV4 = r"[0-9](?<!\d.)(?<!\d\..)(?=([0-9]{0,3}(?:\.[0-9]{1,4}){3})(?!\.?\d))"  # an octet may have leading zeros
# An address may follow a word and a colon, as in IP:2001:db8::1. A match must not begin inside a longer address.
_IPV6 = (
    r"(?<!\w)(?<!\w\.)(?<![0-9A-Fa-f]:)(?<!::)(?:\w{1,64}:)??"
    r"([0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?:\.[0-9]{1,3}){0,3}(?!\w))"
)
_LONGEST_HOST = 640  # at least the number of code points that _HOST matches
_LONGEST_PHONE = 600  # at least the number of code points of a candidate of phonenumbers
# up to a character that is no part of a phone number, nor of the word before an extension
_APART = re.compile(r"(?s:.*)[\n!?\"'<>|{}@*b-df-hj-mp-ru-wyzB-DF-HJ-MP-RU-WYZ]")
# Digits of a phone number: at least those of a short national number. At most those of an international prefix, a code
# of a country, a number and an extension
_LEAST_DIGITS, _MOST_DIGITS = 4, 52
_MORE_THAN_DIGITS = re.compile(r"[^\d\s().\[\]/\-\u2010-\u2015]")  # a plus sign, or signs that may begin an extension
_NUMBERS = (
    "fixed_line",
    "mobile",
    "toll_free",
    "premium_rate",
    "shared_cost",
    "personal_number",
    "voip",
    "pager",
    "uan",
    "voicemail",
)
_NO_DIGITS = re.compile(r"\D+")
_NOTHING = re.compile("(?!)")
# country code -> number of characters of an IBAN of this country
_IBAN_LENGTHS: Mapping[str, int] = {
    country: length
    for length, countries in {
        15: "NO",
        16: "BE",
        18: "DK FI FK FO GL NL SD",
        19: "MK SI",
        20: "AT BA EE KZ LT LU MN XK",
        21: "CH HR LI LV",
        22: "BG BH CR DE GB GE IE ME RS VA",
        23: "AE GI IL IQ OM SO TL",
        24: "AD CZ ES MD PK RO SA SE SK TN VG",
        25: "LY PT ST",
        26: "IS TR",
        27: "BI DJ FR GR IT MC MR SM",
        28: "AL AZ BY CY DO GT HN HU LB NI PL SV",
        29: "BR EG PS QA UA",
        30: "JO KW MU",
        31: "MT SC",
        32: "LC",
        33: "RU",
    }.items()
    for country in countries.split()
}


def is_luhn(digits: Iterable[int]) -> bool:
    """Return True if the last digit is the check digit of the digits before it (ISO/IEC 7812)."""
    total = sum(
        digit if index % 2 == 0 else sum(divmod(2 * digit, 10)) for index, digit in enumerate(reversed(list(digits)))
    )
    return total % 10 == 0


def iban_remainder(iban: str) -> int:
    """Divide an IBAN (without spaces) by 97 and return the remainder: 1 if its check digits are right (ISO 13616)."""
    return int("".join(str(int(character, 36)) for character in iban[4:] + iban[:4])) % 97


def _card(candidate: str) -> int:
    digits = [int(character) for character in candidate if character.isdecimal()]
    return len(candidate) if 2 <= digits[0] <= 6 and is_luhn(digits) else 0


def _iban(candidate: str) -> int:
    length = _IBAN_LENGTHS.get(candidate[:2].upper(), 0)
    places = [index for index, character in enumerate(candidate) if character.isalnum()]
    if not length or len(places) < length:
        return 0
    end = places[length - 1] + 1
    if candidate[end : end + 1].isalnum():
        return 0
    return end if iban_remainder("".join(candidate[index] for index in places[:length])) == 1 else 0


def _ipv4(candidate: str) -> int:
    return len(candidate) if all(int(octet) < 256 for octet in candidate.split(".")) else 0


def _ipv6(candidate: str) -> int:
    """Return the length of the IP address; 0 if the candidate is not an IP address, or is the address `::`. A single
    colon at the end of the candidate is punctuation, not a part of the address.
    """
    end = len(candidate) - (candidate.endswith(":") and not candidate.endswith("::"))
    try:
        address = ipaddress.ip_address(candidate[:end])
    except ValueError:
        return 0
    return end if int(address) or "." in candidate else 0


def _windows(text: str, proceed: Proceed) -> Iterator[Range]:
    for start in range(0, len(text), WINDOW):
        proceed()
        yield start, min(start + WINDOW, len(text))


def _checked(expression: str, check: Check, longest: int, begins: int = 0) -> Finder:
    """Return a finder of values that match an expression and pass a check. A value begins at the start of the group
    `begins`, and ends at or before the end of group 1. `longest`: largest number of code points of a match and of the
    characters that it looks at.
    """
    pattern = re.compile(expression)

    def ranges(text: str, region: str, proceed: Proceed) -> Iterator[Range]:
        place = 0
        for window_start, window_end in _windows(text, proceed):
            place = max(place, window_start)
            for match in pattern.finditer(text, place, window_end + longest):
                if match.start() >= window_end:
                    break
                start, place = match.start(begins), match.end()
                if size := check(text[start : match.end(1)]):
                    yield start, start + size

    return ranges


def _emails(text: str, region: str, proceed: Proceed) -> Iterator[Range]:
    """Yield the ranges of e-mail addresses. The host is searched first, since the local part has any length."""
    end = 0
    for window_start, window_end in _windows(text, proceed):
        for match in _HOST.finditer(text, max(end, window_start), window_end + _LONGEST_HOST):
            at = match.start()
            if at >= window_end:
                break
            if (start := _local_part(text, end, at)) < at:
                end = match.end()
                yield start, end


def _local_part(text: str, least: int, at: int) -> int:
    """Return the start of the local part that ends at `at`, or `at` if there is none."""
    if text[at - 1 : at] == '"' and at > least:
        least = max(least, at - _QUOTED)
        start = text.rfind('"', least, at - 1)
        while start > 0 and text[start - 1] == "\\":
            start = text.rfind('"', least, start)
        return at if start < 0 or "\n" in text[start:at] or start > at - 3 else start
    size = 1 << 6
    while not (before := _BEFORE_LOCAL.match(text, max(least, at - size), at)):
        if size >= at - least:
            return least
        size *= 4
    return before.end()


def _phone_numbers(text: str, region: str, proceed: Proceed) -> Iterator[Range]:
    """Yield the ranges of valid phone numbers: international numbers, and national numbers of the region. After the
    largest number of lookups in a window, all candidates in this window that have enough digits count as valid.
    """
    place = 0
    while place < len(text):
        proceed()
        end = min(place + WINDOW, len(text))
        if end < len(text) and (apart := _APART.match(text, end - _LONGEST_PHONE, end)):
            end = apart.end()
        if region or "+" in text[place:end] or "\uff0b" in text[place:end]:
            first = max(place - 1, 0)  # the library looks at the character before a number
            for match in _matcher()(text[first:end], region, proceed):
                yield first + match.start, first + match.end
        place = end


@lru_cache(maxsize=1)
def _matcher() -> Callable[[str, str, Proceed], PhoneNumberMatcher]:
    """Return the class of the matcher. It is made at the first call, because the tables of phonenumbers need 4 MB and
    only some processes redact texts.
    """
    import phonenumbers
    from phonenumbers import PhoneNumber, PhoneNumberMatch

    class BoundedMatcher(phonenumbers.PhoneNumberMatcher):
        """Matcher that looks up candidates as long as their cost allows, and only those that may be a phone number."""

        def __init__(self, text: str, region: str, proceed: Proceed) -> None:
            super().__init__(text, region or None, phonenumbers.Leniency.VALID, max_tries=len(text) + 1)
            self._proceed = proceed
            self._left = FREE_COST + len(text) * COST_PER_CHARACTER
            self._may_be_national = _national_numbers(region) if region else _NOTHING

        def _parse_and_verify(self, candidate: str, offset: int) -> PhoneNumberMatch | None:
            digits = _NO_DIGITS.sub("", candidate)
            if not digits.isascii():
                digits = "".join(str(int(digit)) for digit in digits)
            if not _LEAST_DIGITS <= len(digits) <= _MOST_DIGITS or not (
                _MORE_THAN_DIGITS.search(candidate) or self._may_be_national.match(digits)
            ):
                return None
            if self._left <= 0:
                return PhoneNumberMatch(offset, candidate, PhoneNumber())
            self._proceed()
            self._left -= LOOKUP_COST + len(candidate)
            return super()._parse_and_verify(candidate, offset)

    return BoundedMatcher


@lru_cache(maxsize=1 << 8)
def _national_numbers(region: str) -> re.Pattern[str]:
    """Return an expression that matches the digits of every number without a plus sign that is valid in a region: those
    of the regions with the same code, and others behind a prefix.
    """
    from phonenumbers import COUNTRY_CODE_TO_REGION_CODE, PhoneMetadata

    metadata = PhoneMetadata.metadata_for_region(region)
    assert metadata is not None, "the region was checked"
    assert metadata.country_code is not None
    regions = map(PhoneMetadata.metadata_for_region, COUNTRY_CODE_TO_REGION_CODE[metadata.country_code])
    numbers = "|".join(
        f"(?:{kind.national_number_pattern})"
        for numbering in regions
        if numbering
        for kind in _kinds_of_numbers(numbering)
    )
    prefix = metadata.national_prefix_for_parsing or ""
    if metadata.national_prefix_transform_rule:
        numbers = f"(?:{prefix})(?<=.)|(?:{numbers})$"  # the prefix stands for other digits, so any may follow
    else:
        numbers = f"(?:{prefix})?(?:{numbers})$"
    international = f"(?:{metadata.international_prefix})|" if metadata.international_prefix else ""
    return re.compile(f"{international}(?:{metadata.country_code})?(?:{numbers})")


def _kinds_of_numbers(metadata: PhoneMetadata) -> Iterator[PhoneNumberDesc]:
    """Yield the descriptions of all kinds of numbers of a region that count as valid."""
    for name in _NUMBERS:
        kind = getattr(metadata, name)
        if kind is not None and kind.national_number_pattern:
            yield kind


KINDS: Mapping[str, tuple[Finder, ...]] = MappingProxyType(
    {
        "card_number": tuple(_checked(rf"[2-6](?<!\d.)(?=({card})(?!\d))", _card, 32) for card in _CARDS),
        "iban": (_checked(_IBAN, _iban, 144, begins=1),),
        "email": (_emails,),
        "ip_address": (_checked(_IPV4, _ipv4, 24), _checked(_IPV6, _ipv6, 144, begins=1)),
        "phone_number": (_phone_numbers,),
    }
)
# name of a kind, as models and people write it, in lower case and with spaces -> key in KINDS
_NAMES: Mapping[str, str] = {
    name: kind
    for kind, names in {
        "card_number": "card number|credit card|credit card number|debit card number|payment card number",
        "iban": "iban|iban number|international bank account number",
        "email": "email|e mail|email address|e mail address|mail address",
        "ip_address": "ip|ip address|ipv4|ipv6|ipv4 address|ipv6 address",
        "phone_number": "phone|phone number|telephone|telephone number|mobile number|mobile phone number|fax number",
    }.items()
    for name in names.split("|")
}


def plain_name(kind: str) -> str:
    """Return a kind in lower case, with one space between its words."""
    return re.sub(r"[\W_]+", " ", kind[:1000]).strip().casefold()


def pattern_of(kind: str) -> str:
    """Return the key in KINDS for a name of a kind; an empty string if no kind in KINDS has this name."""
    return _NAMES.get(plain_name(kind), "")


def is_region(region: str) -> bool:
    """Return True if the library phonenumbers knows a region (two upper-case letters)."""
    import phonenumbers

    return region in phonenumbers.SUPPORTED_REGIONS


def ranges_of(
    text: str, patterns: Iterable[str], region: str, proceed: Proceed = lambda: None
) -> Iterator[tuple[str, int, int]]:
    """Yield the pattern, start and end of all values in `text` of the kinds `patterns`, keys of KINDS. The ranges may
    overlap, and may be equal. Raises what `proceed` raises.
    """
    copies = copies_of(text)
    for pattern in patterns:
        for copy in copies:
            for finder in KINDS[pattern]:
                for start, end in finder(copy.text, region, proceed):
                    yield pattern, *copy.range_in_text(start, end)
