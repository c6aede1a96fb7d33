"""Items as they are sent, files and arrays among them, and the arrays of replies."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from sie_client import InvalidInputError, Item, wire
from sie_client.media import media
from sie_contracts import arrays


def png(mode: str = "RGB") -> bytes:
    written = io.BytesIO()
    Image.new(mode, (2, 3)).save(written, format="PNG")
    return written.getvalue()


JPEG = b"\xff\xd8\xff\xe0" + b"picture"
RIFF = b"RIFF\x00\x00\x00\x00"


def test_paths_bytes_and_open_files_are_sent_byte_for_byte(tmp_path: Path) -> None:
    """The digest at the client is the digest at the adapter."""
    path = tmp_path / "picture.png"
    path.write_bytes(JPEG)
    with path.open("rb") as file:
        for source in (
            path,
            str(path),
            JPEG,
            bytearray(JPEG),
            memoryview(JPEG),
            io.BytesIO(JPEG),
            file,
            {"data": path},
        ):
            assert media(source, "p") == {"data": JPEG, "format": "jpeg"}, "its content, not its name, tells what it is"


@pytest.mark.parametrize(
    ("data", "name", "kind"),
    [
        (b"\x89PNG\r\n\x1a\n", "", "png"),
        (b"GIF89a", "", "gif"),
        (RIFF + b"WEBPVP8 ", "", "webp"),
        (RIFF + b"WAVEfmt ", "", "wav"),
        (b"II*\x00", "", "tiff"),
        (b"BM66", "", "bmp"),
        (b"fLaC", "", "flac"),
        (b"\x00\x00\x00\x18ftypmp42", "", "mp4"),
        (b"x", "picture.JPG", "jpeg"),
        (b"plain", "", None),
        (b"", "", None),
    ],
)
def test_the_format_is_that_of_the_content_else_of_the_name(
    tmp_path: Path, data: bytes, name: str, kind: str | None
) -> None:
    source: Any = data
    if name:
        source = tmp_path / name
        source.write_bytes(data)
    assert media(source, "p").get("format") == kind


@pytest.mark.parametrize(
    ("image", "why"),
    [
        ("/no/such/file", "FileNotFoundError"),
        (Path("/"), "IsADirectoryError"),
        (io.StringIO("text"), "reading bytes"),
        (5, "got int"),
        ({"format": "png"}, "got NoneType"),
        ("bad\x00name", "ValueError"),
        (np.zeros((2, 2)), r"got float64 \[2, 2\]"),
        (np.zeros((2, 2, 2), np.uint8), r"got uint8 \[2, 2, 2\]"),
        (np.zeros((3, 2, 2, 3), np.uint8), r"got uint8 \[3, 2, 2, 3\]"),
        (np.zeros((0, 2), np.uint8), r"got uint8 \[0, 2\]"),
        (np.uint8(3), "got uint8"),
    ],
)
def test_a_file_that_cannot_be_sent_is_named_by_its_place(image: Any, why: str) -> None:
    """No other exception leaves the client."""
    with pytest.raises(InvalidInputError, match=rf"^items\[2\]\.images\[1\].*{why}") as caught:
        wire.item({"images": [b"x", image]}, "items[2]")
    assert (caught.value.code, caught.value.reason) == ("INVALID_INPUT", "invalid_media")


def test_the_url_of_an_image_is_left_to_the_gateway_and_one_of_another_file_is_refused() -> None:
    url = "https://example.com/a.png"
    assert wire.item({"images": [url, {"data": url}]}, "items[2]")["images"] == [url, {"data": url}]
    for name in ("document", "audio", "video"):
        with pytest.raises(InvalidInputError, match=rf"^items\[2\]\.{name}: the client fetches no URLs") as caught:
            wire.item({name: url}, "items[2]")
        assert "example.com" not in str(caught.value)


def test_all_parts_of_an_item_are_converted_and_the_item_itself_is_not_changed() -> None:
    original: Item = {
        "id": "a",
        "text": "t",
        "images": png(),
        "document": b"%PDF-",
        "audio": RIFF + b"WAVE",
        "video": b"\x1aE\xdf\xa3",
        "metadata": {"n": np.float32(0.5), "v": np.ones(2, np.float32)},
        "multivector": [[1, 2], [3, 4]],
    }
    before = dict(original)
    sent = wire.item(original, "items[0]")
    assert original == before
    assert (sent["id"], sent["text"]) == ("a", "t")
    assert sent["images"] == [{"data": png(), "format": "png"}]
    assert [sent[name].get("format") for name in ("document", "audio", "video")] == [None, "wav", "webm"]
    back = arrays.unpack(arrays.decode_msgpack(wire.encode({"items": [sent]}, "items")))["items"][0]
    assert back["metadata"]["n"] == 0.5
    assert back["metadata"]["v"].tolist() == [1, 1]
    assert (back["multivector"].dtype, back["multivector"].tolist()) == (np.float32, [[1, 2], [3, 4]])


@pytest.mark.parametrize("value", [object(), 1 << 70, {"a": {1, 2}, "b": object()}, "\ud800", np.array([object()])])
def test_what_msgpack_has_no_form_of_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"items\[0\]"):
        wire.encode({"items": [{"metadata": value}]}, "items[0]")


def reply(values: Any) -> bytes:
    envelope = {
        "model": "m",
        "timing": {},
        "usage": {"prompt_tokens": 1, "total_tokens": 1, "truncated_items": []},
        "fingerprint": "f",
    }
    return msgspec.msgpack.encode({**envelope, "items": [{"dense": {"dims": 2, "dtype": "float32", "values": values}}]})


GOOD = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [1], b"data": b"\0\0\0\0"}


@pytest.mark.parametrize(
    "change",
    [
        {b"nd": False},
        {b"type": "|O"},
        {b"type": 3},
        {b"kind": b"V"},
        {b"shape": [2]},
        {b"shape": [-1]},
        {b"shape": ["1"]},
        {b"shape": 1},
        {b"data": "text"},
        {b"data": b""},
        {b"shape": [1 << 62, 4]},
        {b"data": None},
    ],
    ids=str,
)
def test_an_array_that_is_none_is_never_made(change: dict[bytes, Any]) -> None:
    """The codec creates no other type and no pickle. Each of its errors is of a kind that `core.reading` converts."""
    with pytest.raises((ValueError, LookupError, TypeError, msgspec.DecodeError)):
        wire.decode_vectors(reply({**GOOD, **change}))
    for name in (b"nd", b"type", b"shape", b"data"):
        with pytest.raises((ValueError, LookupError, TypeError, msgspec.DecodeError)):
            wire.decode_vectors(reply({key: value for key, value in GOOD.items() if key != name}))
    assert wire.decode_vectors(reply(GOOD))["items"][0]["dense"].tolist() == [0.0]
