"""Entities from the logits of a token classifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sie_adapter.answers import Answer, Answers
from sie_adapter.heads import Row
from sie_contracts.ipc import Group, RunBatch

_OUTSIDE = "O"


def entities(message: RunBatch, group: Group, logits: Sequence[Row], places: list[int], names: Sequence[str]) -> Answers:
    """The entities of each text, in order of place, from float32 logits [tokens, labels] of the rows `places`.

    Neighbours of one kind are one entity unless the next begins with B-; its score is the mean of its tokens' probabilities. Offsets are
    code points. Source: aggregation "simple" of transformers' token-classification pipeline.
    """
    ends = np.cumsum(np.frombuffer(message.lengths, "<i4"))
    offsets = np.frombuffer(message.offsets, "<i4").reshape(-1, 2)
    found: Answers = []
    for row, place in zip(logits, places, strict=True):
        best = torch.softmax(row, 1).max(1)
        spans = offsets[ends[place] - len(row) : ends[place]]
        kinds = [names[number] for number in best.indices.tolist()]
        merged = _merge(message.texts[place], spans.tolist(), kinds, best.values.tolist())
        least = group.options.threshold or 0.0
        found.append(Answer(data={"entities": [entity for entity in merged if entity["score"] >= least]}))
    return found


def _merge(text: str, spans: list[list[int]], kinds: list[str], scores: list[float]) -> list[dict[str, Any]]:
    runs: list[tuple[str, list[int]]] = []
    for token, ((start, stop), kind) in enumerate(zip(spans, kinds, strict=True)):
        if start == stop:  # a special token
            continue
        begin, label = (kind[:1], kind[2:]) if kind[:2] in ("B-", "I-") else ("I", kind)
        if runs and runs[-1][0] == label and begin != "B":
            runs[-1][1].append(token)
        else:
            runs.append((label, [token]))
    return [
        {
            "text": text[spans[tokens[0]][0] : spans[tokens[-1]][1]], "label": label,
            "score": sum(scores[token] for token in tokens) / len(tokens), "start": spans[tokens[0]][0], "end": spans[tokens[-1]][1],
        }
        for label, tokens in runs
        if label != _OUTSIDE
    ]  # fmt: skip
