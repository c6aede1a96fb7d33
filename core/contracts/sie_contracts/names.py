"""Parts of error messages: ids that are similar to a misspelled name, and plain words for the names of types."""

from __future__ import annotations

import difflib
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import accumulate

# A name is compared with all ids if there are at most ALL_COMPARED ids. If there are more, it is compared only with the
# MAX_COMPARED most promising ids, because one comparison takes up to 0.1 ms.
MAX_COMPARED = 20
ALL_COMPARED = 150
# The most promising ids share the most pieces of three letters with the name. The search looks up rare pieces first. It
# stops if the next piece would raise the total number of places in the ids that it finds above this number.
_MAX_PLACES = 2000
_PIECE = 3  # number of letters of a piece
# from this number of letters on, only some pieces of a name are looked up, because each look-up reads all ids
_LONG = 20
_LONGEST = 256  # number of letters that are compared; the rest of a longer name is ignored
# lowest similarity of a suggestion of `did_you_mean` (1: equal); one or two letters may be wrong, missing or exchanged
_LIKE = 0.7


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return "; did you mean `x`?" with the most similar candidate, to end an error message; "" if none is similar."""
    like = difflib.get_close_matches(name.casefold()[:_LONGEST], sorted(candidates), 1, _LIKE)
    return f"; did you mean `{like[0]}`?" if like else ""


_TYPES = {
    "str": ("a string",),
    "int": ("a whole number",),
    "float": ("a number",),
    "bool": ("true", "false"),
    "array": ("a list",),
    "object": ("a map",),
}
_EXPECTED = re.compile(r"Expected `([^`]+)`(?:, got `([^`]+)`)?")


def located(message: str) -> tuple[str, str]:
    """Split a message of msgspec, such as "Expected `str`, got `int` - at `$.id`", into the path of the field and the
    fault in words, such as "expected a string, got a whole number". The path is `$` if the message names no field.
    """
    in_words = _EXPECTED.sub(
        lambda match: f"expected {_kinds(match[1])}" + (f", got {_kinds(match[2])}" if match[2] else ""), message
    )
    text, at, where = in_words.rpartition(" - at ")
    if not at:
        return "$", where
    field = where.removeprefix("`key` in ")  # the fault is in a key of the map at this path
    return field.strip("`"), text if field == where else f"keys: {text}"


def _kinds(types: str) -> str:
    *first, last = (word for type_name in types.split(" | ") for word in _TYPES.get(type_name, (type_name,)))
    return f"{', '.join(first)} or {last}" if first else last


class NameIndex:
    """Index of ids for the search by similar names. The first search builds the tables of the index."""

    def __init__(self, ids: Iterable[str]) -> None:
        self._ids = ids

    @cached_property
    def _folded(self) -> dict[str, list[str]]:
        ids: dict[str, list[str]] = {}
        for name in self._ids:
            ids.setdefault(name.casefold(), []).append(name)
        return ids

    @cached_property
    def _lines(self) -> tuple[str, list[str], list[int]]:
        """Return (case-folded ids joined by line breaks, list of these ids, offset of each id in the text)."""
        lines = list(self._folded)
        return "\n".join(lines), lines, [0, *accumulate(len(line) + 1 for line in lines)]

    def same(self, name: str) -> str | None:
        """Return the id that equals `name` when case is ignored; None if there is no such id, or more than one."""
        ids = self._folded.get(name.casefold(), ())
        return ids[0] if len(ids) == 1 else None

    def near(self, name: str, count: int = 3, keep: Callable[[str], bool] = lambda _: True) -> list[str]:
        """Return at most `count` ids that are most similar to `name`, best first. Ids for which `keep` returns False
        are left out. `name` may be an id without its organisation, or a part of an id.
        """
        folded = name.casefold()[:_LONGEST]
        able = [line for line in self._alike(folded) if keep(self._folded[line][-1])]
        tails = {line.rpartition("/")[2]: line for line in able}
        hits = difflib.get_close_matches(folded, able, count, 0.5)
        hits += [tails[tail] for tail in difflib.get_close_matches(folded.rpartition("/")[2], list(tails), count, 0.6)]
        if len(folded) >= _PIECE:  # shorter names would be part of too many ids
            hits += sorted((line for line in able if folded in line), key=len)
        return [self._folded[hit][-1] for hit in dict.fromkeys(hits)][:count]

    def _alike(self, folded: str) -> list[str]:
        """Return the case-folded ids to compare with a name: all, or those that share the most pieces with it."""
        text, lines, starts = self._lines
        if len(lines) <= ALL_COMPARED:
            return lines
        # the search for a piece reads the text of all ids, so only some of the pieces of a long name are used
        step = 1 + len(folded) // _LONG
        pieces = {folded[at : at + _PIECE] for at in range(0, max(1, len(folded) - _PIECE + 1), step)}
        counts = sorted((places, piece) for piece in pieces if piece.strip() and (places := text.count(piece)))
        shared: Counter[int] = Counter()
        left = _MAX_PLACES
        for places, piece in counts:
            if places > left and shared:
                break
            left -= places
            position = -1
            met: set[int] = set()
            while len(met) < _MAX_PLACES and (position := text.find(piece, position + 1)) >= 0:
                met.add(bisect_right(starts, position) - 1)
            shared.update(met)
        return [lines[number] for number, _ in shared.most_common(MAX_COMPARED)]
