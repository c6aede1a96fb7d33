"""Selection of a repository's files for a model, and the check whether a folder has the files that its family needs."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from pathlib import Path

from sie_contracts.models import families
from sie_contracts.models.entries import ModelEntry
from sie_store.weights.manifest import MANIFEST, FetchFailed

FILES = (
    "*.json",
    "*.safetensors",
    "*.txt",
    "*.model",
    "README.md",
    "artifact.metadata",
    "sparse_linear.pt",
    "colbert_linear.pt",
    "best.pt",
)
# pickled checkpoint of families whose models may lack safetensors; only tensors are read from it, no code is run
PICKLED = "pytorch_model.bin"
UNREAD = (MANIFEST, ".*", "*/.*", "onnx/*", "openvino/*")
LORA_FILES = ("adapter_config.json", "adapter_model.safetensors")
# largest size of all files of a LoRA: clients may name any LoRA, and must not use up the disk space for models
MAX_LORA_BYTES = 4 << 30

Wanted = Callable[[str], bool]


def _matching(patterns: tuple[str, ...]) -> Wanted:
    """Return a function that tests if a file name matches a pattern, and no pattern of UNREAD (files that no load
    reads). `*` also matches /.
    """

    def select(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) and not any(
            fnmatch.fnmatchcase(name, pattern) for pattern in UNREAD
        )

    return select


common = _matching(FILES)
of_lora = _matching(LORA_FILES)


def check_size(select: Wanted | None, size: int, label: str) -> None:
    """Raise FetchFailed if `select` is `of_lora`, and `size` exceeds MAX_LORA_BYTES. `label`: name of the LoRA."""
    if select is of_lora and size > MAX_LORA_BYTES:
        raise FetchFailed("INCOMPATIBLE", f"{label} has {size} bytes, a LoRA has at most {MAX_LORA_BYTES}")


def wanted_by(entry: ModelEntry) -> Wanted:
    """Return a function that tests, by the name of a file, whether a load of `entry` may read the file. A load of a
    family that an installed package adds may read any file that no pattern of UNREAD matches.
    """
    if entry.family not in families.rows():
        return _matching(("*",))
    if own := families.row(entry.family).files:
        return _matching(own)
    pickled = (PICKLED,) if families.row(entry.family).has_pickled_weights else ()
    return _matching((*FILES, *(("*.py",) if runs_code(entry) else ()), *pickled))


def runs_code(entry: ModelEntry) -> bool:
    """Return whether a load of the entry, or of one of its profiles, runs code from its folder."""
    return any(
        load.trust_remote_code
        for load in (entry.load, *(profile.load for profile in entry.profiles.values()))
        if load is not None
    )


def is_model(folder: Path, entry: ModelEntry) -> bool:
    """Return whether the folder has the files that every load of the entry's family needs. For a family of another
    package, the folder only needs to exist.
    """
    if entry.family not in families.rows():
        return folder.is_dir()
    family = families.row(entry.family)
    if family.has_pickled_weights:
        return (folder / family.config_file).is_file() and (has_safetensors(folder) or (folder / PICKLED).is_file())
    in_subfolder = (folder / "modules.json").is_file() and any(folder.glob("*/*.safetensors"))
    return in_subfolder or ((folder / family.config_file).is_file() and has_safetensors(folder))


def has_safetensors(folder: Path) -> bool:
    """Return whether the folder itself contains safetensors files."""
    return any(folder.glob("*.safetensors"))


def lacking(entry: ModelEntry) -> str:
    """Return the end of an error message about a folder that `is_model` refuses, for example "has no config.json"."""
    if entry.family not in families.rows():
        return "is not a folder"
    family = families.row(entry.family)
    return f"has no {family.config_file} and {'weights' if family.has_pickled_weights else 'safetensors'}"
