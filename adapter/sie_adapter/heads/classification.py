"""Heads for logits: of whole sequences, of each token, and of the last token of a decoder."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sie_adapter.engine.device import to_device
from sie_adapter.heads import Reduced, States, all_finite
from sie_adapter.heads.pooling import finite_rows
from sie_adapter.heads.transformers_head import TransformersHead, per_group
from sie_adapter.packed.packing import Int64


class SequenceHead:
    """Head of any `ForSequenceClassification`: float32 logits [labels] of each sequence. `width`: width of a hidden
    state. Most of these heads read only the first token, which a trial call in the constructor detects. A head that
    reads only the first token is called once for all sequences. Another head is called once for each length.
    """

    def __init__(self, head: TransformersHead, width: int, device: torch.device) -> None:
        self._head = head
        states = _trial_states(width, device)
        self._reads_first = torch.allclose(head(states), head(states[:, :1]), rtol=1e-4, atol=1e-6)

    def reduce(self, states: States, sequences: Int64) -> Reduced:
        packed, device = states.packed, states.hidden.device
        if self._reads_first:
            first = to_device(packed.bounds[:-1][sequences].astype(np.int64), device)
            logits = self._head(states.hidden[first][:, None]).float()
        else:
            logits = per_group(self._head, states.hidden, packed.groups.tolist())[to_device(sequences, device)]
        return Reduced(logits.unbind(0), finite_rows(logits))


class TokenHead:
    """Head of any `ForTokenClassification`: float32 logits [tokens, labels] of each sequence. A trial call in the
    constructor detects whether the logits of a token depend on other tokens. If they do not, the head is called once
    for the tokens of all sequences.
    """

    def __init__(self, head: TransformersHead, width: int, device: torch.device) -> None:
        self._head = head
        states = _trial_states(width, device)
        self._mixes = not torch.allclose(head(states)[:, :1], head(states[:, :1]), rtol=1e-4, atol=1e-6)

    def reduce(self, states: States, sequences: Int64) -> Reduced:
        spans = [states.span(int(sequence)) for sequence in sequences]
        if self._mixes:
            rows = [self._head(states.hidden[None, span])[0].float() for span in spans]
        else:
            logits = self._head(states.hidden[None])[0].float()
            rows = [logits[span] for span in spans]
        owners = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        return Reduced(rows, all_finite(torch.cat(rows), owners, len(rows)))


def _trial_states(width: int, device: torch.device) -> Tensor:
    return torch.randn(2, 3, width, generator=torch.Generator().manual_seed(0)).to(device)


class LastTokenHead:
    """Head of a decoder, applied to the last token of each sequence: float32 logits [labels]. If `pad` is set, the head
    reads the last token whose id is not `pad`.

    Sources: transformers' GenericForSequenceClassification, which detects padding only by the id; model cards of
    Qwen3-Reranker and mxbai-rerank-v2, whose labels are the answers no and yes.
    """

    def __init__(self, head: Callable[[Tensor], Tensor], pad: int | None = None) -> None:
        self._head, self._pad = head, pad

    def reduce(self, states: States, sequences: Int64) -> Reduced:
        starts, ends = states.packed.bounds[:-1], states.packed.bounds[1:]
        last = ends - 1
        if self._pad is not None:
            places = np.where(states.packed.ids != self._pad, np.arange(ends[-1]), 0)
            last = np.maximum(np.maximum.reduceat(places, starts), starts)
        chosen = to_device(last[sequences].astype(np.int64), states.hidden.device)
        logits = self._head(states.hidden[chosen][:, None]).float().flatten(1)
        return Reduced(logits.unbind(0), finite_rows(logits))
