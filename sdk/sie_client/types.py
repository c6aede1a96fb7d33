"""Types of arguments and of results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO, Generic, Literal, NotRequired, Protocol, TypeAlias, TypedDict, TypeVar

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
# the same without pixels; in a map `data` may be samples, [samples] or [samples, channels], beside their `sample_rate`
Sound: TypeAlias = "_File | Mapping[str, Any]"


class Item(TypedDict, total=False):
    """One input. `id` and `metadata` come back with the result. `multivector`: [tokens, width], of a text that was
    encoded before.
    """

    id: str
    text: str
    images: Media | Sequence[Media]
    document: Media
    audio: Sound
    video: Media
    metadata: dict[str, Any]
    multivector: NDArray[Any] | Sequence[Sequence[float]]


@dataclass(frozen=True)
class Progress:
    """How far a call has come: `done` of `total` items, or bytes of files. While it waits `cause` is a code of the
    server or `connection`, and `remaining_s` how long it will go on waiting for that. `total` is 0 of an
    iterator, whose length is not known.
    """

    done: int
    total: int
    cause: str = ""
    remaining_s: float = 0.0


class CallOptions(TypedDict, total=False):
    """How a call is sent. Each may be given to the client too, for all of its calls; None and what is left out mean the
    client's.

    `gpu`: machine profile; `pool`: name of a pool; `timeout_s`: deadline of each request at the server; `headers`:
    further ones, such as `X-Request-ID` and `traceparent`; `explain`: results say what the request waited for;
    `strict`: unknown options are errors.

    Patience: nothing is waited for if `wait_for_capacity` is False, else `connection_budget_s` (120) for a server that
    is not there and `capacity_budget_s` (900) for one that has no capacity, counted from the last part of the call that
    was answered.

    Long lists are sent in parts of at most 2,048 items and about `part_tokens` (16,384) tokens, `concurrency` (8) at a
    time. With `hedge_after_s` a part that is not answered by then is sent a second time, and the first good answer
    counts; at most one request in five is. `progress` True draws a bar, False none, None one on a terminal;
    `on_progress` is called after each part and at each wait, from the threads that send.
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
    """Parameters of every verb. Unset means the model's own. `options` are passed on as they are.

    `on_item_error` "fail" raises when any item fails; else such an item's result carries `error`.
    """

    instruction: str | None
    truncate: str | bool | None
    max_seq_length: int | None
    profile: str | None
    lora_id: str | None
    on_item_error: Literal["slot", "fail"] | None
    options: dict[str, Any] | None


class EncodeParams(Params, total=False):
    """Parameters of encode. `muvera`: true, or its parameters."""

    output_types: Sequence[str] | None
    output_dtype: str | None
    is_query: bool | None
    dimensions: int | None
    normalize: bool | None
    muvera: bool | dict[str, Any] | None


class ExtractParams(Params, total=False):
    """Parameters of extract: what to look for, and how sure to be."""

    labels: Sequence[str] | None
    threshold: float | None
    output_schema: dict[str, Any] | None


class Usage(TypedDict):
    """Tokens of a call, by the model's own tokenizer; positions of the items that were cut; number of images, if there
    were any.
    """

    prompt_tokens: int
    total_tokens: int
    truncated_items: list[int]
    images: NotRequired[int]


class ItemUsage(TypedDict):
    """Tokens of one item, 0 where it failed, and whether it was cut. Those of all items add up to the usage of their
    call.
    """

    prompt_tokens: int
    total_tokens: int
    truncated: bool


_Result = TypeVar("_Result")
# of what is printed: entries of a list and of a map, keys of a result, letters of a text
MAX_SHOWN, MAX_SHOWN_ENTRIES, MAX_SHOWN_KEYS, MAX_SHOWN_LETTERS = 2, 4, 32, 80


class Results(list[_Result], Generic[_Result]):
    """The results of a list of items, in their order. `usage` is that of the whole call, where each result has its
    item's.
    """

    def __init__(self, results: Iterable[_Result] = (), usage: Usage | None = None) -> None:
        super().__init__(results)
        self.usage: Usage = (
            usage if usage is not None else {"prompt_tokens": 0, "total_tokens": 0, "truncated_items": []}
        )

    def __repr__(self) -> str:
        return f"Results({summary(list(self))}, usage={self.usage})"


class PrintableResult(dict[str, Any]):
    """A result: a map that prints shapes in place of numbers."""

    def __repr__(self) -> str:
        return summary(self)


def summary(value: Any) -> str:
    """A value as people read it: shapes of arrays, the first entries of lists, and the number of entries of
    large maps.
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
    """Fields of every result about its request. `timing`: milliseconds by stage; `headers`: in lower case."""

    model: str
    timing: dict[str, float]
    fingerprint: str
    request_id: str
    headers: dict[str, str]
    warnings: list[str]
    explain: list[dict[str, Any]]


class Sparse(TypedDict):
    """`indices`: int32 [n], ascending; `values`: [n], above 0."""

    indices: NDArray[np.int32]
    values: NDArray[Any]


class EncodeResult(Shared, total=False):
    """One result, at the position of its input. `error` stands in place of outputs that failed.

    `dense`: [width], `multivector`: [tokens, width], float32 unless another `output_dtype` was asked for; arrays are
    writable. `outputs` describes each: its dims, dtype, scale and offset. `muvera`: the parameters that made `dense`.
    """

    id: str
    metadata: dict[str, Any]
    dense: NDArray[Any]
    sparse: Sparse
    multivector: NDArray[Any]
    outputs: dict[str, dict[str, Any]]
    muvera: dict[str, Any]
    usage: ItemUsage
    error: dict[str, Any]


class ScoreEntry(TypedDict, total=False):
    """One item's score. `item_id`: its id, else `item-<position>`; `rank` begins at 0; `score` is None where `error`
    says why.
    """

    item_id: str
    score: float | None
    rank: int
    metadata: dict[str, Any]
    usage: ItemUsage
    error: dict[str, Any]


class ScoreResult(Shared, total=False):
    """`scores`: one entry per item, best first, failed ones last. `query_id`: that of the query, None where it has
    none. `usage`: of the whole call.
    """

    query_id: str | None
    usage: Usage
    scores: list[ScoreEntry]


class Ranked(TypedDict):
    """One document of a ranking: its position in the input, its score on the model's scale, and the document as it was
    given.
    """

    index: int
    score: float
    document: Item | str


class ExtractResult(Shared, total=False):
    """One result, at the position of its input; lists are empty where nothing was found. `start` and `end` count code
    points.
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
    """Filters of a list of models: those that do `task`, give `output`, are loaded now; `variants` False leaves
    profiles out.
    """

    task: Literal["encode", "score", "extract"] | None
    output: str | None
    loaded: bool | None
    variants: bool | None


class JobOutput(TypedDict, total=False):
    """Output of a job: see `JobOptions`."""

    url: str
    format: Literal["parquet", "jsonl", "npy"]
    sink: str
    collection: str


class JobOptions(TypedDict, total=False):
    """Options of a job beside its model and its input. The server's default replaces an option that is left out.

    Of the input: `text` (to encode or to extract from), `query` and `document` (to score) are templates over the
    columns of a row, such as `{title}\\n{body}`; `image`: a column of image files; `id`: the column of ids; `keep`:
    columns that the output repeats; `input_format`: of files whose names do not tell it.

    `output`: an `s3://`, `gs://` or `file:///` address for the files, or a map of `url`, `format` (parquet), `sink` and
    `collection`. Without an address the files are kept with the job, and `Job.download` fetches them.

    `params`: those of a request of the `operation` (encode). `windows`: times of the day such as `22:00-06:00`, in
    `time_zone` (UTC). `deadline`: a moment, or seconds since 1970; with `expires` nothing runs after it. `cache`: take
    answers of earlier jobs where model, parameters and input are the same.

    `on_upload` is called as a local file is sent, with bytes. `idempotency_key`: the same key gives the same job.
    """

    text: str | None
    query: str | None
    document: str | None
    image: str | None
    id: str | None
    keep: Sequence[str] | None
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
    """Healthy workers of one machine profile, or of all: how many, with how many GPUs, and each of them."""

    worker_count: int
    gpu_count: int
    workers: list[dict[str, Any]]


class PoolOptions(TypedDict, total=False):
    """Options of a reservation beside its machine profiles. `ttl_seconds`: how long it lives without being renewed."""

    bundle: str | None
    minimum_worker_count: int | None
    ttl_seconds: int | None
    gpu_caps: dict[str, int] | None
    pinned_models: list[str] | None


class Pool(TypedDict):
    """A pool: `spec` as it was asked for, `status` with `state` (pending or active), `assigned_workers` and
    `expires_at`.
    """

    name: str
    spec: dict[str, Any]
    status: dict[str, Any]
