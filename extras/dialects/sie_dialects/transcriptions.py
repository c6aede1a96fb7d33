"""`POST /v1/audio/transcriptions` and `POST /v1/audio/translations` in the format of OpenAI. The body is a form with a
recording. The reply has the spoken words as JSON, text or subtitles.

    recording ──► part of 600 s ──► segments ──► the next part begins at the first segment that may be incomplete;
    after the last part ──► reply

Each part of the recording is a separate work item. So workers run items of other clients between the parts of a long
recording, and no process has the features of the whole recording in memory.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import orjson

from sie_contracts.errors import InvalidInput
from sie_contracts.media.languages import NAMES, UNDETERMINED
from sie_contracts.media.sounds import MAX_SECONDS
from sie_contracts.models.option_values import bad
from sie_contracts.wire.messages import Ok
from sie_gateway.dialects import fields
from sie_gateway.dialects.selection import able
from sie_gateway.http.form import Form
from sie_gateway.inference import body as bodies
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import Call, EncodedReply, beside
from sie_gateway.inference.results import InferRequest, RequestResult
from sie_runtime.http.routes import JSON, TEXT

if TYPE_CHECKING:
    from sie_gateway.inference.handler import Inference

VTT = "text/vtt"
# Seconds at the end of a part of the recording that the model reads again with the next part, because the last segment
# may be incomplete. No segment is longer than 30 s, the time that Whisper reads at once.
AGAIN_S = 30
GRANULARITIES = "timestamp_granularities[]"
# SIE's parameters, each with the field of the form that sets it
_FIELDS = {"instruction": "prompt", "language": "language", "word_times": GRANULARITIES}
# field of OpenAI that has no effect here -> (accepted values; text after `expected` in the error for any other value)
_REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "stream": (("false",), "false: the reply has the complete text"),
    "temperature": (("0", "0.0"), "0: the model always writes the most likely word"),
    "chunking_strategy": ((), "none: the gateway and the model divide the recording"),
}
# unsupported list of OpenAI -> text after `expected` in the error for any value
_REFUSED_LISTS = {
    "include[]": "none: the model gives no probabilities of words",
    "known_speaker_names[]": "none: speakers are not distinguished",
    "known_speaker_references[]": "none: speakers are not distinguished",
    "keywords[]": "none: use prompt for expected words",
    "languages[]": "none: use language for a single language",
}


class SpokenSegment(NamedTuple):
    """Words that were spoken between `start` and `end`, in seconds from the beginning of the recording."""

    start: float
    end: float
    text: str


@dataclass
class Transcript:
    """Text, segments and words of the transcribed parts of a recording. `language`: code of the language that the model
    recognised in the first part. `words`: single words with their times, or empty.
    """

    task: str
    warnings: Sequence[str]
    seconds: float = 0.0
    language: str = ""
    text: str = ""
    segments: list[SpokenSegment] = field(default_factory=list)
    words: list[SpokenSegment] = field(default_factory=list)
    space: str = " "  # text between two segments: empty in a language without spaces
    tokens: int = 0

    def add(self, segments: Sequence[SpokenSegment], text: str, words: Sequence[SpokenSegment]) -> None:
        """Add a part. `text`: the model's text of the part; if empty, join the texts of the segments."""
        self.segments += segments
        self.words += words
        own = text or self.space.join(segment.text for segment in segments)
        self.text = self.space.join(filter(None, (self.text, own)))


async def _transcribe(task: str, inference: Inference, call: Call, _: fields.Body) -> EncodedReply:
    """Answer with the words that are spoken in the recording or, if `task` is `translate`, with their English
    translation.
    """
    form = Form(call.headers.get("content-type", ""), listed=(GRANULARITIES, *_REFUSED_LISTS))
    file = await beside(call, inference.body_threads, lambda: form.whole(call.body))
    resolved = able(inference, call, "transcribe", form.fields.get("model"))
    if not file:
        raise InvalidInput.at("file", "expected a sound file, got 0 bytes", reason="empty_item")
    write = _writer(form)
    parameters: dict[str, Any] = {"task": task} if task == "translate" else {}
    if prompt := form.fields.get("prompt", "").strip():
        parameters["instruction"] = bodies.utf8(prompt, "prompt")
    if language := form.fields.get("language", "").strip():
        parameters["language"] = language
    if "word" in form.lists[GRANULARITIES]:
        parameters["word_times"] = True
    item = RequestItem(None, modalities=("audio",), audio=file)
    with fields.named(**_FIELDS):
        planned = inference.understand(
            call, InferRequest("extract", resolved, (item,), parameters, inputs_field="file")
        )
    transcript, finished = await _read(inference, call, planned, task)
    headers = finished.headers(call.received_s, timed=True) | {"X-SIE-Units-Input-Tokens": str(transcript.tokens)}
    content, content_type = write(transcript)
    return EncodedReply(content, content_type, headers)


transcriptions = functools.partial(_transcribe, "transcribe")
translations = functools.partial(_transcribe, "translate")


async def _read(inference: Inference, call: Call, planned: InferRequest, task: str) -> tuple[Transcript, RequestResult]:
    """Return (transcript of the recording, result of the last part). Raises the errors of `Inference.execute`,
    FailedRequest.
    """
    transcript = Transcript(task, planned.options.warnings)
    from_s = 0.0
    for number in itertools.count():
        # separate ids, so that a late reply to a part does not count as the reply to the next part
        own = msgspec.structs.replace(call, id=f"{call.id}-part{number}") if number else call
        run = planned.options.run
        # the model recognises the language only in the first part
        language = {"language": transcript.language} if transcript.language not in ("", UNDETERMINED) else {}
        parameters = {**run.parameters, **language}
        part = planned.with_run(msgspec.structs.replace(run, sound_from_s=from_s, parameters=parameters))
        finished = call.finished = await inference.execute(own, part)
        outcome = finished.succeeded("file", **_FIELDS)[0][1]
        next_s = _add(transcript, outcome, from_s)
        transcript.tokens += finished.usage["prompt_tokens"]
        if next_s >= outcome.sound_s:
            break
        from_s = next_s
    return transcript, finished


def _add(transcript: Transcript, outcome: Ok, from_s: float) -> float:
    """Add the segments of a part. Return the start of the next part in seconds; after the last part, the end of the
    recording.
    """
    result = outcome.data or {}
    transcript.seconds = outcome.sound_s
    data = result.get("data", {})
    transcript.language = transcript.language or data.get("language", "")
    segments = _spoken(result.get("entities", ()), from_s)
    words = _spoken(data.get("words", ()), from_s)
    text = data.get("text", "")
    if len(segments) > 1 and "".join(segment.text for segment in segments) == text:
        transcript.space = ""
    if from_s + MAX_SECONDS >= outcome.sound_s:
        transcript.add(segments, text, words)
        return outcome.sound_s
    whole_s = from_s + MAX_SECONDS - AGAIN_S
    cut = [segment for segment in segments if segment.end > whole_s]
    whole = [segment for segment in segments if segment.end <= whole_s]
    transcript.add(whole, "" if cut else text, _words_of(whole, words))
    # advance at least AGAIN_S, so that a segment as long as a part causes no endless loop
    return max(from_s + AGAIN_S, min([whole_s, *(segment.start for segment in cut)]))


def _spoken(texts: Iterable[Mapping[str, Any]], from_s: float) -> list[SpokenSegment]:
    """Return the segments or words of a part, with their times in the whole recording. The part begins at `from_s`."""
    return [
        SpokenSegment(round(from_s + start, 2), round(from_s + end, 2), text["text"])
        for text in texts
        for start, end in (text["seconds"],)
    ]


def _words_of(segments: Sequence[SpokenSegment], words: Sequence[SpokenSegment]) -> list[SpokenSegment]:
    """Return the words in `segments`. `segments`: the first segments of a part. `words`: all words of the part. Count
    letters instead of comparing times: Whisper computes the times of words and of segments separately, so a word may
    begin before its segment.
    """
    letters = sum(_letters(segment) for segment in segments)
    before = itertools.accumulate(map(_letters, words), initial=0)
    return [word for word, count in zip(words, before, strict=False) if count < letters]


def _letters(spoken: SpokenSegment) -> int:
    return sum(map(len, spoken.text.split()))


Write = Callable[[Transcript], tuple[bytes, str]]


def _writer(form: Form) -> Write:
    """Return the function that writes the reply in the requested format. Raises InvalidInput for wrong fields."""
    for name, (accepted, expected) in _REFUSED.items():
        value = form.fields.get(name, "")
        if value and value.lower() not in accepted:
            raise bad(name, value, expected, "unsupported_parameter")
    for name, expected in _REFUSED_LISTS.items():
        if form.lists[name]:
            raise bad(name, form.lists[name], expected, "unsupported_parameter")
    format_ = fields.choice(form.fields, "response_format", tuple(_WRITERS), "json")
    granularities = form.lists[GRANULARITIES]
    for value in granularities:
        if value not in ("segment", "word"):
            raise bad(GRANULARITIES, value, "segment or word")
    if granularities and format_ != "verbose_json":
        raise bad(GRANULARITIES, granularities, "this field only with response_format verbose_json")
    return functools.partial(_verbose, granularities) if granularities else _WRITERS[format_]


def _json(transcript: Transcript) -> tuple[bytes, str]:
    return orjson.dumps({"text": transcript.text, **_shared(transcript)}), JSON


def _shared(transcript: Transcript) -> dict[str, Any]:
    usage = {"type": "duration", "seconds": math.ceil(transcript.seconds)}
    return {"usage": usage, **({"warnings": list(transcript.warnings)} if transcript.warnings else {})}


def _verbose(granularities: Sequence[str], transcript: Transcript) -> tuple[bytes, str]:
    segments = [_segment(number, segment, transcript.space) for number, segment in enumerate(transcript.segments)]
    words = [{"word": word.text, "start": word.start, "end": word.end} for word in transcript.words]
    code = "en" if transcript.task == "translate" else transcript.language
    content = {
        "task": transcript.task,
        "language": NAMES.get(code, code) or "english",
        "duration": round(transcript.seconds, 2),
        "text": transcript.text,
        **({"segments": segments} if "segment" in granularities else {}),
        **({"words": words} if "word" in granularities else {}),
        **_shared(transcript),
    }
    return orjson.dumps(content), JSON


def _segment(number: int, segment: SpokenSegment, space: str) -> dict[str, Any]:
    utf8 = segment.text.encode()
    return {
        "id": number,
        "seek": round(100 * segment.start),
        "start": segment.start,
        "end": segment.end,
        "text": space + segment.text,
        "tokens": [],
        "temperature": 0.0,
        "avg_logprob": 0.0,
        "compression_ratio": round(len(utf8) / len(zlib.compress(utf8)), 4),
        "no_speech_prob": 0.0,
    }


def _text(transcript: Transcript) -> tuple[bytes, str]:
    return f"{transcript.text}\n".encode(), TEXT


def _srt(transcript: Transcript) -> tuple[bytes, str]:
    cues = (f"{number}\n{cue}" for number, cue in enumerate(_cues(transcript.segments, ","), 1))
    return "\n".join(cues).encode(), TEXT


def _vtt(transcript: Transcript) -> tuple[bytes, str]:
    return "\n".join(["WEBVTT\n", *_cues(transcript.segments, ".")]).encode(), VTT


def _cues(segments: Sequence[SpokenSegment], mark: str) -> list[str]:
    """Return the cues of subtitles. The text of a cue has no empty line, which would end the cue, and no `-->`, which a
    player would parse as a line of times.
    """
    return [
        f"{_time(segment.start, mark)} --> {_time(segment.end, mark)}\n"
        f"{' '.join(segment.text.split()).replace('-->', '->')}\n"
        for segment in segments
    ]


def _time(seconds: float, mark: str) -> str:
    whole, milliseconds = divmod(round(1000 * seconds), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{mark}{milliseconds:03}"


_WRITERS: dict[str, Write] = {
    "json": _json,
    "text": _text,
    "srt": _srt,
    "verbose_json": functools.partial(_verbose, ("segment",)),
    "vtt": _vtt,
}
