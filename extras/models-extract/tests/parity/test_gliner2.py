"""GLiNER2 through the adapter against the package called directly on the same folder."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from gliner2 import GLiNER2
from oracle import WORDS, ragged_texts
from parity.device import SIXTEEN, SIXTEEN_TYPE, on_device
from parity.extraction import Entities, assert_equal, failed
from parity.gliner_checkpoints import entry_of, gliner2_folder
from parity.table import ParityTable, Scores, path_of
from parity.toys import edit_weights
from selection import long_but

from sie_adapter.families.extraction import ExtractOptions
from sie_contracts.errors import InferenceFailed, InvalidInput, ModelLoadFailed
from sie_contracts.wire.ipc import Rows
from sie_models_extract import gliner2 as family
from sie_models_extract.gliner2 import Gliner2Model

LABELS = ("person", "river mountain", "Engine")
THRESHOLD = 0.5
KINDS: dict[str, dict[str, Any]] = {
    "count_lstm_v2": {},
    "count_lstm": {"counting": "count_lstm"},
    "count_lstm_moe": {"counting": "count_lstm_moe"},
    "mean of tokens": {"pooling": "mean"},
    "more embeddings than tokens": {"spare_rows": 5},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gliner2_folder(tmp_path_factory.mktemp("gliner2") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Gliner2Model:
    return load(folder)


@pytest.fixture(scope="module")
def package(folder: Path) -> Any:
    return GLiNER2.from_pretrained(str(folder), map_location="cpu").eval()


def load(folder: Path, **kwargs: Any) -> Gliner2Model:
    entry = entry_of(folder, "gliner2", **kwargs)
    return Gliner2Model(folder, entry, entry.load, on_device())


def options(labels: tuple[str, ...] = LABELS, threshold: float | None = THRESHOLD) -> ExtractOptions:
    return ExtractOptions(labels, threshold)


def extract(model: Gliner2Model, texts: list[str], settings: ExtractOptions) -> list[Entities]:
    results = model.extract(texts, [settings] * len(texts))
    return [result["entities"] for result in results if isinstance(result, dict)]


def oracle(
    package: Any, texts: list[str], labels: tuple[str, ...] = LABELS, threshold: float = THRESHOLD
) -> list[Entities]:
    """Return the entities of the package, in the order and the form of the contract."""
    results = package.batch_extract_entities(
        texts, list(labels), batch_size=1, threshold=threshold, include_confidence=True, include_spans=True
    )
    return [
        [
            {
                "text": entity["text"],
                "label": label,
                "score": entity["confidence"],
                "start": entity["start"],
                "end": entity["end"],
            }
            for start, end, number, label, entity in sorted(
                (
                    (entity["start"], entity["end"], number, label, entity)
                    for number, label in enumerate(labels)
                    for entity in (result["entities"] or {}).get(label, [])
                ),
                key=lambda row: row[:3],
            )
        ]
        for result in results
    ]


def overlap(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left["label"] == right["label"] and left["start"] < right["end"] and right["start"] < left["end"]


@contextmanager
def forward_hook(model: Gliner2Model, hook: Callable[..., Any]) -> Iterator[None]:
    handle = model._model.encoder.register_forward_hook(hook, with_kwargs=True)
    yield
    handle.remove()


@pytest.mark.parametrize("kind", long_but(KINDS, ["count_lstm_v2", "mean of tokens"]))
def test_entities_equal_those_of_the_package(kind: str, tmp_path: Path, table: ParityTable) -> None:
    """A text that ends without a full stop is read with one."""
    folder = gliner2_folder(tmp_path / "model", **KINDS[kind])
    model, package = load(folder), GLiNER2.from_pretrained(str(folder), map_location="cpu").eval()
    texts = [
        *(f"{text}." for text in ragged_texts(12, seed=3, longest=60)),
        "Zürich, the harbour (search): e-mail to an_index_of 3.14! See https://search.index/queue?a=1 and @worker",
        "  Queue\n\tstream search@index.com engine!  ",
        "👍🏽 search שלום queue ❤ index مدينة engine 東京 İstanbul ẞ?",
    ]
    ours, theirs = extract(model, texts, options()), oracle(package, texts)
    assert sum(map(len, theirs)) > 30
    assert {entity["label"] for listing in theirs for entity in listing} == set(LABELS)
    for text, entities, expected in zip(texts, ours, theirs, strict=True):
        inside, beyond = (
            [entity for entity in expected if (entity["end"] > len(text)) is behind] for behind in (False, True)
        )
        entities = [entity for entity in entities if not any(overlap(entity, stray) for stray in beyond)]
        assert_equal(entities, inside)
        assert all(text[entity["start"] : entity["end"]] == entity["text"] for entity in entities)
        difference = max(
            (abs(entity["score"] - reference["score"]) for entity, reference in zip(entities, inside, strict=True)),
            default=0,
        )
        table.record(f"gliner2 {kind}", path_of(model.attention), model.precision, Scores(difference))


def classifier(folder: Path, **kwargs: Any) -> Gliner2Model:
    return load(folder, output="classifications", **kwargs)


def class_scores(result: Any) -> dict[str, float]:
    return {row["label"]: row["score"] for row in result["classifications"]}


@pytest.mark.parametrize("pooling", ["first", "mean"])
@pytest.mark.parametrize("multi_label", [False, True])
def test_classes_equal_those_of_the_package(
    multi_label: bool, pooling: str, tmp_path: Path, table: ParityTable
) -> None:
    folder = gliner2_folder(tmp_path / "model", pooling=pooling)
    package = GLiNER2.from_pretrained(str(folder), map_location="cpu").eval()
    model = classifier(folder)
    texts = [*ragged_texts(20, seed=4, longest=80), "Zürich, the harbour (search): 3.14!"]
    task = "prompt safety"
    options = ExtractOptions(LABELS, 0.0, {"multi_label": multi_label, "task": task})
    for text, result in zip(texts, model.extract(texts, [options] * len(texts)), strict=True):
        own = class_scores(result)
        config = {"labels": list(LABELS), "multi_label": multi_label, "cls_threshold": 0.0}
        theirs = package.classify_text(text, {task: config}, include_confidence=True)[task]
        chosen = theirs if multi_label else [theirs]
        expected = {row["label"]: row["confidence"] for row in chosen}
        assert set(own) == set(LABELS)
        assert list(own.values()) == sorted(own.values(), reverse=True)
        assert {label: own[label] for label in expected} == pytest.approx(expected, abs=1e-5)
        if not multi_label:
            assert next(iter(own)) in expected
        difference = max(abs(own[label] - score) for label, score in expected.items())
        table.record(
            f"gliner2 classes, {pooling} of tokens", path_of(model.attention), model.precision, Scores(difference)
        )


def test_the_name_of_the_task_changes_the_classes_and_a_long_text_is_cut(folder: Path) -> None:
    model = classifier(folder, max_tokens=64, parameters={"task": "topic"})
    text = " ".join(ragged_texts(40, seed=4))
    by_task = [
        class_scores(model.extract([text], [ExtractOptions(LABELS, 0.0, {"task": task})])[0])
        for task in ("topic", "language of the text")
    ]
    assert by_task[0] != pytest.approx(by_task[1], abs=1e-4)
    [longer, empty] = model.extract([text + " queue" * 500, ""], [ExtractOptions(LABELS, 0.0, {"task": "topic"})] * 2)
    assert class_scores(longer) == pytest.approx(by_task[0], abs=1e-6)
    assert empty == {"classifications": []}
    [refused] = model.extract(["a"], [ExtractOptions(LABELS, 0.0, {"task": "[L]"})])
    assert "task: it is empty after tokenisation" in str(failed(refused, InvalidInput))


def test_an_entry_gives_entities_or_classes(folder: Path) -> None:
    entry = entry_of(folder, "gliner2")
    both = msgspec.structs.replace(entry, outputs={"entities": 0, "classifications": 0})
    with pytest.raises(ModelLoadFailed, match="expected one"):
        Gliner2Model(folder, both, both.load, on_device())


def test_the_ids_are_those_of_the_package(model: Gliner2Model, package: Any) -> None:
    text = "Zürich: the_harbour\u200d [P] [SEP_TEXT] (search) \u202e https://search.index/[E] don't 👩‍💻 queue"
    preparation = model.prepare([text], [options()])
    [(_, [batch])] = [
        (key, [encoded_batch for _, encoded_batch in group.passes]) for key, group in preparation._prepared.items()
    ]
    expected = package.processor.collate_fn_inference([(text, {"entities": dict.fromkeys(LABELS, "")})])
    assert batch.input_ids.tolist() == expected.input_ids.tolist()
    assert batch.schema_special_indices == expected.schema_special_indices


def test_what_was_prepared_off_the_lane_gives_the_same(model: Gliner2Model) -> None:
    texts = ["queue worker", "queue worker stream", "", "queue worker stream search index engine " * 9, "index"]
    settings = [options(), options(), options(), options(("queue",)), options(())]
    preparation = model.prepare(texts, settings)
    assert preparation.seconds > 0
    assert model.extract(texts, settings, preparation)[:4] == model.extract(texts, settings)[:4]
    assert preparation.padding > 0


def test_an_item_is_independent_of_its_batch(model: Gliner2Model) -> None:
    """One batch has ragged texts, three label lists and two thresholds. Each text gives the same alone."""
    texts = [*ragged_texts(21, seed=5, longest=60), "", "queue", " ".join(WORDS)]
    lists = (LABELS, LABELS[::-1], ("vector",))
    settings = [options(lists[index % 3], (0.3, 0.6)[index % 2]) for index in range(24)]
    together = model.extract(texts, settings)
    assert sum(len(result["entities"]) for result in together if isinstance(result, dict)) > 30
    for result, text, own in zip(together, texts, settings, strict=True):
        [alone] = model.extract([text], [own])
        assert_equal(result["entities"], alone["entities"])  # type: ignore[index]


def test_labels_keep_the_order_and_the_case_of_the_client(model: Gliner2Model, package: Any) -> None:
    text = f"{ragged_texts(1, seed=6, longest=60)[0]}."
    orders = (LABELS, LABELS[::-1], ("Person", *LABELS[1:]))
    results = [result["entities"] for result in model.extract([text] * 3, [options(order) for order in orders])]  # type: ignore[index]
    for order, entities in zip(orders, results, strict=True):
        assert_equal(entities, oracle(package, [text], order)[0])
    plain = [
        {(entity["start"], entity["end"], entity["label"].lower(), round(entity["score"], 4)) for entity in some}
        for some in results
    ]
    assert plain[0] != plain[1]
    assert plain[0] != plain[2]


def test_a_label_that_is_named_twice_is_looked_for_once(model: Gliner2Model) -> None:
    once, twice = model.extract(["search engine"] * 2, [options(), options((*LABELS, LABELS[0]))])
    assert once == twice


def test_the_threshold_is_one_half_unless_the_parameters_say_otherwise(model: Gliner2Model, package: Any) -> None:
    texts = [f"{text}." for text in ragged_texts(4, seed=4, longest=40)]
    for parameters, threshold in (({}, 0.5), ({"threshold": 0.2}, 0.2)):
        results = model.extract(texts, [ExtractOptions(LABELS, None, parameters)] * 4)
        for result, expected in zip(results, oracle(package, texts, threshold=threshold), strict=True):
            assert_equal(result["entities"], expected)  # type: ignore[index]


def test_a_text_without_words_has_no_entity(model: Gliner2Model, package: Any) -> None:
    """The package finds the full stop that it adds."""
    assert oracle(package, [""], threshold=0.0) != [[]]
    assert extract(model, ["", " \n\t ", "queue"], options(threshold=0.0))[:2] == [[], []]


def test_characters_without_tokens_do_not_shift_offsets(tmp_path: Path) -> None:
    """Joiners and direction marks are words for the splitter, but the tokenizer has no tokens for them. The package
    reads the next word in the place of each, and padding at the end of the longest text of a batch.
    """
    model = load(gliner2_folder(tmp_path / "model", wordpiece=True))
    parts = ["search", "\u200f", "שלום", "queue", "\u200d", "index", "\u202e", "engine", "Zürich", "\u200d"]
    text, plain = " ".join(parts), " ".join(part for part in parts if part.strip("\u200f\u200d\u202e"))
    [entities], [expected] = (extract(model, [source], options(threshold=0.3)) for source in (text, plain))
    marks = dict.fromkeys(map(ord, "\u200f\u200d\u202e"))
    assert len(expected) > 3
    assert [(entity["text"].translate(marks).split(), entity["label"]) for entity in entities] == [
        (entity["text"].split(), entity["label"]) for entity in expected
    ]
    assert [entity["score"] for entity in entities] == pytest.approx([entity["score"] for entity in expected], abs=1e-5)
    assert all(text[entity["start"] : entity["end"]] == entity["text"] for entity in entities)
    assert extract(model, ["\u200d \u200f"], options(threshold=0.0)) == [[]]
    [refused] = model.extract(["queue"], [options(("queue", "\u200d"))])
    assert "empty after tokenisation" in failed(refused, InvalidInput).message


def test_no_entity_reaches_beyond_the_text(model: Gliner2Model, package: Any) -> None:
    """The full stop behind a text does not take the place of a word before it."""
    beyond = 0
    texts = ["queue", "search index", "see https://search.index", "queue worker ", "engine 👍"]
    for text, entities, theirs in zip(
        texts, extract(model, texts, options(threshold=0.0)), oracle(package, texts, threshold=0.0), strict=True
    ):
        beyond += any(entity["end"] > len(text) for entity in theirs)
        assert {entity["label"] for entity in entities} == set(LABELS)
        assert max(entity["end"] for entity in entities) <= len(text)
        assert all(text[entity["start"] : entity["end"]] == entity["text"] for entity in entities)
        covered = {
            place
            for entity in entities
            if entity["label"] == LABELS[0]
            for place in range(entity["start"], entity["end"])
        }
        assert {place for place, character in enumerate(text) if not character.isspace()} <= covered
    assert beyond == len(texts)


def test_a_long_text_is_read_in_windows_each_as_the_package_reads_it(folder: Path, package: Any) -> None:
    """Entities of one label do not overlap. At least 80 % of those well inside a window are the package's."""
    model = load(folder, max_tokens=96)
    texts = [" ".join(random.Random(seed).choices(WORDS, k=100 + 40 * seed)) + "." for seed in range(4)]
    late = compared = 0
    for text, entities in zip(texts, extract(model, texts, options(threshold=0.4)), strict=True):
        words = model._words(text)
        [group] = model.prepare([text], [options()])._prepared.values()
        reads = sorted((at for batch, _ in group.passes for at in batch), key=lambda at: at.start)
        assert len(reads) > 2
        assert all(len(row) <= 96 for _, batch in group.passes for row in batch.input_ids)
        for label in LABELS:
            own = [entity for entity in entities if entity["label"] == label]
            assert all(entity["end"] <= following["start"] for entity, following in itertools.pairwise(own))
        late += sum(entity["start"] > 0.8 * len(text) for entity in entities)
        ends = [(following.start + at.stop) // 2 for at, following in itertools.pairwise(reads)]
        for at, begin, end in zip(reads, [0, *ends], [*ends, len(words.starts)], strict=True):
            shift, stop = words.starts[at.start], words.ends[at.stop - 1]
            theirs = oracle(package, [text[shift:stop]], threshold=0.4)[0]
            clear = (words.starts[begin] + 30, words.ends[end - 1] - 30)  # out of reach of entities that cross a border
            expected = [
                {**entity, "start": entity["start"] + shift, "end": entity["end"] + shift}
                for entity in theirs
                if clear[0] <= entity["start"] + shift and entity["end"] + shift <= clear[1]
            ]
            ours = [entity for entity in entities if clear[0] <= entity["start"] and entity["end"] <= clear[1]]
            scores = {(entity["start"], entity["end"], entity["label"]): entity["score"] for entity in ours}
            same = [
                (scores[key], entity["score"])
                for entity in expected
                if (key := (entity["start"], entity["end"], entity["label"])) in scores
            ]
            assert len(same) >= 0.8 * max(len(ours), len(expected))
            assert [score for score, _ in same] == pytest.approx([reference for _, reference in same], abs=1e-5)
            compared += len(same)
    assert min(late, compared) > 20


def test_a_megabyte_without_spaces_is_one_word(model: Gliner2Model) -> None:
    text = "searchindex" * 100_000
    [entities, mate] = extract(model, [text, "queue"], options(threshold=0.0))
    assert {(entity["start"], entity["end"]) for entity in entities} == {(0, len(text))}
    assert mate


def test_a_threshold_of_nothing_keeps_a_bounded_number_of_candidates(
    model: Gliner2Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family, "_CANDIDATES", 20)
    text = " ".join(WORDS)
    [entities] = extract(model, [text], options(threshold=-1.0))
    assert 0 < len(entities) <= 20
    monkeypatch.undo()
    [every] = extract(model, [text], options(threshold=-1.0))
    assert len(every) > 20


def test_a_model_that_counts_none_finds_none(folder: Path, tmp_path: Path, package: Any) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    edit_weights(copied, lambda weights: weights["count_pred.2.bias"].__setitem__(0, 100.0))
    assert extract(load(copied), ["queue worker"], options(threshold=0.0)) == [[]]


def test_reserved_tokens_in_texts_are_words_like_others(model: Gliner2Model, package: Any) -> None:
    texts = ["queue [P] worker [E] engine [SEP_TEXT] stream.", "[CLS] search [SEP] index [L] [R] [C]."]
    for entities, expected in zip(extract(model, texts, options()), oracle(package, texts), strict=True):
        assert_equal(entities, expected)


def test_what_cannot_be_read_fails_alone(folder: Path) -> None:
    """A URL may hold a reserved token in lower case, which the tokenizer recognises."""
    model = load(folder, max_tokens=96)
    model._counter.add_special_tokens(["<s>"])
    model._reserved = [*model._reserved.tolist(), model._counter.token_to_id("<s>")]
    many = tuple(f"label {number}" for number in range(60))
    texts = ["queue", "queue", "queue", "see https://search<s>index now", "queue", "queue", "queue"]
    lists = (LABELS, (), ("a [E] b",), LABELS, many, ("[SEP_TEXT]",), LABELS)
    good, none, reserved, injected, long, ends, twin = model.extract(texts, [options(labels) for labels in lists])
    assert_equal(good["entities"], twin["entities"])  # type: ignore[index]
    for result, text in (
        (none, "at least one"),
        (reserved, "reserves"),
        (injected, "reserves"),
        (long, "of 96 tokens"),
        (ends, "reserves"),
    ):
        assert text in failed(result, InvalidInput).message
    assert failed(injected, InvalidInput).reason == "reserved_token"


def test_scores_that_are_not_finite_fail_their_item_alone(model: Gliner2Model) -> None:
    texts = ["queue", "queue worker stream", "queue worker"]
    expected = extract(model, texts, options(threshold=0.1))

    def poison(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        lengths = kwargs["attention_mask"].sum(1)
        assert len(lengths) == 3  # one pass
        output.last_hidden_state[int(lengths.argmax()), int(lengths.max()) - 2] = float("nan")

    with forward_hook(model, poison):
        first, second, third = model.extract(texts, [options(threshold=0.1)] * 3)
    assert failed(second, InferenceFailed).reason == "non_finite"
    for result, entities in ((first, expected[0]), (third, expected[2])):
        assert_equal(result["entities"], entities)  # type: ignore[index]


def test_a_batch_that_fails_is_tried_again_text_by_text(model: Gliner2Model) -> None:
    texts = ["queue", " ".join(WORDS), "queue worker"]
    expected = extract(model, texts, options())

    def fail(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if kwargs["attention_mask"].sum(1).max() > 80:
            raise RuntimeError("queue")

    with forward_hook(model, fail):
        first, second, third = model.extract(texts, [options()] * 3)
    assert "queue" not in failed(second, InferenceFailed).message
    for result, entities in ((first, expected[0]), (third, expected[2])):
        assert_equal(result["entities"], entities)  # type: ignore[index]


def test_two_threads_give_what_one_gives(model: Gliner2Model) -> None:
    texts = ragged_texts(8, seed=11, longest=40)
    jobs = [options(LABELS), options(LABELS[::-1])]
    expected = [extract(model, texts, settings) for settings in jobs]
    runs: dict[int, list[list[Entities]]] = {0: [], 1: []}

    def work(number: int, settings: ExtractOptions) -> None:
        for _ in range(4):
            runs[number].append(extract(model, texts, settings))

    threads = [threading.Thread(target=work, args=(number, settings)) for number, settings in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        assert len(runs[number]) == 4
        for run in runs[number]:
            for ours, alone in zip(run, expected[number], strict=True):
                assert_equal(ours, alone)


def test_16_bit_weights_give_near_scores(folder: Path, package: Any, table: ParityTable) -> None:
    """The median is compared, because random weights amplify the rounding of single spans."""
    entry = entry_of(folder, "gliner2")
    model = Gliner2Model(folder, entry, entry.load, on_device(SIXTEEN_TYPE))
    texts = [f"{text}." for text in ragged_texts(6, seed=12, longest=40)]
    assert model.precision == SIXTEEN
    differences: list[float] = []
    spans = 0
    ours, theirs = extract(model, texts, options(threshold=0.05)), oracle(package, texts, threshold=0.05)
    for entities, expected in zip(ours, theirs, strict=True):
        near, exact = (
            {(entity["start"], entity["end"], entity["label"]): entity["score"] for entity in some}
            for some in (entities, expected)
        )
        differences += [abs(near[span] - exact[span]) for span in near.keys() & exact.keys()]
        spans += len(exact)
    assert len(differences) > 0.8 * spans > 50
    assert 0 < statistics.median(differences) < 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("count_pred.0.bias"), "1 missing keys: count_pred.0.bias"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "1 unexpected keys: extra"),
        (lambda weights: weights.update({"count_pred.0.bias": torch.zeros(3)}), "1 mismatched keys: count_pred.0.bias"),
    ],
)
def test_weights_that_do_not_fit_are_refused(folder: Path, tmp_path: Path, change: Any, message: str) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    edit_weights(copied, change)
    with pytest.raises(ModelLoadFailed, match=message) as caught:
        load(copied)
    assert caught.value.extras["error_class"] == "INCOMPATIBLE"


def test_kinds_that_the_family_does_not_run_are_refused(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copied / "config.json").read_text())
    encoder = json.loads((copied / "encoder_config" / "config.json").read_text())
    for file, changed, message in (
        ("config.json", config | {"architecture": "other"}, "has the architecture other"),
        ("config.json", config | {"counting_layer": "other"}, "no counting layer other"),
        ("encoder_config/config.json", encoder | {"model_type": "none"}, "no encoder none"),
        ("encoder_config/config.json", {}, "has no encoder_config/config.json"),
    ):
        original = (copied / file).read_text()
        (copied / file).write_text(json.dumps(changed))
        with pytest.raises(ModelLoadFailed, match=message):
            load(copied)
        (copied / file).write_text(original)


def test_a_folder_of_the_first_versions_loads_and_runs_no_code(
    folder: Path, tmp_path: Path, model: Gliner2Model
) -> None:
    """The configuration has no architecture, the tokenizer lists extra tokens, and the encoder names code."""
    copied = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copied / "config.json").read_text())
    old = {name: value for name, value in config.items() if name not in ("architecture", "config_version", "span_head")}
    (copied / "config.json").write_text(json.dumps(old | {"max_width": 4}))
    tokens = json.loads((copied / "tokenizer_config.json").read_text())
    (copied / "tokenizer_config.json").write_text(json.dumps(tokens | {"extra_special_tokens": ["[P]", "[E]"]}))
    marker = tmp_path / "marker"
    encoder = json.loads((copied / "encoder_config" / "config.json").read_text())
    named = {"auto_map": {"AutoModel": "code.Model", "AutoConfig": "code.Config"}}
    (copied / "encoder_config" / "config.json").write_text(json.dumps(encoder | named))
    for place in (copied, copied / "encoder_config"):
        (place / "code.py").write_text(f"open({str(marker)!r}, 'w')\n")
    assert extract(load(copied), ["queue worker"], options()) == extract(model, ["queue worker"], options())
    assert not marker.exists()


def test_what_a_loaded_model_tells_about_itself(model: Gliner2Model) -> None:
    assert model.rows == {"extract": Rows("raw")}
    assert (model.precision, model.attention, model.max_tokens) == ("float32", "eager padded", 512)
    assert json.loads(model.tokenizer)["truncation"] is None
    assert json.loads(model.tokenizer)["padding"] is None
    weights = sum(parameter.nbytes for parameter in model._model.parameters())
    assert weights <= model.memory_bytes < 1.1 * weights
    assert not any(parameter.requires_grad for parameter in model._model.parameters())
