"""Types of arguments and of results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO, Generic, Literal, NotRequired, Protocol, Required, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray


class Picture(Protocol):
    """Attributes and methods of a Pillow image that the client uses."""

    mode: str

    def save(self, fp: Any, format: str) -> None: ...


# One file: its path, its bytes, a data URI, a file that is open for reading bytes, a Pillow image, or pixels as uint8
# [height, width] or [height, width, 3 or 4]. Also a map of `data` (one of these values) and `format`.
_File: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO"
Media: TypeAlias = "_File | Mapping[str, Any] | Picture | NDArray[np.uint8]"
# One file as in Media, or a map of samples: `data` [samples] or [samples, channels], and `sample_rate` in Hz.
Sound: TypeAlias = "_File | Mapping[str, Any]"


class Chunking(TypedDict, total=False):
    """Rule for cutting a text into chunks of at most `max_tokens` tokens of the model. A chunk ends at the last
    possible `boundary` (default: sentence). If the chunk would then have fewer than `min_tokens` tokens, the chunk ends
    after a smaller unit of the text, such as a word. A chunk begins with at most `overlap_tokens` tokens from the end
    of the previous chunk.
    """

    max_tokens: Required[int]
    overlap_tokens: int
    boundary: Literal["sentence", "paragraph", "token"]
    min_tokens: int


# Start and end of each chunk in code points, or a rule for cutting the text.
Chunks: TypeAlias = "Sequence[Sequence[int]] | Chunking"


class Item(TypedDict, total=False):
    """One input. `id` and `metadata` are returned with the result. `multivector`: token vectors [tokens, dimension] of
    an encoded text, sent instead of the text. `chunks`: chunks of the text, each with its own vectors. With `context`
    True (the default), the vectors of a chunk are computed from the token vectors of the whole text; with False, each
    chunk is encoded alone.
    """

    id: str
    text: str
    images: Media | Sequence[Media]
    document: Media
    audio: Sound
    video: Media
    metadata: dict[str, Any]
    multivector: NDArray[Any] | Sequence[Sequence[float]]
    chunks: Chunks
    context: bool


@dataclass(frozen=True)
class Progress:
    """Progress of a call: `done` of `total` items have an answer; for an upload or a download, both numbers are bytes.
    `total` is 0 if the number is unknown, as for an iterator. While the call waits, `cause` is an error code of the
    server or `connection`, and `remaining_s` is the number of seconds until the call fails.
    """

    done: int
    total: int
    cause: str = ""
    remaining_s: float = 0.0


class CallOptions(TypedDict, total=False):
    """Options of a call. The constructor of a client accepts the same options as defaults for its calls. None, or a
    missing option, means the client's default.

    `gpu`: machine profile of the workers. `pool`: name of a pool. `timeout_s`: deadline of each request on the server.
    `headers`: additional headers, for example `X-Request-ID` and `traceparent`. `explain`: each result describes the
    waits of its request. `strict`: the server refuses unknown options.

    Waits: with `wait_for_capacity` False the call does not wait. Otherwise it waits up to `connection_budget_s`
    (default 120, but 5 if a port of this machine refuses connections and has never answered) for the connection, and up
    to `capacity_budget_s` (default 900) for a server without capacity. After each answer to a part of the call, both
    times start again.

    Long lists are sent in parts of at most 2,048 items and about `part_tokens` (default 16,384) tokens. At most
    `concurrency` (default 8) parts are sent at a time. A part without an answer after `hedge_after_s` is sent a second
    time, and the first successful answer is used; at most about one request in five is sent twice. `progress`: True
    shows a bar, False does not; by default a bar is shown only on a terminal. `on_progress` is called after each part
    and at each wait; the blocking client calls it in the threads that send the parts.
    """

    gpu: str | None
    pool: str | None
    priority: Literal["interactive", "bulk"] | None
    timeout_s: float | None
    headers: Mapping[str, str] | None
    explain: bool | None
    strict: bool | None
    wait_for_capacity: bool | None
    connection_budget_s: float | None
    capacity_budget_s: float | None
    part_tokens: int | None
    concurrency: int | None
    hedge_after_s: float | None
    progress: bool | None
    on_progress: Callable[[Progress], None] | None


class ClientOptions(CallOptions, total=False):
    """Options of a client. `api_key` is sent as a bearer token."""

    api_key: str | None


class Params(CallOptions, total=False):
    """Parameters of encode, score and extract. A missing parameter has the model's default. `options`: further
    parameters. `on_item_error`: with "fail", the call raises if an item fails; with "slot", the result of a failed item
    has `error`, and the call raises only if all items of a request fail.
    """

    instruction: str | None
    truncate: str | bool | None
    max_seq_length: int | None
    profile: str | None
    lora_id: str | None
    on_item_error: Literal["slot", "fail"] | None
    options: dict[str, Any] | None


class EncodeParams(Params, total=False):
    """Parameters of encode. `muvera`: True, or the parameters of MUVERA, for one dense vector computed from the token
    vectors. `chunks`, `context`: defaults for items that lack these fields.
    """

    output_types: Sequence[str] | None
    output_dtype: str | None
    is_query: bool | None
    dimensions: int | None
    normalize: bool | None
    muvera: bool | dict[str, Any] | None
    chunks: Chunks | None
    context: bool | None


class ExtractParams(Params, total=False):
    """Parameters of extract. `labels`: labels to find. `threshold`: the least score of a result. `output_schema`: JSON
    Schema of the values to extract. `label_groups`: groups of labels; `data` has the best label of each group, or with
    the option `multi_label` a list of labels. `label_thresholds`: the least score of a label or a property.
    `relation_labels`: relations between the entities. `relation_threshold`: the least score of a relation.
    """

    labels: Sequence[str] | None
    threshold: float | None
    output_schema: dict[str, Any] | None
    label_groups: Mapping[str, Sequence[str]] | None
    label_thresholds: Mapping[str, float] | None
    relation_labels: Sequence[str] | None
    relation_threshold: float | None


class RedactOptions(Params, total=False):
    """Parameters of redact. `models`: up to three further models, whose findings are also replaced. `style`: what
    replaces a value: `mask` (the default), `hash`, `tag` or `synthetic`.

    `key`: secret for the style `hash`. Equal values get equal hashes in all calls with this key; without a key, only
    within one call. `region`: a country, such as `US`; its phone numbers are found also without a country code.
    `offsets`: the unit of offsets in the result. `restorable` False: the result has no `map`. `threshold`: the least
    score of an entity.
    """

    models: Sequence[str] | None
    style: Literal["mask", "hash", "tag", "synthetic"] | None
    key: str | None
    region: str | None
    offsets: Literal["code_points", "utf16"] | None
    restorable: bool | None
    threshold: float | None


class Usage(TypedDict):
    """Usage of a call: number of tokens by the model's tokenizer, indexes of the truncated items, and number of images
    if there were any. `cached_items`, `cached_tokens`: number of items with cached answers, and number of their tokens.
    """

    prompt_tokens: int
    total_tokens: int
    truncated_items: list[int]
    images: NotRequired[int]
    cached_items: NotRequired[int]
    cached_tokens: NotRequired[int]


class ItemUsage(TypedDict):
    """Usage of one item: number of tokens (0 if the item failed), and True if the item was truncated. The sum over all
    items is the usage of the call.
    """

    prompt_tokens: int
    total_tokens: int
    truncated: bool


_Result = TypeVar("_Result")
M = TypeVar("M")
# limits of a printed result: list entries, map entries, keys of the result, characters of a text
MAX_SHOWN, MAX_SHOWN_ENTRIES, MAX_SHOWN_KEYS, MAX_SHOWN_LETTERS = 2, 4, 32, 80


class Results(list[_Result], Generic[_Result]):
    """Results in the order of the items of a call. `usage`: usage of the whole call; each result has its item's
    usage.
    """

    def __init__(self, results: Iterable[_Result] = (), usage: Usage | None = None) -> None:
        super().__init__(results)
        self.usage: Usage = (
            usage if usage is not None else {"prompt_tokens": 0, "total_tokens": 0, "truncated_items": []}
        )

    def __repr__(self) -> str:
        return f"Results({summary(list(self))}, usage={self.usage})"


class PrintableResult(dict[str, Any]):
    """Result of one item. When it is printed, an array is shown by its shape, without its numbers."""

    def __repr__(self) -> str:
        return summary(self)


def summary(value: Any) -> str:
    """Return a value shortened for printing: shapes of arrays, first entries of lists, sizes of large maps."""
    if isinstance(value, np.ndarray):
        return f"<{value.dtype} {list(value.shape)}>"
    if isinstance(value, Mapping):
        if len(value) > (MAX_SHOWN_KEYS if isinstance(value, PrintableResult) else MAX_SHOWN_ENTRIES):
            return f"{{… {len(value)} entries}}"
        return f"{{{', '.join(f'{name!r}: {summary(entry)}' for name, entry in value.items())}}}"
    if isinstance(value, list):
        more = f", … {len(value)} in all" if len(value) > MAX_SHOWN else ""
        return f"[{', '.join(map(summary, value[:MAX_SHOWN]))}{more}]"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_LETTERS else f"{text[: MAX_SHOWN_LETTERS - 1]}…"


class Shared(TypedDict, total=False):
    """Fields that results of every kind may have. `timing`: milliseconds by stage of the request. `headers`: names in
    lower case.
    """

    model: str
    timing: dict[str, float]
    fingerprint: str
    request_id: str
    headers: dict[str, str]
    warnings: list[str]
    explain: list[dict[str, Any]]


class ItemReply(Shared, total=False):
    """Fields that results of one item may have."""

    id: str
    metadata: dict[str, Any]
    usage: ItemUsage
    error: dict[str, Any]


class Sparse(TypedDict):
    """Sparse vector. `indices`: int32 [n], ascending. `values`: [n], the weights at these indices, above 0."""

    indices: NDArray[np.int32]
    values: NDArray[Any]


class ChunkResult(TypedDict, total=False):
    """Vectors of one chunk, in the fields of EncodeResult. `start`, `end`: place of the chunk, in code points."""

    start: Required[int]
    end: Required[int]
    tokens: Required[int]
    dense: NDArray[Any]
    sparse: Sparse
    multivector: NDArray[Any]
    outputs: Required[dict[str, dict[str, Any]]]


class EncodeResult(ItemReply, total=False):
    """Result of encode for one item. If the item failed, it has `error` instead of vectors.

    `dense`: [dimension]. `multivector`: [tokens, dimension]. Arrays are writable, and float32 unless the call or the
    model has another `output_dtype`. `outputs` describes each array: its dimensions, its dtype, and the scale and
    offset of integer values. `muvera`: the parameters by which `dense` was computed, if the call asked for MUVERA. If
    the item has `chunks`, the vectors are in the result's `chunks`.
    """

    dense: NDArray[Any]
    sparse: Sparse
    multivector: NDArray[Any]
    chunks: list[ChunkResult]
    outputs: dict[str, dict[str, Any]]
    muvera: dict[str, Any]


class ScoreEntry(TypedDict, total=False):
    """Score of one item. `item_id`: the item's id, or `item-<position>` if it has none. `rank`: 0 for the best item.
    `score`: None if the item failed; `error` then says why.
    """

    item_id: str
    score: float | None
    rank: int
    metadata: dict[str, Any]
    usage: ItemUsage
    error: dict[str, Any]


class ScoreResult(Shared, total=False):
    """Result of score. `scores`: one entry for each item, the best first, failed items last. `query_id`: the query's
    id, or None if the query has no id. `usage` is for the whole call.
    """

    query_id: str | None
    usage: Usage
    scores: list[ScoreEntry]


class Ranked(TypedDict):
    """A document of a ranking. `index`: position of the document in the call. `score`: on the model's scale."""

    index: int
    score: float
    document: Item | str


class ExtractResult(ItemReply, total=False):
    """Result of extract for one item. Lists may be empty. `start` and `end` are positions in code points."""

    entities: list[dict[str, Any]]
    relations: list[dict[str, Any]]
    classifications: list[dict[str, Any]]
    objects: list[dict[str, Any]]
    data: dict[str, Any]


class RestoredPart(TypedDict):
    """Replaced value (`text`) and its replacement. `start` and `end`: place of the replacement in the redacted text."""

    start: int
    end: int
    replacement: str
    text: str


class RestoreMap(TypedDict):
    """Map of all replaced values, by which `restore` undoes a redaction. `length`: length of the redacted text."""

    offsets: Literal["code_points", "utf16"]
    length: int
    parts: list[RestoredPart]


class RedactResult(ItemReply, total=False):
    """Result of redact for one item. If the item failed, it has `error` instead of `text`, `spans` and `map`.

    `spans`: start, end, kind, score and source of each part that was replaced. The offsets are in the original text.
    """

    text: str
    spans: list[dict[str, Any]]
    map: RestoreMap


class SchemaResult(ItemReply, Generic[M], total=False):
    """Result of extract with a class as `schema`: `data` is an instance of the class. `entities` or `classifications`
    has an entry for each value in `data`, with its score and, if known, its offsets in the text. The label of an entry
    is the path of the value in `data`.
    """

    entities: list[dict[str, Any]]
    classifications: list[dict[str, Any]]
    data: M


class ModelFilters(TypedDict, total=False):
    """Filters for a list of models. `task`: only models that support this task. `output`: only models that return this
    output. `loaded` True: only models that are loaded now. `variants` False: no entries for profiles (`model:profile`).
    """

    task: Literal["encode", "score", "extract"] | None
    output: str | None
    loaded: bool | None
    variants: bool | None


class JobOutput(TypedDict, total=False):
    """Address and format of a job's output. The fields are explained in `JobOptions`."""

    url: str
    format: Literal["parquet", "jsonl", "npy"]
    sink: str
    collection: str


class JobOptions(TypedDict, total=False):
    """Options of a job besides its model and input. For a missing option, the server's default applies.

    Input: `text` (for encode and extract), `query` and `document` (for score) are templates with the columns of a row,
    for example `{title}\\n{body}`. `image`: the column with image files. `id`: the column with ids. `keep`: columns to
    copy to the output. `input_format`: the format of files whose names do not show it. `chunks`: a rule by which each
    text is encoded in chunks, or the column with the spans or the rule of each row. `context` False: each chunk is
    encoded alone (see `Item`). `documents`: the column with document files, whose Markdown is encoded in `chunks`;
    `parser`: the model that parses them (default: docling).

    `output`: an `s3://`, `gs://` or `file:///` URL for the output files, or a map of `url`, `format` (default:
    parquet), `sink` (a vector database that also gets the vectors: its name in the server's setting SIE_JOBS_SINKS) and
    `collection` (in this database). Without a `url` the server stores the files, and `Job.download` downloads them.

    `params`: parameters of the `operation` (default: encode). `windows`: times of the day at which the job may run, for
    example `22:00-06:00`, in `time_zone` (default: UTC). `deadline`: a datetime, or seconds since 1970. With `expires`,
    the job stops at the deadline. `cache`: keep the answers, and use answers of earlier jobs with `cache` if model,
    parameters and input are the same.

    `on_upload` is called during the upload of a local file, with the bytes sent. `idempotency_key`: a second call with
    the same key returns the first job.
    """

    text: str | None
    query: str | None
    document: str | None
    image: str | None
    id: str | None
    keep: Sequence[str] | None
    chunks: Chunking | str | None
    context: bool | None
    documents: str | None
    parser: str | None
    input_format: Literal["jsonl", "csv", "parquet", "images"] | None
    output: str | JobOutput | None
    operation: Literal["encode", "score", "extract"] | None
    params: Mapping[str, Any] | None
    name: str | None
    metadata: Mapping[str, str] | None
    pool: str | None
    machine_profile: str | None
    shard_rows: int | None
    tokens_per_s: float | None
    windows: Sequence[str] | None
    time_zone: str | None
    deadline: float | datetime | None
    expires: bool | None
    cache: bool | None
    on_upload: Callable[[Progress], None] | None
    idempotency_key: str | None


class Capacity(TypedDict):
    """Healthy workers of one or all machine profiles: their number, the number of their GPUs, and a list of them."""

    worker_count: int
    gpu_count: int
    workers: list[dict[str, Any]]


class PoolOptions(TypedDict, total=False):
    """Options of a reservation. `ttl_seconds`: seconds after which a reservation ends if it is not renewed."""

    bundle: str | None
    minimum_worker_count: int | None
    ttl_seconds: int | None
    gpu_caps: dict[str, int] | None
    pinned_models: list[str] | None


class Pool(TypedDict):
    """Pool of workers. `spec`: options. `status`: `state` (pending or active), `assigned_workers`, `expires_at`."""

    name: str
    spec: dict[str, Any]
    status: dict[str, Any]
