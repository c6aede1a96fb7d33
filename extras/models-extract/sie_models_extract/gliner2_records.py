"""Records of a schema, which GLiNER2 fills from a text. A record is an object with named properties. This module builds
the words of a record's choices, which come before the text, and reads the candidates of each property from the logits.

logits [objects, properties, words, widths] ──► choices: for each choice, the score of its word before the text
                                            └─► spans of the text that reach the threshold, best first, without overlaps
objects of all windows ──► an object that is in two windows is kept once
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sie_adapter.engine.schema_answers import FieldSpan, is_cut, value_of
from sie_adapter.families.extraction import scores_not_finite
from sie_contracts.errors import SIEError
from sie_contracts.models.output_schemas import TextField, TextRecord
from sie_models_extract.extraction import TextWindow, own_ranges

_CANDIDATES = 256  # largest number of spans, best first, that are compared for one property of one object

FieldCandidates = dict[str, list[FieldSpan]]


class WordPlaces(Protocol):
    """Offsets of the words of a text, in characters."""

    @property
    def starts(self) -> list[int]: ...
    @property
    def ends(self) -> list[int]: ...


def words_of_choices(processor: Any, record: TextRecord) -> tuple[list[str], list[list[int]]]:
    """Return the words that the package puts before a text for a record's choices, and for each property the positions
    of its choices among these words.
    """
    structure = {
        text_field.name: {"value": "", "choices": list(text_field.labels)} if text_field.labels else ""
        for text_field in record.fields
    }
    words: list[str] = processor._build_classification_prefix({"json_structures": [{record.name: structure}]})
    positions: list[list[int]] = []
    end = 2  # index of the current property in the words ( record: property ( choice | choice ) , property ( choice ) )
    for text_field in record.fields:
        start = end + 2
        positions.append(list(range(start, start + 2 * len(text_field.labels), 2)))
        if text_field.labels:
            end = start + 2 * len(text_field.labels) + 1
    return words, positions


def window_objects(
    logits: Tensor | None,
    text: str,
    record: TextRecord,
    choices: Sequence[Sequence[int]],
    before: int,
    words: WordPlaces,
    at: TextWindow,
    thresholds: Sequence[float],
) -> list[FieldCandidates] | SIEError:
    """Return the candidates of each object in one window. `logits`: [objects, properties, words, widths], None if the
    model predicts no object. The first `before` words are the choices of the record. `choices`: for each property the
    positions of its choices. Spans beyond the window's words are ignored: the package may add a full stop there.
    """
    if logits is None:
        return []
    if bool((torch.isnan(logits) | torch.isposinf(logits)).any()):
        return scores_not_finite()
    scores = torch.sigmoid(logits.float()).cpu()
    size = at.stop - at.start
    lasts = torch.arange(size)[:, None] + torch.arange(scores.shape[-1])
    spans = torch.where(lasts < size, scores[:, :, before : before + size], -1.0)
    objects = []
    for own, own_spans in zip(scores, spans, strict=True):
        candidates = {
            text_field.name: _chosen(text_field, own[index, list(choices[index]), 0].tolist(), thresholds[index])
            if text_field.labels
            else _spans(text_field, own_spans[index], text, words, at, thresholds[index])
            for index, text_field in enumerate(record.fields)
        }
        # a record without a path keeps all values: its only object has values of all windows (`joined_objects`)
        if record.path:
            for text_field in record.fields:
                candidates[text_field.name] = candidates[text_field.name][: None if text_field.is_list else 1]
        if any(candidates.values()):
            objects.append(candidates)
    return objects


def _chosen(text_field: TextField, scores: list[float], least: float) -> list[FieldSpan]:
    """Return the choices whose score reaches the threshold, best first. For a property that is a list, the choices are
    in the order of the schema.
    """
    rows: list[FieldSpan] = [
        {"text": label, "score": score, "start": None, "end": None}
        for label, score in zip(text_field.labels, scores, strict=True)
        if score >= least
    ]
    return rows if text_field.is_list else sorted(rows, key=lambda row: -row["score"])


def _spans(
    text_field: TextField, scores: Tensor, text: str, words: WordPlaces, at: TextWindow, least: float
) -> list[FieldSpan]:
    places = (scores >= max(least, 0.0)).nonzero()
    values = scores[tuple(places.T)].double()
    rows: list[FieldSpan] = []
    for index in values.sort(descending=True, stable=True).indices[:_CANDIDATES].tolist():
        first, width = places[index].tolist()
        start, end = words.starts[at.start + first], words.ends[at.start + first + width]
        if value_of(text_field, text[start:end]) is not None and not is_cut(text_field, text, start, end):
            rows.append({"text": text[start:end], "score": float(values[index]), "start": start, "end": end})
    return _without_overlaps(rows)


def _without_overlaps(rows: Sequence[FieldSpan]) -> list[FieldSpan]:
    chosen: list[FieldSpan] = []
    for row in rows:
        if all(_begin(row) >= (own["end"] or 0) or (row["end"] or 0) <= _begin(own) for own in chosen):
            chosen.append(row)
    return chosen


def _begin(span: FieldSpan) -> int:
    return span["start"] or 0


def joined_objects(
    record: TextRecord, words: WordPlaces, by_window: Mapping[TextWindow, Sequence[FieldCandidates]]
) -> list[FieldCandidates]:
    """Return the objects of a text in the order of its windows.

    A record without a path has a single object. Its values are those of the first object of each window. A value
    without offsets in the text, such as a choice, is taken from the first window only.
    """
    order = sorted(by_window, key=lambda at: at.start)
    starts = [0, *(words.starts[begin] for begin, _ in own_ranges(order)[1:])]
    stops = [*starts[1:], math.inf]
    windows = [(by_window[at], start, stop) for at, start, stop in zip(order, starts, stops, strict=False)]
    if record.path:
        return [
            candidates
            for objects, start, stop in windows
            for candidates in objects
            if start <= _first(candidates) < stop
        ]
    joined = {
        text_field.name: _without_overlaps(
            sorted(
                (
                    row
                    for objects, start, stop in windows
                    for candidates in objects[:1]
                    for row in candidates[text_field.name]
                    if start <= _begin(row) < stop
                ),
                key=lambda row: -row["score"],
            )
        )
        for text_field in record.fields
    }
    return [joined]


def _first(candidates: FieldCandidates) -> int:
    """Return the index of an object's first character; 0 without spans, so that the first window has the object."""
    return min((row["start"] for rows in candidates.values() for row in rows if row["start"] is not None), default=0)
