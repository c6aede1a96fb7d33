"""Donut (arXiv 2111.15664): a Swin encoder turns a page into states. The decoder of MBart writes the content of the
page as tags and words, which form a tree.

    uint8 page ──► encoder ──► states ──┐
                                        ├──► decoder, a token per step ──► <s_menu><s_nm>.. ──► tree, entities
    task, question ──► prompt ──────────┘
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor
from transformers import DonutImageProcessorPil, DonutProcessor, VisionEncoderDecoderModel

from sie_adapter.engine.device import Compute
from sie_adapter.families.extraction import ExtractOptions
from sie_adapter.generation.greedy import Greedy
from sie_adapter.generation.reading import GeneratedText
from sie_adapter.generation.slots import DecoderSlots, RowStart
from sie_adapter.loading.checkpoint import empty_model, load_model
from sie_adapter.loading.tokenizer import bare_tokenizer, fault, read_tokenizer
from sie_adapter.packed.images import Tower
from sie_adapter.packed.linear import block_linears, bytes_of
from sie_adapter.packed.packing import Shown
from sie_contracts.errors import InvalidInput
from sie_contracts.media.images import Normalisation, Recipe
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_models_readers.written import (
    BartDecoder,
    PagePrompt,
    checked_processor,
    leaves,
    reserved,
    task_of,
    text_entity,
    tokens_left,
)

_QUESTION, _CLASSES = "<s_docvqa>", "<s_rvlcdip>"
_CLASS_TOKENS = 8  # largest number of tokens for the name of a document's class; most names have three or four
_LABELS = {"class": "document_class", "text_sequence": "text"}
_TAG = re.compile(r"<s_[^<>]+>")
_STATES_PER_TOKEN = 4  # the cost of a page in tokens is the number of its encoder states, divided by this number
# largest number of pages in one pass of the encoder on a GPU; a CPU gets one, because more would not be faster
_PAGES_PER_PASS = 4


class Donut:
    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        model: Any = empty_model(VisionEncoderDecoderModel, folder, entry.load, decodes=True)
        _processor(folder, entry, entry.load, model)
        table = model.decoder.get_input_embeddings().num_embeddings
        return fault(bare_tokenizer(read_tokenizer(folder)), table)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        model: Any = load_model(VisionEncoderDecoderModel, folder, load, compute, decodes=True)
        recipe, normalisation = _processor(folder, entry, load, model)
        self.max_tokens = entry.max_tokens
        self.precision, self.memory_bytes = compute.precision, bytes_of(model)
        self.attention = f"{model.decoder.config._attn_implementation} padded"
        self.together = 1 if compute.device.type == "cpu" else _PAGES_PER_PASS
        words = read_tokenizer(folder)
        self.tokenizer = bare_tokenizer(words)
        self.vocabulary: int = model.decoder.get_input_embeddings().num_embeddings
        config = model.encoder.config
        places = (recipe.height * recipe.width) // (config.patch_size * 2 ** (len(config.depths) - 1)) ** 2
        self.recipe = msgspec.structs.replace(recipe, tokens=max(1, places // _STATES_PER_TOKEN))
        block_linears(model.encoder)
        self._processor = DonutProcessor(DonutImageProcessorPil(), words)
        self._tags = frozenset(words.get_added_vocab())
        self._tasks = sorted(tag for tag in self._tags if _TAG.fullmatch(tag))
        self._greedy = Greedy(
            model.generation_config,
            compute.device,
            frozenset([words.eos_token_id]),
            () if words.unk_token_id is None else (words.unk_token_id,),
        )
        self._tower = Tower(lambda pixels: _encoded(model, pixels), normalisation, compute, keeps=True)
        self._decoder = BartDecoder(
            model.decoder.model.decoder,
            lambda ids, **named: model.decoder(input_ids=ids, use_cache=True, **named).logits,
        )

    def prompt(self, image: Shown, options: ExtractOptions) -> PagePrompt:
        task = task_of(options, self._tasks.__contains__, self._tasks)
        text = task
        if task == _QUESTION:
            if not options.instruction.strip():
                raise InvalidInput(
                    f"instruction: the task {task} needs a question", reason="instruction_required", param="instruction"
                )
            if any(tag in options.instruction for tag in self._tags):
                raise reserved("instruction")
            text = f"{task}<s_question>{options.instruction}</s_question><s_answer>"
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        most = tokens_left(options, len(ids), self.max_tokens, _CLASS_TOKENS if task == _CLASSES else 0)
        return PagePrompt(image, ids, self._greedy.rules(ids, most), task)

    def begin(self, prompts: Sequence[PagePrompt]) -> list[RowStart]:
        encoded = self._tower.forward([prompt.shown for prompt in prompts])
        return [self._decoder.begin(states[None], prompt.ids) for states, prompt in zip(encoded, prompts, strict=True)]

    def step(self, ids: Tensor, slots: DecoderSlots) -> Tensor:
        return self._decoder.step(ids, slots)

    def result(self, prompt: PagePrompt, written: GeneratedText) -> dict[str, Any]:
        ids = [number for number in (*prompt.ids, *written.ids) if number not in self._greedy.ends]
        text = self._processor.tokenizer.decode(ids).removeprefix(prompt.task).strip()
        tree = self._processor.token2json(text)
        entities = [
            text_entity(leaf, _LABELS.get(path, path))
            for path, leaf in leaves(tree)
            if prompt.task != _QUESTION or path == "answer"
        ]
        data = {"document": tree} if written.finish == "stop" else {"document": tree, "text": text}
        return {"entities": entities, "data": data}


def _encoded(model: Any, pixels: Tensor) -> Tensor:
    """Return states of the encoder, [pages, positions, width of the decoder]."""
    states: Tensor = model.encoder(pixels).last_hidden_state
    projection = getattr(model, "enc_to_dec_proj", None)
    return states if projection is None else projection(states)


def _processor(folder: Path, entry: ModelEntry, load: LoadOptions, model: Any) -> tuple[Recipe, Normalisation]:
    """Return the recipe that turns pages into pixels, and the normalisation of the pixels. Raises ModelLoadFailed
    INCOMPATIBLE for a model other than Donut, and the errors of `checked_processor`.
    """
    kinds = (model.config.encoder.model_type, model.config.decoder.model_type)
    if kinds != ("donut-swin", "mbart"):
        raise incompatible(
            f"{entry.id}: its encoder is {kinds[0]} and its decoder {kinds[1]}, expected donut-swin and mbart"
        )
    return checked_processor(folder, entry, load, model, model.config.decoder.max_position_embeddings)
