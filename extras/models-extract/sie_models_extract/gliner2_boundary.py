"""Entities of GLiNER2 models with the boundary architecture. For each label the package proposes candidates of any
length, and scores them.

    states of words and labels ──► candidates [labels, candidates] ──► candidates above the threshold of their label
    ──► over all windows of a text: candidates that the model's overlap policy keeps
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from gliner2.inference.overlap import resolve_overlaps
from gliner2.models.boundary.model import _group_scored_candidates
from torch import Tensor

from sie_adapter.families.extraction import scores_not_finite
from sie_contracts.errors import SIEError
from sie_models_extract.extraction import TextWindow, own_ranges
from sie_models_extract.gliner2_records import WordPlaces

# Largest number of spans in a group of overlapping spans of one label (`_clusters`): about the number of candidates of
# 8 windows. Of a larger group, the package gets only the best spans.
_CANDIDATES = 1024


class BoundedSpan(NamedTuple):
    """Span of words that may be an entity. `end`: index of its last word, plus 1. `label`: index of its label."""

    score: float
    start: int
    end: int
    label: int


def window_candidates(
    model: Any, words: Tensor, labels: Tensor, at: TextWindow, thresholds: Sequence[float]
) -> list[BoundedSpan] | SIEError:
    """Return the candidates of one window that reach the threshold of their label. `words` [words, width], `labels`
    [labels, width]: the states of words and of labels. A full stop may follow the words of the window; no candidate
    includes the full stop.
    """
    settings = model.boundary_settings
    present = (torch.ones(1, len(states), dtype=torch.bool, device=states.device) for states in (words, labels))
    output = model.boundary_head(words[None], next(present), labels[None], next(present), return_candidates=True)
    candidates = output.candidates
    logits = candidates.pair_logits.float()
    if bool((torch.isnan(logits) | torch.isposinf(logits)).any()):
        return scores_not_finite()
    grouped = _group_scored_candidates(
        candidates,
        threshold=torch.tensor([thresholds], device=logits.device),
        probabilities=torch.sigmoid(logits / settings.pair_temperature),
        count_log_rates=output.count_log_rates,
        adaptive_threshold=settings.adaptive_threshold,
    )[0]
    if output.null_logits is not None:  # for each label, the logit that the window has no entity of this label
        absent = (torch.sigmoid(output.null_logits[0].float()) > settings.abstention_threshold).tolist()
        grouped = [[] if is_absent else own for is_absent, own in zip(absent, grouped, strict=True)]
    size = at.stop - at.start
    return [
        BoundedSpan(score, at.start + start, at.start + end, label)
        for label, own in enumerate(grouped)
        for score, start, end in own
        if 0 <= start < end <= size
    ]


def bounded_entities(
    text: str,
    words: WordPlaces,
    by_window: Mapping[TextWindow, Sequence[BoundedSpan]],
    labels: Sequence[str],
    policy: str,
) -> list[dict[str, Any]]:
    """Return the entities of a text, ordered by offsets. `policy`: the package's rule by which it selects among the
    overlapping candidates of one label.
    """
    order = sorted(by_window, key=lambda at: at.start)
    by_label: list[list[BoundedSpan]] = [[] for _ in labels]
    for at, (begin, end) in zip(order, own_ranges(order), strict=True):
        for candidate in by_window[at]:
            if begin <= candidate.start < end:
                by_label[candidate.label].append(candidate)
    chosen = [
        (words.starts[own.start], words.ends[own.end - 1], own.label, own.score)
        for candidates in by_label
        for cluster in _clusters(candidates)
        for own in resolve_overlaps(cluster, policy, **_KEYS)
    ]
    return [
        {"text": text[start:end], "label": labels[label], "score": score, "start": start, "end": end}
        for start, end, label, score in sorted(chosen)
    ]


_KEYS: dict[str, Any] = {
    "score": lambda own: own.score,
    "start": lambda own: own.start,
    "end": lambda own: own.end,
}


def _clusters(candidates: Sequence[BoundedSpan]) -> Iterator[list[BoundedSpan]]:
    """Yield groups of candidates that overlap, directly or through other candidates. Only the best _CANDIDATES spans of
    a group are kept, because the package's time and memory grow with the square of the number of spans, and all spans
    are candidates if a client sets the threshold 0. If a text fits into one window of the model, and no group is
    reduced, the text's entities equal those of the package.
    """
    cluster: list[BoundedSpan] = []
    stop = 0
    for own in sorted(candidates, key=lambda own: (own.start, own.end)):
        if cluster and own.start >= stop:
            yield _best(cluster)
            cluster = []
        cluster.append(own)
        stop = max(stop, own.end)
    if cluster:
        yield _best(cluster)


def _best(cluster: list[BoundedSpan]) -> list[BoundedSpan]:
    if len(cluster) <= _CANDIDATES:
        return cluster
    return sorted(cluster, key=lambda own: (-own.score, own.start, own.end))[:_CANDIDATES]
