"""Forms and replies of OpenAI's routes for recordings."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from sie_contracts.api.shapes import Flag, Map, Number, Text, Texts


class _RecordingForm(Struct, kw_only=True):
    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    model: Text = UNSET
    prompt: Annotated[Text, Meta(description="Words of the recording in their right spelling, such as names.")] = UNSET
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | UnsetType = UNSET
    temperature: Annotated[Number, Meta(description="Only 0 is supported.")] = UNSET
    granularities: list[Literal["segment", "word"]] | UnsetType = field(name="timestamp_granularities[]", default=UNSET)


class TranslationForm(_RecordingForm, kw_only=True):
    """Form with a sound file. The reply has the spoken words, translated into English."""


class TranscriptionForm(_RecordingForm, kw_only=True):
    """Form with a sound file. The reply has the spoken words. With `verbose_json` it also has segments or words with
    their times.
    """

    language: Annotated[
        Text, Meta(description="Spoken language: code or English name. Unset: the model recognises it.")
    ] = UNSET
    stream: Annotated[Flag, Meta(description="Only false is supported.")] = UNSET


class SegmentInfo(Struct, kw_only=True):
    """Spoken words from `start` to `end`, in seconds. `avg_logprob` and `no_speech_prob` are 0, because clients require
    numbers: they are not computed.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class WordInfo(Struct, kw_only=True):
    """Word that was spoken from `start` to `end`, in seconds."""

    word: str
    start: float
    end: float


class Transcription(Struct, kw_only=True):
    """Spoken words of a sound file. Only `verbose_json` has more fields than `text`, `usage` and `warnings`."""

    EXAMPLE: ClassVar[Any] = {"text": "And what did you do then?", "usage": {"type": "duration", "seconds": 3}}

    text: str
    task: Literal["transcribe", "translate"] | UnsetType = UNSET
    language: Text = UNSET
    duration: Number = UNSET
    segments: list[SegmentInfo] | UnsetType = UNSET
    words: list[WordInfo] | UnsetType = UNSET
    usage: Map = UNSET
    warnings: Texts = UNSET
