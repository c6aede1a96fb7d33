"""Kinds of vectors: how `sie eval` requests and compares them, and how many bytes an index needs for one vector.

names: dense │ float16 │ int8 │ binary │ binary+rescore │ dims=N
       sparse │ multivector │ muvera │ chunks=N │ chunks=N+context
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sie_cli.refusal import CommandRefused
from sie_client import maxsim

Matrix = NDArray[np.float32]
# number of documents that `binary+rescore` selects by Hamming distance to a query and sorts by a finer similarity;
# 4 x quality.DEPTH
RESCORED = 400


@dataclass(frozen=True)
class VectorOutput:
    """One kind of vectors. `documents`, `queries`: parameters of SIEClient.encode for texts that are documents, and for
    texts that are queries. `slot`: key of the vector in the result of one text. `similar`: function from the vectors of
    queries and of documents to an array of similarities [queries, documents]; a higher number means a nearer document.
    The vector of a document that is encoded in chunks is an array with one row for each chunk.
    """

    name: str
    documents: Mapping[str, Any]
    queries: Mapping[str, Any]
    similar: Callable[[Sequence[Any], Sequence[Any]], Matrix]
    slot: str = "dense"

    def vector(self, result: Mapping[str, Any]) -> Any:
        if "chunks" in result:
            return np.stack([chunk[self.slot] for chunk in result["chunks"]])
        return result[self.slot]

    def size(self, document: Any) -> int:
        if isinstance(document, Mapping):
            return sum(np.asarray(array).nbytes for array in document.values())
        return int(np.asarray(document).nbytes)


def find(name: str) -> VectorOutput:
    """Return the kind of vectors with this name. Raises CommandRefused for an unknown name, and lists all names."""
    if output := _KNOWN.get(name):
        return output
    if dims := re.fullmatch(r"dims=([1-9][0-9]{0,4})", name):
        parameters = {**_dense("float32"), "dimensions": int(dims[1])}
        return VectorOutput(name, parameters, parameters, cosine)
    if chunks := re.fullmatch(r"chunks=([1-9][0-9]{0,4})(\+context)?", name):
        cut = {"chunks": {"max_tokens": int(chunks[1])}, "context": chunks[2] is not None}
        return VectorOutput(name, {**_FLOATS, **cut}, _FLOATS, _nearest_chunk)
    raise CommandRefused(f"--outputs: there is no output {name[:100]}: expected some of {', '.join(NAMES)}")


def cosine(queries: Sequence[Any], documents: Sequence[Any] | NDArray[Any]) -> Matrix:
    return unit(np.asarray(queries, np.float32)) @ unit(np.asarray(documents, np.float32)).T


def unit(rows: NDArray[Any]) -> Matrix:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1), np.float32)


def _nearest_chunk(queries: Sequence[Any], documents: Sequence[Any]) -> Matrix:
    """Return the similarity of each query with the nearest chunk of each document, [queries, documents]."""
    starts = np.cumsum([0, *(len(chunks) for chunks in documents[:-1])])
    return np.asarray(np.maximum.reduceat(cosine(queries, np.concatenate(documents)), starts, axis=1), np.float32)


def _products(queries: Sequence[Any], documents: Sequence[Any]) -> Matrix:
    return np.asarray(queries, np.float32) @ np.asarray(documents, np.float32).T


def _hamming(queries: Sequence[Any], documents: Sequence[Any]) -> Matrix:
    """Return, for each query and document, the number of equal bits minus the number of different bits. It equals the
    dot product if each bit is written as -1 or 1.
    """
    return _signs(queries) @ _signs(documents).T


def _rescored(queries: Sequence[Any], documents: Sequence[Any]) -> Matrix:
    """Return similarities [queries, documents]. First select the RESCORED documents nearest to a query by Hamming
    distance. The similarity of a selected document is the dot product of the query's floats and the document's bits,
    written as -1 and 1. The similarity of all other documents is -inf.

    Source: Yamada, Asai and Hajishirzi 2021, "Efficient Passage Retrieval with Hashing for Open-domain Question
    Answering", section 3.2.
    """
    signs, asking = _signs(documents), np.asarray(queries, np.float32)
    near = np.where(asking > 0, np.float32(1), np.float32(-1)) @ signs.T
    scores = asking @ signs.T
    if len(documents) > RESCORED:
        least = -np.partition(-near, RESCORED - 1, axis=1)[:, RESCORED - 1 : RESCORED]
        scores[near < least] = -np.inf
    return scores


def _sparse(queries: Sequence[Any], documents: Sequence[Any]) -> Matrix:
    width = 1 + max(int(np.max(vector["indices"], initial=0)) for vector in [*queries, *documents])
    return np.asarray((_rows(queries, width) @ _rows(documents, width).T).todense(), np.float32)


def _maxsim(queries: Sequence[Any], documents: Sequence[Any]) -> Matrix:
    return np.stack([maxsim(query, list(documents)) for query in queries])


def _signs(rows: Sequence[Any]) -> Matrix:
    return np.unpackbits(np.stack(rows).view(np.uint8), axis=1).astype(np.float32) * 2 - 1


def _rows(vectors: Sequence[Any], width: int) -> Any:
    from scipy.sparse import csr_array

    ends = np.cumsum([0, *(len(vector["indices"]) for vector in vectors)])
    places = np.concatenate([vector["indices"] for vector in vectors])
    return csr_array(
        (np.concatenate([vector["values"] for vector in vectors]), places, ends), shape=(len(vectors), width)
    )


def _dense(dtype: str) -> dict[str, Any]:
    return {"output_types": ["dense"], "output_dtype": dtype}


_FLOATS = _dense("float32")
_TOKENS = {"output_types": ["multivector"], "output_dtype": "float32"}
_WEIGHTS = {"output_types": ["sparse"], "output_dtype": "float32"}
_FIXED = {**_FLOATS, "muvera": True}
DENSE = VectorOutput("dense", _FLOATS, _FLOATS, cosine)
_KNOWN: Mapping[str, VectorOutput] = {
    output.name: output
    for output in (
        DENSE,
        VectorOutput("float16", _dense("float16"), _FLOATS, cosine),
        VectorOutput("int8", _dense("int8"), _dense("int8"), cosine),
        VectorOutput("binary", _dense("binary"), _dense("binary"), _hamming),
        VectorOutput("binary+rescore", _dense("binary"), _FLOATS, _rescored),
        VectorOutput("sparse", _WEIGHTS, _WEIGHTS, _sparse, "sparse"),
        VectorOutput("multivector", _TOKENS, _TOKENS, _maxsim, "multivector"),
        VectorOutput("muvera", _FIXED, _FIXED, _products),
    )
}
NAMES = (*_KNOWN, "dims=N", "chunks=N", "chunks=N+context")
