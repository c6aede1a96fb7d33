"""Model files of the public SIE as entries: what each field becomes, and which fields are reported instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sie_config_service.documents import read
from sie_config_service.writes import Edits
from sie_contracts.errors import ValidationFailed
from sie_contracts.models.catalogue import packaged_folder
from sie_contracts.models.entries import parse_entry
from sie_contracts.models.public_models import Translation, translated
from sie_runtime.feed import read_folder

pytestmark = pytest.mark.usefixtures("sample_families")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
INSTALLED = Path(__file__).parents[2] / ".venv-sdks/server/sie_server/models"
DENSE = f"""
sie_id: org/dense
hf_id: org/dense
hf_revision: {COMMIT}
inputs: {{text: true, image: false, audio: false, video: false}}
tasks:
  encode: {{dense: {{dim: 384}}, sparse: null, multivector: null}}
  score: null
  extract: null
max_sequence_length: 512
profiles:
  default:
    max_batch_tokens: 8192
    compute_precision: float16
    adapter_path: sie_server.adapters.bert_flash:BertFlashAdapter
    adapter_options:
      loadtime: {{trust_remote_code: true, attn_implementation: sdpa}}
      runtime: {{pooling: mean, normalize: true, query_template: "query: {{text}}", doc_template: "{{text}}"}}
  raw:
    extends: default
    adapter_options:
      runtime: {{pooling: mean, normalize: false, query_template: "query: {{text}}"}}
  exact:
    extends: default
    compute_precision: float32
  candle:
    extends: default
    adapter_path: sie_server_rust.adapters.candle:CandleEmbeddingAdapter
  asked:
    extends: default
    adapter_options:
      runtime: {{pooling: mean, normalize: true, query_template: "ask: {{text}}"}}
"""
PERSONS = """
sie_id: org/persons
hf_id: org/persons
tasks: {extract: {}}
max_sequence_length: 384
profiles:
  default:
    max_batch_tokens: 16384
    adapter_path: sie_server.adapters.sample:SampleEntitiesAdapter
"""
WRITER = f"""
sie_id: org/writer
hf_id: org/writer
hf_revision: {COMMIT}
tasks: {{generate: {{context_length: 8192, max_output_tokens: 4096}}}}
profiles:
  default:
    max_batch_tokens: 16384
    adapter_path: sie_server.adapters.sglang.generation:SGLangGenerationAdapter
    kv_budget_tokens: 1
"""


LATE = f"""
sie_id: org/late
hf_id: org/late
hf_revision: {COMMIT}
tasks: {{encode: {{multivector: {{dim: 128}}}}, score: {{}}}}
max_sequence_length: 512
profiles:
  default:
    max_batch_tokens: 16384
    adapter_path: sie_server.adapters.colbert:ColBERTAdapter
    adapter_options:
      loadtime:
        token_dim: 128
        normalize: true
        query_prefix: '[unused0]'
        doc_prefix: '[unused1]'
        query_max_length: 32
        query_expansion: true
        doc_punctuation_skiplist: true
        muvera_config: {{num_repetitions: 40, center_tokens: true}}
      runtime: {{max_seq_length: 300, muvera: null}}
  muvera:
    extends: default
    adapter_options:
      runtime: {{max_seq_length: 300, muvera: {{}}, output_types: [dense], output_similarity: {{dense: dot}}}}
"""


DECODER = f"""
sie_id: org/judge
hf_id: org/judge
hf_revision: {COMMIT}
tasks: {{score: {{}}}}
max_sequence_length: 4096
profiles:
  default:
    max_batch_tokens: 16384
    compute_precision: bfloat16
    adapter_path: sie_server.adapters.qwen2_flash_cross_encoder.adapter:Qwen2FlashCrossEncoderAdapter
    adapter_options:
      loadtime:
        yes_token: 'yes'
        no_token: 'no'
        input_format: qwen3
        score_mode: log_softmax
        default_instruction: Judge it
"""


LABELS = f"""
sie_id: org/labels
hf_id: org/labels
hf_revision: {COMMIT}
tasks: {{extract: {{}}}}
max_sequence_length: 512
profiles:
  default:
    max_batch_tokens: 16384
    adapter_path: sie_server.adapters.sample:SampleClassesAdapter
    adapter_options:
      runtime: {{threshold: 0.3, classification_type: multi-label}}
"""


def entry_of(text: str, present: dict[str, Any] | None = None, **changes: Any) -> Translation:
    """The translation of a file, whose entry passes the check of entries."""
    translation = translated({**yaml.safe_load(text), **changes}, present)
    parse_entry(translation.entry)
    return translation


def refused(text: str, **changes: Any) -> tuple[str, str]:
    with pytest.raises(ValidationFailed) as caught:
        translated({**yaml.safe_load(text), **changes})
    (fault,) = caught.value.extras["errors"]
    return fault["loc"], fault["message"]


def test_a_dense_encoder_has_its_pooling_prompts_and_profiles() -> None:
    translation = entry_of(DENSE)
    assert translation.entry == {
        "id": "org/dense",
        "family": "text-encoder",
        "weights": {"hub": "org/dense", "revision": COMMIT},
        "outputs": {"dense": 384},
        "max_tokens": 512,
        "load": {"precision": "float16"},
        "run": {"pooling": "mean"},
        "prompts": {"query": "query: {text}"},
        "profiles": {
            "raw": {"run": {"normalize": False}},
            "exact": {"load": {"precision": "float32"}},
            "candle": {},
            "asked": {},
        },
    }
    assert [note.partition(":")[0] for note in translation.ignored] == [
        "profiles.default.max_batch_tokens",
        "profiles.asked",
        "profiles.default.adapter_options.loadtime.trust_remote_code",
        "profiles.default.adapter_options.loadtime.attn_implementation",
    ]


def test_weights_without_a_commit_are_unpinned_and_named() -> None:
    translation = entry_of(PERSONS)
    assert translation.entry["weights"] == {"hub": "org/persons", "unpinned": True}
    assert any(note.startswith("hf_revision:") for note in translation.ignored)
    assert entry_of(PERSONS, weights_path="/w").entry["weights"]["path"] == "/w"
    assert refused(PERSONS, hf_id=None)[0] == "$.hf_id"


def test_what_a_file_does_not_say_is_that_of_the_catalogue() -> None:
    present = {
        "id": "org/persons",
        "description": "of the catalogue",
        "family": "sample-entities",
        "weights": {"hub": "org/persons", "unpinned": True, "digests": {"a": "b"}},
        "outputs": {"entities": 0},
        "max_tokens": 1536,
        "run": {"parameters": {"threshold": 0.3}},
        "profiles": {"loud": {}},
    }
    entry = entry_of(PERSONS, present, max_sequence_length=None, hf_revision=COMMIT).entry
    assert (entry["description"], entry["max_tokens"]) == ("of the catalogue", 1536)
    assert entry["weights"] == {"hub": "org/persons", "revision": COMMIT, "digests": {"a": "b"}}
    assert (entry["run"], "profiles" in entry) == ({"parameters": {"threshold": 0.3}}, False)
    assert refused(PERSONS, max_sequence_length=None)[0] == "$.max_sequence_length"


@pytest.mark.parametrize(
    ("changes", "loc", "words"),
    [
        ({}, "$.tasks.generate", "generates no text"),
        ({"tasks": {"extract": {}}}, "$.profiles.default.adapter_path", "SGLangGenerationAdapter"),
        ({"tasks": {}, "profiles": {}}, "$.profiles", "at least one profile"),
        ({"tasks": 3}, "$.tasks", "expected a map"),
        ({"profiles": {1: {}}}, "$.profiles", "keys: expected a string"),
    ],
)
def test_a_model_that_nothing_here_computes_is_refused_by_its_field(
    changes: dict[str, Any], loc: str, words: str
) -> None:
    location, message = refused(WRITER, **changes)
    assert location == loc
    assert words in message


@pytest.mark.parametrize(
    ("old", "new", "loc", "line"),
    [
        ("adapter_path: x:BertFlashAdapter", "adapter_path: 5", "$.profiles.default.adapter_path", 6),
        ("extends: default", "extends: [a]", "$.profiles.fast.extends", 8),
        ("loadtime: {}", "loadtime: 1", "$.profiles.fast.adapter_options.loadtime", 9),
        ("fast:\n", "fast: 5\n  other:\n", "$.profiles.fast", 7),
    ],
)
def test_a_fault_of_a_file_names_its_profile_and_its_line(old: str, new: str, loc: str, line: int) -> None:
    text = (
        "sie_id: a/b\nhf_id: a/b\nmax_sequence_length: 9\ntasks: {encode: {dense: {dim: 8}}}\nprofiles:\n"
        "  default: {adapter_path: x:BertFlashAdapter}\n"
        "  fast:\n    extends: default\n    adapter_options: {loadtime: {}}\n"
    )
    Edits._translated(read(text.encode(), "yaml"), "a/b", None)
    with pytest.raises(ValidationFailed) as caught:
        Edits._translated(read(text.replace(old, new).encode(), "yaml"), "a/b", None)
    (fault,) = caught.value.extras["errors"]
    assert (fault["loc"], fault["line"]) == (loc, line)


def test_late_interaction_has_its_markers_and_lengths() -> None:
    translation = entry_of(LATE)
    assert translation.entry["outputs"] == {"multivector": 128}
    assert translation.entry["head"] == {
        "query_marker": "[unused0]",
        "document_marker": "[unused1]",
        "query_length": 32,
        "query_expansion": True,
        "skip_punctuation": True,
        "muvera": {"num_repetitions": 40},
        "document_length": 300,
    }
    assert translation.entry["profiles"] == {"muvera": {"run": {"muvera": True, "output_types": ["dense"]}}}
    assert any(
        note.endswith("muvera_config.center_tokens: ignored, it has no counterpart") for note in translation.ignored
    )


def test_a_profile_of_another_family_is_named_and_left_out() -> None:
    raw = yaml.safe_load(DENSE)
    raw["profiles"]["remote"] = {
        "extends": "default",
        "adapter_path": "sie_server.adapters.remote.sie:SieUpstreamAdapter",
    }
    raw["profiles"]["cross"] = {"extends": "default", "adapter_path": "a:CrossEncoderAdapter"}
    translation = translated(raw)
    assert {"remote", "cross"}.isdisjoint(translation.entry["profiles"])
    named = {note.partition(":")[0] for note in translation.ignored}
    assert {"profiles.remote", "profiles.cross"} <= named


def test_a_decoder_that_scores_has_the_pieces_of_its_pair() -> None:
    entry = entry_of(DECODER).entry
    assert (entry["family"], entry["outputs"]) == ("decoder-reranker", {"score": 0})
    assert entry["head"] == {"yes_token": "yes", "no_token": "no", "score": "probability"}
    assert entry["prompts"] == {"default_instruction": "Judge it"}
    ours = read_folder(packaged_folder() / "models")
    assert tuple(entry["pair"]) == ours["Qwen/Qwen3-Reranker-4B"].pair
    mixed = yaml.safe_load(DECODER)
    options = mixed["profiles"]["default"]["adapter_options"]["loadtime"]
    options |= {"input_format": "mxbai", "score_mode": "logit_diff", "yes_token": "1", "no_token": "0"}
    model_entry = translated(mixed).entry
    assert tuple(model_entry["pair"]) == ours["mixedbread-ai/mxbai-rerank-large-v2"].pair
    assert model_entry["head"]["score"] == "difference"


def test_options_of_a_family_are_parameters() -> None:
    entry = entry_of(LABELS).entry
    assert (entry["family"], entry["outputs"]) == ("sample-classes", {"classifications": 0})
    assert entry["run"] == {"parameters": {"threshold": 0.3, "multi_label": True}}


def test_a_file_without_a_default_profile_has_the_first_one_as_default() -> None:
    raw = yaml.safe_load(PERSONS)
    translation = entry_of(PERSONS, profiles={"candle": raw["profiles"]["default"]})
    assert translation.entry["profiles"] == {"candle": {}}
    assert any(note.startswith("profiles: the file has no default profile") for note in translation.ignored)
