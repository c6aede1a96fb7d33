"""Pruning of a passage to the parts that are relevant for a query.

logit of each token ──► probability ──► pruned | kept | highlighted, by two thresholds ──► spans of tokens of one kind
kept spans ──► summary, with the score of the pair of query and passage
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sie_adapter.engine.item_results import ItemResult, ItemResults, Rows, class_scores
from sie_contracts.wire.ipc import Group, RunBatch

PRUNE_THRESHOLD, HIGHLIGHT_THRESHOLD = 0.6, 0.9  # defaults of the options of the same names


def pruned(message: RunBatch, group: Group, rows: Rows, places: list[int], activation: str) -> ItemResults:
    """Return the entities of each text: the `summary`, then all `highlight` spans, all `kept` spans and all `pruned`
    spans, each in the order of offsets. If the score of a text is an error, return this error for the text. `rows`: the
    logits `score` (float32 [1]) and `keep` (float32 [tokens]) of each text. `places`: the indices of the texts in the
    batch. `activation`: see `class_scores`.

    A token is kept if its probability is at least `prune_threshold`, and also highlighted if its probability is at
    least `highlight_threshold`. The score of a span is the mean probability of its tokens; the score of the summary is
    the score of the pair. Offsets are code points; the summary has no offsets.
    """
    parameters = group.options.parameters
    least = float(parameters.get("prune_threshold", PRUNE_THRESHOLD))
    most = max(least, float(parameters.get("highlight_threshold", HIGHLIGHT_THRESHOLD)))
    ends = np.cumsum(np.frombuffer(message.lengths, "<i4"))
    offsets = np.frombuffer(message.offsets, "<i4").reshape(-1, 2)
    results: ItemResults = []
    for score, logits, place in zip(
        class_scores(group.options, rows["score"], activation), rows["keep"], places, strict=True
    ):
        if not isinstance(score, ItemResult):
            results.append(score)
            continue
        spans = offsets[ends[place] - len(logits) : ends[place]]
        own = spans[:, 0] >= 0
        keep = torch.sigmoid(logits).double().cpu().numpy()[own]
        text, spans = message.texts[place], spans[own]
        # code points between two tokens belong to the earlier token, such as an accent that follows its letter
        spans[:-1, 1] = np.maximum(spans[:-1, 1], spans[1:, 0])
        sections = _spans(text, "kept", spans, keep, keep >= least)
        summary = {"text": " ".join(span["text"] for span in sections), "label": "summary", "score": score.score}
        entities = [
            {**summary, "start": None, "end": None},
            *_spans(text, "highlight", spans, keep, keep >= most),
            *sections,
            *_spans(text, "pruned", spans, keep, keep < least),
        ]
        results.append(ItemResult(data={"entities": entities}))
    return results


def _spans(text: str, label: str, spans: np.ndarray, keep: np.ndarray, chosen: np.ndarray) -> list[dict[str, Any]]:
    """Return an entity for each run of adjacent tokens in `chosen` (bool [tokens]), without white space at its ends."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], chosen.astype(np.int8), [0]])))
    sections = []
    for first, stop in edges.reshape(-1, 2).tolist():
        start, end = int(spans[first, 0]), int(spans[stop - 1, 1])
        whole = text[start:end]
        start += len(whole) - len(whole.lstrip())
        inner = whole.strip()
        if inner:
            mean = float(keep[first:stop].mean())
            sections.append({"text": inner, "label": label, "score": mean, "start": start, "end": start + len(inner)})
    return sections
