"""Checks of the weight files of a model folder: they are complete, contain no NaN, and are quantised only if
config.json has a quantization_config. These checks refuse files after a full disk, an incomplete copy or a diverged
training run. (`checkpoint` checks that the files have all tensors of the model class.)
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sie_contracts.models.load_errors import incompatible
from sie_store.folder_files import read_json, reading
from sie_store.weights.headers import DamagedFile, StoredTensor, stored_tensors

OTHER_FORMATS = ("onnx", "openvino")  # folders of published models with files in formats that no family reads
_PICKLES = ("pytorch_model.bin", "sparse_linear.pt", "colbert_linear.pt")
_QUANTISED = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
# Number of dimensions of a matrix. A uint8 tensor with more dimensions is a stored attention mask, not a quantised
# weight.
MATRIX = 2
_CHUNK = 1 << 22  # number of values that are checked for NaN at a time
_INDEX = "model.safetensors.index.json"


def check_weights(folder: Path) -> None:
    """Raise ModelLoadFailed INCOMPATIBLE for weights that are truncated, lack one of their files, contain NaN, or are
    quantised without a quantization_config in config.json. Reads all weights once, as memory-mapped files, so this
    process needs no memory for them. Only a pickle in torch's old format, without a zip, is read into memory.
    """
    files = [*safetensors_of(folder), *(folder / name for name in _PICKLES if (folder / name).is_file())]
    loaded_files(folder)  # raises an error for a file that the index names and the folder lacks
    is_quantised = "quantization_config" in read_json(folder / "config.json")
    for file in files:
        tensors = _stored(file) if file.suffix == ".safetensors" else _pickled(file)
        bad = []
        try:
            for name, tensor in tensors:
                if holds_nan(tensor):
                    bad.append(name)
                if tensor.ndim == MATRIX and tensor.dtype in _QUANTISED and not is_quantised:
                    precision = str(tensor.dtype).removeprefix("torch.")
                    cause = f"{file.name} contains {name} in {precision}, and config.json has no quantization_config"
                    fix = "export the model again in float32, float16 or bfloat16"
                    raise incompatible(f"{cause}, which describes the scale; {fix}")
        except SafetensorError as error:
            raise _broken(file, str(error)) from error
        if bad:
            listed = ", ".join(bad[:5]) + (", .." if len(bad) > 5 else "")
            cause = f"{file.name} contains NaN in {len(bad)} of its tensors: {listed}"
            raise incompatible(f"{cause}; export an earlier checkpoint, saved before the training diverged")


def safetensors_of(folder: Path) -> list[Path]:
    below = [
        path
        for path in folder.glob("*/*.safetensors")
        if path.parent.name not in OTHER_FORMATS and path.parent.name[0] != "."
    ]
    return sorted([*folder.glob("*.safetensors"), *below])


def _stored(file: Path) -> Iterator[tuple[str, Tensor]]:
    tensors_in(file)  # raises an error for a damaged file
    with safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118  `opened` cannot be iterated
            yield name, opened.get_tensor(name)


def tensors_in(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, from its header. Raises ModelLoadFailed INCOMPATIBLE for a damaged
    file.
    """
    try:
        return stored_tensors(file)
    except DamagedFile as error:
        raise _broken(file, str(error)) from error


def _broken(file: Path, why: str) -> Exception:
    return incompatible(f"{file.name} is cut off or damaged: {why}; copy or download it again")


def loaded_files(folder: Path) -> list[Path]:
    """Return the safetensors files that a load reads: model.safetensors, else the files that the index names, else all
    of `folder`. Raises ModelLoadFailed INCOMPATIBLE for an index that is damaged or names a missing file.
    """
    if (whole := folder / "model.safetensors").is_file():
        return [whole]
    if not (folder / _INDEX).is_file():
        return sorted(folder.glob("*.safetensors"))
    with reading(folder / _INDEX):
        named = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
        absent = [name for name in named if not (folder / name).is_file()]
    if absent:
        raise incompatible(
            f"{_INDEX} names {len(absent)} files that the folder lacks: {', '.join(absent[:5])}; download them"
        )
    return [folder / name for name in named]


def _pickled(file: Path) -> Iterable[tuple[str, Tensor]]:
    """Return the tensors in a file of torch.save; none for other contents, which the model's family refuses later."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError:
        return ()
    except (RuntimeError, EOFError) as error:
        raise _broken(file, str(error).splitlines()[0]) from error
    if not isinstance(loaded, dict):
        return ()
    return [(str(name), value) for name, value in loaded.items() if isinstance(value, Tensor)]


def holds_nan(tensor: Tensor) -> bool:
    """Return whether a tensor contains NaN; infinities are allowed."""
    if not tensor.is_floating_point():
        return False
    return any(bool(torch.isnan(part).any()) for part in tensor.reshape(-1).split(_CHUNK))
