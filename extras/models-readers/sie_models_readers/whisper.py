"""Whisper, a model that transcribes recordings. It generates text and the times of segments, token by token.

  features ──► a window of 30 s ──► encoder ──► states ──┐
                                                         ├──► decoder, a token a step ──► segments ──► the next window
  language, task, the instruction ──► prompt ────────────┘                    └──► with `word_times`: times of words

Each window begins at the end of the last whole segment of the previous window, as in `generate` of transformers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from sie_adapter.engine.device import Compute, to_device
from sie_adapter.families.extraction import ExtractOptions
from sie_adapter.generation.greedy import Finish, Greedy, Rules, ends_of
from sie_adapter.generation.reading import GeneratedText
from sie_adapter.generation.slots import DecoderSlots, RowStart, empty, prompted
from sie_adapter.loading.checkpoint import empty_model, load_model
from sie_adapter.loading.tokenizer import bare_tokenizer, fault, read_tokenizer
from sie_adapter.packed.images import PROCESSOR, extractor_of, passes
from sie_adapter.packed.linear import block_linears, bytes_of
from sie_adapter.packed.packing import Heard
from sie_contracts.errors import InvalidInput
from sie_contracts.media.sounds import SoundRecipe
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_contracts.wire.ipc import Rows
from sie_models_readers.transcript import FRAMES_PER_STEP, STEP_S, TASKS, PromptTokens, TranscriptSegment, segments
from sie_models_readers.transducer import SpokenText
from sie_models_readers.word_times import WordTimes, alignment_heads
from sie_models_readers.written import (
    IsGone,
    Read,
    ReaderCall,
    attended,
    check_rules,
    reserved,
    text_entity,
    tokens_left,
)

_BEFORE = "<|startofprev|>"
_LABELS = {"transcribe": "transcript", "translate": "translation"}
# refused options of generation_config.json: they make windows depend on earlier windows, or skip windows
_REFUSED = ("condition_on_prev_tokens", "no_speech_threshold")
# largest number of windows in one pass of the encoder on a GPU; a CPU gets one, because more would not be faster
_WINDOWS_PER_PASS = 8


@dataclass(eq=False)
class SoundTranscription:
    """Transcription of a sound, window by window. `ids`: the prompt of each window. `place`: the index in `ids` of the
    language token, whose id the first window determines; -1 if the language is known. `has_word_times`: the request
    asks for the times of words, which are computed from `windows` after the last window.
    """

    features: Heard
    ids: list[int]
    place: int
    rules: Rules
    prompt_tokens: PromptTokens
    label: str
    codes: Mapping[int, str]
    has_word_times: bool = False
    windows: list[WrittenWindow] = field(default_factory=list)
    segments: list[TranscriptSegment] = field(default_factory=list)
    tokens: int = 0
    finish: Finish = "stop"

    @property
    def frames(self) -> int:
        count: int = self.features.shape[1]
        return count

    @property
    def language(self) -> str:
        """Return the code of the language in the prompt; empty if the prompt has no language token."""
        return next((self.codes[number] for number in self.ids if number in self.codes), "")


@dataclass(frozen=True, eq=False)
class SoundWindow:
    """Window of a sound: at most `max_frames` frames, from frame `seek` on."""

    sound: SoundTranscription
    max_frames: int
    seek: int = 0

    @property
    def rules(self) -> Rules:
        return self.sound.rules

    @property
    def frames(self) -> int:
        return min(self.max_frames, self.sound.frames - self.seek)

    @property
    def heard_frames(self) -> int:
        """Return the number of frames of the window. If the sound is shorter than a window, its padding is not counted;
        the result may then be too large by one. In the padding, all bins have the lowest level of the sound, so silence
        at the end counts as padding. The last frame above this level overlaps the padding and is not counted.
        """
        if self.sound.frames > self.max_frames:
            return self.frames
        levels = self.sound.features[0]
        loud = np.flatnonzero((levels > levels.min()).any(axis=1))
        is_filled = len(loud) and loud[-1] + 1 < len(levels)
        return max(0, int(loud[-1]) - self.seek) if is_filled else self.frames

    def following(self, written: GeneratedText) -> SoundWindow | None:
        """Append this window's segments to `sound.segments`, and return the next window; None after the last window."""
        sound = self.sound
        if not self.seek:  # first window: drop earlier results, because `by_options` may run a failed batch again
            sound.segments, sound.windows, sound.tokens, sound.finish = [], [], 0, "stop"
        ids = written.ids[:-1] if written.ids[-1] in self.rules.ends else written.ids
        new_segments, used = segments(ids, sound.prompt_tokens.times, self.seek, self.frames)
        sound.segments += new_segments
        if sound.has_word_times:
            sound.windows.append(WrittenWindow(self.seek, written.ids, new_segments))
        sound.tokens += len(written.ids)
        sound.finish = written.finish if sound.finish == "stop" else sound.finish
        seek = self.seek + used
        return SoundWindow(sound, self.max_frames, seek) if seek < sound.frames else None


class WrittenWindow(NamedTuple):
    """Tokens (with the end token) and segments of a window. `seek`: the window's first frame in the sound."""

    seek: int
    ids: list[int]
    segments: list[TranscriptSegment]


class WhisperReader:
    """Loaded Whisper model. `reading(..).extract` may run on several threads at once.

    A result has an entity for each segment, and `data` with the whole text, the language, `finish_reason` and
    `completion_tokens`; with the parameter `word_times` also the words with their times. `finish_reason` is `length` if
    the text of a window was cut at the limit of tokens. The result is an InvalidInput if an input does not have exactly
    one sound, or if the model does not support the requested task, language, instruction or `word_times`. The result is
    an InferenceFailed if the scores are not finite.

    `max_tokens`: limit for the prompt and the text of one window.
    """

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        model: Any = empty_model(WhisperForConditionalGeneration, folder, entry.load, decodes=True)
        _check(folder, entry, model)
        return fault(bare_tokenizer(read_tokenizer(folder)), model.get_input_embeddings().num_embeddings)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        with torch.inference_mode():
            model: Any = load_model(WhisperForConditionalGeneration, folder, load, compute, decodes=True)
            self._prompt_tokens, recipe = _check(folder, entry, model)
            self.memory_bytes = bytes_of(model)
            block_linears(model.model.encoder)
        self.rows = {"extract": Rows("raw", sounds=recipe, writes=True)}
        self._frames = recipe.shape.frames
        self.precision = compute.precision
        self.attention = f"{model.config._attn_implementation} padded"
        self.max_tokens, self.vocabulary = entry.max_tokens, model.get_input_embeddings().num_embeddings
        self.together = 1 if compute.device.type == "cpu" else _WINDOWS_PER_PASS
        self._words = bare_tokenizer(read_tokenizer(folder))
        self.tokenizer: bytes = self._words.to_str().encode()
        self._added = self._words.get_added_tokens_decoder()
        self._before = self._words.token_to_id(_BEFORE)
        self._codes = {number: code for code, number in self._prompt_tokens.languages.items()}
        self._model, self._device, self._dtype = model, compute.device, compute.dtype
        self._is_eager = model.config._attn_implementation == "eager"
        self._config = model.generation_config
        self._aligning = threading.Lock()
        heads = alignment_heads(model)
        self._word_times = WordTimes(model, heads, self._words, model.config.eos_token_id) if heads else None
        self._greedy = Greedy(self._config, compute.device, ends_of(self._config))

    def reading(self, read: Read[SoundWindow], is_gone: IsGone) -> ReaderCall[SoundWindow, Heard]:
        """Return the object that computes the results of a batch. `read`: the method `Readings.read` of the device."""
        return ReaderCall(self, self.rows, read, is_gone, "audio")

    def prompt(self, features: Heard, options: ExtractOptions) -> SoundWindow:
        """Return the first window of a sound, with its prompt. Raises InvalidInput for a task, language, instruction or
        `word_times` that the model does not support.
        """
        parameters = options.parameters
        ids, place = self._prompt_tokens.start(parameters.get("language") or "", parameters.get("task") or "")
        before = self._words_before(options.instruction.strip())
        ids = [*before, *ids]
        place = place + len(before) if place >= 0 else place
        most = tokens_left(options, len(ids), self.max_tokens)
        times = WhisperTimeStampLogitsProcessor(self._config, len(ids))
        rules = self._greedy.rules(ids, most, [times])
        is_translation = self._prompt_tokens.tasks.get(TASKS[1]) in ids
        label = _LABELS[TASKS[is_translation]]
        if (has_times := bool(parameters.get("word_times"))) and self._word_times is None:
            cause = "generation_config.json of the model names no alignment_heads of its decoder"
            raise InvalidInput(f"word_times: {cause}", reason="unsupported_parameter", param="word_times")
        return SoundWindow(
            SoundTranscription(features, ids, place, rules, self._prompt_tokens, label, self._codes, has_times),
            self._frames,
        )

    def _words_before(self, text: str) -> list[int]:
        """Return the ids of the client's instruction. The model reads the instruction before the sound, for example to
        see how names are spelt. Raises InvalidInput if the model reads no instruction, or reserves one of its tokens.
        """
        if not text:
            return []
        ids: list[int] = self._words.encode(f" {text}", add_special_tokens=False).ids
        if self._before is None:
            raise InvalidInput(
                "instruction: the model does not read an instruction", reason="schema", param="instruction"
            )
        if not self._added.keys().isdisjoint(ids):
            raise reserved("instruction")
        return [self._before, *ids]

    def begin(self, prompts: Sequence[SoundWindow]) -> list[RowStart]:
        """Encode the windows of new rows, run the decoder over their prompts, and return the rows."""
        encoded = [
            states
            for start, stop in passes(len(prompts), self.together)
            for states in self._model.model.encoder(self._features(prompts[start:stop])).last_hidden_state
        ]
        return [self._begun(states[None], window.sound) for states, window in zip(encoded, prompts, strict=True)]

    def _features(self, windows: Sequence[SoundWindow]) -> Tensor:
        """Return the features of windows, [windows, bins, frames]. Missing frames at the end are 0."""
        bins = windows[0].sound.features.shape[2]
        batch = np.zeros((len(windows), self._frames, bins), np.float32)
        for values, window in zip(batch, windows, strict=True):
            values[: window.frames] = window.sound.features[0, window.seek : window.seek + window.frames]
        return to_device(batch, self._device).transpose(1, 2).to(self._dtype)

    def _begun(self, encoded: Tensor, sound: SoundTranscription) -> RowStart:
        if sound.place >= 0 and sound.ids[sound.place] < 0:
            sound.ids[sound.place] = self._language(encoded)
        cache = empty(has_encoder=True)
        ids = torch.tensor([sound.ids], device=self._device)
        scores = self._scores(ids, encoder_hidden_states=encoded, past_key_values=cache)
        own, encoder_states = prompted(cache)
        return RowStart(own, scores[0], encoder_states)

    def _language(self, encoded: Tensor) -> int:
        first = torch.tensor([[self._prompt_tokens.first]], device=self._device)
        scores = self._scores(first, encoder_hidden_states=encoded, past_key_values=empty(has_encoder=True))[0]
        languages = torch.tensor(sorted(self._prompt_tokens.languages.values()), device=self._device)
        return int(languages[scores[languages].argmax()])

    def _scores(self, ids: Tensor, **named: Any) -> Tensor:
        """Run the decoder, and return the scores of the next token of each row, [rows, vocabulary]."""
        states = self._model.model.decoder(input_ids=ids, use_cache=True, **named).last_hidden_state
        logits: Tensor = self._model.proj_out(states[:, -1])
        return logits

    def step(self, ids: Tensor, slots: DecoderSlots) -> Tensor:
        """Return the scores of the token after `ids`. All windows have equally many encoder states, so no state is
        masked.
        """
        return self._scores(
            ids,
            attention_mask=attended(slots.mask, self._dtype, is_eager=self._is_eager),
            # the decoder reads no value of this argument, but would ignore the cached encoder states if it were None
            encoder_hidden_states=torch.zeros(
                len(ids), 1, self._model.config.d_model, dtype=self._dtype, device=self._device
            ),
            past_key_values=slots.cache(),
            position_ids=slots.positions,
        ).float()

    def result(self, prompt: SoundWindow, written: GeneratedText) -> dict[str, Any]:
        sound = prompt.sound
        entities = [
            {**text_entity(text, sound.label), "seconds": [round(segment.start_s, 2), round(segment.end_s, 2)]}
            for segment in sound.segments
            if (text := self._text(segment.ids))
        ]
        data: dict[str, Any] = {
            "text": self._text(number for segment in sound.segments for number in segment.ids),
            "finish_reason": sound.finish,
            "completion_tokens": sound.tokens,
        }
        if sound.language:
            data["language"] = sound.language
        if sound.has_word_times:
            data["words"] = [{"text": word.text, "seconds": word.seconds} for word in self.words(sound)]
        return {"entities": entities, "data": data}

    def words(self, sound: SoundTranscription) -> list[SpokenText]:
        """Return the words of a transcribed sound. Each window is encoded a second time, because the states of all
        windows of a long sound would take much memory. The calling thread encodes one window at a time, so that the
        loop can transcribe other sounds meanwhile.
        """
        assert self._word_times is not None
        language = "en" if sound.label == _LABELS["translate"] else sound.language
        words: list[SpokenText] = []
        with torch.inference_mode():
            for seek, ids, new_segments in sound.windows:
                window = SoundWindow(sound, self._frames, seek)
                with self._aligning:
                    encoded = self._model.model.encoder(self._features([window])).last_hidden_state
                    ends = self._word_times.ends(sound.ids, ids, encoded, window.heard_frames)
                offset_s = seek * STEP_S / FRAMES_PER_STEP
                words += self._word_times.words(new_segments, ends, offset_s, language)
        return words

    def _text(self, ids: Iterable[int]) -> str:
        """Return the text of these ids, without time stamps and special tokens."""
        words = [number for number in ids if number < self._prompt_tokens.times and number not in self._added]
        return str(self._words.decode(words)).strip()


def _check(folder: Path, entry: ModelEntry, model: Any) -> tuple[PromptTokens, SoundRecipe]:
    """Return the tokens of the model's prompts, and the recipe of its sounds. Raises ModelLoadFailed: INCOMPATIBLE for
    unsupported generation rules, for features that the model does not read, or if `max_tokens` of the entry is above
    the decoder's number of positions; NOT_FOUND without a configuration of features.
    """
    config, rules = model.config, model.generation_config
    recipe = extractor_of(folder, entry, config.max_source_positions)
    check_rules(entry, model, config.max_target_positions, _REFUSED)
    own_shape, read = recipe.shape, (1, FRAMES_PER_STEP * config.max_source_positions, config.num_mel_bins)
    if own_shape != read:
        shape = f"{own_shape.frames} frames of {own_shape.bins} bins"
        cause = f"{PROCESSOR} makes {shape}, the model reads {read[1]} of {read[2]}"
    elif not recipe.whole:
        cause = f"{PROCESSOR} does not describe the features of Whisper"
    elif getattr(rules, "no_timestamps_token_id", None) is None:
        cause = "generation_config.json lacks no_timestamps_token_id, which the model needs to write time stamps"
    else:
        return PromptTokens.from_config(rules, config), recipe
    raise incompatible(f"{entry.id}: {cause}")
