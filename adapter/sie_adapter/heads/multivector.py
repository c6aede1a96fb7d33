"""Head of late interaction: one vector for each token that a score uses. Source: ColBERTv2 (arXiv 2112.01488)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from sie_adapter.engine.device import to_device
from sie_adapter.heads import Reduced, States, all_finite
from sie_adapter.heads.token_pooling import TokenPooling
from sie_adapter.packed.packing import Int64

_STATE_BYTES = 32 << 20  # largest number of bytes of the float32 states to which the layers are applied at a time


class MultivectorHead:
    """Head of late interaction: it applies `layers` (float32) to the states of tokens. Tokens of documents get no
    vector if their id is in `skipped`. With `drop_first`, the first token of each text gets no vector. `pooling` merges
    similar vectors.
    """

    def __init__(
        self,
        layers: nn.Module | None,
        device: torch.device,
        *,
        skipped: frozenset[int] = frozenset(),
        drop_first: bool = False,
        pooling: TokenPooling | None = None,
    ) -> None:
        self._layers = nn.Identity() if layers is None else layers.to(device)
        self._skipped = np.array(sorted(skipped), np.int64)
        self._drop_first = drop_first
        self._pooling = pooling

    def reduce(self, states: States, sequences: Int64) -> Reduced:
        """Return one float32 matrix per sequence, [vectors, width]; normalised only if `pooling` normalises."""
        reduced = self.parts(states, sequences)
        if self._pooling is None:
            return reduced
        return Reduced(self._pooled(reduced.rows, states, sequences, reduced.usable), reduced.usable)

    def parts(self, states: States, sequences: Int64) -> Reduced:
        """Return the token vectors of each sequence, before `pooling` merges vectors."""
        packed, hidden = states.packed, states.hidden
        count = len(packed.order)
        owners = np.repeat(np.arange(count), packed.lengths)
        mask = np.isin(owners, sequences) if len(sequences) < count else np.ones(len(owners), bool)
        if self._drop_first:
            firsts = packed.bounds[:-1]
            mask[firsts if states.inner is None else firsts[~states.inner]] = False
        if len(self._skipped):
            mask &= states.queries[owners] | ~np.isin(packed.ids, self._skipped)
        owners = owners[mask]
        if not mask.all():
            hidden = hidden[to_device(np.flatnonzero(mask), hidden.device)]
        step = max(1, _STATE_BYTES // (4 * hidden.shape[1]))
        vectors = torch.cat([self._layers(part.float()) for part in hidden.split(step)])
        rows = vectors.split(np.bincount(owners, minlength=count)[sequences].tolist())
        usable = all_finite(vectors, owners, count)[to_device(sequences, hidden.device)]
        return Reduced(rows, usable)

    def join(self, parts: Sequence[Sequence[Tensor]], lengths: Sequence[Int64], pooling: str) -> Sequence[Tensor]:
        """Return the token vectors of each chunk: the vectors of its parts, merged like the vectors of a document."""
        rows = [own[0] if len(own) == 1 else torch.cat(list(own)) for own in parts]
        merge = self._pooling
        return rows if merge is None or not merge.documents else [merge(own) for own in rows]

    def _pooled(self, rows: Sequence[Tensor], states: States, sequences: Int64, usable: Tensor) -> list[Tensor]:
        assert self._pooling is not None
        sides = np.where(states.queries[sequences], self._pooling.queries, self._pooling.documents)
        chosen = sides & usable.cpu().numpy()
        return [self._pooling(own) if own_chosen else own for own, own_chosen in zip(rows, chosen, strict=True)]
