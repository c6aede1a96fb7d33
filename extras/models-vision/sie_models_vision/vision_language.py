"""Models that read images and texts with one language model.

image ──► tower ──► features ─────────────┐
                                          ├──► packed language model ──► states ──► heads
ids of a text, and ids around an image ───┘

family                 model                                       heads
vision-language        ColPali, ColQwen2.5, ColQwen3, ColIdefics3  multivector
multimodal-encoder     Qwen3-VL-Embedding                          dense
multimodal-reranker    Qwen3-VL-Reranker                           answer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from sie_adapter.engine import item_results
from sie_adapter.engine.device import Compute
from sie_adapter.engine.item_results import ItemResults
from sie_adapter.families.text_encoder import PackedModel, fault_of_tokenizer, samples_of
from sie_adapter.families.text_model import check_width
from sie_adapter.heads import Head, Row
from sie_adapter.loading.tokenizer import fitted, load_tokenizer
from sie_adapter.packed.backbone import Backbone
from sie_adapter.packed.images import processor_of
from sie_adapter.packed.linear import block_linears, bytes_of
from sie_adapter.packed.packing import Int64, Items, PackedBatch, Shown
from sie_contracts.media.images import ImageTokens, Normalisation, Recipe, max_ids
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_contracts.wire.ipc import Group, Rows, RunBatch
from sie_models_vision.colpali import ColPali
from sie_models_vision.idefics3 import ColIdefics
from sie_models_vision.qwen3_vl import Qwen3Encoder, Qwen3Reranker
from sie_models_vision.qwen_vl import ColQwen
from sie_store.folder_files import read_json

Seen = Sequence[Sequence[Shown]]  # images of each sequence of a forward pass, in packed order


class VisionLanguageKind(Protocol):
    """Model class of a vision-language model. Its constructor loads the weights.

    `model`: the whole model. `language`: its text model. `adapted`: the module that LoRAs change. `towers`: the modules
    that read images. `output`: the name of the model's output in an entry. `width`: the width of the model's vectors, 0
    if it returns no vectors.
    """

    model: Any
    language: Any
    adapted: nn.Module
    towers: tuple[nn.Module, ...]
    output: str
    width: int
    heads: dict[str, Head]

    def __init__(
        self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute, normalisation: Normalisation
    ) -> None: ...

    @staticmethod
    def table_of_files(folder: Path, entry: ModelEntry) -> int:
        """Return the number of ids with embeddings, without loading the model. Raises ModelLoadFailed for tensors that
        do not fit the model class.
        """

    def framed(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return the tokenizer with the special tokens that the model expects before and after every text."""

    def tokens(self, tokenizer: Tokenizer, recipe: Recipe) -> ImageTokens:
        """Return an image's ids in the prompt: the placeholder id that features replace, the number of placeholders (0
        if there is one for each block of the image), and the ids before and after the placeholders.
        """

    def priced(self, recipe: Recipe) -> Recipe:
        """Return `recipe` (how images are prepared) with the cost of an image (`tokens`) or of each of its blocks
        (`block_tokens`), in tokens of the language model.
        """

    def rows(self, images: Recipe, tokens: ImageTokens) -> dict[str, Rows]:
        """Return for each operation the description by which the sidecar turns inputs into rows of token ids."""

    def see(self, packed: PackedBatch, images: Seen) -> None:
        """Compute the features of the images of a forward pass, and store the features in `packed`."""


_READERS: Mapping[tuple[str, str], type[VisionLanguageKind]] = {
    ("vision-language", "colpali"): ColPali,
    ("vision-language", "qwen2_5_vl"): ColQwen,
    ("vision-language", "qwen3_vl"): ColQwen,
    ("vision-language", "idefics3"): ColIdefics,
    ("multimodal-encoder", "qwen3_vl"): Qwen3Encoder,
    ("multimodal-reranker", "qwen3_vl"): Qwen3Reranker,
}


@dataclass
class _ImagePass(PackedBatch):
    """Forward pass over sequences with images. `shown`: the images of each sequence, in packed order."""

    shown: Seen = ()


class VisionLanguage(PackedModel):
    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        reader = _reader(folder, entry)
        processor_of(folder, entry, entry.load)
        table = reader.table_of_files(folder, entry)
        return fault_of_tokenizer(load_tokenizer(folder, entry.load), table)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        kind = _reader(folder, entry)
        super().__init__(entry, compute)
        recipe, normalisation = processor_of(folder, entry, load)
        with torch.inference_mode():
            self._reader = reader = kind(folder, entry, load, compute, normalisation)
            self.memory_bytes = bytes_of(reader.model)
            for tower in reader.towers:
                block_linears(tower)
            backbone = Backbone(reader.language, compute, entry.max_tokens, samples_of(entry.family, compute))
            self._run_on(backbone, reader.adapted, compute)
        self.heads = reader.heads
        check_width(entry, reader.output, reader.width)
        tokenizer = reader.framed(fitted(load_tokenizer(folder, load), self.vocabulary)[0])
        self.tokenizer = tokenizer.to_str().encode()
        recipe = reader.priced(recipe)
        tokens = reader.tokens(tokenizer, recipe)
        if tokenizer.id_to_token(tokens.token) is None:
            raise incompatible(f"{entry.id}: the image token {tokens.token} is not in its tokenizer")
        if (length := max_ids(recipe, tokens)) > entry.max_tokens:
            raise incompatible(f"{entry.id}: max_tokens is {entry.max_tokens}, one image needs {length} tokens")
        self.rows = reader.rows(recipe, tokens)
        self._difference = entry.head.score == "difference"

    def pack(self, batch: Items, chosen: Int64) -> PackedBatch:
        packed = self.backbone.pack(batch, chosen)
        if batch.images is None:
            return packed
        shown = batch.images.for_items(packed.order)
        return _ImagePass(**{part.name: getattr(packed, part.name) for part in fields(PackedBatch)}, shown=shown)

    def forward(self, packed: PackedBatch) -> Tensor:
        if isinstance(packed, _ImagePass) and any(packed.shown):
            self._reader.see(packed, packed.shown)
        return self.backbone.forward(packed)

    def answer(
        self, message: RunBatch, group: Group, query: Mapping[str, Row], rows: item_results.Rows, places: list[int]
    ) -> ItemResults:
        if "answer" in self.heads:
            return item_results.answer_scores(group.options, rows["answer"], difference=self._difference)
        return super().answer(message, group, query, rows, places)


def _reader(folder: Path, entry: ModelEntry) -> type[VisionLanguageKind]:
    model_type = str(read_json(folder / "config.json").get("model_type"))
    if (reader := _READERS.get((entry.family, model_type))) is None:
        listed = " or ".join(model_type for family, model_type in _READERS if family == entry.family)
        raise incompatible(f"{entry.id}: model_type is {model_type}, family {entry.family} needs {listed}")
    return reader
