"""Times of the words that Whisper wrote, from its attention to the sound.

    prompt and written tokens ──► a pass of the decoder ──► attention [tokens, positions] of each alignment head
    ──► normalised, smoothed, averaged ──► dynamic time warping ──► first position of each token ──► words

The words and their times are those of transformers: `generate` with `return_token_timestamps`, and `_decode_asr`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from transformers.models.whisper.generation_whisper import _median_filter
from transformers.models.whisper.tokenization_whisper import LANGUAGES, _combine_tokens_into_words

from sie_models_readers.transcript import FRAMES_PER_STEP, STEP_S, TranscriptSegment
from sie_models_readers.transducer import SpokenText


class _Pieces(NamedTuple):
    """Tokenizer with the interface that `_combine_tokens_into_words` of transformers expects."""

    tokenizer: Tokenizer
    eos_token_id: int

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


class WordTimes:
    """Computes the times of words. Thread-safe. `heads`: layer and number of each alignment head. `end`: the id of the
    end token, which is the lowest id of a special token: ids below it are text.
    """

    def __init__(self, model: Any, heads: Sequence[tuple[int, int]], tokenizer: Tokenizer, end: int) -> None:
        self._decoder = model.model.decoder
        self._heads = heads
        self._filter_width = model.config.median_filter_width
        self._pieces = _Pieces(tokenizer, end)
        # thread id -> layer -> input states of the layer's cross-attention, for the threads that run `ends`
        self._states: dict[int, dict[int, Tensor]] = {}
        for layer in {layer for layer, _ in heads}:
            self._decoder.layers[layer].encoder_attn.register_forward_pre_hook(self._hook(layer))

    def _hook(self, layer: int) -> Any:
        def read(_: Any, inputs: tuple[Tensor]) -> None:
            if (states := self._states.get(threading.get_ident())) is not None:
                states[layer] = inputs[0]

        return read

    def ends(self, prompt: Sequence[int], written: Sequence[int], encoded: Tensor, frames: int) -> list[float]:
        """Return the end of each token of `written`, in seconds from the start of the window. The decoder does not read
        the last token, so this token gets the same end as the token before it. `encoded` [1, positions, width]: the
        encoder's states of the window. `frames`: the number of frames of the window without padding.
        """
        if len(written) < 2:
            return [0.0] * len(written)
        states = self._states[threading.get_ident()] = {}
        try:
            row = torch.tensor([[*prompt, *written[:-1]]], device=encoded.device)
            self._decoder(input_ids=row, encoder_hidden_states=encoded, use_cache=False)
        finally:
            del self._states[threading.get_ident()]
        tokens, positions = slice(len(prompt), None), slice(max(1, frames // FRAMES_PER_STEP))
        total: Tensor | None = None
        for layer, number in self._heads:  # one head at a time: smoothing takes 20 times the memory of a head's weights
            weights = self._attention(layer, number, states[layer], encoded)[:, tokens, positions]
            deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
            # the deviation of a single token is 0, which gives NaN
            smooth = _median_filter(((weights - mean) / deviation).nan_to_num(), self._filter_width)
            total = smooth if total is None else total + smooth
        assert total is not None
        begins = [position * STEP_S for position in warping_path(-(total[0] / len(self._heads)).cpu().double().numpy())]
        return [*begins, begins[-1]]

    def _attention(self, layer: int, number: int, states: Tensor, encoded: Tensor) -> Tensor:
        """Return the attention of a head, float32 [1, tokens, positions]."""
        attention = self._decoder.layers[layer].encoder_attn
        part = slice(number * attention.head_dim, (number + 1) * attention.head_dim)
        queries = (attention.q_proj(states) * attention.scaling)[..., part].float()
        keys = attention.k_proj(encoded)[..., part].float()
        return (queries @ keys.transpose(1, 2)).softmax(-1)

    def words(
        self, segments: Sequence[TranscriptSegment], ends: Sequence[float], offset_s: float, language: str
    ) -> Iterator[SpokenText]:
        """Yield the words of a window that begins `offset_s` seconds after the begin of the sound. `ends`: the end of
        each token of the window. `language`: the code of the language of the words, empty if it is unknown.
        """
        place, end = 0, self._pieces.eos_token_id
        for segment in segments:
            # index and id of each token that has a text; time stamps and special tokens have none
            spoken = [
                (at, number)
                for at, number in enumerate(segment.ids, place)
                if number < end and self._pieces.decode([number])
            ]
            place += len(segment.ids)
            ids = [number for _, number in spoken]
            texts, _, parts = _combine_tokens_into_words(self._pieces, ids, LANGUAGES.get(language, "english"))
            for word, part in zip(texts, parts, strict=True):
                if word.strip():
                    first, last = spoken[part[0]][0], spoken[part[-1]][0]
                    start_s = ends[first - 1] if first else 0.0
                    yield SpokenText(word.strip(), offset_s + start_s, offset_s + ends[last])


def alignment_heads(model: Any) -> list[tuple[int, int]]:
    """Return layer and number of each alignment head that generation_config.json names. Return an empty list if the
    file names no head, if the decoder lacks one of them, or if the model's median filter has an even width.
    """
    heads = [(layer, number) for layer, number in getattr(model.generation_config, "alignment_heads", None) or ()]
    layers, numbers = model.config.decoder_layers, model.config.decoder_attention_heads
    are_there = all(0 <= layer < layers and 0 <= number < numbers for layer, number in heads)
    return heads if are_there and model.config.median_filter_width % 2 == 1 else []


def warping_path(costs: NDArray[np.float64]) -> list[int]:
    """Find the cheapest path through `costs` [rows, columns], from the first to the last cell, by dynamic time warping.
    The path never goes back; of equally cheap steps, it takes the step to the next column. Return its first column in
    each row.

    The cells of an anti-diagonal depend only on the two anti-diagonals before it, so they are computed together.
    transformers has the same result, but takes up to two seconds, because it computes cell by cell in Python.
    """
    rows, columns = costs.shape
    total = np.full((rows + 1, columns + 1), np.inf, np.float32)
    step = np.full((rows + 1, columns + 1), 2, np.int8)
    total[0, 0] = 0
    for diagonal in range(2, rows + columns + 1):
        row = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        column = diagonal - row
        both, down, right = total[row - 1, column - 1], total[row - 1, column], total[row, column - 1]
        is_both, is_down = (both < down) & (both < right), (down < both) & (down < right)
        step[row, column] = np.where(is_both, 0, np.where(is_down, 1, 2))
        total[row, column] = costs[row - 1, column - 1] + np.where(is_both, both, np.where(is_down, down, right))
    step[:, 0] = 1
    firsts = [0] * rows
    row_number, column_number = rows, columns
    while row_number > 0:
        firsts[row_number - 1] = max(0, column_number - 1)
        move = int(step[row_number, column_number])
        row_number -= move != 2
        column_number -= move != 1
    return firsts
