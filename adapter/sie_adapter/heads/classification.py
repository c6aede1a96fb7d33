"""Logits of whole sequences, of tokens, and of the answer yes or no of a decoder."""

from __future__ import annotations

import torch

from sie_adapter.heads import Reduced, States
from sie_adapter.heads.transformers_head import TransformersHead, per_group
from sie_adapter.packing import Int64


class SequenceHead:
    """Any `ForSequenceClassification`: float32 logits [labels] of each sequence."""

    def __init__(self, head: TransformersHead) -> None:
        self._head = head

    def reduce(self, states: States, sequences: Int64) -> Reduced:
        logits = per_group(self._head, states.hidden, states.packed.groups.tolist())[torch.from_numpy(sequences).to(states.hidden.device)]
        return Reduced(logits.unbind(0), torch.isfinite(logits).all(1))


class TokenHead:
    """Any `ForTokenClassification`: float32 logits [tokens, labels] of each sequence."""

    def __init__(self, head: TransformersHead) -> None:
        self._head = head

    def reduce(self, states: States, sequences: Int64) -> Reduced:
        rows = [self._head(states.hidden[None, states.span(int(sequence))])[0].float() for sequence in sequences]
        return Reduced(rows, torch.stack([torch.isfinite(row).all() for row in rows]))


class YesNoHead:
    """Logits of the answers no and yes at the last token: float32 [2]. `head` is a causal LM whose output layer has these two rows.

    Source: model cards of Qwen3-Reranker and mxbai-rerank-v2.
    """

    def __init__(self, head: TransformersHead) -> None:
        self._head = head

    def reduce(self, states: States, sequences: Int64) -> Reduced:
        last = torch.from_numpy(states.packed.bounds[1:][sequences].astype("int64") - 1).to(states.hidden.device)
        logits = self._head(states.hidden[last][:, None])[:, 0].float()
        return Reduced(logits.unbind(0), torch.isfinite(logits).all(1))
