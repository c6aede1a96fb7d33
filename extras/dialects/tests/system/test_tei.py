"""Text Embeddings Inference: its routes, its errors and its clients, against a running cluster. Numbers are those of
the native routes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import shared
import torch
from cluster import Cluster
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from local_models import LocalModels
from sentence_transformers import CrossEncoder
from transformers import AutoModel, AutoTokenizer, pipeline

TEXTS = ["river search queue", "the winter garden (of music)", "Z\u00fcrich, \u6771\u4eac and \U0001f600", "kernel"]
LONG = "winter " * 600
pytestmark = shared.OPEN


@pytest.fixture(scope="module")
def cluster(open_cluster: Cluster) -> Cluster:
    return open_cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=60, trust_env=False) as client:
        yield client


def ask(client: httpx.Client, path: str, body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def native(client: httpx.Client, model: str, texts: list[str], **params: Any) -> list[list[float]]:
    slots = [ask(client, f"/v1/encode/test/{model}", {"items": [text], "params": params})["items"][0] for text in texts]
    return [slot["dense"]["values"] for slot in slots]


def refused(client: httpx.Client, path: str, body: Any) -> tuple[int, str]:
    answer = client.post(path, json=body)
    reply = answer.json()
    assert isinstance(reply["error"], str)
    assert set(reply) - {"errors"} == {"error", "error_type", "code", "detail"}
    assert reply["error"] == reply["detail"]["message"]
    assert reply["detail"]["code"] == reply["code"] == answer.headers["x-sie-error-code"]
    return answer.status_code, reply["error_type"]


@pytest.mark.parametrize("prefix", ["", "/tei/test/dense", "/tei/test%2Fdense"])
def test_vectors_are_those_of_the_native_route_alone(client: httpx.Client, prefix: str) -> None:
    for text, values in zip(TEXTS, native(client, "dense", TEXTS), strict=True):
        assert ask(client, f"{prefix}/embed", {"inputs": text}) == [values]
    assert len(ask(client, f"{prefix}/embed", {"inputs": TEXTS})) == len(TEXTS)
    assert ask(client, prefix or "/", {"inputs": TEXTS[0]}) == native(client, "dense", TEXTS[:1])


def test_ids_of_a_model_are_the_text_they_stand_for(client: httpx.Client, every_family: LocalModels) -> None:
    tokenizer = AutoTokenizer.from_pretrained(every_family.weights / "dense")
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    for text_ids, values in zip(ids, native(client, "dense", TEXTS), strict=True):
        assert ask(client, "/embed", {"inputs": text_ids}) == [values]
    assert len(ask(client, "/embed", {"inputs": ids})) == len(TEXTS)
    assert refused(client, "/embed", {"inputs": [[101, 10**7]]}) == (422, "Tokenizer")


def test_truncation_and_normalisation(client: httpx.Client) -> None:
    start = ask(client, "/embed", {"inputs": LONG, "truncation_direction": "Left"})
    end = ask(client, "/embed", {"inputs": LONG, "truncate": True, "truncation_direction": "right"})
    assert end == native(client, "dense", [LONG])
    assert start == native(client, "dense", [LONG], truncate="START")
    assert refused(client, "/embed", {"inputs": LONG, "truncate": False}) == (422, "Validation")
    (wide,) = ask(client, "/embed", {"inputs": TEXTS[0], "normalize": False})
    assert wide == native(client, "dense", TEXTS[:1], normalize=False)[0]


def test_a_row_for_each_token_not_normalised(client: httpx.Client, every_family: LocalModels) -> None:
    folder = every_family.weights / "dense"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    matrices = ask(client, "/embed_all", {"inputs": TEXTS})
    for text, rows in zip(TEXTS, matrices, strict=True):
        expected = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].detach().numpy()
        np.testing.assert_allclose(rows, expected, atol=2e-5)


def test_sparse_vectors(client: httpx.Client) -> None:
    vectors = ask(client, "/embed_sparse", {"inputs": TEXTS[:1]})
    slot = ask(client, "/v1/encode/test/sparse", {"items": TEXTS[:1], "output_types": ["sparse"]})["items"][0]["sparse"]
    assert [weight["index"] for weight in vectors[0]] == slot["indices"]
    assert [weight["value"] for weight in vectors[0]] == pytest.approx(slot["values"])


def test_rerank(client: httpx.Client) -> None:
    ranking = ask(client, "/rerank", {"query": TEXTS[0], "texts": TEXTS, "return_text": True})
    scores = ask(client, "/v1/score/test/cross", {"query": TEXTS[0], "items": TEXTS})["scores"]
    assert [(entry["index"], entry["score"]) for entry in ranking] == [
        (int(score["item_id"].removeprefix("item-")), pytest.approx(score["score"], abs=1e-6)) for score in scores
    ]
    assert [entry["text"] for entry in ranking] == [TEXTS[entry["index"]] for entry in ranking]
    assert "text" not in ask(client, "/rerank", {"query": "a", "texts": ["b"]})[0]


def test_relevance_of_every_kind_of_score_is_between_0_and_1_and_in_its_order(client: httpx.Client) -> None:
    for name in ("cross", "reranker", "late", "m3"):
        raw = ask(client, f"/tei/test/{name}/rerank", {"query": TEXTS[0], "texts": TEXTS, "raw_scores": True})
        ranking = ask(client, f"/tei/test/{name}/rerank", {"query": TEXTS[0], "texts": TEXTS})
        assert [entry["index"] for entry in ranking] == [entry["index"] for entry in raw], name
        assert all(0 <= entry["score"] <= 1 for entry in ranking), name


def test_raw_scores_are_the_logits(client: httpx.Client, every_family: LocalModels) -> None:
    library = CrossEncoder(str(every_family.weights / "cross"), device="cpu", activation_fn=torch.nn.Identity())
    expected = library.predict([(TEXTS[0], text) for text in TEXTS])
    ranking = ask(client, "/tei/test/cross/rerank", {"query": TEXTS[0], "texts": TEXTS, "raw_scores": True})
    assert {entry["index"]: entry["score"] for entry in ranking} == pytest.approx(dict(enumerate(expected)), abs=1e-4)


def test_classes_of_texts_and_pairs(client: httpx.Client, every_family: LocalModels) -> None:
    classify = pipeline("text-classification", model=str(every_family.weights / "classes"), top_k=None)
    for text in TEXTS:
        expected = {prediction["label"]: prediction["score"] for prediction in classify([text])[0]}
        predictions = ask(client, "/tei/test/classes/predict", {"inputs": text})
        assert [prediction["label"] for prediction in predictions] == sorted(
            expected, key=lambda label: -expected[label]
        )
        assert {prediction["label"]: prediction["score"] for prediction in predictions} == pytest.approx(
            expected, abs=1e-5
        )
    batch = ask(client, "/tei/test/classes/predict", {"inputs": [[TEXTS[0]], [TEXTS[0], TEXTS[1]]]})
    assert len(batch) == 2
    assert batch[0] != batch[1]
    pair = ask(client, "/tei/test/classes/predict", {"inputs": [TEXTS[0], TEXTS[1]]})
    assert [prediction["label"] for prediction in batch[1]] == [prediction["label"] for prediction in pair]
    assert [prediction["score"] for prediction in batch[1]] == pytest.approx(
        [prediction["score"] for prediction in pair], abs=1e-5
    )


def test_similarity_is_the_cosine(client: httpx.Client) -> None:
    body = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}
    vectors = np.array(native(client, "dense", TEXTS))
    for path in ("/similarity", "/", "/tei/test/dense"):
        np.testing.assert_allclose(ask(client, path, body), vectors @ vectors[0], atol=1e-5)


def test_tokens_and_back(client: httpx.Client, every_family: LocalModels) -> None:
    tokenizer = AutoTokenizer.from_pretrained(every_family.weights / "dense")
    token_lists = ask(client, "/tokenize", {"inputs": TEXTS})
    for text, tokens in zip(TEXTS, token_lists, strict=True):
        assert [token["id"] for token in tokens] == tokenizer(text)["input_ids"]
        for token in tokens:
            if token["special"]:
                assert token["start"] is token["stop"] is None
            else:
                assert text.encode()[token["start"] : token["stop"]].decode() == token["text"]
    bare = ask(client, "/tokenize", {"inputs": TEXTS[0], "add_special_tokens": False})
    assert [token["id"] for token in bare[0]] == tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert ask(client, "/decode", {"ids": ids}) == [
        tokenizer.decode(text_ids, skip_special_tokens=True) for text_ids in ids
    ]
    assert ask(client, "/decode", {"ids": ids[0], "skip_special_tokens": False}) == [tokenizer.decode(ids[0])]


def test_the_hugging_face_client(cluster: Cluster, client: httpx.Client) -> None:
    dense = InferenceClient(f"{cluster.url}/tei/test/dense")
    np.testing.assert_array_equal(
        dense.feature_extraction(TEXTS[0])[0], np.float32(native(client, "dense", TEXTS[:1])[0])
    )
    vectors = np.array(native(client, "dense", TEXTS))
    np.testing.assert_allclose(dense.sentence_similarity(TEXTS[0], TEXTS), vectors @ vectors[0], atol=1e-5)
    with pytest.raises(HfHubHTTPError) as unknown:
        InferenceClient(f"{cluster.url}/tei/test/nothing").feature_extraction("a")
    assert unknown.value.response.status_code == 404
    with pytest.raises(HfHubHTTPError) as too_long:
        dense.feature_extraction(LONG, truncate=False)
    assert too_long.value.response.status_code == 422
