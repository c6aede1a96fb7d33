"""Text encoders: any transformers architecture that maps token ids to one hidden state per token.

    folder ──► load ──► TextEncoder: tokenizer, limits, forward(Packed) -> hidden [tokens, width]

An architecture runs packed if a trial shows that it goes through the attention interface with a plain mask and that its packed states
equal its padded ones. Otherwise it runs padded on its stock attention, with a log line.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from sie_adapter import attention, calibration
from sie_adapter.attention import AttentionUnsupported, Kernel, Trial
from sie_adapter.calibration import KernelTable
from sie_adapter.device import Compute, uses_varlen_kernel
from sie_adapter.failure import is_device_fatal, is_out_of_memory, load_failed
from sie_adapter.linear import block_linears
from sie_adapter.packing import Int64, Items, Packed, Positions, pack
from sie_contracts.catalogue import LoadOptions, ModelEntry

_logger = logging.getLogger("sie.adapter")

# While transformers constructs a model it changes torch for the whole process: its default precision, which would change what the lanes
# compute, unless it is float32 already, and functions of torch, which two loads would restore in the wrong order.
_CONSTRUCTION = threading.Lock()
_HARMLESS = ("pooler.", "position_ids")  # a pooler is never run; position ids are counted, not stored
_TRIAL_LENGTHS = (3, 17, 40, 40, 140)  # past the local window of ModernBERT
_TRIAL_COSINE = {torch.float32: 0.9999}  # per token; 16 bit: _TRIAL_COSINE_16
_TRIAL_COSINE_16 = 0.99
_PADDED_WASTE = 1.25  # padded tokens for each real one, at most


class TextEncoder:
    """A loaded encoder. `forward` may run on several threads at once.

    `tokenizer`: tokenizer.json without truncation and padding. `vocabulary`: ids are below it. `width`: of a hidden state.
    `attention`: the backend in force, with `padded` where the packed path does not hold.
    """

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute, stored_pooling: str = "") -> None:
        """Load from `folder`. Raises ModelLoadFailed INCOMPATIBLE for weights, limits or files that do not fit the entry."""
        self.max_tokens = entry.max_tokens
        self.stored_pooling = stored_pooling
        self.precision = compute.precision
        self._compute = compute
        self._model = _load_model(folder, load, compute)
        self._model.config.use_cache = False
        self._numbering = _numbering(self._model)
        self._pad = self._model.config.pad_token_id or 0
        self.tokenizer = _load_tokenizer(folder, load)
        self.vocabulary: int = self._model.get_input_embeddings().num_embeddings
        self.width: int = self._model.config.hidden_size
        self.memory_bytes = _bytes_of(self._model)
        self._check_limits(entry)
        with torch.inference_mode():
            if compute.device.type == "cpu":
                block_linears(self._model)
            self._table = self._choose_kernels()
        self.attention = compute.backend if self._table else f"{compute.backend} padded"

    def pack(self, batch: Items, chosen: Int64) -> Packed:
        """Lay out the chosen items with this architecture's positions."""
        return pack(batch, chosen, self._numbering)

    def forward(self, packed: Packed) -> Tensor:
        """Hidden states of the last layer, [tokens, width], in the precision of the weights, packed order. Under inference mode only."""
        return self._forward_padded(packed) if self._table is None else self._forward_packed(packed, self._table)

    def _forward_packed(self, packed: Packed, table: KernelTable, trial: Trial | None = None) -> Tensor:
        device = self._compute.device
        tokens = torch.from_numpy(np.stack([packed.ids, packed.positions])).to(device, non_blocking=True)
        return self._model(
            input_ids=tokens[:1],
            position_ids=tokens[1:],
            sie_bounds=torch.from_numpy(packed.bounds).to(device, non_blocking=True),
            sie_layout=torch.from_numpy(table.layout(packed)),
            sie_trial=trial,
        )[0][0]  # fmt: skip

    def _forward_padded(self, packed: Packed) -> Tensor:
        return torch.cat([self._forward_padded_part(packed, start, stop) for start, stop in _evenly_long(packed.lengths)])

    def _forward_padded_part(self, packed: Packed, start: int, stop: int) -> Tensor:
        lengths = packed.lengths[start:stop]
        real = np.arange(lengths.max())[None, :] < lengths[:, None]
        ids = np.full(real.shape, self._pad, np.int64)
        ids[real] = packed.ids[packed.bounds[start] : packed.bounds[stop]]
        mask = torch.from_numpy(real).to(self._compute.device)
        hidden = self._model(input_ids=torch.from_numpy(ids).to(self._compute.device), attention_mask=mask.long())[0]
        return hidden[mask]

    def _check_limits(self, entry: ModelEntry) -> None:
        positions = getattr(self._model.config, "max_position_embeddings", None)
        if positions and entry.max_tokens > positions - self._numbering.first:
            raise load_failed(
                "INCOMPATIBLE", f"{entry.id}: max_tokens is {entry.max_tokens}, the model has {positions - self._numbering.first} positions"
            )
        if (dense := entry.outputs.get("dense", self.width)) != self.width:
            raise load_failed("INCOMPATIBLE", f"{entry.id}: outputs.dense is {dense}, the model is {self.width} wide")

    def _choose_kernels(self) -> KernelTable | None:
        stock = "eager" if self._compute.backend == "eager" else "sdpa"
        reference = self._forward_padded(self._sample(_TRIAL_LENGTHS))
        self._model.set_attn_implementation(attention.IMPLEMENTATION)
        for kernel in self._candidates():
            try:
                return self._tried(kernel, reference)
            except (AttentionUnsupported, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, AttributeError) as error:
                if is_out_of_memory(error) or is_device_fatal(error):
                    raise
                _logger.info("%s does not run packed with %s: %s", type(self._model).__name__, kernel.name, error)
        self._model.set_attn_implementation(stock)
        return None

    def _candidates(self) -> list[Kernel]:
        if self._compute.backend == "eager":
            return [Kernel.REFERENCE]
        preferred = [Kernel.FLASH] if self._compute.backend == "flash_attention_2" else []
        return [*preferred, *([Kernel.VARLEN] if uses_varlen_kernel(self._compute.facts) else []), Kernel.SDPA]

    def _tried(self, kernel: Kernel, reference: Tensor) -> KernelTable:
        """The table that starts from `kernel`, if the packed states equal `reference`. Raises AttentionUnsupported."""
        trial, table = Trial(), calibration.uniform(kernel)
        # one sequence, so that the mask functions are still functions of two positions and not of the packing
        self._forward_packed(self._sample(_TRIAL_LENGTHS[-1:]), table, trial)
        layers = self._model.config.num_hidden_layers
        if len(trial.shapes) != layers:
            raise AttentionUnsupported(f"{len(trial.shapes)} of {layers} layers use the attention interface")
        states = self._forward_packed(self._sample(_TRIAL_LENGTHS), table)
        cosine = float(F.cosine_similarity(states.float(), reference.float(), dim=1).min())
        if not cosine >= _TRIAL_COSINE.get(self._compute.dtype, _TRIAL_COSINE_16):
            raise AttentionUnsupported(f"packed and padded states have cosine {cosine:.6f}")
        if kernel is Kernel.SDPA and self._compute.device.type == "cpu":
            return calibration.measure(*trial.shapes[0], self._compute.dtype)
        return table

    def _sample(self, lengths: tuple[int, ...]) -> Packed:
        """Random ids, none of them the pad id: stock code takes that for padding."""
        counts = np.minimum(lengths, self.max_tokens).astype(np.int64)
        ids = np.random.default_rng(0).integers(0, self.vocabulary, int(counts.sum()), dtype=np.int32)
        ids[ids == self._pad] = (self._pad + 1) % self.vocabulary
        return self.pack(Items(counts, ids), np.arange(len(counts)))


def _load_model(folder: Path, load: LoadOptions, compute: Compute) -> PreTrainedModel:
    attention.register()
    options: dict[str, Any] = {"attn_implementation": "eager"} if compute.backend == "eager" else {}
    with _CONSTRUCTION:
        model, report = AutoModel.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=load.trust_remote_code,
            ignore_mismatched_sizes=True, output_loading_info=True, **options,
        )  # fmt: skip
    if model.config.is_encoder_decoder:
        raise load_failed("INCOMPATIBLE", f"{model.config.model_type} has a decoder, which the family text-encoder does not run")
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        names = sorted(str(name) for name in report[fault] if not any(part in str(name) for part in _HARMLESS))
        if names:
            raise load_failed("INCOMPATIBLE", f"the weights have {len(names)} {fault.replace('_', ' ')}: {', '.join(names[:5])}")
    _cast(model, compute.dtype)
    return model.eval().requires_grad_(False).to(compute.device)


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Weights to `dtype`, other than those the architecture keeps in float32. Buffers stay: a rotary base in 16 bit is another model."""
    kept = {*(getattr(model, "_keep_in_fp32_modules", None) or ()), *(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    for name, parameter in model.named_parameters():
        if kept.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def _load_tokenizer(folder: Path, load: LoadOptions) -> bytes:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=load.trust_remote_code)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise load_failed("INCOMPATIBLE", f"{type(tokenizer).__name__} has no fast tokenizer")
    bare = Tokenizer.from_str(backend.to_str())
    bare.no_truncation()
    bare.no_padding()
    return bare.to_str().encode()


def _numbering(model: PreTrainedModel) -> Positions:
    """RoBERTa kinds count positions from the pad id on; they are known by the method that does it."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            return Positions(module.padding_idx + 1, module.padding_idx)
    return Positions()


def _bytes_of(model: PreTrainedModel) -> int:
    """Weights and buffers, each storage once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in [*model.parameters(), *model.buffers()]}
    return sum(storage.nbytes() for storage in storages.values())


def _evenly_long(lengths: Int64) -> Iterator[tuple[int, int]]:
    """Cut sequences, shortest first, into runs whose padding stays within _PADDED_WASTE."""
    start, real = 0, 0
    for stop, length in enumerate(lengths.tolist(), 1):
        if (stop - start) * length > _PADDED_WASTE * (real + length):
            yield start, stop - 1
            start, real = stop - 1, 0
        real += length
    if start < len(lengths):
        yield start, len(lengths)
