"""How good vectors and scores are, by what people said: one number for each query or pair, and their mean.

task, source ──► rankings or cosines ──► metrics ──► difference of two sources, with an interval
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sie_cli.evals.sources import Source
from sie_cli.evals.tasks import Retrieval, Similarity, Task

DEPTH = 100  # documents of a ranking, at most
FIRST_STAGE = 30  # of which a reranker sees as many
RESAMPLES = 1000
CONFIDENCE = 0.95
# Names as people know them, and those of trec_eval
METRICS: Mapping[str, str] = {
    "ndcg@10": "ndcg_cut_10",
    "map": "map_cut_100",
    "recall@10": "recall_10",
    "recall@100": "recall_100",
}
Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class Found:
    """What one source reached. `values`: the metric of each query, by metric. Of a similarity: `cosines` and `gold` of
    each pair, whose rank correlation is the metric.
    """

    source: str
    values: Mapping[str, Sequence[float]]
    gold: Sequence[float] = ()

    @property
    def scores(self) -> dict[str, float]:
        """Each metric over all queries or pairs."""
        return {name: self.score(name, np.arange(len(own))) for name, own in self.values.items()}

    def score(self, metric: str, chosen: NDArray[np.intp]) -> float:
        """The metric over some queries or pairs. Not a number where it is not defined: all pairs are equal."""
        own = np.asarray(self.values[metric])[chosen]
        return _spearman(own, np.asarray(self.gold)[chosen]) if self.gold else float(own.mean())


@dataclass(frozen=True)
class Difference:
    """How much more a source reaches than another, and between which bounds that lies with CONFIDENCE."""

    value: float
    low: float
    high: float


def measure(task: Task, source: Source) -> Found:
    """Run the task. Raises what the source raises."""
    if isinstance(task, Similarity):
        return _similarity(task, source)
    return _retrieval(task, source)


def difference(found: Found, reference: Found, metric: str) -> Difference:
    """By a paired bootstrap over queries or pairs, always with the same draws.

    Source: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13 (percentile interval).
    """
    count = len(found.values[metric])
    rng = np.random.default_rng(0)
    every = np.arange(count)
    drawn = [rng.integers(0, count, count) for _ in range(RESAMPLES)]
    spread = [found.score(metric, each) - reference.score(metric, each) for each in drawn]
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.nanpercentile(spread, (tail, 100 - tail)).tolist()
    return Difference(found.score(metric, every) - reference.score(metric, every), low, high)


def _similarity(task: Similarity, source: Source) -> Found:
    if source.scores_pairs:
        pairs = zip(task.left, task.right, strict=True)
        alike = [source.scores(left, [right])[0] for left, right in pairs]
        return Found(source.name, {"spearman": alike}, task.gold)
    texts = list(dict.fromkeys([*task.left, *task.right]))
    places = {text: place for place, text in enumerate(texts)}
    rows = _unit(source.vectors(texts, is_query=False))
    left, right = (rows[[places[text] for text in side]] for side in (task.left, task.right))
    return Found(source.name, {"spearman": np.einsum("ij,ij->i", left, right).tolist()}, task.gold)


def _retrieval(task: Retrieval, source: Source) -> Found:
    import pytrec_eval

    run = {query: dict(own) for query, own in _rankings(task, source).items()}
    judged = {query: dict(own) for query, own in task.qrels.items()}
    told = pytrec_eval.RelevanceEvaluator(judged, set(METRICS.values())).evaluate(run)
    return Found(source.name, {name: [told[query][own] for query in task.queries] for name, own in METRICS.items()})


def _rankings(task: Retrieval, source: Source) -> dict[str, dict[str, float]]:
    """The nearest DEPTH documents of each query. A reranker orders FIRST_STAGE documents of each: those that are
    judged, filled up with others in the order of the corpus, so that no other model has chosen them.
    """
    keys = list(task.corpus)
    if source.scores_pairs:
        found = {}
        for query, text in task.queries.items():
            chosen = list(dict.fromkeys([*task.qrels[query], *keys]))[: max(FIRST_STAGE, len(task.qrels[query]))]
            scores = source.scores(text, [task.corpus[key] for key in chosen])
            found[query] = dict(zip(chosen, scores, strict=True))
        return found
    rows = _unit(source.vectors(list(task.corpus.values()), is_query=False))
    asking = _unit(source.vectors(list(task.queries.values()), is_query=True))
    similar = asking @ rows.T
    most = min(DEPTH, len(keys))
    nearest = np.argsort(-similar, axis=1, kind="stable")[:, :most]
    return {
        query: {keys[place]: float(similar[row, place]) for place in nearest[row].tolist()}
        for row, query in enumerate(task.queries)
    }


def _unit(rows: Matrix) -> Matrix:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1), np.float32)


def _spearman(one: NDArray[np.float64], two: NDArray[np.float64]) -> float:
    from scipy.stats import spearmanr

    if one.std() == 0 or two.std() == 0:
        return math.nan
    return float(spearmanr(one, two).statistic)
