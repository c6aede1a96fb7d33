"""Hidden states of a model folder: by stock transformers one sequence at a time, and by the adapter in
one packed pass.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel

from sie_adapter.families.text_encoder import TextEncoder
from sie_adapter.packed.packing import Items

LENGTHS = [1, 2, 7, 7, 15, 16, 17, 33, 64, 65, 129, 129, 250]


def states_one_by_one(folder: Path, sequences: list[np.ndarray]) -> list[torch.Tensor]:
    model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(input_ids=torch.from_numpy(ids).long()[None])[0][0] for ids in sequences]


def states_packed(encoder: TextEncoder, sequences: list[np.ndarray]) -> list[torch.Tensor]:
    """Return the states in the order of `sequences`."""
    items = Items(np.array([len(ids) for ids in sequences], np.int64), np.concatenate(sequences))
    packed = encoder.pack(items, np.arange(len(sequences)))
    with torch.inference_mode():
        hidden = encoder.forward(packed)
    parts = torch.split(hidden, packed.lengths.tolist())
    return [parts[row] for row in np.argsort(packed.order)]
