"""Answers to a schema: the JSON values for an input, from the model's results for each part of the schema.

    decision ──► score of each label ──► the best label, labels above a threshold, true or false ─┐
    record   ──► spans of each property ──► texts, numbers in their range, choices ───────────────┴─► data, evidence

A decision is a property whose value is chosen among labels. A record is an object whose properties are read from the
text. The evidence of a value is a row in `entities`, whose label is the path of the value in `data`. The evidence of a
label or a choice is in rows of `classifications`, whose label is the path, a dot, and the label or choice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypedDict

from sie_contracts.models.output_schemas import Decision, Scalar, SchemaPart, TextField, TextRecord

# default threshold: lowest score at which a boolean is true, a label applies (if several labels may apply), or a span
# of a text is a value
LEAST = 0.5
_MAX_DIGITS = 64  # a text of more characters than this is not read as a number
_MAX_WHOLE = 1 << 53
_NUMBER = re.compile(r"(?:(?<!\w)[-+\u2212])?\d[\d.,'\u2019\u00a0\u202f ]*")
_AFTER, _BEFORE = re.compile(r"[.,'\u2019]?\d"), re.compile(r"\d[.,'\u2019]?$|(?<!\w)[-\u2212]$")
# A comma, dot, space or apostrophe between groups of three digits separates thousands; other dots and commas mark
# decimals. Exceptions: a single dot (`1.299`), and a single comma after a leading 0 (`0,299`), mark decimals.
_POINT = re.compile(r"\d+(\.\d+)?|(?!0)\d{1,3}(,\d{3})+(\.\d+)?")
_COMMA = re.compile(r"\d+,\d+|\d{1,3}(\.\d{3}){2,}(,\d+)?|\d{1,3}\.\d{3},\d+")
_SPACED = re.compile(r"\d{1,3}(['\u2019\u00a0\u202f ]\d{3})+([.,]\d+)?")


class FieldSpan(TypedDict):
    """Candidate for the value of a property: a span of the text, or a choice, whose `start` and `end` are None."""

    text: str
    score: float
    start: int | None
    end: int | None


FieldSpans = Mapping[str, Sequence[FieldSpan]]


@dataclass
class SchemaAnswer:
    """Answer to a schema for one input: its values in `data`, their evidence in `entities` and `classifications`."""

    data: dict[str, Any] = field(default_factory=dict)
    entities: list[dict[str, Any]] = field(default_factory=list)
    classifications: list[dict[str, Any]] = field(default_factory=list)

    def decide(self, decision: Decision, scores: Mapping[str, float], thresholds: Mapping[str, float]) -> None:
        """Add the answer to a decision. `scores`: the score of each label; empty if the text cannot be scored.
        `thresholds`: path of a decision, joined by dots -> lowest score that the request accepts.
        """
        *above, name = decision.path
        owner = self.data
        for key in above:
            owner = owner.setdefault(key, {})
        if not scores:
            if decision.is_many:
                owner[name] = []
            return
        path = ".".join(decision.path)
        shares = [scores[label] for label in decision.labels]
        if decision.is_boolean:
            shares.append(1.0 - shares[0])
        self.classifications += ranked_classes(decision.classes, shares)
        least = thresholds.get(path, LEAST)
        if decision.is_many:
            owner[name] = [value for value, score in zip(decision.values, shares, strict=True) if score >= least]
        elif decision.is_boolean:
            owner[name] = shares[0] >= least
        else:
            owner[name] = decision.values[max(range(len(shares)), key=shares.__getitem__)]

    def read(self, record: TextRecord, objects: Sequence[FieldSpans]) -> None:
        """Add the values of a record. `objects`: for each object the candidates of its properties, best first."""
        if not record.path:
            self.data.update(self._values(record, objects[0] if objects else {}, ""))
            return
        [name] = record.path
        if record.is_many:
            self.data[name] = [self._values(record, spans, f"{name}[{index}].") for index, spans in enumerate(objects)]
        elif objects:
            self.data[name] = self._values(record, objects[0], f"{name}.")
        elif record.is_nullable:
            self.data[name] = None

    def _values(self, record: TextRecord, spans: FieldSpans, prefix: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for text_field in record.fields:
            candidates = spans.get(text_field.name, ())
            path = f"{prefix}{text_field.name}"
            if text_field.is_list:
                ordered = sorted(candidates, key=lambda span: (span["start"] or 0, span["end"] or 0))
                values[text_field.name] = [
                    self._value(text_field, span, f"{path}[{index}]") for index, span in enumerate(ordered)
                ]
            elif candidates:
                values[text_field.name] = self._value(text_field, candidates[0], path)
            elif text_field.is_nullable:
                values[text_field.name] = None
        return values

    def _value(self, text_field: TextField, span: FieldSpan, path: str) -> Scalar:
        value = value_of(text_field, span["text"])
        assert value is not None, "candidates without a value are left out"
        if text_field.kind == "choice":
            name = str(value).lower() if isinstance(value, bool) else span["text"]
            self.classifications.append({"label": f"{path}.{name}", "score": span["score"]})
        else:
            self.entities.append({**span, "label": path})
        return value


def ranked_classes(
    labels: Iterable[str],
    scores: Iterable[float],
    least: float = -math.inf,
    by_label: Mapping[str, float] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Return the labels that score at least `by_label[label]` (default: `least`), best score first."""
    rows = [
        {"label": label, "score": score}
        for label, score in zip(labels, scores, strict=True)
        if score >= by_label.get(label, least)
    ]
    return sorted(rows, key=lambda row: -row["score"])


def value_of(text_field: TextField, text: str) -> Scalar | None:
    """Return the value of a property that `text` expresses; None if `text` is not a valid value of the property."""
    if text_field.kind == "string":
        return text
    if text_field.kind == "choice":
        return text_field.values[text_field.labels.index(text)]
    number = number_in(text)
    if number is None or not _is_in_range(text_field, number):
        return None
    if text_field.kind == "number":
        return number
    return int(number) if number.is_integer() and abs(number) < _MAX_WHOLE else None


def number_in(text: str) -> float | None:
    """Return the number in a text that has exactly one, such as `1,299.50 EUR` or `1.299,50`, else None. The dot of
    `1.299` is a decimal point. The comma of `1,299` groups thousands. The comma of `0,299` is a decimal comma.
    """
    matches = _NUMBER.findall(text) if len(text) <= _MAX_DIGITS else []
    if len(matches) != 1:
        return None
    written = matches[0].rstrip(".,'\u2019\u00a0\u202f ")
    sign = -1.0 if written[0] in "-\u2212" else 1.0
    digits = written.lstrip("-+\u2212")
    if _POINT.fullmatch(digits):
        return sign * float(digits.replace(",", ""))
    if _COMMA.fullmatch(digits):
        return sign * float(digits.replace(".", "").replace(",", "."))
    if _SPACED.fullmatch(digits):
        return sign * float(re.sub(r"['\u2019\u00a0\u202f ]", "", digits).replace(",", "."))
    return None


def is_cut(text_field: TextField, text: str, start: int, end: int) -> bool:
    """Return whether a span of the text begins or ends inside a number, which would change its value."""
    if text_field.kind not in ("number", "integer"):
        return False
    return bool(_AFTER.match(text, end) or _BEFORE.search(text[max(0, start - 2) : start]))


def _is_in_range(text_field: TextField, number: float) -> bool:
    return (
        (text_field.minimum is None or number >= text_field.minimum)
        and (text_field.maximum is None or number <= text_field.maximum)
        and (text_field.above is None or number > text_field.above)
        and (text_field.below is None or number < text_field.below)
    )


def answer_parts(parts: Sequence[SchemaPart], results: Sequence[Any], thresholds: Mapping[str, float]) -> SchemaAnswer:
    """Return the answer to all parts. `results`: the scores of a decision by label, or the objects of a record."""
    answer = SchemaAnswer()
    for part, result in zip(parts, results, strict=True):
        if isinstance(part, Decision):
            answer.decide(part, result, thresholds)
        else:
            answer.read(part, result)
    return answer
