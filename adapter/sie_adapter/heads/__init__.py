"""Heads turn the hidden states of a pass into what each sequence gave: one small file each.

hidden [tokens, width] ──► Head.reduce ──► a Reduced: one value per sequence, and which of them are usable
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie_adapter.engine.device import to_device
from sie_adapter.packed.packing import Int64, PackedBatch

# What one sequence gave: a vector [width], rows [tokens, width], sparse (ids int32, weights float32), or logits.
# float32 on the device.
Row = Any


@dataclass(frozen=True)
class States:
    """A pass: `hidden` [tokens, width] of any float type, in packed order. `queries` [sequences] tells queries from
    documents.

    `pooling` is the batch's own, empty for the model's.
    """

    hidden: Tensor
    packed: PackedBatch
    queries: NDArray[np.bool_]
    pooling: str = ""

    def span(self, sequence: int) -> slice:
        """The tokens of a sequence."""
        return slice(int(self.packed.bounds[sequence]), int(self.packed.bounds[sequence + 1]))

    def ids(self, sequence: int) -> Int64:
        """The token ids of a sequence."""
        return self.packed.ids[self.span(sequence)]


@dataclass(frozen=True)
class Reduced:
    """`rows[i]` belongs to the i-th of the sequences asked for; `usable` bool [sequences], on the device, says where
    all is finite.
    """

    rows: Sequence[Row]
    usable: Tensor


def all_finite(values: Tensor, owners: Int64, count: int) -> Tensor:
    """Whether all `values` [entries] or [entries, width] of each owner are finite. `owners` [entries]: below `count`.
    bool [count].
    """
    finite = torch.isfinite(values) if values.ndim == 1 else torch.isfinite(values).all(1)
    faults = torch.zeros(count, dtype=torch.int32, device=values.device)
    return faults.index_add_(0, to_device(owners, values.device), (~finite).int()) == 0


class Head(Protocol):
    """One kind of output."""

    def reduce(self, states: States, sequences: Int64) -> Reduced: ...
