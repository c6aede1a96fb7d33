"""Memory that a model's weights need, computed before a load from the headers of its files."""

from __future__ import annotations

import json
import math
from pathlib import Path

from sie_adapter.loading.weight_files import loaded_files
from sie_contracts.models.load_errors import incompatible


def weight_bytes(folder: Path, itemsize: int) -> int:
    """Return how many bytes the weights in `folder` take if every float is stored in `itemsize` bytes; 0 without
    safetensors. Raises ModelLoadFailed INCOMPATIBLE for a file that is truncated or whose header is no JSON, and the
    errors of `loaded_files`.

    Source: the safetensors format. A file has an unsigned 64-bit little-endian length, a JSON object of names, dtypes,
    shapes and offsets, then the tensors.
    """
    return sum(_file_bytes(file, itemsize) for file in loaded_files(folder))


def _file_bytes(file: Path, itemsize: int) -> int:
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = 8 + int.from_bytes(opened.read(8), "little")
        try:
            header = json.loads(opened.read(start - 8)) if start <= size else None
        except ValueError:  # for example, zeros that a full disk left
            header = None
    end = start + max(
        (tensor["data_offsets"][1] for name, tensor in (header or {}).items() if name != "__metadata__"), default=0
    )
    if header is None or end > size:
        raise incompatible(
            f"{file.name} is cut off or is no safetensors file: a broken download, or a pointer of Git LFS"
        )
    header.pop("__metadata__", None)
    floats = [tensor for tensor in header.values() if tensor["dtype"].startswith(("F", "BF"))]
    non_floats = [tensor for tensor in header.values() if not tensor["dtype"].startswith(("F", "BF"))]
    stored: int = sum(tensor["data_offsets"][1] - tensor["data_offsets"][0] for tensor in non_floats)
    count: int = sum(math.prod(tensor["shape"]) for tensor in floats)
    return stored + itemsize * count
