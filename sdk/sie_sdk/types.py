"""What goes in and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray


class Item(TypedDict, total=False):
    """One input. `id` and `metadata` come back with the result."""

    id: str
    text: str
    metadata: dict[str, Any]


class Params(TypedDict, total=False):
    """Parameters of every verb. Unset means the model's own. `options` are passed on as they are."""

    instruction: str | None
    truncate: str | bool | None
    max_seq_length: int | None
    profile: str | None
    lora_id: str | None
    on_item_error: str | None
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


class Shared(TypedDict, total=False):
    """What every result tells of its request. `timing`: milliseconds by stage; `usage`: of the whole request."""

    model: str
    timing: dict[str, float]
    usage: dict[str, Any]
    fingerprint: str
    request_id: str
    warnings: list[str]
    explain: list[dict[str, Any]]


class Sparse(TypedDict):
    """`indices`: int32 [n], ascending; `values`: [n], above 0."""

    indices: NDArray[np.int32]
    values: NDArray[Any]


class EncodeResult(Shared, total=False):
    """One result, at the position of its input. `error` stands in place of outputs that failed.

    `dense`: [width], `multivector`: [tokens, width], float32 unless another `output_dtype` was asked for; arrays are writable. `outputs`
    describes each: its dims, dtype, scale and offset. `muvera`: the parameters that made `dense`.
    """

    id: str
    metadata: dict[str, Any]
    dense: NDArray[Any]
    sparse: Sparse
    multivector: NDArray[Any]
    outputs: dict[str, dict[str, Any]]
    muvera: dict[str, Any]
    error: dict[str, Any]


class ScoreEntry(TypedDict, total=False):
    """One item's score. `item_id`: its id, else `item-<position>`; `rank` begins at 0; `score` is None where `error` says why."""

    item_id: str
    score: float | None
    rank: int
    metadata: dict[str, Any]
    error: dict[str, Any]


class ScoreResult(Shared, total=False):
    """`scores`: one entry per item, best first, failed ones last."""

    query_id: str
    scores: list[ScoreEntry]


class ExtractResult(Shared, total=False):
    """One result, at the position of its input; lists are empty where nothing was found. `start` and `end` count code points."""

    id: str
    metadata: dict[str, Any]
    entities: list[dict[str, Any]]
    relations: list[dict[str, Any]]
    classifications: list[dict[str, Any]]
    objects: list[dict[str, Any]]
    data: dict[str, Any]
    error: dict[str, Any]
