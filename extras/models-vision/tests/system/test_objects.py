"""Objects in images over HTTP: the boxes are the library's, in the image that was sent, and an input that cannot be
read fails alone.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import shared
from cluster import Cluster
from local_models import LocalModels
from parity import detector_checkpoints
from parity.test_detector import CLOSE, LABELS, ROUNDED, GroundingDino, _differences
from parity.toys import image, png
from PIL import Image

MODEL = "test/grounding-dino"
SHOWN = image(190, 90, 1)
pytestmark = shared.OPEN


@pytest.fixture(scope="module")
def client(open_cluster: Cluster, open_models: LocalModels) -> Iterator[httpx.Client]:
    folder = open_models.weights / "grounding-dino"
    if not folder.exists():
        detector_checkpoints.grounding_dino(folder)
    entry = {
        "weights": {"path": str(folder)},
        "family": "detector",
        "inputs": ["image"],
        "outputs": {"objects": 0},
        "max_tokens": 255,
        "run": {"parameters": {"box_threshold": 0.02, "text_threshold": 0.0}},
    }
    open_models.add("grounding-dino", entry)
    shared.wait_until_served(open_cluster, MODEL)
    with httpx.Client(base_url=open_cluster.url, timeout=60) as client:
        yield client


def asked(client: httpx.Client, items: list[Any], **params: Any) -> list[dict[str, Any]]:
    body = {"items": items, "params": {"labels": LABELS, "threshold": 0.0, **params}}
    answer = client.post(f"/v1/extract/{MODEL}", json=body)
    assert answer.status_code == 200, answer.text
    results: list[dict[str, Any]] = answer.json()["items"]
    return results


def given(file: bytes) -> dict[str, Any]:
    return {"images": [base64.b64encode(file).decode()]}


def test_objects_are_the_librarys_also_in_an_image_that_is_turned(
    client: httpx.Client, open_models: LocalModels
) -> None:
    """One request has an image, the same image turned with an EXIF tag, a text, a file that is no image, and two
    images.
    """
    written, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    SHOWN.transpose(Image.Transpose.ROTATE_90).save(written, "PNG", exif=exif)
    file = png(SHOWN)
    items = [
        given(file),
        given(written.getvalue()),
        {"text": "x"},
        given(b"no image"),
        {"images": [given(file)["images"][0]] * 2},
    ]
    plain, turned, text_result, broken, two = asked(client, items)
    expected = GroundingDino(open_models.weights / "grounding-dino")(SHOWN, LABELS)
    score, corner = _differences(plain["objects"], expected, LABELS, SHOWN.size)
    assert score <= CLOSE
    assert corner <= ROUNDED
    assert len(plain["objects"]) >= 5
    assert turned["objects"] == plain["objects"]
    assert [result["error"]["reason"] for result in (text_result, broken, two)] == [
        "unsupported_modality",
        "invalid_media",
        "invalid_media",
    ]
