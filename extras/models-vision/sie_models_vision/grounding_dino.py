"""Grounding DINO (arXiv 2303.05499): one prompt has all labels; each candidate gets a probability for each token.

    labels ──► lower case, without . and ? ──► "a cat. a dog." ──► ids, and the tokens of each label ──┐
                                                                                                     ├──► the model
    uint8 pixels ──► normalised ──► backbone, images of equal size together ──► feature maps ──────────┘
    ──► boxes, and for each label its best token

The images of a pass have the same size, because padding of a smaller image would change its boxes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForZeroShotObjectDetection
from transformers.modeling_outputs import BackboneOutput

from sie_adapter.engine.device import Compute, to_device
from sie_adapter.families.extraction import labels_refused
from sie_adapter.loading.checkpoint import empty_model, load_model
from sie_adapter.loading.tokenizer import fault, fitted, load_tokenizer
from sie_adapter.packed.images import Levels, processor_of
from sie_adapter.packed.linear import bytes_of
from sie_adapter.packed.packing import Shown
from sie_adapter.packed.tower_outputs import Output
from sie_contracts.errors import InvalidInput
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible, load_failed
from sie_models_vision.boxes import ImageFrame, Sight

# Ids at which the model itself splits a prompt into labels (transformers, SPECIAL_TOKENS).
_DELIMITERS = {"[CLS]": 101, "[SEP]": 102, ".": 1012, "?": 1029}
_SPACES = str.maketrans(".?", "  ")
# Changes to the published configuration, which sets is_encoder_decoder and allows custom kernels. `checkpoint` would
# refuse is_encoder_decoder, although only text generation reads it. transformers would download the kernels from the
# hub.
_CHANGES: Mapping[str, Any] = MappingProxyType({"is_encoder_decoder": False, "disable_custom_kernels": True})
# The cost of every image in tokens is the number of positions in the feature maps of the largest image, divided by
# this number: 4 positions take about as long as one token of a text encoder.
_PLACES_PER_TOKEN = 4


@dataclass(frozen=True)
class _LabelPrompt:
    """Prompt with all labels of a request. `ids`: [1, tokens]. `tokens`: the indices of the tokens of each label."""

    ids: Tensor
    tokens: Sequence[Tensor]


class _CachedBackbone(nn.Module):  # type: ignore[misc]  # the type checker skips torch
    """Replacement of the model's image backbone: it returns feature maps that were computed before the pass or are
    cached. Each thread sets the maps for its own pass.
    """

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own, self.channels = own, own.channels
        self._given = threading.local()

    @contextlib.contextmanager
    def giving(self, maps: Sequence[Tensor]) -> Iterator[None]:
        self._given.maps = maps
        try:
            yield
        finally:
            del self._given.maps

    def forward(self, pixel_values: Tensor, return_dict: bool = True) -> BackboneOutput:
        return BackboneOutput(feature_maps=tuple(self._given.maps))


class GroundingDino:
    """A `detector._DetectorKind` that always computes in float32, because two parts of the model need it: the attention
    between text and image clamps its scores at 50,000, near the largest float16, and the sampling points of the
    deformable attention are float32.
    """

    thresholds: ClassVar[Mapping[str, float]] = {"box_threshold": 0.25, "text_threshold": 0.25}

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        processor_of(folder, entry, entry.load)
        model: Any = empty_model(AutoModelForZeroShotObjectDetection, folder, entry.load, changes=_CHANGES)
        _strides(entry, model.config)
        table = model.model.text_backbone.get_input_embeddings().num_embeddings
        tokenizer = fitted(load_tokenizer(folder, entry.load), table)[0]
        return fault(tokenizer, table) or _foreign(tokenizer)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        recipe, normalisation = processor_of(folder, entry, load)
        self._device = compute.device
        compute = replace(compute, dtype=torch.float32)
        self.precision = compute.precision
        model: Any = load_model(AutoModelForZeroShotObjectDetection, folder, load, compute, changes=_CHANGES)
        self._model, config = model, model.config
        encoder = model.model.backbone.conv_encoder
        encoder.model = self._backbone = _CachedBackbone(encoder.model)
        self._outputs = compute.outputs.of_tower()
        self.memory_bytes, self.attention = bytes_of(model), f"{config._attn_implementation} padded"
        self.vocabulary: int = model.model.text_backbone.get_input_embeddings().num_embeddings
        self.tokenizer, _ = fitted(load_tokenizer(folder, load), self.vocabulary)
        if cause := _foreign(self.tokenizer):
            raise load_failed("CERTIFICATE", f"{entry.id}: {cause}")
        self.max_tokens: int = config.max_text_len
        self._limit = min(entry.max_tokens, self.max_tokens)
        self._queries: int = config.num_queries
        self._strides = _strides(entry, config)
        places = _places(recipe.shorter, recipe.longest, self._strides)
        self.recipe = msgspec.structs.replace(recipe, tokens=max(1, places // _PLACES_PER_TOKEN))
        self._levels = Levels(normalisation, compute.device)

    def prompt(self, labels: Sequence[str]) -> _LabelPrompt:
        """Return one prompt with all labels, and the tokens of each label in it. Raises InvalidInput with the reason
        `labels`.
        """
        cleaned = [" ".join(label.lower().translate(_SPACES).split()) for label in labels]
        if not cleaned:
            raise labels_refused("expected at least one")
        if not all(cleaned):
            raise labels_refused("one of them has only full stops and question marks")
        encoding = self.tokenizer.encode(". ".join(cleaned) + ".")
        if len(encoding.ids) > self._limit:
            raise labels_refused(f"they have {len(encoding.ids)} tokens, the model reads at most {self._limit}")
        ids = np.array(encoding.ids, np.int64)
        lengths = np.array([len(label) for label in cleaned])
        starts = np.cumsum(lengths + 2) - lengths - 2
        places = np.array([start for start, _ in encoding.offsets])
        owners = np.searchsorted(starts, places, side="right") - 1
        is_label = (places < (starts + lengths)[owners]) & (np.array(encoding.special_tokens_mask) == 0)
        if np.isin(ids[is_label], list(_DELIMITERS.values())).any():
            raise labels_refused("a label contains a token that the model reserves")
        tokens = [np.flatnonzero(is_label & (owners == number)) for number in range(len(cleaned))]
        if not all(map(len, tokens)):
            raise labels_refused("a label is empty after tokenisation")
        return _LabelPrompt(
            to_device(ids[None], self._device), [to_device(numbers, self._device) for numbers in tokens]
        )

    def misfit(self, image: Shown) -> InvalidInput | None:
        """Return an error for an image so narrow that its feature maps have fewer positions than the model needs."""
        height, width, _ = image.pixels.shape
        places = _places(height, width, self._strides)
        if places >= self._queries:
            return None
        return InvalidInput(
            f"aspect: the image is {image.width} x {image.height} pixels, which is too narrow for the model: it looks "
            f"for {self._queries} objects but gets only {places} positions",
            reason="invalid_media",
        )

    def detect(self, images: Sequence[Shown], prompt: _LabelPrompt) -> Sight:
        """Return boxes, and the score of each label for each box. All `images` have one size. Needs inference mode."""
        maps = [torch.stack(level) for level in zip(*self._outputs.for_images(images, self._read), strict=True)]
        ids = prompt.ids.expand(len(images), -1)
        height, width, _ = images[0].pixels.shape
        with self._backbone.giving(maps):
            output = self._model(
                pixel_values=maps[0].new_empty(1).expand(len(images), 3, height, width),
                input_ids=ids,
                token_type_ids=torch.zeros_like(ids),
                attention_mask=torch.ones_like(ids),
            )
        probabilities = output.logits.float().sigmoid()
        scores = torch.stack([probabilities[..., places].amax(-1) for places in prompt.tokens], -1)
        return Sight(output.pred_boxes.float(), scores)

    def _read(self, images: Sequence[Shown]) -> list[Output]:
        """Return the feature maps of each image, [channels, rows, columns] each."""
        levels = self._levels.normalised(np.stack([image.pixels for image in images]))
        output = self._backbone.own(levels.permute(0, 3, 1, 2), return_dict=True)
        return list(zip(*output.feature_maps, strict=True))

    def frame(self, image: Shown) -> ImageFrame:
        return ImageFrame(image.width, image.height, image.width, image.height)


def _foreign(tokenizer: Tokenizer) -> str:
    """Return the reason why the folder's tokenizer cannot belong to this model; an empty string if it can."""
    wrong = [token for token, number in _DELIMITERS.items() if tokenizer.token_to_id(token) != number]
    listed = ", ".join(f"{token} {_DELIMITERS[token]}" for token in wrong)
    return f"its tokenizer has other ids for the separators of labels, the model expects {listed}" if wrong else ""


def _strides(entry: ModelEntry, config: Any) -> list[int]:
    """Return the pixels between two neighbouring positions of each feature map. Source: transformers,
    GroundingDinoModel. Raises ModelLoadFailed for another backbone than swin.
    """
    backbone = config.backbone_config
    if backbone.model_type != "swin":
        raise incompatible(f"{entry.id}: its backbone is {backbone.model_type}, expected swin")
    strides = [backbone.patch_size << (stage - 1) for stage in backbone.out_indices]
    return [*strides, *(strides[-1] << more + 1 for more in range(config.num_feature_levels - len(strides)))]


def _places(height: int, width: int, strides: Sequence[int]) -> int:
    return sum(-(-height // stride) * -(-width // stride) for stride in strides)
