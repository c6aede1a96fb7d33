"""Trained models on the semantic textual similarity benchmark, through the API: the numbers of the public library, and
its ranking.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import oracle
import pytest
import shared
from cluster import MODEL, Cluster
from local_models import LocalModels
from made_once import made_once
from parity.score_checkpoints import sts_pairs, trained_cross_encoder
from scipy.stats import spearmanr

from sie_contracts import arrays

PAIRS = 300
pytestmark = [shared.OPEN, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "trained-cross-encoder", trained_cross_encoder)


@pytest.fixture(scope="module")
def client(open_cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=open_cluster.url, timeout=60) as client:
        yield client


@pytest.mark.long
@pytest.mark.parametrize(("model", "low", "high"), [(MODEL, 0.8198, 0.8208), ("test/mini:bf16", 0.8190, 1.0)])
def test_minilm_ranks_as_published(client: httpx.Client, model: str, low: float, high: float) -> None:
    """Spearman's correlation of cosines with the gold scores of the test set: 0.8203 in float32."""
    left, right, gold = oracle.sts_benchmark()
    vectors: dict[str, np.ndarray] = {}
    texts = list(dict.fromkeys([*left, *right]))
    for start in range(0, len(texts), 512):
        part = texts[start : start + 512]
        answer = client.post(f"/v1/encode/{model}", json={"items": part}, headers={"accept": "application/msgpack"})
        slots = arrays.unpack(arrays.decode_msgpack(answer.content))["items"]
        vectors |= {text: slot["dense"]["values"] for text, slot in zip(part, slots, strict=True)}
    scores = [float(vectors[a] @ vectors[b]) for a, b in zip(left, right, strict=True)]
    assert low <= spearmanr(scores, gold).statistic <= high


@pytest.mark.long
def test_a_trained_cross_encoder_scores_like_the_library(
    client: httpx.Client, open_cluster: Cluster, open_models: LocalModels, trained: Path
) -> None:
    from sentence_transformers import CrossEncoder

    entry = {"family": "cross-encoder", "outputs": {"score": 0}, "max_tokens": 128}
    open_models.add("trained", {**entry, "weights": {"path": str(trained)}})
    shared.wait_until_served(open_cluster, "test/trained")
    pairs = sts_pairs("test")[:PAIRS]
    scores = []
    for left, right, _ in pairs:
        answer = client.post("/v1/score/test/trained", json={"query": left, "items": [right]})
        scores.append(answer.json()["scores"][0]["score"])
    library = CrossEncoder(str(trained), device="cpu", max_length=128)
    expected = library.predict([(left, right) for left, right, _ in pairs], show_progress_bar=False)
    assert np.abs(np.array(scores) - expected).max() <= 1e-4
    assert spearmanr(scores, [gold for *_, gold in pairs]).statistic >= 0.8
