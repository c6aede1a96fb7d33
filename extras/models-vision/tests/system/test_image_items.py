"""Images over HTTP to a dual encoder: their vectors are the library's, and a file that is no image costs its own
slot.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import shared
import torch
from cluster import Cluster
from local_models import LocalModels
from parity.toys import image, png
from transformers import AutoImageProcessor, CLIPModel

from sie_client import SIEClient

CLIP = "test/clip"
PICTURES = [
    image(width, height, seed) for seed, (width, height) in enumerate([(64, 64), (200, 90), (33, 171), (97, 20)])
]
pytestmark = shared.OPEN


@pytest.fixture(scope="module")
def client(open_cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=open_cluster.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def expected(open_models: LocalModels) -> np.ndarray:
    """The library's vectors of PICTURES, [images, width], normalised."""
    folder = open_models.weights / "clip"
    model, processor = CLIPModel.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder, backend="pil")
    with torch.inference_mode():
        features = model.get_image_features(**processor(images=PICTURES, return_tensors="pt")).pooler_output
    vectors: np.ndarray = torch.nn.functional.normalize(features, dim=1).numpy()
    return vectors


def encoded(client: httpx.Client, items: list[Any], model: str = CLIP) -> list[dict[str, Any]]:
    answer = client.post(f"/v1/encode/{model}", json={"items": items})
    assert answer.status_code == 200, answer.text
    results: list[dict[str, Any]] = answer.json()["items"]
    return results


def vector(item: dict[str, Any]) -> np.ndarray:
    assert "error" not in item, item
    return np.asarray(item["dense"]["values"], np.float32)


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_vectors_equal_the_library_in_json_and_in_msgpack(client: httpx.Client, expected: np.ndarray) -> None:
    """JSON holds base64 and a data URI, beside a text. msgpack holds bytes."""
    files = [png(picture) for picture in PICTURES]
    items = [
        {"images": [in_base64(files[0])]},
        {"images": [f"data:image/png;base64,{in_base64(files[1])}"]},
        {"images": [{"data": in_base64(files[2]), "format": "jpeg"}]},  # a hint, which the content contradicts
        {"images": in_base64(files[3])},
        {"text": "a harbour"},
    ]
    vectors = np.stack([vector(item) for item in encoded(client, items)])
    assert np.abs(vectors[:4] - expected).max() <= 2e-6
    body = msgspec.msgpack.encode({"items": [{"images": [file]} for file in files]})
    headers = {"content-type": "application/msgpack", "accept": "application/json"}
    answer = client.post(f"/v1/encode/{CLIP}", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert np.array_equal(np.stack([vector(item) for item in answer.json()["items"]]), vectors[:4])


def test_a_file_that_is_no_image_costs_its_own_slot(client: httpx.Client, expected: np.ndarray) -> None:
    good = in_base64(png(PICTURES[0]))
    cut = in_base64(png(PICTURES[1])[:400])
    items = [{"images": [good]}, {"images": [cut]}, {"images": [in_base64(b"no image")]}, {"images": [good, cut]}]
    results = encoded(client, [*items, {"text": "a harbour"}])
    assert np.abs(vector(results[0]) - expected[0]).max() <= 2e-6
    vector(results[4])
    for item, place in ((results[1], 0), (results[2], 0), (results[3], 1)):
        assert item["error"]["code"] == "INVALID_INPUT"
        assert item["error"]["reason"] == "invalid_media"
        assert f"images[{place}]" in item["error"]["message"]


def test_the_sdk_takes_files_bytes_images_and_arrays(
    open_cluster: Cluster, expected: np.ndarray, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("images") / "one.png"
    path.write_bytes(png(PICTURES[0]))
    pictures = [path, png(PICTURES[0]), PICTURES[0], np.asarray(PICTURES[0]), io.BytesIO(png(PICTURES[0]))]
    with SIEClient(open_cluster.url) as client:
        results = client.encode(CLIP, [{"images": [picture]} for picture in pictures])
    for result in results:
        assert np.abs(np.asarray(result["dense"]) - expected[0]).max() <= 2e-6
