"""The head of a transformers model without its backbone: any `For...` class, called on states that were computed
elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions as ModelOutput

from sie_adapter.packed.linear import BlockedLinear, block_linears


class _BackbonePlaceholder(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """Stands where the backbone was: hands on `inputs_embeds` as its last states, and through the pooler that the
    backbone had.
    """

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> ModelOutput:
        pooled = None if self.pooler is None else self.pooler(inputs_embeds)
        return ModelOutput(last_hidden_state=inputs_embeds, pooler_output=pooled)


class TransformersHead:
    """What `model` computes after its backbone."""

    def __init__(self, model: PreTrainedModel, *, in_float32: bool) -> None:
        """Takes the backbone out of `model`, which is of no other use from here on; `backbone` is it, without its
        pooler.
        """
        self.backbone: PreTrainedModel = model.base_model
        pooler = getattr(self.backbone, "pooler", None)
        if pooler is not None:  # it belongs to the head: in its precision, and run once
            self.backbone.pooler = None
        setattr(model, model.base_model_prefix, _BackbonePlaceholder(pooler))
        self.is_decoder = isinstance(model, GenericForSequenceClassification)
        self.pad: int | None = model.config.pad_token_id
        if (
            self.is_decoder and self.pad is None
        ):  # it would refuse more than one sequence, since it could not tell their padding
            model.config.pad_token_id = 0
        self._model = model.float() if in_float32 else model
        self._in_float32 = in_float32
        self._shared = {parameter.data_ptr() for parameter in self.backbone.parameters()}  # with an embedding, often

    @property
    def memory_bytes(self) -> int:
        """Of what is not the backbone's."""
        own = [
            int(parameter.nbytes) for parameter in self._model.parameters() if parameter.data_ptr() not in self._shared
        ]
        return sum(own) + sum(
            int(module.nbytes) for module in self._model.modules() if isinstance(module, BlockedLinear)
        )

    def block(self) -> None:
        """On a CPU: see `linear`. Pays where the head is as large as that of a language model; a tied decoder becomes a
        copy.
        """
        block_linears(self._model)

    def __call__(self, states: Tensor) -> Tensor:
        """Logits of `states` [sequences, length, width], of sequences of equal length, in the precision of the head."""
        inputs = states.float() if self._in_float32 else states
        logits: Tensor = self._model(inputs_embeds=inputs).logits
        return logits


def per_group(head: TransformersHead, hidden: Tensor, groups: list[list[int]]) -> Tensor:
    """Logits of all sequences in packed order, group by group, so that no head ever meets padding: float32 [sequences,
    ..].
    """
    parts = [
        head(hidden[first : first + count * length].unflatten(0, (count, length)))
        for first, count, length, *_ in groups
    ]
    return torch.cat(parts).float()
