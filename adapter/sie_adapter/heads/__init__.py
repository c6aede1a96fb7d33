"""Heads, which turn the hidden states of a pass into one output for each sequence.

hidden [tokens, width] ──► Head.reduce ──► Reduced: one result per sequence, and whether it is finite
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie_adapter.engine.device import to_device
from sie_adapter.packed.packing import Int64, PackedBatch

# Result of a head for one sequence: a vector [width], vectors of tokens [tokens, width], a sparse vector (ids int32,
# weights float32), or logits. The tensors are float32 on the device.
Row = Any


@dataclass(frozen=True)
class States:
    """Hidden states of a pass: `hidden` [tokens, width] of any float type, in packed order. `queries` [sequences] is
    True for queries, False for documents.

    `pooling`: the pooling of the batch; empty for the model's own pooling. `inner` [sequences]: True for a segment
    (`late_chunks`) that does not contain the first token of its row; None if all sequences are whole rows.
    """

    hidden: Tensor
    packed: PackedBatch
    queries: NDArray[np.bool_]
    pooling: str = ""
    inner: NDArray[np.bool_] | None = None

    def span(self, sequence: int) -> slice:
        return slice(int(self.packed.bounds[sequence]), int(self.packed.bounds[sequence + 1]))


@dataclass(frozen=True)
class Reduced:
    """Results of a head. `rows[i]` is the result of the i-th requested sequence. `usable`: bool [sequences], on the
    device; True if all values of the result are finite.
    """

    rows: Sequence[Row]
    usable: Tensor


def all_finite(values: Tensor, owners: Int64, count: int) -> Tensor:
    """Return for each owner (a sequence) whether all of its `values` are finite: bool [count]. `values`: [entries] or
    [entries, width]. `owners` [entries]: the number of the owner of each entry, below `count`.
    """
    finite = torch.isfinite(values) if values.ndim == 1 else torch.isfinite(values).all(1)
    faults = torch.zeros(count, dtype=torch.int32, device=values.device)
    return faults.index_add_(0, to_device(owners, values.device), (~finite).int()) == 0


class Head(Protocol):
    """Layers that compute one kind of output from hidden states."""

    def reduce(self, states: States, sequences: Int64) -> Reduced: ...


@runtime_checkable
class JoiningHead(Head, Protocol):
    """Head that can compute a chunk's result from parts, one part for each segment (tokens of the chunk in one row)."""

    def parts(self, states: States, sequences: Int64) -> Reduced:
        """Return one part of a chunk's result for each sequence. Each sequence here is one segment of a chunk."""

    def join(self, parts: Sequence[Sequence[Row]], lengths: Sequence[Int64], pooling: str) -> Sequence[Row]:
        """Return the result of each chunk from its parts. `lengths`: the number of tokens of each part. `pooling`: the
        pooling that the batch requests; empty for the model's own.
        """
