"""Each CUDA kernel computes the attention that the definition gives in float32 on a CPU: windows, causality, shared
heads, hidden tokens.
"""

from __future__ import annotations

import importlib.util
import inspect

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from sie_adapter.packed.attention import FAR, Kernel, layout_of
from sie_adapter.packed.packing import Items, PackedBatch, Positions, pack

CUDA = torch.device("cuda")
LENGTHS = (300, 1, 2, 7, 7, 16, 17, 63, 64, 65, 129, 7)
PATTERNS = {
    "all": (FAR, FAR),
    "causal": (FAR, 0),
    "window": (16, 16),
    "causal window": (16, 0),
    "wide window": (64, 64),
}
# outputs are within 5: the tolerance covers half a step of the type, and the rounding of the attention weights
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
needs_flash = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs the package flash-attn")
KERNELS = [
    *((kernel, dtype) for kernel in (Kernel.SDPA, Kernel.BLOCKS) for dtype in TOLERANCE),
    *((Kernel.VARLEN, dtype) for dtype in (torch.float16, torch.bfloat16)),
    *(pytest.param(Kernel.FLASH, dtype, marks=needs_flash) for dtype in (torch.float16, torch.bfloat16)),
]


def packed(visible: tuple[int, ...] | None = None) -> PackedBatch:
    lengths = np.array(LENGTHS, np.int64)
    batch = Items(
        lengths, np.zeros(int(lengths.sum()), np.int32), None, None if visible is None else np.array(visible, np.int64)
    )
    return pack(batch, np.arange(len(lengths)), Positions())


def attend(kernel: Kernel, batch: PackedBatch, states: tuple[Tensor, ...], pattern: tuple[int, int]) -> Tensor:
    query, key, value = states
    bounds = torch.from_numpy(batch.bounds).to(query.device)
    layout = torch.from_numpy(layout_of(kernel, batch))
    with torch.inference_mode():
        return torch.ops.sie.packed_attention(query, key, value, bounds, layout, query.shape[2] ** -0.5, *pattern)  # type: ignore[no-any-return]


SHARES = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch has it from 2.12 on


def check(
    kernel: Kernel,
    dtype: torch.dtype,
    batch: PackedBatch,
    pattern: tuple[int, int],
    heads: int,
    key_heads: int,
    width: int,
) -> None:
    if kernel == Kernel.VARLEN and heads != key_heads and not SHARES:
        pytest.skip("the kernel of this torch shares no heads")
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(batch.ids), count, width) for count in (heads, key_heads, key_heads)]
    states = tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    expected = attend(Kernel.REFERENCE, batch, tuple(state.float() for state in states), pattern)
    got = attend(kernel, batch, tuple(state.to(CUDA) for state in states), pattern)
    assert got.device.type == CUDA.type
    assert got.dtype == dtype
    assert float((got.cpu().float() - expected).abs().max()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 4, 32), (4, 2, 64), (8, 1, 128)])
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_a_kernel_computes_the_definition(
    kernel: Kernel, dtype: torch.dtype, heads: int, key_heads: int, width: int, pattern: str
) -> None:
    check(kernel, dtype, packed(), PATTERNS[pattern], heads, key_heads, width)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_hidden_tokens_are_not_attended_to(kernel: Kernel, dtype: torch.dtype, pattern: str) -> None:
    """Filling tokens of a late-interaction query attend to others, and no token attends to them."""
    visible = tuple(max(1, length * 2 // 3) for length in LENGTHS)
    check(kernel, dtype, packed(visible), PATTERNS[pattern], 4, 4, 32)


def test_a_sequence_does_not_depend_on_its_mates() -> None:
    """A sequence has the same result alone and in a batch, although the longest sequence of a batch chooses the tiles
    and splits of the variable-length kernel.
    """
    batch = packed()
    states = tuple(
        torch.randn(len(batch.ids), 4, 64, generator=torch.Generator().manual_seed(1)).half().to(CUDA) for _ in range(3)
    )
    together = attend(Kernel.VARLEN, batch, states, PATTERNS["all"])
    for start, stop in zip(batch.bounds[:-1].tolist(), batch.bounds[1:].tolist(), strict=True):
        alone = pack(Items(np.array([stop - start]), np.zeros(stop - start, np.int32)), np.arange(1), Positions())
        part = attend(Kernel.VARLEN, alone, tuple(state[start:stop] for state in states), PATTERNS["all"])
        assert float((part.float() - together[start:stop].float()).abs().max()) <= TOLERANCE[torch.float16]
