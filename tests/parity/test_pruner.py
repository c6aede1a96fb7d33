"""A pruner through the adapter against transformers and torch on the same folder. No public code runs its head, so the
tests compare the score, and the spans that the probabilities of tokens give.
"""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity.checkpoints import MAX_TOKENS
from parity.device import SIXTEEN, require_precision
from parity.score_checkpoints import Asked, Scoring, ScoringEngine, build_head, copied, ragged_documents
from parity.table import ParityTable, Scores, path_of
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from sie_contracts.errors import InvalidInput, ModelLoadFailed
from sie_contracts.wire.messages import Ok

FAMILY = "pruner"
QUERY = "how does the search engine rank a paper"
TEXTS = [*ragged_documents(14, seed=2, longest=30), "  spaces   and\ttabs\nlines ", "😀 Zürich 東京, e\u0301te\u0301!"]
INNER = 24

Entity = dict[str, Any]
Load = Callable[..., Scoring]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pruner_folder(tmp_path_factory.mktemp("pruner") / "model")


def pruner_folder(folder: Path) -> Path:
    """XLM-R with a head whose probabilities lie on both sides of each threshold."""
    build_head(folder, "xlm-roberta", AutoModelForSequenceClassification)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(15)  # most random heads lose too much in bfloat16; this one has a cosine of 0.9995
    head = nn.Sequential(nn.Linear(model.config.hidden_size, INNER), nn.GELU(), nn.Dropout(0.1), nn.Linear(INNER, 1))
    with torch.no_grad():
        inputs = tokenizer([QUERY] * len(TEXTS), TEXTS, padding=True, return_tensors="pt")
        logits = head.eval()(model(**inputs, output_hidden_states=True).hidden_states[-1])[inputs.attention_mask > 0]
        spread = 2.0 / logits.std()
        head[3].weight.mul_(spread)
        head[3].bias.sub_(logits.mean()).mul_(spread).add_(0.5)
    torch.save(head.state_dict(), folder / "best.pt")
    return folder


@pytest.fixture(scope="module")
def load(engine: ScoringEngine, folder: Path) -> Load:
    @functools.cache
    def loaded(output: str = "entities", precision: str = "float32") -> Scoring:
        scoring = engine.load(folder, FAMILY, precision, outputs={output: 0})
        require_precision(scoring.precision, precision)
        return scoring

    return loaded


def pruned(scoring: Scoring, texts: list[str], query: str = QUERY, **parameters: Any) -> list[list[Entity]]:
    return [output["entities"] for output in scoring.found(texts, instruction=query, **parameters)]


def labelled(entities: list[Entity], label: str) -> list[Entity]:
    return [entity for entity in entities if entity["label"] == label]


def expected(folder: Path, texts: list[str]) -> list[tuple[float, list[tuple[int, int, float]]]]:
    """Return the score of the pair for each text, and the place and the probability of each of its tokens."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    state = torch.load(folder / "best.pt", weights_only=True)
    answers = []
    for text in texts:
        inputs = tokenizer([QUERY], [text], return_tensors="pt", return_offsets_mapping=True)
        [places] = inputs.pop("offset_mapping").tolist()
        with torch.no_grad():
            output = model(**inputs, output_hidden_states=True)
            inner = nn.functional.gelu(output.hidden_states[-1][0] @ state["0.weight"].T + state["0.bias"])
            keep = torch.sigmoid(inner @ state["3.weight"].T + state["3.bias"])[:, 0].tolist()
        sides = inputs.sequence_ids(0)
        own = [(*place, share) for place, share, side in zip(places, keep, sides, strict=True) if side == 1]
        reached = [max(end, start) for (_, end, _), (start, _, _) in itertools.pairwise(own)] + [len(text)]
        own = [(start, end, share) for (start, _, share), end in zip(own, reached, strict=bool(own))]
        answers.append((float(torch.sigmoid(output.logits[0, 0])), own))
    return answers


def test_spans_are_the_runs_of_tokens_on_each_side_of_the_thresholds(load: Load, folder: Path) -> None:
    counts = {"highlight": 0, "kept": 0, "pruned": 0}
    for text, entities, (score, tokens) in zip(TEXTS, pruned(load(), TEXTS), expected(folder, TEXTS), strict=True):
        [summary] = labelled(entities, "summary")
        assert entities[0] is summary
        assert (summary["start"], summary["end"]) == (None, None)
        assert summary["score"] == pytest.approx(score, abs=1e-5)
        assert summary["text"] == " ".join(entity["text"] for entity in labelled(entities, "kept"))
        assert [entity["label"] for entity in entities[1:]] == [
            label for label in counts for _ in labelled(entities, label)
        ]
        for label, belongs in (
            ("highlight", lambda keep: keep >= 0.9),
            ("kept", lambda keep: keep >= 0.6),
            ("pruned", lambda keep: keep < 0.6),
        ):
            spans = labelled(entities, label)
            counts[label] += len(spans)
            runs: list[list[tuple[int, int, float]]] = []
            before = False
            for token in tokens:
                if (now := belongs(token[2])) and before:
                    runs[-1].append(token)
                elif now:
                    runs.append([token])
                before = now
            runs = [run for run in runs if text[run[0][0] : run[-1][1]].strip()]
            assert [span["text"] for span in spans] == [text[run[0][0] : run[-1][1]].strip() for run in runs]
            assert all(text[span["start"] : span["end"]] == span["text"] for span in spans)
            means = [sum(keep for *_, keep in run) / len(run) for run in runs]
            assert [span["score"] for span in spans] == pytest.approx(means, abs=1e-5)
    assert min(counts.values()) > 10


def test_every_character_is_kept_or_pruned_and_none_is_both(load: Load) -> None:
    for text, entities in zip(TEXTS, pruned(load(), TEXTS), strict=True):
        kept_places, pruned_places, best = (
            [place for entity in labelled(entities, label) for place in range(entity["start"], entity["end"])]
            for label in ("kept", "pruned", "highlight")
        )
        assert {place for place, character in enumerate(text) if not character.isspace()} <= {
            *kept_places,
            *pruned_places,
        }
        assert {*best} <= {*kept_places}
        assert len({*kept_places} & {*pruned_places}) <= 2  # a character of several tokens may be cut between them


def test_lower_thresholds_keep_and_highlight_more(load: Load) -> None:
    def kept(label: str, **parameters: float) -> int:
        passages = pruned(load(), TEXTS, **parameters)
        return sum(len(entity["text"]) for entities in passages for entity in labelled(entities, label))

    by_prune = [kept("kept", prune_threshold=threshold) for threshold in (0.0, 0.4, 0.6, 0.8, 1.0)]
    assert by_prune == sorted(by_prune, reverse=True)
    assert len({*by_prune}) == 5
    assert by_prune[-1] == 0
    by_highlight = [
        kept("highlight", prune_threshold=0.4, highlight_threshold=threshold) for threshold in (0.0, 0.8, 0.9, 1.0)
    ]
    assert by_highlight == sorted(by_highlight, reverse=True)
    assert by_highlight[0] == kept("kept", prune_threshold=0.4), "nothing that is pruned is highlighted"


def test_the_score_of_a_pair_is_that_of_the_summary(load: Load, folder: Path, table: ParityTable) -> None:
    scoring = load("score")
    differences = np.array(scoring.scores(QUERY, TEXTS)) - [score for score, _ in expected(folder, TEXTS)]
    worst = float(abs(differences).max())
    table.record("pruner score", path_of(scoring.attention), "float32", Scores(worst))
    assert worst <= 1e-5


def test_a_passage_is_pruned_the_same_in_any_company(load: Load) -> None:
    scoring = load()
    requests = [
        Asked(TEXTS[:4], None, {"instruction": QUERY}),
        Asked(TEXTS[4:9], None, {"instruction": "harbour", "prune_threshold": 0.4}),
        Asked(TEXTS[9:], None, {"instruction": "harbour"}),
    ]
    for job, outcomes in zip(requests, scoring.run(requests), strict=True):
        for text, outcome in zip(job.texts, outcomes, strict=True):
            assert isinstance(outcome, Ok)
            assert outcome.data is not None
            [alone] = scoring.found([text], **job.parameters)
            for ours, same in zip(outcome.data["entities"], alone["entities"], strict=True):
                assert {**ours, "score": 0} == {**same, "score": 0}
                assert ours["score"] == pytest.approx(same["score"], abs=1e-5)


def test_a_query_changes_what_is_kept(load: Load) -> None:
    assert pruned(load(), TEXTS) != pruned(load(), TEXTS, "a harbour in winter")


def test_a_long_passage_is_cut_and_its_query_is_not(load: Load) -> None:
    text = " ".join(ragged_documents(40, seed=3))
    scoring = load()
    ((row,),) = scoring.rows([Asked([text], None, {"instruction": QUERY})])
    assert (len(row.ids), row.truncated) == (MAX_TOKENS, True)
    [entities] = pruned(scoring, [text])
    reach = max(entity["end"] or 0 for entity in entities)
    assert 0.2 * len(text) < reach < len(text)
    assert all(text[entity["start"] : entity["end"]] == entity["text"] for entity in entities[1:])


def test_16_bit_weights_keep_nearly_the_same(load: Load) -> None:
    exact, near = (pruned(load("entities", precision), TEXTS) for precision in ("float32", SIXTEEN))
    same = total = 0
    for ours, theirs in zip(near, exact, strict=True):
        places = [
            {place for entity in labelled(some, "kept") for place in range(entity["start"], entity["end"])}
            for some in (ours, theirs)
        ]
        same += len(places[0] & places[1])
        total += len(places[0] | places[1])
    assert same > 0.85 * total > 100


def test_an_extraction_needs_the_query(load: Load) -> None:
    with pytest.raises(InvalidInput) as refused:
        load().found(["paper"])
    assert (refused.value.reason, refused.value.param) == ("instruction_required", "instruction")


class _Opener:
    """A pickle that opens a file for writing when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def test_a_head_of_another_form_is_refused(engine: ScoringEngine, folder: Path, tmp_path: Path) -> None:
    broken = copied(folder, tmp_path / "model")
    good = torch.load(folder / "best.pt", weights_only=True)
    width = good["0.weight"].shape[1]
    for held in (
        {name: tensor for name, tensor in good.items() if name != "0.bias"},
        good | {"5.weight": torch.zeros(1, 1), "5.bias": torch.zeros(1)},
        good | {"0.weight": torch.zeros(INNER, width + 1)},
        good | {"3.weight": torch.zeros(2, INNER), "3.bias": torch.zeros(2)},
        {"state_dict": good},
        [torch.zeros(3)],
    ):
        torch.save(held, broken / "best.pt")
        with pytest.raises(ModelLoadFailed, match=r"best\.pt contains") as refused:
            engine.load(broken, FAMILY, outputs={"entities": 0})
        assert refused.value.extras["error_class"] == "INCOMPATIBLE"
    (broken / "best.pt").write_bytes(pickle.dumps({"0.weight": _Opener(tmp_path / "marker")}, protocol=2))
    with pytest.raises(ModelLoadFailed, match="objects other than tensors"):
        engine.load(broken, FAMILY, outputs={"entities": 0})
    assert not (tmp_path / "marker").exists()
    (broken / "best.pt").unlink()
    with pytest.raises(ModelLoadFailed, match="copy the head") as absent:
        engine.load(broken, FAMILY, outputs={"entities": 0})
    assert absent.value.extras["error_class"] == "NOT_FOUND"
