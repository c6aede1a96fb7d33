"""Language models that transcribe a page: LightOnOCR, GLM-OCR and PaddleOCR-VL.

uint8 page ──► tower ──► features ──┐
                                    ├──► language model, a token per step ──► Markdown
task ──► the chat template ──► ids ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from transformers import (
    GlmOcrForConditionalGeneration,
    LightOnOcrForConditionalGeneration,
    PaddleOCRVLForConditionalGeneration,
)

from sie_adapter.engine.device import Compute
from sie_adapter.families.extraction import ExtractOptions
from sie_adapter.generation.greedy import Greedy, ends_of
from sie_adapter.generation.reading import GeneratedText
from sie_adapter.generation.slots import DecoderSlots, RowStart, empty, prompted
from sie_adapter.loading.checkpoint import empty_model, load_model
from sie_adapter.loading.tokenizer import bare_tokenizer, fault, read_tokenizer
from sie_adapter.packed.images import Levels
from sie_adapter.packed.linear import block_linears, bytes_of
from sie_adapter.packed.packing import Shown
from sie_contracts.errors import InvalidInput
from sie_contracts.media.images import Normalisation, Recipe
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_models_readers.written import (
    PagePrompt,
    attended,
    checked_processor,
    reserved,
    task_of,
    text_entity,
    tokens_left,
)
from sie_store.folder_files import read_json

OCR = "ocr"


class _TranscriberKind(NamedTuple):
    """Differences between the model classes of transcribers. `model`: the class. `tasks`: the instruction for each
    task. `see`: computes the features of an image, [tokens, width]; its arguments are the model, float pixels [3,
    height, width], and the numbers of rows and columns of patches. `is_placed`: tokens have positions on three axes.
    `refused`: a dtype that a load refuses, because the model overflows in it.
    """

    model: Any
    tasks: Mapping[str, str]
    see: Callable[[Any, Tensor, tuple[int, int]], Tensor]
    is_placed: bool = True
    refused: torch.dtype | None = None


def _see_whole(model: Any, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    size = (pixels.shape[1], pixels.shape[2])
    features: Tensor = model.model.get_image_features(pixels[None], [size]).pooler_output[0]
    return features


def _see_merged(model: Any, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the features of an image. In the model's input, patches that the model merges are adjacent, and each patch
    is repeated for each frame. Source: transformers, Glm46VImageProcessorPil.patchify.
    """
    vision = model.config.vision_config
    merge, patch, frames = vision.spatial_merge_size, vision.patch_size, vision.temporal_patch_size
    height, width = grid
    blocks = pixels.reshape(3, height // merge, merge, patch, width // merge, merge, patch)
    blocks = blocks.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None].expand(-1, -1, -1, -1, -1, frames, -1, -1)
    return _features(model, blocks.reshape(height * width, -1), grid)


def _see_rows(model: Any, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the features of an image from its patches, row by row. Source: transformers,
    PaddleOCRVLImageProcessorPil.patchify.
    """
    patch = model.config.vision_config.patch_size
    height, width = grid
    rows = pixels.reshape(3, height, patch, width, patch).permute(1, 3, 0, 2, 4)
    return _features(model, rows.reshape(height * width, 3, patch, patch), grid)


def _features(model: Any, patches: Tensor, grid: tuple[int, int]) -> Tensor:
    sizes = torch.tensor([[1, *grid]], device=patches.device)
    features: Tensor = model.model.get_image_features(patches, sizes).pooler_output[0]
    return features


_KINDS: Mapping[str, _TranscriberKind] = {
    "lighton_ocr": _TranscriberKind(LightOnOcrForConditionalGeneration, {OCR: ""}, _see_whole, is_placed=False),
    "glm_ocr": _TranscriberKind(
        GlmOcrForConditionalGeneration,
        {OCR: "Text Recognition:", "table": "Table Recognition:", "formula": "Formula Recognition:"},
        _see_merged,
    ),
    "paddleocr_vl": _TranscriberKind(
        PaddleOCRVLForConditionalGeneration,
        {
            OCR: "OCR:",
            "table": "Table Recognition:",
            "formula": "Formula Recognition:",
            "chart": "Chart Recognition:",
            "spotting": "Spotting:",
            "seal": "Seal Recognition:",
        },
        _see_rows,
        refused=torch.float16,
    ),
}
MODEL_TYPES = tuple(_KINDS)


class Transcriber:
    together = 1  # pages per pass of the image encoder: the hundreds of patches of one page use the device fully

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        kind = _kind(folder)
        model: Any = empty_model(kind.model, folder, entry.load)
        _processor(folder, entry, entry.load, model)
        return fault(bare_tokenizer(read_tokenizer(folder)), model.get_input_embeddings().num_embeddings)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        self._kind = _kind(folder)
        if compute.dtype == self._kind.refused:
            raise incompatible(
                f"{entry.id}: the model overflows in {compute.precision}: set load.precision to bfloat16"
            )
        model: Any = load_model(self._kind.model, folder, load, compute)
        recipe, normalisation = _processor(folder, entry, load, model)
        self._levels = Levels(normalisation, compute.device)
        self._model, self._device, self._dtype = model, compute.device, compute.dtype
        self.max_tokens = entry.max_tokens
        self.precision, self.memory_bytes = compute.precision, bytes_of(model)
        self.attention = f"{model.config._attn_implementation} padded"
        self._is_eager = model.config._attn_implementation == "eager"
        self._embeddings = model.get_input_embeddings()
        self.vocabulary: int = self._embeddings.num_embeddings
        self._words = read_tokenizer(folder)
        self.tokenizer = bare_tokenizer(self._words)
        self._image_token: int = model.config.image_token_id
        self._special = frozenset(
            number for number, token in self.tokenizer.get_added_tokens_decoder().items() if token.special
        )
        vision = model.config.vision_config
        merge = getattr(model.config, "spatial_merge_size", None) or vision.spatial_merge_size
        self._patch, self._unit = vision.patch_size, vision.patch_size * merge
        self.recipe = msgspec.structs.replace(recipe, tokens=max(1, _most_pixels(recipe) // self._unit**2))
        self._outputs = compute.outputs.of_tower()
        block_linears(model)
        config = model.generation_config
        self._greedy = Greedy(config, compute.device, ends_of(config), stops_loops=True)

    def prompt(self, image: Shown, options: ExtractOptions) -> PagePrompt:
        tasks = self._kind.tasks
        task = task_of(options, tasks.__contains__, list(tasks), otherwise=OCR)
        instruction = options.instruction.strip() or tasks[task]
        if any(number in self._special for number in self.tokenizer.encode(instruction, add_special_tokens=False).ids):
            raise reserved("instruction")
        content = [{"type": "image"}, *([{"type": "text", "text": instruction}] if instruction else [])]
        talk = [{"role": "user", "content": content}]
        text = self._words.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        height, width, _ = image.pixels.shape
        count = (height // self._unit) * (width // self._unit)
        if not count:
            raise InvalidInput(
                f"aspect: the image is {image.width} x {image.height} pixels: resized for the model, one edge is "
                f"shorter than the {self._unit} pixels of a block",
                reason="invalid_media",
            )
        ids: list[int] = []
        for number in self.tokenizer.encode(text, add_special_tokens=False).ids:
            ids += [number] * (count if number == self._image_token else 1)
        most = tokens_left(options, len(ids), self.max_tokens)
        return PagePrompt(image, ids, self._greedy.rules(ids, most), task)

    def begin(self, prompts: Sequence[PagePrompt]) -> list[RowStart]:
        return [self._begun(prompt) for prompt in prompts]

    def _begun(self, prompt: PagePrompt) -> RowStart:
        height, width, _ = prompt.shown.pixels.shape
        grid = (height // self._patch, width // self._patch)
        ids = torch.tensor([list(prompt.ids)], device=self._device)
        is_image = ids == self._image_token
        ((features,),) = self._outputs.for_images(
            [prompt.shown], lambda _: [(self._page_features(prompt.shown, grid),)]
        )
        read = self._embeddings(ids).masked_scatter(is_image[..., None], features.to(self._dtype))
        named: dict[str, Any] = {}
        shift = 0
        if self._kind.is_placed:
            sizes = torch.tensor([[1, *grid]], device=self._device)
            positions, shifts = self._model.model.get_rope_index(ids, is_image.long(), image_grid_thw=sizes)
            named["position_ids"], shift = positions, int(shifts.flatten()[0])
        cache = empty()
        scores = self._scores(inputs_embeds=read, past_key_values=cache, **named)
        own, _ = prompted(cache)
        return RowStart(own, scores[0, -1], shift=shift)

    def _page_features(self, image: Shown, grid: tuple[int, int]) -> Tensor:
        pixels = self._levels.normalised(image.pixels.copy()).permute(2, 0, 1).to(self._dtype)
        return self._kind.see(self._model, pixels, grid)

    def _scores(self, **named: Any) -> Tensor:
        """Run the language model, and return the scores of the next token of each row, [rows, 1, vocabulary]."""
        states = self._model.model.language_model(use_cache=True, **named).last_hidden_state
        logits: Tensor = self._model.lm_head(states[:, -1:])
        return logits

    def step(self, ids: Tensor, slots: DecoderSlots) -> Tensor:
        positions = slots.positions
        return self._scores(
            input_ids=ids,
            attention_mask=attended(slots.mask, self._dtype, is_eager=self._is_eager),
            position_ids=positions.expand(3, -1, -1) if self._kind.is_placed else positions,
            past_key_values=slots.cache(),
        )[:, -1].float()

    def result(self, prompt: PagePrompt, written: GeneratedText) -> dict[str, Any]:
        text = self.tokenizer.decode(list(written.ids), skip_special_tokens=True).strip()
        label = "markdown" if prompt.task == OCR else prompt.task
        return {"entities": [text_entity(text, label)] if text else []}


def _most_pixels(recipe: Recipe) -> int:
    return recipe.max_pixels or recipe.longest**2


def _kind(folder: Path) -> _TranscriberKind:
    return _KINDS[str(read_json(folder / "config.json").get("model_type"))]


def _processor(folder: Path, entry: ModelEntry, load: LoadOptions, model: Any) -> tuple[Recipe, Normalisation]:
    return checked_processor(folder, entry, load, model, model.config.text_config.max_position_embeddings)
