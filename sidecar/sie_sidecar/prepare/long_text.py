"""Tokenising of very long texts in pieces. Reading begins at the side of the text that is kept (the start, or the end
if the start is truncated), and stops when there are enough tokens.

    text ──► pieces, cut only where a cut does not change the ids ──► ids of each piece ──► joined ids

The joined ids are equal to the ids of the whole text. A text is cut only at positions that match a pattern. By default
these positions are before a space that follows a letter, a digit or punctuation; some tokenizers allow more positions,
and some fewer. A cut at such a position does not change the ids, because of these properties of the steps of a
tokenizer:

- Added tokens: matches are leftmost and do not overlap, so only a match across the cut could change the ids. If an
  added token, with the white space of its `rstrip`, could match across such a position, a narrower pattern is used, or
  texts are not cut.
- Normalizers: white space does not combine with characters before it, and begins a grapheme. So the forms of Unicode
  (NFC, NFD, NFKC, NFKD), Precompiled charsmaps (which work by grapheme) and maps of single characters never depend on
  text across the cut. Characters that form a grapheme with the next character (prepended marks) never precede a cut.
- Pre-tokenizers: each known pre-tokenizer begins a new word at the cut, and never depends on text after the cut. If a
  tokenizer has none (Llama 2, Gemma), BPE sees the text as one word. Its merges still do not cross the cut, because no
  token of the vocabulary has a space after another character.
- The first word of a text is treated in a special way (a space is put before it). So each piece but the first is
  tokenised after the one-word text SENTINEL, whose tokens are dropped. If a tokenizer treats the text after each added
  token in this way, its texts are not cut after an added token.

Every tokenizer is tested with difficult texts first. If the test fails, texts for this tokenizer are never cut.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from sie_contracts.errors import InvalidInput

# number of characters in the first piece for each needed token. English has 4 to 5 characters for each token, so one
# piece is nearly always enough
FIRST_CHARACTERS_PER_TOKEN = 8
GROWTH = 4
# Later pieces of a text grow up to this number of characters. The limit saves memory: the tokenizer needs about 100
# bytes for a token. A piece is longer if no earlier cut is allowed, and the first piece if the caller needs many ids.
MAX_PIECE_CHARACTERS = 1 << 18
# maximum number of characters that are tokenised in one call, to limit memory: a token needs up to 500 bytes
MAX_CALL_CHARACTERS = 4 << 20

SENTINEL = "x"
_CLAUSE_MARKS = "\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"
# characters that may precede a cut. U+0D4E and characters above U+FFFF may not: they may combine with the next
# character
_LEFT = rf"[!-~{_CLAUSE_MARKS}]|[^\W\u0d4e\U00010000-\U0010ffff]"
_SPACE = rf"(?<={_LEFT})(?= )"
_WHITE_SPACE = rf"(?<={_LEFT})(?=[ \t\r\n])"
_IDEOGRAPHS = r"(?<=[\u4e00-\u9fff])(?=[\u4e00-\u9fff])"
_CLAUSE = rf"(?<=[A-Za-z\u4e00-\u9fff])(?=[\r\n{_CLAUSE_MARKS}])"
# cuts only between a letter or digit and a space. The letter or digit is one that no Unicode normalization turns into
# punctuation, because an added token may end with punctuation
_NARROW = r"(?<=[^\W_\u0080-\u00bf\u0d4e\u2000-\u303f\u3200-\u33ff\ua000-\uabff\ud7a4-\U0010ffff])(?= )"

_LOCAL_NORMALIZERS = {
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Lowercase",
    "StripAccents",
    "Strip",
    "Precompiled",
    "Prepend",
    "BertNormalizer",
    "Nmt",
}
_WHITE_SPACE_SPLITTERS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
_OF_WHITE_SPACE = {" ", " +", " {2,}", r"\s+", r"\s{2,}"}

# Alternatives of the Split patterns in use (GPT-2, Llama 3, Qwen 2 to 3.5, o200k, Tekken). A match has white space only
# at its beginning, apart from newlines after punctuation, and has no clause mark after a letter. So no match crosses a
# cut. Only patterns of white space look ahead, and only by one character.
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_KNOWN_ALTERNATIVES = {
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _CONTRACTION, "'(?i:[sdmt]|ll|ve|re)"),
    *(
        r" ?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        *_CASED,
        *(case + _CONTRACTION + "?" for case in _CASED),
    ),
    *(r" ?\p{N}+", r"\p{N}+", r"\p{N}", r"\p{N}{1,3}", r"\s+", r"\s+(?!\S)", r"\s*[\r\n]+", r"\s*[\r\n]"),
    *(rf" ?[^\s\p{{L}}{marks}\p{{N}}]+{after}" for marks in ("", r"\p{M}") for after in ("", r"[\r\n]*", r"[\r\n/]*")),
}

HARD_TEXT = (
    *(" ", "  ", "   ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u2028", "\u200d", "\ufeff", "\x00", "\x1f"),
    *("\u2581", "\u0120", "'s", "'", "...", "!", "``", "_", "x", "7", "1234", "\u0301", "e\u0301"),
    *("\u1100", "\u1161", "\ud55c", "\u0d4e", "\u0915\u094d\u0937", "\u4e2d\u6587", "\u3002"),
    *("\u05e9\u05dc\u05d5\u05dd", "\u202e", "\u0627\u0644", "\U0001f469\u200d\U0001f4bb", "\U0001f1e9\U0001f1ea"),
    *("\ufb01", "\u0130", "\u03a3", "\u1e9b\u0323", "\uff21", "hello", "The", "naive"),
)


class LongTexts:
    """Token ids of long texts, read in pieces by one tokenizer without truncation. The first use takes 10 to 100 ms."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def places(self) -> re.Pattern[str] | None:
        """Return a pattern that matches at the positions where a cut does not change the ids (the matches are empty).
        None if no pattern is known, or if the pattern fails the test (`_holds`).
        """
        pattern = _pattern(self._tokenizer)
        if pattern is None or not self._holds(pattern):
            return None
        return pattern

    def read(
        self, texts: Sequence[str], room: int, *, from_end: bool, count_all: bool
    ) -> list[tuple[NDArray[np.int32], int]]:
        """Return for each text its first `room` ids (with `from_end`, its last), int32, without special tokens, and the
        number of ids that were read. Reading of a text stops when it has more than `room` ids; with `count_all`,
        the whole text is read.
        """
        readings = [_TextReading(self._pieces(text, room * FIRST_CHARACTERS_PER_TOKEN, from_end)) for text in texts]
        going = readings
        while going:
            pieces = [(reading, piece) for reading in going if (piece := next(reading.pieces, None)) is not None]
            for (reading, _), ids in zip(pieces, self._encode([piece for _, piece in pieces]), strict=True):
                reading.append(ids, room)
            going = [reading for reading, _ in pieces if count_all or reading.count <= room]
        return [(reading.ids(room, from_end), reading.count) for reading in readings]

    def first_piece(self, text: str, size: int, from_end: bool) -> tuple[str, int]:
        """Return the first piece of a text, or with `from_end` the last piece. Also return how many tokens of SENTINEL
        are at its beginning; the caller drops them. The first piece has at least `size` characters unless the text is
        shorter; the last piece may have fewer.
        """
        return next(self._pieces(text, size, from_end))

    def _pieces(self, text: str, size: int, from_end: bool) -> Iterator[tuple[str, int]]:
        """Return an iterator over the pieces of a text. Each piece except the first piece of the text begins with
        SENTINEL. With each piece comes the number of tokens of SENTINEL, which the caller drops. With `from_end`, the
        last piece comes first.
        """
        if self.places is None:
            return iter([(text, 0)])
        return (
            self._piece(text, start, end)
            for start, end in (_backward if from_end else _forward)(text, max(size, 1), self.places)
        )

    def _piece(self, text: str, start: int, end: int) -> tuple[str, int]:
        return (SENTINEL + text[start:end], self._sentinel) if start else (text[:end], 0)

    @cached_property
    def _sentinel(self) -> int:
        return len(self._tokenizer.encode(SENTINEL, add_special_tokens=False))

    def _encode(self, pieces: Sequence[tuple[str, int]]) -> Iterator[list[int]]:
        encoded = encodings(self._tokenizer, [text for text, _ in pieces])
        return (encoding.ids[dropped:] for (_, dropped), encoding in zip(pieces, encoded, strict=True))

    def _holds(self, places: re.Pattern[str]) -> bool:
        """Return True if difficult texts have the same ids when they are cut at every allowed position."""
        rng = random.Random(0)  # noqa: S311 - not secret; a fixed seed gives the same trial in each process
        added = [token.content for token in islice(self._tokenizer.get_added_tokens_decoder().values(), 64)]
        vocabulary = sorted(self._tokenizer.get_vocab())
        spelt = [
            re.sub("[\u2581\u0120]", " ", token).removeprefix("##")
            for token in rng.sample(vocabulary, min(256, len(vocabulary)))
        ]
        for _ in range(100):
            text = "".join(
                rng.choice(rng.choice((HARD_TEXT, added or HARD_TEXT, spelt, (" ", " a")))) for _ in range(100)
            )
            bounds = [0, *(match.start() for match in places.finditer(text)), len(text)]
            whole, *pieces = self._encode([(text, 0), *(self._piece(text, *bound) for bound in pairwise(bounds))])
            if whole != list(chain.from_iterable(pieces)):
                return False
        return True


class _TextReading:
    """Progress with one text: its remaining pieces, the ids that were kept, and the number of ids that were read."""

    def __init__(self, pieces: Iterator[tuple[str, int]]) -> None:
        self.pieces = pieces
        self.count = 0
        self._parts: list[list[int]] = []

    def append(self, ids: list[int], room: int) -> None:
        if self.count < room:
            self._parts.append(ids)
        self.count += len(ids)

    def ids(self, room: int, from_end: bool) -> NDArray[np.int32]:
        joined = np.array(list(chain.from_iterable(reversed(self._parts) if from_end else self._parts)), np.int32)
        return joined[max(0, len(joined) - room) :] if from_end else joined[:room]


def encodings(tokenizer: Tokenizer, texts: Sequence[str], *, offsets: bool = False) -> Iterator[Encoding]:
    """Yield the tokens of each text, without special tokens; with `offsets`, also their offsets. Each call of the
    tokenizer gets at most MAX_CALL_CHARACTERS characters. Raises InvalidInput for a longer text.
    """
    encode = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
    start = characters = 0
    for stop, text in enumerate(texts):
        if len(text) > MAX_CALL_CHARACTERS:
            message = (
                f"text: it has {len(text)} characters without a place where it can be cut, at most "
                f"{MAX_CALL_CHARACTERS} are tokenised together: send it in parts"
            )
            raise InvalidInput(message, reason="too_many_tokens", param="text", extras={"limit": MAX_CALL_CHARACTERS})
        if characters + len(text) > MAX_CALL_CHARACTERS:
            yield from encode(list(texts[start:stop]), add_special_tokens=False)
            start, characters = stop, 0
        characters += len(text)
    if start < len(texts):
        yield from encode(list(texts[start:]), add_special_tokens=False)


def _forward(text: str, size: int, places: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each piece, from the start of the text. Only the last piece may be shorter than `size`."""
    start = 0
    while start < len(text):
        match = places.search(text, start + size)
        end = match.start() if match else len(text)
        yield start, end
        start, size = end, min(size * GROWTH, MAX_PIECE_CHARACTERS)


def _backward(text: str, size: int, places: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each piece, from the end of the text. A piece begins at a match of `places`, or at 0."""
    end = len(text)
    while end:
        low, above, match = max(0, end - size), end, None
        while low and (match := places.search(text, low, above)) is None:
            low, above = max(0, low - size), low
        start = match.start() if match else 0
        yield start, end
        end, size = start, min(size * GROWTH, MAX_PIECE_CHARACTERS)


def _pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return a pattern that matches the positions for cuts, chosen by this tokenizer's normalizers and pre-tokenizers.
    If a normalizer or pre-tokenizer is unknown, the pattern is a guess, which `_holds` tests.
    """
    normalizers, steps = _steps(tokenizer.normalizer, "normalizers"), _steps(tokenizer.pre_tokenizer, "pretokenizers")
    marks = any(step.get("content") == "\u2581" for step in normalizers)
    is_supported = all(_is_local(step) for step in normalizers) and all(_is_known(step) for step in steps)
    kinds = {step["type"] for step in steps if _splits(step) and (step["type"] == "Metaspace" or not marks)}
    if not kinds and all(map(_is_known, steps)) and not _spaces_begin_tokens(tokenizer):
        return None
    wider = []
    if is_supported and kinds & _WHITE_SPACE_SPLITTERS:
        wider.append(_WHITE_SPACE)
        if any(step.get("handle_chinese_chars") for step in normalizers):
            wider.append(_IDEOGRAPHS)
    elif is_supported and kinds & {"Split", "ByteLevel"} and not any(step.get("add_prefix_space") for step in steps):
        wider.append(_CLAUSE)
    replaced = [
        step["pattern"]["String"] for step in normalizers if step["type"] == "Replace" and "String" in step["pattern"]
    ]
    tokens = list(tokenizer.get_added_tokens_decoder().values())
    # Prepend and Strip change the text after each added token, so no cut may follow an added token
    at_start = not is_supported or any(step["type"] in ("Prepend", "Strip") for step in normalizers)
    for pattern in (re.compile("|".join((_SPACE, *wider))), re.compile(_NARROW)):
        straddled = any(pattern.search(token.content + (" " if token.rstrip or at_start else "")) for token in tokens)
        # a whole-word added token depends on the character before it, so there must be no cut before it
        alone = any(token.single_word and pattern.search(SENTINEL + token.content, 1) for token in tokens)
        if not straddled and not alone and not any(map(pattern.search, replaced)):
            return pattern
    return None


def _steps(component: Any, key: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer as dictionaries; a sequence is replaced by its steps."""

    def unrolled(state: dict[str, Any]) -> Iterable[dict[str, Any]]:
        return [step for child in state[key] for step in unrolled(child)] if state["type"] == "Sequence" else [state]

    return [] if component is None else list(unrolled(json.loads(component.__getstate__())))


def _is_local(step: dict[str, Any]) -> bool:
    if step["type"] != "Replace":
        return step["type"] in _LOCAL_NORMALIZERS
    literal = step["pattern"].get("String")
    if (literal or step["pattern"].get("Regex")) in _OF_WHITE_SPACE:
        return step["content"] in (" ", "\u2581")
    return literal is not None and not re.search(r"\s", literal + step["content"])


def _is_known(step: dict[str, Any]) -> bool:
    kind = step["type"]
    if kind == "Split" and "String" in step["pattern"]:
        return bool(step["pattern"]["String"] == " ")
    return (
        _splits(step)
        or kind in ("Digits", "ByteLevel", "Metaspace")
        or (kind == "Punctuation" and step["behavior"] == "Isolated")
    )


def _splits(step: dict[str, Any]) -> bool:
    """Return True if this pre-tokenizer is known and begins a new word where white space follows another character."""
    kind = step["type"]
    if kind == "Split":
        is_kept = step["behavior"] == "Isolated" or (step["behavior"] == "Removed" and step["invert"])
        alternatives = re.split(r"\|(?![^(]*\))", step["pattern"].get("Regex", ""))
        return is_kept and set(alternatives) <= _KNOWN_ALTERNATIVES
    return (
        kind in _WHITE_SPACE_SPLITTERS
        or bool(kind == "Metaspace" and step["split"])
        or bool(kind == "ByteLevel" and step["use_regex"])
    )


def _spaces_begin_tokens(tokenizer: Tokenizer) -> bool:
    """Return True if this is a BPE tokenizer in whose vocabulary no entry has a space behind another character."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    across = re.compile("[^\u2581\u0120][\u2581\u0120]")
    is_bpe = json.loads(tokenizer.model.__getstate__())["type"] == "BPE"
    return is_bpe and not vocabulary.keys().isdisjoint("\u2581\u0120") and not any(map(across.search, vocabulary))
