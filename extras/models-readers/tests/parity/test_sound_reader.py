"""Texts of Whisper for a sound equal `generate` of transformers with its feature extractor: tokens, segments and their
times, alone and in batches.
"""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cluster import until
from numpy.typing import NDArray
from parity.device import DEVICE
from parity.page_engine import Served, served_by
from parity.sound_checkpoints import reader_entry
from parity.table import ParityTable, Texts
from selection import long_but
from sound_files import encoded, tone

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.families.extraction import ExtractOptions
from sie_adapter.generation.reading import _GenerationCall, _GenerationRow, _Loop
from sie_contracts.errors import InvalidInput, ModelLoadFailed
from sie_sidecar.prepare import sounds

RATE, SECONDS, TOKENS = 16_000, 2, 64  # those of sound_checkpoints.whisper, which imports classes of transformers
MOST = 16
# ragged: a click, shorter than a window, just as long, a little and much longer
SOUNDS = [tone(seconds, rate=RATE, seed=seed) for seed, seconds in enumerate((0.02, 2.6, 0.7, 1.9, 2.0, 2.005, 5.4))]
FEW = 2  # the number of sounds that every run reads
Samples = NDArray[np.float32]


class Spoken(NamedTuple):
    """A segment: its begin and end in seconds, and its ids with time stamps."""

    start_s: float
    end_s: float
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """Rules of a checkpoint, and the options that the first `sounds` sounds get in turn."""

    rules: Mapping[str, Any]
    asked: Sequence[ExtractOptions]
    sounds: int = len(SOUNDS)

    def given(self) -> list[tuple[Samples, ExtractOptions]]:
        return [(sound, self.asked[number % len(self.asked)]) for number, sound in enumerate(SOUNDS[: self.sounds])]


def asks(instruction: str = "", most: int | None = MOST, **parameters: Any) -> ExtractOptions:
    if most is not None:
        parameters["max_new_tokens"] = most
    return ExtractOptions((), parameters=parameters, instruction=instruction)


KINDS = {
    "few": Kind({}, [asks(most=10)], FEW),
    "published": Kind(
        {},
        [
            asks(most=3),
            asks(language="de"),
            asks(task="translate"),
            asks("a river, vectors", language="French"),
            asks(),
        ],
    ),
    "english": Kind({"is_multilingual": False}, [asks(), asks("the red river")]),
    "without forced ids": Kind({"forced_decoder_ids": None}, [asks(), asks(task="transcribe")]),
    "with a language": Kind({"language": "german", "task": "translate"}, [asks(), asks(language="en")]),
    "with penalties": Kind({"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}, [asks(), asks(language="en")]),
}


class Oracle:
    """transformers' model with its own feature extractor and tokenizer, one sound at a time. A sound that is longer
    than a window is not cut.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoFeatureExtractor, AutoTokenizer, WhisperForConditionalGeneration

        self.model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
        self._extractor = AutoFeatureExtractor.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def features(self, sound: Samples) -> torch.Tensor:
        whole = {"truncation": False, "padding": "longest"} if len(sound) > SECONDS * RATE else {}
        tensor = self._extractor(sound, sampling_rate=RATE, return_tensors="pt", **whole).input_features
        return tensor.to(self.model.dtype)

    def segments(self, sound: Samples, options: ExtractOptions) -> list[Spoken]:
        arguments = {name: value for name, value in options.parameters.items() if name in ("language", "task")}
        if options.instruction:
            arguments["prompt_ids"] = self.tokenizer.get_prompt_ids(options.instruction, return_tensors="pt")
        generated = self.model.generate(
            self.features(sound),
            return_timestamps=True,
            return_segments=True,
            max_new_tokens=options.parameters["max_new_tokens"],
            num_beams=1,
            do_sample=False,
            **arguments,
        )["segments"][0]
        return [
            Spoken(
                round(float(segment["start"]), 2), round(float(segment["end"]), 2), tuple(segment["tokens"].tolist())
            )
            for segment in generated
        ]

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()

    def scores(self, sound: Samples, ids: Sequence[int]) -> Samples:
        """Return the scores of the token after a prompt, for the first window."""
        features = self.features(sound)[:, :, : 100 * SECONDS]
        return self.model(features, decoder_input_ids=torch.tensor([ids])).logits[0, -1].float().numpy()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Writing:
    """A model that transcribes, and its oracle."""

    served: Served
    oracle: Oracle
    folder: Path

    def prompts(self, kind: Kind, weights: Any = None) -> list[Any]:
        """Return the first window of each sound with its options."""
        recipe = self.served.weights.rows["extract"].sounds
        return [
            (weights or self.served.weights).prompt(sounds.features(sound, recipe), options)
            for sound, options in kind.given()
        ]

    def references(self, kind: Kind, prompts: Sequence[Any], written: Sequence[Sequence[Spoken]]) -> list[Reference]:
        """Return the references of sounds whose prompts were read, so that their language is known."""
        return [
            Reference(ids_of(row), self.oracle.scores(sound, prompt.sound.ids))
            for (sound, _), prompt, row in zip(kind.given(), prompts, written, strict=True)
        ]

    def read(self, prompts: Sequence[Any]) -> list[list[Spoken]]:
        """Return the segments of the sounds, which are read at once."""
        self.served.engine.readings.read(self.served.weights, prompts)
        return told(prompts)


class Reference(NamedTuple):
    """Text of the library for a sound, and its scores of the first token, [vocabulary]."""

    ids: list[int]
    first: Samples


def ids_of(row: Sequence[Spoken]) -> list[int]:
    return [number for segment in row for number in segment.ids]


def firsts(weights: Any, prompts: Sequence[Any]) -> list[Samples]:
    """The scores of the first token after each prompt, [vocabulary] each."""
    with torch.inference_mode():
        return [weights.begin([prompt])[0].logits.float().cpu().numpy() for prompt in prompts]


def told(prompts: Sequence[Any]) -> list[list[Spoken]]:
    return [
        [
            Spoken(round(segment.start_s, 2), round(segment.end_s, 2), tuple(segment.ids))
            for segment in prompt.sound.segments
        ]
        for prompt in prompts
    ]


@pytest.fixture(scope="module")
def load(cpu_engine: AdapterEngine, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Writing]:
    from parity import sound_checkpoints

    root = tmp_path_factory.mktemp("sound-readers")

    @cache
    def loaded(name: str) -> Writing:
        folder = sound_checkpoints.whisper(root / name.replace(" ", "-"), **KINDS[name].rules)
        return Writing(
            served_by(cpu_engine, reader_entry(TOKENS, name.replace(" ", "-"), folder)), Oracle(folder), folder
        )

    return loaded


@pytest.fixture(scope="module")
def expected(load: Callable[[str], Writing]) -> Callable[[str], list[list[Spoken]]]:
    """Return a function that gives the library's text of each sound, one by one."""

    @cache
    def written(name: str) -> list[list[Spoken]]:
        oracle = load(name).oracle
        with torch.inference_mode():
            return [oracle.segments(*source) for source in KINDS[name].given()]

    return written


@pytest.mark.parametrize("name", long_but(KINDS, ["few"]))
def test_segments_equal_generate(
    name: str, load: Callable[[str], Writing], expected: Callable[[str], list[list[Spoken]]], table: ParityTable
) -> None:
    """The adapter reads all sounds at once, the library one by one. The toy model writes different tokens for different
    sounds, and several segments for some.
    """
    writing, kind = load(name), KINDS[name]
    prompts = writing.prompts(kind)
    segments = writing.read(prompts)
    first = firsts(writing.served.weights, prompts)
    with torch.inference_mode():
        references = writing.references(kind, prompts, expected(name))
    texts = Texts.of([ids_of(row) for row in segments], first, references)
    table.record("sound-reader whisper", "padded", "float32", texts)
    assert segments == expected(name)
    assert texts.first.difference <= 1e-5
    assert len({segment.ids for row in expected(name) for segment in row}) > KINDS[name].sounds
    assert max(len(row) for row in expected(name)) > 1


@pytest.mark.parametrize("name", long_but(KINDS, ["few"]))
def test_a_sound_that_joins_between_steps_changes_no_segment(
    name: str, load: Callable[[str], Writing], expected: Callable[[str], list[list[Spoken]]]
) -> None:
    writing = load(name)
    prompts = writing.prompts(KINDS[name])
    left, turns = [_GenerationRow(_GenerationCall(lambda: False, 1), prompt) for prompt in prompts], 0
    loop = _Loop(writing.served.weights, torch.device(DEVICE))
    with torch.inference_mode():
        while left or not loop.is_idle:
            if left:
                loop.waiting.append(left.pop())
            loop.turn()
            turns += 1
    assert told(prompts) == expected(name)


def test_a_batch_gives_entities_with_their_seconds(
    load: Callable[[str], Writing], expected: Callable[[str], list[list[Spoken]]]
) -> None:
    """A text among the inputs fails alone. The results of two sounds have the text of the library, a language, and the
    number of tokens.
    """
    writing = load("few")
    files = [encoded(sound, rate=RATE, subtype="FLOAT") for sound in SOUNDS[:FEW]]
    error, *answers = writing.served.run("extract", ["a text", *files], **KINDS["few"].asked[0].parameters)
    assert (error.reason, error.param) == ("unsupported_modality", "audio")
    for segments, answer in zip(expected("few"), answers, strict=True):
        texts = [writing.oracle.text(segment.ids) for segment in segments]
        assert [(entity["text"], entity["seconds"]) for entity in answer["entities"]] == [
            (text, [segment.start_s, segment.end_s]) for text, segment in zip(texts, segments, strict=True) if text
        ]
        assert {entity["label"] for entity in answer["entities"]} == {"transcript"}
        assert answer["data"]["text"] == writing.oracle.text([number for spoken in segments for number in spoken.ids])
        assert answer["data"]["language"] in ("en", "de", "fr")
        assert answer["data"]["completion_tokens"] >= sum(len(segment.ids) for segment in segments)
        assert answer["data"]["finish_reason"] in ("stop", "length")


def test_a_long_sound_costs_all_of_it(load: Callable[[str], Writing]) -> None:
    batch = load("few").served.rows("extract", [encoded(SOUNDS[number], rate=RATE) for number in (0, 1)])
    assert [row.cost for row in batch.rows] == [100, 130]


@pytest.mark.parametrize(
    ("name", "options", "reason", "param"),
    [
        ("few", asks(task="summarise"), "task", "task"),
        ("few", asks(language="klingon"), "language", "language"),
        ("few", asks(language="es"), "language", "language"),
        ("few", asks("a <|en|> b"), "reserved_token", "instruction"),
        ("few", asks("river " * 200), "input_too_long", "instruction"),
        pytest.param("english", asks(language="en"), "language", "language", marks=pytest.mark.long),
        pytest.param("english", asks(task="transcribe"), "task", "task", marks=pytest.mark.long),
    ],
)
def test_what_cannot_be_asked_is_refused(
    name: str, options: ExtractOptions, reason: str, param: str, load: Callable[[str], Writing]
) -> None:
    with pytest.raises(InvalidInput) as refused:
        load(name).served.weights.prompt(np.zeros((1, 200, 20), np.float32), options)
    assert (refused.value.reason, refused.value.param) == (reason, param)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("generation_config.json", {"no_timestamps_token_id": None}, "lacks no_timestamps_token_id"),
        ("generation_config.json", {"condition_on_prev_tokens": True}, "sets condition_on_prev_tokens"),
        ("preprocessor_config.json", {"dither": 0.1}, "dither is 0.1, supported is 0"),
    ],
)
def test_files_that_cannot_be_reproduced_are_refused(
    file: str,
    change: dict[str, Any],
    message: str,
    load: Callable[[str], Writing],
    cpu_engine: AdapterEngine,
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(load("few").folder, tmp_path / "model")
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelLoadFailed, match=message):
        cpu_engine.residency.ensure("hear/wrong", reader_entry(TOKENS, "wrong", folder))


ALIGNMENT_HEADS = ((0, 1), (1, 0), (1, 3))


def words_of_the_library(folder: Path, sound: Samples, options: ExtractOptions) -> list[tuple[str, float, float]]:
    """Return the words of a sound with their begin and end, as transformers' pipeline of speech makes them."""
    from transformers import AutoFeatureExtractor, AutoTokenizer, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    whole = {"truncation": False, "padding": "longest"} if len(sound) > SECONDS * RATE else {}
    inputs = AutoFeatureExtractor.from_pretrained(folder)(
        sound, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **whole
    )
    written = model.generate(
        inputs.input_features,
        attention_mask=inputs.attention_mask,
        return_timestamps=True,
        return_token_timestamps=True,
        return_segments=True,
        max_new_tokens=options.parameters["max_new_tokens"],
        num_beams=1,
        do_sample=False,
        **{name: value for name, value in options.parameters.items() if name in ("language", "task")},
    )
    segments = written["segments"][0]
    tokens = torch.cat([segment["tokens"] for segment in segments])[None]
    times = torch.cat([segment["token_timestamps"] for segment in segments])[None]
    outputs = [{"tokens": tokens.numpy(), "token_timestamps": times}]
    _, rest = tokenizer._decode_asr(outputs, return_timestamps="word", return_language=False, time_precision=0.02)
    return [(word["text"].strip(), *map(float, word["timestamp"])) for word in rest["chunks"] if word["text"].strip()]


@pytest.mark.parametrize("number", [1, 3, 6])
def test_words_and_their_times_equal_those_of_the_library(
    number: int, cpu_engine: AdapterEngine, tmp_path: Path
) -> None:
    from parity import sound_checkpoints

    folder = sound_checkpoints.whisper(tmp_path / "words", alignment_heads=ALIGNMENT_HEADS)
    served = served_by(cpu_engine, reader_entry(TOKENS, "words", folder))
    recipe = served.weights.rows["extract"].sounds
    requests = [asks(language=language, word_times=True) for language in ("en", "de")]
    prompts = [served.weights.prompt(sounds.features(SOUNDS[number], recipe), options) for options in requests]
    cpu_engine.readings.read(served.weights, prompts)
    for prompt, options in zip(prompts, requests, strict=True):
        words = [(word.text, word.start_s, word.end_s) for word in served.weights.words(prompt.sound)]
        assert words
        reference = words_of_the_library(folder, SOUNDS[number], options)
        assert [text for text, *_ in words] == [text for text, *_ in reference]
        assert np.array([times for _, *times in words]) == pytest.approx(
            np.array([times for _, *times in reference]), abs=0.001
        )


def test_a_sound_whose_words_were_written_is_freed_at_once(cpu_engine: AdapterEngine, tmp_path: Path) -> None:
    """The features of a sound are large, and the garbage collector seldom runs in the adapter."""
    from parity import sound_checkpoints

    folder = sound_checkpoints.whisper(tmp_path / "freed", alignment_heads=ALIGNMENT_HEADS)
    weights = served_by(cpu_engine, reader_entry(TOKENS, "freed", folder)).weights
    prompt = weights.prompt(sounds.features(SOUNDS[6], weights.rows["extract"].sounds), asks(word_times=True))
    cpu_engine.readings.read(weights, [prompt])
    assert weights.words(prompt.sound)
    sound = weakref.ref(prompt.sound)
    gc.disable()
    try:
        del prompt
        until(lambda: sound() is None, 30, "the loop drops its rows")
    finally:
        gc.enable()


@pytest.mark.parametrize("heads", [None, [[0, 1], [10, 0]], [[0, 4]]])
def test_times_of_words_are_refused_by_a_checkpoint_that_has_none(
    heads: list[list[int]] | None, cpu_engine: AdapterEngine, tmp_path: Path
) -> None:
    from parity import sound_checkpoints

    folder = sound_checkpoints.whisper(tmp_path / "none", alignment_heads=heads)
    weights = served_by(cpu_engine, reader_entry(TOKENS, "none", folder)).weights
    features = sounds.features(SOUNDS[1], weights.rows["extract"].sounds)
    with pytest.raises(InvalidInput, match="no alignment_heads") as refused:
        weights.prompt(features, asks(word_times=True))
    assert (refused.value.param, refused.value.reason) == ("word_times", "unsupported_parameter")
