"""Head that returns the states of the last layer unchanged, one for each token."""

from __future__ import annotations

import numpy as np
import torch

from sie_adapter.heads import Reduced, States, all_finite
from sie_adapter.packed.packing import Int64


class TokenStatesHead:
    """Head that returns the states of all tokens, special ones included. They are not normalised, and later layers of
    the model are not applied.
    """

    def reduce(self, states: States, sequences: Int64) -> Reduced:
        lengths = states.packed.lengths[sequences]
        vectors = torch.cat([states.hidden[states.span(int(sequence))] for sequence in sequences]).float()
        owners = np.repeat(np.arange(len(sequences)), lengths)
        return Reduced(vectors.split(lengths.tolist()), all_finite(vectors, owners, len(sequences)))
