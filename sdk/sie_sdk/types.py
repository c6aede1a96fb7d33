"""What goes in and what comes out."""

from __future__ import annotations

from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray


class Item(TypedDict, total=False):
    """One input. `id` and `metadata` come back with the result."""

    id: str
    text: str
    metadata: dict[str, Any]


class EncodeParams(TypedDict, total=False):
    """Parameters of encode. Unset means the model's own."""

    output_types: list[str] | None
    instruction: str | None
    is_query: bool | None
    dimensions: int | None
    normalize: bool | None
    truncate: str | None
    options: dict[str, Any] | None


class EncodeResult(TypedDict, total=False):
    """One result, at the position of its input. `dense`: float32 [width], writable. `error` stands in place of an output that failed.

    `timing`: milliseconds by stage. `usage` is that of the whole request.
    """

    id: str
    metadata: dict[str, Any]
    dense: NDArray[np.float32]
    error: dict[str, Any]
    timing: dict[str, float]
    usage: dict[str, Any]
    fingerprint: str
    model: str
    request_id: str
