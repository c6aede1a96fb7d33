"""Attention over packed sequences, registered with transformers' attention interface.

    model(..., sie_bounds=, sie_layout=) ──► packed_attention, once per layer ──► a kernel for each group of sequences

The bounds of the sequences are tensor keyword arguments of `model(...)`, so threads share no state. Under
torch.compile, the attention of each layer is one opaque op. The registered mask function builds no mask: it passes the
model's request for a mask to the attention function. In a trial pass (`sie_trial`), the attention function compares the
requested mask with the pattern that it computes. A model runs packed only if its mask is causal or bidirectional, with
or without a window.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sie_adapter.packed.packing import Int64, PackedBatch

IMPLEMENTATION = "sie_packed"
FAR = 1 << 30  # as a number of visible keys before or after a query, this means no limit
# largest number of scores in one block on a CPU: a larger block does not fit the second-level cache, and each operation
# on the block would wait for memory
_BLOCK_SCORES = 1 << 18
# largest number of scores in one block on a GPU, which computes all scores of a block at once; this number of float32
# scores needs 128 MB
_BLOCK_SCORES_ELSEWHERE = 1 << 25
# shorter rows of scores are padded to this length, one vector register. Softmax sums a shorter row number by number,
# which took eight times as long.
_SOFTMAX_ROW = 16


class Kernel(IntEnum):
    """Kernel that computes a group of sequences. Its number is in the last column of a layout (`layout_of`)."""

    SDPA = 0  # torch's fused kernel, for sequences of equal length
    # matrix products over blocks of queries, for sequences of equal length, with any window. In a layer whose window is
    # shorter than the sequences, this kernel replaces SDPA.
    BLOCKS = 2
    REFERENCE = 3  # one sequence after the other, by the formula that defines attention
    VARLEN = 4  # torch's variable-length kernel, for all sequences at once, on CUDA
    FLASH = 5  # flash_attn_varlen_func, for all sequences at once, on CUDA


class AttentionUnsupported(Exception):
    """Raised if a packed kernel, or another engine, does not compute the states of the unchanged model."""


@dataclass(frozen=True)
class MaskPattern:
    """Window of a mask: a query at position i sees the keys from i - left to i + right."""

    left: int = FAR
    right: int = FAR


@dataclass(frozen=True)
class MaskRequest:
    """Request of transformers for a mask. The attention function gets this object instead of a mask."""

    allows: Callable[..., Any]  # transformers' mask_function: (batch, head, query, key) -> bool
    local_size: int | None

    def pattern(self) -> MaskPattern:
        """Return the window of keys that a query sees, measured by calls of transformers' mask function for sample
        positions. Raises AttentionUnsupported if the mask is not one window that is causal or bidirectional.
        """
        size = min(4 * (self.local_size or 0) + 256, 16384)
        keys = torch.arange(size)
        queries = torch.unique(torch.linspace(0, size - 1, 33).long())
        zero = torch.zeros((), dtype=torch.long)
        visible = self.allows(zero, zero, queries[:, None], keys[None, :]).expand(len(queries), size)
        middle = size // 2
        row = self.allows(zero, zero, torch.tensor([[middle]]), keys[None, :]).expand(1, size)[0].nonzero().flatten()
        if middle not in row:
            raise AttentionUnsupported("the model requests a mask in which a token does not attend to itself")
        left, right = middle - int(row[0]), int(row[-1]) - middle
        pattern = MaskPattern(FAR if left == middle else left, FAR if middle + right == size - 1 else right)
        distance = keys[None, :] - queries[:, None]
        if not torch.equal(visible, (distance >= -pattern.left) & (distance <= pattern.right)):
            raise AttentionUnsupported("the mask is neither causal nor bidirectional, with or without a window")
        return pattern


@dataclass
class Trial:
    """Record of a trial pass, in which `packed_attention` checks the masks that the model requests. `calls`: number of
    calls of `packed_attention`. `edges`: the values of `sie_edge` that the layers with a window need.
    """

    calls: int = 0
    edges: set[int] = field(default_factory=set)

    def called(self) -> None:
        self.calls += 1

    def edge(self) -> int:
        """Return the model's `sie_edge` (see `packed_attention`). Raises AttentionUnsupported if its layers need
        different values.
        """
        if len(self.edges) > 1:
            raise AttentionUnsupported(f"layers use windows of sliding_window plus {sorted(self.edges)} keys")
        return next(iter(self.edges), 0)


def requested_mask(
    *, mask_function: Callable[..., Any], attention_mask: Tensor | None = None, local_size: int | None = None, **_: Any
) -> MaskRequest:
    if attention_mask is not None:
        raise AttentionUnsupported("the model passes a padding mask, which packed sequences do not have")
    return MaskRequest(mask_function, local_size)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRequest | None,
    *,
    sie_bounds: Tensor,
    sie_layout: Tensor,
    sie_edge: int = 0,
    sie_trial: Trial | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    use_cache: bool | None = None,
    deterministic: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function that transformers' AttentionInterface calls. `query`: [1, heads, tokens, width], `key`,
    `value`: [1, key heads, tokens, width]. Returns [1, tokens, heads, width]. Raises AttentionUnsupported for dropout
    and for an unknown keyword that is not None, since these would change the result. In a trial pass, raises
    AttentionUnsupported also for a mask that differs from the pattern computed here.

    `sliding_window` is defined as in transformers' flash attention: it counts the token itself, and extends to both
    sides if the attention is not causal. transformers' eager and sdpa attention use the window of the mask instead,
    which may have another size. A trial pass adds the difference of the sizes, in keys on each side, to `edges` of
    `sie_trial`. Later passes get this difference as `sie_edge`. `sie_bounds`: offsets of the sequences. `sie_layout`:
    groups of sequences, each with its kernel.
    """
    unsupported = [name for name, value in options.items() if value is not None]
    if unsupported or dropout:
        raise AttentionUnsupported(f"the model uses attention with {', '.join(unsupported) or 'dropout'}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    reach = FAR if sliding_window is None else sliding_window - 1 + sie_edge
    pattern = MaskPattern(reach, 0 if causal else reach)
    if sie_trial is not None:
        if not isinstance(attention_mask, MaskRequest):
            raise AttentionUnsupported("a layer does not pass the mask that it got from the mask interface")
        shown = attention_mask.pattern()
        if sliding_window is not None and shown.left < FAR and shown.right == (0 if causal else shown.left):
            sie_trial.edges.add(shown.left - reach)
        elif shown != pattern:
            raise AttentionUnsupported(f"a layer computes {pattern}, but its mask is {shown}")
        sie_trial.called()
    # the operator is used only while compiling: torch's dispatch of a Python operator costs host time in every layer
    attend = torch.ops.sie.packed_attention if torch.compiler.is_compiling() else _attend
    output = attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        sie_bounds,
        sie_layout,
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        pattern.left,
        pattern.right,
    )
    return output[None], None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, layout: Tensor, scale: float, left: int, right: int
) -> Tensor:
    """Run the kernels of a layout. `query`: [tokens, heads, width]; `bounds`: int32 [sequences + 1] on the device;
    `layout`: the int64 [groups, 5] of `layout_of`, on the host. The tokens of a sequence attend only to the first
    tokens of the sequence (its visible tokens). For a kernel that computes all sequences at once, the layout has one
    group.
    """
    pattern = MaskPattern(left, right)
    groups = layout.tolist()
    if groups[0][4] >= Kernel.VARLEN:
        _, _, longest, _, code = groups[0]
        return _VARLEN[code](query, key, value, bounds, longest, scale, pattern)
    output = torch.empty(query.shape[:2] + value.shape[2:], dtype=query.dtype, device=query.device)
    for first, sequences, length, visible, code in groups:
        rows = slice(first, first + sequences * length)
        split = (sequences, length)
        queries, keys, values = (tensor[rows].unflatten(0, split).transpose(1, 2) for tensor in (query, key, value))
        windowed = pattern.left < length - 1 or 0 < pattern.right < length - 1
        kernel = _attend_in_blocks if windowed and code != Kernel.REFERENCE else _GROUPED[code]
        into = output[rows].unflatten(0, split).transpose(1, 2)
        kernel(queries, keys[:, :, :visible], values[:, :, :visible], scale, pattern, into)
    return output


_operator = torch.library.custom_op("sie::packed_attention", mutates_args=())(_attend)


@_operator.register_fake  # type: ignore[untyped-decorator]  # the type checker skips torch
def _(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, layout: Tensor, scale: float, left: int, right: int
) -> Tensor:
    return query.new_empty(query.shape[:2] + value.shape[2:])


# A kernel in `_GROUPED` fills `output` [sequences, heads, length, width] from a query [.., heads, length, ..] and from
# keys and values [.., key heads, visible tokens, ..].


def _attend_fused(
    query: Tensor, key: Tensor, value: Tensor, scale: float, pattern: MaskPattern, output: Tensor
) -> None:
    is_causal = pattern.right == 0 and query.shape[2] > 1
    output.copy_(
        F.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    )


def _attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, scale: float, pattern: MaskPattern, output: Tensor
) -> None:
    sequences, heads, length, _ = query.shape
    if key.shape[1] != heads:
        key, value = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (key, value))
    query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
    most = _BLOCK_SCORES if query.device.type == "cpu" else _BLOCK_SCORES_ELSEWHERE
    block = max(16, min(length, most // max(1, sequences * heads * length)))
    visible = key.shape[1]
    empty = query.new_empty(())
    for start in range(0, length, block):
        stop = min(length, start + block)
        low, high = max(0, start - pattern.left), min(visible, stop + pattern.right)
        if low >= high:  # no key is in the window of these queries
            output[:, :, start:stop] = 0
            continue
        scores = torch.baddbmm(empty, query[:, start:stop], key[:, low:high].transpose(1, 2), beta=0, alpha=scale)
        # softmax is more exact in float32, and faster: on a CPU, bfloat16 takes five times as long if the length of a
        # row is not a multiple of 32
        scores = scores.float()
        if high - low < _SOFTMAX_ROW:
            scores = F.pad(scores, (0, _SOFTMAX_ROW - high + low), value=-math.inf)
        if (hidden := _hidden(start, stop, low, high, pattern, query.device)) is not None:
            scores[:, :, : high - low].masked_fill_(hidden, -math.inf)
        weights = _shares(scores, may_be_blind=visible < length).to(value.dtype)[:, :, : high - low]
        mixed = torch.bmm(weights, value[:, low:high])
        output[:, :, start:stop].copy_(mixed.unflatten(0, (sequences, heads)))


def _shares(scores: Tensor, *, may_be_blind: bool) -> Tensor:
    """Return the softmax of the scores. A query without visible keys gets zeros, as in torch's own kernels."""
    shares = torch.softmax(scores, -1)
    return shares.nan_to_num(0.0) if may_be_blind else shares


def _hidden(start: int, stop: int, low: int, high: int, pattern: MaskPattern, device: torch.device) -> Tensor | None:
    """Return which keys a block of queries must not attend to, bool [queries, keys]; None if no key is hidden. The
    block has the queries from `start` to before `stop`, and the keys from `low` to before `high`.
    """
    if stop - 1 - low <= pattern.left and high - 1 - start <= pattern.right:
        return None
    distance = torch.arange(low, high, device=device)[None, :] - torch.arange(start, stop, device=device)[:, None]
    return (distance < -pattern.left) | (distance > pattern.right)


def _attend_by_definition(
    query: Tensor, key: Tensor, value: Tensor, scale: float, pattern: MaskPattern, output: Tensor
) -> None:
    length, shared = query.shape[2], query.shape[1] // key.shape[1]
    hidden = _hidden(0, length, 0, key.shape[2], pattern, query.device)
    for sequence in range(query.shape[0]):
        for head in range(query.shape[1]):
            scores = query[sequence, head].float() @ key[sequence, head // shared].float().T * scale
            if hidden is not None:
                scores = scores.masked_fill(hidden, -math.inf)
            shares = _shares(scores, may_be_blind=key.shape[2] < length)
            output[sequence, head] = shares.to(value.dtype) @ value[sequence, head // shared]


_GROUPED: dict[int, Callable[[Tensor, Tensor, Tensor, float, MaskPattern, Tensor], None]] = {
    Kernel.SDPA: _attend_fused,
    Kernel.BLOCKS: _attend_in_blocks,
    Kernel.REFERENCE: _attend_by_definition,
}


def _window(pattern: MaskPattern) -> tuple[int, int]:
    """Return the window of a mask in the form of the CUDA kernels, in which -1 means no limit."""
    return -1 if pattern.left == FAR else pattern.left, -1 if pattern.right == FAR else pattern.right


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float, pattern: MaskPattern
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale, "window_size": _window(pattern)}
    if query.shape[1] != key.shape[1]:
        options["enable_gqa"] = True  # torch has this option from 2.12 on
    output: Tensor = varlen_attn(query, key, value, bounds, bounds, longest, longest, **options)
    return output


def _attend_flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float, pattern: MaskPattern
) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]  # an optional extra that needs a GPU to build

    options = {"softmax_scale": scale, "causal": pattern.right == 0, "window_size": _window(pattern)}
    output: Tensor = flash_attn_varlen_func(query, key, value, bounds, bounds, longest, longest, **options)
    return output


_VARLEN: dict[int, Callable[[Tensor, Tensor, Tensor, Tensor, int, float, MaskPattern], Tensor]] = {
    Kernel.VARLEN: _attend_varlen,
    Kernel.FLASH: _attend_flash,
}


def layout_of(kernel: Kernel, packed: PackedBatch) -> Int64:
    """Return the argument `layout` of the attention op, int64 [groups, 5]. A group has sequences of equal length, or
    all sequences. The row of a group has the index of the first token, the number of sequences, the length of the
    longest sequence, the number of visible tokens of each sequence (tokens at its start that are attended to), and the
    kernel.
    """
    if kernel >= Kernel.VARLEN:
        # these kernels count a window from the last token, which is wrong if only the first tokens are visible
        if packed.visible is None:
            longest = packed.groups[-1, 2]
            return np.array([[0, len(packed.order), longest, longest, kernel]], np.int64)
        kernel = Kernel.SDPA
    return np.column_stack([packed.groups, np.full(len(packed.groups), kernel, np.int64)])


def register() -> None:
    """Register the attention and mask functions of this module with transformers. A second call has no effect."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, requested_mask)
