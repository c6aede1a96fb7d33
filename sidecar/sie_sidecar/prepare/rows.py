"""Token ids of texts, and the rows of a work item: their types, the checks of inputs, the limits, and the frame of a
batch for the adapter. `layouts` builds the rows. The functions have no state, as they also run in the tokenising
threads.

Texts of several requests are tokenised in one call of the Rust tokenizer: a few short texts on the event loop, more
texts in threads. Texts are truncated here, and each truncation is reported. A tokenizer is immutable and releases the
interpreter lock while it works, so all threads share it. Ids are truncated after tokenising, because a separate
tokenizer for each limit of the length would cost more.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from sie_contracts.errors import InvalidInput
from sie_contracts.media import documents
from sie_contracts.media.documents import DocumentFile
from sie_contracts.models.entries import JOINABLE_POOLINGS, is_joinable
from sie_contracts.models.output_schemas import questions_of
from sie_contracts.wire.ipc import IMAGE_KEY_BYTES, ChunkedRows, Group, Layout, Rows, RunBatch
from sie_contracts.wire.messages import Input, Mention, Operation, RunOptions, Truncate, Vectors
from sie_contracts.wire.trace_context import NONE, Context
from sie_sidecar.prepare.long_text import FIRST_CHARACTERS_PER_TOKEN, GROWTH, SENTINEL, LongTexts, encodings
from sie_sidecar.prepare.media_frames import PreparedImage, SoundFeatures

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


# decoded images of one input
PreparedImages = Sequence[PreparedImage]

OF_QUERY = -1
HYPOTHESIS = "This example is {}."  # the default of the zero-shot pipeline of transformers
# limits of one work item, checked before its rows are built: prompts, query and labels are repeated for each input, so
# the rows of a small request can become large
MAX_CHARACTERS = 32 << 20
MAX_ROWS = 1 << 16
MAX_VECTOR_BYTES = 64 << 20
VECTOR_BYTES = 512  # bytes of token vectors that count as one token: 128 float32 numbers, the usual width
# building one row takes as long as tokenising this number of characters; used to estimate the time of a call
ROW_CHARACTERS = 24
# number of characters that count as one token of cost, for models that get the text in addition to the ids
COST_CHARACTERS = 64


class TokenRow(msgspec.Struct, frozen=True):
    """Token ids of one row, int32 [length], with special tokens. `full`: length before truncation. `types`: uint8
    [length], token types of a pair. `offsets`: int32 [length, 2], in code points, for the layouts `spans` and
    `passages`. `expanded`: the row's cost on the device in tokens, if this is more than the number of ids. `vectors`,
    `images`, `sound` or `document` may replace ids. `uncounted`: part of the row's cost, in tokens, that does not count
    towards the size of a batch: if the model scales all images to one size, an image without text counts as 1 token.
    """

    ids: Ids
    full: int
    types: NDArray[np.uint8] | None = None
    offsets: Ids | None = None
    expanded: int = 0
    vectors: Vectors | None = None
    images: PreparedImages = ()
    sound: SoundFeatures | None = None
    document: DocumentFile | None = None
    uncounted: int = 0

    @property
    def truncated(self) -> bool:
        return self.full > len(self.ids)

    @property
    def cost(self) -> int:
        """Return the number of tokens on the device: after truncation, with special tokens. An image costs its patches
        in the encoder plus its ids in the row. The time of attention, which grows with the square of the length, is not
        part of this cost; see `BatchNote`.
        """
        return max(len(self.ids), self.expanded)

    @property
    def media_bytes(self) -> int:
        """Return the bytes of the row's pixels, of the features of its sound, or of its document."""
        size = len(self.sound.features) if self.sound else len(self.document.data) if self.document else 0
        for image in self.images:
            size += len(image.pixels)
        return size


class WorkItemInput(NamedTuple):
    """Data from which the rows of one work item are built. `images` and `sounds`: by index of the input, the decoded
    media, or the error if they are unusable. The query has the index OF_QUERY.
    """

    inputs: Sequence[Input]
    query: Input | None
    options: RunOptions
    images: Mapping[int, PreparedImages | InvalidInput] = MappingProxyType({})
    sounds: Mapping[int, SoundFeatures | InvalidInput] = MappingProxyType({})


class WorkRows(msgspec.Struct, frozen=True):
    """Rows of one work item: first `shared` rows for all inputs, then the rows of each input, in order. `error`: error
    of the work item if no rows were built. `unfit`: errors of inputs that have rows but must not run, by index.
    `chunked`: number of rows of each input if a text has chunks; empty if all inputs have the same number of rows.
    """

    rows: list[TokenRow]
    shared: int = 0
    error: InvalidInput | None = None
    unfit: Mapping[int, InvalidInput] = {}
    chunked: tuple[ChunkedRows, ...] = ()


def checked_work(
    tokenizer: ModelTokenizer, layout: Rows, item: WorkItemInput
) -> tuple[WorkItemInput, InvalidInput | None, dict[int, InvalidInput]]:
    """Return three values: the work item, with empty texts in place of the unfit inputs; the error of the whole work
    item, or None; the error of each unfit input, by the index of the input.
    """
    error = _excess(layout, item)
    unfit: dict[int, InvalidInput] = {}
    if error is not None or (all(map(_is_text, item.inputs)) and (item.query is None or _is_text(item.query))):
        return item, error, unfit
    if item.query is not None:
        query, pixels = item.query, item.images.get(OF_QUERY)
        if query.audio or query.document or (query.images and layout.layout != "pieces"):
            param = "audio" if query.audio else "document" if query.document else "images"
            error = _unsupported(param, f"accepts no {param} in a query")
        else:
            error = pixels if isinstance(pixels, InvalidInput) else _unfit(tokenizer, layout, query, item.options)
    for index, source in enumerate(item.inputs):
        media = item.images.get(index), item.sounds.get(index)
        bad = next((outcome for outcome in media if isinstance(outcome, InvalidInput)), None)
        why = bad or _unfit(tokenizer, layout, source, item.options)
        if why is not None:
            unfit[index] = why
    if unfit:
        item = item._replace(
            inputs=[Input("") if index in unfit else source for index, source in enumerate(item.inputs)],
            images={index: pixels for index, pixels in item.images.items() if index not in unfit},
            sounds={index: features for index, features in item.sounds.items() if index not in unfit},
        )
    return item, error, unfit


def _is_text(source: Input) -> bool:
    files = source.images or source.audio or source.document
    is_other = source.tokens is not None or source.pair is not None or source.vectors is not None
    return source.chunks is None and not files and not is_other


def _unfit(tokenizer: ModelTokenizer, layout: Rows, source: Input, options: RunOptions) -> InvalidInput | None:
    """Return the error if the model or the options do not accept this input, else None."""
    if _is_text(source):
        return None
    if source.chunks is not None:
        return _unfit_chunks(layout, source, options)
    if source.document is not None:
        return _unfit_document(layout, source, source.document)
    if source.audio:
        if layout.sounds is None:
            return _unsupported("audio", "accepts no sounds")
        return _unsupported("audio", "accepts no sounds beside images") if source.images else None
    if source.images:
        if layout.images is None:
            return _unsupported("images", "accepts no images")
        alone = layout.image_tokens is not None and not layout.image_tokens.beside_text
        several = alone and len(source.images) > 1
        return _unsupported("images", "accepts only one image for each input") if several else None
    if source.vectors is not None:
        return _unfit_vectors(layout, source.vectors, options)
    if source.pair is not None and not (layout.pairs and source.text is not None):
        return _unsupported(
            "pair", "accepts no pairs of texts" if source.text is not None else "accepts only pairs of texts"
        )
    if source.tokens is None:
        return None
    if not layout.tokens:
        return _unsupported("tokens", "accepts no token ids")
    return bad_token(tokenizer, source.tokens)


def _unfit_chunks(layout: Rows, source: Input, options: RunOptions) -> InvalidInput | None:
    assert source.chunks is not None
    if not source.text:
        return bad_chunks("only an input with a text may have chunks", "unsupported_modality")
    if not layout.chunks:
        return bad_chunks("this model does not support chunks", "unsupported_modality")
    if options.is_query:
        return bad_chunks("a query cannot have chunks", "unsupported_modality")
    is_pooled = source.chunks.context and "dense" in options.outputs and options.muvera is None
    pooling = options.pooling or layout.pooling
    if is_pooled and not is_joinable(pooling):
        message = f"the pooling is {pooling}; for chunks with context it must be {' or '.join(JOINABLE_POOLINGS)}"
        return bad_chunks(message, "unsupported_pooling")
    return None


def bad_chunks(message: str, reason: str, field: str = "", limit: int = 0) -> InvalidInput:
    """Return an error about the field `chunks` of an input, or about a field in it."""
    param = f"chunks.{field}" if field else "chunks"
    return InvalidInput(f"{param}: {message}", reason=reason, param=param, extras={"limit": limit} if limit else None)


def _unfit_document(layout: Rows, source: Input, document: DocumentFile) -> InvalidInput | None:
    if layout.documents is None:
        return _unsupported("document", "accepts no documents")
    if source.images or source.audio:
        return _unsupported("document", f"accepts no documents beside {'images' if source.images else 'audio'}")
    try:
        documents.check(layout.documents, len(document.data))
    except InvalidInput as error:
        error.message, error.param = f"document: {error.message}", "document"
        return error
    return None


def _unsupported(param: str, why: str) -> InvalidInput:
    return InvalidInput(f"{param}: the model {why} here", reason="unsupported_modality", param=param)


def bad_token(tokenizer: ModelTokenizer, tokens: Sequence[int]) -> InvalidInput | None:
    """Return an error if one of these numbers is not a token id of the model, else None."""
    place = tokenizer.first_unknown(tokens)
    if place is None:
        return None
    expected = f"expected an id from 0 to {tokenizer.vocabulary - 1}"
    return InvalidInput(
        f"tokens[{place}]: {expected}, got {tokens[place]}", reason="bad_token_id", param=f"tokens[{place}]"
    )


def _unfit_vectors(layout: Rows, vectors: Vectors, options: RunOptions) -> InvalidInput | None:
    if not layout.vectors:
        return _unsupported("multivector", "accepts no vectors")
    if layout.layout == "sides" and options.outputs != ("multivector",):
        return _unsupported(
            "multivector", f"scores by {' and '.join(options.outputs)}; vectors need score_mode colbert"
        )
    if layout.layout != "sides" and (options.muvera is None or "sparse" in options.outputs):
        return _unsupported("multivector", "accepts vectors only for muvera")
    if vectors.width != layout.vectors:
        message = f"multivector: expected vectors {layout.vectors} wide, got {vectors.width}"
        return InvalidInput(message, reason="bad_dimensions", param="multivector")
    if not vectors.fits:
        message = f"multivector: {len(vectors.data)} bytes are not {vectors.rows} float32 vectors {vectors.width} wide"
        return InvalidInput(message, reason="schema", param="multivector")
    return None


def _excess(layout: Rows, item: WorkItemInput) -> InvalidInput | None:
    """Return the error if a work item is too large for memory or would have no rows, else None."""
    rows, characters = _size(layout, item)
    if not rows and item.inputs:
        return InvalidInput("labels: the model needs the labels to look for", reason="labels_required", param="labels")
    if rows > MAX_ROWS:
        return too_many(
            f"{len(item.inputs)} items with {len(item.options.labels)} labels each are {rows} pairs", MAX_ROWS
        )
    if characters > MAX_CHARACTERS:
        return too_many(f"the items have {characters} characters with their prompts", MAX_CHARACTERS)
    if layout.vectors:
        inputs = item.inputs if item.query is None else [item.query, *item.inputs]
        size = sum(len(source.vectors.data) for source in inputs if source.vectors is not None)
        if size > MAX_VECTOR_BYTES:
            return too_many(f"the items have {size} bytes of vectors", MAX_VECTOR_BYTES)
    return None


def too_many(subject: str, limit: int) -> InvalidInput:
    return InvalidInput(
        f"{subject}, at most {limit} are run together", reason="too_many_tokens", extras={"limit": limit}
    )


def _size(layout: Rows, item: WorkItemInput) -> tuple[int, int]:
    """Return the number of rows of a work item without those of its query, and the number of characters to tokenise.
    Texts that are tokenised several times count each time.
    """
    options, query = item.options, len(item.query.text or "") if item.query else 0
    rows = len(item.inputs)
    around = len(options.prefix) + len(options.suffix)
    once = query + len(options.query_prefix) + len(options.query_suffix)
    if layout.layout == "hypotheses":
        template = len(str(options.parameters.get("hypothesis_template", HYPOTHESIS)))
        once += sum(map(len, options.labels)) + template * len(options.labels)
        rows *= len(options.labels)
    elif layout.questions:
        questions = questions_of(options)
        once += sum(map(len, questions))
        rows *= max(1, len(questions))
    if layout.layout == "passages":
        once += len(options.instruction)
    for piece in options.pieces:
        length = sum(map(len, piece[::2])) + query * piece[1::2].count("query")
        if is_cut(piece):
            around += length
        else:
            once += length
    characters = once + around * len(item.inputs)
    for source in item.inputs:
        # reading a token id takes about as long as tokenising one character
        characters += len(source.text or source.tokens or "")
        if layout.pairs and source.pair is not None:
            characters += len(source.pair)
    return rows, characters


def effort_of(layout: Rows, item: WorkItemInput) -> int:
    """Estimate the time to build the rows of a work item. Return it as the number of characters that are tokenised in
    the same time.
    """
    rows, characters = _size(layout, item)
    return characters + ROW_CHARACTERS * rows


def prompted(source: Input, options: RunOptions, empty: str = "") -> str:
    """Return the text of an input between the `prefix` and `suffix` of `options`. `empty` replaces a missing text."""
    return options.prefix + (source.text or empty) + options.suffix


def texts_of(item: WorkItemInput) -> list[str]:
    """Return the texts of a work item, one for each row, for a model that gets them in addition to the token ids."""
    query = [item.query.text or ""] if item.query else []
    return [*query, *(prompted(source, item.options) for source in item.inputs)]


def reached(texts: Sequence[str], rows: Sequence[TokenRow]) -> list[str]:
    """Return each text; cut the text of a truncated row after the last token in the row."""
    return [
        text if row.offsets is None or not row.truncated else text[: int(row.offsets.max(initial=0))]
        for text, row in zip(texts, rows, strict=True)
    ]


class BatchPart(NamedTuple):
    """Rows of one work item in a batch, and the data from which they were built. Inputs that must not run are neither
    in `rows` nor in `work`. `context`: trace context of the work item. `asker`: name of the client that sent the item,
    see `messages.WorkItem`. `chunked`: number of rows of each input if a text has chunks, see `WorkRows`.
    """

    rows: Sequence[TokenRow]
    work: WorkItemInput
    context: Context = NONE
    asker: str = ""
    chunked: tuple[ChunkedRows, ...] = ()

    def image_keys(self) -> bytes:
        """Return the keys of the images in the adapter's cache, concatenated. A key is a digest of client and pixels,
        so that clients do not share cached images; all keys are zeros if the client is unknown.
        """
        images = [image for row in self.rows for image in row.images]
        if not self.asker:
            return bytes(IMAGE_KEY_BYTES * len(images))
        own = (hashlib.blake2b(image.digest + self.asker.encode(), digest_size=IMAGE_KEY_BYTES) for image in images)
        return b"".join(key.digest() for key in own)


def to_batch(
    name: str,
    model: str,
    operation: Operation,
    layout: Layout,
    parts: Sequence[BatchPart],
    *,
    pooling: str = "",
    lora: str = "",
    context: Context = NONE,
    fingerprint: str = "",
) -> RunBatch:
    """Return the request that makes the adapter run these work items. `fingerprint` identifies the loaded model."""
    rows: list[TokenRow] = []
    groups: list[Group] = []
    texts: list[str] = []
    mentions: list[tuple[Mention, ...]] = []
    for part in parts:
        options = _adapter_options(part.work.options)
        stop = len(rows) + len(part.rows)
        groups.append(Group(len(rows), stop, options, len(part.work.inputs), *part.context, part.chunked))
        if layout in ("raw", "spans", "passages"):
            texts += reached(texts_of(part.work), part.rows)
        if layout == "raw":
            mentions += [()] * (part.work.query is not None) + [source.mentions for source in part.work.inputs]
        rows += part.rows
    lengths: list[int] = []
    ids: list[Ids] = []
    types: list[bytes] = []
    has_types = False
    offsets: list[bytes] = []
    vectors: list[bytes] = []
    counts: list[int] = []
    images: list[tuple[int, ...]] = []
    pixels: list[bytes] = []
    sounds: list[tuple[int, ...]] = []
    features: list[bytes] = []
    documents: list[DocumentFile | None] = []
    for number, row in enumerate(rows):
        lengths.append(len(row.ids))
        ids.append(row.ids)
        types.append(bytes(len(row.ids)) if row.types is None else row.types.tobytes())
        has_types = has_types or row.types is not None
        if row.offsets is not None:
            offsets.append(row.offsets.tobytes())
        counts.append(-1 if row.vectors is None else row.vectors.rows)
        if row.vectors is not None:
            vectors.append(row.vectors.data)
        for image in row.images:
            images.append((number, image.height, image.width, *image.upright))
            pixels.append(image.pixels)
        if row.sound is not None:
            sounds.append((number, *row.sound.shape))
            features.append(row.sound.features)
        documents.append(row.document)
    return RunBatch(
        name,
        model,
        operation,
        np.array(lengths, np.int32).tobytes(),
        b"" if layout == "raw" else np.concatenate(ids).tobytes(),
        tuple(groups),
        b"".join(types) if has_types else b"",
        tuple(texts),
        b"".join(offsets),
        pooling,
        lora,
        context.traceparent,
        np.array(counts, np.int32).tobytes() if vectors else b"",
        b"".join(vectors),
        fingerprint,
        context.tracestate,
        images=np.array(images, np.int32).tobytes() if images else b"",
        pixels=b"".join(pixels),
        mentions=tuple(mentions) if any(mentions) else (),
        sounds=np.array(sounds, np.int32).tobytes() if sounds else b"",
        features=b"".join(features),
        documents=tuple(documents) if any(documents) else (),
        image_keys=b"".join([part.image_keys() for part in parts]) if images else b"",
    )


def _adapter_options(options: RunOptions) -> RunOptions:
    """Return the options that the adapter needs. Remove the prompts, because the token ids already contain them. Remove
    `variant`, because only the fingerprint of results needs it.
    """
    prompts = options.prefix or options.suffix or options.pieces or options.query_prefix or options.query_suffix
    if not (prompts or options.variant):
        return options
    return msgspec.structs.replace(
        options, prefix="", suffix="", pieces=(), query_prefix="", query_suffix="", variant=""
    )


def query_of(item: WorkItemInput) -> str:
    return (item.query.text or "") if item.query else ""


def is_cut(piece: tuple[str, ...]) -> bool:
    return "document" in piece[1::2]
