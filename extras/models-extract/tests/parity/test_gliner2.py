"""GLiNER2 through the adapter against the package called directly on the same folder."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from gliner2 import GLiNER2
from oracle import WORDS, ragged_texts
from parity.device import on_device
from parity.extraction import Entities, assert_equal, failed
from parity.gliner_checkpoints import entry_of, gliner2_folder
from parity.table import ParityTable, Scores, path_of
from selection import long_but

from sie_adapter.families.extraction import ExtractOptions
from sie_contracts.errors import InvalidInput
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
