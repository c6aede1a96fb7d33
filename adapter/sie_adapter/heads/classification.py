"""Logits of whole sequences, of tokens, and of the last token of a decoder."""

from __future__ import annotations

import numpy as np
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


class LastTokenHead:
    """What a decoder says at the last token of each sequence: float32 logits [labels]. With `pad` it is the last one of another id.

    Sources: transformers' GenericForSequenceClassification, which has no other sign of padding than the id; model cards of Qwen3-Reranker
    and mxbai-rerank-v2, whose labels are the answers no and yes.
    """

    def __init__(self, head: TransformersHead, pad: int | None = None) -> None:
        self._head, self._pad = head, pad

    def reduce(self, states: States, sequences: Int64) -> Reduced:
        starts, ends = states.packed.bounds[:-1], states.packed.bounds[1:]
        last = ends - 1
        if self._pad is not None:
            places = np.where(states.packed.ids != self._pad, np.arange(ends[-1]), 0)
            last = np.maximum(np.maximum.reduceat(places, starts), starts)
        chosen = torch.from_numpy(last[sequences].astype(np.int64)).to(states.hidden.device)
        logits = self._head(states.hidden[chosen][:, None]).float().flatten(1)
        return Reduced(logits.unbind(0), torch.isfinite(logits).all(1))
