"""What a model's weights will take, told from the headers of its files before anything is loaded."""

from __future__ import annotations

import json
import math
from pathlib import Path


def weight_bytes(folder: Path, itemsize: int) -> int:
    """Bytes that the weights in `folder` take with floats of `itemsize` bytes; 0 where there are no safetensors.

    Source: the safetensors format, an unsigned 64-bit little-endian length and a JSON object of names, dtypes, shapes and offsets.
    """
    index = folder / "model.safetensors.index.json"
    whole = folder / "model.safetensors"
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    return sum(_file_bytes(file, itemsize) for file in files)


def _file_bytes(file: Path, itemsize: int) -> int:
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    header.pop("__metadata__", None)
    floats = [tensor for tensor in header.values() if tensor["dtype"].startswith(("F", "BF"))]
    others = [tensor for tensor in header.values() if not tensor["dtype"].startswith(("F", "BF"))]
    stored: int = sum(tensor["data_offsets"][1] - tensor["data_offsets"][0] for tensor in others)
    count: int = sum(math.prod(tensor["shape"]) for tensor in floats)
    return stored + itemsize * count
