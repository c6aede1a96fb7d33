"""GLiREL through the adapter against the package called directly on the same folder."""

from __future__ import annotations

import json
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import WORDS
from parity.device import on_device
from parity.extraction import failed
from parity.gliner_checkpoints import entry_of, glirel_folder
from parity.table import ParityTable, Scores, path_of

from sie_adapter.families.extraction import ExtractOptions
from sie_contracts.errors import InferenceFailed, InvalidInput, ModelLoadFailed
from sie_contracts.wire.ipc import Rows
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


def test_labels_keep_the_order_and_the_case_of_the_client(model: GlirelModel, package: Any) -> None:
    text, mentions, own = sample(3, 14, 3)
    orders = (LABELS, LABELS[::-1], (LABELS[0], LABELS[1].lower(), LABELS[2]))
    results = model.extract([text] * 3, [options(mentions, order) for order in orders])
    for order, result in zip(orders, results, strict=True):
        assert_equal(relations(result), oracle(package, text, own, order))
    scores = [{named(relation): relation["score"] for relation in relations(result)} for result in results]
    assert max(abs(score - scores[1][name]) for name, score in scores[0].items()) > 1e-3


def test_an_item_is_independent_of_its_batch(model: GlirelModel) -> None:
    samples = [sample(seed, 8 + 4 * seed, 2 + seed % 3) for seed in range(6)]
    texts = [text for text, *_ in samples]
    settings = [options(mentions, LABELS[: 1 + seed % 3]) for seed, (_, mentions, _) in enumerate(samples)]
    for together, text, own in zip(model.extract(texts, settings), texts, settings, strict=True):
        [alone] = model.extract([text], [own])
        assert_equal(relations(together), relations(alone))


def test_entities_are_found_by_the_words_they_touch(model: GlirelModel) -> None:
    """Offsets count code points. An entity may begin or end inside a word."""
    text = "😀 Ada-Lovelace met Zürich's 東京 queue."
    whole = (Mention("person", 2, 14), Mention("place", 19, 25), Mention("work", 31, 36))
    inner = (Mention("person", 4, 9), Mention("place", 20, 22), Mention("work", 35, 36))
    whole_reply, inner_reply = model.extract([text] * 2, [options(whole), options(inner)])
    assert [relation["score"] for relation in relations(whole_reply)] == pytest.approx(
        [relation["score"] for relation in relations(inner_reply)]
    )
    assert {relation["head"] for relation in relations(whole_reply)} == {"Ada-Lovelace", "Zürich", "queue"}
    assert {relation["head"] for relation in relations(inner_reply)} == {"a-Lov", "ür", "e"}


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_entities_have_no_relation(model: GlirelModel, count: int) -> None:
    text, mentions, _ = sample(1, 8, 2)
    [result] = model.extract([text], [options(mentions[:count])])
    assert relations(result) == []
    assert len(result["entities"]) == count  # type: ignore[arg-type, index]
    assert model.extract([""], [options(())]) == [{"entities": [], "relations": []}]


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


def test_marks_in_a_text_are_words_like_others(model: GlirelModel) -> None:
    text, written = "queue [ REL ] worker [ SEP ] engine", "queue [REL] worker [SEP] engine"
    mentions, places = (
        (Mention("work", 0, 5), Mention("work", start, start + 6)) for start in (text.index("w"), written.index("w"))
    )
    [spaced] = model.extract([text], [options(mentions)])
    [joined] = model.extract([written], [options(places)])
    assert [relation["score"] for relation in relations(joined)] == pytest.approx(
        [relation["score"] for relation in relations(spaced)]
    )


def test_scores_that_are_not_finite_fail_their_item_alone(model: GlirelModel) -> None:
    samples = [sample(seed, 9 + seed, 2) for seed in range(3)]
    settings = [options(mentions) for _, mentions, _ in samples]
    texts = [text for text, *_ in samples]
    expected = model.extract(texts, settings)

    def poison(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * float("nan") if args[0].shape[1] == 10 else output

    handle = model._model.rnn.register_forward_hook(poison)
    first, second, third = model.extract(texts, settings)
    handle.remove()
    assert failed(second, InferenceFailed).reason == "non_finite"
    assert [first, third] == [expected[0], expected[2]]


def test_two_threads_give_what_one_gives(model: GlirelModel) -> None:
    jobs = [sample(seed, 20, 4) for seed in range(2)]
    expected = [model.extract([text], [options(mentions)])[0] for text, mentions, _ in jobs]
    outputs: dict[int, list[Any]] = {0: [], 1: []}

    def work(number: int) -> None:
        text, mentions, _ = jobs[number]
        for _ in range(6):
            outputs[number].append(model.extract([text], [options(mentions)])[0])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        assert len(outputs[number]) == 6
        for result in outputs[number]:
            assert_equal(relations(result), relations(expected[number]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("prompt_rep_layer.0.bias"), "1 missing keys: prompt_rep_layer.0.bias"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "1 unexpected keys: extra"),
        (lambda weights: weights.update({"prompt_rep_layer.0.bias": torch.zeros(3)}), "1 mismatched keys"),
    ],
)
def test_weights_that_do_not_fit_are_refused(folder: Path, tmp_path: Path, change: Any, message: str) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    weights = torch.load(copied / "pytorch_model.bin", weights_only=True)
    change(weights)
    torch.save(weights, copied / "pytorch_model.bin")
    with pytest.raises(ModelLoadFailed, match=message) as caught:
        load(copied)
    assert caught.value.extras["error_class"] == "INCOMPATIBLE"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fixed_relation_types": False}, "orders labels differently"),
        ({"add_entity_markers": True}, "add_entity_markers"),
        ({"max_entity_pair_distance": 4}, "max_entity_pair_distance"),
        ({"model_name": "no/backbone"}, "its backbone no/backbone is neither in the hub cache"),
    ],
)
def test_kinds_that_the_family_does_not_run_are_refused(
    folder: Path, tmp_path: Path, change: Json, message: str
) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copied / "glirel_config.json").read_text())
    (copied / "glirel_config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelLoadFailed, match=message):
        load(copied)


def test_what_a_loaded_model_tells_about_itself(model: GlirelModel) -> None:
    assert model.rows == {"extract": Rows("raw")}
    assert (model.precision, model.attention, model.max_tokens) == ("float32", "eager padded", 512)
    assert json.loads(model.tokenizer)["truncation"] is None
    assert model.memory_bytes >= sum(parameter.nbytes for parameter in model._model.parameters())
    assert not any(parameter.requires_grad for parameter in model._model.parameters())
