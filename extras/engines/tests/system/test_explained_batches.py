"""What a cluster says about a batch of the engine openvino."""

from __future__ import annotations

import httpx
import shared
from cluster import MODEL, Cluster

pytestmark = shared.OPEN


def test_an_explanation_has_the_engine_and_the_padding_to_one_of_its_lengths(open_cluster: Cluster) -> None:
    answer = httpx.post(
        f"{open_cluster.url}/v1/encode/{MODEL}",
        json={"items": ["Hello"]},
        headers={"x-sie-explain": "1"},
        timeout=60,
        trust_env=False,
    )
    assert answer.json()["usage"]["prompt_tokens"] == 3
    (explanation,) = answer.json()["explain"]
    assert (explanation["batch"]["engine"], explanation["batch"]["padding"]) == ("openvino", 5)
