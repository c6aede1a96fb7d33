"""Texts of readers equal `generate` of transformers, token for token, alone and in batches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from parity import reader_checkpoints
from parity.device import DEVICE, on_device
from parity.page_engine import Served, served_by
from parity.table import ParityTable, Texts
from parity.toys import image, png, prepared
from PIL import Image
from selection import long_but

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.families.extraction import ExtractOptions
from sie_adapter.generation.reading import GeneratedText, _GenerationCall, _GenerationRow, _Loop
from sie_adapter.packed.packing import Shown
from sie_contracts.errors import InvalidInput, ModelLoadFailed
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.wire.messages import RunOptions
from sie_models_readers import florence2
from sie_models_readers.document_reader import DocumentReader

PAGES = [
    image(width, height, seed)
    for seed, (width, height) in enumerate([(128, 160), (300, 120), (60, 171), (90, 90), (40, 31), (257, 320)])
]
MOST = 24


class Expected(NamedTuple):
    """Text of the library after a prompt: ids, and the scores of the first of them, float32 [vocabulary]."""

    ids: list[int]
    first: NDArray[np.float32]


Library = Callable[[Image.Image, ExtractOptions], Expected]


@dataclass(frozen=True)
class Kind:
    """A kind of reader. `oracle` makes the oracle of a folder in a precision."""

    build: Callable[[Path], Path]
    oracle: Callable[..., Library]
    asked: Sequence[ExtractOptions]
    entry: Mapping[str, Any]


def asks(task: str, instruction: str = "", most: int | None = MOST) -> ExtractOptions:
    parameters: dict[str, Any] = {"task": task} if task else {}
    if most is not None:
        parameters["max_new_tokens"] = most
    return ExtractOptions((), parameters=parameters, instruction=instruction)


def _generated(model: Any, prompt: int, options: ExtractOptions, **tensors: Any) -> Expected:
    """Return the text that the library generates greedily after the `prompt` ids, under the rules as stored."""
    generated = model.generate(
        **tensors,
        max_new_tokens=options.parameters["max_new_tokens"],
        num_beams=1,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Expected(generated.sequences[0, prompt:].tolist(), generated.logits[0][0].float().numpy())


def donut_oracle(folder: Path, dtype: torch.dtype = torch.float32) -> Library:
    """Return the library's model as the model card loads it."""
    from transformers import AutoTokenizer, DonutImageProcessorPil, DonutProcessor, VisionEncoderDecoderModel

    model = VisionEncoderDecoderModel.from_pretrained(folder, dtype=dtype).eval()
    processor = DonutProcessor(DonutImageProcessorPil.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    tokenizer = processor.tokenizer

    def written(shown: Image.Image, options: ExtractOptions) -> Expected:
        prompt = options.parameters["task"]
        if options.instruction:
            prompt += f"<s_question>{options.instruction}</s_question><s_answer>"
        pixels = processor(images=shown, return_tensors="pt").pixel_values.to(dtype)
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        return _generated(
            model,
            ids.shape[1],
            options,
            pixel_values=pixels,
            decoder_input_ids=ids,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bad_words_ids=[[tokenizer.unk_token_id]],
        )

    return written


def florence_oracle(folder: Path, dtype: torch.dtype = torch.float32) -> Library:
    from transformers import Florence2ForConditionalGeneration

    model = Florence2ForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
    processor = florence_processor(folder)

    def written(shown: Image.Image, options: ExtractOptions) -> Expected:
        prompt = options.parameters["task"] + options.instruction
        tensors = dict(processor(text=[prompt], images=[shown], return_tensors="pt"))
        tensors["pixel_values"] = tensors["pixel_values"].to(dtype)
        return _generated(model, 1, options, **tensors)

    return written


def published_oracle(folder: Path, dtype: torch.dtype = torch.float32) -> Library:
    """Return the oracle of the converted copy, without the score of its last token, which stands for an image."""
    converted = florence_oracle(reader_checkpoints.converted(folder), dtype)

    def written(shown: Image.Image, options: ExtractOptions) -> Expected:
        text = converted(shown, options)
        return Expected(text.ids, text.first[:-1])

    return written


@cache
def florence_processor(folder: Path) -> Any:
    """Return the library's processor with a rule for each kind of answer."""
    from transformers import AutoTokenizer, CLIPImageProcessorPil, Florence2Processor

    images = CLIPImageProcessorPil.from_pretrained(folder)
    images.image_seq_length = (reader_checkpoints.FLORENCE_SIDE // 32) ** 2 + 1
    kinds = ("polygons", "description_with_bboxes_or_polygons")
    return Florence2Processor(
        images,
        AutoTokenizer.from_pretrained(folder),
        num_additional_image_tokens=1,
        post_processor_config={kind: {} for kind in kinds},
    )


def chat_oracle(name: str, marker: str) -> Callable[..., Library]:
    """Return the oracle that uses the class of transformers, its image processor, and a mark for each feature of the
    tower. Two of the library's processors need torchvision.
    """

    def made(folder: Path, dtype: torch.dtype = torch.float32) -> Library:
        import transformers
        from transformers import AutoImageProcessor, AutoTokenizer

        model = getattr(transformers, name).from_pretrained(folder, dtype=dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        images = AutoImageProcessor.from_pretrained(folder, backend="pil")

        def written(shown: Image.Image, options: ExtractOptions) -> Expected:
            instruction = options.instruction or TOLD[name].get(options.parameters.get("task", "ocr"), "")
            content = [{"type": "image"}, *([{"type": "text", "text": instruction}] if instruction else [])]
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            )
            pixel_inputs = dict(images(images=[shown], return_tensors="pt"))
            if "image_grid_thw" in pixel_inputs:
                count = int(pixel_inputs["image_grid_thw"].prod()) // 4
            else:
                height, width = pixel_inputs["image_sizes"][0]
                count = int(height // 28) * int(width // 28)
            ids = tokenizer(
                text.replace(marker, marker * count), add_special_tokens=False, return_tensors="pt"
            ).input_ids
            if "image_grid_thw" in pixel_inputs:
                pixel_inputs["mm_token_type_ids"] = (ids == tokenizer.convert_tokens_to_ids(marker)).long()
                model.model.rope_deltas = None
            pixel_inputs["pixel_values"] = pixel_inputs["pixel_values"].to(dtype)
            return _generated(
                model, ids.shape[1], options, input_ids=ids, attention_mask=torch.ones_like(ids), **pixel_inputs
            )

        return written

    return made


TOLD = {
    "LightOnOcrForConditionalGeneration": {},
    "GlmOcrForConditionalGeneration": {"ocr": "Text Recognition:", "table": "Table Recognition:"},
    "PaddleOCRVLForConditionalGeneration": {"ocr": "OCR:", "chart": "Chart Recognition:"},
}
FLORENCE_ENTRY = {"max_tokens": reader_checkpoints.FLORENCE_TOKENS, "outputs": {"entities": 0, "objects": 0, "data": 0}}
KINDS = {
    "donut": Kind(
        reader_checkpoints.donut,
        donut_oracle,
        [asks("<s_cord-v2>"), asks("<s_docvqa>", "where is the river?"), asks("<s_docvqa>", "a queue of vectors, or")],
        {"max_tokens": reader_checkpoints.DONUT_TOKENS},
    ),
    "florence2": Kind(
        reader_checkpoints.florence2,
        florence_oracle,
        [
            asks("<OD>"),
            asks("<CAPTION>", most=9),
            asks("<CAPTION_TO_PHRASE_GROUNDING>", "the red river on a mountain"),
            asks("<REGION_TO_DESCRIPTION>", "<loc_52><loc_332><loc_932><loc_774>", most=9),
        ],
        FLORENCE_ENTRY,
    ),
    "florence2 as published": Kind(
        reader_checkpoints.published_florence2,
        published_oracle,
        [
            asks("<OCR>"),
            asks("<OPEN_VOCABULARY_DETECTION>", "the red river"),
            asks("<REGION_TO_OCR>", "<loc_0><loc_0><loc_999><loc_999>", most=9),
        ],
        FLORENCE_ENTRY,
    ),
    "lighton": Kind(
        reader_checkpoints.lighton,
        chat_oracle("LightOnOcrForConditionalGeneration", "<|image_pad|>"),
        [asks(""), asks("ocr", "what is the river?")],
        {"max_tokens": reader_checkpoints.OCR_TOKENS},
    ),
    "glm": Kind(
        reader_checkpoints.glm,
        chat_oracle("GlmOcrForConditionalGeneration", "<|image|>"),
        [asks(""), asks("table")],
        {"max_tokens": reader_checkpoints.OCR_TOKENS},
    ),
    "paddle": Kind(
        reader_checkpoints.paddle,
        chat_oracle("PaddleOCRVLForConditionalGeneration", "<|IMAGE_PLACEHOLDER|>"),
        [asks(""), asks("chart")],
        {"max_tokens": reader_checkpoints.OCR_TOKENS},
    ),
}


@dataclass(frozen=True)
class Reader:
    served: Served
    folder: Path

    @property
    def kind(self) -> Any:
        return self.served.weights._kind

    def prompts(self, kind: Kind) -> list[Any]:
        """Return the prompts of each page with each question."""
        return [self.kind.prompt(self.shown(page), options) for page in PAGES for options in kind.asked]

    def shown(self, page: Image.Image) -> Shown:
        prepared_page = prepared(png(page), self.kind.recipe)
        return Shown(
            np.frombuffer(prepared_page.pixels, np.uint8).reshape(prepared_page.height, prepared_page.width, 3),
            *prepared_page.upright,
        )

    def read(self, prompts: Sequence[Any]) -> list[GeneratedText]:
        """Return the texts after the prompts, which are read at once."""
        texts: list[GeneratedText] = self.served.engine.readings.read(self.kind, prompts)
        return texts


@pytest.fixture(scope="module")
def load(cpu_engine: AdapterEngine, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reader]:
    root = tmp_path_factory.mktemp("readers")

    @cache
    def loaded(name: str) -> Reader:
        folder = KINDS[name].build(root / name.replace(" ", "-"))
        return Reader(served_by(cpu_engine, _entry(name, folder)), folder)

    return loaded


@pytest.fixture(scope="module")
def expected(load: Callable[[str], Reader]) -> Callable[[str], list[Expected]]:
    """Return a function that gives the library's text for each page with each question, one by one."""

    @cache
    def written(name: str) -> list[Expected]:
        oracle = KINDS[name].oracle(load(name).folder)
        with torch.inference_mode():
            return [oracle(page, options) for page in PAGES for options in KINDS[name].asked]

    return written


def _entry(name: str, folder: Path, **changes: Any) -> ModelEntry:
    return parse_entry(
        {
            "id": f"reader/{name.replace(' ', '-')}",
            "weights": {"path": str(folder)},
            "family": "document-reader",
            "inputs": ["image"],
            "outputs": {"entities": 0, "data": 0},
            "load": {"precision": "float32"},
            **KINDS[name].entry,
            **changes,
        }
    )


@pytest.mark.parametrize("name", long_but(KINDS, ["donut"]))
def test_ids_equal_generate(
    name: str, load: Callable[[str], Reader], expected: Callable[[str], list[Expected]], table: ParityTable
) -> None:
    """The adapter reads all pages with all questions at once, the library one by one. No toy model writes the same
    text for all.
    """
    served = load(name)
    prompts = served.prompts(KINDS[name])
    answers = served.read(prompts)
    texts = Texts.of([answer.ids for answer in answers], _firsts(served.kind, prompts), expected(name))
    table.record(f"document-reader {name}", "padded", "float32", texts)
    assert texts.other == 0
    assert texts.first.difference <= 1e-5
    assert len({tuple(answer.ids) for answer in answers}) > len(PAGES)
    assert len({len(answer.ids) for answer in answers}) > 1
    assert max(len(set(answer.ids)) for answer in answers) > 5


@pytest.mark.parametrize("name", long_but(KINDS, ["donut", "glm"]))
@pytest.mark.parametrize("every", [1, 3])
def test_a_page_that_joins_between_steps_changes_no_id(
    every: int, name: str, load: Callable[[str], Reader], expected: Callable[[str], list[Expected]]
) -> None:
    served = load(name)
    prompts = served.prompts(KINDS[name])
    rows = [_GenerationRow(_GenerationCall(lambda: False, 1), prompt) for prompt in prompts]
    left, turns = list(rows), 0
    loop = _Loop(served.kind, torch.device(DEVICE))
    with torch.inference_mode():
        while left or not loop.is_idle:
            if left and turns % every == 0:
                loop.waiting.append(left.pop())
            loop.turn()
            turns += 1
    assert [row.ids for row in rows] == [text.ids for text in expected(name)]


def _firsts(kind: Any, prompts: Sequence[Any]) -> list[NDArray[np.float32]]:
    """The scores of the first token after each prompt, [vocabulary] each."""
    with torch.inference_mode():
        return [kind.begin([prompt])[0].logits.float().cpu().numpy() for prompt in prompts]


@pytest.mark.parametrize("name", long_but(KINDS, ["donut"]))
def test_an_input_without_one_page_fails_alone(name: str, load: Callable[[str], Reader]) -> None:
    page, request = png(PAGES[0]), KINDS[name].asked[0]
    options = RunOptions((), parameters=dict(request.parameters), instruction=request.instruction)
    none, result, two = load(name).served.extract([(files, options) for files in ([], [page], [page, page])])
    assert result["data"]["completion_tokens"] <= MOST
    assert (none.reason, none.param) == ("unsupported_modality", "images")
    assert (two.reason, two.param, two.extras) == ("invalid_media", "images", {"limit": 1})


# Donut


def written(served: Reader, task: str, text: str, finish: Any = "stop") -> dict[str, Any]:
    """Return the result for a text that Donut wrote."""
    options = asks(task, "where" if task == "<s_docvqa>" else "")
    prompt = served.kind.prompt(served.shown(PAGES[0]), options)
    ids = [*served.kind.tokenizer.encode(text, add_special_tokens=False).ids, *([2] if finish == "stop" else [])]
    result: dict[str, Any] = served.kind.result(prompt, GeneratedText(ids, finish))
    return result


def leaves_of(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    assert all((entity["score"], entity["start"], entity["bbox"]) == (1.0, None, None) for entity in result["entities"])
    return [(entity["label"], entity["text"]) for entity in result["entities"]]


def test_a_receipt_is_a_tree_and_its_leaves(load: Callable[[str], Reader]) -> None:
    """The receipt has two lines, as in the files of CORD."""
    text = "<s_menu><s_nm>river</s_nm><s_price>3</s_price><sep/><s_nm>queue</s_nm><s_price>4</s_price></s_menu>"
    result = written(load("donut"), "<s_cord-v2>", text)
    tree = {"menu": [{"nm": "river", "price": "3"}, {"nm": "queue", "price": "4"}]}
    assert result["data"] == {"document": tree}
    leaves = [("menu.nm", "river"), ("menu.price", "3"), ("menu.nm", "queue"), ("menu.price", "4")]
    assert leaves_of(result) == leaves


def test_a_class_is_an_entity(load: Callable[[str], Reader]) -> None:
    result = written(load("donut"), "<s_rvlcdip>", "<s_class><invoice/></s_class>")
    assert leaves_of(result) == [("document_class", "invoice")]


@pytest.mark.parametrize(
    ("options", "reason", "param"),
    [
        (asks(""), "task", "task"),
        (asks("<s_synthdog>"), "task", "task"),
        (asks("</s_menu>"), "task", "task"),
        (asks("<s_docvqa>"), "instruction_required", "instruction"),
        (asks("<s_docvqa>", "a</s_question>b"), "reserved_token", "instruction"),
        (asks("<s_docvqa>", "river " * 200), "input_too_long", "instruction"),
    ],
)
def test_what_donut_cannot_be_asked_is_refused(
    options: ExtractOptions, reason: str, param: str, load: Callable[[str], Reader]
) -> None:
    served = load("donut")
    with pytest.raises(InvalidInput) as refused:
        served.kind.prompt(served.shown(PAGES[0]), options)
    assert (refused.value.reason, refused.value.param) == (reason, param)


def test_what_is_written_is_bounded_by_the_positions_of_the_model(load: Callable[[str], Reader]) -> None:
    served = load("donut")
    shown = served.shown(PAGES[0])
    for options, most in (
        (asks("<s_cord-v2>", most=None), reader_checkpoints.DONUT_TOKENS - 1),
        (asks("<s_cord-v2>"), MOST),
    ):
        assert served.kind.prompt(shown, options).rules.most == most
    assert served.kind.prompt(shown, asks("<s_rvlcdip>", most=None)).rules.most == 8
    assert served.kind.prompt(shown, asks("<s_cord-v2>", most=100_000)).rules.most < reader_checkpoints.DONUT_TOKENS


def test_rules_that_cannot_be_kept_are_refused(load: Callable[[str], Reader], tmp_path: Path) -> None:
    folder = shutil.copytree(load("donut").folder, tmp_path / "donut")
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "encoder_repetition_penalty": 1.5}))
    entry = _entry("donut", folder)
    with pytest.raises(ModelLoadFailed, match="encoder_repetition_penalty"):
        DocumentReader(folder, entry, entry.load, on_device(torch.float32))


# Florence-2


def florence(served: Reader, task: str, text: str, argument: str = "a phrase") -> dict[str, Any]:
    """Return the result for a text that Florence-2 wrote about a page of 300 x 120 pixels."""
    prompt = served.kind.prompt(served.shown(PAGES[1]), asks(task, argument))
    ids = [0, *served.kind.tokenizer.encode(text, add_special_tokens=False).ids, 2]
    result: dict[str, Any] = served.kind.result(prompt, GeneratedText(ids, "stop"))
    return result


def test_objects_are_in_pixels_of_the_upright_page(load: Callable[[str], Reader]) -> None:
    """A bin stands for its middle, rounded down. A label keeps its letters. One label may have several boxes."""
    text = "réd car<loc_100><loc_200><loc_500><loc_999>river<loc_1><loc_2><loc_3><loc_40><loc_5><loc_6><loc_70><loc_80>"
    result = florence(load("florence2"), "<OD>", text)
    assert [(box["label"], box["bbox"]) for box in result["objects"]] == [
        ("réd car", [30, 24, 120, 95]),
        ("river", [0, 0, 1, 4]),
        ("river", [1, 0, 20, 9]),
    ]
    assert {box["score"] for box in result["objects"]} == {1.0}


def test_lines_have_the_rectangle_around_their_quadrangle(load: Callable[[str], Reader]) -> None:
    text = "Zürich 東京" + "".join(f"<loc_{place}>" for place in (10, 20, 900, 30, 890, 600, 12, 590))
    (line,) = florence(load("florence2"), "<OCR_WITH_REGION>", text)["entities"]
    assert (line["text"], line["label"], line["bbox"]) == ("Zürich 東京", "text", [3, 2, 267, 70])


def test_sentences_are_the_librarys(load: Callable[[str], Reader]) -> None:
    """A region in a question is made of tokens of the model."""
    served = load("florence2")
    processor = florence_processor(served.folder)
    for task in florence2._TASKS:
        argument = "<loc_1><loc_20><loc_300><loc_999>" if task.startswith("<REGION_TO") else "a réd river"
        if task in processor.task_prompts_without_inputs:
            argument = ""
        encoder_ids = served.kind.prompt(served.shown(PAGES[1]), asks(task, argument)).encoder_ids
        ids = processor(text=[task + argument], images=[PAGES[1]], return_tensors="pt").input_ids[0]
        assert encoder_ids == ids[ids != processor.image_token_id].tolist(), task


@pytest.mark.parametrize(
    ("task", "argument", "text"),
    [
        ("<REGION_TO_SEGMENTATION>", "<loc_0><loc_0><loc_999><loc_999>", "{one}"),
        ("<REFERRING_EXPRESSION_SEGMENTATION>", "a car", "{one}<sep>{other}"),
        ("<REFERRING_EXPRESSION_SEGMENTATION>", "a car", "<poly>{one}<sep>{other}</poly><poly>{other}<loc_7></poly>"),
        ("<OPEN_VOCABULARY_DETECTION>", "a car", "car<poly>{one}</poly>river<poly>{other}</poly>"),
    ],
)
def test_outlines_are_the_librarys(task: str, argument: str, text: str, load: Callable[[str], Reader]) -> None:
    served = load("florence2")
    first, second = (
        "".join(f"<loc_{place}>" for place in bins) for bins in ((9, 9, 50, 9, 50, 80), (0, 7, 999, 7, 4, 999))
    )
    written = text.format(one=first, other=second)
    result = florence(served, task, written, argument)
    expected = florence_processor(served.folder).post_process_generation(text=written, task=task, image_size=(300, 120))
    assert result["data"]["polygons"] == expected[task]["polygons"]
    labels = expected[task].get("polygons_labels") or expected[task]["labels"]
    assert [shape["label"] for shape in result["objects"]] == [label or "region" for label in labels]
    for entry, outline in zip(result["objects"], result["data"]["polygons"], strict=True):
        across, down = ([number for polygon in outline for number in polygon[axis::2]] for axis in (0, 1))
        assert entry["bbox"] == [min(across), min(down), max(across) - min(across), max(down) - min(down)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (asks("<OD2>"), "task"),
        (asks("<REGION_TO_OCR>"), "instruction_required"),
        (asks("<REGION_TO_OCR>", "the left half"), "region"),
        (asks("<REGION_TO_OCR>", "<loc_1><loc_2><loc_3>"), "region"),
        (asks("<REGION_TO_OCR>", "<loc_1><loc_2><loc_3><loc_1000>"), "region"),
        (asks("<REGION_TO_OCR>", "<loc_1><loc_2><loc_3><loc_04>"), "region"),
        (asks("<REGION_TO_OCR>", "<loc_9><loc_2><loc_3><loc_4>"), "region"),
        (asks("<CAPTION_TO_PHRASE_GROUNDING>"), "instruction_required"),
        (asks("<DocVQA>", "what does <OCR> mean"), "reserved_token"),
        (asks("<DocVQA>", "where is <loc_1>"), "reserved_token"),
        (asks("<DocVQA>", "river " * 400), "input_too_long"),
    ],
)
def test_what_florence_cannot_be_asked_is_refused(
    options: ExtractOptions, reason: str, load: Callable[[str], Reader]
) -> None:
    served = load("florence2")
    with pytest.raises(InvalidInput) as refused:
        served.kind.prompt(served.shown(PAGES[0]), options)
    assert refused.value.reason == reason


# language models


@pytest.mark.parametrize("name", ["lighton", "glm", "paddle"])
def test_a_prompt_of_a_client_cannot_name_an_image(name: str, load: Callable[[str], Reader]) -> None:
    served = load(name)
    mark = served.kind.tokenizer.id_to_token(served.kind._image_token)
    with pytest.raises(InvalidInput) as refused:
        served.kind.prompt(served.shown(PAGES[0]), asks("", f"read {mark}"))
    assert refused.value.reason == "reserved_token"


@pytest.mark.parametrize("size", [(300, 12), (12, 300), (1, 1)])
def test_a_page_without_a_whole_block_is_refused(size: tuple[int, int], load: Callable[[str], Reader]) -> None:
    """The tower of LightOnOCR merges blocks of 2 x 2 patches; its image processor makes edges of one patch too."""
    served = load("lighton")
    with pytest.raises(InvalidInput, match="aspect") as refused:
        served.kind.prompt(served.shown(image(*size, 0)), asks(""))
    assert refused.value.reason == "invalid_media"


def test_paddle_is_refused_in_float16(load: Callable[[str], Reader]) -> None:
    folder = load("paddle").folder
    entry = _entry("paddle", folder)
    with pytest.raises(ModelLoadFailed, match="float16"):
        DocumentReader(folder, entry, entry.load, on_device(torch.float16))
