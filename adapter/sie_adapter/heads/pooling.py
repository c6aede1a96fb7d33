"""Dense vectors from packed hidden states: pool in float32, cut to a width, normalise in float32.

hidden [tokens, width] ──► pool ──► [sequences, width] f32 ──► finish(width, normalize) ──► vectors, and which of them are usable
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Pooling = Literal["cls", "mean", "last"]
POOLINGS = ("cls", "mean", "last")
_EPSILON = 1e-12


def pool(hidden: Tensor, bounds: Tensor, groups: list[list[int]], pooling: Pooling) -> Tensor:
    """One float32 vector per sequence, in packed order. `mean` counts special tokens; `last` is the last token of a sequence.

    `hidden`: [tokens, width] of any float type; `bounds`: int32 [sequences + 1]; `groups`: first token, sequences, length.
    """
    if pooling == "cls":
        return hidden[bounds[:-1].long()].float()
    if pooling == "last":
        return hidden[bounds[1:].long() - 1].float()
    if hidden.device.type == "cuda":  # one kernel for all; elsewhere a view per length is faster, or all there is
        return torch.segment_reduce(hidden.float(), "mean", offsets=bounds.long())
    means = [
        hidden[first : first + sequences * length].unflatten(0, (sequences, length)).mean(1, dtype=torch.float32)
        for first, sequences, length in groups
    ]
    return torch.cat(means)


def finish(pooled: Tensor, dimensions: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Cut to `dimensions` (0 keeps all), then divide by max(norm, 1e-12). Returns float32 vectors, and which are finite and not zero."""
    cut = pooled[:, :dimensions] if dimensions else pooled
    norms = torch.linalg.vector_norm(cut, dim=1, keepdim=True)
    usable = (torch.isfinite(norms) & (norms > 0))[:, 0]
    return (cut / norms.clamp_min(_EPSILON) if normalize else cut), usable
