"""Token ids of texts. Texts of several requests are tokenised in one call of the Rust tokenizer: a few short texts on
the event loop, more texts in threads. Texts are truncated here, and each truncation is reported.

A tokenizer is immutable and releases the interpreter lock while it works, so all threads share it. Ids are truncated
after tokenising, because a separate tokenizer for each limit of the length would cost more.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from sie_contracts.wire.messages import Truncate
from sie_sidecar.prepare.long_text import FIRST_CHARACTERS_PER_TOKEN, GROWTH, SENTINEL, LongTexts, encodings

Ids = NDArray[np.int32]
T = TypeVar("T")
# texts that were gathered together are tokenised on the event loop, not in a thread, if they have at most this number
# of characters in all. This blocks the event loop for up to 1.5 ms. A thread would take longer, and would also block
# the event loop, because it needs the interpreter lock (bench/results/tokens.md)
INLINE_CHARACTERS = 4096
# number of characters that `prefix_of` first reads for each token: nearly all texts have fewer characters per token
_CHARACTERS_PER_TOKEN = 64
THREAD_CHARACTERS = 65536  # characters of short texts that one thread tokenises in one call
LONG_CHARACTERS = 4096  # a text of at most this number of characters is always tokenised as a whole
# estimated bytes of memory for each byte of a tokenizer's JSON; measured: 26 to 37 for Unigram models, 8 for the others
_MEMORY_PER_BYTE = 32


class Tokens(msgspec.Struct, frozen=True):
    """Token ids of one text, int32 [length]. `full`: length before truncation. If a long text was truncated (`Truncate`
    "END" or "START"), `full` is only a lower bound, because the tokenizer did not read the rest of the text.
    """

    ids: Ids
    full: int


@dataclass(frozen=True)
class PairTemplate:
    """Special tokens before, between and after two texts. `types`: token types of the five parts: before, first text,
    between, second text, after.
    """

    first: Ids
    middle: Ids
    last: Ids
    types: tuple[int, int, int, int, int]

    @property
    def special(self) -> int:
        return len(self.first) + len(self.middle) + len(self.last)


class ModelTokenizer:
    """Tokenizer of one loaded model, from JSON bytes (`serialised`). Texts of more than `long_characters` characters
    may be read in pieces. `first` and `last`: special tokens before and after a text. `pair`: special tokens around two
    texts. Raises ValueError if `first` and `last` cannot be found.
    """

    def __init__(self, serialised: bytes, max_tokens: int, long_characters: int = LONG_CHARACTERS) -> None:
        self.serialised = serialised
        self.max_tokens = max_tokens
        self._long_characters = long_characters
        self._tokenizer = Tokenizer.from_buffer(serialised)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._long = LongTexts(self._tokenizer)
        self.first, self.last = _special(self._tokenizer)

    @property
    def memory_bytes(self) -> int:
        """Return the estimated bytes of memory of the tokenizer."""
        return _MEMORY_PER_BYTE * len(self.serialised)

    @cached_property
    def pair(self) -> PairTemplate:
        """Return the special tokens around two texts. Raises ValueError if the tokenizer has no template for pairs."""
        return _pair(self._tokenizer)

    def tokenise(self, texts: Sequence[str], room: int, truncate: Truncate) -> list[Tokens]:
        """Return the ids of each text without special tokens, truncated to `room` ids. Of a very long text, only the
        needed part is read; if `truncate` is "NONE", the whole text is read, and the caller must refuse a text that was
        truncated. Raises InvalidInput for a text that is too long for one call and cannot be cut into pieces.
        """
        from_end = truncate == "START"
        whole_limit = self._whole_limit(room)
        long: list[str] = []
        short: list[str] = []
        for text in texts:
            (long if len(text) > whole_limit else short).append(text)
        read = iter(self._long.read(long, room, from_end=from_end, count_all=truncate == "NONE") if long else ())
        if sum(map(len, short)) <= INLINE_CHARACTERS:
            whole = iter(self._tokenizer.encode_batch_fast(short, add_special_tokens=False))
        else:
            whole = encodings(self._tokenizer, short)
        contents = []
        for text in texts:
            if len(text) > whole_limit:
                contents.append(Tokens(*next(read)))
            else:
                ids = np.array(next(whole).ids, np.int32)
                contents.append(Tokens(ids if len(ids) <= room else cut(ids, room, truncate), len(ids)))
        return contents

    def _whole_limit(self, room: int) -> int:
        """Return the largest length, in characters, of a text that is tokenised as a whole."""
        return max(self._long_characters, 2 * room * FIRST_CHARACTERS_PER_TOKEN)

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens. The largest id is nearly always one less."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def first_unknown(self, ids: Sequence[int]) -> int | None:
        """Return the index of the first number that is not a token id. None if all are token ids."""
        vocabulary = self.vocabulary
        if not ids or (min(ids) >= 0 and max(ids) < vocabulary):
            return None
        return next(
            (place for place, token in enumerate(ids) if not 0 <= token < vocabulary and not self._is_token(token)),
            None,
        )

    def _is_token(self, number: int) -> bool:
        return 0 <= number < 1 << 32 and self._tokenizer.id_to_token(number) is not None

    def content(self, ids: Sequence[int]) -> Ids:
        """Remove the special tokens at both ends of the ids that a client sent for a text. The ids must be valid."""
        content = np.array(ids, np.int32)
        if len(self.first) and np.array_equal(content[: len(self.first)], self.first):
            content = content[len(self.first) :]
        if len(self.last) and np.array_equal(content[len(content) - len(self.last) :], self.last):
            content = content[: len(content) - len(self.last)]
        return content

    def around(self, prefix: str, suffix: str) -> tuple[Ids, Ids]:
        """Return the ids of `prefix` and `suffix`, the prompt around a text that a client sent as ids. The ids of a
        prompt may depend on the text beside it, so each part is tokenised beside a placeholder word. A part that
        changes the ids of the placeholder is tokenised alone.
        """
        word, led, followed = (
            encoding.ids for encoding in self._plain([SENTINEL, prefix + SENTINEL, SENTINEL + suffix])
        )
        before = led[: len(led) - len(word)] if led[len(led) - len(word) :] == word else self._plain([prefix])[0].ids
        after = followed[len(word) :] if followed[: len(word)] == word else self._plain([suffix])[0].ids
        return np.array(before, np.int32), np.array(after, np.int32)

    def _plain(self, texts: list[str]) -> list[Encoding]:
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)

    def whole(self, texts: Sequence[str], *, special: bool) -> list[Encoding]:
        """Return all tokens of each text with offsets in code points; with `special`, also special tokens."""
        return self._tokenizer.encode_batch(list(texts), add_special_tokens=special)

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of these ids. Every id must be a valid token id."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def spans(self, texts: Sequence[str], room: int, truncate: Truncate) -> list[tuple[Tokens, Ids]]:
        """Return for each text the ids of `tokenise`, and each token's offsets in code points, int32 [length, 2]."""
        whole_limit = self._whole_limit(room)
        whole = encodings(self._tokenizer, [text for text in texts if len(text) <= whole_limit], offsets=True)
        spans = []
        for text in texts:
            if len(text) > whole_limit:
                spans.append(self._long_spans(text, room, truncate))
            else:
                ids, offsets = _ids_and_offsets(next(whole))
                spans.append((Tokens(cut(ids, room, truncate), len(ids)), cut(offsets, room, truncate)))
        return spans

    def _long_spans(self, text: str, room: int, truncate: Truncate) -> tuple[Tokens, Ids]:
        """Return the ids and offsets of a long text, for `spans`. Only a piece of the text is read, with more than
        `room` tokens if the text has so many: the last piece if `truncate` is "START", otherwise the first. If
        `truncate` is "NONE", the tokens of the whole text are also counted.
        """
        from_end = truncate == "START"
        size = max(1, 2 * room * FIRST_CHARACTERS_PER_TOKEN)
        while True:
            piece, dropped = self._long.first_piece(text, size, from_end)
            (encoding,) = encodings(self._tokenizer, [piece], offsets=True)
            ids, offsets = (part[dropped:] for part in _ids_and_offsets(encoding))
            is_whole = not dropped and len(piece) == len(text)
            if is_whole or len(ids) > room:
                break
            size *= GROWTH
        full = len(ids)
        if truncate == "NONE" and not is_whole:
            ((_, full),) = self._long.read([text], 0, from_end=False, count_all=True)
        # with `from_end`, the piece ends where the text ends, and may begin with SENTINEL, which is no part of the text
        moved = offsets + (len(text) - len(piece) if from_end else 0)
        return Tokens(cut(ids, room, truncate), full), cut(moved, room, truncate)

    def prefix_of(self, text: str, room: int) -> str:
        """Return the part of the text that its first `room` tokens cover."""
        size = max(LONG_CHARACTERS, room * _CHARACTERS_PER_TOKEN)
        while True:
            read = text[:size]
            (encoding,) = encodings(self._tokenizer, [read], offsets=True)
            offsets = encoding.offsets
            if len(offsets) > room:
                return text[: offsets[room][0]]
            if len(read) == len(text):
                return text
            size *= GROWTH


def _ids_and_offsets(encoding: Encoding) -> tuple[Ids, Ids]:
    return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int32).reshape(-1, 2)


def cut(ids: Ids, room: int, truncate: Truncate) -> Ids:
    """Return the first `room` ids; if `truncate` is "START", the last `room` ids."""
    room = max(0, room)
    return ids[max(0, len(ids) - room) :] if truncate == "START" else ids[:room]


def _pair(tokenizer: Tokenizer) -> PairTemplate:
    encoding = tokenizer.encode(SENTINEL, SENTINEL)
    ids, sides = np.array(encoding.ids, np.int32), encoding.sequence_ids
    left, right = ([place for place, of in enumerate(sides) if of == side] for side in (0, 1))
    if not left or not right:
        raise ValueError("the tokenizer has no template for a pair of texts")
    bounds = (0, left[0], left[-1] + 1, right[0], right[-1] + 1, len(ids))
    parts = [slice(*bound) for bound in pairwise(bounds)]
    types = [max(encoding.type_ids[part], default=0) for part in parts]
    return PairTemplate(ids[parts[0]], ids[parts[2]], ids[parts[4]], (types[0], types[1], types[2], types[3], types[4]))


def _special(tokenizer: Tokenizer) -> tuple[Ids, Ids]:
    """Return the special tokens before and after a text, int32. Raises ValueError if they cannot be found."""
    encoding = tokenizer.encode(SENTINEL)
    content = [place for place, special in enumerate(encoding.special_tokens_mask) if not special]
    if not content:
        raise ValueError(f"the tokenizer returns no tokens for {SENTINEL!r}")
    ids = np.array(encoding.ids, np.int32)
    return ids[: content[0]], ids[content[-1] + 1 :]


def without_panic(work: Callable[[], T]) -> T:
    """Return the result of `work`. Raises RuntimeError for a panic of the Rust tokenizer, which is no Exception, and
    for StopIteration, which no future accepts. The message of a panic is left out, because it may quote the text.
    """
    try:
        return work()
    except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise RuntimeError(f"the tokenizer ended with {type(error).__name__}") from None


class _ThreadWork(NamedTuple):
    """Call that waits for a thread, with the future of its result. `characters`: number of characters to tokenise."""

    characters: int
    work: Callable[[], Any]
    done: asyncio.Future[Any]


class TokenizerPool:
    """Threads that tokenise the texts of all models, for one event loop. Short calls that come in the same iteration of
    the loop share a thread: moving a call to a thread and back takes as long as tokenising 500 characters. Also, many
    threads with short calls would wait for each other at the interpreter lock, and the event loop would wait for them.
    """

    def __init__(self, workers: int) -> None:
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="tokenise")
        self._parts: list[_ThreadWork] = []

    async def run(self, characters: int, work: Callable[[], T], together: int = 0) -> T:
        """Return the result of `work`, which tokenises `characters` characters. `together`: characters of all work that
        was gathered at the same time. If one of the two numbers is above INLINE_CHARACTERS, `work` runs in a thread.
        """
        if max(characters, together) <= INLINE_CHARACTERS:
            return without_panic(work)
        loop = asyncio.get_running_loop()
        part = _ThreadWork(characters, work, loop.create_future())
        self._parts.append(part)
        if len(self._parts) == 1:
            loop.call_soon(self._send, loop)
        result: T = await part.done
        return result

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        parts, self._parts = self._parts, []
        for some in _in_threads(parts):
            try:
                running = loop.run_in_executor(self._executor, _run_all, some)
            except RuntimeError as error:  # the pool was closed
                _hand_out(some, [error] * len(some))
            else:
                running.add_done_callback(functools.partial(_on_run, some))

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _in_threads(parts: Sequence[_ThreadWork]) -> Iterator[list[_ThreadWork]]:
    """Group calls by thread: a long call alone, consecutive short calls together up to THREAD_CHARACTERS characters."""
    some: list[_ThreadWork] = []
    for part in parts:
        if part.characters > INLINE_CHARACTERS:
            yield [part]
            continue
        if some and sum(part_in_thread.characters for part_in_thread in some) + part.characters > THREAD_CHARACTERS:
            yield some
            some = []
        some.append(part)
    if some:
        yield some


def _run_all(parts: Sequence[_ThreadWork]) -> list[Any]:
    """Call `work` of each part in this thread. Return for each part the result or the exception."""
    results: list[Any] = []
    for part in parts:
        try:
            results.append(without_panic(part.work))
        except Exception as error:  # noqa: BLE001 raised where the caller awaits it
            results.append(error)
    return results


def _on_run(parts: Sequence[_ThreadWork], running: asyncio.Future[list[Any]]) -> None:
    if running.cancelled():
        for part in parts:
            part.done.cancel()
    elif (error := running.exception()) is not None:  # give the callers an error: without it, they would wait for ever
        _hand_out(parts, [RuntimeError(f"a thread of the tokenizer ended with {type(error).__name__}")] * len(parts))
    else:
        _hand_out(parts, running.result())


def _hand_out(parts: Sequence[_ThreadWork], results: Sequence[Any]) -> None:
    for part, result in zip(parts, results, strict=True):
        if part.done.done():  # the caller was cancelled
            continue
        if isinstance(result, Exception):
            part.done.set_exception(result)
        else:
            part.done.set_result(result)
