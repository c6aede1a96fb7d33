"""Relations of GLiNER2. In the package, each relation label is a task with the fields head and tail. The model
predicts the number of pairs in a window, and scores all spans for each pair. The module `gliner_relations` also uses
the last step, `relations_of_text`.

    logits [pairs, 2, words, widths] ──► the best span of each field ──► relations, over all windows of a text
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sie_adapter.families.extraction import scores_not_finite
from sie_contracts.errors import SIEError
from sie_models_extract.extraction import TextWindow
from sie_models_extract.gliner2_records import WordPlaces

FIELDS = ("head", "tail")


class WordPair(NamedTuple):
    """Relation between two ranges of words, each (first word, last word). `score`: the lower of both ranges' scores."""

    head: tuple[int, int]
    tail: tuple[int, int]
    label: str
    score: float


def window_relations(
    by_label: Iterable[tuple[str, Tensor | None]], at: TextWindow, least: float
) -> list[WordPair] | SIEError:
    """Return the relations of one window whose score is at least `least`. The logits of a label are None if the model
    predicts no pair. Spans with the full stop that the package may add after the window's words are ignored.
    """
    pairs: list[WordPair] = []
    for label, logits in by_label:
        if logits is None:
            continue
        if bool((torch.isnan(logits) | torch.isposinf(logits)).any()):
            return scores_not_finite()
        scores = torch.sigmoid(logits.float()).cpu()
        words, widths = scores.shape[-2:]
        lasts = torch.arange(words)[:, None] + torch.arange(widths)
        best = torch.where(lasts < at.stop - at.start, scores, -1.0).flatten(2).max(-1)
        for own, places in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            if min(own) >= max(least, 0.0):
                head, tail = (divmod(place, widths) for place in places)
                ranges = [(at.start + first, at.start + first + width) for first, width in (head, tail)]
                pairs.append(WordPair(ranges[0], ranges[1], label, min(own)))
    return pairs


def relations_of_text(text: str, words: WordPlaces, pairs: Sequence[WordPair]) -> list[dict[str, Any]]:
    """Return the relations of a text, best first, from the pairs of its windows. Pairs with the same head, tail and
    label become one relation with the highest of their scores.
    """
    best: dict[tuple[tuple[int, int], tuple[int, int], str], float] = {}
    for pair in pairs:
        key = (pair.head, pair.tail, pair.label)
        best[key] = max(pair.score, best.get(key, 0.0))
    return [
        {
            "head": text[words.starts[head[0]] : words.ends[head[1]]],
            "tail": text[words.starts[tail[0]] : words.ends[tail[1]]],
            "relation": label,
            "score": score,
        }
        for (head, tail, label), score in sorted(best.items(), key=lambda row: (-row[1], row[0]))
    ]
