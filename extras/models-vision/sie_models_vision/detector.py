"""Detection of objects in images; the request has the names of the objects. Models: Grounding DINO and OWLv2.

inputs: an image and labels ──► groups with equal options and equal image sizes ──► boxes and scores ──► objects
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from tokenizers import Tokenizer

from sie_adapter.engine.device import Compute
from sie_adapter.families.extraction import ExtractOptions, Result, by_options, miscounted
from sie_adapter.loading.checkpoint import class_of
from sie_adapter.packed.packing import Shown
from sie_contracts.errors import InferenceFailed, InvalidInput
from sie_contracts.media.images import Recipe
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_contracts.wire.ipc import Rows
from sie_models_vision.boxes import ImageFrame, Sight, objects
from sie_models_vision.grounding_dino import GroundingDino
from sie_models_vision.owlv2 import Owlv2

# largest number of images in one pass on a device that is not a CPU; on a CPU each image has a separate pass
_IMAGES_PER_PASS = 8


class _DetectorKind(Protocol):
    """Model class of a detector: it reads the labels and runs the forward passes.

    `thresholds`: names of the options that set a lowest score for an object, with their defaults. `max_tokens`: limit
    for the tokens of all labels together, or of each label if the class encodes labels separately. `recipe`: how the
    sidecar prepares the pixels that `detect` reads.
    """

    thresholds: ClassVar[Mapping[str, float]]
    precision: str
    attention: str
    memory_bytes: int
    tokenizer: Tokenizer
    vocabulary: int
    max_tokens: int
    recipe: Recipe

    def prompt(self, labels: Sequence[str]) -> Any:
        """Return the labels in the form that `detect` reads. Raises InvalidInput for labels that cannot be used."""

    def misfit(self, image: Shown) -> InvalidInput | None:
        """Return an error if the model cannot read the image; None if it can."""

    def detect(self, images: Sequence[Shown], prompt: Any) -> Sight:
        """Return boxes, and the score of each label for each box. All `images` have the same size."""

    def frame(self, image: Shown) -> ImageFrame:
        """Return the sizes that `objects` needs to convert boxes from fractions to pixels."""


_KINDS: Mapping[str, type[GroundingDino] | type[Owlv2]] = {"grounding-dino": GroundingDino, "owlv2": Owlv2}
_THRESHOLDS = tuple(name for kind in _KINDS.values() for name in kind.thresholds)


class Detector:
    """Loaded detector. `extract` may run on several threads at once.

    A result is `{"objects": [{label, score, bbox}]}`, best first. The label is the client's text, unchanged; bbox is x,
    y, width and height in pixels of the submitted image, upright. The result is an InvalidInput if an input does not
    have exactly one image, or if its image, its labels or an option cannot be used. It is an InferenceFailed if scores
    or boxes are not finite, or if the model code fails.

    The option `threshold` replaces all thresholds of the model. `max_tokens`: limit for the tokens of all labels
    together (Grounding DINO), or of each label (OWLv2, which truncates a longer label).
    """

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        return class_of(folder, entry, _KINDS).fault_of_files(folder, entry)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        with torch.inference_mode():
            self._kind: _DetectorKind = class_of(folder, entry, _KINDS)(folder, entry, load, compute)
        if entry.max_tokens > self._kind.max_tokens:
            raise incompatible(
                f"{entry.id}: max_tokens is {entry.max_tokens}, the model reads at most "
                f"{self._kind.max_tokens} tokens of labels",
            )
        self._most = 1 if compute.device.type == "cpu" else _IMAGES_PER_PASS
        self.rows = {"extract": Rows("raw", images=self._kind.recipe)}
        self.precision = self._kind.precision
        self.tokenizer: bytes = self._kind.tokenizer.to_str().encode()
        self.vocabulary = self._kind.vocabulary
        self.max_tokens = entry.max_tokens
        self.memory_bytes, self.attention = self._kind.memory_bytes, self._kind.attention

    def extract(
        self, texts: Sequence[str], options: Sequence[ExtractOptions], images: Sequence[Sequence[Shown]]
    ) -> list[Result]:
        """Return the objects in the image of each input, or an error for an unusable input. Texts are not read."""
        with torch.inference_mode():
            return by_options(images, options, self._detect)

    def _detect(self, rows: Sequence[Sequence[Shown]], options: ExtractOptions) -> list[Result]:
        least = self._least(options)
        prompt = self._kind.prompt(options.labels)
        results: dict[int, Result] = {}
        usable: dict[int, Shown] = {}
        for number, row in enumerate(rows):
            error = miscounted("images", len(row)) or self._kind.misfit(row[0])
            if error is not None:
                results[number] = error
            else:
                usable[number] = row[0]
        for chosen in self._passes(usable):
            images = [usable[number] for number in chosen]
            sight = self._kind.detect(images, prompt)
            best = sight.scores.max(-1)
            for number, image, *detection in zip(
                chosen,
                images,
                sight.boxes.cpu().numpy(),
                best.values.cpu().numpy(),
                best.indices.cpu().numpy(),
                (torch.isfinite(sight.boxes).all((1, 2)) & torch.isfinite(best.values).all(1)).tolist(),
                strict=True,
            ):
                boxes, scores, labels, is_finite = detection
                results[number] = (
                    {"objects": objects(boxes, scores, labels, options.labels, self._kind.frame(image), least)}
                    if is_finite
                    else InferenceFailed(
                        "the model returned scores or boxes that are NaN or infinite", reason="non_finite"
                    )
                )
        return [results[number] for number in range(len(rows))]

    def _least(self, options: ExtractOptions) -> float:
        """Return the lowest allowed score: the option `threshold`, else the highest of the model's thresholds, because
        an object must reach all thresholds. Raises InvalidInput for a threshold that the model does not have.
        """
        own = self._kind.thresholds
        for name in _THRESHOLDS:
            if name in options.parameters and name not in own:
                listed = " and ".join(own)
                raise InvalidInput(
                    f"{name}: the model does not have this option, it has {listed}", reason="unknown_option", param=name
                )
        if options.threshold is not None:
            return options.threshold
        return max(float(options.parameters.get(name, default)) for name, default in own.items())

    def _passes(self, usable: Mapping[int, Shown]) -> Iterator[list[int]]:
        alike: dict[tuple[int, ...], list[int]] = {}
        for number, image in usable.items():
            alike.setdefault(image.pixels.shape, []).append(number)
        for chosen in alike.values():
            for start in range(0, len(chosen), self._most):
                yield chosen[start : start + self._most]
