"""Interface of live collections: collections of a vector database that searches and writers use while a migration
writes the vectors of a new model beside the old vectors. A side (`Side`) is the old or the new model with its vectors.

    rows ──pending(side)──► rows without a vector of their present text ──write──► the vectors of that side
                                 switch ──► searches and writers use the vectors of that side

The database stores the progress beside the vectors, so that a migration that was killed can continue. A vector is
current only if it was computed from the present text of its row. If another program changes the text, the vector is
outdated.

Methods raise the errors that `sink` defines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from sie_bulk_jobs.datasets.templates import Template
from sie_bulk_jobs.sinks.sink import Output, SparseRow

# Side of a migration: `old` is the model in use before the migration and its vectors, `new` the new model and its
# vectors
Side = Literal["old", "new"]
Vector = NDArray[np.float32] | SparseRow  # dense, a multivector with a row for each token, or sparse
SIDES: tuple[Side, Side] = ("old", "new")


def opposite(side: Side) -> Side:
    return "old" if side == "new" else "new"


@dataclass(frozen=True)
class LiveSource:
    """Names and settings of a live collection. `text`: template of a row's text. `vector`: name of the vector or of its
    column, empty for the default of the database. `id_column`: column of ids, empty for the default of the database.
    `fingerprints`: by side, a digest that identifies the side's model.
    """

    collection: str
    text: Template
    fingerprints: Mapping[Side, str]
    vector: str = ""
    id_column: str = ""

    def salt(self, side: Side) -> str:
        """Return a text that identifies the template and the model of this side. The vectors depend on these two."""
        pieces = "".join(literal + (f"{{{name}}}" if name is not None else "") for literal, name in self.text.pieces)
        return f"{self.fingerprints[side]}\0{pieces}".replace("\0", "\n")


@dataclass(frozen=True)
class LiveState:
    """State of a live collection. `dims`: width of the vectors in use, 0 if unknown. `in_use`: the side (old or new
    model) that searches use. `is_begun`: whether the database has a column or collection for vectors of the other side.
    """

    rows: int
    dims: int
    in_use: Side
    is_begun: bool
    output: Output = "dense"


@dataclass(frozen=True)
class LiveRow:
    """A row of a live collection. `columns`: values of the columns that the template names. `version`: digest of these
    values when they were read, empty if the database compares `stored` instead. A write skips a row whose values have
    changed since they were read. `stored`: the row in the form of its database.
    """

    id: str
    columns: Mapping[str, Any]
    version: bytes = b""
    stored: Any = None


@dataclass(frozen=True)
class ScannedPage:
    """Some rows of a scan. `scanned`: number of rows read. `rows`: rows without a vector of their present text."""

    scanned: int
    rows: Sequence[LiveRow]


class LiveCollection(Protocol):
    """Collection of a vector database during a migration. Every method limits the time of each attempt, repeats a call
    if another attempt may help, and raises StoreError.
    """

    async def open(self) -> LiveState:
        """Read the state, and check everything that can be checked before the first write."""

    async def begin(self, dims: int) -> None:
        """Create the column or collection for new vectors of `dims` numbers. If it exists, check it."""

    def pending(self, side: Side) -> AsyncIterator[ScannedPage]:
        """Scan all rows, and yield the rows without a vector of their present text. The marker of a row (a digest of
        text and model) proves that its vector is of the present text. If only the marker is missing or wrong, the scan
        writes the marker or yields the row too.
        """

    async def write(self, side: Side, rows: Sequence[LiveRow], vectors: Sequence[Vector] | None) -> None:
        """Write the vectors of rows. Rows that have changed since they were read stay pending. `vectors` is None for
        rows without a text: their vectors of this side are removed if this side is not in use.
        """

    async def sample(self, count: int) -> Sequence[LiveRow]:
        """Return at most `count` rows, chosen at random."""

    async def nearest(self, side: Side, vector: Vector, count: int) -> Sequence[str]:
        """Return the ids of the nearest rows by the vectors of one side, the nearest first."""

    async def build_indexes(self) -> None:
        """Index the new vectors in the same way as the old vectors."""

    async def switch(self, side: Side) -> None:
        """Let searches and writers use the vectors of this side. The vectors of the opposite side stay stored."""

    async def clean_up(self) -> None:
        """Remove the vectors that are not in use, and everything else that the migration has created."""

    async def close(self) -> None:
        """Close the connections to the store."""
