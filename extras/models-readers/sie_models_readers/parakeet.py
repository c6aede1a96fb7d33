"""Parakeet TDT, a model that transcribes recordings, with the times of words and sentences.

  levels ──► a window, normalised ──► encoder ──► states ──► decoding by tokens and durations ──► words, sentences
                   └──► the next window begins at the quietest moment near the end of this one

For a recording that fits into one window, the text is that of `generate` of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import ParakeetForTDT
from transformers.generation.logits_process import SuppressTokensLogitsProcessor

from sie_adapter.engine.device import Compute, to_device
from sie_adapter.families.extraction import ExtractOptions
from sie_adapter.generation.greedy import Finish, Greedy, Rules, ends_of
from sie_adapter.generation.reading import GeneratedText
from sie_adapter.generation.slots import DecoderSlots, RowStart
from sie_adapter.loading.checkpoint import empty_model, load_model
from sie_adapter.loading.tokenizer import bare_tokenizer, fault, read_tokenizer
from sie_adapter.packed.images import extractor_of
from sie_adapter.packed.linear import block_linears, bytes_of
from sie_adapter.packed.packing import Heard
from sie_contracts.errors import InvalidInput
from sie_contracts.media.languages import UNDETERMINED
from sie_contracts.media.sounds import SoundRecipe
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_contracts.wire.ipc import Rows
from sie_models_readers.transducer import DecodedSound, SpokenText, decoded, sentences_of, words_of
from sie_models_readers.written import IsGone, Read, ReaderCall, check_rules, text_entity

_LABEL = "transcript"
_EPSILON = 1e-5  # added to the standard deviation of levels. Source: transformers, ParakeetFeatureExtractor
# The last window of a recording ends with the recording. Every other window ends at the quietest moment in the last
# quarter of the longest possible window: where the mean level of _QUIET_FRAMES frames is lowest.
_SEARCHED_SHARE = 4
_QUIET_FRAMES = 10
# generation options that are refused because they end a text early
_UNSET = ("eos_token_id", "max_length", "max_new_tokens")
# largest number of windows in one pass of the encoder; a CPU is not faster with several windows
_WINDOWS_PER_PASS = 8
_END = 0  # token that ends a row of `Readings` at its first step, because `begin` has already decoded the whole window


@dataclass(eq=False)
class ParakeetTranscription:
    """Transcription of a sound, window by window. `most`: the largest number of tokens of a window, 0: no limit."""

    levels: Heard
    most: int
    words: list[SpokenText] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    finish: Finish = "stop"


@dataclass(eq=False)
class ParakeetWindow:
    """Window of a sound: the frames from `seek` to before `stop`. `read`: the decoded tokens; None before decoding."""

    reader: ParakeetReader
    sound: ParakeetTranscription
    seek: int
    stop: int
    rules: Rules
    read: DecodedSound | None = None

    def following(self, written: GeneratedText) -> ParakeetWindow | None:
        """Append the words of this window, and return the next window; None after the last window."""
        self.reader.add(self)
        return self.reader.window(self.sound, self.stop) if self.stop < self.sound.levels.shape[1] else None


class ParakeetReader:
    """Loaded Parakeet TDT. `reading(..).extract` may run on several threads at once.

    A result has an entity for each sentence, and `data` with the whole text, `words` with their times, the language
    UNDETERMINED, `finish_reason` and `completion_tokens`. `finish_reason` is `length` if the text of a window
    was cut at the limit of steps or at `max_new_tokens`. The result is an InvalidInput if an input does not have
    exactly one sound, or if its options have a language, an instruction or another task than `transcribe`. The result
    is an InferenceFailed if the scores are not finite.

    `max_tokens`: limit for the positions of one window.
    """

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        model: Any = empty_model(ParakeetForTDT, folder, entry.load, decodes=True)
        _check(folder, entry, model)
        return fault(bare_tokenizer(read_tokenizer(folder)), model.config.vocab_size)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        with torch.inference_mode():
            model: Any = load_model(ParakeetForTDT, folder, load, compute, decodes=True)
            recipe = _check(folder, entry, model)
            self.memory_bytes = bytes_of(model)
            block_linears(model.encoder)
        self.rows = {"extract": Rows("raw", sounds=recipe, writes=True)}
        self.precision = compute.precision
        self.attention = f"{model.config.encoder_config._attn_implementation} padded"
        self.max_tokens, self.vocabulary = entry.max_tokens, model.config.vocab_size
        self.together = 1 if compute.device.type == "cpu" else _WINDOWS_PER_PASS
        self._words = bare_tokenizer(read_tokenizer(folder))
        self.tokenizer: bytes = self._words.to_str().encode()
        self._model, self._device, self._dtype = model, compute.device, compute.dtype
        self._first: int = model.generation_config.decoder_start_token_id
        factor = model.config.encoder_config.subsampling_factor
        self._frames, self._frame_s = factor * entry.max_tokens, recipe.hop / recipe.rate
        self._seconds = factor * self._frame_s
        self._rules = Rules((), 1, frozenset({_END}))

    def reading(self, read: Read[ParakeetWindow], is_gone: IsGone) -> ReaderCall[ParakeetWindow, Heard]:
        """Return the object that computes the results of a batch. `read`: the method `Readings.read` of the device."""
        return ReaderCall(self, self.rows, read, is_gone, "audio")

    def prompt(self, levels: Heard, options: ExtractOptions) -> ParakeetWindow:
        """Return the first window of a sound. Raises InvalidInput for a language, an instruction or an unknown task."""
        parameters = options.parameters
        if options.instruction.strip():
            raise InvalidInput(
                "instruction: the model does not read an instruction", reason="schema", param="instruction"
            )
        if parameters.get("language"):
            cause = "the model recognises the language itself; omit this parameter"
            raise InvalidInput(f"language: {cause}", reason="language", param="language")
        if (parameters.get("task") or "transcribe") != "transcribe":
            raise InvalidInput("task: the model supports transcribe", reason="task", param="task")
        return self.window(ParakeetTranscription(levels, int(parameters.get("max_new_tokens") or 0)), 0)

    def window(self, sound: ParakeetTranscription, seek: int) -> ParakeetWindow:
        """Return the window that begins at frame `seek` of a sound."""
        return ParakeetWindow(self, sound, seek, self._end(sound.levels[0, seek:]) + seek, self._rules)

    def _end(self, levels: Any) -> int:
        """Return the number of frames of the first window of `levels`. Either no frame or at least two frames remain
        after the window, because the standard deviation of a single frame is undefined (`_normalised`).
        """
        if len(levels) <= self._frames:
            return len(levels)
        start = self._frames - self._frames // _SEARCHED_SHARE
        means = levels[start : self._frames].mean(1, dtype=np.float64)
        around = min(_QUIET_FRAMES, len(means))
        quiet = np.convolve(means, np.ones(around), "valid").argmin() + around // 2
        return int(min(start + quiet, len(levels) - 2))

    def begin(self, prompts: Sequence[ParakeetWindow]) -> list[RowStart]:
        """Decode the windows of new rows completely. The returned scores select the end token, so that the loop of the
        module `reading` makes no step for these rows. If the scores of a window are not finite, NaN is returned as its
        scores: the result of this window is then an InferenceFailed, and the other windows are not affected.
        """
        frames = [window.stop - window.seek for window in prompts]
        levels = np.zeros((len(prompts), max(frames), prompts[0].sound.levels.shape[2]), np.float32)
        for values, window in zip(levels, prompts, strict=True):
            values[: window.stop - window.seek] = window.sound.levels[0, window.seek : window.stop]
        counts = torch.tensor(frames, device=self._device)
        mask = torch.arange(levels.shape[1], device=self._device) < counts[:, None]
        encoded = self._model.get_audio_features(
            input_features=_normalised(to_device(levels, self._device), mask).to(self._dtype), attention_mask=mask
        )
        lengths = encoded.attention_mask.sum(-1).tolist()
        read = decoded(self._model, encoded.pooler_output, lengths, self._limits(counts), self._first)
        for window, transcription in zip(prompts, read, strict=True):
            window.read = transcription
        end = torch.zeros(_END + 1, device=self._device)
        return [RowStart((), end * torch.nan if transcription is None else end) for transcription in read]

    def _limits(self, frames: Tensor) -> list[int]:
        """Return the largest number of steps for each window. `generate` of transformers computes this number for
        features with one more frame, so one frame is added here.
        """
        positions = self._model._get_subsampling_output_length(frames + 1)
        return [max(1, steps - 1) for steps in (positions * self._model.max_symbols_per_step).tolist()]

    def step(self, ids: Tensor, slots: DecoderSlots) -> Tensor:
        """Raise AssertionError, because the reading loop never calls it: each row ends with its first token."""
        raise AssertionError("a window has no steps, because `begin` decodes it")

    def add(self, window: ParakeetWindow) -> None:
        """Append the words of a decoded window to the transcription of its sound."""
        sound, read = window.sound, window.read
        assert read is not None
        if not window.seek:  # first window: drop earlier results, because `by_options` may run a failed batch again
            sound.words, sound.texts, sound.tokens, sound.finish = [], [], 0, "stop"
        tokens = read.tokens[: sound.most or None]
        if read.is_cut or len(tokens) < len(read.tokens):
            sound.finish = "length"
        sound.words += words_of(tokens, self._words, self._seconds, window.seek * self._frame_s)
        sound.texts.append(self._words.decode([token.id for token in tokens]).strip())
        sound.tokens += len(tokens)

    def result(self, prompt: ParakeetWindow, written: GeneratedText) -> dict[str, Any]:
        sound = prompt.sound
        sentences = sentences_of(sound.words)
        data = {
            "text": " ".join(filter(None, sound.texts)),
            "words": [{"text": word.text, "seconds": word.seconds} for word in sound.words],
            "language": UNDETERMINED,
            "finish_reason": sound.finish,
            "completion_tokens": sound.tokens,
        }
        return {
            "entities": [{**text_entity(spoken.text, _LABEL), "seconds": spoken.seconds} for spoken in sentences],
            "data": data,
        }


def _normalised(levels: Tensor, mask: Tensor) -> Tensor:
    """Return levels [sounds, frames, bins] with mean 0 and standard deviation 1 in each sound and bin. Frames beyond
    the end of a sound, where `mask` is False, become 0. Source: transformers, ParakeetFeatureExtractor.
    """
    inside, frames = mask[..., None], mask.sum(1)[:, None]
    mean = ((levels * inside).sum(1) / frames)[:, None]
    variance = ((levels - mean) ** 2 * inside).sum(1) / (frames - 1)
    return (levels - mean) / (variance.sqrt()[:, None] + _EPSILON) * inside


def _check(folder: Path, entry: ModelEntry, model: Any) -> SoundRecipe:
    """Return the recipe of the model's sounds. Raises ModelLoadFailed: INCOMPATIBLE for durations or rules of
    generation that are not supported, for features that the model does not read, or for an entry with more tokens than
    the encoder has positions; NOT_FOUND without a configuration of features.
    """
    config, rules = model.config, model.generation_config
    encoder = config.encoder_config
    recipe = extractor_of(folder, entry, encoder.subsampling_factor)
    check_rules(entry, model, encoder.max_position_embeddings)
    processors = Greedy(rules, torch.device("cpu"), ends_of(rules)).rules((), 1).processors
    suppressed = [number for number in rules.suppress_tokens or () if number < config.vocab_size]
    if recipe.levels != "natural" or recipe.bins != encoder.num_mel_bins:
        cause = f"preprocessor_config.json has {recipe.bins} bins, expected {encoder.num_mel_bins} with natural levels"
    elif list(config.durations) != list(range(len(config.durations))):
        cause = f"durations are {list(config.durations)}, expected 0, 1, 2, .."
    elif rules.decoder_start_token_id is None:
        cause = "generation_config.json has no decoder_start_token_id"
    elif own := next((name for name in _UNSET if getattr(rules, name, None) is not None), ""):
        cause = f"generation_config.json sets {own}, which is not supported"
    elif suppressed or not all(isinstance(processor, SuppressTokensLogitsProcessor) for processor in processors):
        cause = "generation_config.json changes the scores of tokens, which is not supported"
    else:
        return recipe
    raise incompatible(f"{entry.id}: {cause}")
