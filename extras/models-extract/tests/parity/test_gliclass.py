"""GLiClass through the adapter against the package's own pipeline on the same folder."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from gliclass import GLiClassModel, ZeroShotClassificationPipeline
from oracle import WORDS, ragged_texts
from parity.device import on_device
from parity.extraction import failed
from parity.gliner_checkpoints import entry_of, gliclass_folder
from parity.table import ParityTable, Scores, path_of
from parity.toys import edit_weights
from transformers import AutoTokenizer

from sie_adapter.families.extraction import ExtractOptions
from sie_contracts.errors import InferenceFailed, InvalidInput, ModelLoadFailed
from sie_contracts.wire.ipc import Rows
from sie_models_extract import gliclass as family
from sie_models_extract.gliclass import GliclassModel

LABELS = ("person", "river mountain", "Engine", "vector")
MAX_TOKENS = 128


@pytest.fixture(scope="module", params=[True, False], ids=["prompt first", "text first"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gliclass_folder(tmp_path_factory.mktemp("gliclass") / "model", prompt_first=request.param)


@pytest.fixture(scope="module")
def model(folder: Path) -> GliclassModel:
    return load(folder)


def load(folder: Path) -> GliclassModel:
    entry = entry_of(folder, "gliclass", max_tokens=MAX_TOKENS)
    return GliclassModel(folder, entry, entry.load, on_device())


def oracle(
    folder: Path, texts: list[str], labels: tuple[str, ...], *, multi_label: bool = False, **around: Any
) -> list[dict[str, float]]:
    """Return all scores, which the package gives only in its hierarchical form."""
    pipeline = ZeroShotClassificationPipeline(
        GLiClassModel.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
        max_length=MAX_TOKENS,
        device="cpu",
        classification_type="multi-label" if multi_label else "single-label",
        progress_bar=False,
    )
    return pipeline(texts, list(labels), batch_size=1, return_hierarchical=True, **around)  # type: ignore[no-any-return]


def scores(result: Any) -> dict[str, float]:
    values = [entry["score"] for entry in result["classifications"]]
    assert values == sorted(values, reverse=True)
    return {entry["label"]: entry["score"] for entry in result["classifications"]}


@pytest.mark.parametrize("multi_label", [False, True])
def test_scores_equal_those_of_the_package(
    model: GliclassModel, folder: Path, multi_label: bool, table: ParityTable
) -> None:
    texts = [*ragged_texts(20, seed=1, longest=40), "  Zürich, the harbour (search): 👍 e-mail 3.14!\n"]
    ours = model.extract(texts, [ExtractOptions(LABELS, None, {"multi_label": multi_label})] * len(texts))
    theirs = oracle(folder, texts, LABELS, multi_label=multi_label)
    row = f"gliclass {'prompt' if model._model.config.prompt_first else 'text'} first"
    for reply, expected in zip(ours, theirs, strict=True):
        assert scores(reply) == pytest.approx(expected, abs=1e-5)
        difference = max(abs(score - expected[label]) for label, score in scores(reply).items())
        table.record(row, path_of(model.attention), model.precision, Scores(difference))
    assert (
        max(label_scores[LABELS[0]] for label_scores in theirs)
        - min(label_scores[LABELS[0]] for label_scores in theirs)
        > 0.1
    )
    if not multi_label:
        assert all(sum(scores(output).values()) == pytest.approx(1.0, abs=1e-5) for output in ours)


MODERNBERT = {
    "model_type": "modernbert",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "global_attn_every_n_layers": 3,
    "local_attention": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "losses at all layers": {"layer_wise": True},
    "ModernBERT": {"backbone": MODERNBERT},
    "means of label tokens": {"class_token_pooling": "average", "normalize_features": True},
    "scorer of weighted products": {"scorer_type": "weighted-dot"},
    "scorer of layers": {"scorer_type": "mlp"},
    "means of text tokens": {"pooling_strategy": "avg", "logit_scale_init_value": 1.5},
    "last of text tokens": {"pooling_strategy": "last"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_of_the_variants_that_are_published_equal_those_of_the_package(
    variant: str, tmp_path: Path, table: ParityTable
) -> None:
    folder = gliclass_folder(tmp_path / "model", **VARIANTS[variant])
    model = load(folder)
    texts = ragged_texts(12, seed=7, longest=40)
    theirs = oracle(folder, texts, LABELS)
    for own, expected in zip(model.extract(texts, [ExtractOptions(LABELS)] * len(texts)), theirs, strict=True):
        assert scores(own) == pytest.approx(expected, abs=1e-5)
        difference = max(abs(score - expected[label]) for label, score in scores(own).items())
        table.record(f"gliclass {variant}", path_of(model.attention), model.precision, Scores(difference))


EXAMPLES = [
    {"text": "The river runs.", "labels": ["river mountain"]},
    {"text": "A vector.", "labels": ["vector", "Engine"]},
]


def test_a_sum_of_the_states_of_all_layers_is_refused(tmp_path: Path) -> None:
    folder = gliclass_folder(tmp_path / "model", squeeze_layers=True)
    with pytest.raises(ModelLoadFailed, match="squeeze_layers"):
        load(folder)


@pytest.mark.parametrize(
    "around",
    [{"prompt": "Say what the text is about:"}, {"examples": EXAMPLES}, {"prompt": "Topic?", "examples": EXAMPLES}],
    ids=lambda around: " and ".join(around),
)
def test_an_instruction_and_examples_are_read_as_the_package_reads_them(
    model: GliclassModel, folder: Path, around: dict[str, Any]
) -> None:
    texts = ragged_texts(8, seed=6, longest=12)
    parameters = {"examples": around["examples"]} if "examples" in around else {}
    options = ExtractOptions(LABELS, None, parameters, instruction=around.get("prompt", ""))
    own = [scores(result) for result in model.extract(texts, [options] * len(texts))]
    for result, expected in zip(own, oracle(folder, texts, LABELS, **around), strict=True):
        assert result == pytest.approx(expected, abs=1e-5)
    [plain] = model.extract(texts[:1], [ExtractOptions(LABELS)])
    assert own[0] != pytest.approx(scores(plain), abs=1e-4)


def test_examples_behind_a_long_text_are_not_cut(model: GliclassModel) -> None:
    text = " ".join(ragged_texts(40, seed=4))
    around = family._Around(tuple(EXAMPLES), "Topic?")
    labels = list(LABELS)
    [row] = model._encoded([text], labels, around)
    assert len(row) <= MAX_TOKENS
    assert row.count(model._tokenizer.convert_tokens_to_ids(model._pipeline.example_token)) == len(EXAMPLES)


def test_a_text_is_cut_before_a_character_that_fits_only_in_part(model: GliclassModel) -> None:
    """One character of this text is 18 tokens. The cut falls on each of them. Directly behind the instruction, the
    first word has more tokens than alone.
    """
    around, labels = family._Around(tuple(EXAMPLES), "Topic?"), list(LABELS)
    behind = model._counter.encode(model._prompt("", labels, around)).ids[-8:]
    for words in range(18):
        [row] = model._encoded(["queue " * words + "\ufdfa" * 40], labels, around)
        assert len(row) <= MAX_TOKENS
        assert row[-8:] == behind


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (ExtractOptions(LABELS, instruction="a <<LABEL>> b"), "instruction"),
        (ExtractOptions(LABELS, None, {"examples": [{"text": "<<SEP>>", "labels": []}]}), "examples"),
    ],
)
def test_a_reserved_token_around_the_text_is_refused(model: GliclassModel, options: ExtractOptions, param: str) -> None:
    [result] = model.extract(["a"], [options])
    assert failed(result, InvalidInput).param == param


def test_an_item_is_independent_of_its_batch(model: GliclassModel) -> None:
    texts = ragged_texts(64, seed=2, longest=120)
    lists = (LABELS, LABELS[::-1], ("queue",))
    options = [ExtractOptions(lists[index % 3], None, {"multi_label": index % 2 == 0}) for index in range(64)]
    for together, text, own in zip(model.extract(texts, options), texts, options, strict=True):
        [alone] = model.extract([text], [own])
        assert scores(together) == pytest.approx(scores(alone), abs=1e-5)


def test_labels_keep_the_order_and_the_case_of_the_client(model: GliclassModel, folder: Path) -> None:
    text = ragged_texts(1, seed=3, longest=60)[0]
    orders = (LABELS, LABELS[::-1], ("Person", *LABELS[1:]))
    label_scores = [scores(result) for result in model.extract([text] * 3, [ExtractOptions(order) for order in orders])]
    for order, result in zip(orders, label_scores, strict=True):
        assert result == pytest.approx(oracle(folder, [text], order)[0], abs=1e-5)
    assert label_scores[0] != pytest.approx(label_scores[1], abs=1e-3)


def test_a_label_that_is_named_twice_is_scored_twice(model: GliclassModel) -> None:
    [result] = model.extract(["search index"], [ExtractOptions(("person", "Engine", "person"))])
    assert sorted(entry["label"] for entry in result["classifications"]) == ["Engine", "person", "person"]  # type: ignore[index]


def test_the_threshold_drops_labels(model: GliclassModel) -> None:
    [every] = model.extract(["search index queue"], [ExtractOptions(LABELS)])
    ranked = every["classifications"]  # type: ignore[index]
    assert len(ranked) == len(LABELS)
    for options in (
        ExtractOptions(LABELS, ranked[1]["score"]),
        ExtractOptions(LABELS, None, {"threshold": ranked[1]["score"]}),
    ):
        [some] = model.extract(["search index queue"], [options])
        assert some == {"classifications": ranked[:2]}


def test_a_long_text_is_cut_and_its_labels_are_not(model: GliclassModel, folder: Path) -> None:
    """The package cuts labels behind a long text, the adapter does not. A longer text scores as the part that fits."""
    text = " ".join(ragged_texts(40, seed=4))
    assert len(text) > 3000
    long, longer = model.extract([text, text + " queue" * 20_000], [ExtractOptions(LABELS)] * 2)
    assert scores(long) == pytest.approx(scores(longer), abs=1e-6)
    assert min(scores(long).values()) > 0
    if model._model.config.prompt_first:
        assert scores(long) == pytest.approx(oracle(folder, [text], LABELS)[0], abs=1e-5)
    else:
        around = family._Around((), "")
        rows = model._encoded([text], list(LABELS), around)
        assert MAX_TOKENS - 6 <= len(rows[0]) <= MAX_TOKENS
        assert rows[0].count(model._model.config.class_token_index) == len(LABELS)


def test_a_text_without_spaces_is_cut_too(model: GliclassModel) -> None:
    [result] = model.extract(["searchindex" * 2000], [ExtractOptions(LABELS)])
    assert len(scores(result)) == len(LABELS)


def test_a_text_of_white_space_has_no_classes(model: GliclassModel) -> None:
    empty, blank, mate = model.extract(["", " \n\t", "queue"], [ExtractOptions(LABELS)] * 3)
    assert empty == blank == {"classifications": []}
    assert len(scores(mate)) == len(LABELS)


def test_other_scripts_are_scored(model: GliclassModel, folder: Path) -> None:
    texts = ["👍🏽 search \u200f שלום", "مدينة \u202e queue", "東京\u200d", "\x00\x07"]
    ours = model.extract(texts, [ExtractOptions(LABELS)] * len(texts))
    for reply, expected in zip(ours, oracle(folder, texts, LABELS), strict=True):
        assert scores(reply) == pytest.approx(expected, abs=1e-5)


def test_what_cannot_be_scored_fails_alone(model: GliclassModel) -> None:
    many = tuple(f"label {number}" for number in range(60))
    texts = ["queue", "queue", "queue", "a <<LABEL>>worker", "queue", "queue"]
    options = [ExtractOptions(labels) for labels in (LABELS, (), ("<<SEP>>",), LABELS, many, LABELS)]
    good, none, reserved, injected, long, twin = model.extract(texts, options)
    assert scores(good) == pytest.approx(scores(twin), abs=1e-6)
    for result, text in (
        (none, "at least one"),
        (reserved, "reserves"),
        (injected, "reserves"),
        (long, f"of {MAX_TOKENS} tokens"),
    ):
        assert text in failed(result, InvalidInput).message


def test_scores_that_are_not_finite_fail_their_item_alone(model: GliclassModel) -> None:
    texts = ["queue worker stream", "queue", "queue worker"]
    expected = model.extract(texts, [ExtractOptions(LABELS)] * 3)
    poisoned: list[int] = []

    def poison(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        lengths = kwargs["attention_mask"].sum(1)
        assert len(lengths) == 3  # one pass
        poisoned.append(int(lengths.argmax()))
        output.logits[poisoned[0], 1] = float("inf")

    handle = model._model.register_forward_hook(poison, with_kwargs=True)
    first, second, third = model.extract(texts, [ExtractOptions(LABELS)] * 3)
    handle.remove()
    assert failed(first, InferenceFailed).reason == "non_finite"
    assert [second, third] == expected[1:]


def test_a_batch_that_fails_is_tried_again_text_by_text(model: GliclassModel) -> None:
    texts = ["queue", " ".join(WORDS), "queue worker"]
    expected = model.extract(texts, [ExtractOptions(LABELS)] * 3)

    def fail(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if kwargs["attention_mask"].sum(1).max() > 40:
            raise RuntimeError("queue")

    handle = model._model.register_forward_hook(fail, with_kwargs=True)
    first, second, third = model.extract(texts, [ExtractOptions(LABELS)] * 3)
    handle.remove()
    assert "queue" not in failed(second, InferenceFailed).message
    assert scores(first) == pytest.approx(scores(expected[0]), abs=1e-5)
    assert scores(third) == pytest.approx(scores(expected[2]), abs=1e-5)


def test_two_threads_give_what_one_gives(model: GliclassModel) -> None:
    texts = ragged_texts(12, seed=5, longest=60)
    expected = [
        [scores(result) for result in model.extract(texts, [ExtractOptions(order)] * 12)]
        for order in (LABELS, LABELS[::-1])
    ]
    outputs: list[list[Any]] = [[], []]

    def work(number: int, order: tuple[str, ...]) -> None:
        for _ in range(6):
            outputs[number].append(model.extract(texts, [ExtractOptions(order)] * 12))

    threads = [
        threading.Thread(target=work, args=(number, order)) for number, order in enumerate((LABELS, LABELS[::-1]))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for runs, alone in zip(outputs, expected, strict=True):
        assert len(runs) == 6
        for run in runs:
            for result, own in zip(run, alone, strict=True):
                assert scores(result) == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: weights.pop("model.text_projector.linear_1.bias"),
            "1 missing keys: model.text_projector.linear_1.bias",
        ),
        (lambda weights: weights.update(extra=torch.zeros(1)), "1 unexpected keys: extra"),
        (lambda weights: weights.update({"model.text_projector.linear_1.bias": torch.zeros(3)}), "1 mismatched keys: "),
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
    for change, message in (
        ({"architecture_type": "bi-encoder"}, "a GLiClass bi-encoder"),
        ({"encoder_config": {"model_type": "none"}}, "no encoder none"),
    ):
        (copied / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelLoadFailed, match=message):
            load(copied)


def test_what_a_loaded_model_tells_about_itself(model: GliclassModel) -> None:
    assert model.rows == {"extract": Rows("raw")}
    assert (model.precision, model.attention, model.max_tokens) == ("float32", "eager padded", MAX_TOKENS)
    assert json.loads(model.tokenizer)["truncation"] is None
    assert model.memory_bytes >= sum(parameter.nbytes for parameter in model._model.parameters())
