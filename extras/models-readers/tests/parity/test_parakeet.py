"""The text of a sound by Parakeet equals `generate` of transformers with its feature extractor and its processor:
tokens, their times and the text, alone and in batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from parity import sound_checkpoints
from parity.page_engine import Served, served_by
from parity.sound_checkpoints import PARAKEET_BINS, reader_entry
from parity.table import ParityTable, Texts
from sound_files import encoded, tone

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.families.extraction import ExtractOptions
from sie_contracts.errors import InferenceFailed, InvalidInput, ModelLoadFailed
from sie_models_readers.parakeet import ParakeetReader, ParakeetWindow
from sie_sidecar.prepare import sounds

RATE, POSITIONS, FACTOR = 16_000, 60, 8
STEP_S = 0.08
# ragged: two frames, shorter than a position, as long as a window of 4.8 s, others
SOUNDS = [tone(seconds, rate=RATE, seed=seed) for seed, seconds in enumerate((0.02, 2.6, 0.05, 1.9, 4.8, 0.333, 3.7))]
LONG = tone(21.3, rate=RATE, seed=9)
Samples = NDArray[np.float32]


class Written(NamedTuple):
    """Transcription of a sound: ids that are not blank, with their positions and durations, and the text."""

    tokens: list[tuple[int, int, int]]
    text: str


class Oracle:
    """transformers' model with its own feature extractor and processor, one sound at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import ParakeetFeatureExtractor, ParakeetForTDT, ParakeetProcessor, ParakeetTokenizer

        self.model = ParakeetForTDT.from_pretrained(folder, dtype=dtype).eval()
        self.extractor = ParakeetFeatureExtractor.from_pretrained(folder)
        tokenizer = ParakeetTokenizer.from_pretrained(folder)
        self._processor = ParakeetProcessor(self.extractor, tokenizer, decoder_type="tdt")

    def features(self, sound: Samples) -> Any:
        return self.extractor(sound, sampling_rate=RATE, return_tensors="pt")

    def generated(self, levels: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore", UserWarning)  # about the default length
            return self.model.generate(levels.to(self.model.dtype), attention_mask=mask)

    def written(self, features: Any) -> Written:
        output = self.generated(features.input_features, features.attention_mask)
        ids, durations = output.sequences[0].tolist(), output.durations[0].tolist()
        starts = (np.cumsum(durations) - durations).tolist()
        skipped = {self.model.config.blank_token_id, self.model.config.pad_token_id}
        tokens = [row for row in zip(ids, starts, durations, strict=True) if row[0] not in skipped]
        return Written(tokens, self.text([number for number, *_ in tokens]))

    def text(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode(ids, skip_special_tokens=True)).strip()

    def times(self, features: Any) -> list[dict[str, Any]]:
        """Return begin and end of each piece of text in seconds."""
        output = self.generated(features.input_features, features.attention_mask)
        _, (stamps,) = self._processor.decode(output.sequences, durations=output.durations, skip_special_tokens=True)
        return list(stamps)

    def first(self, features: Any) -> Samples:
        """The scores of the first step, [tokens and durations]."""
        start = torch.tensor([[self.model.config.blank_token_id]])
        with torch.inference_mode():
            mask = features.attention_mask
            states = self.model.get_audio_features(features.input_features.to(self.model.dtype), attention_mask=mask)
            return self.model.joint(self.model.decoder(start), states.pooler_output[:, :1])[0, 0].float().numpy()  # type: ignore[no-any-return]


class Reference(NamedTuple):
    ids: list[tuple[int, int, int]]
    first: Samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound_checkpoints.parakeet(tmp_path_factory.mktemp("parakeet") / "model")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def served(cpu_engine: AdapterEngine, folder: Path) -> Served:
    return served_by(cpu_engine, reader_entry(POSITIONS, "parakeet", folder))


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> list[Written]:
    return [oracle.written(oracle.features(sound)) for sound in SOUNDS]


def windows(reader: ParakeetReader, recordings: Sequence[Samples], **parameters: Any) -> list[ParakeetWindow]:
    recipe = reader.rows["extract"].sounds
    assert recipe is not None
    options = ExtractOptions((), parameters=parameters)
    return [reader.prompt(sounds.features(sound, recipe), options) for sound in recordings]


def written(reader: ParakeetReader, prompts: Sequence[ParakeetWindow]) -> list[Written]:
    """Return the transcription of the first window of each sound, all from one pass."""
    with torch.inference_mode():
        reader.begin(prompts)
    transcriptions = []
    for prompt in prompts:
        assert prompt.read is not None
        prompt.reader.add(prompt)
        transcriptions.append(Written([tuple(token) for token in prompt.read.tokens], prompt.sound.texts[-1]))
    return transcriptions


def test_features_are_the_librarys(served: Served, oracle: Oracle) -> None:
    """The features are equal after the normalisation that the adapter computes."""
    from sie_models_readers.parakeet import _normalised

    for prompt, sound in zip(windows(served.weights, SOUNDS), SOUNDS, strict=True):
        levels = torch.from_numpy(prompt.sound.levels)
        library = oracle.features(sound)
        inside = int(library.attention_mask.sum())
        assert levels.shape == (1, inside, PARAKEET_BINS)
        own = _normalised(levels, torch.ones(1, inside, dtype=torch.bool))
        assert (own - library.input_features[:, :inside]).abs().max() <= 2e-4


def test_tokens_and_times_equal_generate(
    served: Served, oracle: Oracle, expected: list[Written], table: ParityTable
) -> None:
    """All sounds are in one pass; the library reads them one by one. The toy model writes more than five different
    tokens, of at least three durations.
    """
    reader = served.weights
    transcriptions = written(reader, windows(reader, SOUNDS))
    assert transcriptions == expected
    ids = {token[0] for row in expected for token in row.tokens}
    assert len(ids) > 5
    assert len({token[2] for row in expected for token in row.tokens}) >= 3
    first, references = firsts(reader, SOUNDS), []
    for sound, row in zip(SOUNDS, expected, strict=True):
        references.append(Reference(row.tokens, oracle.first(oracle.features(sound))))
    texts = Texts.of([row.tokens for row in transcriptions], first, references)  # type: ignore[arg-type]
    table.record("sound-reader parakeet", "padded", "float32", texts)
    assert texts.first.difference <= 1e-4


def firsts(reader: ParakeetReader, recordings: Sequence[Samples]) -> list[Samples]:
    """The scores of the first step of each sound."""
    scores_of_steps: list[Samples] = []
    joint = reader._model.joint
    handle = joint.register_forward_hook(lambda _, __, scores: scores_of_steps.append(scores[0, -1].float().numpy()))
    with torch.inference_mode():
        rows = []
        for prompt in windows(reader, recordings):
            scores_of_steps.clear()
            reader.begin([prompt])
            rows.append(scores_of_steps[0])
    handle.remove()
    return rows


@pytest.mark.parametrize("bad", [0, len(SOUNDS) - 1])
def test_a_sound_with_scores_that_are_not_finite_fails_alone(
    bad: int, served: Served, expected: list[Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other sounds of the batch, and of the pass, have the same texts as without it."""
    reader = served.weights
    prompts = windows(reader, SOUNDS)
    prompts[bad].sound.levels = np.full_like(prompts[bad].sound.levels, np.nan)
    monkeypatch.setattr(reader, "together", len(SOUNDS))
    outcomes = served.engine.readings.read(reader, prompts)
    assert [isinstance(outcome, InferenceFailed) for outcome in outcomes] == [
        number == bad for number in range(len(SOUNDS))
    ]
    texts = [prompt.sound.texts for number, prompt in enumerate(prompts) if number != bad]
    assert texts == [[row.text] for number, row in enumerate(expected) if number != bad]


def test_results_have_words_and_sentences_with_their_times(served: Served, oracle: Oracle) -> None:
    """The times are those of the library's processor, whose pieces of text are joined to words."""
    results = served.run("extract", [encoded(sound, rate=RATE, subtype="FLOAT") for sound in SOUNDS])
    for sound, result in zip(SOUNDS, results, strict=True):
        stamps = oracle.times(oracle.features(sound))
        words = result["data"]["words"]
        assert " ".join(word["text"] for word in words).split() == result["data"]["text"].split()
        assert result["data"]["text"] == oracle.written(oracle.features(sound)).text
        begins = [stamp for number, stamp in enumerate(stamps) if not number or stamp["token"].startswith(" ")]
        starts = [round(float(stamp["start"]), 2) for stamp in begins if stamp["token"].strip()]
        assert [word["seconds"][0] for word in words] == starts
        assert result["data"]["language"] == "und"
        assert result["data"]["completion_tokens"] == len(oracle.written(oracle.features(sound)).tokens)
        if words:
            assert result["entities"][0]["seconds"][0] == words[0]["seconds"][0]
            assert result["entities"][-1]["seconds"][1] == words[-1]["seconds"][1]
            assert [entity["label"] for entity in result["entities"]] == ["transcript"] * len(result["entities"])


def test_a_long_recording_is_read_window_by_window(served: Served, oracle: Oracle) -> None:
    """Each window is cut at a quiet moment. Its text is the library's text for the same levels."""
    reader = served.weights
    (prompt,) = windows(reader, [LONG])
    (second_window,) = windows(reader, [LONG])
    bounds, texts = [], []
    window: ParakeetWindow | None = prompt
    while window is not None:
        bounds.append((window.seek, window.stop))
        levels = torch.from_numpy(window.sound.levels[:, window.seek : window.stop])
        mean, deviation = levels.mean(1, keepdim=True), levels.std(1, keepdim=True)
        normalised = torch.nn.functional.pad((levels - mean) / (deviation + 1e-5), (0, 0, 0, 1))
        mask = torch.ones(normalised.shape[:2], dtype=torch.bool)
        mask[:, -1] = False  # the library's features have one more frame
        output = oracle.generated(normalised, mask)
        with torch.inference_mode():
            reader.begin([window])
        assert window.read is not None
        ids = [number for number in output.sequences[0].tolist() if number != oracle.model.config.blank_token_id]
        assert [token.id for token in window.read.tokens] == [number for number in ids if number != 1]
        texts.append(oracle.text(ids))
        window = window.following(None)  # type: ignore[arg-type]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == prompt.sound.levels.shape[1]
    assert [start for start, _ in bounds[1:]] == [stop for _, stop in bounds[:-1]]
    assert all(stop - start <= POSITIONS * FACTOR for start, stop in bounds)
    assert all(stop - start >= POSITIONS * FACTOR * 3 // 4 for start, stop in bounds[:-1])
    served.engine.readings.read(reader, [second_window])
    result = reader.result(second_window, None)
    assert result["data"]["text"] == " ".join(filter(None, texts))
    starts = [word["seconds"][0] for word in result["data"]["words"]]
    assert starts == sorted(starts)
    assert starts[-1] >= bounds[-1][0] / 100


def test_a_window_ends_at_its_quietest_moment(served: Served) -> None:
    silent = LONG.copy()
    silent[round(4.1 * RATE) : round(4.3 * RATE)] = 0
    (prompt,) = windows(served.weights, [silent])
    assert 410 <= prompt.stop <= 430


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"language": "de"}, "language"), ({"task": "translate"}, "task"), ({"instruction": "names"}, "schema")],
)
def test_what_the_model_cannot_be_told_is_refused_by_name(options: dict[str, str], reason: str, served: Served) -> None:
    parameters = {name: value for name, value in options.items() if name != "instruction"}
    extract_options = ExtractOptions((), parameters=parameters, instruction=options.get("instruction", ""))
    levels = sounds.features(SOUNDS[0], served.weights.rows["extract"].sounds)
    with pytest.raises(InvalidInput) as refused:
        served.weights.prompt(levels, extract_options)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"decoder_start_token_id": None}, "generation_config.json has no decoder_start_token_id"),
        ({"suppress_tokens": [5]}, "changes the scores of tokens"),
        ({"sequence_bias": [[[3], 1.0]]}, "generation_config.json sets sequence_bias"),
    ],
)
def test_rules_that_change_tokens_are_refused(
    rules: dict[str, Any], message: str, cpu_engine: AdapterEngine, tmp_path: Path
) -> None:
    folder = sound_checkpoints.parakeet(tmp_path / "model", **rules)
    with pytest.raises(ModelLoadFailed, match=message):
        cpu_engine.residency.ensure("hear/ruled", reader_entry(POSITIONS, "ruled", folder))
