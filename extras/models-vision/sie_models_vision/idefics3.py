"""Model class of ColIdefics3 (ColSmol) for `vision_language`: a page is cut into tiles, and each tile has tokens.

page ──► tiles, then the whole page as one tile ──► tower ──► features ──► replace the image tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModel

from sie_adapter.engine.device import Compute
from sie_adapter.heads import Head
from sie_adapter.heads.multivector import MultivectorHead
from sie_adapter.loading.checkpoint import empty_model, load_model
from sie_adapter.packed.images import TileTower
from sie_adapter.packed.packing import PackedBatch, PlacedFeatures, Shown
from sie_contracts.media.images import ImageTokens, Normalisation, Recipe, TileTokens, max_tiles
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_models_vision.projection import Projected, TokenVectors, projection_of, tensor_names

# Text around an image, and names of tokens. Source: colpali-engine, ColIdefics3Processor; transformers,
# Idefics3Processor.
_BEFORE_PAGE, _AFTER_PAGE = "<|im_start|>User:", "Describe the image.<end_of_utterance>\nAssistant:"
_IMAGE, _AROUND, _OVERVIEW = "<image>", "<fake_token_around_image>", "<global-img>"
_PROJECTION = "linear"
# The cost of a tile in tokens is the number of its patches, divided by this number: 4 patches take about as long in the
# image encoder as one token in the language model.
_PATCHES_PER_TOKEN = 4


class ColIdefics(TokenVectors):
    consumed = tensor_names(_PROJECTION)

    @classmethod
    def table_of_files(cls, folder: Path, entry: ModelEntry) -> int:
        model: Any = empty_model(AutoModel, folder, entry.load, cls.consumed)
        projection_of(folder, entry, _PROJECTION)
        return int(model.get_input_embeddings().num_embeddings)

    def __init__(
        self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute, normalisation: Normalisation
    ) -> None:
        self._id = entry.id
        self.model: Any = load_model(AutoModel, folder, load, compute, self.consumed)
        self.language = self.model.text_model
        projection = projection_of(folder, entry, _PROJECTION).to(compute.device)
        self.adapted = projected = Projected(self.language, _PROJECTION, projection)
        self.towers = (self.model.vision_model, self.model.connector)
        self.width = projection.out_features
        self.heads: dict[str, Head] = {"multivector": MultivectorHead(projected, compute.device)}
        self._token: int = self.model.config.image_token_id
        self._edge: int = self.model.config.vision_config.image_size
        self._count: int = self.model.image_seq_len
        self._tower = TileTower(self._features, self._edge, normalisation, compute)

    def _features(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.model.connector(self.model.vision_model(pixel_values=pixels).last_hidden_state)
        return features

    def framed(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return the tokenizer unchanged: its own special tokens are around texts and around the prompt of a page."""
        return tokenizer

    def tokens(self, tokenizer: Tokenizer, recipe: Recipe) -> ImageTokens:
        rows = max_tiles(recipe)
        around, tile = f"{_AROUND}{{}}", _IMAGE * self._count
        overview = f"{around.format(_OVERVIEW)}{tile}{_AROUND}"
        tiles = "".join(
            "".join(f"{around.format(f'<row_{row}_col_{column}>')}{tile}" for column in range(1, rows + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        before, after = self._between(tokenizer, overview, 1)
        *parts, last, _ = self._between(tokenizer, f"{tiles}\n{overview}", rows**2 + 1)
        places = tuple(tuple(parts[start : start + rows]) for start in range(0, rows**2, rows))
        return ImageTokens(self._token, self._count, before, after, tiles=TileTokens(places, last))

    def _between(self, tokenizer: Tokenizer, image: str, tiles: int) -> list[tuple[int, ...]]:
        """Return the token ids of a page's prompt: before the first tile, between the tiles, and after the last tile.
        Raises ModelLoadFailed for a tokenizer of another model.
        """
        ids = tokenizer.encode(f"{_BEFORE_PAGE}{image}{_AFTER_PAGE}").ids
        runs = [(is_tile, tuple(run)) for is_tile, run in groupby(ids, lambda number: number == self._token)]
        if [len(run) for is_tile, run in runs if is_tile] != [self._count] * tiles:
            raise incompatible(f"{self._id}: its tokenizer has no token {_IMAGE} with the id {self._token}")
        return [run for is_tile, run in runs if not is_tile]

    def priced(self, recipe: Recipe) -> Recipe:
        vision = self.model.config.vision_config
        if recipe.kind != "tiles" or recipe.multiple != self._edge:
            raise incompatible(
                f"{self._id}: config.json cuts images into tiles of {self._edge} pixels, preprocessor_config.json"
                " does not",
            )
        patches = (self._edge // vision.patch_size) ** 2
        return msgspec.structs.replace(recipe, block_tokens=max(1, patches // _PATCHES_PER_TOKEN))

    def see(self, packed: PackedBatch, images: Sequence[Sequence[Shown]]) -> None:
        features = self._tower.forward([image for row in images for image in row]).flatten(0, 1)
        packed.features = PlacedFeatures(self._token, features)
