"""OpenAI's routes of recordings: refusals, the formats of a reply, and recordings of many parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_adapter import toy_entry
from inprocess import GatewayProcess, InProcess
from openai.types.audio import TranscriptionVerbose
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from sie_contracts.media.languages import NAMES
from sie_contracts.media.sounds import MAX_RECORDING_S, MAX_SECONDS
from sie_contracts.wire import messages
from sie_contracts.wire.messages import Ok, Outcome, WorkItem, WorkResult
from sie_dialects.transcriptions import AGAIN_S

STREAM = "WORK__default"
HEAR = "toy/hear"
RECORDING = b"RIFF-no-sound"
PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
Spoken = Sequence[tuple[float, float, str]]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path) as cluster:
        for name in (HEAR, "toy/listen"):
            outputs = {"entities": 0, "data": 0}
            cluster.source.put(toy_entry(name, family="sound-reader", inputs=["audio"], outputs=outputs))
        cluster.source.put(toy_entry("toy/find", outputs={"entities": 0}, family="token-classifier"))
        yield cluster


@pytest.fixture
async def gateway(cluster: InProcess) -> GatewayProcess:
    return await cluster.gateway()


async def post(gateway: GatewayProcess, path: str = PATHS[0], file: Any = RECORDING, **form: Any) -> httpx.Response:
    form = {name.replace("__", "[]"): value for name, value in {"model": HEAR, **form}.items()}
    return await gateway.client.post(path, data=form, files={"file": ("a.wav", file)}, timeout=30)


def outcome(
    spoken: Spoken, seconds: float, *, space: str = " ", language: str = "de", words: Spoken | None = None
) -> Ok:
    """Return the answer of a worker for a part: times count from its start."""
    entities = [
        {"text": text, "label": "transcript", "score": 1.0, "seconds": [start, end]} for start, end, text in spoken
    ]
    data: dict[str, Any] = {"text": space.join(text for _, _, text in spoken), "language": language}
    if words is not None:
        data["words"] = [{"text": text, "seconds": [start, end]} for start, end, text in words]
    return Ok({}, 1500, data={"entities": entities, "data": data}, sound_s=seconds)


async def heard(
    cluster: InProcess, request: Awaitable[httpx.Response], worker: Callable[[WorkItem], Outcome]
) -> tuple[httpx.Response, list[WorkItem]]:
    """Answer the parts of a request as a worker. Return the reply and the parts."""
    task = asyncio.ensure_future(request)
    parts: list[WorkItem] = []
    sequence = 0
    while not task.done():
        stream = cluster.server.streams.get(STREAM)
        message = stream.messages.get(stream.last_sequence) if stream is not None else None
        if message is None or stream is None or stream.last_sequence == sequence:
            await asyncio.sleep(0.005)
            continue
        sequence = stream.last_sequence
        item = messages.decode_work(message.data)
        parts.append(item)
        result = WorkResult(item.request, item.chunk, "w0", (worker(item),), b"", revision="local", fingerprint="f")
        await cluster.send(item.reply, messages.encode(result))
    return task.result(), parts


SPOKEN: Spoken = [(0.0, 2.4, "And what --> did"), (2.4, 61.01, "you do\nthen?")]


def answer(item: WorkItem) -> Outcome:
    return outcome(SPOKEN, 62.5)


REFUSED = [
    ({"temperature": "0.7"}, "unsupported_parameter", "temperature"),
    ({"stream": "true"}, "unsupported_parameter", "stream"),
    ({"chunking_strategy": "auto"}, "unsupported_parameter", "chunking_strategy"),
    ({"include__": "logprobs"}, "unsupported_parameter", "include[]"),
    ({"known_speaker_names__": ["a", "b"]}, "unsupported_parameter", "known_speaker_names[]"),
    ({"response_format": "diarized_json"}, "schema", "response_format"),
    ({"timestamp_granularities__": "segment"}, "schema", "timestamp_granularities[]"),
    (
        {"timestamp_granularities__": ["segment", "token"], "response_format": "verbose_json"},
        "schema",
        "timestamp_granularities[]",
    ),
    ({"timestamp_granularities__": "word"}, "schema", "timestamp_granularities[]"),
    ({"language": "x" * 300}, "schema", "language"),
    ({"prompt": "x" * 5000}, "schema", "prompt"),
    ({"model": "toy/find"}, "unsupported_task", "model"),
]


@pytest.mark.parametrize(("form", "reason", "param"), REFUSED)
async def test_a_refusal_names_its_field_and_queues_nothing(
    cluster: InProcess, gateway: GatewayProcess, form: Any, reason: str, param: str
) -> None:
    response = await post(gateway, **form)
    error = response.json()["error"]
    assert (response.status_code, error["reason"], error["param"]) == (400, reason, param), error
    assert error["code"] == "invalid_input"
    assert STREAM not in cluster.server.streams or cluster.server.streams[STREAM].last_sequence == 0


async def test_a_body_that_is_no_form_with_a_file_is_refused(gateway: GatewayProcess) -> None:
    json_body = await gateway.client.post(PATHS[0], json={"model": HEAR})
    assert (json_body.status_code, json_body.json()["error"]["param"]) == (400, "Content-Type")
    without = await gateway.client.post(PATHS[0], files={"model": (None, HEAR)})
    assert (without.status_code, without.json()["error"]["param"]) == (400, "file")
    unknown = await post(gateway, model="whisper-1")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    empty = await post(gateway, file=b"")
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "file")
    none = await gateway.client.post(PATHS[0], files={"file": ("a.wav", RECORDING)})
    assert (none.status_code, none.json()["error"]["reason"]) == (400, "model_required")


async def test_a_form_that_is_too_large_is_refused_before_it_is_read(cluster: InProcess) -> None:
    gateway = await cluster.gateway(SIE_MAX_BODY_BYTES=str(1 << 20))
    response = await post(gateway, file=b"x" * (1 << 21))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")


JOINED = "And what --> did you do\nthen?"
SRT = """1
00:00:00,000 --> 00:00:02,400
And what -> did

2
00:00:02,400 --> 00:01:01,010
you do then?
"""
VTT = """WEBVTT

00:00:00.000 --> 00:00:02.400
And what -> did

00:00:02.400 --> 00:01:01.010
you do then?
"""


@pytest.mark.parametrize(
    ("format_", "expected", "content_type"),
    [("text", f"{JOINED}\n", "text/plain"), ("srt", SRT, "text/plain"), ("vtt", VTT, "text/vtt")],
)
async def test_a_format_of_text_is_written(
    cluster: InProcess, gateway: GatewayProcess, format_: str, expected: str, content_type: str
) -> None:
    response, parts = await heard(cluster, post(gateway, response_format=format_), answer)
    assert (response.status_code, response.text) == (200, expected)
    assert response.headers["content-type"].startswith(content_type)
    (part,) = parts
    assert (part.operation, part.inputs[0].audio, part.options.sound_from_s) == ("extract", RECORDING, 0.0)
    assert part.options.parameters == {}


async def test_json_has_the_text_and_the_seconds(cluster: InProcess, gateway: GatewayProcess) -> None:
    response, _ = await heard(cluster, post(gateway, temperature="0", stream="false"), answer)
    assert response.json() == {"text": JOINED, "usage": {"type": "duration", "seconds": 63}}
    assert response.headers["x-sie-units-input-tokens"] == "1500"


async def test_verbose_json_has_segments_the_language_and_the_duration(
    cluster: InProcess, gateway: GatewayProcess
) -> None:
    form = {"response_format": "verbose_json", "timestamp_granularities__": ["segment"], "language": "de"}
    response, (part,) = await heard(cluster, post(gateway, prompt=" river ", **form), answer)
    transcript = response.json()
    assert part.options.parameters == {"language": "de"}
    assert part.options.instruction == "river"
    assert (transcript["task"], transcript["language"], transcript["duration"], transcript["text"]) == (
        "transcribe",
        "german",
        62.5,
        JOINED,
    )
    assert [
        (segment["id"], segment["start"], segment["end"], segment["text"]) for segment in transcript["segments"]
    ] == [(number, start, round(end, 2), f" {text}") for number, (start, end, text) in enumerate(SPOKEN)]
    assert all(segment["compression_ratio"] > 0 for segment in transcript["segments"])
    assert TranscriptionVerbose.model_validate_json(response.content, strict=True)


WORDS: Spoken = [(0.0, 0.32, "And"), (0.32, 0.5049, "what"), (2.4, 61.0, "then?")]


@pytest.mark.parametrize("granularities", [["word"], ["segment", "word"], ["segment"], []])
async def test_verbose_json_has_the_words_or_the_segments_that_are_asked_for(
    cluster: InProcess, gateway: GatewayProcess, granularities: list[str]
) -> None:
    """The model always writes words, like Parakeet."""

    def hear(item: WorkItem) -> Outcome:
        return outcome(SPOKEN, 62.5, words=WORDS)

    form = {"response_format": "verbose_json", "timestamp_granularities__": granularities}
    response, (part,) = await heard(cluster, post(gateway, **form), hear)
    reply = response.json()
    assert part.options.parameters == ({"word_times": True} if "word" in granularities else {})
    assert ("segments" in reply) == (granularities != ["word"])
    assert reply.get("words") == (
        [{"word": text, "start": start, "end": round(end, 2)} for start, end, text in WORDS]
        if "word" in granularities
        else None
    )


async def test_an_error_of_a_parameter_names_its_field(cluster: InProcess, gateway: GatewayProcess) -> None:
    from sie_contracts.errors import InvalidInput
    from sie_contracts.wire.messages import Failed

    def refuse(item: WorkItem) -> Outcome:
        error = InvalidInput("word_times: the model has none", reason="unsupported_parameter", param="word_times")
        return Failed(error.info())

    form = {"response_format": "verbose_json", "timestamp_granularities__": ["word"]}
    response, _ = await heard(cluster, post(gateway, **form), refuse)
    error = response.json()["error"]
    assert (response.status_code, error["reason"]) == (400, "unsupported_parameter")
    assert error["param"] == "timestamp_granularities[]"
    assert error["message"] == "timestamp_granularities[]: the model has none"


async def test_a_translation_asks_the_model_for_english(cluster: InProcess, gateway: GatewayProcess) -> None:
    request = post(gateway, PATHS[1], response_format="verbose_json")
    response, (part,) = await heard(cluster, request, answer)
    assert part.options.parameters == {"task": "translate"}
    assert (response.json()["task"], response.json()["language"]) == ("translate", "english")


# recordings of many parts

WORD_S = 7.0
EARLIER_S = 0.1


def recorder(seconds: float, *, space: str = " ") -> Callable[[WorkItem], Outcome]:
    """Return a worker for a recording with a word every 7 s, for 7 s. In a part, the worker hears each word that begins
    there, up to the end of the part. A word begins a little before its segment, since Whisper computes these times
    apart.
    """

    def hear(item: WorkItem) -> Outcome:
        from_s = item.options.sound_from_s
        assert from_s is not None
        end_s = min(from_s + MAX_SECONDS, seconds)
        spoken = []
        for number in range(int(seconds / WORD_S) + 1):
            start, end = number * WORD_S, min((number + 1) * WORD_S, end_s)
            if from_s - 1e-6 <= start < end_s and end > start:
                spoken.append((start - from_s, end - from_s, f"w{number}" if space else chr(0x4E00 + number)))
        words = [(max(0.0, start - EARLIER_S), end, text) for start, end, text in spoken]
        has_words = "word_times" in item.options.parameters
        language = "en" if space else "zh"
        return outcome(spoken, seconds, space=space, language=language, words=words if has_words else None)

    return hear


@pytest.mark.parametrize("seconds", [599.0, 600.0, 601.0, 3601.5, MAX_RECORDING_S])
async def test_a_long_recording_is_read_part_by_part_and_each_word_once(
    cluster: InProcess, gateway: GatewayProcess, seconds: float
) -> None:
    request = post(gateway, response_format="verbose_json", timestamp_granularities__=["segment", "word"])
    response, parts = await heard(cluster, request, recorder(seconds))
    transcript = response.json()
    count = int(seconds / WORD_S) + (seconds % WORD_S > 0)
    assert transcript["text"].split() == [f"w{number}" for number in range(count)]
    for number, segment in enumerate(transcript["segments"]):
        assert segment["start"] == pytest.approx(number * WORD_S, abs=0.011)
        assert segment["end"] == pytest.approx(min((number + 1) * WORD_S, seconds), abs=0.011)
    assert [word["word"] for word in transcript["words"]] == transcript["text"].split()
    for word, segment in zip(transcript["words"], transcript["segments"], strict=True):
        assert segment["start"] - EARLIER_S - 0.011 <= word["start"] <= segment["start"]
        assert word["end"] == segment["end"]
    assert all(part.options.parameters["word_times"] is True for part in parts)
    assert transcript["duration"] == seconds
    begins = [part.options.sound_from_s or 0.0 for part in parts]
    step_s = MAX_SECONDS - AGAIN_S - WORD_S + 1  # the least distance from one part to the next
    most = 1 if seconds <= MAX_SECONDS else 1 + -(-(seconds - MAX_SECONDS) // step_s)
    assert len(begins) <= most
    assert len({part.request for part in parts}) == len(parts)
    languages = [part.options.parameters.get("language") for part in parts]
    assert languages == [None, *(["en"] * (len(parts) - 1))]
    assert response.headers["x-sie-units-input-tokens"] == str(1500 * len(parts))


async def test_a_language_that_the_model_does_not_name_is_not_given_to_the_next_part(
    cluster: InProcess, gateway: GatewayProcess
) -> None:
    def hear(item: WorkItem) -> Outcome:
        return outcome([(0.0, 580.0, "river")], 900.0, language="und")

    response, parts = await heard(cluster, post(gateway, response_format="verbose_json"), hear)
    assert [part.options.parameters.get("language") for part in parts] == [None] * len(parts)
    assert len(parts) > 1
    assert response.json()["language"] == "und"


@pytest.mark.parametrize(
    ("spoken", "begins"),
    [
        ([], [0.0, 570.0, 1140.0]),  # silence
        ([(0.0, 590.0, "noise")], [0.0, 30.0, 60.0]),  # a segment that no model of this kind writes
        ([(0.0, 570.0, "whole")], [0.0, 570.0, 1140.0]),
    ],
)
async def test_a_part_without_segments_or_with_one_from_end_to_end_is_followed_by_the_next(
    cluster: InProcess, gateway: GatewayProcess, spoken: Spoken, begins: list[float]
) -> None:
    request = asyncio.ensure_future(post(gateway))
    starts: list[float] = []

    def hear(item: WorkItem) -> Outcome:
        starts.append(item.options.sound_from_s or 0.0)
        return outcome(spoken, 3000.0 if len(starts) < 3 else starts[-1] + 1)

    response, _ = await heard(cluster, request, hear)
    assert response.status_code == 200, response.text
    assert starts == begins


def test_the_names_of_languages_are_those_of_the_library() -> None:
    assert NAMES == LANGUAGES
