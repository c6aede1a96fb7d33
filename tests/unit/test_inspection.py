"""Folders that no catalogue knows become entries that load, and answer as the public libraries do on the
same folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from inspected_models import inspected, run
from overlays import wanted_models
from parity import heads_checkpoints
from parity.checkpoints import ARCHITECTURES, MAX_TOKENS, add_modules, build, modules_of
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForCausalLM

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.loading.inspection import inspect
from sie_cli.main import main
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.catalogue import packaged_folder
from sie_contracts.models.entries import parse_entry
from sie_contracts.settings import Settings

TEXTS = ["The river runs north.", "", "Zürich, 東京 and 😀: (a) 3.14...", "one " * (2 * MAX_TOKENS)]
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


# folders that lack information, and folders that are no model


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
    ("make", "error_class"),
    [
        (lambda folder: None, "NOT_FOUND"),
        (lora, "INCOMPATIBLE"),
        (without_weights, "NOT_FOUND"),
        (half_written, "INCOMPATIBLE"),
        (remote, "INCOMPATIBLE"),
        (language_model, "INCOMPATIBLE"),
    ],
)
def test_what_is_no_model_here_is_refused(make: Callable[[Path], None], error_class: str, tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(ModelLoadFailed) as refused:
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


def test_commands_that_cannot_be_done_are_refused(tmp_path: Path) -> None:
    for arguments in (
        ("inspect", "./nowhere"),
        ("inspect", "org/unknown"),
        ("inspect", "BAAI/bge-m33"),
        ("inspect", "org/unknown", "--revision", "a" * 40),
        ("add", ".", "--revision", "a" * 40),
        ("add", ".", "--models-dir", "s3://bucket/models"),
    ):
        refused = sie(*arguments, SIE_LOCAL_CACHE=str(tmp_path))
        assert (refused.exit_code, "Traceback" in refused.output) == (1, False), arguments


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


def test_a_changed_file_is_refused_by_what_was_inspected(tmp_path: Path, engine: AdapterEngine) -> None:
    folder = build(tmp_path / "changed", ARCHITECTURES["bert"])
    entry = inspected(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.layer.0.output.LayerNorm.weight"] += 0.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadFailed, match=r"model\.safetensors") as refused:
        engine.residency.ensure(entry.id, entry)
    assert refused.value.extras["error_class"] == "CERTIFICATE"


def test_the_direction_of_attention_is_written_down(tmp_path: Path) -> None:
    folder = build(tmp_path / "both", ARCHITECTURES["qwen2 bidirectional"])
    assert inspected(add_modules(folder, modules_of(ARCHITECTURES["qwen2 bidirectional"]))).load.causal is False
