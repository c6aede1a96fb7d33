"""Parameters of MUVERA, which turns a multivector into one vector (a fixed dimensional encoding). Encodings can be
compared only if their parameters are equal.
"""

from __future__ import annotations

import msgspec

from sie_contracts.errors import InvalidInput

MAX_WIDTH = 1 << 20  # maximum number of values of one encoding: 4 MiB of float32
# maximum number of values before the final projection, which needs memory for one index per value
MAX_CELLS = 1 << 23


class Muvera(msgspec.Struct, frozen=True):
    """Parameters of a fixed dimensional encoding. Source: "MUVERA: Multi-Vector Retrieval via Fixed Dimensional
    Encodings", section 2.

    Each of the `num_repetitions` repetitions divides the space of token vectors into 2 ** `num_simhash_projections`
    partitions. If `projection_dim` is None, token vectors keep their width. If `final_projection_dim` is None, the
    encoding has all values, without a final projection.
    """

    num_repetitions: int = 40
    num_simhash_projections: int = 6
    projection_dim: int | None = None
    final_projection_dim: int | None = 10240
    seed: int = 42
    normalize: bool = False
    fill_empty_partitions: bool = False

    @property
    def partitions(self) -> int:
        """Return the number of partitions in one repetition."""
        return 1 << self.num_simhash_projections

    def cells(self, dim: int) -> int:
        """Return the number of values of an encoding before the final projection, for token vectors of width `dim`."""
        return self.num_repetitions * self.partitions * (self.projection_dim or dim)

    def width(self, dim: int, path: str = "muvera") -> int:
        """Return the number of values of an encoding, for token vectors of width `dim`. Raises InvalidInput if the
        number is above MAX_WIDTH, or if the encoding has more than MAX_CELLS values before the final projection.
        """
        cells = self.cells(dim)
        if cells > MAX_CELLS:
            expected = f"repetitions * partitions * token width to be at most {MAX_CELLS}"
            raise InvalidInput.at(path, f"expected {expected}, got {cells}")
        width = self.final_projection_dim or cells
        if width > MAX_WIDTH:
            expected = f"a result of at most {MAX_WIDTH} values (final_projection_dim shortens it)"
            raise InvalidInput.at(path, f"expected {expected}, got {width}")
        return width
