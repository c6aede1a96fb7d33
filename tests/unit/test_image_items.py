"""Images of a request on their way into a work item: forms, limits, refusals, routes, both clients."""

from __future__ import annotations

import base64
import hashlib
import logging
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_items import OF_PARTS, PARTS, SEEN, A, B, Worker, b64, file, post, running, uri, vector_of
from inprocess import GatewayProcess

from sie_contracts import arrays
from sie_contracts.errors import ErrorInfo, InvalidInput
from sie_contracts.media.images import MAX_DECODED_PIXELS
from sie_contracts.models.costs import IMAGE_TOKENS
from sie_contracts.wire.messages import Input
from sie_gateway.inference import body as bodies
from sie_gateway.inference import images
from sie_gateway.inference import images as image_headers
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.results import Chunk
from sie_gateway.inference.runner import ChunkLimits, ItemFiles, split

pytestmark = pytest.mark.usefixtures("sample_families")
CANARY = "c4n4ry"


# forms


DATA = bytes(range(250, 256)) + b"\x00\xfb\xef\xbe"  # its base64 has + and /, and padding
FORMS: list[Any] = [
    DATA,
    b64(DATA),
    b64(DATA).rstrip("="),
    base64.urlsafe_b64encode(DATA).decode(),
    base64.urlsafe_b64encode(DATA).decode().rstrip("="),
    "\n".join((b64(DATA)[:8], b64(DATA)[8:])) + "\r\n",
    f"data:image/png;base64,{b64(DATA)}",
    f"DATA:;BASE64,{b64(DATA)}",
    f"data:image/svg+xml;charset=utf-8;base64,{b64(DATA)}",
    {"data": DATA},
    {"data": b64(DATA), "format": "png"},
    {"data": uri(DATA), "format": None, "more": 3},
]


@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_every_form_gives_the_same_bytes(form: Any) -> None:
    assert images.read(form, "p") == images.read([form], "p") == ((DATA,), None, ())
    assert images.read([form, b"x", form], "p").files == (DATA, b"x", DATA)


UNDECODABLE = [
    f"{CANARY}!",
    f"data:image/png,{CANARY}",
    f"data:image/png;base64,{CANARY}*",
    "data:",
    f"data:{CANARY}",
    "a",
    "aGk=aGk=",
    "aG=k",
    "====",
    "aGk====",
    "aGkä",
    "",
    b"",
    "data:image/png;base64,",
    "/etc/passwd.png",
    "\ud7ff",
]


@pytest.mark.parametrize("text", UNDECODABLE, ids=repr)
def test_what_is_no_base64_fails_its_input_and_is_named(text: Any) -> None:
    for value, path in (([b"x", text], "items[2].images[1]"), (text, "items[2].images")):
        files, fault, _ = images.read(value, "items[2].images")
        assert files == ()
        assert fault is not None
        assert (fault.code, fault.reason, fault.param) == ("INVALID_INPUT", "invalid_media", path)
        assert fault.message.startswith(f"{path}: expected ")
        assert CANARY not in fault.message
    inner = images.read({"data": text}, "p").fault
    assert inner is not None
    assert inner.param == "p"


@pytest.mark.parametrize(
    "address",
    [
        "http://169.254.169.254/latest/meta-data",
        "HTTPS://host/a.png",
        "file:///etc/passwd",
        "s3://bucket/key",
        " https://host/a",
        "gopher:x",
    ],
)
def test_an_address_is_kept_with_its_place_and_fails_the_request(address: str) -> None:
    for value in (address, [b"x", address], [{"data": address}], [f"{CANARY}!", address]):
        reading = images.read(value, "p")
        item = RequestItem(None, images=reading.files, unfit=reading.fault, links=reading.links)
        with pytest.raises(InvalidInput, match="fetches no URLs: send the bytes") as caught:
            bodies.refuse_links([item], None)
        assert caught.value.reason == "invalid_media"
        assert address not in caught.value.message


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (3, "p"),
        (True, "p"),
        ([None], "p[0]"),
        ([1.5], "p[0]"),
        ([["aGk="]], "p[0]"),
        ([b"x", {}], "p[1].data"),
        ({"data": None}, "p.data"),
        ({"data": 3}, "p.data"),
        ({"data": {"data": b"x"}}, "p.data"),
        ({"data": b"x", "format": 3}, "p.format"),
        ({"format": "png"}, "p.data"),
        (arrays.pack(np.zeros((2, 2, 3), np.uint8)), "p"),
    ],
    ids=str,
)
def test_what_is_no_image_by_its_type_fails_the_request(value: Any, path: str) -> None:
    if isinstance(value, dict):
        value = {key.decode() if isinstance(key, bytes) else key: content for key, content in value.items()}
    with pytest.raises(InvalidInput) as caught:
        images.read(value, "p")
    assert (caught.value.reason, caught.value.param) == ("schema", path)
    assert caught.value.message.startswith(f"{path}: expected ")


def test_an_input_has_at_most_64_images() -> None:
    assert len(images.read([b"x"] * 64, "p").files) == 64
    files, fault, _ = images.read([b"x"] * 65, "items[0].images")
    assert files == ()
    assert fault is not None
    assert (fault.reason, fault.param, fault.extras) == ("invalid_media", "items[0].images", {"limit": 64})
    assert "got 65 images, at most 64" in fault.message


def read(value: Any) -> tuple[images.Images, ErrorInfo | None]:
    """Return the images, and the fault of one input or of the request."""
    try:
        reading = images.read(value, "items[0].images")
    except InvalidInput as error:
        return images.Images(), error.info()
    return reading, reading.fault


# sizes and costs


def pieces(sizes: list[int], files: list[ItemFiles], **limits: int) -> list[Chunk]:
    bounds = ChunkLimits(limits.pop("cost", 1 << 30), limits.pop("payload", 1 << 30), limits.pop("result", 1 << 30))
    return split(sizes, max_tokens=100, item_result_bytes=0, limits=bounds, files=files, **limits)


def test_an_image_costs_a_constant_until_a_worker_has_seen_it() -> None:
    """A file of 40 kB counts neither as 10,000 tokens nor as the token limit of the model."""
    (chunk,) = pieces([40_008], [ItemFiles(1, 40_000)])
    assert (chunk.cost, chunk.squares) == (4 + IMAGE_TOKENS, 16 + IMAGE_TOKENS**2)
    (several,) = pieces([40_000, 8], [ItemFiles(3, 40_000), ItemFiles()])
    assert several.cost == 2 + 3 * IMAGE_TOKENS + 4
    assert [piece.stop for piece in pieces([1000] * 6, [ItemFiles(1, 1000)] * 6, cost=2 * IMAGE_TOKENS + 4)] == [
        2,
        4,
        6,
    ]
    assert [piece.stop for piece in pieces([1000] * 6, [ItemFiles(1, 1000)] * 6, payload=3500)] == [3, 6]
    vectors = {"token_result_bytes": 512, "result": 512 * (IMAGE_TOKENS + 2)}
    assert [piece.stop for piece in pieces([1000] * 3, [ItemFiles(1, 1000)] * 3, **vectors)] == [1, 2, 3]


# headers of files


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (file("PNG"), (5, 3, "png", 24)),
        (file("PNG", "RGBA"), (5, 3, "png", 32)),
        (file("PNG", "L"), (5, 3, "png", 8)),
        (file("JPEG"), (5, 3, "jpeg", 24)),
        (file("JPEG", "L", exif=b"Exif\0\0" + bytes(300)), (5, 3, "jpeg", 8)),
        (file("JPEG", "RGB", progressive=True, size=(300, 200)), (300, 200, "jpeg", 24)),
        (file("GIF", "P"), (5, 3, "gif", 1)),
        (file("BMP"), (5, 3, "bmp", 24)),
        (file("BMP").replace(struct.pack("<i", 5), struct.pack("<i", -5), 1), ((1 << 32) - 5, 3, "bmp", 24)),
        (file("WEBP"), (5, 3, "webp", 24)),
        (file("WEBP", lossless=True), (5, 3, "webp", 24)),
        (file("WEBP", "RGBA", lossless=True), (5, 3, "webp", 32)),
        (file("WEBP", "RGB", exif=b"Exif\0\0" + bytes(30)), (5, 3, "webp", 24)),
        (file("TIFF"), None),
        (b"", None),
        (b"BM", None),
        (b"\xff\xd8\xff\xe0\xff\xff", None),
        (b"\xff\xd8\xff\xe0\x00\x00" * 9, None),
        (b"\x89PNG\r\n\x1a\n" + bytes(17), None),
    ],
)
def test_the_first_bytes_of_a_file_tell_its_size(data: bytes, expected: tuple[Any, ...] | None) -> None:
    assert image_headers.header(data) == expected


SEGMENT, FRAME = b"\xff\xe0\x00\x02", b"\xff\xc0\x00\x11\x08\x00\x03\x00\x05\x03"


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"\xff" * (4 << 20), 15),
        (SEGMENT * (images.MAX_SEGMENTS - 1), 15),
        (SEGMENT * images.MAX_SEGMENTS, MAX_DECODED_PIXELS),
        (b"\xff\xff\x01" * images.MAX_SEGMENTS, MAX_DECODED_PIXELS),
    ],
    ids=["fill bytes", "many segments", "too many segments", "too many markers"],
)
def test_the_pixels_of_a_jpeg_are_counted_after_a_limited_number_of_segments(head: bytes, expected: int) -> None:
    assert images.pixels(b"\xff\xd8" + head + FRAME) == expected


# through a gateway, to the work item


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[tuple[GatewayProcess, Worker]]:
    async with running(tmp_path) as processes:
        yield processes


async def test_files_reach_the_work_item_byte_for_byte(place: tuple[GatewayProcess, Worker]) -> None:
    """Digests at the client and at the worker are equal in JSON and msgpack, in a message and in the payload store."""
    gateway, worker = place
    large = np.random.default_rng(1).bytes(3 << 20)
    files = [file("JPEG"), file("PNG"), b"no image at all", large]
    request_items = [{"id": str(number), "images": [image]} for number, image in enumerate(files)]
    request_items += [{"text": "both", "images": files[:2]}, {"text": "a text"}]
    expected = [
        Input(request_item.get("text"), images=tuple(request_item.get("images", ()))) for request_item in request_items
    ]
    as_json = [
        {**request_item, "images": [b64(file) for file in request_item["images"]]}
        if "images" in request_item
        else request_item
        for request_item in request_items
    ]
    answers = []
    for body, msgpack in ((request_items, True), (as_json, False)):
        worker.items.clear()
        answer = await post(gateway, f"/v1/encode/{SEEN}", {"items": body}, msgpack=msgpack)
        assert answer.status_code == 200, answer.text
        inputs = worker.inputs
        assert [list(map(digest, model_input.images)) for model_input in inputs] == [
            list(map(digest, model_input.images)) for model_input in expected
        ]
        assert [model_input.text for model_input in inputs] == [model_input.text for model_input in expected]
        answers.append([slot["dense"]["values"] for slot in answer.json()["items"]])
        assert all(not item.inputs or item.cost < 10 * IMAGE_TOKENS for item in worker.items)
    assert answers[0] == answers[1] == [vector_of(model_input).tolist() for model_input in expected]
    assert await gateway.metric("sie_gateway_queue_payload_offloads_total") == 2


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def test_one_bad_image_costs_its_own_input_alone(
    place: tuple[GatewayProcess, Worker], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    gateway, worker = place
    items: list[Any] = [{"images": [b64(DATA)]} for _ in range(64)]
    items[5] = {"id": "x", "images": [b64(DATA), f"{CANARY}!"]}
    items[7] = {"images": [b64(DATA)] * 65}
    for msgpack in (True, False):
        worker.items.clear()
        answer = await post(gateway, f"/v1/encode/{SEEN}", {"items": items}, msgpack=msgpack)
        slots = answer.json()["items"]
        assert [index for index, slot in enumerate(slots) if "error" in slot] == [5, 7]
        assert len(worker.inputs) == 62
        error = slots[5]["error"]
        assert (slots[5]["id"], error["code"], error["reason"]) == ("x", "INVALID_INPUT", "invalid_media")
        assert error["message"] == "items[5].images[1]: expected base64 or a data URI, got a string that is neither"
        assert (slots[7]["error"]["reason"], slots[7]["error"]["limit"]) == ("invalid_media", 64)
        alone = await post(gateway, f"/v1/encode/{SEEN}", {"items": [items[5]]}, msgpack=msgpack)
        fault = alone.json()["error"]
        assert (alone.status_code, fault["param"], fault["message"]) == (
            400,
            "items[0].images[1]",
            "items[0].images[1]: expected base64 or a data URI, got a string that is neither",
        )
        assert CANARY not in answer.text + alone.text
    assert CANARY not in caplog.text
    assert b64(DATA) not in caplog.text


# routes for clients of other vendors


HEARD = {"type": "input_audio", "input_audio": {"data": b64(B), "format": "wav"}}
LINKED = {"type": "audio_url", "audio_url": {"url": uri(A)}}
OTHERS: list[tuple[str, dict[str, Any], list[Input]]] = [
    ("/v1/embeddings", {"input": uri(A), "modality": "image"}, [Input(images=(A,))]),
    ("/v1/embeddings", {"input": [uri(A), b64(B)], "modality": "image"}, [Input(images=(A,)), Input(images=(B,))]),
    (
        "/embeddings",
        {"input": ["a", {"text": "b"}, {"image": uri(A)}, {"bytes": b64(A)}, {"url": uri(B)}]},
        [Input("a"), Input("b"), Input(images=(A,)), Input(images=(A,)), Input(images=(B,))],
    ),
    ("/v1/embeddings", {"input": [{"text": "a", "image": uri(A)}]}, [Input("a", images=(A,))]),
    ("/v1/embeddings", {"input": [{"content": PARTS}]}, [OF_PARTS]),
    ("/v1/embeddings", {"input": PARTS[:2]}, [Input("one"), Input(images=(A,))]),
    ("/v1/embeddings", {"input": [b64(A), uri(B)], "modality": "audio"}, [Input(audio=A), Input(audio=B)]),
    ("/v1/embeddings", {"input": [{"content": [*PARTS, HEARD]}]}, [Input("one\ntwo", images=(A, B), audio=B)]),
    ("/v1/embeddings", {"input": [{"content": [LINKED]}]}, [Input(audio=A)]),
    *(
        (
            path,
            {"query": "q", "documents": ["a", {"text": "b"}, {"image": b64(A)}, {"text": "c", "image": uri(B)}]},
            [Input("a"), Input("b"), Input(images=(A,)), Input("c", images=(B,))],
        )
        for path in ("/v1/rerank", "/v2/rerank")
    ),
]


async def test_each_route_makes_the_one_native_form(place: tuple[GatewayProcess, Worker]) -> None:
    gateway, worker = place
    for path, body, expected in OTHERS:
        worker.items.clear()
        answer = await post(gateway, path, {"model": "toy/shown" if "rerank" in path else SEEN, **body})
        assert answer.status_code == 200, (path, answer.text)
        assert worker.inputs == expected, path
        for data in (A, B):
            assert b64(data)[:40] not in answer.text


FAULTY: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {"input": ["aGk=", "?"], "modality": "image"}, "input[1]"),
    ("/v1/embeddings", {"input": "", "modality": "image"}, "input[0]"),
    ("/v1/embeddings", {"input": ["aGk=", "?"], "modality": "audio"}, "input[1]"),
    ("/v1/embeddings", {"input": ["a", {"image": "?"}]}, "input[1].image"),
    ("/v1/embeddings", {"input": [{"content": [*PARTS, *PARTS[1:2] * 63]}]}, "input[0].content"),
    ("/v1/rerank", {"query": "q", "documents": ["a", {"image": "?"}]}, "documents[1].image"),
]


async def test_a_route_without_slots_fails_and_names_the_field(place: tuple[GatewayProcess, Worker]) -> None:
    gateway, _ = place
    for path, body, param in FAULTY:
        answer = await post(gateway, path, {"model": "toy/shown" if "rerank" in path else SEEN, **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["reason"], error["param"]) == (400, "invalid_media", param), (path, body)
        assert error["message"].startswith(f"{param}: ")
        if "errors" in answer.json():
            assert answer.json()["errors"][0]["message"] == error["message"]


# both clients


async def test_text_beside_images_is_told_where_the_family_does_not_read_it(
    place: tuple[GatewayProcess, Worker],
) -> None:
    """Dual encoders encode the images (contract 4)."""
    gateway, worker = place
    image = b64(DATA)
    items = [{"text": "a", "images": [image]}, {"images": [image]}, "c", {"text": "", "images": image}]
    assert "warnings" not in (await post(gateway, f"/v1/encode/{SEEN}", {"items": items})).json()
    warnings = (await post(gateway, "/v1/encode/toy/dual", {"items": items})).json()["warnings"]
    assert warnings == ["text: ignored in 1 of 4 inputs; toy/dual reads the images of an input that also has a text"]
    assert [model_input.text for model_input in worker.items[-1].inputs] == ["a", None, "c", ""]
    assert "warnings" not in (await post(gateway, "/v1/encode/toy/dual", {"items": items[1:]})).json()
