"""Quality of vectors, scores and facts, measured against judgements: metrics of each query, pair or text, and of all.

task, EvalStep ──► rankings or similarities ──► metrics ──► Measurement
two Measurements ──► difference of a metric, with its confidence interval
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sie_evals import labelled, mteb_tasks
from sie_evals.labelled import FactTask, Ratios
from sie_evals.mteb_tasks import Mteb
from sie_evals.outputs import VectorOutput
from sie_evals.sources import EvalSource, FactSource
from sie_evals.steps import EncodeCost, EvalStep, EvalWork
from sie_evals.tasks import Judged, Retrieval, Similarity

DEPTH = 100  # number of nearest documents of a query that a ranking keeps
FIRST_STAGE = 30  # number of documents per query that a reranker scores
RESAMPLES = 1000
CONFIDENCE = 0.95
# names of the metrics in reports -> names in trec_eval
METRICS: Mapping[str, str] = {
    "ndcg@10": "ndcg_cut_10",
    "map": "map_cut_100",
    "recall@10": "recall_10",
    "recall@100": "recall_100",
}
AT_ONCE = 256  # number of queries whose similarities to all documents are in memory at the same time
Run = dict[str, dict[str, float]]  # query -> document -> score


@dataclass(frozen=True)
class Measurement:
    """Result of one source. `values`: for each metric, one value per query, pair or text. The score of a metric is the
    mean of its values. With `gold` (human scores of pairs), the score is the rank correlation of the values and `gold`.
    With `weights`, the score is the sum of the values divided by the sum of the weights. `bytes_per_item`: bytes of a
    document in an index; None for scores, facts and tasks of mteb. `cost`: mean cost of encoding a document. `kinds`:
    one result per kind of facts.
    """

    source: str
    values: Mapping[str, Sequence[float]]
    gold: Sequence[float] = ()
    bytes_per_item: float | None = None
    weights: Mapping[str, Sequence[float]] = field(default_factory=dict)
    kinds: Sequence[Measurement] = ()
    cost: EncodeCost | None = field(default=None, compare=False)  # == ignores it, because times differ between runs

    @property
    def scores(self) -> dict[str, float]:
        return {name: self.score(name, np.arange(len(own))) for name, own in self.values.items()}

    def score(self, metric: str, chosen: NDArray[np.intp]) -> float:
        """Return the score of a metric over only the queries, pairs or texts at the positions `chosen`. With `gold`,
        the score is NaN if all these pairs have the same value or the same `gold`. With `weights`, it is NaN if the
        sum of these weights is zero.
        """
        own = np.asarray(self.values[metric])[chosen]
        if self.weights:
            weight = float(np.asarray(self.weights[metric])[chosen].sum())
            return float(own.sum()) / weight if weight else math.nan
        return _spearman(own, np.asarray(self.gold)[chosen]) if self.gold else float(own.mean())


@dataclass(frozen=True)
class Difference:
    """Difference of a metric between two results. `interval`: bounds of its confidence interval at CONFIDENCE; None if
    the results have only a total and no value for each query, as with mteb.
    """

    value: float
    interval: tuple[float, float] | None

    @property
    def spread(self) -> str:
        """The interval as a text; empty if there is no interval."""
        if self.interval is None:
            return ""
        low, high = self.interval
        return f"{low:+.4f} to {high:+.4f} in {CONFIDENCE:.0%} of resamples"


def count(task: Judged, step: EvalStep) -> int | None:
    """Return the largest number of texts that the step sends to its source and reranker; None if unknown."""
    if isinstance(task, Mteb):
        return None
    if isinstance(task, Similarity):
        sides = 1 if step.output.queries == step.output.documents else 2
        return len(task.gold) if step.source.scores_pairs else sides * len({*task.left, *task.right})
    if isinstance(task, FactTask):
        return len(task.texts)
    scored = sum(max(FIRST_STAGE, len(own)) for own in task.qrels.values())
    if step.source.scores_pairs:
        return scored
    return len(task.corpus) + len(task.queries) + (FIRST_STAGE * len(task.queries) if step.reranker else 0)


def measure(task: Judged, step: EvalStep, work: EvalWork) -> Measurement:
    if isinstance(task, Mteb):
        scores = mteb_tasks.measure(task, step, work)
        return Measurement(step.name, {name: [value] for name, value in scores.items()})
    if isinstance(task, FactTask):
        return _labelled(task, step, work)
    if isinstance(task, Similarity):
        return _similarity(task, step, work)
    return _retrieval(task, step, work)


def difference(score: Measurement, reference: Measurement, metric: str) -> Difference:
    """Return the difference of a metric between two results. A paired bootstrap over queries, pairs or texts gives its
    interval; the samples are the same in each run. Source: Efron and Tibshirani 1993, "An Introduction to the
    Bootstrap", chapter 13 (percentile interval).
    """
    count = len(score.values[metric])
    every = np.arange(count)
    value = score.score(metric, every) - reference.score(metric, every)
    if count == 1:
        return Difference(value, None)
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, count, count) for _ in range(RESAMPLES)]
    spread = [score.score(metric, sample) - reference.score(metric, sample) for sample in drawn]
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.nanpercentile(spread, (tail, 100 - tail)).tolist()
    return Difference(value, (low, high))


def _labelled(task: FactTask, step: EvalStep, work: EvalWork) -> Measurement:
    assert isinstance(step.source, FactSource), "checked before the measurement"
    every, by_kind = labelled.ratios(task, work.facts(step.source, task))
    kinds = [_of_ratios(f"{step.name}, {kind}", ratios) for kind, ratios in by_kind.items()]
    return replace(_of_ratios(step.name, every), kinds=kinds)


def _of_ratios(name: str, ratios: Ratios) -> Measurement:
    values = {metric: numerators for metric, (numerators, _) in ratios.items()}
    return Measurement(name, values, weights={metric: denominators for metric, (_, denominators) in ratios.items()})


def _similarity(task: Similarity, step: EvalStep, work: EvalWork) -> Measurement:
    if step.source.scores_pairs:
        pairs = zip(task.left, task.right, strict=True)
        alike = [work.scores(step.source, left, [right])[0] for left, right in pairs]
        return Measurement(step.name, {"spearman": alike}, task.gold)
    texts = list(dict.fromkeys([*task.left, *task.right]))
    rows = dict(zip(texts, work.vectors(step, texts, is_query=False), strict=True))
    asking = rows
    # if the output encodes queries and documents differently, encode the left text of each pair as a query
    if step.output.queries != step.output.documents:
        form = replace(step.output, name=f"{step.output.name} of a query", documents=step.output.queries)
        asking = dict(zip(texts, work.vectors(replace(step, output=form), texts, is_query=False), strict=True))
    alike = [
        float(step.output.similar([asking[left]], [rows[right]])[0, 0])
        for left, right in zip(task.left, task.right, strict=True)
    ]
    size = _mean_size(step.output, list(rows.values()))
    return Measurement(step.name, {"spearman": alike}, task.gold, size, cost=work.cost)


def _retrieval(task: Retrieval, step: EvalStep, work: EvalWork) -> Measurement:
    import pytrec_eval

    run, size = (_scored(task, step.source, work), None) if step.source.scores_pairs else _nearest(task, step, work)
    if step.reranker is not None:
        run = _reranked(task, step.reranker, run, work)
    judged = {query: dict(own) for query, own in task.qrels.items()}
    metrics = pytrec_eval.RelevanceEvaluator(judged, set(METRICS.values())).evaluate(run)
    values = {name: [metrics[query][own] for query in task.queries] for name, own in METRICS.items()}
    return Measurement(step.name, values, bytes_per_item=size, cost=work.cost)


def _scored(task: Retrieval, source: EvalSource, work: EvalWork) -> Run:
    """Score documents of each query with a reranker: all judged documents, filled up to FIRST_STAGE with the first
    documents of the corpus. No other model selects documents, so the result depends only on the reranker.
    """
    first, by_query = list(itertools.islice(task.corpus, FIRST_STAGE)), {}
    for query, text in task.queries.items():
        chosen = list(dict.fromkeys([*task.qrels[query], *first]))[: max(FIRST_STAGE, len(task.qrels[query]))]
        scores = work.scores(source, text, [task.corpus[key] for key in chosen])
        by_query[query] = dict(zip(chosen, scores, strict=True))
    return by_query


def _nearest(task: Retrieval, step: EvalStep, work: EvalWork) -> tuple[Run, float]:
    """Return the DEPTH nearest documents of each query with their similarities, and the mean bytes per document."""
    keys = list(task.corpus)
    rows = work.vectors(step, list(task.corpus.values()), is_query=False)
    asking = work.vectors(step, list(task.queries.values()), is_query=True)
    names, rankings = list(task.queries), {}
    for start in range(0, len(names), AT_ONCE):
        similar = step.output.similar(asking[start : start + AT_ONCE], rows)
        nearest = np.argsort(-similar, axis=1, kind="stable")[:, :DEPTH]
        for row, query in enumerate(names[start : start + AT_ONCE]):
            rankings[query] = {keys[place]: float(similar[row, place]) for place in nearest[row].tolist()}
    return rankings, _mean_size(step.output, rows)


def _reranked(task: Retrieval, source: EvalSource, run: Run, work: EvalWork) -> Run:
    """Sort each ranking's first FIRST_STAGE documents by the source's scores. The other documents follow, in the order
    of `run`.
    """
    rankings = {}
    for query, ranking in run.items():
        keys = sorted(ranking, key=ranking.__getitem__, reverse=True)
        scores = work.scores(source, task.queries[query], [task.corpus[key] for key in keys[:FIRST_STAGE]])
        least = min(scores)
        behind = {key: least - place for place, key in enumerate(keys[FIRST_STAGE:], 1)}
        rankings[query] = {**dict(zip(keys[:FIRST_STAGE], scores, strict=True)), **behind}
    return rankings


def _mean_size(output: VectorOutput, rows: Sequence[Any]) -> float:
    return sum(map(output.size, rows)) / len(rows)


def _spearman(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    from scipy.stats import spearmanr

    if left.std() == 0 or right.std() == 0:
        return math.nan
    return float(spearmanr(left, right).statistic)
