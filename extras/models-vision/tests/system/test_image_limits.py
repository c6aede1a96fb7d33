"""Limits of a request of images: beyond each a typed error names the field and the limit."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
import shared
from cluster import Cluster
from image_files import bomb, encoded, picture, png
from PIL import Image

from sie_contracts.media.images import MAX_DECODED_PIXELS

CLIP = "test/clip"
GOOD = encoded(picture())
# a header of 50 bytes that announces 90 megapixels
HEADER = png(9_000, 10_000, body=b"")
pytestmark = shared.OPEN


class Refused(NamedTuple):
    """A refused request: the message holds `param`, the field, and `named`, the limit."""

    images: Any
    param: str
    named: str
    reason: str = "invalid_media"
    status: int = 400
    limit: int | None = None


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


REFUSED = {
    "65 images in an input": Refused([text(GOOD)] * 65, "items[0].images", "at most 64", limit=64),
    "100 megapixels": Refused(text(png(10_001, 10_000, body=b"")), "items[0].images[0]", "at most 100000000"),
    "a bomb of 400 megapixels": Refused([text(GOOD), text(bomb())], "items[0].images[1]", "at most 100000000"),
    "a strip": Refused(text(encoded(Image.new("L", (1206, 6)))), "items[0].images[0]", "200 times the other"),
    "a text": Refused(text(b"no image at all"), "items[0].images[0]", "no supported image format (JPEG, PNG"),
    "an SVG": Refused(
        text(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "items[0].images[0]", "no supported image format"
    ),
    "half a file": Refused(text(GOOD[: len(GOOD) // 2]), "items[0].images[0]", "undecodable"),
    "an empty file": Refused("", "items[0].images", "got nothing"),
    "no base64": Refused(["a picture of a cat!"], "items[0].images[0]", "expected base64 or a data URI"),
    "a number": Refused(5, "items[0].images", "expected the bytes of an image file", "schema"),
    "a list of lists": Refused([[text(GOOD)]], "items[0].images[0]", "expected the bytes of an image file", "schema"),
    "a map without data": Refused([{"format": "png"}], "items[0].images[0].data", "expected the bytes", "schema"),
    "a URL of metadata": Refused("http://169.254.169.254/latest/meta-data", "items[0].images", "URL"),
    "a URL of a file": Refused("file:///etc/passwd", "items[0].images", "URL"),
    "400 megapixels in all": Refused([text(HEADER)] * 5, "items", "at most 400000000", "", 413, 400_000_000),
}


@pytest.fixture(scope="module")
def client(open_cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=open_cluster.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("name", REFUSED)
def test_beyond_a_limit_the_error_names_the_field_and_the_limit(name: str, client: httpx.Client) -> None:
    """Each refusal comes within 20 s, whatever the size of the decoded image."""
    case = REFUSED[name]
    started_s = time.monotonic()
    answer = client.post(f"/v1/encode/{CLIP}", json={"items": [{"images": case.images}]})
    error = answer.json()["error"]
    assert (answer.status_code, error.get("reason", ""), error["param"]) == (
        case.status,
        case.reason,
        case.param,
    )
    assert error["code"] == ("PAYLOAD_TOO_LARGE" if case.status == 413 else "INVALID_INPUT")
    assert case.named in error["message"]
    assert error["message"].startswith(case.param)
    assert error.get("limit") == case.limit
    assert time.monotonic() - started_s < 20


def test_64_images_and_neighbours_of_what_is_refused_are_answered(client: httpx.Client) -> None:
    """An image that is refused alone counts for no limit of the others."""
    items: list[Any] = [{"images": [text(GOOD)] * 64}, {"images": [text(bomb())]}, {"images": [text(HEADER)] * 4}]
    answer = client.post(f"/v1/encode/{CLIP}", json={"items": [*items, {"text": "a river"}]})
    assert answer.status_code == 200, answer.text
    many, large, cut, neighbour = answer.json()["items"]
    assert "dense" in many
    assert "dense" in neighbour
    assert str(MAX_DECODED_PIXELS) in large["error"]["message"]
    assert "undecodable" in cut["error"]["message"]
