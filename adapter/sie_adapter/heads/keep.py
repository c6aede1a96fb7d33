"""Head of a pruner: a small network computes from the state of each token whether to keep the token in the passage.

best.pt ──► two layers, detected by the shapes of its tensors ──► float32 logits [tokens] of each sequence
"""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from sie_adapter.heads import Reduced, States, all_finite
from sie_adapter.loading.checkpoint import linear
from sie_adapter.packed.packing import Int64
from sie_contracts.models.load_errors import incompatible, load_failed


class KeepHead:
    """Head of a pruner. `layers` turn states [tokens, width] to float32 logits [tokens, 1], high for tokens to keep."""

    def __init__(self, layers: nn.Module, device: torch.device) -> None:
        self._layers = layers.to(device)

    @classmethod
    def load(cls, path: Path, width: int, device: torch.device, model: str) -> KeepHead:
        """Load the layers in `path`: linear from `width` to any width, GELU, linear to width 1. No other file describes
        these layers. Raises ModelLoadFailed: NOT_FOUND without the file, INCOMPATIBLE if the tensors do not form the
        layers.
        """
        if not path.is_file():
            cause = f"{model}: {path} is missing: copy the head, best.pt, beside the weights of the reranker"
            raise load_failed("NOT_FOUND", cause)
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise incompatible(f"{model}: best.pt contains objects other than tensors") from error
        layers = _layers(tensors, width)
        if layers is None:
            content = ", ".join(sorted(map(str, tensors))[:6]) if isinstance(tensors, dict) else type(tensors).__name__
            expected = f"weight and bias of two linear layers: from {width} to N values, and from N values to 1"
            raise incompatible(f"{model}: best.pt contains {content}; expected {expected}")
        first, last = layers
        return cls(nn.Sequential(first, nn.GELU(), last), device)

    @property
    def memory_bytes(self) -> int:
        return sum(int(parameter.nbytes) for parameter in self._layers.parameters())

    def reduce(self, states: States, sequences: Int64) -> Reduced:
        """Return logits, float32 [tokens] of each sequence, special tokens included."""
        lengths = states.packed.lengths[sequences]
        chosen = torch.cat([states.hidden[states.span(int(sequence))] for sequence in sequences]).float()
        logits: Tensor = self._layers(chosen)[:, 0]
        owners = np.repeat(np.arange(len(sequences)), lengths)
        return Reduced(logits.split(lengths.tolist()), all_finite(logits, owners, len(sequences)))


def _layers(tensors: object, width: int) -> tuple[nn.Linear, nn.Linear] | None:
    """Return the two layers, the wider one first; None if the tensors do not form two fitting layers."""
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        return None
    names = [str(name).removesuffix(".weight") for name in tensors if str(name).endswith(".weight")]
    if len(names) != 2 or {*tensors} != {f"{name}.{part}" for name in names for part in ("weight", "bias")}:
        return None
    first, last = sorted(names, key=lambda name: len(tensors[f"{name}.bias"].flatten()), reverse=True)
    shapes = [tuple(tensors[f"{name}.{part}"].shape) for name in (first, last) for part in ("weight", "bias")]
    inner = shapes[1][0] if len(shapes[1]) == 1 else 0
    if shapes != [(inner, width), (inner,), (1, inner), (1,)]:
        return None
    modules = [linear(tensors[f"{name}.weight"], tensors[f"{name}.bias"]) for name in (first, last)]
    return modules[0], modules[1]
