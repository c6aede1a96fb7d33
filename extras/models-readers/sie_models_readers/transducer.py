"""Greedy decoding of a transducer with durations (TDT, arXiv 2304.06795), and conversion of its tokens to text.

    states of positions ──┐
                          ├──► joint ──► a token and a duration: advance by the duration ──► TranscribedToken, ..
    previous tokens ──────┘
    TranscribedToken, .. ──► words ──► sentences

The results are those of `generate` of transformers, ParakeetForTDT, for one sound at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers.models.parakeet.generation_parakeet import ParakeetRNNTDecoderCache

_ENDS = (".", "?", "!")  # punctuation marks that end a sentence. Source: NeMo, the separators of segments
# largest length of a sentence in seconds; a longer sentence is divided, so that a sentence fits into the 30 s by which
# the gateway's parts of a recording overlap
_LONGEST_S = 30.0
# punctuation marks, which have no duration: they begin and end at the end of the previous word. Source: transformers,
# ParakeetProcessor
_MARKS = frozenset("?'¡¿-:,%/.!")


class TranscribedToken(NamedTuple):
    """Token other than the blank token. `start`: its first position. `duration`: its number of positions."""

    id: int
    start: int
    duration: int


class DecodedSound(NamedTuple):
    """Tokens of a sound. `is_cut`: True if decoding reached its limit of steps before the end of the sound."""

    tokens: list[TranscribedToken]
    is_cut: bool


class SpokenText(NamedTuple):
    """Words of a recording, with their begin and end in seconds."""

    text: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> list[float]:
        return [round(self.start_s, 2), round(self.end_s, 2)]


def decoded(
    model: Any, states: Tensor, lengths: Sequence[int], limits: Sequence[int], first: int
) -> list[DecodedSound | None]:
    """Return the tokens of each sound; None for a sound whose scores are not finite.

    `states` [sounds, positions, width]: the projected states of the encoder. `lengths`: positions of each sound.
    `limits`: largest number of steps for each sound. `first`: the id with which decoding begins.
    """
    config, device = model.config, states.device
    rows = torch.arange(len(states), device=device)
    ends, most = (torch.tensor(numbers, device=device) for numbers in (lengths, limits))
    cache = ParakeetRNNTDecoderCache(config)
    ids = torch.full((len(states), 1), first, device=device)
    places, active = torch.zeros_like(ends), ends > 0
    is_finite = torch.ones_like(active)
    steps: list[Tensor] = []
    while bool(active.any()):
        near = states[rows, places.clamp(max=states.shape[1] - 1)][:, None]
        scores = model.joint(decoder_hidden_states=model.decoder(ids, cache=cache), encoder_hidden_states=near)[:, -1]
        is_finite &= torch.isfinite(scores).all(-1) | ~active
        tokens = scores[:, : config.vocab_size].argmax(-1)
        durations = scores[:, config.vocab_size :].argmax(-1)
        durations = torch.where((tokens == config.blank_token_id) & (durations == 0), 1, durations)
        steps.append(torch.stack([tokens, places, durations, active.long()], -1))
        ids, places = tokens[:, None], torch.where(active, places + durations, places)
        active = active & is_finite & (places < ends) & (len(steps) < most)
    skipped = {config.blank_token_id, config.pad_token_id}
    by_sound = torch.stack(steps, 1).tolist() if steps else [[] for _ in lengths]
    return [
        DecodedSound(
            [TranscribedToken(*token) for *token, is_active in row if is_active and token[0] not in skipped], is_cut
        )
        if is_usable
        else None
        for row, is_cut, is_usable in zip(by_sound, (places < ends).tolist(), is_finite.tolist(), strict=True)
    ]


def words_of(
    tokens: Sequence[TranscribedToken], tokenizer: Tokenizer, seconds: float, offset_s: float
) -> list[SpokenText]:
    """Return the words of a window that begins at second `offset_s` of its sound. `seconds`: duration of a position."""
    words: list[SpokenText] = []
    stream = DecodeStream(skip_special_tokens=True)
    for token in tokens:
        piece = stream.step(tokenizer, token.id)
        if piece is None:  # the token ends within the bytes of a character
            continue
        start_s, end_s = (offset_s + place * seconds for place in (token.start, token.start + token.duration))
        if piece in _MARKS and words:
            start_s = end_s = words[-1].end_s
        if words and not piece.startswith(" "):
            words[-1] = words[-1]._replace(text=words[-1].text + piece, end_s=end_s)
        else:
            words.append(SpokenText(piece, start_s, end_s))
    return [word._replace(text=word.text.strip()) for word in words if word.text.strip()]


def sentences_of(words: Sequence[SpokenText]) -> list[SpokenText]:
    """Return the sentences of these words. A sentence ends after a word that ends with a mark of _ENDS, after the
    last word, or before a word with which the sentence would be longer than _LONGEST_S.
    """
    sentences: list[SpokenText] = []
    is_open = False
    for word in words:
        if is_open and word.end_s - sentences[-1].start_s <= _LONGEST_S:
            text = f"{sentences[-1].text} {word.text}"
            sentences[-1] = sentences[-1]._replace(text=text, end_s=word.end_s)
        else:
            sentences.append(word)
        is_open = not word.text.endswith(_ENDS)
    return sentences
