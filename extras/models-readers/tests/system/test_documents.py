"""Images of pages over HTTP: the output is as long as the library's, and an input that cannot be read fails alone."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import shared
from cluster import Cluster
from local_models import LocalModels
from parity import reader_checkpoints
from parity.test_reader import asks, donut_oracle
from parity.toys import image, png
from transformers import AutoTokenizer

MODEL = "test/donut"
PAGE = image(90, 170, 1)
pytestmark = shared.OPEN


@pytest.fixture(scope="module")
def client(open_cluster: Cluster, open_models: LocalModels) -> Iterator[httpx.Client]:
    folder = open_models.weights / "donut"
    if not folder.exists():
        reader_checkpoints.donut(folder)
    entry = {
        "weights": {"path": str(folder)},
        "family": "document-reader",
        "inputs": ["image"],
        "outputs": {"entities": 0, "data": 0},
        "max_tokens": 100,
        "load": {"precision": "float32"},
        "run": {"parameters": {"task": "<s_cord-v2>"}},
    }
    open_models.add("donut", entry)
    shared.wait_until_served(open_cluster, MODEL)
    with httpx.Client(base_url=open_cluster.url, timeout=60) as client:
        yield client


def asked(client: httpx.Client, items: list[Any], **params: Any) -> list[dict[str, Any]]:
    answer = client.post(f"/v1/extract/{MODEL}", json={"items": items, "params": params})
    assert answer.status_code == 200, answer.text
    results: list[dict[str, Any]] = answer.json()["items"]
    return results


def given(file: bytes) -> dict[str, Any]:
    return {"images": [base64.b64encode(file).decode()]}


def test_what_is_written_is_the_librarys(client: httpx.Client, open_models: LocalModels) -> None:
    """One request has a page, a text, a file that is no image, and two images."""
    page = given(png(PAGE))
    items = [page, {"text": "x"}, given(b"no image"), {"images": page["images"] * 2}]
    written, text_result, broken, two = asked(client, items, max_new_tokens=20)
    folder = open_models.weights / "donut"
    expected = donut_oracle(folder)(PAGE, asks("<s_cord-v2>", most=20)).ids
    text = AutoTokenizer.from_pretrained(folder).decode(expected, skip_special_tokens=True).strip()
    assert written["data"]["document"] == {"text_sequence": text}
    assert written["data"]["completion_tokens"] == len(expected)
    assert written["data"]["finish_reason"] == ("stop" if len(expected) < 20 else "length")
    assert written["objects"] == written["relations"] == written["classifications"] == []
    assert [result["error"]["reason"] for result in (text_result, broken, two)] == [
        "unsupported_modality",
        "invalid_media",
        "invalid_media",
    ]
