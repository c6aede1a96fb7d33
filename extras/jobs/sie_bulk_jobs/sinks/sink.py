"""Interface of sinks (vector databases to which jobs write), and code that all of them use.

    rows ──SinkRows.latest──► rows with distinct ids ──Sink.upsert──► database
                                                          └── RetryPolicy: repeated if the database cannot be reached

Methods raise StoreError (another attempt may help), AccessRefused, or a class below. No message has a
credential or the contents of a row. Errors of libraries quote rows, so no exception has such an error as its cause.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie_contracts.errors import UNDECODABLE
from sie_store.object_stores import RetryPolicy, StoreError

Kind = Literal["keyword", "integer", "float", "bool"]
Output = Literal["dense", "sparse", "multivector"]
Widths = Mapping[Output, int]  # number of dimensions by output; for sparse vectors, the largest index plus 1
# ten attempts, whose pauses together are about two minutes: time for a database to restart or fail over
PATIENCE = RetryPolicy(stall_s=60.0, tries=10)
ROW_ID = "_id"  # field of a Qdrant payload with the id of the row
# at most 63 characters, because PostgreSQL would shorten a longer name
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}")


class SinkUnsuitable(StoreError):
    """Error for a server that can never store these vectors, for example because an extension is missing."""


class CollectionRefused(StoreError):
    """Error for a collection that the database cannot have under this name or with these fields."""


class CollectionMismatch(StoreError):
    """Error for a collection whose dimensions, distance, columns or vectors differ from those that are needed."""


class CollectionMissing(StoreError):
    """Error for a collection that does not exist, or that was removed after `prepare` created or checked it."""


class RowsRefused(StoreError):
    """Error for rows that the database can never store, whatever the number of attempts."""


@dataclass(frozen=True)
class SparseRow:
    """Sparse vector of a row. `indices`: dimensions of the values, in ascending order. No value is zero."""

    indices: NDArray[np.integer[Any]]
    values: NDArray[np.float32]

    @classmethod
    def from_arrays(cls, indices: NDArray[np.integer[Any]], values: NDArray[np.floating[Any]]) -> SparseRow:
        """Return the sparse vector with `values[i]` at `indices[i]`. `indices` may be unsorted. Zeros are left out."""
        order = np.argsort(indices)
        order = order[values[order] != 0]
        return cls(indices[order], values[order].astype(np.float32, copy=False))


@dataclass(frozen=True)
class SinkRows:
    """Rows to write. `vectors`: dense vectors, float32 [rows, dimensions]. `payloads`: maps whose values can be encoded
    as JSON. `multivectors`: float32 [tokens, dimensions] of each row.
    """

    ids: Sequence[str]
    vectors: NDArray[np.float32]
    payloads: Sequence[Mapping[str, Any]]
    sparse: Sequence[SparseRow] = ()
    multivectors: Sequence[NDArray[np.float32]] = ()

    def latest(self, widths: Widths) -> SinkRows:
        """Return the rows. If several rows have the same id, only the last of these rows is returned. Raises
        RowsRefused for rows that no database can store.
        """
        count, dims = len(self.ids), widths.get("dense", 0)
        if self.vectors.shape != (count, dims) or len(self.payloads) != count:
            raise RowsRefused(
                f"got {count} ids, {len(self.payloads)} payloads and vectors of shape {self.vectors.shape}, expected "
                f"{count} payloads and the shape ({count}, {dims})"
            )
        if len(self.sparse) != (count if "sparse" in widths else 0):
            raise RowsRefused(f"got {len(self.sparse)} sparse vectors for {count} rows")
        if len(self.multivectors) != (count if "multivector" in widths else 0):
            raise RowsRefused(f"got {len(self.multivectors)} multivectors for {count} rows")
        for number, rows in enumerate(self.multivectors):
            if rows.ndim != 2 or rows.shape[1] != widths["multivector"] or not len(rows):
                raise RowsRefused(
                    f"row {number} of {count} has a multivector of shape {rows.shape}, expected "
                    f"(tokens, {widths['multivector']}) with at least 1 token"
                )
        for number, row in enumerate(self.sparse):
            if row.indices.shape != row.values.shape or (len(row.indices) and row.indices[-1] >= widths["sparse"]):
                raise RowsRefused(f"row {number} of {count} has a sparse vector that is wider than {widths['sparse']}")
        finite = np.asarray(np.isfinite(self.vectors).all(axis=1))
        for vectors in ([row.values for row in self.sparse], self.multivectors):
            finite[: len(vectors)] &= np.array([np.isfinite(numbers).all() for numbers in vectors], bool)
        if not finite.all():
            raise RowsRefused(f"row {int(np.argmin(finite))} of {count} has a vector with a number that is not finite")
        last = {row_id: number for number, row_id in enumerate(self.ids)}
        if len(last) == count:
            return self
        numbers = sorted(last.values())
        return SinkRows(
            [self.ids[row] for row in numbers],
            self.vectors[numbers],
            [self.payloads[row] for row in numbers],
            [self.sparse[row] for row in numbers] if self.sparse else (),
            [self.multivectors[row] for row in numbers] if self.multivectors else (),
        )


@dataclass(frozen=True)
class NearRow:
    """A row that a search returned. `score`: cosine similarity to the query."""

    id: str
    score: float
    payload: Mapping[str, Any]


class Sink(Protocol):
    """Vector database. Methods limit the time of an attempt, repeat a failed attempt if this may help, and raise
    StoreError.
    """

    async def prepare(self, collection: str, widths: Widths, kinds: Mapping[str, Kind]) -> None:
        """Create or check the collection to which `upsert` writes. Dense vectors and multivectors have the cosine
        distance, and sparse vectors the dot product. `kinds`: kind of value of each payload field by which searches
        filter. These fields get an index if the database needs an index.
        """

    async def upsert(self, rows: SinkRows) -> None:
        """Write rows so that they survive a restart of the database. A stored row with the same id is replaced."""

    def refusals(self, rows: SinkRows) -> Mapping[int, str]:
        """Return the rows that the database can never store, as index -> reason. A job counts these rows as failed and
        leaves them out, because `upsert` would refuse all rows of the call. Only a multivector can make a row too
        large, so a database without multivectors refuses no row.
        """
        return {}

    async def search(self, collection: str, vector: NDArray[np.float32], limit: int) -> list[NearRow]:
        """Return the rows of a collection that are nearest to a vector, the nearest first. A search writes nothing."""

    async def close(self) -> None:
        """Close the connections to the database."""


def checked_name(collection: str) -> str:
    """Return `collection` if a collection may have this name. Raises CollectionRefused."""
    if not _NAME.fullmatch(collection):
        raise CollectionRefused("the name of a collection has 1 to 63 letters, digits, hyphens and underscores")
    return collection


def check_dims(dims: int, most: int, database: str) -> None:
    """Raise SinkUnsuitable unless `dims` is from 1 to `most`, the largest width of a vector in the database."""
    if not 1 <= dims <= most:
        raise SinkUnsuitable(f"a vector has {dims} numbers, but {database} takes 1 to {most}")


def payload_object(payload: str | None) -> dict[str, Any]:
    """Return a stored payload as a dict. The dict is empty if another writer has stored NULL or no JSON object."""
    try:
        value = None if payload is None else msgspec.json.decode(payload)
    except UNDECODABLE:
        return {}
    return value if isinstance(value, dict) else {}


def encoded(value: Any, number: int) -> bytes:
    """Encode a value of row `number` as JSON. Raises RowsRefused, which names the row."""
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RowsRefused(f"row {number} has a value that JSON cannot have ({type(error).__name__})") from None
