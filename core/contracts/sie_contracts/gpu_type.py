"""Derive the type of a GPU, as in SIE_GPU_TYPE and in requests, from the product name that the driver reports."""

from __future__ import annotations

import functools
import re

_IGNORED = re.compile(
    r"nvidia|tesla|quadro|geforce|amd|radeon|instinct|apple|graphics|gpu|generation|(sxm|hbm)\d?e?|pcie|nvl"
)
_MEMORY = re.compile(r"\d+gb")
_OF_TWO_SIZES = ("a100", "v100")  # GPUs that are sold with two memory sizes; their type includes the size
# largest length of a name whose type is cached: clients choose the names, and long names would fill the memory
_MAX_CACHED = 128


def gpu_type(name: str) -> str:
    """Return the type of a GPU: `NVIDIA L4` gives l4, `NVIDIA A100-SXM4-80GB` a100-80gb, `NVIDIA H100 80GB HBM3` h100.
    A name that is a type already, such as l4, and an empty name are returned unchanged.
    """
    return (_cached_type if len(name) <= _MAX_CACHED else _derived)(name)


def _derived(name: str) -> str:
    whole, *part = re.split(r"[ -]mig[ -]", name.lower(), maxsplit=1)  # `part` is [size] for a MIG device, else []
    words = [word for word in re.split(r"[^a-z0-9]+", whole) if word and not _IGNORED.fullmatch(word)]
    if words and words[0] not in _OF_TWO_SIZES:
        words = [words[0], *(word for word in words[1:] if not _MEMORY.fullmatch(word))]
    return "-".join(words) + "".join(f"-mig-{size}" for size in part)


_cached_type = functools.lru_cache(256)(_derived)
