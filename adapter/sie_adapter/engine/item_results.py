"""Results of inputs, computed from what the heads (output layers) return for each row (sequence of token ids). The
output options of a request are applied here, per work item, so requests with different options can share a batch.

    rows of a work item ──► cut, normalise, MUVERA, dtype ──► arrays                  encode
                        ──► row of the query against rows of documents ──► scores    score of stored vectors
                        ──► activation of logits ──► scores, classes                 score of pairs, classes, labels
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sie_adapter.engine.device import to_device
from sie_adapter.engine.schema_answers import answer_parts, ranked_classes
from sie_adapter.epilogues import dtypes, muvera
from sie_adapter.heads import Row
from sie_contracts.errors import InferenceFailed, InternalFailure, InvalidInput, SIEError
from sie_contracts.models.options import TOKEN_STATES
from sie_contracts.models.output_schemas import decisions_of, parts_of
from sie_contracts.wire.ipc import BatchDone, Group
from sie_contracts.wire.messages import ArraySlice, Failed, Ok, Outcome, RunOptions

_EPSILON = 1e-12
Rows = Mapping[str, Sequence[Row]]


@dataclass(frozen=True)
class ClientVectors:
    """Token vectors that a client sent instead of a text, float32 [tokens, width]. They need not be normalised."""

    vectors: Tensor

    def __len__(self) -> int:
        return len(self.vectors)


@dataclass
class ItemResult:
    """Result of one input: arrays by their names in `messages.Ok`, or a score, or the map of an extraction."""

    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    score: float | None = None
    data: dict[str, Any] | None = None


ItemResults = list[ItemResult | SIEError]


def check_groups(groups: tuple[Group, ...], count: int) -> None:
    """Raise InternalFailure if the groups (work items) do not cover all `count` rows, in order."""
    end, is_in_order = 0, True
    for group in groups:
        is_in_order &= group.start == end <= group.stop
        end = group.stop
    if not is_in_order or end != count:
        raise InternalFailure(f"the groups do not cover the {count} rows in order", reason="malformed_batch")


def batch_reply(
    batch: str,
    answered: Iterable[tuple[ItemResult | SIEError, int]],
    inference_ms: float,
    started_s: float,
    *,
    padding: int = 0,
    engine: str = "torch",
) -> BatchDone:
    """Return the reply to a batch. `answered`: for each input, its result and its number of tokens. `started_s`: when
    the conversion of results began, in seconds of `time.perf_counter`.
    """
    outcomes: list[Outcome] = []
    blocks: list[bytes] = []
    offset = 0
    for answer, tokens in answered:
        if isinstance(answer, SIEError):
            outcomes.append(Failed(answer.info()))
            continue
        outputs = {}
        for name, array in answer.arrays.items():
            outputs[name] = ArraySlice(array.dtype.str, array.shape, offset)
            blocks.append(array.tobytes())
            offset += array.nbytes
        outcomes.append(Ok(outputs, tokens, score=answer.score, data=answer.data))
    block = b"".join(blocks)
    ended_ms = 1e3 * (time.perf_counter() - started_s)
    return BatchDone(batch, tuple(outcomes), block, inference_ms, ended_ms, padding, engine=engine)


def not_finite() -> InferenceFailed:
    """Return the error for a vector that is zero, NaN or infinite, or a score that is NaN or infinite."""
    return InferenceFailed("the model returned a zero vector, or a number that is NaN or infinite", reason="non_finite")


def vectors(options: RunOptions, rows: Rows) -> ItemResults:
    """Return for each input, in order, the vectors of the outputs that the options request."""
    count = len(next(iter(rows.values()), ()))
    results: ItemResults = [ItemResult() for _ in range(count)]
    for name in options.outputs:
        if name == "sparse":
            _add_sparse(options, rows["sparse"], results)
        elif name in ("multivector", TOKEN_STATES):
            _add_multivectors(name, options, rows[name], results)
        elif options.muvera is None:
            _add_dense(options, torch.stack(list(rows["dense"])), results)
    if options.muvera is not None and "dense" in options.outputs:
        tokens = _for_muvera(options, rows["multivector"])
        encoded = muvera.encode(tokens, options.muvera, is_query=options.is_query)
        # MUVERA adds vectors. Only vectors that a client sent can have an infinite sum: a model's vectors are
        # normalised.
        for item in (~torch.isfinite(encoded).all(1)).nonzero()[:, 0].tolist():
            results[item] = InvalidInput.at("multivector", "the numbers are too large, their sum is infinite")
        _put("dense", options.dtype, encoded, range(count), results)
    return results


def _for_muvera(options: RunOptions, rows: Sequence[Row]) -> Sequence[Tensor]:
    """Return the token vectors for MUVERA: cut to the requested dimensions, and normalised. Vectors of a client are
    returned unchanged if the request sets no dimensions.
    """
    cut = _cut(torch.cat(_tensors(rows)), options, keep_scale=False).split([len(row) for row in rows])
    return [
        row.vectors if isinstance(row, ClientVectors) and not options.dimensions else own
        for row, own in zip(rows, cut, strict=True)
    ]


def _tensors(rows: Sequence[Row]) -> list[Tensor]:
    return [row.vectors if isinstance(row, ClientVectors) else row for row in rows]


def _cut(vectors: Tensor, options: RunOptions, *, keep_scale: bool) -> Tensor:
    """Return the first `dimensions` numbers of each vector. Unless `keep_scale`, divide them by max(norm, 1e-12)."""
    if not 0 <= options.dimensions <= vectors.shape[-1]:
        raise InvalidInput(
            f"dimensions: expected at most {vectors.shape[-1]}, got {options.dimensions}", reason="bad_dimensions"
        )
    cut = vectors[..., : options.dimensions] if options.dimensions else vectors
    return cut if keep_scale else cut / torch.linalg.vector_norm(cut, dim=-1, keepdim=True).clamp_min(_EPSILON)


def _add_dense(options: RunOptions, pooled: Tensor, results: ItemResults) -> None:
    cut = _cut(pooled, options, keep_scale=True) if options.dimensions else pooled
    norms = torch.linalg.vector_norm(cut, dim=1, keepdim=True)
    for item, (norm,) in enumerate(norms.tolist()):
        if not 0 < norm < math.inf:
            results[item] = not_finite()
    vectors = cut / norms.clamp_min(_EPSILON) if options.normalize else cut
    _put("dense", options.dtype, vectors, range(len(results)), results)


def _put(name: str, dtype: str, vectors: Tensor, places: Sequence[int | slice], results: ItemResults) -> None:
    """Store `vectors[places[i]]`, converted to `dtype`, as the output `name` of result i."""
    if dtype == "float32":
        values, scale, offset = vectors.float().numpy(force=True), None, None
    else:
        values, scale, offset = dtypes.convert(vectors, dtype)
    is_half = values.dtype == np.float16  # a conversion to another dtype cannot overflow
    for item, place in enumerate(places):
        answer = results[item]
        if is_half and not np.isfinite(values[place]).all():
            results[item] = _too_large()
        elif isinstance(answer, ItemResult):
            answer.arrays[name] = values[place]
            if scale is not None:
                answer.arrays[f"{name}.scale"] = np.atleast_1d(scale[place])
            if offset is not None:
                answer.arrays[f"{name}.offset"] = np.atleast_1d(offset[place])


def _too_large(remedy: str = "request float32, or set normalize") -> InvalidInput:
    return InvalidInput(f"a number of a vector is too large for float16: {remedy}", reason="unsupported_dtype")


def _add_multivectors(name: str, options: RunOptions, rows: Sequence[Row], results: ItemResults) -> None:
    vectors = _cut(torch.cat(_tensors(rows)), options, keep_scale=not options.normalize)
    bounds = np.cumsum([0, *map(len, rows)]).tolist()
    _put(name, options.dtype, vectors, [slice(*pair) for pair in itertools.pairwise(bounds)], results)


def _add_sparse(options: RunOptions, rows: Sequence[Row], results: ItemResults) -> None:
    ends = np.cumsum([len(ids) for ids, _ in rows])
    joined = torch.cat([weights for _, weights in rows])
    ids = torch.cat([ids for ids, _ in rows]).cpu().numpy().astype("<i4", copy=False)
    weights = (joined.half() if options.dtype == "float16" else joined.float()).cpu().numpy()
    for item, (answer, start, stop) in enumerate(zip(list(results), [0, *ends.tolist()], ends.tolist(), strict=False)):
        if weights.dtype == np.float16 and not np.isfinite(weights[start:stop]).all():
            results[item] = _too_large("request float32")
        elif isinstance(answer, ItemResult):
            answer.arrays["sparse.indices"] = ids[start:stop]
            answer.arrays["sparse.values"] = weights[start:stop]


def side_scores(options: RunOptions, query: Mapping[str, Row], documents: Rows, *, per_row: bool) -> ItemResults:
    """Return the score of each document for the query: the score by the requested output, or the weighted mean of the
    scores by several outputs. If the client requested relevance, scores are mapped to 0 .. 1.

    dense: the cosine. sparse: the sum of the weights' products over common ids. multivector: MaxSim, the sum over the
    query's vectors of the best product with a vector of the document; with `per_row`, the mean over the query's
    vectors, as in BGE-M3.
    """
    requested_weights = options.parameters.get("score_weights") or {"dense": 0.4, "sparse": 0.2, "colbert": 0.4}
    weights = {
        name: float(requested_weights.get("colbert" if name == "multivector" else name, 0.0))
        for name in options.outputs
    }
    if len(weights) == 1:
        weights = dict.fromkeys(weights, 1.0)
    total: Tensor | None = None
    for name, weight in weights.items():
        score = _SIDES[name](query[name], documents[name])
        if name == "multivector" and per_row:
            score = score / max(1, len(query[name]))
        total = score * weight if total is None else total + score * weight
    assert total is not None
    scores = total / sum(weights.values())
    if is_relevance(options):
        scores = scores.double()
        if "sparse" in weights:
            # a sum of products has no upper bound, so x / (1 + |x|) maps it to -1 to 1
            scores = scores / (1 + scores.abs())
        elif "multivector" in weights and not per_row:
            scores = scores / max(1, len(query["multivector"]))
        # scores are limited to 0..1, because rounding in float32 may raise a cosine above 1
        scores = ((1 + scores) / 2).clamp(0, 1)
    return _scores(scores)


def is_relevance(options: RunOptions) -> bool:
    """Return whether the client requested scores from 0 to 1 that grow with relevance (the parameter `relevance`)."""
    return bool(options.parameters.get("relevance"))


def _dense_scores(query: Tensor, documents: Sequence[Row]) -> Tensor:
    return F.normalize(torch.stack(list(documents)), dim=1, eps=_EPSILON) @ F.normalize(query, dim=0, eps=_EPSILON)


def _sparse_scores(query: Row, documents: Sequence[Row]) -> Tensor:
    device = documents[0][0].device
    # a query that was looked up in a `TokenTable` has its ids and weights on the host
    ids, weights = (part.to(device) for part in query)
    counts = torch.tensor([len(names) for names, _ in documents], device=device)
    names, values = torch.cat([names for names, _ in documents]), torch.cat([values for _, values in documents])
    if not len(ids):
        return torch.zeros(len(documents), device=ids.device)
    place = torch.searchsorted(ids, names).clamp_max(len(ids) - 1)
    products = torch.where(ids[place] == names, values * weights[place], 0.0)
    owner = torch.repeat_interleave(torch.arange(len(documents), device=ids.device), counts)
    return torch.zeros(len(documents), device=ids.device).index_add_(0, owner, products)


def _unit_rows(row: Row) -> Tensor:
    """Return token vectors, normalised to length 1. Vectors that a client sent are returned unchanged."""
    return row.vectors if isinstance(row, ClientVectors) else F.normalize(row, dim=1, eps=_EPSILON)


def _late_scores(query: Row, documents: Sequence[Row]) -> Tensor:
    unit = _unit_rows(query)
    if not len(unit):
        return unit.new_zeros(len(documents))
    # on CUDA all documents run at once: a kernel for each document would take longer to start than to run
    if unit.device.type == "cuda":
        return _late_scores_at_once(unit, documents)
    scores = []
    # on other devices documents run one by one: padding would give each document the memory of the longest document
    for document in documents:
        best = unit @ _unit_rows(document).T
        scores.append(best.amax(1).sum() if best.shape[1] else best.new_zeros(()))
    return torch.stack(scores)


def _late_scores_at_once(query: Tensor, documents: Sequence[Row]) -> Tensor:
    """Return the scores of `_late_scores`, by one matrix product for all documents. `query`: [rows, width], normalised.
    `segment_reduce` gets offsets, because torch would check lengths on the host and wait for the device meanwhile.
    """
    lengths = np.array([len(document) for document in documents], np.int64)
    if any(isinstance(document, ClientVectors) for document in documents):
        rows = torch.cat([_unit_rows(document) for document in documents])
    else:
        rows = F.normalize(torch.cat(list(documents)), dim=1, eps=_EPSILON)
    products = rows @ query.T
    offsets = to_device(np.concatenate([[0], np.cumsum(lengths)]), query.device)
    best = torch.segment_reduce(products, "max", offsets=offsets)
    return torch.where(to_device(lengths > 0, query.device), best.sum(1), 0.0)


_SIDES = {"dense": _dense_scores, "sparse": _sparse_scores, "multivector": _late_scores}


def scored(score: float) -> ItemResult | SIEError:
    return ItemResult(score=score) if math.isfinite(score) else not_finite()


def _scores(values: Tensor) -> ItemResults:
    return list(map(scored, values.cpu().double().tolist()))


def class_scores(options: RunOptions, logits: Sequence[Row], activation: str) -> ItemResults:
    """Return the score of each pair from its float32 logits. For the `activation` "softmax", the score is the
    probability of the last label; for "sigmoid", the sigmoid of the only logit; for "identity", the logit, or its
    sigmoid if the client requested relevance.

    If the request sets `raw_scores`, the score is the logit for "sigmoid" and "identity", and the log-odds of the
    probability for "softmax": with two classes, the second logit minus the first, as in Text Embeddings Inference and
    Infinity.
    """
    # scores are computed in float64: in float32, different large logits would have equal scores
    stacked = torch.stack(list(logits)).double()
    if activation == "softmax":
        stacked = stacked[:, -1:] - stacked[:, :-1].logsumexp(1, keepdim=True)
    is_probability = activation != "identity" or is_relevance(options)
    if is_probability and not options.parameters.get("raw_scores"):
        stacked = torch.sigmoid(stacked)
    return _scores(stacked[:, -1])


def classes(options: RunOptions, logits: Sequence[Row], names: Sequence[str], activation: str) -> ItemResults:
    """Return for each text the classes that the labels and the threshold of the request select, best first, from
    float32 logits [classes]. If the request sets `raw_scores`, a score is the logit. Source: transformers'
    TextClassificationPipeline.
    """
    if unknown := [label for label in options.labels if label not in names]:
        listed = ", ".join(names[:20]) + (", .." if len(names) > 20 else "")
        message = f"{len(unknown)} of the labels are no classes of the model, whose classes are {listed}"
        raise InvalidInput.at("labels", message, reason="labels")
    scores = torch.stack(list(logits))
    if activation != "identity" and not options.parameters.get("raw_scores"):
        scores = torch.sigmoid(scores) if activation == "sigmoid" else torch.softmax(scores, 1)
    least = -math.inf if options.threshold is None else options.threshold
    results: ItemResults = []
    for row in scores.cpu().double().tolist():
        ranked = ranked_classes(names, row, least)
        chosen = [own for own in ranked if not options.labels or own["label"] in options.labels]
        results.append(ItemResult(data={"classifications": chosen}))
    return results


def answer_scores(options: RunOptions, logits: Sequence[Row], *, difference: bool) -> ItemResults:
    """Return scores from float32 logits [no, yes]; for [yes] alone, the logit of no is 0. A score is the logit of yes
    minus the logit of no if the request sets `raw_scores`, or if `difference` is set and the client did not request
    relevance. In all other cases, a score is the softmax probability of yes.
    """
    # scores are computed in float64: in float32, different large logits would have equal scores
    stacked = torch.stack(list(logits)).double()
    gaps = stacked[:, 1] - stacked[:, 0] if stacked.shape[1] > 1 else stacked[:, 0]
    is_raw = options.parameters.get("raw_scores") or (difference and not is_relevance(options))
    return _scores(gaps if is_raw else torch.sigmoid(gaps))


def zero_shot(options: RunOptions, logits: Sequence[Row], entailment: int, contradiction: int) -> ItemResults:
    """Return for each text the labels whose probability reaches the threshold, best first. `logits`: [classes] for each
    pair of a text and a label's hypothesis; the labels of the request come before those of its schema. The answers to
    the schema are returned in `data`.

    If exactly one of several labels applies, the score is the softmax of the entailment logits over the labels. If
    several may apply, or there is only one label, the score is the softmax of contradiction and entailment, for each
    label separately. Source: transformers' zero-shot classification pipeline.
    """
    parts = decisions_of(parts_of(options.parameters))
    sizes = [len(part.labels) for part in parts]
    own = options.labels[: len(options.labels) - sum(sizes)]
    is_many = [bool(options.parameters.get("multi_label")), *(part.is_many for part in parts)]
    stacked = torch.stack(list(logits)).unflatten(0, (-1, len(options.labels)))
    shares = [
        torch.softmax(group[..., [contradiction, entailment]], -1)[..., 1]
        if several or group.shape[1] == 1
        else torch.softmax(group[..., entailment], -1)
        for group, several in zip(stacked.split([len(own), *sizes], 1), is_many, strict=True)
    ]
    by_label: Mapping[str, float] = options.parameters.get("label_thresholds", {})
    least = options.threshold or 0.0
    results: ItemResults = []
    for row in torch.cat(shares, 1).cpu().double().tolist():
        rows = iter(row)
        classifications = ranked_classes(own, itertools.islice(rows, len(own)), least, by_label)
        if not parts:
            results.append(ItemResult(data={"classifications": classifications}))
            continue
        scores = [dict(zip(part.labels, itertools.islice(rows, len(part.labels)), strict=True)) for part in parts]
        answer = answer_parts(parts, scores, by_label)
        classifications += answer.classifications
        results.append(ItemResult(data={"classifications": classifications, "data": answer.data}))
    return results
