"""Packed engine: runs one transformers model, from token ids to one hidden state per token.

A trial decides whether a model runs packed. The model must call the attention interface with a mask that `attention`
supports. The cosine between its packed states and its padded states must be nearly 1. A model that fails the trial runs
padded on the attention code of transformers, and the cause is logged.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from sie_adapter.engine import engines
from sie_adapter.engine.device import Compute, give_memory_back, to_device, usable_cores
from sie_adapter.engine.engines import Choice, EngineLoad, NotServed, Rule, StateRunner, Unserved
from sie_adapter.memory.device_errors import is_device_fatal, is_out_of_memory
from sie_adapter.packed import attention
from sie_adapter.packed.attention import AttentionUnsupported, Kernel, Trial
from sie_adapter.packed.attention_backend import uses_varlen_kernel
from sie_adapter.packed.linear import block_linears, bytes_of
from sie_adapter.packed.lora import lora_acts
from sie_adapter.packed.packing import (
    PADDED_WASTE,
    Int64,
    Items,
    PackedBatch,
    PlacedFeatures,
    Positions,
    evenly_long,
    filled_up,
    pack,
    padded,
)
from sie_adapter.packed.pass_graphs import PassGraphs, Recorder, cuda_recorder
from sie_contracts.errors import SIEError
from sie_contracts.models import costs
from sie_contracts.models.load_errors import incompatible

_logger = logging.getLogger("sie.adapter")

# lengths, in tokens, of the sequences of the trial, which compares packed with padded states when a model is loaded;
# the longest exceeds the local window of ModernBERT
_TRIAL_LENGTHS = (3, 8, 16, 17, 40, 40, 140)
_LORA_LENGTHS = (8, 24)  # lengths in tokens of two sequences; a LoRA that does not change their states is refused
# smallest allowed cosine between a token's packed and padded states; for 16 bits, see _TRIAL_COSINE_16
_TRIAL_COSINE = {torch.float32: 0.9999}
_TRIAL_COSINE_16 = 0.99
_TRIAL_COSINE_INT8 = 0.95
_REFERENCE = "reference"  # derived file with the states of the trial's sequences in the unchanged model
_BACKENDS = {Kernel.FLASH: "flash_attention_2", Kernel.REFERENCE: "eager"}
_PADDED_LENGTHS = (8, 10, 40, 49)  # lengths of sequences that `evenly_long` pads, to measure the effect of padding


class Backbone:
    """Transformers model without its head. Several threads may call `forward` at once, under inference mode.

    `vocabulary`: all ids are below this number. `crossover_tokens`: the length of a sequence at which the attention
    takes as long as all other layers (`costs` computes this length from the model's configuration); 0 if no layer
    attends to the whole sequence. `positions`: the length of the longest sequence, None if there is no limit. `engine`:
    the engine that runs the model, and why it was chosen. `attention`: the attention backend in use, followed by
    ` padded` if torch runs the model on padded batches.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        compute: Compute,
        max_tokens: int,
        more_samples: int = 0,
        folder: Path | None = None,
    ) -> None:
        """Prepare the model. On torch, the first packed kernel that passes the trial replaces the model's attention. On
        a CPU, layers with weights in the blocked order of oneDNN replace the linear layers.

        `more_samples`: additional short sequences in the trial of the packed path. `folder`: the files of the
        model, which some engines read. Raises ModelLoadFailed if the entry demands an engine that cannot run the model,
        or if max_tokens is too large for the model's rotary embedding or sparse attention. Raises Unserved if an engine
        that frees torch first cannot run the model, and the entry does not demand it.
        """
        attention.register()
        # `model` may be a part of the loaded model, and the loader sets use_cache only in the whole model's config
        model.config.use_cache = False
        self._model = model
        self._compute = compute
        self._max_tokens = max_tokens
        self._folder = folder
        self._lengths = (*_TRIAL_LENGTHS, *(12 + number % 13 for number in range(more_samples)))
        self._pad = model.config.pad_token_id or 0
        # attention of transformers with which the model was loaded: sdpa, or eager if requested or if sdpa is missing
        self._stock = model.config._attn_implementation
        self._edge = 0
        _check_rotary(model, max_tokens)
        _check_sparse(model.config, max_tokens)
        self._numbering = _numbering(model)
        self._runner: StateRunner | None = None
        # result of `is_causal`, measured on torch before another engine frees its weights; else None
        self._is_causal: bool | None = None
        self._trial: tuple[PackedBatch, Tensor] | None = None
        self._kernel: Kernel | None = None
        self._graphs: PassGraphs | None = None
        self._has_types = (getattr(model.config, "type_vocab_size", None) or 0) > 1
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self.crossover_tokens = _crossover_tokens(model.config)
        limit = getattr(model.config, "max_position_embeddings", None)
        self.positions: int | None = limit - self._numbering.first if limit and limit > 0 else None
        self.engine = compute.engine
        self.attention: str = compute.backend
        self._waste = PADDED_WASTE
        with torch.inference_mode():
            rule = engines.rules()[self.engine.engine]
            if rule.load is not None:
                self._hand_over(rule, rule.load)
            if self._runner is None:
                self._settle_on_torch()

    def run_padded(self) -> None:
        """Run the model with its own attention on padded batches from now on. This is the path of a model for which no
        kernel passes the trial. Do not call this during a pass.
        """
        self._kernel = None
        self._model.set_attn_implementation(self._stock)
        self.attention = f"{self._stock} padded"

    def pack(self, batch: Items, chosen: Int64) -> PackedBatch:
        """Lay out the chosen items one after the other, with the positions that the model's architecture uses."""
        return pack(batch, chosen, self._numbering)

    def forward(self, packed: PackedBatch) -> Tensor:
        """Return hidden states of the last layer, [tokens, width], in packed order, in the dtype of `compute`, or
        another dtype from another engine.
        """
        if self._graphs is None or self._kernel is None or lora_acts():
            return self._forward_eager(packed)
        return self._graphs.states(packed, self._forward_eager, self._run)

    def _forward_eager(self, packed: PackedBatch) -> Tensor:
        if self._runner is not None:
            return self._runner.run(packed)
        return self.forward_padded(packed) if self._kernel is None else self._forward_packed(packed, self._kernel)

    def _forward_packed(self, packed: PackedBatch, kernel: Kernel, trial: Trial | None = None) -> Tensor:
        device, real = self._compute.device, len(packed.ids)
        if device.type == "cpu" and trial is None:
            packed = filled_up(packed, self._pad, self._numbering)
        rows = [packed.ids, packed.positions]
        if packed.types is not None and self._has_types:
            rows.append(packed.types.astype(np.int64))
        tokens = to_device(np.stack(rows), device)
        places = tokens[1:2] if packed.axes is None else to_device(packed.axes, device)[:, None]
        inputs = self._inputs(tokens[:1], packed.ids, packed.features)
        layout, bounds = attention.layout_of(kernel, packed), to_device(packed.bounds, device)
        return self._run(tokens, bounds, layout, position_ids=places, sie_trial=trial, **inputs)[:real]

    def _run(self, tokens: Tensor, bounds: Tensor, layout: Int64, **inputs: Any) -> Tensor:
        """Call the model, and return the states of its last layer. `tokens`: a row of ids, a row of positions, and for
        some models a row of token types. `inputs`: further arguments; they replace arguments of the same name.
        """
        own = {} if "inputs_embeds" in inputs else {"input_ids": tokens[:1]}
        own |= {"position_ids": tokens[1:2]} | ({"token_type_ids": tokens[2:]} if len(tokens) > 2 else {})
        paths = {"sie_bounds": bounds, "sie_layout": torch.from_numpy(layout), "sie_edge": self._edge}
        return self._model(**{**own, **paths, **inputs})[0][0]

    def forward_padded(self, packed: PackedBatch) -> Tensor:
        """Return the states of `forward`, computed on batches that are padded on the right, with a mask."""
        groups = evenly_long(packed.lengths.tolist(), self._waste)
        return torch.cat([self._forward_padded_part(packed, start, stop) for start, stop in groups])

    def _allowed_waste(self) -> float:
        """Return the largest number of positions per token in a padded group; 1 means no padding. Some classes of
        transformers get 1, because padding changes their states, for example by a convolution over tokens.
        """
        sample = self.sample(_PADDED_LENGTHS)
        alone = [self._forward_padded_part(sample, place, place + 1) for place in range(len(sample.order))]
        try:
            self._compare(self.forward_padded(sample), torch.cat(alone), "the padded states")
        except AttentionUnsupported as error:
            _logger.warning("%s runs without padding: %s", type(self._model).__name__, error)
            return 1.0
        return PADDED_WASTE

    def _forward_padded_part(self, packed: PackedBatch, start: int, stop: int) -> Tensor:
        device = self._compute.device
        part = padded(packed, start, stop, int(packed.lengths[stop - 1]), self._pad)
        more = {}
        if part.types is not None and self._has_types:
            more["token_type_ids"] = to_device(part.types, device)
        if packed.axes is not None:
            places = np.zeros((len(packed.axes), *part.real.shape), np.int64)
            places[:, part.real] = packed.axes[:, part.tokens]
            more["position_ids"] = to_device(places, device)
        mask = to_device(part.attended, device).long()
        features = _of_part(packed.features, packed.ids, part.tokens)
        inputs = self._inputs(to_device(part.ids, device), part.ids, features)
        hidden = self._model(**inputs, attention_mask=mask, **more)[0]
        # indices, not a mask: for a mask, the host would wait until the device has counted the True values
        return hidden.flatten(0, 1)[to_device(np.flatnonzero(part.real), device)]

    def _inputs(self, ids: Tensor, on_host: Int64, features: PlacedFeatures | None) -> dict[str, Any]:
        """Return the model's arguments for one pass. Without features: `ids` [.., tokens]. With features: the
        embeddings of `ids`, with features in place of image tokens, and the features for deeper layers.
        """
        if features is None:
            return {"input_ids": ids}
        embeddings = self._model.get_input_embeddings()(ids)
        is_feature = on_host == features.token
        places = to_device(np.flatnonzero(is_feature), embeddings.device)
        embeddings.flatten(0, 1)[places] = features.values.to(embeddings.dtype)
        if not features.deeper:
            return {"inputs_embeds": embeddings}
        mask = to_device(is_feature, embeddings.device).view(ids.shape)
        return {
            "inputs_embeds": embeddings,
            "visual_pos_masks": mask,
            "deepstack_visual_embeds": [layer.to(embeddings.dtype) for layer in features.deeper],
        }

    def _hand_over(self, rule: Rule, load: Callable[[EngineLoad], StateRunner]) -> None:
        """Load the model on another engine, and use it in place of torch if its states agree with the states of the
        unchanged transformers model. If the engine fails or its states differ, keep torch; if the entry demands the
        engine, raise ModelLoadFailed instead.

        If the engine `frees_torch`, torch's weights are freed first, since a GPU may not have memory for two copies of
        them: then raise Unserved where other engines keep torch.
        """
        sample = self.sample(self._lengths)
        earlier, name = self._kept_reference(sample), self.engine.engine
        reference = self._reference(sample) if earlier is None else earlier
        if rule.frees_torch:
            self._is_causal = self.is_causal()
            self._model.to("meta")
            give_memory_back(self._compute.device)
        try:
            if rule.only_causal and not self._is_causal:
                raise AttentionUnsupported(f"the model's attention is not causal, so {name} cannot run it here")
            cores = usable_cores()
            runner = load(EngineLoad(self._model, self._compute, self._folder, self._pad, self._max_tokens, cores))
            try:
                # an earlier load with the same key has passed all trials
                for states, places in itertools.islice(runner.trials(sample), None if earlier is None else 1):
                    self._compare(states[places], reference[places], rule.states)
            except BaseException:
                runner.close()
                raise
        except (NotServed, AttentionUnsupported, SIEError) as error:
            if self.engine.demand:
                raise incompatible(f"{self.engine.demand}: {error}") from error
            if rule.frees_torch:
                raise Unserved(f"{name}: {error}") from error
            self.engine = Choice("torch", f"not {name}: {error}")
            _logger.warning("%s runs on torch, not on %s: %s", type(self._model).__name__, name, error)
            return
        if earlier is None:
            self._compute.derived.keep(_REFERENCE, safetensors.torch.save({_REFERENCE: reference}))
        self._take_over(runner, sample, reference)
        self._model.to("meta")

    def _kept_reference(self, sample: PackedBatch) -> Tensor | None:
        """Return the states that an earlier load computed, whose engine passed all trials; None if there are none."""
        if (stored := self._compute.derived.read(_REFERENCE)) is None:
            return None
        states: Tensor = safetensors.torch.load(stored)[_REFERENCE]
        return states if len(states) == len(sample.ids) else None

    def _reference(self, sample: PackedBatch) -> Tensor:
        """Return the states of the unchanged transformers model."""
        self._waste = self._allowed_waste()
        return self.forward_padded(sample)

    def _take_over(self, runner: StateRunner, sample: PackedBatch, reference: Tensor) -> None:
        self._runner, self._trial = runner, (sample, reference)
        self.attention = runner.attention

    def _settle_on_torch(self) -> None:
        block_linears(self._model)
        self._kernel = self._choose_kernel()
        if self._kernel is None:
            self.run_padded()
        else:
            self.attention = _BACKENDS.get(self._kernel, "sdpa")
            if self._kernel >= Kernel.VARLEN and self._compute.device.type == "cuda":
                self.use_graphs(cuda_recorder(self._compute.device))

    def use_graphs(self, recorder: Recorder | None) -> None:
        """Run small passes as CUDA graphs from now on; `recorder` captures them. If `recorder` is None, use no graphs.
        Do not call this during a pass.
        """
        name, kernel, first = type(self._model).__name__, self._kernel, self._numbering.first
        self._graphs = None
        if recorder is not None and kernel is not None:
            device, has_types = self._compute.device, self._has_types
            self._graphs = PassGraphs(name, recorder, device, kernel, self._pad, first, has_types=has_types)

    def _choose_kernel(self) -> Kernel | None:
        sample = self.sample(self._lengths)
        reference = self._reference(sample)
        self._trial = sample, reference
        self._model.set_attn_implementation(attention.IMPLEMENTATION)
        for kernel in self._candidates():
            try:
                self._try(kernel, reference)
            except (
                AttentionUnsupported,
                ArithmeticError,
                ImportError,
                LookupError,
                RuntimeError,
                TypeError,
                ValueError,
                AttributeError,
            ) as error:
                if is_out_of_memory(error) or is_device_fatal(error):
                    raise
                _logger.info("%s does not run packed with %s: %s", type(self._model).__name__, kernel.name, error)
            else:
                return kernel
        return None

    def _candidates(self) -> list[Kernel]:
        if self._compute.backend == "eager":
            return [Kernel.REFERENCE]
        preferred = [Kernel.FLASH] if self._compute.backend == "flash_attention_2" else []
        return [*preferred, *([Kernel.VARLEN] if uses_varlen_kernel(self._compute.facts) else []), Kernel.SDPA]

    def _try(self, kernel: Kernel, reference: Tensor) -> None:
        """Run a trial with this kernel. Raises AttentionUnsupported if the states do not agree with `reference`."""
        trial, self._edge = Trial(), 0
        # a single sequence, so that transformers' mask does not depend on the packing of several sequences
        self._forward_packed(self.sample(_TRIAL_LENGTHS[-1:]), kernel, trial)
        layers = self._model.config.num_hidden_layers
        if trial.calls != layers:
            raise AttentionUnsupported(f"{trial.calls} of {layers} layers use the attention interface")
        self._edge = trial.edge()
        self._compare(self._forward_packed(self.sample(self._lengths), kernel), reference, "the packed states")

    def _compare(self, states: Tensor, reference: Tensor, subject: str) -> None:
        """Raise AttentionUnsupported if the cosine of a token's states in `states` and `reference` is not near 1."""
        cosine = float(F.cosine_similarity(states.float(), reference.float(), dim=1).min())
        usual = _TRIAL_COSINE.get(self._compute.dtype, _TRIAL_COSINE_16)
        if not cosine >= (_TRIAL_COSINE_INT8 if self._compute.int8 else usual):
            raise AttentionUnsupported(f"{subject} and those of the stock path have cosine {cosine:.6f}")

    def take_trial(self) -> tuple[PackedBatch, Tensor]:
        """Remove and return the sequences of the trial and their states in the unchanged transformers model. Call this
        at most once.
        """
        assert self._trial is not None
        trial, self._trial = self._trial, None
        return trial

    def is_causal(self) -> bool | None:
        """Return True if the state of a text's first token does not depend on the text's last token, else False. Test
        this with the text alone and in a batch with a longer text; return None if the two tests give different results.
        """
        if self._is_causal is not None:
            return self._is_causal
        verdicts = {self._ignores_last(self.sample(lengths)) for lengths in ((8,), (8, 9))}
        return verdicts.pop() if len(verdicts) == 1 else None

    def _ignores_last(self, sample: PackedBatch) -> bool:
        last = int(sample.bounds[1]) - 1
        near = ((sample.ids[last] + step) % self.vocabulary for step in (1, 2))
        changed = sample.ids.copy()
        changed[last] = next(token for token in near if token != self._pad)
        before, after = (self._in_one_pass(batch)[0] for batch in (sample, replace(sample, ids=changed)))
        return bool(torch.equal(before, after))

    def _in_one_pass(self, packed: PackedBatch) -> Tensor:
        """Return the states of texts that run in one pass. If the model runs padded, pad the texts even if
        `_allowed_waste` allows no padding.
        """
        if self._runner is None and self._kernel is None:
            return self._forward_padded_part(packed, 0, len(packed.order))
        return self._forward_eager(packed)

    def sample(self, lengths: tuple[int, ...]) -> PackedBatch:
        """Return packed sequences of random ids for trials. No id is the pad id, which models treat as padding. The
        first sequence has a mask token, because ESM scales the embeddings of a sequence by its share of mask tokens.
        """
        counts = np.minimum(lengths, self._max_tokens).astype(np.int64)
        ids = np.random.default_rng(0).integers(0, self.vocabulary, int(counts.sum()), dtype=np.int32)
        if (mask := getattr(self._model.config, "mask_token_id", None)) is not None:
            ids[1:2] = mask % self.vocabulary
        ids[ids == self._pad] = (self._pad + 1) % self.vocabulary
        return self.pack(Items(counts, ids), np.arange(len(counts)))

    def sampled(self) -> Tensor:
        """Return the states of two short, constant sequences. Only a LoRA can change these states."""
        return self._forward_eager(self.sample(_LORA_LENGTHS))

    @property
    def memory_bytes(self) -> int:
        """Bytes that the model uses on the device: its weights and buffers on torch, or the bytes that another engine
        reports.
        """
        return bytes_of(self._model) if self._runner is None else self._runner.memory_bytes


def _of_part(features: PlacedFeatures | None, ids: Int64, tokens: slice) -> PlacedFeatures | None:
    """Return the image features that replace placeholder tokens within the slice `tokens` of a batch; None if the slice
    has no placeholder.
    """
    if features is None:
        return None
    before, within = (int((ids[part] == features.token).sum()) for part in (slice(tokens.start), tokens))
    if not within:
        return None
    part = slice(before, before + within)
    return PlacedFeatures(features.token, features.values[part], tuple(layer[part] for layer in features.deeper))


def _check_rotary(model: PreTrainedModel, max_tokens: int) -> None:
    """Raise ModelLoadFailed if a text of at most `max_tokens` tokens can make transformers change the model's rotary
    tables. Such a change would affect other texts, in the same batch and on other threads.
    """
    parameters = getattr(model.config, "rope_parameters", None) or {}
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layers, kind in kinds.items() if isinstance(kinds, dict) else (("", kinds),):
            if kind not in ("longrope", "dynamic"):
                continue
            short = getattr(module, "original_max_seq_len", None) or model.config.max_position_embeddings
            if kind == "longrope":
                short = parameters.get(layers, parameters).get("original_max_position_embeddings") or short
            if max_tokens > short:
                cause = f"its rotary embedding changes past {short} tokens ({kind}): max_tokens may be {short} at most"
                raise incompatible(cause)


def _check_sparse(config: PretrainedConfig, max_tokens: int) -> None:
    """Raise ModelLoadFailed if BigBird has sparse attention for a text of at most `max_tokens` tokens. After one short
    text, BigBird's class in transformers uses full attention for all later texts, so the states of a long text would
    depend on earlier texts.
    """
    if getattr(config, "attention_type", None) != "block_sparse":
        return
    short = (5 + 2 * config.num_random_blocks) * config.block_size
    if max_tokens > short:
        raise incompatible(f"its attention is sparse past {short} tokens: max_tokens may be {short} at most")


def _crossover_tokens(config: PretrainedConfig) -> int:
    layers = config.num_hidden_layers
    usual = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = getattr(config, "layer_types", None) or [usual] * layers
    return costs.crossover_tokens(config.hidden_size, layers, kinds.count("full_attention"))


def _numbering(model: PreTrainedModel) -> Positions:
    """Return how the model numbers positions. RoBERTa and similar models begin at the pad id plus 1."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_inputs_embeds") and hasattr(module, "position_embeddings"):
            return Positions(module.padding_idx + 1, module.padding_idx)
    return Positions()
