"""OWLv2 (arXiv 2306.09683): image and labels are encoded separately, and compared at each patch of the image.

    labels ──► text tower, once for each label ──► a vector each ──┐
                                                                   ├──► score of each label at each patch, a box
    uint8 pixels ──► blurred, square, normalised ──► image tower ──┘

The image is padded at the bottom or the right to a square before it is scaled, so boxes are fractions of the longer
edge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForZeroShotObjectDetection

from sie_adapter.engine.device import Compute, to_device
from sie_adapter.families.extraction import LabelVectors, labels_refused
from sie_adapter.loading.checkpoint import empty_model, load_model
from sie_adapter.loading.tokenizer import fault, fitted, load_tokenizer
from sie_adapter.packed.images import PROCESSOR, read_processor
from sie_adapter.packed.linear import block_linears, bytes_of
from sie_adapter.packed.packing import Shown
from sie_adapter.packed.tower_outputs import Output
from sie_contracts.errors import InvalidInput
from sie_contracts.media.images import Recipe
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_models_vision.boxes import Float32, ImageFrame, Sight

_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Largest edge of an image that the adapter gets, as a multiple of the edge of the images that the model reads. The
# sidecar scales a larger submitted image down to this edge, which slightly changes the pixels that the model reads
# (figures: extras/models-vision/tests/parity/test_detector.py).
_OVERSAMPLED = 3
_TRUNCATED_AT = 4.0  # radius at which the Gaussian blur is truncated, in standard deviations


class Owlv2:
    """A `detector._DetectorKind` whose text and image encoders run in the precision of `compute`. The later layers
    compute scores and boxes in float32, because in 16 bits a box would be misplaced by several pixels.
    """

    thresholds: ClassVar[Mapping[str, float]] = {"score_threshold": 0.1}

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        model: Any = empty_model(AutoModelForZeroShotObjectDetection, folder, entry.load)
        _processor(folder, entry, model.config.vision_config.image_size)
        table = model.owlv2.text_model.embeddings.token_embedding.num_embeddings
        return fault(fitted(load_tokenizer(folder, entry.load), table)[0], table)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        self._device, self._dtype, self.precision = compute.device, compute.dtype, compute.precision
        model: Any = load_model(AutoModelForZeroShotObjectDetection, folder, load, compute, float32_head=True)
        model.layer_norm.to(compute.dtype)
        self._model = model
        self.memory_bytes, self.attention = bytes_of(model), f"{model.config._attn_implementation} padded"
        vision, text = model.config.vision_config, model.config.text_config
        self._side: int = vision.image_size
        self._rescale, mean, std = _processor(folder, entry, self._side)
        self._mean, self._std = (
            torch.tensor(values, dtype=torch.float32, device=compute.device).view(3, 1, 1) for values in (mean, std)
        )
        self._outputs = compute.outputs.of_tower()
        block_linears(model.owlv2.vision_model)
        self.vocabulary: int = model.owlv2.text_model.embeddings.token_embedding.num_embeddings
        self.max_tokens: int = text.max_position_embeddings
        self.tokenizer, _ = fitted(load_tokenizer(folder, load), self.vocabulary)
        self._words = _cutting(self.tokenizer, min(entry.max_tokens, self.max_tokens))
        self._label_vectors = LabelVectors(self._vectors)
        patches = (self._side // vision.patch_size) ** 2
        self.recipe = Recipe("fit", longest=_OVERSAMPLED * self._side, multiple=1, resample="bicubic", tokens=patches)

    def prompt(self, labels: Sequence[str]) -> Tensor:
        """Return the vector of each label, float32 [labels, width]. Call it under inference mode. Raises InvalidInput
        with the reason `labels`.
        """
        if not labels:
            raise labels_refused("expected at least one")
        return self._label_vectors.encode(labels)

    def _vectors(self, labels: Sequence[str]) -> Tensor:
        """Return the normalised vector of each label, float32 [labels, width]."""
        encodings = self._words.encode_batch(list(labels))
        ids = to_device(np.array([encoding.ids for encoding in encodings], np.int64), self._device)
        mask = to_device(np.array([encoding.attention_mask for encoding in encodings], np.int64), self._device)
        vectors = self._model.owlv2.get_text_features(input_ids=ids, attention_mask=mask).pooler_output.float()
        return F.normalize(vectors, dim=-1)

    def misfit(self, image: Shown) -> InvalidInput | None:
        return None

    def detect(self, images: Sequence[Shown], prompt: Tensor) -> Sight:
        grid = torch.stack([own for (own,) in self._outputs.for_images(images, self._read)])
        patches = grid.flatten(1, 2).float()
        logits, _ = self._model.class_predictor(patches, prompt.expand(len(images), -1, -1))
        return Sight(self._model.box_predictor(patches, grid), logits.sigmoid())

    def _read(self, images: Sequence[Shown]) -> list[Output]:
        """Return the states of the patches of each image, [rows, columns, width]."""
        squares = torch.stack([self._square(image) for image in images])
        grid, _ = self._model.image_embedder(((squares - self._mean) / self._std).to(self._dtype))
        return [(row,) for row in grid]

    def _square(self, image: Shown) -> Tensor:
        """Return the image as the model's image processor scales it, float32 [3, side, side], not yet normalised. The
        image is not padded to a square first: the padding is black (0), so it would add nothing to the products.
        """
        height, width, _ = image.pixels.shape
        sampling = _sampling(self._side, max(height, width), max(image.height, image.width))
        down, across = (to_device(sampling[:, :edge], self._device) for edge in (height, width))
        levels = to_device(image.pixels.copy(), self._device).permute(2, 0, 1).float() * self._rescale
        return down @ levels @ across.T

    def frame(self, image: Shown) -> ImageFrame:
        longer = max(image.width, image.height)
        return ImageFrame(image.width, image.height, longer, longer)


def _sampling(side: int, size: int, submitted: int) -> Float32:
    """Return the matrix that resamples a row of `size` pixels to `side` pixels, float32 [side, size]: linear
    interpolation, and a blur. `submitted`: longer edge of the submitted image in pixels; `submitted` / `side` sets the
    strength of the blur. Beyond the ends of the row, its pixels are mirrored.

    Source: transformers, Owlv2ImageProcessorPil.resize (scipy's gaussian_filter and zoom).
    """
    deviation = max(0.0, (submitted / side - 1) / 2) * size / submitted
    radius = int(_TRUNCATED_AT * deviation + 0.5)
    blur = np.exp(-0.5 * (np.arange(-radius, radius + 1) / max(deviation, 1e-12)) ** 2)
    blur /= blur.sum()
    places = (np.arange(side) + 0.5) * (size / side) - 0.5
    first = np.floor(places)
    behind = (places - first)[:, None]
    parts = np.pad(blur, (0, 1)) * (1 - behind) + np.pad(blur, (1, 0)) * behind
    read = first[:, None].astype(np.int64) + np.arange(-radius, radius + 2)
    last = size - 1  # indices beyond the ends of the row a b c d are mirrored: d c b | a b c d | c b a
    read = last - np.abs(last - read % (2 * last)) if last else np.zeros_like(read)
    matrix = np.zeros((side, size))
    np.add.at(matrix, (np.arange(side)[:, None], read), parts)
    return matrix.astype(np.float32)


def _cutting(tokenizer: Any, limit: int) -> Any:
    """Return a tokenizer that truncates labels to `limit` tokens, the end token included, and pads shorter ones."""
    words = type(tokenizer).from_str(tokenizer.to_str())
    words.enable_truncation(limit)
    words.enable_padding(pad_id=0, length=limit)
    return words


def _processor(folder: Path, entry: ModelEntry, side: int) -> tuple[float, Sequence[float], Sequence[float]]:
    """Return the factor by which uint8 pixels are multiplied (rescale_factor), and the mean and standard deviation of
    each channel. Raises ModelLoadFailed if the configuration is missing, or if this module does not reproduce the
    processor.
    """
    config = read_processor(folder, entry, "image_processor")
    off = [f"do_{step}" for step in ("pad", "resize", "rescale", "normalize") if config.get(f"do_{step}") is False]
    size = config.get("size") or {"height": 960, "width": 960}
    if not str(config.get("image_processor_type")).startswith("Owlv2ImageProcessor"):
        cause = f"the image processor is {config.get('image_processor_type')}, expected Owlv2ImageProcessor"
    elif off:
        cause = f"{off[0]} is false"
    elif size != {"height": side, "width": side}:
        cause = f"size is {size}, the model's images are {side} x {side}"
    else:
        mean, std = config.get("image_mean") or _MEAN, config.get("image_std") or _STD
        return float(config.get("rescale_factor") or 1 / 255), mean, std
    raise incompatible(f"{entry.id}: {PROCESSOR}: {cause}")
