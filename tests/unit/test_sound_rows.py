"""Sounds on their way: from the item of a request to a work item, from a worker's features to the adapter, and which
inputs are refused.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from sie_adapter.packed.packing import MalformedBatch, items, sounds
from sie_contracts.errors import InvalidInput
from sie_contracts.media.sounds import SoundRecipe
from sie_contracts.wire.ipc import Rows
from sie_contracts.wire.messages import Input, RunOptions
from sie_gateway.inference import body as bodies
from sie_gateway.inference import images
from sie_sidecar.prepare import layouts
from sie_sidecar.prepare.media_frames import SoundFeatures
from sie_sidecar.prepare.rows import BatchPart, ModelTokenizer, WorkItemInput, to_batch

RECIPE = SoundRecipe(1000, 400, 40, 20, 8, 50, high=500.0)
LAYOUT = Rows(sounds=RECIPE)
FILE = b"RIFF, a file"


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "river": 1, "x": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return ModelTokenizer(words.to_str().encode(), 16)


def heard(seed: int) -> SoundFeatures:
    features = np.random.default_rng(seed).normal(size=RECIPE.shape).astype(np.float32).tobytes()
    return SoundFeatures(1, *RECIPE.shape, 0.4, hashlib.sha256(features).digest(), features)


def work(*inputs: Input, **sound_features: SoundFeatures | InvalidInput) -> WorkItemInput:
    return WorkItemInput(
        inputs, None, RunOptions(), sounds={int(name[1:]): sound for name, sound in sound_features.items()}
    )


# the gateway


@pytest.mark.parametrize(
    "form",
    [
        FILE,
        base64.b64encode(FILE).decode(),
        f"data:audio/wav;base64,{base64.b64encode(FILE).decode()}",
        {"data": FILE, "format": "mp3", "sample_rate": 8000},
        {"data": base64.b64encode(FILE).decode(), "format": None, "sample_rate": None},
    ],
    ids=range(5),
)
def test_every_form_of_a_sound_gives_the_same_bytes(form: Any) -> None:
    (item,) = bodies.items({"items": [{"audio": form}]}, limit=1)
    assert (item.audio, item.modalities, item.unfit, item.is_empty) == (FILE, ("audio",), None, False)


@pytest.mark.parametrize(
    ("form", "reason", "param"),
    [
        ("https://host/a.wav", "invalid_media", "items[0].audio"),
        ({"nd": True, "data": b"x"}, "schema", "items[0].audio"),
        ([FILE], "schema", "items[0].audio"),
        (7, "schema", "items[0].audio"),
        ({"data": FILE, "sample_rate": "8k"}, "schema", "items[0].audio.sample_rate"),
        ({"data": FILE, "sample_rate": True}, "schema", "items[0].audio.sample_rate"),
    ],
    ids=range(6),
)
def test_a_value_that_is_no_sound_fails_the_request_and_names_its_place(form: Any, reason: str, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        bodies.items({"items": [{"audio": form}]}, limit=1)
    assert (caught.value.reason, caught.value.param) == (reason, param)
    assert "image" not in caught.value.message


@pytest.mark.parametrize("form", ["?", "data:audio/wav,x", {"data": ""}])
def test_a_text_that_is_no_base64_fails_its_input_alone(form: Any) -> None:
    content, fault = images.read_sound(form, "items[0].audio")
    assert fault is not None
    assert (content, fault.reason) == (b"", "invalid_media")


def test_bytes_of_a_sound_count_in_the_size_and_not_as_text() -> None:
    (item,) = bodies.items({"items": [{"text": "four", "images": [b"y"], "audio": b"x" * 1000}]}, limit=1)
    assert (item.size, item.file_bytes, len(item.files)) == (1005, 1001, 2)
    assert Input("four", images=(b"y",), audio=b"x" * 1000).nbytes == 1005


# the sidecar and the adapter


def test_an_input_with_a_sound_is_a_row_without_ids_that_costs_its_chunks(tokenizer: ModelTokenizer) -> None:
    (work_rows,) = layouts.make(tokenizer, LAYOUT, [work(Input("river", audio=FILE), Input("river"), _0=heard(0))])
    sound, text_row = work_rows.rows
    assert (len(sound.ids), sound.cost, sound.media_bytes) == (0, 8, len(heard(0).features))
    assert (text_row.ids.tolist(), text_row.cost, text_row.sound) == ([1], 1, None)


def test_a_model_that_reads_sounds_by_itself_gets_them_beside_the_texts(tokenizer: ModelTokenizer) -> None:
    """The cost of a sound that is read whole grows with its length."""
    whole = SoundRecipe(1000, 400, 40, 20, 8, 50, high=500.0, filling="pad", levels="relative", whole=True)
    values = np.zeros((1, 90, 8), np.float32).tobytes()
    long = SoundFeatures(1, 1, 90, 8, 1.8, hashlib.sha256(values).digest(), values)
    layout = Rows("raw", sounds=whole)
    work_item = work(Input("river"), Input(audio=FILE), _1=long)
    (work_rows,) = layouts.make(tokenizer, layout, [work_item])
    assert [(row.cost, row.media_bytes) for row in work_rows.rows] == [(1, 0), (36, len(values))]
    batch = to_batch("b", "m", "extract", "raw", [BatchPart(work_rows.rows, work_item)])
    batch_sounds = sounds(batch.sounds, batch.features, whole)
    assert batch_sounds is not None
    assert (batch.texts, batch_sounds.tokens.tolist()) == (("river", ""), [36])
    assert [len(row_sounds) for row_sounds in batch_sounds.for_items(np.arange(2))] == [0, 1]


def test_sounds_that_cannot_be_run_are_refused_for_their_input_alone(tokenizer: ModelTokenizer) -> None:
    broken = InvalidInput("audio: undecodable: the sound file is empty", reason="invalid_media")
    work_item = work(Input(audio=FILE), Input("river"), Input(audio=FILE), _0=broken, _2=heard(0))
    (work_rows,) = layouts.make(tokenizer, LAYOUT, [work_item])
    assert dict(work_rows.unfit) == {0: broken}
    assert [row.sound is not None for row in work_rows.rows] == [False, False, True]
    (deaf,) = layouts.make(tokenizer, Rows(), [work(Input(audio=FILE), Input("river"))])
    assert (set(deaf.unfit), deaf.unfit[0].reason) == ({0}, "unsupported_modality")
    (both,) = layouts.make(tokenizer, LAYOUT, [work(Input(audio=FILE, images=(b"x",)), _0=heard(0))])
    assert both.unfit[0].reason == "unsupported_modality"
    work_item = WorkItemInput([Input("river")], Input(audio=FILE), RunOptions())
    assert "audio: the model accepts no audio in a query" in str(layouts.make(tokenizer, LAYOUT, [work_item])[0].error)


def test_sounds_reach_the_adapter_with_their_rows_and_shapes(tokenizer: ModelTokenizer) -> None:
    """The sounds belong to two work items in one batch."""
    first, second = work(Input("river"), Input(audio=FILE), _1=heard(1)), work(Input(audio=FILE), _0=heard(2))
    parts = [
        BatchPart(work_rows.rows, work_item)
        for work_item in (first, second)
        for work_rows in layouts.make(tokenizer, LAYOUT, [work_item])
    ]
    batch = to_batch("b", "m", "encode", "text", parts)
    batch_sounds = sounds(batch.sounds, batch.features, RECIPE)
    assert batch_sounds is not None
    decoded = items(batch.lengths, batch.ids, batch.types, None, batch_sounds)
    assert (decoded.lengths.tolist(), decoded.costs.tolist()) == ([1, 0, 0], [1, 8, 8])
    assert [len(row) for row in batch_sounds.for_items(np.arange(3))] == [0, 1, 1]
    for features, source in zip(batch_sounds.shown, (heard(1), heard(2)), strict=True):
        assert features.shape == RECIPE.shape
        assert features.tobytes() == source.features
    assert sounds(b"", b"", RECIPE) is None


@pytest.mark.parametrize(
    ("places", "values", "message"),
    [
        ([(0, 1, 2)], 2, "int32"),
        ([(0, 1, 2, 3)], 5, "need 24 bytes, the batch has 20"),
        ([(0, 1, 0, 3)], 0, "a sound is empty"),
        ([(1, 1, 1, 1), (0, 1, 1, 1)], 2, "not in the order"),
        ([(-1, 1, 1, 1)], 1, "not in the order"),
    ],
    ids=range(5),
)
def test_sounds_that_do_not_belong_to_their_batch_are_refused(
    places: list[tuple[int, ...]], values: int, message: str
) -> None:
    with pytest.raises(MalformedBatch, match=message):
        sounds(np.array(places, np.int32).tobytes(), bytes(4 * values), RECIPE)


def test_a_sound_of_a_row_that_is_not_there_is_refused() -> None:
    batch_sounds = sounds(np.array([(3, 1, 1, 1)], np.int32).tobytes(), bytes(4), RECIPE)
    with pytest.raises(MalformedBatch, match="a sound belongs to row 3"):
        items(np.array([0, 0], np.int32).tobytes(), b"", b"", None, batch_sounds)
