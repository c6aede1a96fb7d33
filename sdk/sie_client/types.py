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
    """An image of PIL."""

    mode: str

    def save(self, fp: Any, format: str) -> None: ...


# a file's path, its bytes, a data URI, a file opened for reading bytes, a map of `data` (one of these) and `format`, an
# image of PIL, or pixels: uint8 [height, width] or [height, width, 3]
_File: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO"
Media: TypeAlias = "_File | Mapping[str, Any] | Picture | NDArray[np.uint8]"
# like Media, without pixels; in a map `data` may be samples, [samples] or [samples, channels], beside their
# `sample_rate`
Sound: TypeAlias = "_File | Mapping[str, Any]"


class Chunking(TypedDict, total=False):
    """Rule by which a text is cut into chunks of at most `max_tokens` tokens of the model. A chunk ends at a `boundary`
    (sentence) if one leaves it at least `min_tokens` tokens, and repeats at most `overlap_tokens` tokens of the one
    before.
    """

    max_tokens: Required[int]
    overlap_tokens: int
    boundary: Literal["sentence", "paragraph", "token"]
    min_tokens: int


# spans of a text in code points, or a rule
Chunks: TypeAlias = "Sequence[Sequence[int]] | Chunking"


class Item(TypedDict, total=False):
    """One input. `id` and `metadata` come back with the result. `multivector`: vectors [tokens, width] of a text that
    was encoded before, in place of the text. `chunks`: parts of the text that get vectors of their own; with `context`
    (True) pooled from the whole text, without it encoded alone.
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
    """Progress of a call: `done` of `total` items, or bytes of files. `total` is 0 for an iterator, whose length is not
    known. While the call waits, `cause` is a code of the server or `connection`, and `remaining_s` is how long it will
    still wait, seconds.
    """

    done: int
    total: int
    cause: str = ""
    remaining_s: float = 0.0


class CallOptions(TypedDict, total=False):
    """Options of a call. The client takes them too, as defaults for all of its calls. None, or an option that is left
    out, means the client's default.

    `gpu`: machine profile; `pool`: name of a pool; `timeout_s`: deadline of each request on the server; `headers`:
    additional headers, for example `X-Request-ID` and `traceparent`; `explain`: results say what the request waited
    for; `strict`: unknown options are errors.

    Waits: with `wait_for_capacity` False the call does not wait. Otherwise it waits `connection_budget_s` (120) for a
    server that cannot be reached, and `capacity_budget_s` (900) for a server without capacity. Both are counted from
    the last part of the call that was answered.

    Long lists are sent in parts of at most 2,048 items and about `part_tokens` (16,384) tokens, `concurrency` (8) parts
    at a time. With `hedge_after_s` a part without an answer by then is sent a second time, and the first good answer
    counts; at most one request in five is sent twice. `progress` True draws a bar, False draws none, None draws one on
    a terminal. `on_progress` is called after each part and at each wait, from the threads that send.
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
    """Parameters of every verb. A parameter that is not set has the model's default. `options` are sent unchanged.

    `on_item_error` "fail" raises if any item fails; otherwise the result of a failed item has `error`.
    """

    instruction: str | None
    truncate: str | bool | None
    max_seq_length: int | None
    profile: str | None
    lora_id: str | None
    on_item_error: Literal["slot", "fail"] | None
    options: dict[str, Any] | None


class EncodeParams(Params, total=False):
    """Parameters of encode. `muvera`: true, or its parameters. `chunks` and `context` are those of each item that has
    none of its own.
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
    """Parameters of extract: `labels` to look for, and the `threshold` of the score."""

    labels: Sequence[str] | None
    threshold: float | None
    output_schema: dict[str, Any] | None


class Usage(TypedDict):
    """Usage of a call: tokens of the model's own tokenizer, the positions of truncated items, and the number of images
    if there were any.
    """

    prompt_tokens: int
    total_tokens: int
    truncated_items: list[int]
    images: NotRequired[int]


class ItemUsage(TypedDict):
    """Usage of one item: tokens, 0 if it failed, and whether it was truncated. The tokens of all items add up to the
    usage of their call.
    """

    prompt_tokens: int
    total_tokens: int
    truncated: bool


_Result = TypeVar("_Result")
# limits of a printed value: entries of a list, entries of a map, keys of a result, characters of a text
MAX_SHOWN, MAX_SHOWN_ENTRIES, MAX_SHOWN_KEYS, MAX_SHOWN_LETTERS = 2, 4, 32, 80


class Results(list[_Result], Generic[_Result]):
    """Results of a list of items, in order. `usage` is the usage of the whole call; each result has the usage of its
    item.
    """

    def __init__(self, results: Iterable[_Result] = (), usage: Usage | None = None) -> None:
        super().__init__(results)
        self.usage: Usage = (
            usage if usage is not None else {"prompt_tokens": 0, "total_tokens": 0, "truncated_items": []}
        )

    def __repr__(self) -> str:
        return f"Results({summary(list(self))}, usage={self.usage})"


class PrintableResult(dict[str, Any]):
    """A result: a map that prints the shapes of arrays instead of their numbers."""

    def __repr__(self) -> str:
        return summary(self)


def summary(value: Any) -> str:
    """Return a value in a short form for people: shapes of arrays, the first entries of lists, and the number of
    entries of large maps.
    """
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
    """Fields about the request, which every result has. `timing`: milliseconds by stage. `headers`: response headers,
    with names in lower case.
    """

    model: str
    timing: dict[str, float]
    fingerprint: str
    request_id: str
    headers: dict[str, str]
    warnings: list[str]
    explain: list[dict[str, Any]]


class Sparse(TypedDict):
    """Sparse vector. `indices`: int32 [n], ascending. `values`: [n], above 0."""

    indices: NDArray[np.int32]
    values: NDArray[Any]


class ChunkResult(TypedDict, total=False):
    """Vectors of one chunk of a text, with its place in code points and the tokens of its text. Arrays are as in
    EncodeResult.
    """

    start: Required[int]
    end: Required[int]
    tokens: Required[int]
    dense: NDArray[Any]
    sparse: Sparse
    multivector: NDArray[Any]
    outputs: Required[dict[str, dict[str, Any]]]


class EncodeResult(Shared, total=False):
    """One result of encode, at the position of its input. `error` replaces the outputs if the item failed.

    `dense`: [width], `multivector`: [tokens, width], float32 unless the call has another `output_dtype`; arrays are
    writable. `outputs` describes each array: its dims, dtype, scale and offset. `muvera`: the parameters that `dense`
    was made with. `chunks` replaces the outputs of an item with chunks.
    """

    id: str
    metadata: dict[str, Any]
    dense: NDArray[Any]
    sparse: Sparse
    multivector: NDArray[Any]
    chunks: list[ChunkResult]
    outputs: dict[str, dict[str, Any]]
    muvera: dict[str, Any]
    usage: ItemUsage
    error: dict[str, Any]


class ScoreEntry(TypedDict, total=False):
    """Score of one item. `item_id`: its id, else `item-<position>`. `rank` begins at 0. `score` is None if the item
    failed; `error` then has the reason.
    """

    item_id: str
    score: float | None
    rank: int
    metadata: dict[str, Any]
    usage: ItemUsage
    error: dict[str, Any]


class ScoreResult(Shared, total=False):
    """Result of score. `scores`: one entry per item, best first, failed items last. `query_id`: the id of the query,
    None if it has none. `usage`: the usage of the whole call.
    """

    query_id: str | None
    usage: Usage
    scores: list[ScoreEntry]


class Ranked(TypedDict):
    """One document of a ranking: its position in the input, its score on the model's scale, and the document from the
    call.
    """

    index: int
    score: float
    document: Item | str


class ExtractResult(Shared, total=False):
    """One result of extract, at the position of its input. Lists without results are empty. `start` and `end` count
    code points.
    """

    id: str
    metadata: dict[str, Any]
    entities: list[dict[str, Any]]
    relations: list[dict[str, Any]]
    classifications: list[dict[str, Any]]
    objects: list[dict[str, Any]]
    data: dict[str, Any]
    usage: ItemUsage
    error: dict[str, Any]


class ModelFilters(TypedDict, total=False):
    """Filters of a list of models: models that do `task`, models that give `output`, models that are loaded now.
    `variants` False leaves profiles out.
    """

    task: Literal["encode", "score", "extract"] | None
    output: str | None
    loaded: bool | None
    variants: bool | None


class JobOutput(TypedDict, total=False):
    """Output of a job, see `JobOptions`."""

    url: str
    format: Literal["parquet", "jsonl", "npy"]
    sink: str
    collection: str


class JobOptions(TypedDict, total=False):
    """Options of a job beside its model and its input. An option that is left out has the server's default.

    Input: `text` (to encode or to extract from), `query` and `document` (to score) are templates over the columns of a
    row, for example `{title}\\n{body}`. `image`: a column of image files. `id`: the column of ids. `keep`: columns that
    the output repeats. `input_format`: the format of files whose names do not show it. `chunks`: a rule by which each
    text is encoded in chunks, or the column of the spans or rules of the rows; `context` as in `encode`.

    `output`: an `s3://`, `gs://` or `file:///` address for the files, or a map of `url`, `format` (parquet), `sink` and
    `collection`. Without an address the files are kept with the job, and `Job.download` fetches them.

    `params`: parameters of a request of the `operation` (encode). `windows`: times of the day, for example
    `22:00-06:00`, in `time_zone` (UTC). `deadline`: a datetime, or seconds since 1970; with `expires` no part runs
    after it. `cache`: reuse answers of earlier jobs if model, parameters and input are the same.

    `on_upload` is called during the upload of a local file, with bytes. `idempotency_key`: the same key gives the same
    job.
    """

    text: str | None
    query: str | None
    document: str | None
    image: str | None
    id: str | None
    keep: Sequence[str] | None
    chunks: Chunking | str | None
    context: bool | None
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
    """Healthy workers of one machine profile, or all healthy workers: their number, the number of their GPUs, and the
    list of workers.
    """

    worker_count: int
    gpu_count: int
    workers: list[dict[str, Any]]


class PoolOptions(TypedDict, total=False):
    """Options of a reservation beside its machine profiles. `ttl_seconds`: seconds until it ends unless it is
    renewed.
    """

    bundle: str | None
    minimum_worker_count: int | None
    ttl_seconds: int | None
    gpu_caps: dict[str, int] | None
    pinned_models: list[str] | None


class Pool(TypedDict):
    """A pool. `spec`: the specification from its creation. `status` has `state` (pending or active), `assigned_workers`
    and `expires_at`.
    """

    name: str
    spec: dict[str, Any]
    status: dict[str, Any]
