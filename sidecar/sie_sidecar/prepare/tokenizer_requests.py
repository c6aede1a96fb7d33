"""Requests that need only a model's tokenizer, and no batch: tokenize and decode. The functions have no state.

tokenize             text       ──► ids, texts and byte positions of all its tokens, not truncated
tokenize with count  text, ids  ──► number of tokens that encode would read, before truncation
decode               ids        ──► text
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from tokenizers import Encoding

from sie_contracts.errors import InvalidInput, SIEError
from sie_contracts.wire.messages import Failed, Input, Ok, Operation, Outcome, RunOptions
from sie_sidecar.prepare.rows import MAX_CHARACTERS, ModelTokenizer, WorkItemInput, bad_token

OPERATIONS: tuple[Operation, ...] = ("tokenize", "decode")
# maximum number of characters of a work item for `tokenize` without `count`: each listed token needs about 500 bytes in
# this process, and 40 bytes in the result
MAX_TOLD_CHARACTERS = 4 << 20


def effort_of(item: WorkItemInput) -> int:
    """Estimate the time of `answer`. Return it as the number of characters that are tokenised in the same time."""
    options = item.options
    around = len(options.prefix) + len(options.suffix)
    return sum(len(source.text or "") + len(source.tokens or ()) + around for source in item.inputs)


def answer(tokenizer: ModelTokenizer, operation: Operation, item: WorkItemInput) -> tuple[Outcome, ...]:
    """Return one outcome for each input. Raises InvalidInput if the work item is too large for memory."""
    options = item.options
    handler = _decoded if operation == "decode" else _counted if options.parameters.get("count") else _tokenized
    most = MAX_TOLD_CHARACTERS if handler is _tokenized else MAX_CHARACTERS
    if (size := effort_of(item)) > most:
        message = f"the inputs and their prompts have {size} characters or ids, at most {most} are tokenised together"
        raise InvalidInput(message, reason="too_many_tokens", extras={"limit": most})
    return tuple(
        outcome if isinstance(outcome, Ok) else Failed(outcome.info())
        for outcome in handler(tokenizer, options, item.inputs)
    )


def _decoded(tokenizer: ModelTokenizer, options: RunOptions, inputs: Sequence[Input]) -> list[Ok | SIEError]:
    skip = bool(options.parameters.get("skip_special_tokens", True))

    def text(ids: Sequence[int]) -> Ok:
        return Ok({}, len(ids), data={"text": tokenizer.decode(ids, skip_special=skip)})

    return [_of_ids(tokenizer, source, text) for source in inputs]


def _of_ids(tokenizer: ModelTokenizer, source: Input, decode: Callable[[Sequence[int]], Ok]) -> Ok | SIEError:
    if source.tokens is None:
        return InvalidInput("expected token ids", reason="empty_item", param="tokens")
    return bad_token(tokenizer, source.tokens) or decode(source.tokens)


def _counted(tokenizer: ModelTokenizer, options: RunOptions, inputs: Sequence[Input]) -> list[Ok | SIEError]:
    special = len(tokenizer.first) + len(tokenizer.last)
    texts = [
        options.prefix + source.text + options.suffix
        for source in inputs
        if source.tokens is None and source.text is not None
    ]
    counts = (tokens.full for tokens in tokenizer.tokenise(texts, 0, "NONE"))
    around = sum(map(len, tokenizer.around(options.prefix, options.suffix))) if len(texts) < len(inputs) else 0

    def count(ids: Sequence[int]) -> Ok:
        return Ok({}, special + around + len(tokenizer.content(ids)))

    return [
        Ok({}, special + next(counts))
        if source.tokens is None and source.text is not None
        else _of_ids(tokenizer, source, count)
        for source in inputs
    ]


def _tokenized(tokenizer: ModelTokenizer, options: RunOptions, inputs: Sequence[Input]) -> list[Ok | SIEError]:
    texts = [options.prefix + source.text + options.suffix for source in inputs if source.text is not None]
    encodings = iter(
        zip(
            texts, tokenizer.whole(texts, special=bool(options.parameters.get("add_special_tokens", True))), strict=True
        )
    )
    return [
        InvalidInput("expected a text", reason="empty_item", param="text")
        if source.text is None
        else _columns(*next(encodings))
        for source in inputs
    ]


def _columns(text: str, encoding: Encoding) -> Ok:
    """Return the tokens of `text` as columns: ids, texts (for special tokens their names), and positions in bytes."""
    data: dict[str, Any] = {"ids": encoding.ids, "texts": [], "special": [], "starts": [], "stops": []}
    places = range(len(text) + 1) if text.isascii() else _byte_places(text)
    for token, (start, stop), is_special in zip(
        encoding.tokens, encoding.offsets, encoding.special_tokens_mask, strict=True
    ):
        data["texts"].append(token if is_special else text[start:stop])
        data["special"].append(bool(is_special))
        data["starts"].append(None if is_special else places[start])
        data["stops"].append(None if is_special else places[stop])
    return Ok({}, len(encoding.ids), data=data)


def _byte_places(text: str) -> list[int]:
    """Return for each code point its position in the UTF-8 text in bytes, and as the last entry the length in bytes."""
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    return list(accumulate(widths.tolist(), initial=0))
