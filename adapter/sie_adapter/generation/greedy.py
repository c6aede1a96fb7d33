"""Greedy choice of tokens: the most likely next token of a row, under the rules of the model's generation_config.json.

The output equals transformers' `generate(num_beams=1, do_sample=False)`. This module uses the logits processors of
transformers. If `stops_loops` is set, a text that repeats itself ends earlier than in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import logits_process as library

Finish = Literal["stop", "length", "repetition"]

_REPEATED, _TIMES = 64, 3  # a text counts as a loop if it ends with three equal blocks of 64 tokens
# option of generation_config.json that this module does not support -> values with which the option has no effect
_REFUSED: dict[str, tuple[object, ...]] = {
    "sequence_bias": (None,),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "stop_strings": (None, []),
    "guidance_scale": (None, 1.0),
    "watermarking_config": (None,),
    "penalty_alpha": (None, 0.0),
}


def unknown_rule(config: GenerationConfig) -> str:
    """Return the first option of a configuration that this module does not support, or an empty string."""
    return next((name for name, neutral in _REFUSED.items() if getattr(config, name, None) not in neutral), "")


def ends_of(config: GenerationConfig) -> frozenset[int]:
    """Return the ids of tokens that end a text; a model may have several."""
    ends = config.eos_token_id
    return frozenset(ends if isinstance(ends, list | tuple) else () if ends is None else (ends,))


@dataclass(frozen=True)
class Rules:
    """Rules for the text of one row. `prompt`: the ids before the first generated token. `most`: the limit of generated
    tokens. `ends`: the ids that end the text.
    """

    prompt: Sequence[int]
    most: int
    ends: frozenset[int]
    processors: Any = ()
    # True if a processor forces an end token at the limit `most`; `finish` returns `length` for this token
    forced_end: bool = False
    stops_loops: bool = False

    def chosen(self, written: Sequence[int], scores: Tensor) -> Tensor:
        """Return `scores` [vocabulary] as the logits processors change them. `written`: the generated tokens."""
        if not self.processors:
            return scores
        ids = torch.tensor([[*self.prompt, *written]], device=scores.device)
        changed: Tensor = self.processors(ids, scores[None].clone())[0]
        return changed

    def finish(self, written: Sequence[int]) -> Finish | None:
        """Return the reason why the text ends after these tokens, or None if it continues."""
        if written and written[-1] in self.ends and not (self.forced_end and len(written) == self.most):
            return "stop"
        if len(written) >= self.most:
            return "length"
        if self.stops_loops and len(written) >= _REPEATED * _TIMES:
            blocks = (written[-_REPEATED * (time + 1) : len(written) - _REPEATED * time] for time in range(_TIMES))
            first, *repeats = blocks
            if all(block == first for block in repeats):
                return "repetition"
        return None


@dataclass(frozen=True)
class Greedy:
    """Rules of generation for one model. `ends`: ids of tokens that end a text. `bad`: ids that are never generated."""

    config: GenerationConfig
    device: torch.device
    ends: frozenset[int]
    bad: tuple[int, ...] = ()
    stops_loops: bool = False

    def rules(self, prompt: Sequence[int], most: int, own: Sequence[Any] = ()) -> Rules:
        """Return the rules of a row with this prompt and at most `most` tokens. `own`: logits processors of the model,
        which run after the processors of the configuration.
        """
        processors = library.LogitsProcessorList([*self._processors(len(prompt), most), *own])
        forced = self.config.forced_eos_token_id is not None
        return Rules(prompt, most, self.ends, processors, forced, self.stops_loops)

    def _processors(self, begin: int, most: int) -> list[Any]:
        """Return the logits processors in the order of GenerationMixin in transformers."""
        config, device, ends, processors = self.config, str(self.device), sorted(self.ends), []
        if config.repetition_penalty not in (None, 1.0):
            processors.append(library.RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
        if config.no_repeat_ngram_size:
            processors.append(library.NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
        bad = [*(config.bad_words_ids or []), *([number] for number in self.bad)]
        if bad:
            processors.append(library.NoBadWordsLogitsProcessor(bad, ends))
        if config.min_length:
            processors.append(library.MinLengthLogitsProcessor(config.min_length, ends, device=device))
        if config.min_new_tokens:
            least = library.MinNewTokensLengthLogitsProcessor
            processors.append(least(begin, config.min_new_tokens, ends, device=device))
        if config.forced_bos_token_id is not None:
            processors.append(library.ForcedBOSTokenLogitsProcessor(config.forced_bos_token_id))
        if config.forced_eos_token_id is not None:
            forced = config.forced_eos_token_id
            processors.append(library.ForcedEOSTokenLogitsProcessor(begin + most, forced, device=device))
        if config.suppress_tokens:
            processors.append(library.SuppressTokensLogitsProcessor(config.suppress_tokens, device=device))
        if config.begin_suppress_tokens:
            index = begin if begin > 1 or config.forced_bos_token_id is None else begin + 1
            first = library.SuppressTokensAtBeginLogitsProcessor
            processors.append(first(config.begin_suppress_tokens, index, device=device))
        return processors


def best(scores: Tensor) -> list[int]:
    """Return the id with the best score in each row of `scores` [rows, vocabulary]; -1 if that score is not finite."""
    best = scores.max(-1)
    return torch.where(torch.isfinite(best.values), best.indices, -1).tolist()  # type: ignore[no-any-return]
