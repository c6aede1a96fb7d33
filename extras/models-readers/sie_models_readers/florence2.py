"""Florence-2 (arXiv 2311.06242): BART's encoder turns a page and an English sentence into states. BART's decoder writes
a text in which the tokens `<loc_0>` to `<loc_999>` are coordinates on the page.

    uint8 page ──► DaViT ──► features ────────────┐
                                                  ├──► encoder ──► states ──► decoder, a token per step ──► text, places
    task, phrase or region ──► sentence ──► ids ──┘
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Florence2ForConditionalGeneration

from sie_adapter.engine.device import Compute
from sie_adapter.families.extraction import ExtractOptions
from sie_adapter.generation.greedy import Greedy, ends_of
from sie_adapter.generation.reading import GeneratedText
from sie_adapter.generation.slots import DecoderSlots, RowStart
from sie_adapter.loading.checkpoint import empty_model, load_model
from sie_adapter.loading.tokenizer import bare_tokenizer, fault, read_tokenizer
from sie_adapter.packed.images import Tower
from sie_adapter.packed.linear import block_linears, bytes_of
from sie_adapter.packed.packing import Shown
from sie_contracts.errors import InvalidInput
from sie_contracts.media.images import Recipe
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_models_readers.published_florence import empty_published, is_published, load_published, published_tokenizer
from sie_models_readers.written import (
    BartDecoder,
    PagePrompt,
    checked_processor,
    reserved,
    task_of,
    text_entity,
    tokens_left,
)

_PHRASE, _REGION = "{}", "{region}"
_BINS = 1000  # number of bins into which coordinates divide an edge of the image
# largest number of pages in one pass of the image encoder; a CPU is not faster with more than one page
_PAGES_PER_PASS = 8


class _Task(NamedTuple):
    """Task of Florence-2. `sentence`: the text for the model; the client's phrase replaces {}, a region replaces
    {region}. `label`: label of the generated entity; empty for tasks that find objects.
    """

    sentence: str
    label: str = ""


# Source: transformers, Florence2Processor
_TASKS: Mapping[str, _Task] = {
    "<OCR>": _Task("What is the text in the image?", "text"),
    "<OCR_WITH_REGION>": _Task("What is the text in the image, with regions?", "text"),
    "<CAPTION>": _Task("What does the image describe?", "caption"),
    "<DETAILED_CAPTION>": _Task("Describe in detail what is shown in the image.", "caption"),
    "<MORE_DETAILED_CAPTION>": _Task("Describe with a paragraph what is shown in the image.", "caption"),
    "<OD>": _Task("Locate the objects with category name in the image."),
    "<DENSE_REGION_CAPTION>": _Task("Locate the objects in the image, with their descriptions."),
    "<REGION_PROPOSAL>": _Task("Locate the region proposals in the image."),
    "<CAPTION_TO_PHRASE_GROUNDING>": _Task(f"Locate the phrases in the caption: {_PHRASE}"),
    "<OPEN_VOCABULARY_DETECTION>": _Task(f"Locate {_PHRASE} in the image."),
    "<REFERRING_EXPRESSION_SEGMENTATION>": _Task(f"Locate {_PHRASE} in the image with mask"),
    "<REGION_TO_CATEGORY>": _Task(f"What is the region {_REGION}?", "category"),
    "<REGION_TO_DESCRIPTION>": _Task(f"What does the region {_REGION} describe?", "description"),
    "<REGION_TO_OCR>": _Task(f"What text is in the region {_REGION}?", "text"),
    "<REGION_TO_SEGMENTATION>": _Task(f"What is the polygon mask of region {_REGION}"),
    "<DocVQA>": _Task(f"<DocVQA>{_PHRASE}", "answer"),
}
_QUADS, _PROPOSAL = "<OCR_WITH_REGION>", "<REGION_PROPOSAL>"
_OUTLINES = ("<REFERRING_EXPRESSION_SEGMENTATION>", "<REGION_TO_SEGMENTATION>")
_PLACED = re.compile(r"([^<]*)((?:<loc_\d+>)+)")
_PLACE = re.compile(r"<loc_(\d+)>")
_OUTLINED = re.compile(r"([^<]*)((?:<loc_\d+>|<sep>|<poly>|</poly>)+)")
_OUTLINE, _NEXT_OUTLINE, _MIN_BINS = re.compile(r"<poly>(.*?)</poly>"), "<sep>", 6
_GIVEN_REGION = re.compile("<loc_(0|[1-9][0-9]{0,2})>" * 4)


class Florence2:
    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        if is_published(folder):
            model: Any = empty_published(folder, entry)
        else:
            model = empty_model(Florence2ForConditionalGeneration, folder, entry.load, decodes=True)
        checked_processor(folder, entry, entry.load, model, _positions(model))
        table = model.get_input_embeddings().num_embeddings
        return fault(_tokenizer(folder, entry), table)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        if is_published(folder):
            model: Any = load_published(folder, entry, compute)
        else:
            model = load_model(Florence2ForConditionalGeneration, folder, load, compute, decodes=True)
        recipe, normalisation = checked_processor(folder, entry, load, model, _positions(model))
        # the buffers of this module are added to features, so both need the same dtype
        model.model.multi_modal_projector.to(compute.dtype)
        self.max_tokens = entry.max_tokens
        self.precision, self.memory_bytes = compute.precision, bytes_of(model)
        self.attention = f"{model.config._attn_implementation} padded"
        self.together = 1 if compute.device.type == "cpu" else _PAGES_PER_PASS
        self.tokenizer = _tokenizer(folder, entry)
        self._reserved = sorted(self.tokenizer.get_added_tokens_decoder().values(), key=lambda token: token.content)
        self._embeddings = model.get_input_embeddings()
        self.vocabulary: int = self._embeddings.num_embeddings
        text = model.config.text_config
        self._around = (text.bos_token_id, text.eos_token_id)
        self._start: int = text.decoder_start_token_id
        self._places = _positions(model)
        self._features = _features(model, recipe)
        self._tower = Tower(
            lambda pixels: model.get_image_features(pixels).pooler_output, normalisation, compute, keeps=True
        )
        self.recipe = msgspec.structs.replace(recipe, tokens=self._features)
        language = model.model.language_model
        block_linears(model.model.vision_tower)
        block_linears(language.encoder)
        self._encoder = language.encoder
        config = model.generation_config
        self._special = {*self._around, self._start, text.pad_token_id}
        self._greedy = Greedy(config, compute.device, ends_of(config))
        self._decoder = BartDecoder(
            language.decoder,
            lambda ids, **named: model.lm_head(
                language.decoder(input_ids=ids, use_cache=True, **named).last_hidden_state
            ),
        )

    def prompt(self, image: Shown, options: ExtractOptions) -> PagePrompt:
        name = task_of(options, _TASKS.__contains__, list(_TASKS))
        sentence, instruction = _TASKS[name].sentence, options.instruction.strip()
        placeholder = _REGION if _REGION in sentence else _PHRASE
        if placeholder in sentence:
            if not instruction:
                expected = "a region" if placeholder == _REGION else "a question or a phrase"
                raise InvalidInput(
                    f"instruction: {name} expects {expected}", reason="instruction_required", param="instruction"
                )
            if placeholder == _REGION:
                _check_region(instruction)
            elif any(token.content in instruction for token in self._reserved) or any(
                task in instruction for task in _TASKS
            ):
                raise reserved("instruction")
            sentence = sentence.replace(placeholder, instruction)
        box = next(placed(instruction, 4, image.width, image.height))[1] if placeholder == _REGION else None
        first, last = self._around
        ids = [first, *self.tokenizer.encode(sentence, add_special_tokens=False).ids, last]
        if (read := self._features + len(ids)) > self._places:
            raise InvalidInput(
                f"instruction: page and sentence have {read} tokens, the model reads at most {self._places}",
                reason="input_too_long",
                param="instruction",
                extras={"tokens": read, "limit": self._places},
            )
        most = tokens_left(options, 1, self.max_tokens)
        return PagePrompt(image, [self._start], self._greedy.rules([self._start], most), name, ids, box)

    def begin(self, prompts: Sequence[PagePrompt]) -> list[RowStart]:
        features = self._tower.forward([prompt.shown for prompt in prompts])
        return [self._begun(*pair) for pair in zip(features, prompts, strict=True)]

    def _begun(self, features: Tensor, prompt: PagePrompt) -> RowStart:
        """Run the encoder over the features of the page and the sentence. Return a new row of the decoder."""
        ids = torch.tensor([list(prompt.encoder_ids)], device=features.device)
        read = torch.cat([features[None], self._embeddings(ids)], 1)
        return self._decoder.begin(self._encoder(inputs_embeds=read).last_hidden_state, prompt.ids)

    def step(self, ids: Tensor, slots: DecoderSlots) -> Tensor:
        return self._decoder.step(ids, slots)

    def result(self, prompt: PagePrompt, written: GeneratedText) -> dict[str, Any]:
        ids = [number for number in written.ids if number not in self._special]
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        label, shown = _TASKS[prompt.task].label, prompt.shown
        if prompt.task == _QUADS:
            places = placed(text, 8, shown.width, shown.height)
            return {"entities": [text_entity(name, label, box) for name, box in places]}
        if label:
            # coordinates are removed: an answer about a region may repeat the region's coordinates
            words = (_PLACE.sub("", text) if prompt.box else text).strip()
            return {"entities": [text_entity(words, label, prompt.box)] if words else []}
        if prompt.task in _OUTLINES or "<poly>" in text:
            return _outlines(outlined(text, shown.width, shown.height))
        places = placed(text, 4, shown.width, shown.height)
        named = ((name or "region", box) for name, box in places if name or prompt.task == _PROPOSAL)
        return {"objects": [{"label": name, "score": 1.0, "bbox": box} for name, box in named if min(box[2:]) > 0]}


def _positions(model: Any) -> int:
    """Return the number of positions of the decoder. The encoder has the same number."""
    limit: int = model.config.text_config.max_position_embeddings
    return limit


def _features(model: Any, recipe: Recipe) -> int:
    """Return the number of encoder positions of a page: the cells of the last image grid, and one for their mean."""
    stride = math.prod(model.config.vision_config.patch_stride)
    places: int = (recipe.height // stride) * (recipe.width // stride)
    return places + 1


def placed(text: str, numbers: int, width: int, height: int) -> Iterator[tuple[str, list[int]]]:
    """Yield each label with each of its boxes, as x, y, width and height in pixels of the image. In the text, a box has
    `numbers` bins (thousandths of width or height), alternately x and y: two corners, or the four corners of a
    quadrangle. The box of a quadrangle is its bounding rectangle. A bin becomes the pixel at its middle. Source:
    transformers, Florence2PostProcessor.
    """
    for name, run in _PLACED.findall(text):
        bins = [min(int(number), _BINS - 1) for number in _PLACE.findall(run)]
        for first in range(0, len(bins) - numbers + 1, numbers):
            across, down = bins[first : first + numbers : 2], bins[first + 1 : first + numbers : 2]
            (left, right), (top, bottom) = (
                (_pixel(min(of), edge), _pixel(max(of), edge)) for of, edge in ((across, width), (down, height))
            )
            yield name.strip(), [left, top, right - left, bottom - top]


def outlined(text: str, width: int, height: int) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield each label with the polygons around an object: lists of alternating x and y, in pixels of the image.
    Source: transformers, Florence2PostProcessor.
    """
    for name, run in _OUTLINED.findall(text):
        for outline in _OUTLINE.findall(run) or [run]:
            polygons = []
            for part in outline.split(_NEXT_OUTLINE):
                bins = [min(int(number), _BINS - 1) for number in _PLACE.findall(part)]
                bins = bins[: len(bins) // 2 * 2]
                if len(bins) >= _MIN_BINS:
                    polygons.append([_pixel(number, (width, height)[index % 2]) for index, number in enumerate(bins)])
            if polygons:
                yield name.strip(), polygons


def _outlines(shapes: Iterator[tuple[str, list[list[int]]]]) -> dict[str, Any]:
    """Return a result for polygons: `objects`, each with the rectangle around its polygons, and in `data` the list
    `polygons`, whose item i has the polygons of object i.
    """
    objects, outlines = [], []
    for name, polygons in shapes:
        across, down = ([number for polygon in polygons for number in polygon[axis::2]] for axis in (0, 1))
        box = [min(across), min(down), max(across) - min(across), max(down) - min(down)]
        if min(box[2:]) > 0:
            objects.append({"label": name or "region", "score": 1.0, "bbox": box})
            outlines.append(polygons)
    return {"objects": objects, "data": {"polygons": outlines}}


def _pixel(number: int, edge: int) -> int:
    return int((number + 0.5) * edge / _BINS)


def _check_region(instruction: str) -> None:
    match = _GIVEN_REGION.fullmatch(instruction)
    left, top, right, bottom = map(int, match.groups()) if match else (1, 1, 0, 0)
    if left > right or top > bottom:
        raise InvalidInput(
            "instruction: expected a region, <loc_LEFT><loc_TOP><loc_RIGHT><loc_BOTTOM> with numbers from 0 to 999, in "
            "thousandths of the image's width and height",
            reason="region",
            param="instruction",
        )


def _tokenizer(folder: Path, entry: ModelEntry) -> Tokenizer:
    return published_tokenizer(folder, entry.id) if is_published(folder) else bare_tokenizer(read_tokenizer(folder))
