"""Vectors of texts and sounds equal those of transformers' own model and feature extractor: CLAP."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray
from parity.heads_checkpoints import texts
from parity.table import Agreement, ParityTable
from sound_files import encoded, tone

from sie_adapter.engine import Engine
from sie_adapter.families.sound_encoder import SoundEncoder
from sie_contracts.entries import parse_entry
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.ipc import BatchDone
from sie_contracts.messages import Failed, Input, Ok, RunOptions
from sie_contracts.settings import Settings
from sie_sidecar import layouts, sounds
from sie_sidecar import rows as rowing
from sie_sidecar.media_frames import Heard
from sie_sidecar.rows import Part, Work
from sie_sidecar.tokens import ModelTokenizer

WIDTH, TOKENS, RATE = 24, 120, 16_000  # of sound_checkpoints, which imports the classes of transformers
MAX_DIFFERENCE = {"float32": 5e-6, "bfloat16": 6e-2}
KINDS = {"clap": False, "clap fused": True}
Vectors = NDArray[np.float32]
Given = str | bytes  # a text, or a sound file at the model's rate

# ragged: a click, shorter than the model reads, just as long, a little and much longer
SOUNDS = [
    encoded(tone(seconds, rate=RATE, seed=seed), "FLAC", rate=RATE)
    for seed, seconds in enumerate((0.02, 0.3, 0.6, 1.0, 1.005, 1.3, 3.7))
]


@dataclass(frozen=True)
class Served:
    """A model in the engine of this process, asked as the sidecar asks."""

    engine: Engine
    name: str
    weights: SoundEncoder
    tokenizer: ModelTokenizer

    def encode(self, given: Sequence[Given], **options: Any) -> list[Any]:
        """The vector of each input, or its error: all of them one batch."""
        layout = self.weights.rows["encode"]
        assert layout.sounds is not None
        inputs = [Input(each) if isinstance(each, str) else Input(audio=each) for each in given]
        heard = {}
        for index, each in enumerate(inputs):
            if each.audio:
                made = sounds.prepare(each.audio, layout.sounds)
                heard[index] = Heard(made.values.tobytes(), made.shape, made.digest(), made.seconds)
        work = Work(inputs, None, RunOptions(("dense",), **options), sounds=heard)
        (made,) = layouts.make(self.tokenizer, layout, [work])
        batch = rowing.to_batch("b", self.name, "encode", layout.layout, [Part(made.rows, work)])
        with torch.inference_mode():
            reply = self.engine.execute(batch)
        assert isinstance(reply, BatchDone), reply
        return [self._value(reply, outcome) for outcome in reply.outcomes]

    @staticmethod
    def _value(reply: BatchDone, outcome: object) -> Any:
        if isinstance(outcome, Failed):
            return outcome.error
        assert isinstance(outcome, Ok)
        part = outcome.outputs["dense"]
        return np.frombuffer(reply.block, part.dtype, part.shape[0], part.offset)


class Oracle:
    """transformers' model with its own feature extractor, one input at a time. What the extractor takes at random is
    the middle of what it may take.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoFeatureExtractor, AutoTokenizer, ClapModel

        self._model = ClapModel.from_pretrained(folder, attn_implementation="eager").eval()
        self._extractor = AutoFeatureExtractor.from_pretrained(folder)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def __call__(self, given: Given) -> Vectors:
        """Of the length one, [width]."""
        with torch.inference_mode():
            if isinstance(given, str):
                ids = self._tokenizer(given, truncation=True, max_length=TOKENS, return_tensors="pt").input_ids
                return self._model.get_text_features(input_ids=ids).pooler_output[0].numpy()  # type: ignore[no-any-return]
            sound, rate = soundfile.read(io.BytesIO(given), dtype="float32")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(np.random, "randint", lambda low, high: (low + high - 1) // 2)
                patch.setattr(np.random, "choice", lambda own: own[len(own) // 2])
                features = self._extractor(sound, sampling_rate=rate, return_tensors="pt")
            return self._model.get_audio_features(**features).pooler_output[0].numpy()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Pair:
    served: Served
    oracle: Oracle


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(Settings(device="cpu"))
    yield engine
    assert engine.stop(10)


@pytest.fixture(scope="module")
def load(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    from parity import sound_checkpoints

    root = tmp_path_factory.mktemp("sound")

    @cache
    def folder(kind: str) -> Path:
        return sound_checkpoints.clap(root / kind.replace(" ", "-"), fused=KINDS[kind])

    @cache
    def loaded(kind: str = "clap", precision: str = "float32") -> Pair:
        entry = entry_of(f"{kind.replace(' ', '-')}-{precision}", folder(kind), load={"precision": precision})
        resident = engine.residency.ensure(entry["id"], parse_entry(entry))
        weights = resident.weights
        assert isinstance(weights, SoundEncoder)
        if weights.precision != precision:
            pytest.skip(f"this CPU does not compute in {precision}")
        served = Served(engine, resident.model, weights, ModelTokenizer(weights.tokenizer, weights.max_tokens))
        return Pair(served, Oracle(folder(kind)))

    return loaded


def entry_of(name: str, folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "id": f"sound/{name}",
        "weights": {"path": str(folder)},
        "family": "sound-encoder",
        "inputs": ["text", "audio"],
        "outputs": {"dense": WIDTH},
        "max_tokens": TOKENS,
        **more,
    }


def _mixed() -> list[Given]:
    """Texts and sounds in turns, one of no characters, one far over the limit."""
    said = [*texts(6), "", "Ärger ÜBER 2026 " * 60, "a dog barks"]
    return [each for pair in zip(said, [*SOUNDS, *SOUNDS[:2]], strict=True) for each in pair]


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("clap", "float32"),
        pytest.param("clap", "bfloat16", marks=pytest.mark.long),
        pytest.param("clap fused", "float32", marks=pytest.mark.long),
        pytest.param("clap fused", "bfloat16", marks=pytest.mark.long),
    ],
)
def test_vectors_equal_the_oracle(kind: str, precision: str, load: Callable[..., Pair], table: ParityTable) -> None:
    """A batch of texts and sounds of many lengths against the model's own classes one by one."""
    pair = load(kind, precision)
    given = _mixed()
    agreement = Agreement.of(np.stack(pair.served.encode(given)), np.stack([pair.oracle(each) for each in given]))
    path = "padded" if "padded" in pair.served.weights.attention else "packed"
    table.record(f"sound-encoder {kind}", path, precision, agreement)
    assert agreement.difference <= MAX_DIFFERENCE[precision]
    assert path == "packed"


def test_sounds_differ_where_they_are_different(load: Callable[..., Pair]) -> None:
    """The part of a sound that is read reaches its vector; the model is no constant."""
    found = np.stack(load().served.encode([SOUNDS[1], SOUNDS[3], SOUNDS[6]]))
    cosines = (found @ found.T)[np.triu_indices(3, 1)]
    assert cosines.max() < 0.999


@pytest.mark.parametrize("kind", ["clap", pytest.param("clap fused", marks=pytest.mark.long)])
def test_a_vector_does_not_depend_on_its_batch_mates(kind: str, load: Callable[..., Pair]) -> None:
    served = load(kind).served
    given = _mixed()[:8]
    for each, vector in zip(given, served.encode(given), strict=True):
        (alone,) = served.encode([each])
        assert np.abs(alone - vector).max() <= 2e-6


@pytest.mark.long
def test_two_threads_give_the_same_vectors(load: Callable[..., Pair]) -> None:
    served = load().served
    given = _mixed()
    expected = np.stack(served.encode(given))
    found: list[Vectors] = []

    def run() -> None:
        found.extend(np.stack(served.encode(given)) for _ in range(3))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 6
    assert all(np.array_equal(each, expected) for each in found)


def test_a_sound_costs_the_patches_of_the_last_stage(load: Callable[..., Pair]) -> None:
    """As many chunks of its samples."""
    recipe = load().served.weights.rows["encode"].sounds
    assert recipe is not None
    assert (recipe.window, recipe.chunk, recipe.tokens) == (RATE, 250, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outputs": {"dense": WIDTH + 1}}, "outputs.dense is 25, the model's is 24 wide"),
        ({"max_tokens": TOKENS + 1}, "max_tokens is 121, the text tower has 120 positions"),
    ],
    ids=["width", "positions"],
)
def test_an_entry_that_does_not_fit_is_refused(
    change: dict[str, Any], message: str, engine: Engine, load: Callable[..., Pair], tmp_path: Path
) -> None:
    from parity import sound_checkpoints

    entry = entry_of("wrong", sound_checkpoints.clap(tmp_path / "clap"), **change)
    with pytest.raises(ModelLoadFailed, match=message):
        engine.residency.ensure("sound/wrong", parse_entry(entry))


def test_features_that_the_model_does_not_read_are_refused(engine: Engine, tmp_path: Path) -> None:
    """1. The views of another kind of CLAP. 2. No file that says how sounds become features."""
    from parity import sound_checkpoints

    folder = sound_checkpoints.clap(tmp_path / "clap")
    file = folder / "preprocessor_config.json"
    file.write_text(file.read_text().replace("rand_trunc", "fusion"))
    with pytest.raises(ModelLoadFailed, match="makes four views of 101 frames and 64 bins, the model reads one view"):
        engine.residency.ensure("sound/views", parse_entry(entry_of("views", folder)))
    file.unlink()
    with pytest.raises(ModelLoadFailed, match="says how sounds become features"):
        engine.residency.ensure("sound/deaf", parse_entry(entry_of("deaf", folder)))
