"""Vectors of texts and sounds equal those of transformers' own model and feature extractor: CLAP."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from parity.device import SIXTEEN
from parity.heads_checkpoints import texts
from parity.page_engine import Load, Vectors, pairs
from parity.table import Agreement, ParityTable
from sound_files import encoded, tone

from sie_adapter.engine.engine import AdapterEngine
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.entries import ModelEntry, parse_entry

WIDTH, TOKENS, RATE = 24, 120, 16_000  # those of sound_checkpoints, which imports classes of transformers
MAX_DIFFERENCE = {"float32": 5e-6, SIXTEEN: 6e-2}
KINDS = {"clap": False, "clap fused": True}
Given = str | bytes  # a text, or a sound file at the model's rate

# ragged: a click, shorter than the model reads, just as long, a little and much longer
SOUNDS = [
    encoded(tone(seconds, rate=RATE, seed=seed), "FLAC", rate=RATE)
    for seed, seconds in enumerate((0.02, 0.3, 0.6, 1.0, 1.005, 1.3, 3.7))
]


class Oracle:
    """transformers' model with its own feature extractor, one input at a time. Random choices of the extractor are
    replaced by the middle choice.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoFeatureExtractor, AutoTokenizer, ClapModel

        self._model = ClapModel.from_pretrained(folder, attn_implementation="eager").eval()
        self._extractor = AutoFeatureExtractor.from_pretrained(folder)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def __call__(self, source: Given) -> Vectors:
        """Return the vectors of length one, [width]."""
        with torch.inference_mode():
            if isinstance(source, str):
                ids = self._tokenizer(source, truncation=True, max_length=TOKENS, return_tensors="pt").input_ids
                return self._model.get_text_features(input_ids=ids).pooler_output[0].numpy()  # type: ignore[no-any-return]
            sound, rate = soundfile.read(io.BytesIO(source), dtype="float32")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(np.random, "randint", lambda low, high: (low + high - 1) // 2)
                patch.setattr(np.random, "choice", lambda own: own[len(own) // 2])
                features = self._extractor(sound, sampling_rate=rate, return_tensors="pt")
            return self._model.get_audio_features(**features).pooler_output[0].numpy()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def load(cpu_engine: AdapterEngine, tmp_path_factory: pytest.TempPathFactory) -> Load[Oracle]:
    from parity import sound_checkpoints

    folders = {kind: partial(sound_checkpoints.clap, fused=fused) for kind, fused in KINDS.items()}
    return pairs(cpu_engine, tmp_path_factory.mktemp("sound"), folders, entry_of, lambda _, folder: Oracle(folder))


def entry_of(kind: str, folder: Path, **more: Any) -> ModelEntry:
    return parse_entry(
        {
            "id": f"sound/{kind}",
            "weights": {"path": str(folder)},
            "family": "sound-encoder",
            "inputs": ["text", "audio"],
            "outputs": {"dense": WIDTH},
            "max_tokens": TOKENS,
            **more,
        }
    )


def _mixed() -> list[Given]:
    """Return texts and sounds in turns, with an empty text and a text far over the limit."""
    captions = [*texts(6), "", "Ärger ÜBER 2026 " * 60, "a dog barks"]
    return [side for pair in zip(captions, [*SOUNDS, *SOUNDS[:2]], strict=True) for side in pair]


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("clap", "float32"),
        pytest.param("clap", SIXTEEN, marks=pytest.mark.long),
        pytest.param("clap fused", "float32", marks=pytest.mark.long),
        pytest.param("clap fused", SIXTEEN, marks=pytest.mark.long),
    ],
)
def test_vectors_equal_the_oracle(kind: str, precision: str, load: Load[Oracle], table: ParityTable) -> None:
    """A batch of texts and sounds of many lengths against the model's own classes one by one."""
    pair = load(kind, precision)
    sources = _mixed()
    vectors, expected = pair.served.run("encode", sources), [pair.oracle(source) for source in sources]
    agreement = Agreement.of(np.stack(vectors), np.stack(expected))
    table.record(f"sound-encoder {kind}", pair.served.path, precision, agreement)
    assert agreement.difference <= MAX_DIFFERENCE[precision]
    assert pair.served.path == "packed"


@pytest.mark.parametrize("kind", ["clap", pytest.param("clap fused", marks=pytest.mark.long)])
def test_a_vector_does_not_depend_on_its_batch_mates(kind: str, load: Load[Oracle]) -> None:
    served = load(kind).served
    sources = _mixed()[:8]
    for source, vector in zip(sources, served.run("encode", sources), strict=True):
        (alone,) = served.run("encode", [source])
        assert np.abs(alone - vector).max() <= 2e-6


def test_features_that_the_model_does_not_read_are_refused(cpu_engine: AdapterEngine, tmp_path: Path) -> None:
    """The files make the views of another kind of CLAP, or no file says how sounds become features."""
    from parity import sound_checkpoints

    folder = sound_checkpoints.clap(tmp_path / "clap")
    file = folder / "preprocessor_config.json"
    file.write_text(file.read_text().replace("rand_trunc", "fusion"))
    with pytest.raises(ModelLoadFailed, match="makes four views of 101 frames and 64 bins, the model reads one view"):
        cpu_engine.residency.ensure("sound/views", entry_of("views", folder))
    file.unlink()
    with pytest.raises(ModelLoadFailed, match="says how sounds become features"):
        cpu_engine.residency.ensure("sound/deaf", entry_of("deaf", folder))
