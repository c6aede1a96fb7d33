"""Head of any transformers class such as `BertForMaskedLM`, without its backbone: it is called with hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions as ModelOutput

from sie_adapter.loading.modules import states_width
from sie_adapter.packed.linear import BlockedLinear, block_linears
from sie_contracts.models.load_errors import incompatible


class _BackbonePlaceholder(nn.Module):  # type: ignore[misc]  # the type checker skips torch
    """Placeholder for the backbone: it returns `inputs_embeds` as the last states, with their pooler output.
    `activation`: the activation after ALBERT's pooler, which is only a linear layer; None for other models.
    """

    def __init__(self, pooler: nn.Module | None, activation: nn.Module | None) -> None:
        super().__init__()
        self.pooler, self.activation = pooler, activation

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> ModelOutput:
        if self.pooler is None:
            pooled = None
        elif self.activation is None:
            pooled = self.pooler(inputs_embeds)
        else:
            pooled = self.activation(self.pooler(inputs_embeds[:, 0]))
        return ModelOutput(last_hidden_state=inputs_embeds, pooler_output=pooled)


class TransformersHead:
    def __init__(self, model: PreTrainedModel, *, in_float32: bool) -> None:
        """Split `model` into `self.backbone`, which does not pool, and this head. `in_float32` is False only for the
        large head of a masked LM, whose linear layers get blocked weights on a CPU. Raises ModelLoadFailed INCOMPATIBLE
        for a head that reads more than the states of the last layer.
        """
        self.backbone: PreTrainedModel = model.base_model
        pooler = getattr(self.backbone, "pooler", None)
        activation = getattr(self.backbone, "pooler_activation", None)
        if pooler is not None:  # the pooler moves to the head, so that it has the head's precision and runs once
            self.backbone.pooler = nn.Identity()  # not None: LayoutLM and SqueezeBERT call their pooler in each pass
        setattr(model, model.base_model_prefix, _BackbonePlaceholder(pooler, activation))
        self.is_decoder = isinstance(model, GenericForSequenceClassification)
        self.pad: int | None = model.config.pad_token_id
        if self.pad is None:  # without a pad id, a decoder refuses a batch of several sequences
            model.config.pad_token_id = 0
        self._model = model.float() if in_float32 else model
        self._in_float32 = in_float32
        if not in_float32:
            block_linears(self._model)  # copies the weight of the last layer if the backbone's embedding shares it
        # addresses of the backbone's tensors, because `memory_bytes` does not count tensors that the head shares with
        # the backbone, often the embedding
        self._shared = {parameter.data_ptr() for parameter in self.backbone.parameters()}
        try:
            self(torch.zeros(2, 3, states_width(model.config), dtype=self.backbone.dtype, device=self.backbone.device))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            cause = f"{type(model).__name__} reads more than the states of its last layer"
            raise incompatible(f"{cause}, which this adapter does not support ({error})") from error

    @property
    def memory_bytes(self) -> int:
        own = [
            int(parameter.nbytes) for parameter in self._model.parameters() if parameter.data_ptr() not in self._shared
        ]
        return sum(own) + sum(
            int(module.nbytes) for module in self._model.modules() if isinstance(module, BlockedLinear)
        )

    def __call__(self, states: Tensor) -> Tensor:
        """Return logits of `states` [sequences, length, width], all of one length, in the precision of the head."""
        inputs = states.float() if self._in_float32 else states
        logits: Tensor = self._model(inputs_embeds=inputs).logits
        return logits


def per_group(head: TransformersHead, hidden: Tensor, groups: list[list[int]]) -> Tensor:
    """Return the logits of all sequences in packed order, float32 [sequences, ..]. The head is called once for each
    length, so its input never has padding.
    """
    parts = [
        head(hidden[first : first + count * length].unflatten(0, (count, length)))
        for first, count, length, *_ in groups
    ]
    return torch.cat(parts).float()
