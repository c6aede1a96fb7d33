"""GLiNER with relations (GLiNER-relex), by the package `gliner`: entities of the types in a request, and the relations
between them that `relation_labels` name.

    scores of the spans ──► at most _CANDIDATES spans of a window ──► pairs that the adjacency layer relates ──► scores
    of the relation labels ──► relations whose head and tail are entities of the result

The package's own `inference` is not called, for the reasons in gliner.py and for two more. Its relations refer to
entities by index, and the indices are wrong after overlapping entities were removed. It scores all pairs of spans above
the threshold, so memory grows with the square of the number of spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sie_adapter.engine.device import Compute
from sie_adapter.families.extraction import ExtractOptions, Result, scores_not_finite
from sie_contracts.errors import SIEError
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_models_extract.extraction import TextWindow
from sie_models_extract.gliner import GlinerModel, GlinerRequest, GlinerWords, WindowResult
from sie_models_extract.gliner2_relations import WordPair, relations_of_text

# Limit of the spans of a window that may be head or tail of a relation; the spans with the best scores are used. Each
# pair of these spans has a vector.
_CANDIDATES = 64
_RELATIONS = 1024  # limit of relations per window; the best relations are kept
# Limit for the windows of a pass, by type of device. A window with _CANDIDATES spans has 4,032 pairs, which need about
# 150 MB at a width of 1,024.
_WINDOWS_PER_PASS = {"cpu": 4}
_WINDOWS_PER_PASS_ELSEWHERE = 16


class GlinerRelationModel(GlinerModel):
    """Loaded GLiNER with relations. A result has the entities of GlinerModel, and `relations` [{head, tail, relation,
    score}], best first. `relations` is empty if the request names no labels for relations.

    A span can be head or tail if its best score is above the threshold, if it is among the _CANDIDATES best spans of
    its window, and if the result has an entity with the same words. A result has a relation if its score is above
    `relation_threshold` (default: the threshold of entities), and if it is among the _RELATIONS best of its window. In
    a long text, a relation is found only if one window contains its head and its tail.
    """

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        super().__init__(folder, entry, load, compute)
        from gliner.decoding.decoder import SpanDecoder

        self._decoder = SpanDecoder(self._gliner.config)  # only for entities; `_related` decodes the relations
        self._gliner.model.select_span_target_embedding = _selected

    def _kinds(self, options: ExtractOptions) -> dict[str, list[str]]:
        relations = dict.fromkeys(options.parameters.get("relation_labels", ()))
        return {**super()._kinds(options), "relation_types": list(relations)}

    def _prompt(self, options: ExtractOptions) -> tuple[list[str], dict[int, int]]:
        kinds, config = self._kinds(options), self._gliner.config
        entities, relations = kinds["entity_types"], kinds["relation_types"]
        words = self._processor.prepare_inputs([[]], entities, relations=relations)[0][0]
        return words, {config.class_token_index: len(entities), config.rel_token_index: len(relations)}

    def _passes(self, lengths: Sequence[int], options: ExtractOptions) -> list[list[int]]:
        chosen = super()._passes(lengths, options)
        if not self._kinds(options)["relation_types"]:
            return chosen
        most = _WINDOWS_PER_PASS.get(self._device.type, _WINDOWS_PER_PASS_ELSEWHERE)
        return [part[begin : begin + most] for part in chosen for begin in range(0, len(part), most)]

    def _request(self, options: ExtractOptions, labels: list[str]) -> GlinerRequest:
        request = super()._request(options, labels)
        relations = tuple(self._kinds(options)["relation_types"])
        least = options.parameters.get("relation_threshold", request.threshold)
        return replace(request, relation_labels=relations, relation_threshold=float(least))

    def _read(self, words: list[list[str]], batch: Any, request: GlinerRequest) -> list[WindowResult | SIEError]:
        from gliner.modeling.base import UniEncoderSpanModel

        inputs, model = self._inputs(batch), self._gliner.model
        if not request.relation_labels:
            return self._window_results(UniEncoderSpanModel.forward(model, **inputs).logits, words, batch, request)
        # use the threshold of spans for pairs too, as the package does by default
        output = model(**inputs, threshold=request.threshold, adjacency_threshold=request.threshold)
        results = self._window_results(output.logits, words, batch, request)
        places, _ = _candidates(output.logits, inputs["span_mask"], request.threshold)
        scores = torch.sigmoid(output.rel_logits.float()).masked_fill(~output.rel_mask[..., None], 0.0)
        rows = zip(results, places.cpu(), output.rel_idx.cpu(), scores.cpu(), strict=True)
        widths = output.logits.shape[2]
        return [_related(result, own, pairs, of_pairs, widths, request) for result, own, pairs, of_pairs in rows]

    def _result(
        self,
        text: str,
        words: GlinerWords,
        parts: list[tuple[TextWindow, WindowResult | SIEError]],
        request: GlinerRequest,
    ) -> Result:
        result = super()._result(text, words, parts, request)
        if isinstance(result, SIEError):
            return result
        ranges = {(entity["start"], entity["end"]) for entity in result["entities"]}
        pairs = [
            pair
            for window, part in parts
            if isinstance(part, WindowResult)
            for pair in part.moved(window.start).relations
            if ranges.issuperset((words.range(*pair.head), words.range(*pair.tail)))
        ]
        return {**result, "relations": relations_of_text(text, words, pairs)}


def _candidates(scores: Tensor, mask: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the indices (into [words, widths], flattened) of spans that may be head or tail, in the order of the text,
    and a mask that is False for padding indices. Indices and mask are [windows, spans]. `scores`: [windows, words,
    widths, labels]. `mask` is 0 for a span that ends after the window.
    """
    best = torch.sigmoid(scores).amax(-1).flatten(1).masked_fill(~mask.flatten(1).bool(), -1.0)
    top = best.argsort(dim=1, descending=True, stable=True)[:, :_CANDIDATES]
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter(1, top, best.gather(1, top) > threshold)
    counts = chosen.sum(1, keepdim=True)
    # at least one column, because the package's attention layers fail with none
    columns = max(1, int(counts.max()))
    places = chosen.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :columns]
    return places, torch.arange(columns, device=places.device) < counts


def _selected(
    vectors: Tensor, scores: Tensor, mask: Tensor, labels: Tensor | None = None, threshold: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Return the vectors of the spans that `_candidates` selects, [windows, spans, width], and the mask of
    `_candidates`. This function replaces `select_span_target_embedding`, which does not limit the number of spans.
    """
    places, counting = _candidates(scores, mask, threshold)
    flat = vectors.flatten(1, 2)
    chosen = flat.gather(1, places[..., None].expand(-1, -1, flat.shape[-1]))
    return chosen * counting[..., None], counting.long()


def _related(
    result: WindowResult | SIEError, places: Tensor, pairs: Tensor, scores: Tensor, widths: int, request: GlinerRequest
) -> WindowResult | SIEError:
    """Return the result of a window with its relations. `places`: the indices from `_candidates`. `pairs`: positions of
    head and tail in `places`, [pairs, 2]. `scores`: [pairs, relation labels].
    """
    if isinstance(result, SIEError):
        return result
    if not bool(torch.isfinite(scores).all()):
        return scores_not_finite()
    flat = scores.flatten()
    ranked = flat.argsort(descending=True, stable=True)[:_RELATIONS].tolist()
    spans = {(first, last) for first, last, _, _ in result.spans}
    relations: list[WordPair] = []
    for index in ranked:
        if float(flat[index]) <= request.relation_threshold:
            break
        pair, label = divmod(index, scores.shape[1])
        head, tail = (divmod(int(places[number]), widths) for number in pairs[pair].tolist())
        ranges = (head[0], sum(head)), (tail[0], sum(tail))
        if spans.issuperset(ranges):
            relations.append(WordPair(*ranges, request.relation_labels[label], float(flat[index])))
    return replace(result, relations=relations)
