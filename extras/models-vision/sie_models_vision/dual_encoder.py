"""Dual encoders, whose vectors of texts and of images can be compared: CLIP (arXiv 2103.00020), SigLIP (arXiv
2303.15343).

    token ids ──► packed text tower ──► state of one token of each text ─┐
                                                                         ├──► projection ──► one vector for each row
    uint8 pixels ──► normalised ──► image tower, equal sizes stacked ────┘

A row has either token ids or images. The vector of a row with several images is the mean of their unit vectors.
"""

from __future__ import annotations

import re
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor, nn
from transformers import AutoModel

from sie_adapter.engine.device import Compute, to_device
from sie_adapter.families.text_encoder import PackedModel, fault_of_tokenizer
from sie_adapter.families.text_model import check_width
from sie_adapter.heads import Head, Reduced, States
from sie_adapter.heads.pooling import finite_rows
from sie_adapter.loading.checkpoint import empty_model, load_model
from sie_adapter.loading.tokenizer import fitted, load_tokenizer, with_normalizers
from sie_adapter.packed.backbone import Backbone
from sie_adapter.packed.images import Tower, processor_of
from sie_adapter.packed.linear import block_linears, bytes_of
from sie_adapter.packed.packing import BatchFiles, Int64, Items, PackedBatch, Shown, expanded
from sie_contracts.errors import InvalidInput
from sie_contracts.media.images import Normalisation, Recipe
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible, load_failed
from sie_contracts.wire.ipc import Rows, Side
from sie_models_vision import open_clip
from sie_store.folder_files import read_json

_METASPACE = "▁"  # character that sentencepiece writes instead of a space
# wrong id of the end token in old configurations. With this id, transformers' CLIPTextModel reads the state of the
# token with the largest id.
_ARGMAX_EOS = 2


@dataclass
class _DualPass(PackedBatch):
    """Rows of one forward pass: first the rows with token ids, packed in `texts`, then the rows with files. `files`:
    for each row with files, its images or sounds. Each row has one result.
    """

    texts: PackedBatch | None = None
    files: Sequence[Sequence[Any]] = ()


class TextTower(Protocol):
    """Text encoder of a dual encoder. `filled`: the number of tokens to which each text is padded with the id `filler`,
    0 for no padding. `width`: width of a vector.
    """

    filled: int
    filler: int
    width: int

    def text(self, hidden: Tensor, packed: PackedBatch) -> Tensor:
        """Return the vector of each sequence, float32 [sequences, width], from its states [tokens, hidden width]."""


class _Clip:
    """CLIP, whose text vector is the state of the end token. Source: transformers, CLIPModel."""

    filled = filler = 0

    def __init__(self, model: Any) -> None:
        self._vision = model.vision_model
        self._of_text = model.text_projection.float()
        self._of_image = model.visual_projection.float()
        self._eos = model.config.text_config.eos_token_id
        self.width: int = model.config.projection_dim

    def text(self, hidden: Tensor, packed: PackedBatch) -> Tensor:
        ends = to_device(self._ends(packed), hidden.device)
        return self._of_text(hidden[ends].float())

    def _ends(self, packed: PackedBatch) -> Int64:
        """Return the index of the token that represents each sequence: its first end token, else its first token. With
        _ARGMAX_EOS the first token with the largest id counts as the end token.
        """
        starts = packed.bounds[: len(packed.order)].astype(np.int64)
        lengths = packed.lengths[: len(packed.order)]
        ids = packed.ids[: int(lengths.sum())]
        if self._eos == _ARGMAX_EOS:
            is_end = ids == np.repeat(np.maximum.reduceat(ids, starts), lengths)
        else:
            is_end = ids == self._eos
        places = np.where(is_end, np.arange(len(ids)), len(ids))
        first = np.minimum.reduceat(places, starts)
        return np.where(first < len(ids), first, starts)

    def image(self, pixels: Tensor) -> Tensor:
        """Return vectors, float32 [images, width], from normalised pixels [images, 3, height, width]."""
        return self._of_image(self._vision(pixel_values=pixels).pooler_output.float())


class _Siglip:
    """SigLIP, which pads texts to the length that was used in training, and reads the state of the last token. Source:
    transformers, SiglipModel.
    """

    def __init__(self, model: Any) -> None:
        self._vision = model.vision_model
        self._head = model.text_model.head.float()
        # the head is removed from the text tower, whose forward pass would call the float32 head with 16-bit states
        model.text_model.head = nn.Identity()
        config = model.config.text_config
        self.filled: int = config.max_position_embeddings
        self.filler: int = config.pad_token_id
        self.width: int = config.projection_size

    def text(self, hidden: Tensor, packed: PackedBatch) -> Tensor:
        last = packed.bounds[1 : len(packed.order) + 1].astype(np.int64) - 1
        return self._head(hidden[to_device(last, hidden.device)].float())

    def image(self, pixels: Tensor) -> Tensor:
        return self._vision(pixel_values=pixels).pooler_output.float()


_TOWERS: Mapping[str, type[_Clip] | type[_Siglip]] = {"clip": _Clip, "siglip": _Siglip}


class VectorHead:
    """Head that returns the vector of each row. In a normal pass, `TwoTowers.forward` has already computed the vectors.
    In the check of a loaded model (`certificate`), only the text backbone runs, and this head computes the vectors.
    """

    def __init__(self, towers: TextTower) -> None:
        self._towers = towers

    def reduce(self, states: States, sequences: Int64) -> Reduced:
        """Return vectors, float32 [width] each. Raises InvalidInput if a request names a pooling."""
        if states.pooling:
            raise InvalidInput.at("pooling", "a dual encoder has no choice of pooling", reason="unknown_option")
        packed = states.packed
        vectors = states.hidden if isinstance(packed, _DualPass) else self._towers.text(states.hidden, packed)
        vectors = vectors[to_device(sequences, vectors.device)]
        return Reduced(vectors.unbind(0), finite_rows(vectors))


class _TextEmbeddings(nn.Module):  # type: ignore[misc]  # the type checker skips torch
    """Embeddings of a text encoder. The class in transformers refuses an input with more tokens than one text may have.
    This class has no such check, because its input is all packed texts of a pass.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.token_embedding, self.position_embedding = source.token_embedding, source.position_embedding

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[-1], device=input_ids.device)[None]
        embeddings: Tensor = self.token_embedding(input_ids) + self.position_embedding(position_ids)
        return embeddings


class TwoTowers(PackedModel, ABC):
    """Base of models with two encoders: `backbone` for rows of token ids, and an encoder for rows of images or sounds.
    Each row gets one vector.
    """

    _towers: TextTower

    @staticmethod
    def _check_positions(entry: ModelEntry, limit: int) -> None:
        if entry.max_tokens > limit:
            raise incompatible(f"{entry.id}: max_tokens is {entry.max_tokens}, the text tower has {limit} positions")

    def prepare(self, batch: Items, queries: np.ndarray) -> Items:
        """Pad texts to `filled` tokens, the length of texts in the training of the model; SigLIP requires this."""
        if not self._towers.filled:
            return batch
        lengths = np.where(batch.lengths > 0, self._towers.filled, 0)
        return expanded(batch, lengths, self._towers.filler, attended=True)

    def pack(self, batch: Items, chosen: Int64) -> PackedBatch:
        """Lay out the chosen rows: first the texts, packed, then the rows of images or sounds."""
        files = self._files(batch)
        has_file = np.zeros(len(chosen), bool) if files is None else np.isin(chosen, files.rows)
        texts = self.backbone.pack(batch, chosen[~has_file]) if not has_file.all() else None
        order = np.concatenate([texts.order if texts is not None else np.zeros(0, np.int64), chosen[has_file]])
        rows = len(order)
        return _DualPass(
            ids=np.zeros(rows, np.int64),
            positions=np.zeros(rows, np.int64),
            bounds=np.arange(rows + 1, dtype=np.int32),
            groups=np.array([[0, rows, 1, 1]], np.int64),
            order=order,
            texts=texts,
            files=files.for_items(chosen[has_file]) if files is not None else (),
        )

    def forward(self, packed: PackedBatch) -> Tensor:
        """Return the vector of each row, float32 [rows, width]. Call it under inference mode."""
        assert isinstance(packed, _DualPass)
        vectors = []
        if packed.texts is not None:
            vectors.append(self._towers.text(self.backbone.forward(packed.texts), packed.texts))
            packed.filled(packed.texts.padding)
        if packed.files:
            vectors.append(self._of_files(packed.files))
        return torch.cat(vectors)

    @staticmethod
    @abstractmethod
    def _files(batch: Items) -> BatchFiles[Any] | None:
        """Return the images or sounds, which some rows have instead of token ids; None if no row has a file."""

    @abstractmethod
    def _of_files(self, rows: Sequence[Sequence[Any]]) -> Tensor:
        """Return the vector of each row of images or sounds, float32 [rows, width]."""


class DualEncoder(TwoTowers):
    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        _model_type(folder, entry)
        _processor(folder, entry, entry.load)
        tokenizer = _tokenizer(folder, entry.load)
        if open_clip.is_open_clip(folder):
            model: Any = open_clip.empty_open_clip(folder, entry, tokenizer)
        else:
            model = empty_model(AutoModel, folder, entry.load)
        table = model.text_model.get_input_embeddings().num_embeddings
        return fault_of_tokenizer(tokenizer, table)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        kind = _model_type(folder, entry)
        super().__init__(entry, compute)
        recipe, normalisation = _processor(folder, entry, load)
        tokenizer = _tokenizer(folder, load)
        with torch.inference_mode():
            if open_clip.is_open_clip(folder):
                model: Any = open_clip.load_open_clip(folder, entry, compute, tokenizer)
            else:
                model = load_model(AutoModel, folder, load, compute)
            self.memory_bytes = bytes_of(model)
            towers = self._towers = _TOWERS[kind](model)
            block_linears(model.vision_model)
            self._check_positions(entry, model.config.text_config.max_position_embeddings)
            model.text_model.embeddings = _TextEmbeddings(model.text_model.embeddings)
            self._run_on(Backbone(model.text_model, compute, entry.max_tokens), model.text_model, compute)
        check_width(entry, "dense", towers.width)
        self.tokenizer = fitted(tokenizer, self.vocabulary)[0].to_str().encode()
        patch = model.config.vision_config.patch_size
        patches = (recipe.height // patch) * (recipe.width // patch)
        side = Side(expanded=self._towers.filled)
        images = msgspec.structs.replace(recipe, tokens=patches)
        self.rows = {"encode": Rows("text", side, side, tokens=True, images=images)}
        self.heads: dict[str, Head] = {"dense": VectorHead(self._towers)}
        self._tower = Tower(towers.image, normalisation, compute)

    @staticmethod
    def _files(batch: Items) -> BatchFiles[Any] | None:
        return batch.images

    def _of_files(self, rows: Sequence[Sequence[Shown]]) -> Tensor:
        vectors = self._tower.forward([image for row in rows for image in row])
        counts = [len(row) for row in rows]
        if len(vectors) == len(rows):
            return vectors
        unit = F.normalize(vectors, dim=1).split(counts)
        return torch.stack(
            [own[0] if len(own) == 1 else rows.mean(0) for own, rows in zip(vectors.split(counts), unit, strict=True)]
        )


def _processor(folder: Path, entry: ModelEntry, load: LoadOptions) -> tuple[Recipe, Normalisation]:
    if open_clip.is_open_clip(folder):
        return open_clip.processor_of_open_clip(folder, entry)
    return processor_of(folder, entry, load)


def _tokenizer(folder: Path, load: LoadOptions) -> Tokenizer:
    """Return the tokenizer of `folder`, which normalises texts as in the training of the model. Raises ModelLoadFailed.

    SigLIP was trained on texts in lower case, its first version also without punctuation and repeated spaces. In
    transformers, only the slow tokenizer removes punctuation, so this function removes it. open_clip first replaces
    underscores by spaces. Sources: transformers, SiglipTokenizer and Siglip2Tokenizer; open_clip, canonicalize_text.
    """
    is_open_clip = open_clip.is_open_clip(folder)
    if not is_open_clip and read_json(folder / "config.json").get("model_type") != "siglip":
        return load_tokenizer(folder, load)
    file, named = folder / "tokenizer.json", read_json(folder / "tokenizer_config.json").get("tokenizer_class")
    if not is_open_clip and named != "SiglipTokenizer":
        return with_normalizers(load_tokenizer(folder, load), [normalizers.Lowercase()])
    if not file.is_file():
        raise load_failed("NOT_FOUND", f"{folder} has no tokenizer.json: copy it from the repository of the weights")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return with_normalizers(
        tokenizer,
        [
            *([normalizers.Replace("_", " ")] if is_open_clip else []),
            normalizers.Replace(_METASPACE, " "),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(f"[{re.escape(string.punctuation)}]"), ""),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
        ],
    )


def _model_type(folder: Path, entry: ModelEntry) -> str:
    if open_clip.is_open_clip(folder):
        return "siglip"
    model_type = str(read_json(folder / "config.json").get("model_type"))
    if model_type not in _TOWERS:
        listed = ", ".join(_TOWERS)
        raise incompatible(f"{entry.id}: model_type is {model_type}, family dual-encoder needs one of {listed}")
    return model_type
