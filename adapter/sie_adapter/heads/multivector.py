"""One vector per token, for late interaction: project, then keep the tokens that count. Source: ColBERTv2 (arXiv 2112.01488)."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from sie_adapter.heads import Reduced, States
from sie_adapter.packing import Int64


class MultivectorHead:
    """`layers` (float32) on every token. Rows of documents with an id of `skipped` are dropped, and with `drop_first` the first row of all."""

    def __init__(
        self, layers: nn.Module | None, device: torch.device, *, skipped: frozenset[int] = frozenset(), drop_first: bool = False
    ) -> None:
        self._layers = None if layers is None else layers.to(device)
        self._skipped = np.array(sorted(skipped), np.int64)
        self._drop_first = drop_first

    def reduce(self, states: States, sequences: Int64) -> Reduced:
        """Rows, float32 [kept tokens, width] each, not normalised."""
        hidden = states.hidden.float()
        vectors = hidden if self._layers is None else self._layers(hidden)
        finite = torch.isfinite(vectors).all(1)
        rows, usable = [], []
        for sequence in sequences.tolist():
            span = states.span(sequence)
            usable.append(finite[span].all())
            row = vectors[span]
            if len(self._skipped) and not states.queries[sequence]:
                kept = ~np.isin(states.ids(sequence), self._skipped)
                row = row if kept.all() else row[torch.from_numpy(np.flatnonzero(kept)).to(row.device)]
            rows.append(row[1:] if self._drop_first else row)
        return Reduced(rows, torch.stack(usable))
