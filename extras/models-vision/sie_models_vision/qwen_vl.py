"""Base of the model classes of Qwen2.5-VL and Qwen3-VL for `vision_language`: images of any size, positions on three
axes.

  images ──► patches of all images ──► tower ──► features of each block ──► replace the image tokens
                                                        └──► `axes_of`: positions of images and texts
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer, processors
from torch import Tensor, nn
from transformers import AutoModel

from sie_adapter.engine.device import Compute
from sie_adapter.heads import Head
from sie_adapter.heads.multivector import MultivectorHead
from sie_adapter.loading.checkpoint import empty_model, load_model
from sie_adapter.packed.images import GridTower, Patches
from sie_adapter.packed.packing import Int64, PackedBatch, PlacedFeatures, Shown
from sie_contracts.errors import InternalFailure
from sie_contracts.media.images import ImageTokens, Normalisation, Recipe
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_models_vision.projection import Projected, TokenVectors, projection_of, tensor_names

# Text before and after the image of a page. Source: colpali-engine, ColQwen2_5_Processor and ColQwen3Processor.
_BEFORE_PAGE, _AFTER_PAGE = (
    "<|im_start|>user\n<|vision_start|>",
    "<|vision_end|>Describe the image.<|im_end|><|endoftext|>",
)
_PROJECTION = "custom_text_proj"
# name of the weight of the output layer. The model does not load this weight; a reranker reads a few rows of it
LANGUAGE_HEAD = "lm_head.weight"
# cost of a block of an image, in tokens: the four patches of a block take about as long in the image encoder as one
# token in the language model
_BLOCK_TOKENS = 1


class QwenVL:
    consumed: tuple[str, ...] = (LANGUAGE_HEAD,)

    @classmethod
    def table_of_files(cls, folder: Path, entry: ModelEntry) -> int:
        model: Any = empty_model(AutoModel, folder, entry.load, cls.consumed)
        return int(model.get_input_embeddings().num_embeddings)

    def __init__(
        self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute, normalisation: Normalisation
    ) -> None:
        self._id = entry.id
        self.model: Any = load_model(AutoModel, folder, load, compute, self.consumed)
        self._visual = self.model.visual
        self.language = self.model.language_model
        self.adapted: nn.Module = self.language
        self.towers = (self._visual,)
        self._token: int = self.model.config.image_token_id
        config = self.model.config.vision_config
        self._patches = Patches(config.patch_size, config.spatial_merge_size, config.temporal_patch_size)
        self._tower = GridTower(self._features, self._patches, normalisation, compute)

    def _features(self, patches: Tensor, grids: Tensor) -> tuple[Tensor, ...]:
        output = self._visual(patches, grid_thw=grids)
        return (output.pooler_output, *(getattr(output, "deepstack_features", None) or ()))

    def framed(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return the tokenizer without special tokens around a text: the prompts already contain the special tokens."""
        tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
        return tokenizer

    def priced(self, recipe: Recipe) -> Recipe:
        unit = self._patches.edge * self._patches.merged
        if recipe.kind != "blocks" or recipe.multiple != unit:
            raise incompatible(
                f"{self._id}: config.json cuts images into blocks of {unit} pixels, preprocessor_config.json does not"
            )
        return msgspec.structs.replace(recipe, block_tokens=_BLOCK_TOKENS)

    def see(self, packed: PackedBatch, images: Sequence[Sequence[Shown]]) -> None:
        packed.axes = axes_of(packed, self._token, [[self._tower.grid(image) for image in row] for row in images])
        values, *deeper = self._tower.forward([image for row in images for image in row])
        packed.features = PlacedFeatures(self._token, values, tuple(deeper))


class ColQwen(TokenVectors, QwenVL):
    """Model class of ColQwen2.5 and ColQwen3 in `vision_language`: its output is one vector per token."""

    consumed = (LANGUAGE_HEAD, *tensor_names(_PROJECTION))

    @classmethod
    def table_of_files(cls, folder: Path, entry: ModelEntry) -> int:
        projection_of(folder, entry, _PROJECTION)
        return super().table_of_files(folder, entry)

    def __init__(
        self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute, normalisation: Normalisation
    ) -> None:
        super().__init__(folder, entry, load, compute, normalisation)
        projection = projection_of(folder, entry, _PROJECTION).to(compute.device)
        self.adapted = projected = Projected(self.language, _PROJECTION, projection)
        self.width = projection.out_features
        self.heads: dict[str, Head] = {"multivector": MultivectorHead(projected, compute.device)}

    def tokens(self, tokenizer: Tokenizer, recipe: Recipe) -> ImageTokens:
        before, after = (tuple(tokenizer.encode(text).ids) for text in (_BEFORE_PAGE, _AFTER_PAGE))
        return ImageTokens(self._token, before=before, after=after)


def axes_of(packed: PackedBatch, token: int, grids: Sequence[Sequence[tuple[int, int]]]) -> Int64:
    """Return the positions of each token in time, height and width, [3, tokens]. `grids`: for each sequence in packed
    order, the (rows, columns) of blocks of each of its images.

    An image begins at the position where the text before it ends. An image of `rows` x `columns` blocks takes max(rows,
    columns) positions; then the next text begins. Source: transformers, Qwen2_5_VLModel.get_rope_index. Raises
    InternalFailure if a sequence does not have one image token (id `token`) for each block.
    """
    axes = np.tile(packed.positions, (3, 1))
    for sequence, images in enumerate(grids):
        start, stop = packed.bounds[sequence : sequence + 2].tolist()
        places = start + np.flatnonzero(packed.ids[start:stop] == token)
        if len(places) != sum(rows * columns for rows, columns in images):
            message = (
                f"a text has {len(places)} image tokens, but its {len(images)} images have another number of blocks "
                "(merged patches)"
            )
            raise InternalFailure(message, reason="malformed_batch")
        position, done = 0, start
        for rows, columns in images:
            first, places = int(places[0]), places[rows * columns :]
            axes[:, done:first] = position + np.arange(first - done)
            position += first - done
            done = first + rows * columns
            axes[0, first:done] = position
            axes[1, first:done] = position + np.repeat(np.arange(rows), columns)
            axes[2, first:done] = position + np.tile(np.arange(columns), rows)
            position += max(rows, columns)
        axes[:, done:stop] = position + np.arange(stop - done)
    return axes
