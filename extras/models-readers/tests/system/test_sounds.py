"""Sounds over HTTP to a model of texts and sounds and to one that writes what is said: vectors and words are the
library's, a file that is no sound costs its own slot, and the blocks of sounds.md print what the library computes.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import shared
import soundfile
import torch
from cluster import Cluster, until
from local_models import LocalModels
from numpy.typing import NDArray
from pages import ROOT, blocks, run
from sound_files import encoded, tone

from sie_client import SIEClient

CLAP, RATE = "test/clap", 16_000
WHISPER = "openai/whisper-small"
LIMIT = 40  # by which this entry differs from the packaged one
FILES = {
    f"{number}.{kind.lower()}": encoded(tone(0.3 + 0.2 * number, rate=RATE, seed=number), kind, rate=RATE)
    for number, kind in enumerate(("WAV", "FLAC", "OGG", "MP3"))
}
pytestmark = shared.OPEN


@pytest.fixture(scope="module")
def library(open_models: LocalModels) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The library's vectors of FILES [sounds, width], and of the text of the page."""
    from transformers import AutoFeatureExtractor, AutoTokenizer, ClapModel

    folder = open_models.weights / "clap"
    model, extractor = ClapModel.from_pretrained(folder).eval(), AutoFeatureExtractor.from_pretrained(folder)
    recordings = [soundfile.read(io.BytesIO(data), dtype="float32")[0] for data in FILES.values()]
    token_ids = AutoTokenizer.from_pretrained(folder)("a dog barks", return_tensors="pt").input_ids
    with torch.inference_mode():
        features = extractor(recordings, sampling_rate=RATE, return_tensors="pt")
        sounds = model.get_audio_features(**features).pooler_output.numpy()
        text = model.get_text_features(input_ids=token_ids).pooler_output[0].numpy()
    return sounds, text


def test_vectors_equal_the_library_and_a_file_that_is_no_sound_costs_its_own_slot(
    open_cluster: Cluster, library: tuple[NDArray[np.float32], NDArray[np.float32]]
) -> None:
    items: list[dict[str, Any]] = [{"audio": base64.b64encode(data).decode()} for data in FILES.values()]
    items += [{"audio": base64.b64encode(b"no sound").decode()}, {"text": "a dog barks"}]
    answer = httpx.post(f"{open_cluster.url}/v1/encode/{CLAP}", json={"items": items}, timeout=60)
    assert answer.status_code == 200, answer.text
    *sounds, wrong, text_slot = answer.json()["items"]
    vectors = np.stack([item["dense"]["values"] for item in sounds])
    assert np.abs(vectors - library[0]).max() <= 2e-6
    assert np.abs(np.asarray(text_slot["dense"]["values"]) - library[1]).max() <= 2e-6
    assert wrong["error"]["reason"] == "invalid_media"
    assert wrong["error"]["message"].startswith("audio: undecodable: the first bytes are of no supported sound format")
    refusal = httpx.post(f"{open_cluster.url}/v1/encode/test/clip", json={"items": items[:1]}, timeout=60)
    message = "test/clip takes text, image, not audio; models that take it: me/clap, test/clap"
    assert message in refusal.json()["error"]["message"]


def test_infinitys_modality_and_the_samples_of_the_client_give_the_same(
    open_cluster: Cluster, library: tuple[NDArray[np.float32], NDArray[np.float32]]
) -> None:
    first = FILES["0.wav"]
    uri = f"data:audio/wav;base64,{base64.b64encode(first).decode()}"
    body = {"model": CLAP, "input": [uri], "modality": "audio"}
    answer = httpx.post(f"{open_cluster.url}/v1/embeddings", json=body, timeout=60)
    assert np.abs(np.asarray(answer.json()["data"][0]["embedding"]) - library[0][0]).max() <= 2e-6
    samples = soundfile.read(io.BytesIO(first), dtype="int16")[0]
    with SIEClient(open_cluster.url) as client:
        reply = client.encode(CLAP, {"audio": {"data": samples, "sample_rate": RATE}})
    assert np.abs(np.asarray(reply["dense"]) - library[0][0]).max() <= 2e-6


def replace(cluster: Cluster, models: LocalModels, name: str, entry: dict[str, Any]) -> None:
    """Add an entry in the place of that of the catalogue, and wait until every gateway has it."""
    models.add(name, entry)
    until(
        lambda: all(
            httpx.get(f"{url}/v1/models/{entry['id']}", timeout=10).json().get("max_sequence_length")
            == entry["max_tokens"]
            for url in cluster.urls
        ),
        shared.SERVED_S,
        f"{entry['id']} to be replaced",
        cluster.log,
    )


@pytest.fixture(scope="module")
def whisper(open_cluster: Cluster, open_models: LocalModels) -> Path:
    """The folder of a small model that replaces the model of the page."""
    from parity import sound_checkpoints

    folder = sound_checkpoints.whisper(open_models.weights / "whisper", alignment_heads=[[0, 1], [1, 0], [1, 3]])
    entry = {
        "id": WHISPER,
        "family": "sound-reader",
        "inputs": ["audio"],
        "outputs": {"entities": 0, "data": 0},
        "max_tokens": LIMIT,
    }
    replace(open_cluster, open_models, "whisper", entry)
    return folder


def test_what_is_said_is_written_down_as_the_library_does_it(
    open_cluster: Cluster, whisper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of the page run with a recording of several windows. One request has a text and a recording, with
    parameters. Another one has a language that the model does not have.
    """
    from parity.test_sound_reader import Oracle, asks

    sound = tone(2.6, rate=RATE, seed=1)
    recording = encoded(sound, "FLAC", rate=RATE)
    (tmp_path / "interview.flac").write_bytes(recording)
    monkeypatch.chdir(tmp_path)
    samples = soundfile.read(io.BytesIO(recording), dtype="float32")[0]
    oracle = Oracle(whisper)
    with torch.inference_mode():
        expected = oracle.segments(samples, asks(most=LIMIT - 3))
    lines = [
        f"{segment.start_s:.2f} {segment.end_s:.2f} {text}"
        for segment in expected
        if (text := oracle.text(segment.ids))
    ]
    _, block, of_openai = blocks(ROOT / "extras/models-readers/sounds.md", "python")
    *printed, language = run(block.code, open_cluster)
    assert "\n".join(printed) == "\n".join(lines)
    assert [line.split() for line in run(of_openai.code, open_cluster)] == [line.split() for line in lines]
    assert language in ("en", "de", "fr")

    audio = base64.b64encode(recording).decode()
    body = {"items": [{"text": "x"}, {"audio": audio}], "params": {"task": "translate", "max_new_tokens": 6}}
    answer = httpx.post(f"{open_cluster.url}/v1/extract/{WHISPER}", json=body, timeout=60)
    text_slot, written = answer.json()["items"]
    assert text_slot["error"]["reason"] == "unsupported_modality"
    assert {entity["label"] for entity in written["entities"]} <= {"translation"}
    assert written["data"]["finish_reason"] == "length"
    body = {"items": [{"audio": audio}], "params": {"language": "klingon"}}
    refused = httpx.post(f"{open_cluster.url}/v1/extract/{WHISPER}", json=body, timeout=60)
    assert (refused.status_code, refused.json()["error"]["reason"]) == (400, "language")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # OpenAI's client raises it
def test_the_client_of_openai_gets_the_words_of_a_recording_in_each_format(
    open_cluster: Cluster, whisper: Path
) -> None:
    """The client is unmodified. Segments are those of the library's model, and the text is that of its pipeline."""
    import openai
    from parity.test_sound_reader import Oracle, asks
    from transformers import pipeline

    sound = tone(4.4, rate=RATE, seed=2)
    recording = encoded(sound, "FLAC", rate=RATE)
    samples = soundfile.read(io.BytesIO(recording), dtype="float32")[0]
    oracle = Oracle(whisper)
    most = LIMIT - 3
    with torch.inference_mode():
        spoken = oracle.segments(samples, asks(most=most, language="de"))
        pipe = pipeline("automatic-speech-recognition", model=str(whisper), device="cpu")
        options = {"max_new_tokens": most, "num_beams": 1, "do_sample": False, "language": "de"}
        piped = pipe({"raw": samples, "sampling_rate": RATE}, return_timestamps=True, generate_kwargs=options)
        pipe.model.set_attn_implementation("eager")
        timed = pipe({"raw": samples, "sampling_rate": RATE}, return_timestamps="word", generate_kwargs=options)
    words = [(text, *chunk["timestamp"]) for chunk in timed["chunks"] if (text := chunk["text"].strip())]
    segments = [(segment.start_s, segment.end_s, text) for segment in spoken if (text := oracle.text(segment.ids))]
    assert segments
    with openai.OpenAI(base_url=f"{open_cluster.url}/v1", api_key="any", max_retries=0, timeout=60) as api:
        create = api.audio.transcriptions.create

        def transcription(format_: Any, **more: Any) -> Any:
            file = ("interview.flac", recording)
            return create(model=WHISPER, file=file, language="de", response_format=format_, **more)

        verbose = transcription("verbose_json", timestamp_granularities=["segment"])
        assert [(segment.start, segment.end, segment.text.strip()) for segment in verbose.segments] == segments
        assert (verbose.language, verbose.duration) == ("german", 4.4)
        assert verbose.text.strip() == piped["text"].strip()
        worded = transcription("verbose_json", timestamp_granularities=["word"])
        assert [(word.word, word.start, word.end) for word in worded.words] == words
        assert worded.segments is None
        assert words
        assert transcription("json").text == verbose.text
        assert transcription("text") == f"{verbose.text}\n"
        assert transcription("srt").count(" --> ") == transcription("vtt").count(" --> ") == len(segments)
        assert transcription("vtt").startswith("WEBVTT\n\n00:00:")
        assert api.audio.translations.create(model=WHISPER, file=recording, temperature=0).text
        with pytest.raises(openai.BadRequestError, match="temperature: expected 0") as raised:
            transcription("json", temperature=0.5)
        assert raised.value.param == "temperature"
        with pytest.raises(openai.BadRequestError, match="undecodable"):
            create(model=WHISPER, file=b"no sound")
        with pytest.raises(openai.NotFoundError, match="no model named"):
            create(model="openai/whisper-smal", file=recording)
