"""Tasks of `sie eval` with known entities, relations, classes and personal data, and their metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sie_cli.refusal import CommandRefused
from sie_evals import evaluation, labelled, labelled_tasks, quality, tasks
from sie_evals.labelled import LEAK, Fact, FactKind, FactTask, LabelledText
from sie_evals.outputs import DENSE
from sie_evals.quality import Measurement
from sie_evals.sources import Patterns, Sie
from sie_evals.steps import EvalStep, EvalWork, ResultCache


class Answers(Patterns):
    """A source with fixed answers, one for each text."""

    def __init__(self, answers: Sequence[Sequence[Fact]], identity: Sequence[str] = ()) -> None:
        self.name, self._answers, self.identity, self.asked = "answers", answers, identity, 0

    def facts(self, task: FactTask, texts: Sequence[LabelledText]) -> Sequence[Sequence[Fact]]:
        self.asked += 1
        return self._answers


def task_of(kind: FactKind, *texts: tuple[str, list[Fact]]) -> FactTask:
    return FactTask("mine", kind, ["a", "b"], [LabelledText(*text) for text in texts])


def measured(task: FactTask, answers: Sequence[Sequence[Fact]]) -> Measurement:
    return of_source(task, Answers(answers))


def of_source(task: FactTask, source: Patterns) -> Measurement:
    return quality.measure(task, EvalStep(source, DENSE), EvalWork(ResultCache(Path("/nowhere")), lambda done: None))


def scores_by_kind(measurement: Measurement) -> dict[str, dict[str, float]]:
    return {row.source.removeprefix(f"{measurement.source}, "): row.scores for row in measurement.kinds}


def test_an_entity_is_right_if_its_place_and_its_kind_are() -> None:
    task = task_of("entities", ("Ada in Paris", [(0, 3, "a"), (7, 12, "b")]), ("Bob", [(0, 3, "a")]))
    measurement = measured(task, [[(0, 3, "a"), (7, 12, "a")], [(0, 2, "a")]])
    assert measurement.scores == pytest.approx({"precision": 1 / 3, "recall": 1 / 3, "f1": 1 / 3})
    by_kind = scores_by_kind(measurement)
    assert by_kind["a (2)"] == pytest.approx({"precision": 1 / 3, "recall": 1 / 2, "f1": 2 / 5})
    assert by_kind["b (1)"]["recall"] == 0
    assert math.isnan(by_kind["b (1)"]["precision"]), "nothing of this kind was found"


def test_a_relation_is_right_if_both_ends_and_their_order_are() -> None:
    task = task_of("relations", ("", [("Ada", "a", "Bank"), ("Bob", "b", "Rome")]))
    measurement = measured(task, [[("Ada", "a", "Bank"), ("Rome", "b", "Bob"), ("Ada", "a", "Bank")]])
    assert measurement.scores == pytest.approx({"precision": 1 / 2, "recall": 1 / 2, "f1": 1 / 2})
    assert scores_by_kind(measurement)["b (1)"]["recall"] == 0


def test_a_class_is_right_if_it_is_the_one_of_the_text() -> None:
    task = task_of("classes", ("x", [("a",)]), ("y", [("b",)]), ("z", [("b",)]))
    measurement = measured(task, [[("a",)], [("a",)], [("b",)]])
    assert measurement.scores["f1"] == pytest.approx(2 / 3)
    assert scores_by_kind(measurement)["a (1)"] == pytest.approx({"precision": 1 / 2, "recall": 1, "f1": 2 / 3})


@pytest.mark.parametrize(
    ("spans", "scores"),
    [
        ([(0, 7, "any name")], {"precision": 1, "recall": 1, "f1": 1, LEAK: 0}),
        ([(0, 3, "x"), (4, 7, "y")], {"precision": 1, "recall": 1, "f1": 1, LEAK: 0}),  # the space stays
        ([(0, 6, "x")], {"precision": 1, "recall": 5 / 6, "f1": 10 / 11, LEAK: 1}),
        ([(0, 12, "x")], {"precision": 6 / 10, "recall": 1, "f1": 12 / 16, LEAK: 0}),
        ([], {"precision": math.nan, "recall": 0, "f1": 0, LEAK: 1}),
    ],
)
def test_a_part_leaks_if_a_letter_or_digit_of_it_stays(spans: list[Fact], scores: Mapping[str, float]) -> None:
    task = task_of("redaction", ("Ada Lee paid.", [(0, 7, "person")]))
    measurement = measured(task, [spans])
    assert measurement.scores == pytest.approx(scores, nan_ok=True)
    assert scores_by_kind(measurement) == {
        "person (1)": {name: pytest.approx(scores[name]) for name in ("recall", LEAK)}
    }


def test_answers_are_kept_until_the_evaluation_ends(tmp_path: Path) -> None:
    source = Answers([[(0, 3, "a")]], identity=["of one fingerprint"])
    task = task_of("entities", ("Ada", [(0, 3, "a")]))
    for reused in (0, 1):
        cache = ResultCache(tmp_path)
        measurement = quality.measure(task, EvalStep(source, DENSE), EvalWork(cache, lambda done: None))
        assert measurement.scores["f1"] == 1
        quality.measure(task, EvalStep(source, DENSE), EvalWork(cache, lambda done: None))
        assert (cache.reused_texts, source.asked) == (reused, 1)


SIZES = {"redaction": 1050, "redaction-forms": 2600, "entities": 1050, "entities-ja": 500, "relations": 400}


@pytest.mark.parametrize("name", labelled_tasks.SHIPPED)
def test_a_shipped_task_is_equal_in_each_run_and_its_facts_are_in_its_texts(name: str) -> None:
    task, again = tasks.find(name), tasks.find(name)
    assert isinstance(task, FactTask)
    assert task == again
    assert len(task.texts) == SIZES.get(name, len(task.texts)) >= 400
    for text in task.texts:
        spans = [fact for fact in text.facts if task.kind in ("entities", "redaction")]
        for start, end, *_ in [*spans, *text.mentions]:
            value = text.text[int(start) : int(end)]
            assert value, text
            assert value == value.strip(), text
        assert sorted(spans) == spans, "in order"
        if task.kind == "relations":
            names = {text.text[mention.start : mention.end] for mention in text.mentions}
            assert {name for head, _, tail in text.facts for name in (head, tail)} == names
    labels = {str(fact[labelled._PLACE_OF_KIND[task.kind]]) for text in task.texts for fact in text.facts}
    assert {label.partition(", ")[0] for label in labels} == set(task.labels), "each label has facts"


class Client:
    """A client whose cluster finds the same facts in each text."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any, Any]] = []

    def redact(self, model: str, items: Any, kinds: Any, **params: Any) -> list[dict[str, Any]]:
        self.sent.append(("redact", items, kinds))
        return [{"spans": [{"start": 0, "end": 3, "kind": "a"}]} for _ in items]

    def extract(self, model: str, items: Any, **params: Any) -> Any:
        self.sent.append(("extract", items, params["labels"]))
        slot = {
            "entities": [{"start": 0, "end": 3, "label": "a", "text": "Ada"}],
            "relations": [{"head": "Ada", "relation": "a", "tail": "Bank"}],
            "classifications": [{"label": "b", "score": 0.2}, {"label": "a", "score": 0.7}],
        }
        return [slot for _ in items] if isinstance(items, list) else {**slot, "fingerprint": "1"}


def cluster(**info: Any) -> tuple[Sie, Client]:
    model_info = {"name": "a/b", "outputs": ["entities"], "tasks": ["extract"], "inputs": ["text"], "dims": {}}
    model_info |= {"loaded": True, "needs_labels": True, **info}
    client: Any = Client()
    return Sie("sie", client, "a/b", "http://127.0.0.1", None, model_info), client


FACTS: dict[FactKind, Fact] = {
    "entities": (0, 3, "a"),
    "relations": ("Ada", "a", "Bank"),
    "classes": ("a",),
    "redaction": (0, 3, "a"),
}


@pytest.mark.parametrize("kind", FACTS)
def test_a_cluster_is_asked_with_the_labels_of_the_task(kind: FactKind) -> None:
    source, client = cluster()
    mentions = [labelled.KindSpan(0, 3, "person")] if kind == "relations" else []
    texts = [LabelledText("Ada", [], mentions)]
    assert [list(map(tuple, facts)) for facts in source.facts(FactTask("t", kind, ["a", "b"], texts), texts)] == [
        [FACTS[kind]]
    ]
    item = {"text": "Ada", "metadata": {"entities": [{"start": 0, "end": 3, "label": "person"}]}} if mentions else "Ada"
    assert client.sent[-1] == ("redact" if kind == "redaction" else "extract", [item], ["a", "b"])


def test_a_model_with_labels_of_its_own_is_measured_by_redaction_only() -> None:
    source, _ = cluster(needs_labels=False)
    texts = [LabelledText("Ada", [])]
    with pytest.raises(CommandRefused, match="a/b has fixed labels: the task mine needs a, b"):
        source.facts(task_of("entities", ("Ada", [])), texts)
    assert source.facts(task_of("redaction", ("Ada", [])), texts) == [[(0, 3, "a")]]


def test_a_task_and_a_source_that_do_not_fit_are_refused() -> None:
    source, _ = cluster()
    vectors: Any = SimpleNamespace(name="st")
    task = task_of("entities", ("Ada", []))
    evaluation._check_sources(task, [source], "quality")
    with pytest.raises(CommandRefused, match="-s st has only vectors and scores: use -s sie for the task mine"):
        evaluation._check_sources(task, [vectors], "quality")
    for wrong, kind in (
        (tasks.Texts("t", ["x"]), "perf"),
        (task, "perf"),
        (tasks.Similarity("s", [], [], []), "quality"),
    ):
        with pytest.raises(CommandRefused, match="a/b has neither vectors nor scores"):
            evaluation._check_sources(wrong, [source], kind)  # type: ignore[arg-type]
    with pytest.raises(CommandRefused, match="-s patterns: patterns cannot answer a task of entities"):
        Patterns().facts(task, task.texts)
    with pytest.raises(CommandRefused, match="-s patterns: patterns have neither vectors nor scores"):
        Patterns().scores("a", ["b"])
