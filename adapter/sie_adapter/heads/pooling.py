"""Head of dense vectors: it pools packed hidden states in float32, then runs the dense layers that follow in the model.

hidden [tokens, width] ──► token layers ──► pool ──► [sequences, width] ──► layers ──► [sequences, out]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import numpy as np
import torch
from torch import Tensor, nn

from sie_adapter.engine.device import to_device
from sie_adapter.heads import Reduced, States
from sie_adapter.packed.packing import Int64, PackedBatch
from sie_contracts.errors import InvalidInput
from sie_contracts.models.entries import JOINABLE_POOLINGS, POOLINGS, Pooling, is_joinable, poolings


def pool(hidden: Tensor, packed: PackedBatch, pooling: Pooling) -> Tensor:
    """Return one float32 vector per sequence, in packed order. `hidden`: [tokens, width] of any float type.

    `mean` includes special tokens. `last` is the last token of a sequence. `weighted` is the mean with the weights 1,
    2, 3, ... (SGPT, arXiv 2202.08904). `sqrt` is the sum divided by the square root of the length.
    """
    if pooling == "cls":
        return hidden[to_device(packed.bounds[:-1], hidden.device).long()].float()
    if pooling == "last":
        return hidden[to_device(packed.bounds[1:], hidden.device).long() - 1].float()
    # CUDA has a kernel for all sequences at once. Other devices lack it, or pool each group of equal lengths faster.
    if pooling in ("mean", "max") and hidden.device.type == "cuda":
        return torch.segment_reduce(hidden.float(), pooling, offsets=to_device(packed.bounds, hidden.device).long())
    pooled = []
    for first, sequences, length, *_ in packed.groups.tolist():
        group = hidden[first : first + sequences * length].view(sequences, length, hidden.shape[1])
        if pooling == "mean":
            pooled.append(group.mean(1, dtype=torch.float32))
        elif pooling == "weighted":
            weights = torch.arange(1, length + 1, dtype=torch.float32, device=hidden.device)
            pooled.append(torch.einsum("slw,l->sw", group.float(), weights / weights.sum()))
        elif pooling == "max":
            pooled.append(group.float().amax(1))
        elif pooling == "sqrt":
            pooled.append(group.sum(1, dtype=torch.float32) / length**0.5)
        else:
            assert_never(pooling)
    return pooled[0] if len(pooled) == 1 else torch.cat(pooled)


def finite_rows(values: Tensor) -> Tensor:
    """Return for each row of `values`, [rows, width], whether all its numbers are finite: bool [rows]."""
    # 0 times NaN or infinity is NaN. This takes three operations, `torch.isfinite(values).all(1)` takes six.
    return (values * 0).sum(1) == 0


class DenseHead:
    """Head that applies `token_layers`, if set, to the hidden states, pools the result, then applies `layers`. All
    steps are in float32. `pooling`: a pooling, or several joined by `+`.
    """

    def __init__(
        self, pooling: str, layers: nn.Module | None, device: torch.device, token_layers: nn.Module | None = None
    ) -> None:
        self.pooling, self._poolings = pooling, poolings(pooling)
        self._layers = None if layers is None else layers.to(device)
        self._token_layers = None if token_layers is None else token_layers.to(device)

    @property
    def is_last_state(self) -> bool:
        """Return whether a vector is the unchanged state of the last token. Some engines compute only this state."""
        return self.pooling == "last" and self._layers is None and self._token_layers is None

    def reduce(self, states: States, sequences: Int64) -> Reduced:
        """Return vectors, float32 [width] each. Raises InvalidInput if `states` names an unknown pooling, or a
        pooling whose vectors are not as wide as those of the model's default pooling.
        """
        return self._finished(self._pooled(states, sequences))

    def parts(self, states: States, sequences: Int64) -> Reduced:
        """Return the pooled states of each segment (tokens of a chunk in one row), float32, before the dense layers.
        Raises InvalidInput for a pooling whose parts cannot be joined.
        """
        pooling = states.pooling or self.pooling
        if not is_joinable(pooling):
            message = f"the pooling is {pooling}; for chunks with context it must be {' or '.join(JOINABLE_POOLINGS)}"
            raise InvalidInput.at("chunks", message, reason="unsupported_pooling")
        pooled = self._pooled(states, sequences)
        return Reduced(pooled.unbind(0), finite_rows(pooled))

    def join(self, parts: Sequence[Sequence[Tensor]], lengths: Sequence[Int64], pooling: str) -> Sequence[Tensor]:
        """Return the vector of each chunk: the pooling over the tokens of all its segments, then the dense layers."""
        name = pooling or self.pooling
        pooled = [_joined(own, counts, name) for own, counts in zip(parts, lengths, strict=True)]
        return self._finished(torch.stack(pooled)).rows

    def _pooled(self, states: States, sequences: Int64) -> Tensor:
        parts = self._poolings if states.pooling in ("", self.pooling) else poolings(states.pooling)
        if parts is None:
            raise InvalidInput.at("pooling", f"expected one of {', '.join(POOLINGS)}")
        if len(parts) != len(self.pooling.split("+")):
            raise InvalidInput.at("pooling", f"its vectors are not as wide as those of the default, {self.pooling}")
        hidden = states.hidden if self._token_layers is None else self._token_layers(states.hidden.float())
        vectors = [pool(hidden, states.packed, part) for part in parts]
        pooled = vectors[0] if len(vectors) == 1 else torch.cat(vectors, 1)
        if len(sequences) < len(pooled):
            pooled = pooled[to_device(sequences, hidden.device)]
        return pooled

    def _finished(self, pooled: Tensor) -> Reduced:
        pooled = pooled if self._layers is None else self._layers(pooled)
        return Reduced(pooled.unbind(0), finite_rows(pooled))


def _joined(parts: Sequence[Tensor], lengths: Int64, pooling: str) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    weights = to_device(lengths.astype(np.float32), parts[0].device)
    weights = (weights / weights.sum())[:, None]
    names = pooling.split("+")
    columns = torch.stack(list(parts)).chunk(len(names), 1)
    return torch.cat(
        [(part * weights).sum(0) if name == "mean" else part.amax(0) for name, part in zip(names, columns, strict=True)]
    )
