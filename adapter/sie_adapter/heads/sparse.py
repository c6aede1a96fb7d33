"""Learned sparse vectors: one weight for each id of the vocabulary that a sequence activates.

    masked-LM logits ──► max over tokens ──► activation     (SPLADE, arXiv 2109.10086)
    one weight per token ──► relu ──► max per id            (BGE-M3, arXiv 2402.03216)
    ids of a query ──► a table, no pass                     (inference-free retrievers, arXiv 2411.04403)

A row is (ids, weights): ascending unique int32 ids, strictly positive float32 weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from sie_adapter.heads import Reduced, Row, States
from sie_adapter.heads.transformers_head import TransformersHead
from sie_adapter.packing import Int64

LOGIT_BYTES = 32 << 20  # of the logits of one block of tokens: half of what any intermediate may have


class MaskedLanguageHead:
    """`w[v] = activation(max over tokens of logit[v])`; both activations grow with the logit, so the maximum comes first."""

    def __init__(self, head: TransformersHead, vocabulary: int, *, twice: bool, dropped: frozenset[int]) -> None:
        """`twice` applies log1p twice; `dropped` ids get no weight."""
        self._head, self._vocabulary, self._twice = head, vocabulary, twice
        self._dropped = sorted(dropped)

    def reduce(self, states: States, sequences: Int64) -> Reduced:
        rows: list[Row] = []
        usable: list[Tensor] = []
        block = max(1, LOGIT_BYTES // (self._vocabulary * 4))
        for part in _blocks(states.packed.lengths[sequences], block):
            chosen = sequences[part]
            if len(chosen) == 1 and states.packed.lengths[chosen[0]] > block:
                peaks = self._long(states, int(chosen[0]), block)
            else:
                peaks = self._short(states, chosen)
            usable.append(torch.isfinite(peaks).all(1))
            rows += self._activated(peaks)
        return Reduced(rows, torch.cat(usable))

    def _short(self, states: States, chosen: Int64) -> Tensor:
        spans = [states.span(int(sequence)) for sequence in chosen]
        logits = self._head(torch.cat([states.hidden[span] for span in spans])[None])[0].float()
        parts = logits.split([span.stop - span.start for span in spans])
        return torch.stack([part.amax(0) for part in parts])

    def _long(self, states: States, sequence: int, block: int) -> Tensor:
        hidden = states.hidden[states.span(sequence)]
        peaks = torch.full((1, self._vocabulary), -torch.inf, device=hidden.device)
        for piece in hidden.split(block):
            peaks = torch.maximum(peaks, self._head(piece[None])[0].float().amax(0, keepdim=True))
        return peaks

    def _activated(self, peaks: Tensor) -> list[Row]:
        weights = torch.log1p(torch.relu(peaks))
        if self._twice:
            weights = torch.log1p(weights)
        if self._dropped:
            weights[:, self._dropped] = 0
        return _rows(weights)


def _rows(weights: Tensor) -> list[Row]:
    """Each row of a matrix [rows, vocabulary] as its positive entries."""
    row, column = torch.nonzero(weights > 0, as_tuple=True)
    counts = torch.bincount(row, minlength=len(weights)).tolist()
    return list(zip(column.int().split(counts), weights[row, column].split(counts), strict=True))


def _blocks(lengths: Int64, tokens: int) -> Iterator[slice]:
    """Runs of sequences of at most `tokens` tokens together; a longer one is a run of its own."""
    start, total = 0, 0
    for index, length in enumerate(lengths.tolist()):
        if index > start and total + length > tokens:
            yield slice(start, index)
            start, total = index, 0
        total += length
    if start < len(lengths):
        yield slice(start, len(lengths))


class TokenWeightHead:
    """BGE-M3's: relu of one linear output per token, the maximum of each id, special tokens left out."""

    def __init__(self, layer: nn.Linear, vocabulary: int, dropped: frozenset[int]) -> None:
        self._layer, self._vocabulary = layer, vocabulary
        self._dropped = np.array(sorted(dropped))

    def reduce(self, states: States, sequences: Int64) -> Reduced:
        packed, device = states.packed, states.hidden.device
        weights = torch.relu(self._layer(states.hidden.float())[:, 0])
        finite = torch.isfinite(weights)
        owner = np.repeat(np.arange(len(packed.order)), packed.lengths)
        keys, place = np.unique(owner * self._vocabulary + packed.ids, return_inverse=True)
        most = torch.zeros(len(keys), device=device).scatter_reduce_(0, torch.from_numpy(place).to(device), weights, "amax")
        ids = keys % self._vocabulary
        kept = torch.from_numpy(~np.isin(ids, self._dropped)).to(device) & (most > 0)
        bounds = np.searchsorted(keys, np.arange(len(packed.order) + 1) * self._vocabulary)
        names = torch.from_numpy(ids.astype(np.int32)).to(device)
        rows, usable = [], []
        for sequence in sequences.tolist():
            here = slice(int(bounds[sequence]), int(bounds[sequence + 1]))
            rows.append((names[here][kept[here]], most[here][kept[here]]))
            usable.append(finite[states.span(sequence)].all())
        return Reduced(rows, torch.stack(usable))


class TokenTable:
    """The weights of an inference-free query: those of its distinct ids in idf.json."""

    def __init__(self, weights: Tensor) -> None:
        """`weights`: float32 [vocabulary]."""
        self._weights = weights

    def row(self, ids: Int64) -> Row:
        """(ids, weights) of a query's token ids."""
        distinct = torch.from_numpy(np.unique(ids)).to(self._weights.device)
        weights = self._weights[distinct]
        kept = weights > 0
        return distinct[kept].int(), weights[kept]
