"""GLiClass through the adapter against the package's own pipeline on the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gliclass import GLiClassModel, ZeroShotClassificationPipeline
from oracle import ragged_texts
from parity.device import on_device
from parity.extraction import failed
from parity.gliner_checkpoints import entry_of, gliclass_folder
from parity.table import ParityTable, Scores, path_of
from transformers import AutoTokenizer

from sie_adapter.families.extraction import ExtractOptions
from sie_contracts.errors import InferenceFailed, InvalidInput
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
