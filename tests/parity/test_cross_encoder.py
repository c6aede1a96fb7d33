"""Cross-encoders through the adapter against sentence-transformers' CrossEncoder on the same folder."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_once import made_once
from parity.checkpoints import ARCHITECTURES, MAX_TOKENS, WIDTH, build
from parity.device import SIXTEEN, SIXTEEN_TYPE, require_precision
from parity.score_checkpoints import (
    TAU,
    Asked,
    Scoring,
    ScoringEngine,
    build_head,
    copied,
    edit_json,
    ragged_documents,
    score_of,
    sentence,
    sts_pairs,
    tau,
    trained_cross_encoder,
    without,
)
from parity.table import ParityTable, Scores
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from selection import long_but
from sentence_transformers import CrossEncoder
from tokenizers import Tokenizer, processors
from transformers import AutoModelForSequenceClassification

from sie_contracts.errors import ModelLoadFailed

# the architecture of each kind, and the settings that change its head
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "roberta": ("roberta", {}),
    "xlm-roberta": ("xlm-roberta", {}),
    "modernbert cls": ("modernbert", {"classifier_pooling": "cls", "classifier_bias": True}),
    "modernbert mean": ("modernbert", {"classifier_pooling": "mean", "classifier_activation": "relu"}),
    "deberta-v2": ("deberta-v2", {}),
    "electra": ("electra", {}),
    "distilbert": ("distilbert", {}),
    "mpnet": ("mpnet", {}),
    "gte": ("gte", {}),
    "qwen2": ("qwen2 causal", {}),
}
PADDED = {"deberta-v2", "mpnet"}
MAX_DIFFERENCE = 1e-5

Folders = Callable[..., Path]
Load = Callable[..., Scoring]
USUAL = ("bert", "deberta-v2", "qwen2")  # absolute positions, position biases, a decoder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("cross-encoders")

    @functools.cache
    def folder(kind: str, labels: int = 1) -> Path:
        name, config = KINDS[kind]
        return build_head(
            root / f"{kind.replace(' ', '-')}-{labels}", name, AutoModelForSequenceClassification, labels, **config
        )

    return folder


@pytest.fixture(scope="module")
def load(engine: ScoringEngine, folders: Folders) -> Load:
    @functools.cache
    def loaded(kind: str, precision: str = "float32") -> Scoring:
        scoring = engine.load(folders(kind), "cross-encoder", precision, head={"activation": "identity"})
        require_precision(scoring.precision, precision)
        return scoring

    return loaded


def oracle(folder: Path, pairs: Sequence[tuple[str, str]], precision: str = "float32", **kwargs: Any) -> np.ndarray:
    """Return float32 [pairs] or [pairs, labels]. Each pair is scored alone, so that no padding enters."""
    options = {"dtype": precision, "attn_implementation": "eager"}
    model = CrossEncoder(str(folder), device="cpu", local_files_only=True, max_length=MAX_TOKENS, model_kwargs=options)
    return np.asarray(model.predict(list(pairs), batch_size=1, show_progress_bar=False, **kwargs), np.float32)


IDENTITY = torch.nn.Identity()


@pytest.mark.parametrize("kind", long_but(KINDS, USUAL))
def test_scores_equal_the_reference(kind: str, load: Load, folders: Folders, table: ParityTable) -> None:
    """Each batch has 1 to 64 ragged pairs and a query of its own."""
    scoring = load(kind)
    assert scoring.attention.endswith("padded") == (kind in PADDED)
    rng = random.Random(1)
    texts = ragged_documents(89)
    start = 0
    for count in (1, 2, 5, 17, 64):
        query, documents = sentence(rng, rng.randint(0, 12)), texts[start : start + count]
        start += count
        expected = oracle(folders(kind), [(query, text) for text in documents], activation_fn=IDENTITY)
        difference = np.abs(np.array(scoring.scores(query, documents)) - expected).max() / max(
            1.0, float(np.abs(expected).max())
        )
        scoring.record(table, f"cross-encoder {kind}", difference)
        assert difference <= MAX_DIFFERENCE


@pytest.mark.parametrize("kind", long_but(KINDS, ["bert", "qwen2"]))
def test_bfloat16_ranks_as_float32(kind: str, load: Load, folders: Folders, table: ParityTable) -> None:
    """Kendall's tau over 50 documents, the mean of three queries."""
    scoring = load(kind, SIXTEEN)
    documents = ragged_documents(50, seed=3, longest=60)
    ours, stock, errors = [], [], []
    for query in ("search engine", "river", "winter music history"):
        pairs = [(query, text) for text in documents]
        exact, library = (
            oracle(folders(kind), pairs, precision, activation_fn=IDENTITY) for precision in ("float32", SIXTEEN)
        )
        got = np.array(scoring.scores(query, documents))
        ours.append(tau(got, exact))
        stock.append(tau(library, exact))
        errors.append((np.abs(got - exact).mean(), np.abs(library - exact).mean()))
        scale = max(1.0, float(np.abs(exact).max()))
        scoring.record(table, f"cross-encoder {kind}", np.abs(got - exact).max() / scale, ours[-1])
        table.record(
            f"cross-encoder {kind}",
            "stock",
            SIXTEEN,
            Scores(float(np.abs(library - exact).max() / scale), stock[-1]),
        )
    # The scores of an untrained model spread over little more than the rounding, so the adapter need not rank them
    # better than the library does.
    assert np.mean(ours) >= min(TAU, np.mean(stock) - 0.01)
    own, theirs = np.mean(errors, axis=0)
    assert own <= 1.5 * theirs


@pytest.mark.parametrize("kind", long_but(KINDS, USUAL))
def test_a_pair_scores_the_same_in_any_company(kind: str, load: Load) -> None:
    scoring = load(kind)
    documents = ragged_documents(24, seed=5)
    alone = [scoring.scores("river bank", [text])[0] for text in documents]
    together = scoring.scores("river bank", documents)
    outcomes = scoring.run(
        [Asked(documents[:5], "another query"), Asked(documents[::-1], "river bank"), Asked(["x"], "third")]
    )
    np.testing.assert_allclose(together, alone, rtol=0, atol=2e-6)
    np.testing.assert_allclose([score_of(outcome) for outcome in outcomes[1]][::-1], alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "kind",
    long_but(
        ["bert", "roberta", "xlm-roberta", "modernbert cls", "deberta-v2", "distilbert"], ["bert", "modernbert cls"]
    ),
)
def test_rows_are_those_of_the_tokenizer(kind: str, load: Load, folders: Folders) -> None:
    """Special tokens and token types are those of the tokenizer. The document alone is cut."""
    scoring = load(kind)
    tokenizer = CrossEncoder(str(folders(kind)), device="cpu", local_files_only=True).tokenizer
    documents = [*ragged_documents(12, seed=7), sentence(random.Random(0), 700)]
    for query in ("", "search engine", sentence(random.Random(1), 200)):
        (rows,) = scoring.rows([Asked(documents, query)])
        for row, text in zip(rows, documents, strict=True):
            # as lists, because the tokenizer takes an empty second text alone for no text
            expected = tokenizer([query], [text], truncation="only_second", max_length=MAX_TOKENS)
            assert row.ids.tolist() == expected["input_ids"][0]
            assert row.truncated == (len(tokenizer([query], [text])["input_ids"][0]) > MAX_TOKENS)
            if "token_type_ids" in expected:
                assert ([0] * len(row.ids) if row.types is None else row.types.tolist()) == expected["token_type_ids"][
                    0
                ]
    assert rows[-1].truncated


def test_token_types_matter(load: Load, folders: Folders, tmp_path: Path) -> None:
    """Without token types the BERT checkpoint scores differently, so the tests above would notice."""
    folder = copied(folders("bert"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["bert.embeddings.token_type_embeddings.weight"][1] = tensors[
        "bert.embeddings.token_type_embeddings.weight"
    ][0]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    pairs = [("search", text) for text in ragged_documents(8)]
    difference = oracle(folder, pairs, activation_fn=IDENTITY) - oracle(folders("bert"), pairs, activation_fn=IDENTITY)
    assert np.abs(difference).max() > 1e-3


@pytest.mark.parametrize("kind", ["layoutlm", "squeezebert"])
def test_a_backbone_that_always_calls_its_pooler_scores_as_the_library(
    kind: str, engine: ScoringEngine, tmp_path: Path
) -> None:
    architecture = replace(ARCHITECTURES["bert"], model_type=kind)
    more = {"embedding_size": WIDTH} if kind == "squeezebert" else {}
    folder = build(tmp_path, architecture, head=AutoModelForSequenceClassification, num_labels=1, **more)
    documents = ragged_documents(8)
    scores = engine.load(folder, "cross-encoder").scores("search", documents)
    expected = oracle(folder, [("search", text) for text in documents])
    np.testing.assert_allclose(scores, expected, rtol=0, atol=MAX_DIFFERENCE)


@pytest.mark.parametrize("processor", ["template", "BertProcessing"])
def test_a_pair_has_no_token_types_if_the_tokenizer_names_none(
    processor: str, engine: ScoringEngine, folders: Folders, tmp_path: Path
) -> None:
    folder = copied(folders("bert"), tmp_path)
    edit_json(folder / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
    if processor == "BertProcessing":
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        sep, cls = ((token, tokenizer.token_to_id(token)) for token in ("[SEP]", "[CLS]"))
        tokenizer.post_processor = processors.BertProcessing(sep, cls)
        tokenizer.save(str(folder / "tokenizer.json"))
    documents = ragged_documents(8)
    expected = oracle(folder, [("search", text) for text in documents])
    scores = engine.load(folder, "cross-encoder").scores("search", documents)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=MAX_DIFFERENCE)


def test_a_pair_has_no_token_types_if_the_class_of_the_tokenizer_has_none(
    engine: ScoringEngine, folders: Folders, tmp_path: Path
) -> None:
    """tokenizer_config.json says nothing of them. The template of tokenizer.json has them."""
    folder = copied(folders("bert"), tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["model_input_names"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    documents = ragged_documents(8)
    expected = oracle(folder, [("search", text) for text in documents])
    scores = engine.load(folder, "cross-encoder").scores("search", documents)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=MAX_DIFFERENCE)


@pytest.mark.parametrize(
    ("kind", "name", "config"),
    [
        ("xlnet", "XLNetForSequenceClassification", {"d_model": WIDTH, "n_layer": 2, "n_head": 4, "d_inner": 96}),
        ("longformer", "LongformerForSequenceClassification", ARCHITECTURES["bert"].config),
    ],
)
def test_a_head_that_reads_more_than_states_is_refused_by_name(
    kind: str, name: str, config: dict[str, Any], engine: ScoringEngine, tmp_path: Path
) -> None:
    architecture = replace(ARCHITECTURES["bert"], model_type=kind, config=config)
    folder = build(tmp_path, architecture, head=AutoModelForSequenceClassification, num_labels=1)
    with pytest.raises(ModelLoadFailed, match=f"{name} reads more than the states of its last layer") as refused:
        engine.load(folder, "cross-encoder")
    assert refused.value.extras["error_class"] == "INCOMPATIBLE"


# the activation


NAMED = {
    "nothing": {},
    "config": {"config.json": {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}},
    "legacy": {"config.json": {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}},
    "own file": {"config_sentence_transformers.json": {"activation_fn": "torch.nn.modules.linear.Identity"}},
    "sigmoid": {"config_sentence_transformers.json": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
    "own file wins": {
        "config_sentence_transformers.json": {"activation_fn": "torch.nn.modules.linear.Identity"},
        "config.json": {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
    },
}


@pytest.mark.parametrize("named", long_but(NAMED, list(NAMED)[:2]))
def test_the_activation_is_the_one_that_the_folder_names(
    named: str, engine: ScoringEngine, folders: Folders, tmp_path: Path
) -> None:
    if "own file" in named or named == "sigmoid":  # the library reads it in folders that it has saved
        CrossEncoder(str(folders("bert")), device="cpu", local_files_only=True).save_pretrained(str(tmp_path))
        folder = tmp_path
    else:
        folder = copied(folders("bert"), tmp_path)
    for file, changes in NAMED[named].items():
        edit_json(folder / file, **changes)
    scoring = engine.load(folder, "cross-encoder")
    documents = ragged_documents(20)
    expected = oracle(folder, [("search", text) for text in documents])
    assert (expected.min() > 0 and expected.max() < 1) == (named in ("nothing", "sigmoid"))
    np.testing.assert_allclose(scoring.scores("search", documents), expected, rtol=0, atol=MAX_DIFFERENCE)


def test_a_folder_saved_by_the_library_is_served(engine: ScoringEngine, folders: Folders, tmp_path: Path) -> None:
    """The folder has modules.json and the settings that versions since 6 write."""
    model = CrossEncoder(str(folders("xlm-roberta")), device="cpu", local_files_only=True)
    model.save_pretrained(str(tmp_path / "saved"))
    documents = ragged_documents(20)
    scores = engine.load(tmp_path / "saved", "cross-encoder").scores("search", documents)
    expected = oracle(folders("xlm-roberta"), [("search", text) for text in documents])
    np.testing.assert_allclose(scores, expected, rtol=0, atol=MAX_DIFFERENCE)


def test_the_entry_overrides_the_folder(engine: ScoringEngine, load: Load, folders: Folders) -> None:
    documents = ragged_documents(10)
    raw = np.array(load("bert").scores("search", documents))
    squashed = engine.load(folders("bert"), "cross-encoder", head={"activation": "sigmoid"}).scores("search", documents)
    np.testing.assert_allclose(squashed, 1 / (1 + np.exp(-raw)), atol=1e-6)


def test_an_unknown_activation_is_refused(engine: ScoringEngine, folders: Folders, tmp_path: Path) -> None:
    folder = copied(folders("bert"), tmp_path)
    edit_json(folder / "config_sentence_transformers.json", activation_fn="torch.nn.modules.activation.Tanh")
    with pytest.raises(ModelLoadFailed, match="Tanh"):
        engine.load(folder, "cross-encoder")


def test_a_prompt_that_would_be_left_out_is_refused(engine: ScoringEngine, folders: Folders, tmp_path: Path) -> None:
    folder = copied(folders("bert"), tmp_path)
    edit_json(folder / "config_sentence_transformers.json", default_prompt_name="query", prompts={"query": "rank: "})
    with pytest.raises(ModelLoadFailed, match="prompt 'query'"):
        engine.load(folder, "cross-encoder")


@pytest.mark.parametrize("kind", ["bert", "modernbert mean", "deberta-v2"])
def test_two_labels_score_as_the_share_of_the_second(kind: str, engine: ScoringEngine, folders: Folders) -> None:
    documents = ragged_documents(30)
    expected = oracle(folders(kind, 2), [("search", text) for text in documents], apply_softmax=True)[:, 1]
    scores = engine.load(folders(kind, 2), "cross-encoder", head={"activation": "softmax"}).scores("search", documents)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=MAX_DIFFERENCE)


@pytest.mark.parametrize(
    ("labels", "activation"), [(2, None), (2, "sigmoid"), (2, "identity"), (3, "softmax"), (1, "softmax")]
)
def test_labels_that_are_no_score_are_refused(
    labels: int, activation: str | None, engine: ScoringEngine, folders: Folders
) -> None:
    with pytest.raises(ModelLoadFailed, match=f"{labels} labels"):
        engine.load(folders("bert", labels), "cross-encoder", head={"activation": activation} if activation else {})


# weights


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("bert", "classifier.weight"),
        ("bert", "classifier.bias"),
        ("bert", "bert.pooler.dense.weight"),
        ("roberta", "classifier.dense.bias"),
        ("modernbert cls", "head.norm.weight"),
        ("modernbert mean", "head.dense.weight"),
        ("deberta-v2", "pooler.dense.weight"),
        ("electra", "classifier.out_proj.weight"),
        ("distilbert", "pre_classifier.weight"),
        ("qwen2", "score.weight"),
    ],
)
def test_a_head_that_is_not_whole_is_refused(
    kind: str, tensor: str, engine: ScoringEngine, folders: Folders, tmp_path: Path
) -> None:
    folder = without(folders(kind), tensor, tmp_path)
    with pytest.raises(ModelLoadFailed, match=tensor):
        engine.load(folder, "cross-encoder")


def test_a_backbone_alone_is_refused(engine: ScoringEngine, folders: Folders, tmp_path: Path) -> None:
    """A library would fill the head with random numbers."""
    folder = copied(folders("bert"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if "classifier" not in name},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ModelLoadFailed, match="2 missing keys"):
        engine.load(folder, "cross-encoder")


def test_a_pooler_that_the_class_does_not_have_is_no_fault(
    engine: ScoringEngine, folders: Folders, load: Load, tmp_path: Path
) -> None:
    """Older versions saved RoBERTa classifiers with a pooler that the model does not run."""
    folder = copied(folders("roberta"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    width = tensors["classifier.dense.weight"].shape[0]
    tensors |= {
        "roberta.pooler.dense.weight": torch.randn(width, width),
        "roberta.pooler.dense.bias": torch.randn(width),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    documents = ragged_documents(5)
    scores = engine.load(folder, "cross-encoder", head={"activation": "identity"}).scores("search", documents)
    np.testing.assert_allclose(scores, load("roberta").scores("search", documents), rtol=0, atol=MAX_DIFFERENCE)


@pytest.mark.parametrize("kind", ["bert", "modernbert mean", "deberta-v2"])
def test_the_head_computes_in_float32(kind: str, load: Load) -> None:
    """The weights of the head, with its pooler, are not rounded. The backbone computes in bfloat16."""
    weights = load(kind, SIXTEEN).resident.weights
    head = weights.heads["score"]._head._model
    exact = load(kind).resident.weights.heads["score"]._head._model.state_dict()
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
    assert all(torch.equal(parameter, exact[name]) for name, parameter in head.named_parameters())
    assert weights.backbone._model.dtype == SIXTEEN_TYPE


@pytest.mark.parametrize("kind", long_but(KINDS, USUAL))
def test_a_head_that_reads_the_first_token_alone_is_known(kind: str, load: Load) -> None:
    """A head of this kind runs once for all lengths. If it is not recognised, scores stay right and take longer."""
    head = load(kind).resident.weights.heads["score"]
    assert getattr(head, "_reads_first", None) == {"modernbert mean": False, "qwen2": None}.get(kind, True)


# a model that was trained, which takes 25 s


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "trained-cross-encoder", trained_cross_encoder)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_cross_encoder_trained_on_sts_b_scores_like_the_library(trained: Path, engine: ScoringEngine) -> None:
    scoring = engine.load(trained, "cross-encoder", max_tokens=128)
    pairs = sts_pairs("test")[:300]
    outcomes = scoring.run([Asked([right], left) for left, right, _ in pairs])
    scores = np.array([score_of(outcome) for (outcome,) in outcomes])
    expected = oracle(trained, [(left, right) for left, right, _ in pairs])
    assert np.abs(scores - expected).max() <= MAX_DIFFERENCE
    assert spearmanr(scores, [gold for *_, gold in pairs]).statistic >= 0.8


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_trained_model_ranks_in_bfloat16_as_in_float32(trained: Path, engine: ScoringEngine) -> None:
    """Kendall's tau of 50 documents of all similarities, by the raw logits."""
    scoring = engine.load(trained, "cross-encoder", SIXTEEN, max_tokens=128, head={"activation": "identity"})
    if scoring.precision != SIXTEEN:
        pytest.skip("this CPU does not compute in bfloat16")
    pairs = sts_pairs("test")
    for start in range(0, 200, 50):
        chosen = pairs[start : start + 50]
        got = [score_of(outcome) for (outcome,) in scoring.run([Asked([right], left) for left, right, _ in chosen])]
        exact = oracle(trained, [(left, right) for left, right, _ in chosen], activation_fn=IDENTITY)
        assert tau(got, exact) >= TAU
