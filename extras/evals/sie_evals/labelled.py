"""Texts with known entities, relations, classes or personal data, and the counts from which metrics are computed.

FactTask ──► facts of a source ──► for each text: numerator and denominator of each metric ──► quality.Measurement
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

FactKind = Literal["entities", "relations", "classes", "redaction"]
# for the kinds "entities", "redaction": (start, end, label); for "relations": (head, relation, tail); for "classes":
# (class,)
Fact = tuple[int | str, ...]
# metric -> numerators and denominators, with one number for each text. A metric over several texts is the sum of their
# numerators divided by the sum of their denominators
Ratios = Mapping[str, tuple[Sequence[float], Sequence[float]]]
LEAK = "leak"


class KindSpan(NamedTuple):
    """Span of a text in code points, `end` exclusive, and the kind of the fact in this span."""

    start: int
    end: int
    kind: str


@dataclass(frozen=True)
class LabelledText:
    """Text with all facts that a model should find in it. `mentions`: entities in the text; a model that finds
    relations receives them together with the text.
    """

    text: str
    facts: Sequence[Fact]
    mentions: Sequence[KindSpan] = ()


@dataclass(frozen=True)
class FactTask:
    """Task to find facts in texts. `labels`: kinds of facts that a source must find, such as `iban`. A fact itself may
    have a narrower kind, such as `iban, lower case`; the report has a row for each of these kinds.
    """

    name: str
    kind: FactKind
    labels: Sequence[str]
    texts: Sequence[LabelledText]


_PLACE_OF_KIND: Mapping[FactKind, int] = {"entities": 2, "relations": 1, "classes": 0, "redaction": 2}


def ratios(task: FactTask, answers: Sequence[Sequence[Fact]]) -> tuple[Ratios, dict[str, Ratios]]:
    """Return the ratios over all facts, and a map from `KIND (NUMBER OF FACTS)` to the ratios over facts of this kind.

    `answers`: the facts that a source found in each text. A redaction is measured in letters and digits: precision is
    the share of replaced characters that are personal, recall the share of personal characters that are replaced. LEAK
    is the share of facts that are not replaced completely. In other tasks, a fact is right if it equals a true fact.
    """
    place = _PLACE_OF_KIND[task.kind]
    texts = [text.text for text in task.texts]
    truth = [text.facts for text in task.texts]
    counts = Counter(fact[place] for facts in truth for fact in facts)
    by_kind: dict[str, Ratios] = {}
    for kind, count in sorted(counts.items()):
        own = [[fact for fact in facts if fact[place] == kind] for facts in truth]
        if task.kind == "redaction":
            every = _redaction(texts, own, answers)
            by_kind[f"{kind} ({count})"] = {metric: every[metric] for metric in (LEAK, "recall")}
        else:
            answered = [[fact for fact in facts if fact[place] == kind] for facts in answers]
            by_kind[f"{kind} ({count})"] = _exact(own, answered)
    return _redaction(texts, truth, answers) if task.kind == "redaction" else _exact(truth, answers), by_kind


def _exact(truth: Sequence[Sequence[Fact]], answers: Sequence[Sequence[Fact]]) -> Ratios:
    pairs = [({*facts}, {*own}) for facts, own in zip(truth, answers, strict=True)]
    return _ratios([(len(facts & own), len(facts), len(own)) for facts, own in pairs])


def _redaction(texts: Sequence[str], truth: Sequence[Sequence[Fact]], answers: Sequence[Sequence[Fact]]) -> Ratios:
    counts, leaks = [], []
    for text, facts, spans in zip(texts, truth, answers, strict=True):
        replaced = _characters(text, spans)
        parts = [_characters(text, [fact]) for fact in facts]
        personal = set[int]().union(*parts)
        counts.append((len(personal & replaced), len(personal), len(replaced)))
        leaks.append(sum(not part <= replaced for part in parts))
    return {LEAK: (leaks, list(map(len, truth))), **_ratios(counts)}


def _ratios(counts: Sequence[tuple[int, int, int]]) -> Ratios:
    """Return F1, precision and recall. `counts`: three numbers for each text: the facts or characters that are in both
    the task and the answer, all those in the task, and all those in the answer.
    """
    right, truth, answers = map(list, zip(*counts, strict=True))
    both = list(map(sum, zip(truth, answers, strict=True)))
    return {"f1": ([2 * count for count in right], both), "precision": (right, answers), "recall": (right, truth)}


def _characters(text: str, facts: Iterable[Fact]) -> set[int]:
    """Return the indices of the letters and digits within the facts of a text; other characters reveal no data."""
    return {
        place for start, end, *_ in facts for place in range(int(start), int(end)) if text[place : place + 1].isalnum()
    }
