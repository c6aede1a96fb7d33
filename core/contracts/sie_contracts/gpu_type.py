"""Type of a GPU, as in SIE_GPU_TYPE and in requests. It is derived from the product name that the driver reports."""

from __future__ import annotations

import functools
import re

_IGNORED = re.compile(
    r"nvidia|tesla|quadro|geforce|amd|radeon|instinct|apple|graphics|gpu|generation|(sxm|hbm)\d?e?|pcie|nvl"
)
_MEMORY = re.compile(r"\d+gb")
_OF_TWO_SIZES = ("a100", "v100")  # GPUs that are sold with two memory sizes; their type includes the size
# largest number of characters of a name whose type is cached: a client may send longer ones, which would fill memory
_MAX_CACHED = 128


def gpu_type(name: str) -> str:
    """Return the type of a GPU: `NVIDIA L4` gives l4, `NVIDIA A100-SXM4-80GB` a100-80gb, `NVIDIA H100 80GB HBM3` h100.
    An empty name is returned unchanged, and so is a type, except the type of a MIG device.
    """
    return (_cached_type if len(name) <= _MAX_CACHED else _derived)(name)


def _derived(name: str) -> str:
    whole, is_part, part = name.lower().partition(" mig ")
    words = [word for word in re.split(r"[^a-z0-9]+", whole) if word and not _IGNORED.fullmatch(word)]
    if words and words[0] not in _OF_TWO_SIZES:
        words = [words[0], *(word for word in words[1:] if not _MEMORY.fullmatch(word))]
    return "-".join(words) + (f"-mig-{part}" if is_part else "")


_cached_type = functools.lru_cache(256)(_derived)
