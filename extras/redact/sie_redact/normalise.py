"""Copy of a text as people see it, for the patterns: `4111\\u00ad1111` and `4111\\u20141111` are parts of card
numbers.

What the copy leaves out or replaces:

* left out: format characters (soft hyphens, joiners, marks of direction), variation selectors, enclosing marks, control
  characters
* decimal digits of all scripts, and compatibility forms of single ASCII characters: the ASCII characters. Superscripts,
  subscripts, and characters in circles or squares stay: they are marks of notes and lists beside a value
* dashes: a hyphen, and an en dash for those that are wider than a hyphen; a row of underscores between digits: hyphens
* spaces: a space; other line ends: a line feed
* full stops of East Asia between ASCII letters or digits: `.`
* references of HTML, and the bytes `%20`, `%2B` and `%40` of URLs: the characters that they mean

A character of the copy has one character or one reference of the text, so a place in the copy has a place in the text.
"""

from __future__ import annotations

import html
import re
import unicodedata
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache

_LEFT_OUT = "\0"  # stands for a character that the copy leaves out
# Characters without a form of their own that are in other categories than format characters: the combining grapheme
# joiner, fillers, variation selectors
_INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
_STAY = (
    "<super>",
    "<sub>",
    "<circle>",
    "<square>",
    "<fraction>",
)  # compatibility forms that look like other characters
_HYPHEN, _DASH, _STOP = "-", "\u2013", "\u3002"
_WIDE_DASHES = "\u2012\u2013\u2014\u2015\u2e3a\u2e3b\u301c\u3030\ufe31\ufe32\ufe58"
_WIDE_STOPS = "\u3002\uff0e\uff61"
# begins with a set of characters, for which `re` searches fast
_CHANGED = re.compile(
    r"[\x00-\x08\x0e-\x1b\x7f&%]"
    r"(?:(?<=&)(?:\#[0-9]{1,7}|\#[xX][0-9A-Fa-f]{1,6}|[A-Za-z]{2,16});"
    r"|(?<=%)(?:20|2[Bb]|40)"
    r"|(?<![&%])[\x00-\x08\x0e-\x1b\x7f]*)"
)
_UNDERSCORES = re.compile(r"(?<=[0-9])_{1,8}(?=[0-9])")
_STOP_IN_WORD = re.compile(f"(?<=[0-9A-Za-z]){_STOP}(?=[0-9A-Za-z])")


@dataclass(frozen=True, slots=True)
class Copy:
    """Text, or its normalised copy. The copy consists of runs. `starts`: place of each run in the copy. `places`: place
    of its first character in the text. `ends`: as `places`, but of the last code point of the text that the first
    character of the run stands for. In a run, places in the copy and in the text grow alike.
    """

    text: str
    starts: tuple[int, ...] = (0,)
    places: tuple[int, ...] = (0,)
    ends: tuple[int, ...] = (0,)

    def range_in_text(self, start: int, end: int) -> tuple[int, int]:
        """Return the range in the text of the characters `start` to `end` - 1 of the copy, at least one character."""
        first, last = (bisect_right(self.starts, place) - 1 for place in (start, end - 1))
        return self.places[first] + start - self.starts[first], self.ends[last] + end - self.starts[last]


def copies_of(text: str) -> list[Copy]:
    """Return the text, and its normalised copy if that differs. Both are searched: in the copy, a value may have merged
    with its neighbour, if an invisible character was between them.
    """
    normalised = text
    if not text.isascii():
        table = {ord(character): form for character in set(text) if (form := _form(character)) != character}
        normalised = text.translate(table) if table else text
    copy = _without_gaps(normalised)
    normalised = copy.text
    if "_" in normalised:
        normalised = _UNDERSCORES.sub(lambda match: _HYPHEN * len(match[0]), normalised)
    if _STOP in normalised:
        normalised = _STOP_IN_WORD.sub(".", normalised)
    return [Copy(text)] if normalised == text else [Copy(text), replace(copy, text=normalised)]


def _without_gaps(text: str) -> Copy:
    """Return a copy in which characters are left out and references replaced."""
    pieces: list[str] = []
    runs: list[tuple[int, int, int]] = [(0, 0, 0)]
    length = place = 0
    for match in _CHANGED.finditer(text):
        start, end = match.span()
        character = _character_of(match[0])
        if character == match[0]:
            continue
        pieces += (text[place:start], character)
        length += start - place
        if character:
            runs.append((length, start, end - 1))
            length += 1
        runs.append((length, end, end))
        place = end
    if not pieces:
        return Copy(text)
    starts, places, ends = zip(*runs, strict=True)
    return Copy("".join([*pieces, text[place:]]), starts, places, ends)


def _character_of(written: str) -> str:
    """Return the character for control characters or for a reference: an empty string if it is left out, `written` if
    it is no reference to a single character.
    """
    if written[0] == "%":
        return chr(int(written[1:], 16))
    if written[0] != "&":
        return ""
    character = html.unescape(written)
    return _form(character).replace(_LEFT_OUT, "") if len(character) == 1 else written


@lru_cache(maxsize=1 << 12)
def _form(character: str) -> str:
    """Return the character of the copy for a character of the text; _LEFT_OUT if the copy has none."""
    category = unicodedata.category(character)
    if category in ("Cf", "Me") or _INVISIBLE.match(character):
        return _LEFT_OUT
    if category == "Cc":
        return "\n" if character == "\x85" else character if character.isspace() else _LEFT_OUT
    if category in ("Zl", "Zp"):
        return "\n"
    if category == "Zs":
        return " "
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if category == "Pd" or character == "\u2212":  # the minus sign
        return _DASH if character in _WIDE_DASHES else _HYPHEN
    if character in _WIDE_STOPS:
        return _STOP
    if unicodedata.decomposition(character).startswith(_STAY):
        return character
    folded = unicodedata.normalize("NFKC", character)
    return folded if len(folded) == 1 and folded.isascii() else character
