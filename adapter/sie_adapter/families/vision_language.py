"""Vision-language models that give a vector for each token: a page is found by its picture. ColPali (arXiv 2407.01449).

image ──► tower ──► projected features ──┐
                                         ├──► packed language model ──► states ──► a linear layer ──► token vectors
ids of a text, or of the prompt of a page ┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer, processors
from torch import Tensor
from transformers import ColPaliForRetrieval

from sie_adapter.backbone import Backbone
from sie_adapter.checkpoint import empty_model, load_model, read_json
from sie_adapter.device import Compute
from sie_adapter.families.extraction import bytes_of
from sie_adapter.families.packed_model import PackedModel, fault_of_tokenizer
from sie_adapter.heads import Head
from sie_adapter.heads.multivector import MultivectorHead
from sie_adapter.images import Tower, processor_of
from sie_adapter.linear import block_linears
from sie_adapter.packing import Features, Int64, Items, Packed, Shown
from sie_adapter.tokenizer import fitted, load_tokenizer
from sie_contracts.entries import LoadOptions, ModelEntry
from sie_contracts.ipc import ImageTokens, Rows
from sie_contracts.load_errors import load_failed

_PAGE_PROMPT = "<bos>Describe the image.\n"  # behind the image. Source: transformers, ColPaliProcessor
_PATCHES_PER_TOKEN = 4  # of the tower, which take about the time of one token of the language model


@dataclass
class _Pass(Packed):
    """`shown`: the images of its sequences, in packed order."""

    shown: Sequence[Shown] = ()


class VisionLanguage(PackedModel):
    """A loaded model; `backbone` is the language model."""

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        """What a load would refuse of class, shapes and tokenizer; empty if nothing. Reads no values of weights and
        runs no code of the folder. Raises ModelLoadFailed for tensors that are not those of the class.
        """
        _check_type(folder, entry)
        processor_of(folder, entry)
        model: Any = empty_model(ColPaliForRetrieval, folder, entry.load)
        table = model.vlm.get_input_embeddings().num_embeddings
        return fault_of_tokenizer(load_tokenizer(folder, entry.load), table)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        """Load from `folder`. Raises ModelLoadFailed INCOMPATIBLE for weights, limits or files that do not fit the
        entry.
        """
        _check_type(folder, entry)
        super().__init__(entry, compute)
        recipe, normalisation = processor_of(folder, entry)
        with torch.inference_mode():
            model: Any = load_model(ColPaliForRetrieval, folder, load, compute, float32_head=True)
            self.memory_bytes = bytes_of(model)
            vlm, language = model.vlm, model.vlm.language_model
            _attend_both_ways(language)
            if compute.device.type == "cpu":
                block_linears(vlm.vision_tower)
                block_linears(vlm.multi_modal_projector)
            self._run_on(Backbone(language, compute, entry.max_tokens), language, compute)
        self.width: int = model.config.embedding_dim
        tokenizer, _ = fitted(load_tokenizer(folder, load), self.vocabulary)
        # the prompts have the only special tokens
        tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
        self.tokenizer = tokenizer.to_str().encode()
        patches = (recipe.height // vlm.config.vision_config.patch_size) ** 2
        tokens = ImageTokens(
            vlm.config.image_token_id,
            patches,
            after=tuple(tokenizer.encode(_PAGE_PROMPT, add_special_tokens=False).ids),
        )
        self._check(entry, tokenizer, tokens)
        images = msgspec.structs.replace(recipe, tokens=max(1, patches // _PATCHES_PER_TOKEN))
        self._image_token = tokens.token
        self.rows = {
            "encode": Rows("text", vectors=self.width, images=images, image_tokens=tokens),
            "score": Rows("sides", vectors=self.width, images=images, image_tokens=tokens),
        }
        self.heads: dict[str, Head] = {"multivector": MultivectorHead(model.embedding_proj_layer, compute.device)}
        self._tower = Tower(lambda pixels: vlm.get_image_features(pixels).pooler_output, normalisation, compute)

    def _check(self, entry: ModelEntry, tokenizer: Tokenizer, tokens: ImageTokens) -> None:
        self._check_width(entry, "multivector", self.width)
        if (length := tokens.count + len(tokens.after)) > entry.max_tokens:
            raise load_failed(
                "INCOMPATIBLE", f"{entry.id}: max_tokens is {entry.max_tokens}, the row of an image has {length}"
            )
        if tokenizer.id_to_token(tokens.token) is None:
            raise load_failed(
                "INCOMPATIBLE", f"{entry.id}: the token of images, {tokens.token}, is not its tokenizer's"
            )

    def pack(self, batch: Items, chosen: Int64) -> Packed:
        """Lay out the chosen items, with the images of each."""
        packed = self.backbone.pack(batch, chosen)
        if batch.images is None:
            return packed
        shown = [image for row in batch.images.of(packed.order) for image in row]
        return _Pass(**{each.name: getattr(packed, each.name) for each in fields(Packed)}, shown=shown)

    def forward(self, packed: Packed) -> Tensor:
        """Hidden states of the last layer, [tokens, width], in packed order. Under inference mode only."""
        if isinstance(packed, _Pass) and packed.shown:
            packed.features = Features(self._image_token, self._tower.forward(packed.shown).flatten(0, 1))
        return self.backbone.forward(packed)


def _attend_both_ways(language: Any) -> None:
    """Have every token of a prompt see every other one, as the processor's token types say."""
    language.config.is_causal = False
    for module in language.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False


def _check_type(folder: Path, entry: ModelEntry) -> None:
    found = read_json(folder / "config.json").get("model_type")
    if found != "colpali":
        raise load_failed("INCOMPATIBLE", f"{entry.id}: model_type is {found}, a vision-language model is colpali")
