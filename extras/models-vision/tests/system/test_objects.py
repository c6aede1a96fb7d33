"""Objects in images over HTTP: the boxes are the library's, in the image that was sent, and an input that cannot be
read fails alone.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import shared
from cluster import Cluster, until
from local_models import LocalModels
from pages import ROOT, blocks, run
from parity import detector_checkpoints
from parity.test_detector import CLOSE, LABELS, ROUNDED, GroundingDino, _differences
from parity.toys import image, png
from PIL import Image

from sie_client import SIEClient, draw

MODEL = "test/grounding-dino"
OF_THE_PAGE = "IDEA-Research/grounding-dino-tiny"
LIMIT = 255  # by which this entry differs from the packaged one
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
        "max_tokens": LIMIT,
        "run": {"parameters": {"box_threshold": 0.02, "text_threshold": 0.0}},
    }
    open_models.add("grounding-dino", entry)
    open_models.add("of-the-page", {**entry, "id": OF_THE_PAGE})
    shared.wait_until_served(open_cluster, MODEL)
    until(
        lambda: all(
            httpx.get(f"{url}/v1/models/{OF_THE_PAGE}", timeout=10).json()["max_sequence_length"] == LIMIT
            for url in open_cluster.urls
        ),
        shared.SERVED_S,
        f"{OF_THE_PAGE} to be replaced",
        open_cluster.log,
    )
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


def test_thresholds_are_read_where_the_contract_has_them(client: httpx.Client) -> None:
    (every,) = asked(client, [given(png(SHOWN))])
    least = every["objects"][len(every["objects"]) // 2]["score"]
    for params in ({"threshold": least}, {"threshold": None, "box_threshold": least, "text_threshold": 0.0}):
        (result,) = asked(client, [given(png(SHOWN))], **params)
        assert result["objects"] == [detection for detection in every["objects"] if detection["score"] >= least]
    body = {"items": [given(png(SHOWN))], "params": {"labels": LABELS, "score_threshold": 0.1}}
    refused = client.post(f"/v1/extract/{MODEL}", json=body)
    assert (refused.status_code, refused.json()["error"]["reason"]) == (400, "unknown_option"), refused.text


def test_labels_are_required(client: httpx.Client) -> None:
    answer = client.post(f"/v1/extract/{MODEL}", json={"items": [given(png(SHOWN))]})
    assert (answer.status_code, answer.json()["error"]["reason"]) == (400, "labels_required")


def test_the_client_draws_what_was_found(client: httpx.Client, open_cluster: Cluster) -> None:
    """The client sends and draws on an image of PIL."""
    with SIEClient(open_cluster.url) as own:
        result = own.extract(MODEL, {"images": [SHOWN]}, labels=list(LABELS), threshold=0.0)
    best = result["objects"][0]
    drawn = draw(SHOWN, {"objects": [best]})
    x, y, width, height = best["bbox"]
    different = (np.asarray(drawn) != np.asarray(SHOWN)).any(2)
    assert different[y + height - 1, x : x + width].any()
    assert drawn.size == SHOWN.size


def test_the_example_of_the_page_prints_and_draws_what_was_found(
    client: httpx.Client, open_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    SHOWN.save("street.jpg")
    (example,) = blocks(ROOT / "extras/models-vision/objects.md", "python")
    printed = run(example.code, open_cluster)
    file = (tmp_path / "street.jpg").read_bytes()
    (result,) = asked(client, [given(file)], labels=["a red car", "a traffic light"], threshold=None)
    assert printed == [
        f"{detection['label']} {round(detection['score'], 2)} {detection['bbox']}" for detection in result["objects"]
    ]
    assert len(printed) >= 5
    assert Image.open("found.png").tobytes() == draw(file, result).tobytes()
