"""Heads for learned sparse vectors, which give some ids of the vocabulary a positive weight.

    masked-LM logits ──► max over tokens ──► activation     (SPLADE, arXiv 2109.10086)
    one weight per token ──► relu ──► max per id            (BGE-M3, arXiv 2402.03216)
    ids of a query ──► a table, no pass                     (inference-free retrievers, arXiv 2411.04403)

A row is (ids, weights): ascending unique int32 ids, strictly positive float32 weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from sie_adapter.engine.device import to_device
from sie_adapter.heads import Reduced, Row, States, all_finite
from sie_adapter.heads.pooling import finite_rows
from sie_adapter.heads.transformers_head import TransformersHead
from sie_adapter.packed.packing import Int64

# largest number of bytes of the float32 logits, or states, that are computed at a time
BLOCK_BYTES = 30_000_000


class MaskedLanguageHead:
    """Head of SPLADE: `w[v] = activation(max over tokens of logit[v])`, where v is an id of the vocabulary. The
    activation is monotonic, so applying it to the maximum gives the maximum of the activations. With `sums`:
    `w[v] = sum over tokens of activation(logit[v])` (SPLADE v1).
    """

    def __init__(
        self,
        head: TransformersHead,
        vocabulary: int,
        device: torch.device,
        *,
        twice: bool,
        dropped: frozenset[int],
        max_entries: int = 0,
        sums: bool = False,
    ) -> None:
        """`twice`: the activation is log1p(log1p(relu(x))) instead of log1p(relu(x)). `dropped`: ids without a weight.
        `max_entries`: largest number of weights in a row; a row keeps the largest weights. 0 means no limit.
        """
        self._head, self._vocabulary, self._twice, self._max_entries = head, vocabulary, twice, max_entries
        self._sums = sums
        self._dropped = torch.tensor(sorted(dropped), dtype=torch.int64, device=device)

    def reduce(self, states: States, sequences: Int64) -> Reduced:
        return self._reduced(states, sequences, self._max_entries)

    def parts(self, states: States, sequences: Int64) -> Reduced:
        # with `sums`, an id with small weights in all parts can have a large sum, so only `join` drops small weights
        return self._reduced(states, sequences, 0 if self._sums else self._max_entries)

    def join(self, parts: Sequence[Sequence[Row]], lengths: Sequence[Int64], pooling: str) -> Sequence[Row]:
        """Return the sparse vector of each chunk: the largest weight of each id in the parts, or with `sums` the sum of
        the id's weights. Only the `max_entries` largest of these weights are returned; 0 means all.
        """
        return [_joined(own, "sum" if self._sums else "amax", self._max_entries) for own in parts]

    def _reduced(self, states: States, sequences: Int64, max_entries: int) -> Reduced:
        rows: list[Row] = []
        usable: list[Tensor] = []
        waiting: list[Tensor] = []
        block = max(1, BLOCK_BYTES // (self._vocabulary * 4))
        # on a GPU, counting entries waits for the device, so one call counts the entries of many rows; a CPU counts the
        # entries of each block, while the block's rows are in its cache
        most = 1 if states.hidden.device.type == "cpu" else _rows_at_once(self._vocabulary)
        for part in _blocks(states.packed.lengths[sequences], block):
            chosen = sequences[part]
            if len(chosen) == 1 and states.packed.lengths[chosen[0]] > block:
                peaks = self._long(states, int(chosen[0]), block)
            else:
                peaks = self._short(states, chosen)
            usable.append(finite_rows(peaks))
            waiting.append(peaks)
            if sum(map(len, waiting)) >= most:
                rows += self._activated(torch.cat(waiting), max_entries)
                waiting = []
        if waiting:
            rows += self._activated(torch.cat(waiting), max_entries)
        return Reduced(rows, torch.cat(usable))

    def _short(self, states: States, chosen: Int64) -> Tensor:
        spans = [states.span(int(sequence)) for sequence in chosen]
        logits = self._head(torch.cat([states.hidden[span] for span in spans])[None])[0].float()
        if self._sums:
            logits = self._activated_logits(logits)
        lengths = [span.stop - span.start for span in spans]
        if logits.device.type == "cuda":  # on a GPU, one kernel for all sequences is faster than one per sequence
            offsets = to_device(np.cumsum([0, *lengths]), logits.device)
            return torch.segment_reduce(logits, "sum" if self._sums else "max", offsets=offsets)
        parts = logits.split(lengths)
        return torch.stack([part.sum(0) if self._sums else part.amax(0) for part in parts])

    def _long(self, states: States, sequence: int, block: int) -> Tensor:
        hidden = states.hidden[states.span(sequence)]
        peaks = torch.full((1, self._vocabulary), 0.0 if self._sums else -torch.inf, device=hidden.device)
        for piece in hidden.split(block):
            logits = self._head(piece[None])[0].float()
            if self._sums:
                peaks += self._activated_logits(logits).sum(0, keepdim=True)
            else:
                peaks = torch.maximum(peaks, logits.amax(0, keepdim=True))
        return peaks

    def _activated_logits(self, logits: Tensor) -> Tensor:
        weights = logits.relu_().log1p_()
        return weights.log1p_() if self._twice else weights

    def _activated(self, peaks: Tensor, max_entries: int) -> list[Row]:
        """Return a sparse row for each sequence. `peaks` [sequences, vocabulary]: the largest logit of each id, or with
        `sums` the sum of the id's weights. If `max_entries` is not 0, a row has only the `max_entries` largest weights.
        """
        weights = peaks if self._sums else self._activated_logits(peaks)
        weights.index_fill_(1, self._dropped, 0.0)
        if 0 < max_entries < self._vocabulary:
            largest = weights.topk(max_entries, dim=1)
            weights = torch.zeros_like(weights).scatter_(1, largest.indices, largest.values)
        return [row for part in weights.split(_rows_at_once(self._vocabulary)) for row in _rows(part)]


def _rows_at_once(vocabulary: int) -> int:
    """Return the number of rows for one call of `torch.nonzero`. The call returns two int64 (16 bytes) per nonzero
    entry, and the result may have up to twice BLOCK_BYTES.
    """
    return max(1, 2 * BLOCK_BYTES // (16 * vocabulary))


def _rows(weights: Tensor) -> list[Row]:
    row, column = torch.nonzero(weights > 0, as_tuple=True)
    counts = torch.bincount(row, minlength=len(weights)).tolist()
    return list(zip(column.int().split(counts), weights[row, column].split(counts), strict=True))


def _blocks(lengths: Int64, tokens: int) -> Iterator[slice]:
    """Yield ranges of consecutive sequences with at most `tokens` tokens in total. A sequence with more tokens is alone
    in its range.
    """
    start, total = 0, 0
    for index, length in enumerate(lengths.tolist()):
        if index > start and total + length > tokens:
            yield slice(start, index)
            start, total = index, 0
        total += length
    if start < len(lengths):
        yield slice(start, len(lengths))


class TokenWeightHead:
    """Head of BGE-M3: relu of a linear output per token, then the maximum for each id. `dropped` ids get no weight."""

    def __init__(self, layer: nn.Linear, vocabulary: int, dropped: frozenset[int]) -> None:
        self._layer, self._vocabulary = layer, vocabulary
        self._dropped = np.array(sorted(dropped), np.int64)

    def reduce(self, states: States, sequences: Int64) -> Reduced:
        packed, device = states.packed, states.hidden.device
        count = len(packed.order)
        step = max(1, BLOCK_BYTES // (4 * states.hidden.shape[1]))
        weights = torch.cat([torch.relu(self._layer(part.float())[:, 0]) for part in states.hidden.split(step)])
        owners = np.repeat(np.arange(count), packed.lengths)
        keys, place = np.unique(owners * self._vocabulary + packed.ids, return_inverse=True)
        key_owners, ids = np.divmod(keys, self._vocabulary)
        most = torch.zeros(len(keys), device=device).scatter_reduce_(0, to_device(place, device), weights, "amax")
        first = to_device(np.searchsorted(key_owners, np.arange(count)), device)
        positions = torch.nonzero((most > 0) & to_device(~np.isin(ids, self._dropped), device))[:, 0]
        ends = torch.searchsorted(positions, first).tolist()[1:]
        names = to_device(ids.astype(np.int32), device)[positions]
        rows = list(zip(names.tensor_split(ends), most[positions].tensor_split(ends), strict=True))
        usable = all_finite(weights, owners, count)[to_device(sequences, device)]
        return Reduced([rows[sequence] for sequence in sequences], usable)

    parts = reduce

    def join(self, parts: Sequence[Sequence[Row]], lengths: Sequence[Int64], pooling: str) -> Sequence[Row]:
        return [_joined(own, "amax") for own in parts]


def _joined(rows: Sequence[Row], operation: Literal["amax", "sum"], max_entries: int = 0) -> Row:
    """Join several rows to one. The weight of an id is its largest weight in the rows ("amax"), or the sum of its
    weights. If `max_entries` is not 0, only the `max_entries` ids with the largest weights are returned.
    """
    ids, weights = rows[0]
    if len(rows) > 1:
        ids, place = torch.cat([ids for ids, _ in rows]).unique(return_inverse=True)
        joined = torch.cat([weights for _, weights in rows])
        weights = torch.zeros(len(ids), device=joined.device).scatter_reduce_(0, place, joined, operation)
    if 0 < max_entries < len(ids):
        chosen = weights.topk(max_entries).indices.sort().values
        ids, weights = ids[chosen], weights[chosen]
    return ids, weights


class TokenTable:
    """Table on the host with the weights of inference-free queries: a query gets the weights of its distinct ids."""

    def __init__(self, weights: Tensor, max_entries: int = 0) -> None:
        """Store `weights`, float32 [vocabulary], on the host. Only the `max_entries` largest weights of a query are
        returned; 0 means all.
        """
        self._weights, self._max_entries = weights, max_entries

    def row(self, ids: Int64) -> Row:
        distinct = torch.from_numpy(np.unique(ids))
        weights = self._weights[distinct]
        if 0 < self._max_entries < len(weights):
            places = weights.topk(self._max_entries).indices.sort().values
            distinct, weights = distinct[places], weights[places]
        mask = weights > 0
        return distinct[mask].int(), weights[mask]
