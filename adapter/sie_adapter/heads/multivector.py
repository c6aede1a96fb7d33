"""Head of late interaction: one vector per token. It chooses the tokens that count, then projects them. Source:
ColBERTv2 (arXiv 2112.01488).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from sie_adapter.engine.device import to_device
from sie_adapter.heads import Reduced, States, all_finite
from sie_adapter.packed.packing import Int64

_STATE_BYTES = 32 << 20  # bytes of the float32 states of one block of tokens


class MultivectorHead:
    """Head that applies `layers` (float32) to the tokens. Tokens of documents with an id in `skipped` are left out;
    with `drop_first` also the first token of each row.
    """

    def __init__(
        self,
        layers: nn.Module | None,
        device: torch.device,
        *,
        skipped: frozenset[int] = frozenset(),
        drop_first: bool = False,
    ) -> None:
        self._layers = nn.Identity() if layers is None else layers.to(device)
        self._skipped = np.array(sorted(skipped), np.int64)
        self._drop_first = drop_first

    def reduce(self, states: States, sequences: Int64) -> Reduced:
        """Return rows, float32 [kept tokens, width] each, not normalised. All sequences take one index and
        one gather.
        """
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
        return Reduced(rows, all_finite(vectors, owners, count)[to_device(sequences, hidden.device)])

    parts = reduce

    def join(self, parts: Sequence[Sequence[Tensor]], lengths: Sequence[Int64]) -> Sequence[Tensor]:
        """Return the vectors of each chunk: those of its parts, in order."""
        return [own[0] if len(own) == 1 else torch.cat(list(own)) for own in parts]
