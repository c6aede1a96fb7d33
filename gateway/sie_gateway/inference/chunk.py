"""Split of a request into chunks. A chunk has consecutive inputs and becomes one queue message. Its cost, its message
and its result have limits.

    items, query, options ──plan──► sizes ──► upper bounds of the result sizes ──split──► chunks
                              └ too large for any message or reply: PayloadTooLarge
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from sie_contracts.errors import PayloadTooLarge
from sie_contracts.media import documents
from sie_contracts.media.images import MAX_DECODED_PIXELS
from sie_contracts.models import families
from sie_contracts.models.costs import ImageCost
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.options import TOKEN_STATES
from sie_contracts.models.output_schemas import decisions_of, parts_of, questions_of
from sie_contracts.wire import messages
from sie_contracts.wire.messages import Operation, RunOptions
from sie_gateway.inference import chunk_fields
from sie_gateway.inference.body import MAX_BODY_BYTES, RequestItem, all_plain
from sie_gateway.inference.images import pixels

# bytes of a token of English text in UTF-8: an estimate only for the split of requests; the sidecar counts the tokens
BYTES_PER_TOKEN = 4
SPECIAL_TOKENS = 2
ITEM_RESULT_OVERHEAD_BYTES = 64  # bytes of a result in addition to its values
EXTRACTED_TOKEN_BYTES = 64  # estimated bytes that an extraction returns for each token of a text
LABEL_RESULT_BYTES = 48  # bytes of a class in a result in addition to the name of the class
TOKENIZED_BYTES = 48  # bytes of a token in a result: its id, its text and its position
SPARSE_IDS_PER_TOKEN = 32  # estimated number of weights in a sparse vector for each token of a text
# options of at most this number of encoded bytes do not count in the size of a message: HEADROOM_BYTES in
# `streams/publish` reserves space for them
BARE_OPTIONS_BYTES = 64
# largest number of bytes of the inputs of a chunk whose query takes more than half of a message; the payload store
# holds the query and inputs of such a chunk
STORED_CHUNK_BYTES = 8 << 20
MAX_RESULT_BYTES = 1 << 30  # largest number of bytes of all results of a request
MAX_PIXELS = 400_000_000  # largest number of pixels in all images of a request
PIXELS_STEP = 16  # number of image headers that are read before the event loop may run other tasks


class Chunk(msgspec.Struct, frozen=True):
    """Inputs `start` to `stop - 1` of a request. `cost`: estimated tokens of all rows (token sequences) that the model
    runs for these inputs. `squares`: sum of the squared token counts of the rows.
    """

    start: int
    stop: int
    cost: int
    squares: int = 0


class ItemFiles(NamedTuple):
    """Files of an input. `images`: number of images and sounds that the model reads for the input, including the files
    of the query. `own_bytes`: bytes of the files of the input itself, without those of the query. `document`: cost of
    the input's document in tokens.
    """

    images: int = 0
    own_bytes: int = 0
    document: int = 0


class TextParts(NamedTuple):
    """Size of an input's text. `longest`: upper bound of its number of tokens. `vectors`: number of its chunks; 1 for a
    text without chunks.
    """

    longest: int
    vectors: int = 1


_NO_FILES, _IMAGE = ItemFiles(), ImageCost()
_NO_PARTS: Mapping[int, TextParts] = MappingProxyType({})


class ChunkLimits(NamedTuple):
    """Limits of one chunk: estimated tokens, bytes of its inputs in the message, bytes of its results. `any_size`: true
    if the payload store takes an input above `payload_bytes`.
    """

    cost: int
    payload_bytes: int
    result_bytes: int
    any_size: bool = False


def plan(
    items: Sequence[RequestItem],
    query: RequestItem | None,
    operation: Operation,
    entry: ModelEntry,
    run: RunOptions,
    limits: ChunkLimits,
    image: ImageCost = _IMAGE,
    *,
    name: str = "items",
    positions: Sequence[int] | None = None,
) -> tuple[list[Chunk], int]:
    """Return the chunks of a request, and the bytes of its items. `image`: cost of an image or a sound. `name`: field
    with the inputs, for errors. `positions`: indices of `items` in this field, if they are not all inputs. Raises
    PayloadTooLarge.
    """
    query_bytes = query.size if query else 0
    # `shared_bytes`: bytes that every message of the request has in addition to its inputs
    options_bytes = len(messages.encode(run))
    shared_bytes = query_bytes + (options_bytes if options_bytes > BARE_OPTIONS_BYTES else 0)
    inline_bytes = limits.payload_bytes
    payload_bytes = inline_bytes - shared_bytes
    is_query = query_bytes > shared_bytes // 2
    if payload_bytes < inline_bytes // 2:
        # The payload store can take the query, but the options are always in the message. So refuse the request if
        # there is no payload store, or if the options alone take more than half of the message.
        if not limits.any_size or shared_bytes - query_bytes > inline_bytes // 2:
            limit = inline_bytes // 2
            shared = "query" if is_query else "labels" if run.labels else "instruction"
            raise PayloadTooLarge(f"{shared}: at most {limit} bytes are allowed", param=shared, extras={"limit": limit})
        payload_bytes = STORED_CHUNK_BYTES
    item_sizes = [item.size for item in items]
    limit = MAX_BODY_BYTES if limits.any_size else payload_bytes
    if max(item_sizes, default=0) > limit:
        raise _too_large(item_sizes, limit, name, range(len(items)) if positions is None else positions)
    max_tokens = entry.max_tokens
    item_bytes, token_bytes = result_bytes(operation, entry, run)
    is_plain = all_plain(items, query)
    files = [] if is_plain else _files(items, query)
    parts = _NO_PARTS if is_plain else _chunked_parts(items, max_tokens)
    whole = TextParts(max_tokens)
    expected_bytes = item_bytes * len(item_sizes)
    for text in parts.values():
        expected_bytes += item_bytes * (text.vectors - 1)
    if token_bytes:
        expected_bytes += token_bytes * sum(
            estimated_tokens(size - own.own_bytes, parts.get(index, whole).longest)
            + own.images * image.vectors
            + own.document
            for index, (size, own) in enumerate(zip(item_sizes, files or itertools.repeat(_NO_FILES), strict=False))
        )
    if expected_bytes > MAX_RESULT_BYTES:  # the gateway keeps all results in memory until its reply is sent
        limit = MAX_RESULT_BYTES >> 20
        message = (
            f"{name}: the reply would have about {expected_bytes >> 20} MiB of results, at most {limit} are allowed: "
            "send fewer inputs"
        )
        raise PayloadTooLarge(message, param=name, extras={"limit": MAX_RESULT_BYTES})
    shared_text_bytes = shared_bytes - (query.file_bytes if query else 0)
    chunks = split(
        item_sizes,
        max_tokens=max_tokens,
        item_result_bytes=item_bytes,
        token_result_bytes=token_bytes,
        limits=limits._replace(payload_bytes=payload_bytes),
        rows=_rows(entry, run) if run.labels or run.parameters else 1,
        each_tokens=estimated_tokens(shared_text_bytes, max_tokens) if shared_text_bytes else 0,
        files=files,
        image=image,
        parts=parts,
    )
    if shared_bytes * len(chunks) > MAX_BODY_BYTES:
        shared = "query" if is_query else "instruction"
        message = (
            f"{shared}: its {shared_bytes} bytes are in each of the {len(chunks)} messages of this request; all copies "
            f"together may have at most {MAX_BODY_BYTES} bytes"
        )
        raise PayloadTooLarge(message, param=shared, extras={"limit": MAX_BODY_BYTES // len(chunks)})
    if operation in ("tokenize", "decode"):  # these operations do not use the device: a chunk costs only 1 token
        chunks = [msgspec.structs.replace(piece, cost=1, squares=0) for piece in chunks]
    return chunks, sum(item_sizes)


def _too_large(item_sizes: Sequence[int], limit: int, name: str, positions: Sequence[int]) -> PayloadTooLarge:
    """Return the error for the first item above `limit` bytes."""
    remedy = "" if limit >= MAX_BODY_BYTES else "; if SIE_PAYLOAD_STORE_URL is set, larger items are allowed"
    position, size = next(pair for pair in zip(positions, item_sizes, strict=True) if pair[1] > limit)
    message = f"{name}[{position}]: {size} bytes, one item may have at most {limit}{remedy}"
    return PayloadTooLarge(message, param=f"{name}[{position}]", extras={"limit": limit})


def _rows(entry: ModelEntry, run: RunOptions) -> int:
    """Return how many times the model reads the text of an input. A run with neither labels nor parts of an extraction
    schema reads it once. For any other run, the model's family decides: once for each question, once for each label, or
    once for each part of the schema and once more for all labels together.
    """
    parts = len(run.parameters.get("parts", ()))
    if not parts and not run.labels:
        return 1
    family = families.row(entry.family)
    if family.reads_questions:
        return len(questions_of(run))
    return len(run.labels) if run.labels and family.has_row_per_label else parts + bool(run.labels)


def _chunked_parts(items: Sequence[RequestItem], max_tokens: int) -> dict[int, TextParts]:
    """Return the TextParts of each text with chunks, by the index of its input. The model reads a text with chunks as a
    whole, even if it has more than `max_tokens` tokens.
    """
    parts = {}
    for index, item in enumerate(items):
        if item.chunks is not None:
            tokens = item.size // BYTES_PER_TOKEN + SPECIAL_TOKENS
            parts[index] = TextParts(max(max_tokens, item.size), chunk_fields.estimated_chunks(item.chunks, tokens))
    return parts


def _files(items: Sequence[RequestItem], query: RequestItem | None) -> list[ItemFiles]:
    """Return the files of each input; empty if neither inputs nor query have files. The files of the query count for
    each input, because the model reads the query with each input.
    """
    shared = len(query.files) if query else 0
    for item in items:
        if item.images or item.audio or item.document is not None:
            break
    else:
        if not shared:
            return []
    return [
        ItemFiles(
            len(item.images) + bool(item.audio) + shared,
            item.file_bytes,
            0 if item.document is None else documents.cost(len(item.document.data)),
        )
        for item in items
    ]


def estimated_tokens(size_bytes: int, max_tokens: int) -> int:
    return min(max_tokens, size_bytes // BYTES_PER_TOKEN + SPECIAL_TOKENS)


def result_bytes(operation: Operation, entry: ModelEntry, run: RunOptions) -> tuple[int, int]:
    """Return the estimated size of a result, as a pair: bytes for each input, and bytes for each token of an input."""
    if operation in ("tokenize", "decode"):
        return ITEM_RESULT_OVERHEAD_BYTES, TOKENIZED_BYTES
    if operation == "extract":
        decisions = decisions_of(parts_of(run.parameters))
        labels = [*run.labels] if "classifications" in entry.outputs else []
        labels += [label for decision in decisions for label in decision.classes]
        size = sum(len(label.encode()) + LABEL_RESULT_BYTES for label in labels)
        return ITEM_RESULT_OVERHEAD_BYTES + size, EXTRACTED_TOKEN_BYTES
    values = token_values = 0
    for name in run.outputs if operation == "encode" else ():
        if name == "dense":
            values = run.muvera.width(entry.outputs["multivector"]) if run.muvera else entry.outputs["dense"]
        else:
            width = entry.outputs["dense" if name == TOKEN_STATES else name]
            token_values += 2 * SPARSE_IDS_PER_TOKEN if name == "sparse" else width
    return ITEM_RESULT_OVERHEAD_BYTES + 4 * values, 4 * token_values


async def check_pixels(items: Sequence[RequestItem], query: RequestItem | None, name: str) -> None:
    """Raise PayloadTooLarge if the images have too many pixels in total. The time to decode an image depends on its
    pixels, and even a small file may have many pixels. An image that is too large for a worker does not count, because
    the worker rejects the image without decoding it. `name`: name of the field with the inputs.
    """
    total = 0
    files = (file for item in (*items, *filter(None, (query,))) for file in item.images)
    for number, file in enumerate(files, 1):
        count = pixels(file)
        total += count if count <= MAX_DECODED_PIXELS else 0
        if number % PIXELS_STEP == 0:
            await asyncio.sleep(0)
    if total > MAX_PIXELS:
        message = (
            f"{name}: the images have {total} pixels in all, at most {MAX_PIXELS} are allowed: send fewer images in a "
            "request"
        )
        raise PayloadTooLarge(message, param=name, extras={"limit": MAX_PIXELS})


def split(
    sizes_bytes: Sequence[int],
    *,
    max_tokens: int,
    item_result_bytes: int,
    limits: ChunkLimits,
    token_result_bytes: int = 0,
    each_tokens: int = 0,
    rows: int = 1,
    files: Sequence[ItemFiles] = (),
    image: ImageCost = _IMAGE,
    parts: Mapping[int, TextParts] = _NO_PARTS,
) -> list[Chunk]:
    """Split inputs of these sizes into chunks. Each chunk has at least one input. A chunk of several inputs is within
    the limits.

    The result of an input has at most `item_result_bytes`, plus `token_result_bytes` for each token. For this upper
    bound, each byte of the input counts as a token. `each_tokens`: number of tokens that are added to every input, for
    example the tokens of a query. Each input becomes `rows` rows of a batch. `files`: the files of each input, if there
    are any. `image`: cost of an image or a sound. `parts`: result of `_chunked_parts`.
    """
    chunks: list[Chunk] = []
    start = cost = squares = payload = result = 0
    whole = TextParts(max_tokens)
    for index, size in enumerate(sizes_bytes):
        longest, vectors = parts.get(index, whole)
        own = files[index] if files else _NO_FILES
        text, shown = size - own.own_bytes, own.images * image.tokens + own.document
        length = min(longest, text // BYTES_PER_TOKEN + SPECIAL_TOKENS + each_tokens)
        tokens = rows * length + shown
        expected = item_result_bytes * vectors + token_result_bytes * (
            min(longest, text + SPECIAL_TOKENS + each_tokens) + own.images * image.vectors + own.document
        )
        full = (
            cost + tokens > limits.cost
            or payload + size > limits.payload_bytes
            or result + expected > limits.result_bytes
        )
        if full and index > start:
            chunks.append(Chunk(start, index, cost, squares))
            start, cost, squares, payload, result = index, 0, 0, 0, 0
        cost += tokens
        squares += rows * length * min(length, max_tokens) + own.images * image.tokens * image.tokens
        payload += size
        result += expected
    if start < len(sizes_bytes):
        chunks.append(Chunk(start, len(sizes_bytes), cost, squares))
    return chunks
