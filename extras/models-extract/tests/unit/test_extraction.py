"""Weights of extraction models."""

from __future__ import annotations

import torch
from torch import nn

from sie_contracts.models.entries import ModelEntry
from sie_models_extract.extraction import fill


def test_a_pooler_of_another_shape_is_not_copied_because_it_is_never_run() -> None:
    model = nn.ModuleDict({"pooler": nn.Linear(2, 2), "body": nn.Linear(2, 3)})
    weights = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    fill(model, {**weights, "pooler.weight": torch.ones(5, 5)}, ModelEntry("m", {}, "gliner", {}, 8))
    assert torch.equal(model["body"].weight, torch.ones(3, 2))
