"""Which attention kernel for which length: measured once per shape when a model is loaded, then written into the layout of each batch."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from sie_adapter.attention import FAR, Kernel
from sie_adapter.packing import Int64, Packed

_LENGTHS = (8, 16, 32, 64, 128, 256, 512)  # one measurement stands for all lengths up to it and above the one before
_GROUP_TOKENS = 64  # of a typical group of short sequences
_ROUNDS = 5
_WORTH = 0.5  # of the first kernel's time: where another is nearly as fast, chance would choose, and with it the last bits of a vector


@dataclass(frozen=True)
class KernelTable:
    """The kernel of each length bucket, for one sequence and for several; one kernel for the whole batch where `whole` is set."""

    alone: tuple[Kernel, ...]
    grouped: tuple[Kernel, ...]
    whole: Kernel | None = None

    def layout(self, packed: Packed) -> Int64:
        """The layout that the attention op reads, [groups, 5]: first token, sequences, (longest) length, visible tokens, kernel."""
        # the kernels for all sequences at once count windows from the last token, which is wrong where only the first ones are visible
        if self.whole is not None and packed.visible is None:
            longest = packed.groups[-1, 2]
            return np.array([[0, len(packed.order), longest, longest, self.whole]], np.int64)
        buckets = np.minimum(np.searchsorted(_LENGTHS, packed.groups[:, 2]), len(_LENGTHS) - 1)
        kernels = np.asarray([self.alone, self.grouped], np.int64)[(packed.groups[:, 1] > 1).astype(np.int64), buckets]
        return np.column_stack([packed.groups, kernels])


def uniform(kernel: Kernel) -> KernelTable:
    """A table that always says `kernel`."""
    whole = kernel if kernel >= Kernel.VARLEN else None
    kernels = (Kernel.SDPA if whole else kernel,) * len(_LENGTHS)
    return KernelTable(kernels, kernels, whole)


def measure(heads: int, key_heads: int, width: int, dtype: torch.dtype) -> KernelTable:
    """Time the grouped kernels of a CPU on this shape. Takes about 0.1 s; the choice changes speed and rounding, nothing else, so another
    than the first one has to be worth it."""
    candidates = [Kernel.SDPA, Kernel.BLOCKS] if dtype is torch.float32 else [Kernel.SDPA, Kernel.SDPA_FLOAT, Kernel.BLOCKS]

    def best(limit: int, sequences: int) -> Kernel:
        # 7/8 of the bucket's limit: real lengths are rarely multiples of a vector, and some kernels are only fast there
        times = {kernel: _time(kernel, limit * 7 // 8, sequences, heads, key_heads, width, dtype) for kernel in candidates}
        fastest = min(candidates, key=times.__getitem__)
        return fastest if times[fastest] < _WORTH * times[candidates[0]] else candidates[0]

    alone = tuple(best(limit, 1) for limit in _LENGTHS)
    grouped = tuple(best(limit, _GROUP_TOKENS // limit) for limit in _LENGTHS if limit < _GROUP_TOKENS)
    return KernelTable(alone, grouped + alone[len(grouped) :])


def _time(kernel: Kernel, length: int, sequences: int, heads: int, key_heads: int, width: int, dtype: torch.dtype) -> float:
    tokens = sequences * length
    query = torch.randn(tokens, heads, width, dtype=torch.float32).to(dtype)
    key = torch.randn(tokens, key_heads, width, dtype=torch.float32).to(dtype)
    bounds = torch.arange(0, tokens + 1, length, dtype=torch.int32)
    layout = torch.tensor([[0, sequences, length, length, kernel]])
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        torch.ops.sie.packed_attention(query, key, key, bounds, layout, width**-0.5, FAR, FAR)
        times.append(time.perf_counter() - started)
    return min(times)
