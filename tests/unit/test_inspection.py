"""Folders that no catalogue knows become entries that load, and answer as the public libraries do on the
same folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from inspected_models import entry_of, inspected, run
from overlays import wanted_models
from parity import (
    heads_checkpoints,
)
from parity.checkpoints import ARCHITECTURES, MAX_TOKENS, WIDTH, add_modules, build, dense, modules_of
from parity.score_checkpoints import build_head
from safetensors.torch import load_file, save_file
from selection import long_but
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    pipeline,
)

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.loading.inspection import inspect
from sie_cli.main import main
from sie_cli.models.inspect import answers
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.catalogue import packaged_folder
from sie_contracts.models.entries import parse_entry
from sie_contracts.settings import Settings

TEXTS = ["The river runs north.", "", "Zürich, 東京 and 😀: (a) 3.14...", "one " * (2 * MAX_TOKENS)]
QUERY = "Where does the river run?"
SETTINGS = Settings(device="cpu", default_compute_precision="float32")
NEAR = 2e-5


@pytest.fixture(scope="module")
def engine() -> Iterator[AdapterEngine]:
    engine = AdapterEngine(SETTINGS)
    yield engine
    assert engine.stop(10)


# folders of models that no catalogue has


def dense_folder(folder: Path) -> Path:
    return add_modules(
        build(folder, ARCHITECTURES["embeddinggemma"], dtype="bfloat16"),
        modules_of(ARCHITECTURES["embeddinggemma"]),
        prompts={
            "query": "task: search result | query: ",
            "document": "title: none | text: ",
            "clustering": "task: clustering | query: ",
        },
    )


def classifier_folder(folder: Path) -> Path:
    return build_head(folder, "modernbert", AutoModelForSequenceClassification)


def splade_folder(folder: Path) -> Path:
    return heads_checkpoints.splade(
        folder, heads_checkpoints.masked(folder.with_name("masked"), "distilbert"), "log1p_relu"
    )


def pylate_folder(folder: Path) -> Path:
    config = {"query_length": 48, "document_length": 180, "attend_to_expansion_tokens": True}
    return heads_checkpoints.pylate(folder, heads_checkpoints.with_markers("bert"), [dense(WIDTH, 24)], config)


def tagger_folder(folder: Path) -> Path:
    return build_head(folder, "xlm-roberta", AutoModelForTokenClassification, ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])


def test_a_dense_folder_with_projections_and_prompts(tmp_path: Path, engine: AdapterEngine) -> None:
    folder = dense_folder(tmp_path / "dense")
    (folder / "README.md").write_text("---\nlicense: gemma\ntags: [a]\n---\n# A model\n")
    entry = inspected(folder)
    assert (entry.family, entry.outputs, entry.max_tokens) == ("text-encoder", {"dense": 48}, MAX_TOKENS)
    assert entry.prompts == {
        "query": "task: search result | query: {text}",
        "document": "title: none | text: {text}",
        "clustering": "task: clustering | query: {text}",
    }
    assert (entry.run.pooling, entry.run.normalize, entry.load.precision, entry.license) == (
        "mean",
        True,
        "bfloat16",
        "gemma",
    )
    assert {
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
        "model.safetensors",
        "tokenizer.json",
    } <= entry.weights.digests.keys()
    assert "README.md" not in entry.weights.digests
    in_float32 = parse_entry(
        {**yaml.safe_load(yaml.safe_dump(inspect(folder, "test/dense", {"path": str(folder)}).entry)), "load": {}}
    )
    oracle = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": "float32"})
    for is_query, name in ((True, "query"), (False, "document")):
        vectors = np.stack([slot["dense"] for slot in run(engine, in_float32, "encode", TEXTS, is_query=is_query)])
        assert np.abs(vectors - oracle.encode(TEXTS, prompt_name=name)).max() <= NEAR


def test_a_cross_encoder_with_the_activation_of_its_files(tmp_path: Path, engine: AdapterEngine) -> None:
    folder = classifier_folder(tmp_path / "cross")
    entry = inspected(folder)
    assert (entry.family, entry.outputs, entry.head.activation) == ("cross-encoder", {"score": 0}, "sigmoid")
    oracle = CrossEncoder(str(folder), device="cpu", max_length=entry.max_tokens)
    expected = oracle.predict([(QUERY, text) for text in TEXTS])
    assert np.abs(np.array(run(engine, entry, "score", TEXTS, QUERY)) - expected).max() <= NEAR
    config = json.loads((folder / "config.json").read_text())
    stored = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "6.2.0"}
    (folder / "config.json").write_text(json.dumps({**config, "sentence_transformers": stored}))
    assert inspected(folder).head.activation == "identity"


def test_a_splade_folder(tmp_path: Path, engine: AdapterEngine) -> None:
    folder = splade_folder(tmp_path / "splade")
    entry = inspected(folder)
    assert entry.outputs == {"sparse": json.loads((folder / "config.json").read_text())["vocab_size"]}
    assert entry.head.sparse_activation == "log1p_log1p_relu"
    expected = SparseEncoder(str(folder), device="cpu").encode(TEXTS, convert_to_sparse_tensor=False).numpy()
    for output, row in zip(run(engine, entry, "encode", TEXTS), expected, strict=True):
        vector = np.zeros_like(row)
        vector[output["sparse.indices"]] = output["sparse.values"]
        assert np.abs(vector - row).max() <= NEAR


def test_a_late_interaction_folder_of_pylate(tmp_path: Path, engine: AdapterEngine) -> None:
    folder = pylate_folder(tmp_path / "pylate")
    entry = inspected(folder)
    assert entry.outputs == {"multivector": 24}
    assert (entry.head.query_marker, entry.head.document_marker) == ("[Q] ", "[D] ")
    assert (entry.head.query_length, entry.head.document_length) == (48, 180)
    assert (entry.head.query_expansion, entry.head.attend_expansion, entry.head.skip_punctuation) == (True, True, True)
    oracle = MultiVectorEncoder(str(folder), device="cpu")
    for is_query, encode in ((True, oracle.encode_query), (False, oracle.encode_document)):
        for output, rows in zip(run(engine, entry, "encode", TEXTS, is_query=is_query), encode(TEXTS), strict=True):
            assert output["multivector"].shape == tuple(rows.shape)
            assert np.abs(output["multivector"] - np.asarray(rows)).max() <= NEAR


def test_a_late_interaction_folder_whose_skip_list_no_entry_can_write_is_left_to_its_files(tmp_path: Path) -> None:
    config = {"query_length": 48, "skiplist_words": [".", "river"]}
    folder = heads_checkpoints.pylate(
        tmp_path / "own", heads_checkpoints.with_markers("bert"), [dense(WIDTH, 24)], config
    )
    assert inspected(folder).head.query_marker is None


def test_a_token_classifier(tmp_path: Path, engine: AdapterEngine) -> None:
    folder = tagger_folder(tmp_path / "tagger")
    entry = inspected(folder)
    assert (entry.family, entry.outputs, entry.max_tokens) == ("token-classifier", {"entities": 0}, MAX_TOKENS)
    tag = pipeline("token-classification", model=str(folder), device="cpu", aggregation_strategy="simple")
    (output,) = run(engine, entry, "extract", TEXTS[:1])
    expected = tag(TEXTS[0])
    assert expected
    places = [(entity["start"], entity["end"], entity["label"]) for entity in output["entities"]]
    assert places == [(entity["start"], entity["end"], entity["entity_group"]) for entity in expected]


def test_a_text_classifier(tmp_path: Path, engine: AdapterEngine) -> None:
    folder = build_head(tmp_path / "classes", "bert", AutoModelForSequenceClassification, ["good", "bad"])
    report = inspect(folder, "a/b", {"path": str(folder)})
    assert any("head.activation softmax" in line for line in report.assumed)  # needed for a score of two labels
    entry = inspected(folder)
    assert (entry.family, entry.outputs, entry.max_tokens) == ("text-classifier", {"classifications": 0}, MAX_TOKENS)
    (output,) = run(engine, entry, "extract", TEXTS[:1])
    (expected,) = pipeline("text-classification", model=str(folder), device="cpu", top_k=None)(TEXTS[:1])
    assert [classification["label"] for classification in output["classifications"]] == [
        classification["label"] for classification in expected
    ]


def stanford_folder(folder: Path) -> Path:
    return heads_checkpoints.stanford(folder, 24, {"query_maxlen": 24, "doc_maxlen": 90, "query_token_id": "[unused1]"})


def idf_folder(folder: Path) -> Path:
    return heads_checkpoints.idf(heads_checkpoints.masked(folder, "bert"))


def routed_folder(folder: Path) -> Path:
    return heads_checkpoints.inference_free(
        folder, heads_checkpoints.masked(folder.with_name("masked"), "bert"), beside=True
    )


def entailment_folder(folder: Path) -> Path:
    labels = ["contradiction", "entailment", "neutral"]
    return build_head(folder, "bert", AutoModelForSequenceClassification, labels)


OTHER_FOLDERS: list[Any] = [
    (heads_checkpoints.bge_m3, "text-encoder", {"dense", "sparse", "multivector", "score"}),
    (stanford_folder, "text-encoder", {"multivector"}),
    (idf_folder, "text-encoder", {"sparse"}),
    (routed_folder, "text-encoder", {"sparse"}),
    (entailment_folder, "zero-shot-classifier", {"classifications"}),
]


@pytest.mark.parametrize(
    ("make", "family", "outputs"),
    long_but(OTHER_FOLDERS, [case for case in OTHER_FOLDERS if case[0] in (heads_checkpoints.bge_m3, idf_folder)]),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_other_folders_load_and_answer_too(
    make: Callable[[Path], Path], family: str, outputs: set[str], tmp_path: Path
) -> None:
    entry = inspected(make(tmp_path / "model"))
    assert (entry.family, set(entry.outputs)) == (family, outputs)
    lines = answers(entry, SETTINGS)
    assert len(lines) > len(entry.tasks)
    assert "nan" not in "".join(lines).lower()


# folders that lack information, and folders that are no model


def test_what_no_file_says_is_named(tmp_path: Path) -> None:
    report = inspect(build(tmp_path / "bare", ARCHITECTURES["bert"]), "a/b", {"path": "/x"})
    assert any("pooling mean" in line for line in report.assumed)
    assert entry_of(report).run.pooling == "mean"


def test_an_instruction_in_a_stored_prompt_becomes_the_default_instruction(tmp_path: Path) -> None:
    prompts = {"query": "Instruct: Find what answers the question\nQuery:", "document": ""}
    folder = add_modules(
        build(tmp_path / "taught", ARCHITECTURES["qwen3 causal"]), modules_of(ARCHITECTURES["qwen3 causal"]), prompts
    )
    entry = inspected(folder)
    assert entry.prompts == {
        "query": "Instruct: {instruction}\nQuery:{text}",
        "default_instruction": "Find what answers the question",
    }
    assert entry.run.pooling == "last"


def test_the_direction_of_attention_is_written_down(tmp_path: Path) -> None:
    folder = build(tmp_path / "both", ARCHITECTURES["qwen2 bidirectional"])
    assert inspected(add_modules(folder, modules_of(ARCHITECTURES["qwen2 bidirectional"]))).load.causal is False


def test_a_changed_file_is_refused_by_what_was_inspected(tmp_path: Path, engine: AdapterEngine) -> None:
    folder = build(tmp_path / "changed", ARCHITECTURES["bert"])
    entry = inspected(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.layer.0.output.LayerNorm.weight"] += 0.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadFailed, match=r"model\.safetensors") as refused:
        engine.residency.ensure(entry.id, entry)
    assert refused.value.extras["error_class"] == "CERTIFICATE"


def lora(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


def without_weights(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "bert"}')


def half_written(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def remote(folder: Path) -> None:
    (folder / "config.json").write_text(
        '{"model_type": "new", "auto_map": {"AutoModel": "org/code--modeling.NewModel"}}'
    )
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")


def language_model(folder: Path) -> None:
    build(folder, ARCHITECTURES["qwen2 causal"], head=AutoModelForCausalLM)


@pytest.mark.parametrize(
    ("make", "error_class", "text"),
    [
        (lambda folder: None, "NOT_FOUND", "no config.json, no modules.json and no file of a package; it has nothing"),
        (lora, "INCOMPATIBLE", "LoRA of org/base"),
        (without_weights, "NOT_FOUND", r"no \*.safetensors"),
        (half_written, "INCOMPATIBLE", "is not JSON"),
        (remote, "INCOMPATIBLE", "'new'.*org/code--modeling.NewModel"),
        (language_model, "INCOMPATIBLE", "language model"),
    ],
)
def test_what_is_no_model_here_says_what_is_missing(
    make: Callable[[Path], None], error_class: str, text: str, tmp_path: Path
) -> None:
    make(tmp_path)
    with pytest.raises(ModelLoadFailed, match=text) as refused:
        inspect(tmp_path, "a/b", {"path": str(tmp_path)})
    assert refused.value.extras["error_class"] == error_class


# the commands


def sie(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(main, ["models", *arguments], env={"SIE_HF_FALLBACK": "false", **environment})


def test_an_added_model_is_in_the_catalogue_that_serve_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = add_modules(build(tmp_path / "mine", ARCHITECTURES["bert"]), modules_of(ARCHITECTURES["bert"]))
    models = tmp_path / "models"
    monkeypatch.chdir(tmp_path)
    added = sie("add", str(folder), "--id", "me/mine")
    assert added.exit_code == 0, added.output
    assert f"wrote {Path('models/me/mine.yaml')}" in added.output
    entry = wanted_models(Settings(models_dir=str(models)))["me/mine"][0]
    assert entry.weights.path == str(folder.resolve())
    again = sie("add", str(folder), "--id", "me/mine", "--models-dir", str(models))
    assert again.exit_code == 1
    assert "--force replaces it" in again.output
    assert sie("add", str(folder), "--id", "me/mine", "--models-dir", str(models), "--force").exit_code == 0


def test_inspect_prints_an_entry_and_with_check_what_it_answers(tmp_path: Path) -> None:
    folder = add_modules(build(tmp_path / "mine", ARCHITECTURES["bert"]), modules_of(ARCHITECTURES["bert"]))
    shown = sie("inspect", str(folder), "--check", SIE_DEFAULT_COMPUTE_PRECISION="float32")
    assert shown.exit_code == 0, shown.output
    text, _, answered = shown.stdout.partition("\n\n")
    assert parse_entry(yaml.safe_load(text)).outputs == {"dense": WIDTH}
    assert "# found: pooling mean, normalised: modules.json" in text
    assert "norm 1.000000" in answered


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("inspect", "./nowhere"), "there is no folder ./nowhere, and it is no id of the hub"),
        (("inspect", "org/unknown"), "name its commit: `sie models add org/unknown --revision COMMIT`"),
        (("inspect", "BAAI/bge-m33"), "--revision COMMIT`; did you mean BAAI/bge-m3"),
        (("inspect", "org/unknown", "--revision", "a" * 40), "is not in the local cache"),
        (("add", ".", "--revision", "a" * 40), "--revision is for repositories of the hub"),
        (("add", ".", "--models-dir", "s3://bucket/models"), "not a local folder"),
    ],
)
def test_commands_that_cannot_be_done_say_why_in_a_line(arguments: tuple[str, ...], text: str, tmp_path: Path) -> None:
    refused = sie(*arguments, SIE_LOCAL_CACHE=str(tmp_path))
    assert refused.exit_code == 1
    assert text in refused.output
    assert "Traceback" not in refused.output


def test_a_hub_model_of_the_catalogue_keeps_its_options_and_gets_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packaged entry has no pinned commit; its snapshot is in the cache."""
    packaged = (packaged_folder() / "models/rasyosef/splade-mini.yaml").read_text()
    entry_file = tmp_path / "catalog/models/rasyosef/splade-mini.yaml"
    entry_file.parent.mkdir(parents=True)
    entry_file.write_text(re.sub(r"revision: \w+", "unpinned: true", packaged))
    monkeypatch.setattr("sie_runtime.feed.packaged_folder", lambda: tmp_path / "catalog")
    commit = "b" * 40
    snapshot = tmp_path / "hub" / "models--rasyosef--splade-mini" / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    heads_checkpoints.masked(snapshot, "bert")
    for revision in (["--revision", commit], []):
        shown = sie("inspect", "rasyosef/splade-mini", *revision, SIE_LOCAL_CACHE=str(tmp_path))
        assert shown.exit_code == 0, shown.output
        entry = parse_entry(yaml.safe_load(shown.stdout))
        assert (entry.id, entry.weights.revision, entry.weights.unpinned) == ("rasyosef/splade-mini", commit, False)
        assert entry.outputs == {"sparse": 30522}
        assert "model.safetensors" in entry.weights.digests
