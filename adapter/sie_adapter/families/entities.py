"""Conversion of the logits of a token classifier to entities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sie_adapter.engine.item_results import ItemResult, ItemResults
from sie_adapter.heads import Row
from sie_contracts.wire.ipc import Group, RunBatch

_OUTSIDE = "O"
# prefix of a tag (BIO, BIOES, BILOU) -> whether its token begins an entity even after a token of the same label
_BEGINS = {"B-": True, "S-": True, "U-": True, "I-": False, "E-": False, "L-": False}


def entities(
    message: RunBatch, group: Group, logits: Sequence[Row], places: list[int], names: Sequence[str]
) -> ItemResults:
    """Return the entities of each text, by offset, from float32 logits [tokens, labels] of the rows `places`.

    Neighbouring tokens with one label are one entity, unless the tag of the second token begins another. The score of
    an entity is the mean of its tokens' probabilities. Offsets are code points. Source: aggregation "simple" of
    transformers' token-classification pipeline, which supports only B- and I-.
    """
    ends = np.cumsum(np.frombuffer(message.lengths, "<i4"))
    offsets = np.frombuffer(message.offsets, "<i4").reshape(-1, 2)
    results: ItemResults = []
    best = torch.softmax(torch.cat(list(logits)), 1).max(1)
    numbers, scores = best.indices.tolist(), best.values.tolist()
    stops = np.cumsum([len(row) for row in logits]).tolist()
    for row, stop, place in zip(logits, stops, places, strict=True):
        here = slice(stop - len(row), stop)
        spans = offsets[ends[place] - len(row) : ends[place]]
        merged = _merge(message.texts[place], spans.tolist(), [names[number] for number in numbers[here]], scores[here])
        least = group.options.threshold or 0.0
        results.append(ItemResult(data={"entities": [entity for entity in merged if entity["score"] >= least]}))
    return results


def _merge(text: str, spans: list[list[int]], kinds: list[str], scores: list[float]) -> list[dict[str, Any]]:
    runs: list[tuple[str, list[int]]] = []
    for token, ((start, _), kind) in enumerate(zip(spans, kinds, strict=True)):
        if start < 0:  # a special token has no offset in the text
            continue
        label = kind[2:] if kind[:2] in _BEGINS else kind
        if runs and runs[-1][0] == label and not _BEGINS.get(kind[:2], False):
            runs[-1][1].append(token)
        else:
            runs.append((label, [token]))
    return [
        {
            "text": text[spans[tokens[0]][0] : spans[tokens[-1]][1]],
            "label": label,
            "score": sum(scores[token] for token in tokens) / len(tokens),
            "start": spans[tokens[0]][0],
            "end": spans[tokens[-1]][1],
        }
        for label, tokens in runs
        if label != _OUTSIDE
    ]
