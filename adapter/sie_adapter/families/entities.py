"""Conversion of the logits of a token classifier to entities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sie_adapter.engine.item_results import ItemResult, ItemResults
from sie_adapter.heads import Row
from sie_contracts.wire.ipc import Group, RunBatch

_OUTSIDE = "O"
# prefix of a tag (BIO, BIOES, BILOU) -> whether its token begins an entity even after a token of the same label
_BEGINS = {"B-": True, "S-": True, "U-": True, "I-": False, "E-": False, "L-": False}


def entities(
    message: RunBatch,
    group: Group,
    logits: Sequence[Row],
    places: list[int],
    names: Sequence[str],
    *,
    keeps_order: bool = False,
) -> ItemResults:
    """Return for each text the entities whose score reaches the threshold, in text order. `logits`: float32 [tokens,
    labels] for each text. `places`: the indices of the texts in the batch.

    Neighbouring tokens with the same label form one entity if the tag of the second token begins no new entity. The
    score of an entity is the mean of its tokens' probabilities. Offsets are code points. Source: aggregation "simple"
    of transformers' token-classification pipeline, which supports only B- and I-.

    If `keeps_order` is True, the tags of a text are the best sequence that BIOES allows (`ordered_tags`), and white
    space at the ends of entities is removed.
    """
    ends = np.cumsum(np.frombuffer(message.lengths, "<i4"))
    offsets = np.frombuffer(message.offsets, "<i4").reshape(-1, 2)
    results: ItemResults = []
    probabilities = torch.softmax(torch.cat(list(logits)), 1).cpu()
    best = probabilities.argmax(1)
    stops = np.cumsum([len(row) for row in logits]).tolist()
    for row, stop, place in zip(logits, stops, places, strict=True):
        here = slice(stop - len(row), stop)
        spans = offsets[ends[place] - len(row) : ends[place]]
        if keeps_order:
            inside = torch.from_numpy(spans[:, 0] >= 0)
            best[here][inside] = ordered_tags(probabilities[here][inside].log(), names)
        chosen = probabilities[here].gather(1, best[here, None])[:, 0]
        kinds = [names[number] for number in best[here].tolist()]
        merged = _merge(message.texts[place], spans.tolist(), kinds, chosen.tolist())
        if keeps_order:
            merged = [entity for entity in map(_trimmed, merged) if entity["text"]]
        least = group.options.threshold or 0.0
        results.append(ItemResult(data={"entities": [entity for entity in merged if entity["score"] >= least]}))
    return results


def ordered_tags(scores: Tensor, names: Sequence[str]) -> Tensor:
    """Return one tag for each token, as an index of `names`: the sequence with the largest sum of `scores` [tokens,
    tags] that BIOES allows. After B- or I- comes I- or E- of the same label. At the start, and after any other tag,
    comes O, B- or S-. The last tag is O, E- or S-. Source: model card of openai/privacy-filter, without the biases of
    its decoder.
    """
    if not len(scores):
        return torch.zeros(0, dtype=torch.long)
    opens = np.array([name[:2] in ("B-", "I-") for name in names])
    goes_on = np.array([name[:2] in ("I-", "E-") for name in names])
    labels = np.array([name[2:] for name in names])
    allowed = (opens[:, None] == goes_on) & (~opens[:, None] | (labels[:, None] == labels))
    steps = np.where(allowed, 0.0, -np.inf)
    emissions = scores.double().clamp_min(-1e9).numpy()
    sums = np.where(goes_on, -np.inf, emissions[0])
    before = np.zeros(emissions.shape, np.int64)
    for token, own in enumerate(emissions[1:], 1):
        paths = sums[:, None] + steps
        before[token] = paths.argmax(0)
        sums = paths.max(0) + own
    tags = np.empty(len(emissions), np.int64)
    tags[-1] = np.where(opens, -np.inf, sums).argmax()
    for token in range(len(tags) - 1, 0, -1):
        tags[token - 1] = before[token, tags[token]]
    return torch.from_numpy(tags)


def _trimmed(entity: dict[str, Any]) -> dict[str, Any]:
    text = entity["text"].strip()
    start = entity["start"] + len(entity["text"]) - len(entity["text"].lstrip())
    return {**entity, "text": text, "start": start, "end": start + len(text)}


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
