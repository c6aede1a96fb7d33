"""GLiREL through the adapter against the package called directly on the same folder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from oracle import WORDS
from parity.device import on_device
from parity.extraction import failed
from parity.gliner_checkpoints import entry_of, glirel_folder
from parity.table import ParityTable, Scores, path_of

from sie_adapter.families.extraction import ExtractOptions
from sie_contracts.errors import InvalidInput
from sie_contracts.wire.messages import Mention

glirel = pytest.importorskip("glirel", reason="the extra glirel is for non-commercial use alone")

from sie_models_extract.glirel import GlirelModel  # noqa: E402  after its package

LABELS = ("located in", "Works for", "date of")
KINDS = ("person", "place", "work")

Json = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return glirel_folder(tmp_path_factory.mktemp("glirel") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> GlirelModel:
    return load(folder)


@pytest.fixture(scope="module")
def package(folder: Path) -> Any:
    """Load the model through its hook for the hub, with the arguments that the hub's client no longer passes."""
    options = dict.fromkeys(("revision", "cache_dir", "proxies", "token"))
    refused = dict.fromkeys(("force_download", "resume_download"), False)
    return glirel.GLiREL._from_pretrained(
        model_id=str(folder), local_files_only=True, map_location="cpu", strict=True, **options, **refused
    ).eval()


def load(folder: Path, **kwargs: Any) -> GlirelModel:
    entry = entry_of(folder, "glirel", **kwargs)
    return GlirelModel(folder, entry, entry.load, on_device())


def sample(seed: int, count: int, entities: int) -> tuple[str, tuple[Mention, ...], list[list[Any]]]:
    """Return a text of `count` words, entities of one to three words, and the entities in the form of the package."""
    rng = random.Random(seed)
    words = rng.choices(WORDS, k=count)
    starts = [sum(len(word) + 1 for word in words[:place]) for place in range(count)]
    places = sorted(rng.sample(range(count - 3), entities))
    spans = [(place, place + rng.randrange(3), rng.choice(KINDS)) for place in places]
    mentions = tuple(Mention(kind, starts[first], starts[last] + len(words[last])) for first, last, kind in spans)
    return " ".join(words), mentions, [[first, last, kind, ""] for first, last, kind in spans]


def oracle(package: Any, text: str, entities: list[list[Any]], labels: tuple[str, ...], **options: Any) -> list[Json]:
    """Return relations, best first. Head and tail are words that are joined by spaces."""
    words = text.split()
    predictions = package.predict_relations(
        words, list(labels), ner=entities, **{"threshold": 0.0, "top_k": -1, **options}
    )
    relations = [
        {
            "head": " ".join(words[slice(*prediction["head_pos"])]),
            "tail": " ".join(words[slice(*prediction["tail_pos"])]),
            "relation": prediction["label"],
            "score": prediction["score"],
        }
        for prediction in predictions
    ]
    return sorted(relations, key=lambda relation: -relation["score"])


def options(mentions: tuple[Mention, ...], labels: tuple[str, ...] = LABELS, **parameters: Any) -> ExtractOptions:
    return ExtractOptions(labels, None, {"threshold": 0.0, "top_k": 1000, **parameters}, mentions)


def relations(result: Any) -> list[Json]:
    triples: list[Json] = result["relations"]
    return triples


def assert_equal(ours: list[Json], theirs: list[Json]) -> None:
    """Compare relations. Those whose scores differ by rounding may change places."""
    assert sorted(map(named, ours)) == sorted(map(named, theirs))
    assert [triple["score"] for triple in ours] == sorted((triple["score"] for triple in ours), reverse=True)
    by_name = [sorted(some, key=lambda triple: (named(triple), triple["score"])) for some in (ours, theirs)]
    for relation, reference in zip(*by_name, strict=True):
        assert relation["score"] == pytest.approx(reference["score"], abs=1e-5)


def named(relation: Json) -> tuple[str, ...]:
    return relation["head"], relation["tail"], relation["relation"]


def test_relations_equal_those_of_the_package(model: GlirelModel, package: Any, table: ParityTable) -> None:
    spread = []
    for seed, (count, entities) in enumerate([(6, 2), (12, 3), (30, 5), (60, 8)]):
        text, mentions, own = sample(seed, count, entities)
        [result] = model.extract([text], [options(mentions)])
        expected = oracle(package, text, own, LABELS)
        assert_equal(relations(result), expected)
        assert (
            result["entities"]
            == [  # type: ignore[index]
                {"text": text[at.start : at.end], "label": at.label, "score": 1.0, "start": at.start, "end": at.end}
                for at in mentions
            ]
        )
        assert len(expected) == entities * (entities - 1) * len(LABELS)
        pairs = zip(sorted(relations(result), key=named), sorted(expected, key=named), strict=True)
        difference = max(abs(relation["score"] - reference["score"]) for relation, reference in pairs)
        table.record("glirel", path_of(model.attention), model.precision, Scores(difference))
        spread += [relation["score"] for relation in expected]
    assert max(spread) - min(spread) > 0.2


def test_the_best_labels_of_each_pair_above_the_threshold_are_kept(model: GlirelModel, package: Any) -> None:
    text, mentions, own = sample(7, 20, 4)
    every = sorted(relation["score"] for relation in oracle(package, text, own, LABELS))
    least = every[len(every) // 2]
    for most in (1, 2):
        [result] = model.extract([text], [options(mentions, threshold=least, top_k=most)])
        assert_equal(relations(result), oracle(package, text, own, LABELS, threshold=least, top_k=most))
    [by_request] = model.extract([text], [ExtractOptions(LABELS, least, {"threshold": 0.0, "top_k": 2}, mentions)])
    assert by_request == result


def test_what_cannot_be_read_fails_alone(model: GlirelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    text, mentions, _ = sample(2, 10, 2)
    long = f"{text} {'queue ' * 60}end"
    behind = (*mentions, Mention("place", len(long) - 3, len(long)))
    blank = (Mention("place", 10, 12), Mention("place", 0, 2))
    many = tuple(f"label {number}" for number in range(60))
    texts = [text, text, text, text, text, long, long, "ab        \t\n   cd"]
    settings = [options(mentions, labels) for labels in (LABELS, (), ("a [REL] b",), ("[SEP]",))]
    settings += [options(mentions, many), options(behind), options(mentions), options(blank)]
    monkeypatch.setattr(model, "max_tokens", 128)
    results = model.extract(texts, settings)
    assert len(relations(results[0])) == 2 * len(LABELS)
    assert len(relations(results[6])) == 2 * len(LABELS), "the rest of a long text is not read, and need not be"
    for result, fragment in zip(
        (*results[1:6], results[7]),
        ("at least one", "reserves", "reserves", "of 128 tokens", "ends after", "no word"),
        strict=True,
    ):
        assert fragment in failed(result, InvalidInput).message
    assert failed(results[5], InvalidInput).reason == "input_too_long"
