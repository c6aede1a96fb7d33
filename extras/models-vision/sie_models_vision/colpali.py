"""Model class of ColPali (on PaliGemma) for `vision_language`: images of one size, and bidirectional attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, processors
from transformers import ColPaliForRetrieval

from sie_adapter.engine.device import Compute
from sie_adapter.heads import Head
from sie_adapter.heads.multivector import MultivectorHead
from sie_adapter.loading.checkpoint import empty_model, load_model
from sie_adapter.packed.images import Tower
from sie_adapter.packed.packing import PackedBatch, PlacedFeatures, Shown
from sie_contracts.media.images import ImageTokens, Normalisation, Recipe
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_models_vision.projection import TokenVectors

_PAGE_PROMPT = "<bos>Describe the image.\n"  # prompt after the image. Source: transformers, ColPaliProcessor
# The cost of an image in tokens is the number of its patches, divided by this number: 4 patches take about as long in
# the image encoder as one token in the language model.
_PATCHES_PER_TOKEN = 4


class ColPali(TokenVectors):
    @staticmethod
    def table_of_files(folder: Path, entry: ModelEntry) -> int:
        model: Any = empty_model(ColPaliForRetrieval, folder, entry.load)
        return int(model.vlm.get_input_embeddings().num_embeddings)

    def __init__(
        self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute, normalisation: Normalisation
    ) -> None:
        self.model: Any = load_model(ColPaliForRetrieval, folder, load, compute, float32_head=True)
        self._vlm = vlm = self.model.vlm
        self.language = self.adapted = vlm.language_model
        self.towers = (vlm.vision_tower, vlm.multi_modal_projector)
        self.width = self.model.config.embedding_dim
        self.heads: dict[str, Head] = {"multivector": MultivectorHead(self.model.embedding_proj_layer, compute.device)}
        self._tower = Tower(
            lambda pixels: vlm.get_image_features(pixels).pooler_output, normalisation, compute, keeps=True
        )
        _attend_both_ways(self.language)

    def framed(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return the tokenizer without special tokens around a text: the prompts already contain the special tokens."""
        tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
        return tokenizer

    def tokens(self, tokenizer: Tokenizer, recipe: Recipe) -> ImageTokens:
        after = tokenizer.encode(_PAGE_PROMPT, add_special_tokens=False).ids
        return ImageTokens(self._vlm.config.image_token_id, self._patches(recipe), after=tuple(after))

    def _patches(self, recipe: Recipe) -> int:
        return int(recipe.height // self._vlm.config.vision_config.patch_size) ** 2

    def priced(self, recipe: Recipe) -> Recipe:
        return msgspec.structs.replace(recipe, tokens=max(1, self._patches(recipe) // _PATCHES_PER_TOKEN))

    def see(self, packed: PackedBatch, images: Sequence[Sequence[Shown]]) -> None:
        features = self._tower.forward([image for row in images for image in row]).flatten(0, 1)
        packed.features = PlacedFeatures(self._vlm.config.image_token_id, features)


def _attend_both_ways(language: Any) -> None:
    """Let each token attend to its whole sequence, like transformers for the token types of the processor."""
    language.config.is_causal = False
    for module in language.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
