"""Memory that a model's weights need, computed before a load from the headers of its files."""

from __future__ import annotations

import math
from pathlib import Path

from sie_adapter.loading.weight_files import loaded_files, tensors_in
from sie_store.weights.headers import StoredTensor


def weight_bytes(folder: Path, itemsize: int) -> int:
    """Return how many bytes the weights in `folder` take if every float is stored in `itemsize` bytes; 0 if the folder
    has no safetensors. Raises ModelLoadFailed INCOMPATIBLE for a damaged file, and the errors of `loaded_files`.
    """
    return sum(_bytes(tensor, itemsize) for file in loaded_files(folder) for tensor in tensors_in(file).values())


def _bytes(tensor: StoredTensor, itemsize: int) -> int:
    if tensor.dtype.startswith(("F", "BF")):
        return itemsize * math.prod(tensor.shape)
    return tensor.data_offsets[1] - tensor.data_offsets[0]
