"""Parts that the model classes with token vectors share: the projection, the module for LoRAs, and a base class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sie_adapter.loading import checkpoint
from sie_contracts.media.images import ImageTokens, Recipe
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_contracts.wire.ipc import Rows


class Projected(nn.Module):  # type: ignore[misc]  # the type checker skips torch
    """Module with all layers that a LoRA may change, under the names that the LoRA's files use: the layers of a
    language model, and the projection `name`. Its forward pass projects states to token vectors.
    """

    def __init__(self, language: Any, name: str, projection: nn.Linear) -> None:
        super().__init__()
        self.layers, self._name = language.layers, name
        self.add_module(name, projection)

    def forward(self, states: Tensor) -> Tensor:
        vectors: Tensor = getattr(self, self._name)(states)
        return vectors


def tensor_names(projection: str) -> tuple[str, str]:
    return f"{projection}.weight", f"{projection}.bias"


def projection_of(folder: Path, entry: ModelEntry, name: str) -> nn.Linear:
    """Return the projection of a folder, float32. Raises ModelLoadFailed if the weights have no projection."""
    weight, bias = (checkpoint.tensor(folder, tensor) for tensor in tensor_names(name))
    if weight is None:
        raise incompatible(f"{entry.id}: the weights have no {name}.weight, which computes the token vectors")
    return checkpoint.linear(weight, bias)


class TokenVectors:
    """Base of the model classes with one vector per token. Scores are computed from these vectors."""

    output = "multivector"
    width: int

    def rows(self, images: Recipe, tokens: ImageTokens) -> dict[str, Rows]:
        return {
            "encode": Rows("text", vectors=self.width, images=images, image_tokens=tokens),
            "score": Rows("sides", vectors=self.width, images=images, image_tokens=tokens),
        }
