"""Kernels against the definition of attention, and the masks and keywords that the packed path refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils as masks

from sie_adapter.packed import attention
from sie_adapter.packed.attention import (
    FAR,
    AttentionUnsupported,
    Kernel,
    MaskPattern,
    MaskRequest,
    Trial,
    packed_attention,
)

LENGTHS = [1, 5, 5, 33, 150]
PATTERNS = {
    "bidirectional": MaskPattern(),
    "causal": MaskPattern(FAR, 0),
    "causal window": MaskPattern(7, 0),
    "window": MaskPattern(16, 16),
    "wide window": MaskPattern(100, 100),
}


def tensors(heads: int, key_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    query = torch.randn(total, heads, 16, generator=generator).to(dtype)
    key, value = (torch.randn(total, key_heads, 16, generator=generator).to(dtype) for _ in range(2))
    return query, key, value, torch.tensor([0, 1, 6, 11, 44, 194], dtype=torch.int32)


VISIBLE = [1, 3, 3, 20, 40]  # the number of visible keys of each sequence


def layout(kernel: Kernel, visible: list[int] = LENGTHS) -> Tensor:
    parts = [visible[0], visible[1], visible[3], visible[4]]
    rows = [[0, 1, 1], [1, 2, 5], [11, 1, 33], [44, 1, 150]]
    return torch.tensor([[*row, part, kernel] for row, part in zip(rows, parts, strict=True)])


def by_definition(query: Tensor, key: Tensor, value: Tensor, pattern: MaskPattern) -> Tensor:
    """softmax(q k / 4) v in float64, one sequence after the other, over the keys that the pattern shows."""
    shared = query.shape[1] // key.shape[1]
    output, start = [], 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        q, k, v = (tensor[rows].double().transpose(0, 1) for tensor in (query, key, value))
        k, v = k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
        distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
        hidden = (distance < -pattern.left) | (distance > pattern.right)
        output.append((torch.softmax((q @ k.mT / 4).masked_fill(hidden, -math.inf), -1) @ v).transpose(0, 1))
        start += length
    return torch.cat(output)


@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("kernel", [Kernel.SDPA, Kernel.BLOCKS, Kernel.REFERENCE])
def test_a_kernel_equals_the_definition(kernel: Kernel, name: str, key_heads: int) -> None:
    query, key, value, bounds = tensors(6, key_heads, torch.float32)
    pattern = PATTERNS[name]
    got = torch.ops.sie.packed_attention(query, key, value, bounds, layout(kernel), 0.25, pattern.left, pattern.right)
    torch.testing.assert_close(got, by_definition(query, key, value, pattern).float(), atol=2e-6, rtol=0)


def test_long_sequences_in_blocks_equal_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_BLOCK_SCORES", 16 * 6 * 150)
    for pattern in PATTERNS.values():
        query, key, value, bounds = tensors(6, 2, torch.float32)
        got = torch.ops.sie.packed_attention(
            query, key, value, bounds, layout(Kernel.BLOCKS), 0.25, pattern.left, pattern.right
        )
        torch.testing.assert_close(got, by_definition(query, key, value, pattern).float(), atol=2e-6, rtol=0)


def padded(query: Tensor, key: Tensor, value: Tensor, pattern: MaskPattern) -> Tensor:
    """torch's own attention with a mask, one sequence after the other. Keys from VISIBLE on are masked; queries are
    not.
    """
    shared = query.shape[1] // key.shape[1]
    output, start = [], 0
    for length, visible in zip(LENGTHS, VISIBLE, strict=True):
        q, k, v = (tensor[start : start + length].transpose(0, 1)[None] for tensor in (query, key, value))
        distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
        mask = (distance >= -pattern.left) & (distance <= pattern.right) & (torch.arange(length) < visible)
        k, v = (tensor.repeat_interleave(shared, 1) for tensor in (k, v))
        output.append(
            torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.25)[0].transpose(0, 1)
        )
        start += length
    return torch.cat(output)


@pytest.mark.parametrize("key_heads", [2, 6])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("kernel", [Kernel.SDPA, Kernel.BLOCKS, Kernel.REFERENCE])
def test_what_is_not_visible_attends_and_is_not_attended(kernel: Kernel, name: str, key_heads: int) -> None:
    """Keys that are not visible are masked as padding is. A query whose window holds no visible key gets zeros."""
    query, key, value, bounds = tensors(6, key_heads, torch.float32)
    pattern = PATTERNS[name]
    arguments = (bounds, layout(kernel, VISIBLE), 0.25, pattern.left, pattern.right)
    got = torch.ops.sie.packed_attention(query, key, value, *arguments)
    torch.testing.assert_close(got, padded(query, key, value, pattern), atol=2e-6, rtol=0)
    blind = [44 + position for position in range(150) if position - pattern.left >= VISIBLE[-1]]
    assert (not blind) == (pattern.left > 109)
    assert not got[blind].any()
    changed = key.clone()
    changed[44 + VISIBLE[-1] :] = torch.nan  # The values of masked keys must not matter.
    assert torch.equal(torch.ops.sie.packed_attention(query, changed, value, *arguments), got)


@pytest.mark.parametrize(
    ("function", "local_size", "expected"),
    [
        (masks.causal_mask_function, None, MaskPattern(FAR, 0)),
        (masks.bidirectional_mask_function, None, MaskPattern()),
        (masks.sliding_window_causal_mask_function(24), 24, MaskPattern(23, 0)),
        (masks.sliding_window_bidirectional_mask_function(64), 64, MaskPattern(64, 64)),
        (masks.sliding_window_causal_mask_function(4096), 4096, MaskPattern(4095, 0)),
    ],
)
def test_a_mask_function_is_recognised(
    function: Callable[..., Any], local_size: int | None, expected: MaskPattern
) -> None:
    assert MaskRequest(function, local_size).pattern() == expected


@pytest.mark.parametrize(
    "function",
    [
        masks.chunked_causal_mask_function(32, torch.zeros(1, dtype=torch.long)),
        lambda batch, head, query, key: (key <= query) | (key < 7),
        lambda batch, head, query, key: (key + query) % 2 == 0,
        lambda batch, head, query, key: key > query,
        lambda batch, head, query, key: (key - query).abs() <= query // 8,
    ],
)
def test_any_other_mask_function_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(AttentionUnsupported):
        MaskRequest(function, None).pattern()


class Layer(torch.nn.Module):
    is_causal = False


def attend(mask: MaskRequest, trial: Trial | None = None, **changes: Any) -> None:
    query, key, value, bounds = (
        tensor[None].transpose(1, 2) if tensor.ndim == 3 else tensor for tensor in tensors(2, 2, torch.float32)
    )
    packed_attention(
        Layer(),
        query,
        key,
        value,
        mask,
        sie_bounds=bounds,
        sie_layout=layout(Kernel.SDPA),
        sie_trial=trial or Trial(),
        scaling=0.25,
        **changes,
    )


def test_keywords_that_would_change_the_numbers_are_refused() -> None:
    plain = MaskRequest(masks.bidirectional_mask_function, None)
    attend(plain, softcap=None, output_attentions=None)
    for changes in ({"softcap": 30.0}, {"s_aux": torch.zeros(2)}, {"position_bias": torch.zeros(1)}, {"dropout": 0.1}):
        with pytest.raises(AttentionUnsupported):
            attend(plain, **changes)


def test_a_layer_that_contradicts_its_mask_is_refused() -> None:
    """A bidirectional model on a causal engine gives plausible, wrong vectors."""
    for changes in ({"is_causal": True}, {"sliding_window": 8}):
        with pytest.raises(AttentionUnsupported, match="its mask is"):
            attend(MaskRequest(masks.bidirectional_mask_function, None), **changes)
    attend(MaskRequest(masks.sliding_window_bidirectional_mask_function(7), 7), sliding_window=8)
    attend(MaskRequest(masks.causal_mask_function, None), is_causal=True)


def test_a_mask_that_shows_another_window_than_its_layer_says_is_followed_if_all_do() -> None:
    """Stock attention follows the mask. The mask of a bidirectional Mistral shows 64 keys on each side for
    a window of 64.
    """
    trial, window = Trial(), MaskRequest(masks.sliding_window_bidirectional_mask_function(7), 7)
    attend(window, trial, sliding_window=7)
    attend(MaskRequest(masks.bidirectional_mask_function, None), trial)
    assert trial.edge() == 1
    attend(window, trial, sliding_window=8)
    with pytest.raises(AttentionUnsupported, match=r"plus \[0, 1\] keys"):
        trial.edge()
    with pytest.raises(AttentionUnsupported, match="its mask is"):
        attend(window, sliding_window=7, is_causal=True)


def test_a_padding_mask_never_reaches_the_packed_path() -> None:
    with pytest.raises(AttentionUnsupported):
        attention.requested_mask(mask_function=masks.causal_mask_function, attention_mask=torch.ones(1, 3))


@pytest.mark.parametrize("name", PATTERNS)
def test_what_is_not_visible_stays_so_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_BLOCK_SCORES", 16 * 6 * 150)
    query, key, value, bounds = tensors(6, 2, torch.float32)
    pattern = PATTERNS[name]
    got = torch.ops.sie.packed_attention(
        query, key, value, bounds, layout(Kernel.BLOCKS, VISIBLE), 0.25, pattern.left, pattern.right
    )
    torch.testing.assert_close(got, padded(query, key, value, pattern), atol=2e-6, rtol=0)
