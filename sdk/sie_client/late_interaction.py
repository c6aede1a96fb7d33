"""Late interaction (MaxSim) on the client: scores from token vectors that were stored earlier, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sie_client.errors import invalid

# largest number of dot products that are computed at a time (16 MiB in float32); a single document may need more
_BLOCK = 1 << 22


def maxsim(query: NDArray[Any], documents: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Return the MaxSim score of each document as float32, in the order of `documents`. The score is a sum over the
    query tokens: each query token adds its largest dot product with a token of the document.

    `query`: [tokens, width]. `documents`: one matrix [tokens, width] for each document. All arrays may have floats of
    any precision. A document or a query without tokens scores 0. For a multivector model, `SIEClient.score` returns the
    same value (ColBERT, Khattab and Zaharia 2020, equation 3). Raises InvalidInputError.
    """
    left = _matrix(query, "query").astype(np.float32, copy=False)
    matrices = [_matrix(document, f"documents[{number}]") for number, document in enumerate(documents)]
    for number, matrix in enumerate(matrices):
        if matrix.shape[1] != left.shape[1]:
            message = f"documents[{number}]: expected the width of the query, {left.shape[1]}, got {matrix.shape[1]}"
            raise invalid(message)
    scores = np.zeros(len(matrices), np.float32)
    max_tokens = max(1, _BLOCK // max(1, len(left)))
    block: list[int] = []
    tokens = 0
    for number, matrix in enumerate(matrices):
        if block and tokens + len(matrix) > max_tokens:
            scores[block] = _block(left, [matrices[index] for index in block])
            block, tokens = [], 0
        if len(matrix) and len(left):
            block.append(number)
            tokens += len(matrix)
    if block:
        scores[block] = _block(left, [matrices[index] for index in block])
    return scores


def _block(query: NDArray[Any], documents: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    products = query @ np.concatenate(documents, dtype=np.float32).T  # shape [query tokens, tokens of all documents]
    starts = np.cumsum([0, *map(len, documents[:-1])])
    scores: NDArray[np.float32] = np.maximum.reduceat(products, starts, axis=1).sum(axis=0)
    return scores


def _matrix(value: Any, path: str) -> NDArray[Any]:
    array = np.asarray(value)
    if array.ndim != 2 or array.dtype.kind != "f":
        message = f"{path}: expected a matrix [tokens, width] of floats, got {array.dtype} of the shape {array.shape}"
        raise invalid(message, param=path)
    return array
