"""Linear layers of a CPU with weights in the blocked order of oneDNN.

Stock torch reorders a bfloat16 weight on every call. It passes a float32 product to MKL, which is slow on CPUs of other
vendors than Intel. `BlockedLinear` reorders a weight only once. A layer from width 384 to 1,536 took 287 us instead of
677 us for 64 rows in float32, and 34 us instead of 54 us for 8 rows in bfloat16 (AMD EPYC, AVX512-BF16, one thread,
torch 2.13). On an Intel Xeon with AMX, the layer took 0.9 to 1.1 times the stock time in float32, and 0.5 to 1.0 times
in bfloat16. Every suitable layer is blocked, even if that is no faster: a choice by measured time could differ between
starts, and change the last bits of results.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sie_adapter.engine.device import claim, is_limited

_ROWS = 64  # number of rows of random states by which a layer is checked
_CHUNK = 512  # largest number of rows of one product if memory is limited
_RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # largest allowed error, divided by the largest result


class BlockedLinear(nn.Module):  # type: ignore[misc]  # the type checker skips torch
    """Linear layer for a CPU, with a copy of `source`'s weight in oneDNN's blocked order: [.., in] -> [.., out]."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = source.in_features, source.out_features
        self.bias = source.bias
        # no nn.Parameter, because a weight in blocked order cannot be moved, cast or saved
        self._blocked = torch.ops.mkldnn._reorder_linear_weight(source.weight.detach())
        self.nbytes = source.weight.nbytes

    @property
    def weight(self) -> Tensor:
        """Weight in the usual order, for models that read the weight of a layer: a copy at each access."""
        return self._blocked.to_dense()

    def forward(self, states: Tensor) -> Tensor:
        return self._in_few_sizes(states) if is_limited() else self._product(states)

    def _product(self, states: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(states, self._blocked, self.bias, "none", [], "")

    def _in_few_sizes(self, states: Tensor) -> Tensor:
        """Return the product of `states` and the weight, for a process whose memory is limited. The product is computed
        in parts of at most _CHUNK rows, each padded to a power of two, so that few different numbers of rows occur. For
        each different number, oneDNN keeps 0.5 to 1 MB: 1 GB after 1,200 different numbers.
        """
        rows = states.reshape(-1, self.in_features)
        output = rows.new_empty((len(rows), self.out_features))
        for part, into in zip(rows.split(_CHUNK), output.split(_CHUNK), strict=True):
            size = 1 << (len(part) - 1).bit_length()
            claim(2 * size * self.out_features * states.element_size())
            into.copy_(self._product(F.pad(part, (0, 0, 0, size - len(part))))[: len(part)])
        return output.view(*states.shape[:-1], self.out_features)


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of weights, including blocked weights, and of buffers; a shared storage counts once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    blocked = [module.nbytes for module in model.modules() if isinstance(module, BlockedLinear)]
    return int(sum(storages.values()) + sum(blocked))


def block_linears(model: nn.Module) -> int:
    """Replace the linear layers of `model` on a CPU by layers with blocked weights, and return the number of replaced
    layers. No other references to the layers may exist. A layer is not replaced if its weight is tied to an embedding,
    or if its parent reads the weight. Kernels depend on shape and dtype, so the first layer of each shape and dtype is
    checked. If this layer cannot be blocked, or its blocked results differ by more than _RELATIVE_ERROR, no layer of
    this shape and dtype is replaced.
    """
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    layers = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and child.weight.device.type == "cpu"
        and id(child.weight) not in tied
        and not _reads_weight(parent, name)
    ]
    exact: dict[tuple[torch.Size, torch.dtype], bool] = {}
    replaced = 0
    for parent, name, child in layers:
        kind = child.weight.shape, child.weight.dtype
        if kind not in exact:
            exact[kind] = _is_exact(child)
        if exact[kind]:
            setattr(parent, name, BlockedLinear(child))
            replaced += 1
    return replaced


def _reads_weight(parent: nn.Module, name: str) -> bool:
    """Return whether `parent` reads the layer's weight. T5 casts the states to the dtype of this weight."""
    return name == "wo" and type(parent).__name__.endswith(("DenseActDense", "DenseGatedActDense"))


def _is_exact(layer: nn.Linear) -> bool:
    if layer.weight.dtype not in _RELATIVE_ERROR or not torch.backends.mkldnn.is_available():
        return False
    states = torch.randn(_ROWS, layer.in_features, dtype=torch.float32).to(layer.weight.dtype)
    try:
        blocked = BlockedLinear(layer)
        expected, got = layer(states).float(), blocked(states).float()
    # the operators of oneDNN are no public API of torch: without these operators, the stock layer is used
    except (RuntimeError, AttributeError, TypeError):
        return False
    error = (got - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    return bool(error <= _RELATIVE_ERROR[layer.weight.dtype])
