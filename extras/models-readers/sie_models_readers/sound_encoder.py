"""Dual encoders, whose vectors of texts and of sounds can be compared: CLAP (arXiv 2211.06687).

    token ids ──► packed text tower ──► pooler of the first token ──► projection ──┐
                                                                                   ├──► one vector for each row
    features ──► normalised by band ──► sound tower, stacked ──► projection ───────┘

A row has either token ids or a sound.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel, ClapConfig, RobertaConfig, RobertaModel

from sie_adapter.engine.device import Compute, to_device
from sie_adapter.families.text_encoder import fault_of_tokenizer
from sie_adapter.families.text_model import check_width
from sie_adapter.heads import Head
from sie_adapter.loading.checkpoint import empty_model, load_model
from sie_adapter.loading.tokenizer import fitted, load_tokenizer
from sie_adapter.packed.backbone import Backbone
from sie_adapter.packed.images import PROCESSOR, extractor_of, passes, per_pass
from sie_adapter.packed.linear import block_linears, bytes_of
from sie_adapter.packed.packing import BatchFiles, Heard, Items, PackedBatch
from sie_contracts.media.sounds import SoundRecipe
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_contracts.wire.ipc import Rows
from sie_models_vision.dual_encoder import TwoTowers, VectorHead
from sie_store.folder_files import read_json

MODEL_TYPE = "clap"
# names of settings that the text encoder of CLAP shares with RoBERTa
_OF_ROBERTA = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "max_position_embeddings",
    "type_vocab_size",
    "layer_norm_eps",
    "pad_token_id",
)


class _Clap:
    """CLAP, whose text vector is computed from the first token. Source: transformers, ClapModel."""

    filled = filler = 0

    def __init__(self, model: Any, compute: Compute) -> None:
        self.reader = _roberta(model.text_model)
        self._pooler = model.text_model.pooler.float()
        self._of_text = model.text_projection.float()
        self._sounds = model.audio_model
        self._of_sound = model.audio_projection.float()
        self._fused: bool = model.config.audio_config.enable_fusion
        encoder = self._sounds.audio_encoder
        encoder.batch_norm = _Float32(encoder.batch_norm, compute.dtype)
        self.width: int = model.config.projection_dim

    def text(self, hidden: Tensor, packed: PackedBatch) -> Tensor:
        first = packed.bounds[: len(packed.order)].astype(np.int64)
        states = hidden[to_device(first, hidden.device)].float()
        return self._of_text(self._pooler(states[:, None]))

    def sound(self, features: Tensor) -> Tensor:
        """Return the vector of each sound, float32 [sounds, width], from features [sounds, views, frames, bins],
        float32.

        A model with fusion fuses the views of every sound, like transformers for a single sound. In a batch,
        transformers fuses only the long sounds, or one random sound if none is long.
        """
        more = {}
        if self._fused:
            more["is_longer"] = torch.ones(len(features), 1, dtype=torch.bool, device=features.device)
        vectors: Tensor = self._of_sound(self._sounds(input_features=features, **more).pooler_output.float())
        return vectors


def _roberta(source: Any) -> Any:
    """Return CLAP's text encoder as a RobertaModel with the same weights. Unlike CLAP's own class, RobertaModel passes
    the bounds of packed sequences to attention.
    """
    config = source.config
    own = RobertaConfig(**{name: getattr(config, name) for name in _OF_ROBERTA})
    with torch.device("meta"):
        model = RobertaModel._from_config(own, add_pooling_layer=False, attn_implementation=config._attn_implementation)
    for name in ("position_ids", "token_type_ids"):
        model.embeddings.register_buffer(name, getattr(source.embeddings, name), persistent=False)
    weights = source.state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict()}, assign=True)
    return model.eval().requires_grad_(False)


class _Float32(nn.Module):  # type: ignore[misc]  # the type checker skips torch
    """Layer that runs in float32 in a model of another dtype, because 16 bits are too coarse for levels in decibels."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self._dtype = layer, dtype

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.layer(values.float())
        return output.to(self._dtype)


class SoundEncoder(TwoTowers):
    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        _recipe(folder, entry)
        model: Any = empty_model(AutoModel, folder, entry.load)
        table = model.text_model.get_input_embeddings().num_embeddings
        return fault_of_tokenizer(load_tokenizer(folder, entry.load), table)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        recipe = _recipe(folder, entry)
        super().__init__(entry, compute)
        self._device = compute.device
        with torch.inference_mode():
            model: Any = load_model(AutoModel, folder, load, compute)
            self.memory_bytes = bytes_of(model)
            towers = _Clap(model, compute)
            self._towers, self._of_sounds = towers, towers.sound
            block_linears(model.audio_model)
            text = model.config.text_config
            self._check_positions(entry, text.max_position_embeddings - text.pad_token_id - 1)
            self._run_on(Backbone(towers.reader, compute, entry.max_tokens), towers.reader, compute)
        check_width(entry, "dense", towers.width)
        tokenizer, _ = fitted(load_tokenizer(folder, load), self.vocabulary)
        self.tokenizer = tokenizer.to_str().encode()
        self.rows = {"encode": Rows(tokens=True, sounds=recipe)}
        self.heads: dict[str, Head] = {"dense": VectorHead(towers)}
        self._most = per_pass(compute)

    @staticmethod
    def _files(batch: Items) -> BatchFiles[Any] | None:
        return batch.sounds

    def _of_files(self, rows: Sequence[Sequence[Heard]]) -> Tensor:
        sounds = [sound for row in rows for sound in row]
        return torch.cat(
            [
                self._of_sounds(to_device(np.stack(sounds[start:stop]), self._device))
                for start, stop in passes(len(sounds), self._most)
            ]
        )


def _recipe(folder: Path, entry: ModelEntry) -> SoundRecipe:
    """Return the recipe that turns sounds into features. Raises ModelLoadFailed for a model other than CLAP, and for a
    recipe that is missing, cannot be reproduced, or does not fit the model's encoder of sounds.
    """
    raw = read_json(folder / "config.json")
    if raw.get("model_type") != MODEL_TYPE:
        model_type = raw.get("model_type")
        raise incompatible(f"{entry.id}: model_type is {model_type}, family sound-encoder needs {MODEL_TYPE}")
    audio = ClapConfig.from_pretrained(folder, local_files_only=True).audio_config
    # The last stage of the encoder of sounds has edge x edge positions. The number of these positions is the cost of a
    # sound, because states are widest in this stage.
    edge = audio.spec_size // audio.patch_stride[0] >> (len(audio.depths) - 1)
    recipe = extractor_of(folder, entry, edge * edge)
    frames = audio.spec_size * (audio.spec_size // audio.num_mel_bins)
    if (recipe.fused, recipe.bins) != (audio.enable_fusion, audio.num_mel_bins) or recipe.shape.frames > frames:
        fuses = {True: "four views", False: "one view"}
        raise incompatible(
            f"{entry.id}: {PROCESSOR} makes {fuses[recipe.fused]} of {recipe.shape.frames} frames and "
            f"{recipe.bins} bins, the model reads {fuses[audio.enable_fusion]} of at most {frames} frames and "
            f"{audio.num_mel_bins} bins",
        )
    return recipe
