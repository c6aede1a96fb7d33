"""Times of the words that Whisper wrote, from its attention to the sound.

    prompt and written tokens ──► a pass of the decoder ──► attention of the alignment heads [heads, tokens, positions]
    ──► normalised, smoothed, averaged ──► dynamic time warping ──► first position of each token ──► words

The times and the words are those of transformers (`generate` with `return_token_timestamps`, and `_decode_asr`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter
from transformers.models.whisper.tokenization_whisper import LANGUAGES, _combine_tokens_into_words

from sie_adapter.readers.transcript import FRAMES_PER_STEP, STEP_S, TranscriptSegment
from sie_adapter.readers.transducer import SpokenText


class _Pieces(NamedTuple):
    """Tokenizer as the function of transformers that joins tokens to words reads it."""

    tokenizer: Tokenizer
    eos_token_id: int

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


class WordTimes:
    """Computes the times of words. Call it on one thread at a time. `heads`: layer and number of each alignment head.
    `end`: the id of the end token, which is the first special token.
    """

    def __init__(self, model: Any, heads: Sequence[Sequence[int]], tokenizer: Tokenizer, end: int) -> None:
        self._decoder = model.model.decoder
        # numbers of the heads of each layer
        self._heads = {layer: [number for own, number in heads if own == layer] for layer, _ in heads}
        self._filter_width = model.config.median_filter_width
        self._pieces = _Pieces(tokenizer, end)

    def ends(self, prompt: Sequence[int], written: Sequence[int], encoded: Tensor, frames: int) -> list[float]:
        """Return the end of each token of `written`, in seconds from the begin of the window. The last token, which
        the decoder did not read, ends with the one before it. `encoded` [1, positions, width]: the states of the
        window. `frames`: its frames without padding.
        """
        if len(written) < 2:
            return [0.0] * len(written)
        weights = self._attention([*prompt, *written[:-1]], encoded)[
            :, len(prompt) :, : max(1, frames // FRAMES_PER_STEP)
        ]
        deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
        # one token has no deviation
        smooth = _median_filter(((weights - mean) / deviation).nan_to_num(), self._filter_width).mean(0)
        rows, positions = _dynamic_time_warping(-smooth.cpu().double().numpy())
        begins = (positions[np.diff(rows, prepend=-1) > 0] * STEP_S).tolist()
        return [*begins, begins[-1]]

    def _attention(self, ids: Sequence[int], encoded: Tensor) -> Tensor:
        """Return the attention of each alignment head, float32 [heads, tokens, positions]."""
        states: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for layer in self._heads:
                attention = self._decoder.layers[layer].encoder_attn

                def read(_: Any, inputs: tuple[Tensor], layer: int = layer) -> None:
                    states[layer] = inputs[0]

                hooks.callback(attention.register_forward_pre_hook(read).remove)
            row = torch.tensor([ids], device=encoded.device)
            self._decoder(input_ids=row, encoder_hidden_states=encoded, use_cache=False)
        return torch.cat([self._weights(layer, states[layer], encoded) for layer in self._heads])

    def _weights(self, layer: int, states: Tensor, encoded: Tensor) -> Tensor:
        """Return the attention of the alignment heads of a layer, float32 [heads, tokens, positions]."""
        attention = self._decoder.layers[layer].encoder_attn
        queries, keys = (
            projected.view(-1, attention.num_heads, attention.head_dim)[:, self._heads[layer]].transpose(0, 1).float()
            for projected in (attention.q_proj(states) * attention.scaling, attention.k_proj(encoded))
        )
        return (queries @ keys.transpose(1, 2)).softmax(-1)

    def words(
        self, segments: Sequence[TranscriptSegment], ends: Sequence[float], offset_s: float, language: str
    ) -> Iterator[SpokenText]:
        """Yield the words of a window that begins at `offset_s` of the sound. `ends`: the end of each token of the
        window. `language`: its code, empty if it is unknown.
        """
        place = 0
        for segment in segments:
            # places and ids of the tokens that are neither time stamps nor special
            end = self._pieces.eos_token_id
            spoken = [(at, number) for at, number in enumerate(segment.ids, place) if number < end]
            place += len(segment.ids)
            ids = [number for _, number in spoken]
            texts, _, parts = _combine_tokens_into_words(self._pieces, ids, LANGUAGES.get(language, "english"))
            for word, part in zip(texts, parts, strict=True):
                if word.strip():
                    first, last = spoken[part[0]][0], spoken[part[-1]][0]
                    start_s = ends[first - 1] if first else 0.0
                    yield SpokenText(word.strip(), offset_s + start_s, offset_s + ends[last])
