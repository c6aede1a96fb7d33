"""Kinds of personal data with a fixed form: card numbers, IBANs, e-mail and IP addresses, phone numbers.

A regular expression finds candidates. A check then accepts or rejects a candidate: it computes check digits, or parses
the IP address. E-mail addresses have no check. The library phonenumbers finds phone numbers that are in an assigned
range. Every repetition in an expression has a limit, so that the time for a text is proportional to its length.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

Range = tuple[int, int]  # start and end of a piece of personal data (a value), in code points
# gets a candidate (text that matches the regular expression of a kind), and returns how many of its first characters
# are the value; 0 if the candidate is not a value of this kind
Check = Callable[[str], int]
# returns the ranges of a kind in a text; the second argument is the region in which national phone numbers are valid
Finder = Callable[[str, str], Iterator[Range]]

# one or two separators between groups of digits or letters of a value: spaces of all widths, line breaks, hyphens,
# dots, slashes. Two separators are allowed because the text of a PDF file may have doubled spaces
_JOINT = r"[\s\u200b\u2060./\-\u2010-\u2013]{1,2}"
_CARD_GROUPS = ((4, 4, 4, 4), (4, 4, 4, 4, 3), (4, 6, 5), (4, 6, 4))
_CARDS = (r"\d{13,19}", *(_JOINT.join(rf"\d{{{size}}}" for size in groups) for groups in _CARD_GROUPS))
_IBAN = rf"[A-Za-z]{{2}}[0-9]{{2}}(?:(?:{_JOINT})?[A-Za-z0-9]){{11,30}}"
# \u0300-\u036f: combining marks, which \w does not match
_EMAIL = (
    r"[\w.!#$%&'*+/=?^`{|}~\u0300-\u036f-]{1,64}+[@\uff20]"
    r"[\w\u0300-\u036f-]{1,63}+(?:\.[\w\u0300-\u036f-]{1,63}+){1,8}"
)
_IPV4 = r"(?<!\d)(?<!\d\.)(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?!\.?\d)"
# An address may follow a word and a colon, as in IP:2001:db8::1. A match must not begin inside a longer address.
_IPV6 = (
    r"(?<!\w)(?<!\w\.)(?<![0-9A-Fa-f]:)(?<!::)(?:\w{1,64}:)??"
    r"([0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?:\.[0-9]{1,3}){0,3}(?!\w))"
)
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


def _address(candidate: str) -> int:
    """Return the length of the IP address; 0 if the candidate is not an IP address, or is the IPv6 address `::`. A
    single colon at the end of the candidate is punctuation, not a part of the address.
    """
    end = len(candidate) - (candidate.endswith(":") and not candidate.endswith("::"))
    try:
        address = ipaddress.ip_address(candidate[:end])
    except ValueError:
        return 0
    return end if int(address) or "." in candidate else 0


def _checked(expression: str, check: Check) -> Finder:
    pattern = re.compile(expression)

    def ranges(text: str, region: str) -> Iterator[Range]:
        for match in pattern.finditer(text):
            start = match.start(1)
            if size := check(match[1]):
                yield start, start + size

    return ranges


def _phone_numbers(text: str, region: str) -> Iterator[Range]:
    """Yield the ranges of valid phone numbers: international numbers, and national numbers of the region."""
    import phonenumbers  # imported here, because its tables need 4 MB and only some processes redact texts

    matches = phonenumbers.PhoneNumberMatcher(
        text, region or None, leniency=phonenumbers.Leniency.VALID, max_tries=len(text) + 1
    )
    for match in matches:
        yield match.start, match.end


KINDS: Mapping[str, tuple[Finder, ...]] = MappingProxyType(
    {
        # candidates are in a look-ahead, so that they may overlap: a valid number may begin inside an invalid candidate
        "card_number": tuple(_checked(rf"(?<!\d)(?=({card})(?!\d))", _card) for card in _CARDS),
        "iban": (_checked(rf"(?<![A-Za-z0-9])(?=({_IBAN}))", _iban),),
        "email": (_checked(f"({_EMAIL})", len),),
        "ip_address": (_checked(f"({_IPV4})", _address), _checked(_IPV6, _address)),
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


def ranges_of(text: str, pattern: str, region: str) -> Iterator[Range]:
    """Yield the ranges of all values in `text` of the kind `pattern`, a key of KINDS. The ranges may overlap."""
    for finder in KINDS[pattern]:
        yield from finder(text, region)
