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
from sie_contracts.models.entries import POOLINGS, Pooling


def pool(hidden: Tensor, packed: PackedBatch, pooling: Pooling) -> Tensor:
    """Return one float32 vector per sequence, in packed order.

    `mean` counts special tokens. `last` is the last token of a sequence. `weighted` is the mean with the weights 1, 2,
    3, ... (SGPT, arXiv 2202.08904). `hidden`: [tokens, width] of any float type.
    """
    if pooling == "cls":
        return hidden[to_device(packed.bounds[:-1], hidden.device).long()].float()
    if pooling == "last":
        return hidden[to_device(packed.bounds[1:], hidden.device).long() - 1].float()
    if (
        pooling == "mean" and hidden.device.type == "cuda"
    ):  # one kernel for all sequences; other devices do not have it, or are faster with a view per length
        return torch.segment_reduce(hidden.float(), "mean", offsets=to_device(packed.bounds, hidden.device).long())
    means = []
    for first, sequences, length, *_ in packed.groups.tolist():
        group = hidden[first : first + sequences * length].view(sequences, length, hidden.shape[1])
        if pooling == "mean":
            means.append(group.mean(1, dtype=torch.float32))
        elif pooling == "weighted":
            weights = torch.arange(1, length + 1, dtype=torch.float32, device=hidden.device)
            means.append(torch.einsum("slw,l->sw", group.float(), weights / weights.sum()))
        else:
            assert_never(pooling)
    return means[0] if len(means) == 1 else torch.cat(means)


class DenseHead:
    """Head that pools the hidden states, or the outputs of `token_layers` for them, then applies `layers`. Layers are
    float32.
    """

    def __init__(
        self, pooling: Pooling, layers: nn.Module | None, device: torch.device, token_layers: nn.Module | None = None
    ) -> None:
        self.pooling = pooling
        self._layers = None if layers is None else layers.to(device)
        self._token_layers = None if token_layers is None else token_layers.to(device)

    @property
    def is_last_state(self) -> bool:
        """True if a vector is the unchanged state of the last token."""
        return self.pooling == "last" and self._layers is None and self._token_layers is None

    def reduce(self, states: States, sequences: Int64) -> Reduced:
        """Return vectors, float32 [width] each. Raises InvalidInput for an unknown pooling of the batch."""
        return self._finished(self._pooled(states, sequences, states.pooling or self.pooling))

    def parts(self, states: States, sequences: Int64) -> Reduced:
        """Return the mean of each segment, float32 [width], before the layers. Raises InvalidInput for another
        pooling than the mean.
        """
        pooling = states.pooling or self.pooling
        if pooling != "mean":
            raise InvalidInput(
                f"chunks: the pooling is {pooling}, with context it must be the mean",
                reason="unsupported_pooling",
                param="chunks",
            )
        pooled = self._pooled(states, sequences, pooling)
        return Reduced(pooled.unbind(0), torch.isfinite(pooled).all(1))

    def join(self, parts: Sequence[Sequence[Tensor]], lengths: Sequence[Int64]) -> Sequence[Tensor]:
        """Return the vector of each chunk: the mean over the tokens of all its parts, after the layers."""
        means = [
            own[0] if len(own) == 1 else _weighted_mean(own, counts) for own, counts in zip(parts, lengths, strict=True)
        ]
        return self._finished(torch.stack(means)).rows

    def _pooled(self, states: States, sequences: Int64, pooling: str) -> Tensor:
        if pooling not in POOLINGS:
            raise InvalidInput(f"pooling: expected one of {', '.join(POOLINGS)}", reason="schema", param="pooling")
        hidden = states.hidden if self._token_layers is None else self._token_layers(states.hidden.float())
        pooled = pool(hidden, states.packed, pooling)
        if len(sequences) < len(pooled):
            pooled = pooled[to_device(sequences, hidden.device)]
        return pooled

    def _finished(self, pooled: Tensor) -> Reduced:
        vectors = pooled if self._layers is None else self._layers(pooled)
        return Reduced(vectors.unbind(0), torch.isfinite(vectors).all(1))


def _weighted_mean(means: Sequence[Tensor], counts: Int64) -> Tensor:
    weights = to_device(counts.astype(np.float32), means[0].device)
    return (weights / weights.sum()) @ torch.stack(list(means))
