"""Entities that a client gets over HTTP are those of the package that published the model's code."""

from __future__ import annotations

import httpx
import pytest
import shared
from cluster import Cluster
from local_models import LocalModels
from oracle import ragged_texts

pytestmark = shared.OPEN

LABELS = ["person", "river mountain", "Engine"]
ODD = ["Anna met 👩‍💻 in Zürich 😀😀 at the harbour", "e\u0301te\u0301 in winter, 東京", "", "שלום music"]


def test_gliner_finds_what_the_package_finds(open_cluster: Cluster, every_family: LocalModels) -> None:
    from gliner import GLiNER

    texts = [*ragged_texts(8, seed=3, longest=60), *ODD]

    def slots(threshold: float) -> list[dict[str, list[dict[str, object]]]]:
        body = {"items": texts, "params": {"labels": LABELS, "threshold": threshold}}
        answer = httpx.post(f"{open_cluster.url}/v1/extract/test/gliner", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["items"]  # type: ignore[no-any-return]

    package = GLiNER.from_pretrained(str(every_family.weights / "gliner"))
    count = 0
    for text, slot in zip(texts, slots(0.3), strict=True):
        expected = package.inference([text], LABELS, threshold=0.3)[0] if text else []
        count += len(expected)
        found, reference = (
            [(e["text"], e["label"], e["start"], e["end"]) for e in entities]
            for entities in (slot["entities"], expected)
        )
        assert found == reference
        assert [e["score"] for e in slot["entities"]] == pytest.approx([e["score"] for e in expected], abs=1e-4)
    assert count > 10
    assert not any(slot["entities"] for slot in slots(1))
