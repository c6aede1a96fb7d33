"""Items as they are sent, files and arrays among them, and the arrays of replies."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import soundfile
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
    ("data", "name", "kind"),
    [
        (b"# heading", "notes.md", "md"),
        (b"a,b", "TABLE.CSV", "csv"),
        (b"x", "page.htm", "html"),
        (b"<html/>", "page.xhtml", "html"),
        (b"BMW Group", "report.md", "md"),
        (b"ID3 is a format of tags", "tags.txt", "txt"),
        (b"BMI,age", "", None),
        (b"GIF89a is older", "history", None),
        (b"started", "server.log", None),
        (b"%PDF-1.7", "paper.pdf", None),
        (b"PK\x03\x04", "paper.docx", None),
    ],
)
def test_a_document_has_the_format_of_its_name_only_if_that_is_a_text(
    tmp_path: Path, data: bytes, name: str, kind: str | None
) -> None:
    source: Any = data
    if name:
        source = tmp_path / name
        source.write_bytes(data)
    assert [
        wire.item({"document": document}, "p")["document"].get("format") for document in (source, {"data": source})
    ] == [kind] * 2


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "1", "P", "I;16", "CMYK", "F"])
def test_an_image_of_pil_loses_nothing(mode: str) -> None:
    picture = (
        Image.linear_gradient("L")
        .resize((7, 5))
        .convert("RGB" if mode == "CMYK" else "L")
        .convert("L" if mode == "I;16" else mode)
    )
    if mode == "I;16":
        picture = Image.fromarray(np.arange(35, dtype=np.uint16).reshape(5, 7) * 1000)
    sent = media(picture, "p")
    again = Image.open(io.BytesIO(sent["data"]))
    assert (again.mode, again.size, sent["format"]) == (
        picture.mode,
        picture.size,
        "tiff" if mode in ("CMYK", "F") else "png",
    )
    assert np.array_equal(np.asarray(again), np.asarray(picture))


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 1), (5, 7, 3), (5, 7, 4), (1, 1)], ids=str)
def test_an_array_of_pixels_loses_nothing(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, shape, np.uint8)
    for image in (pixels, np.asfortranarray(pixels), {"data": pixels}):
        (sent,) = wire.item({"images": image}, "i")["images"]
        again = Image.open(io.BytesIO(sent["data"]))
        again.verify()
        again = Image.open(io.BytesIO(sent["data"]))
        assert (again.mode, sent["format"]) == ({1: "L", 3: "RGB", 4: "RGBA"}[(*shape, 1)[2]], "png")
        assert np.array_equal(np.asarray(again).reshape(shape), pixels)


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


@pytest.mark.parametrize(
    ("source_dtype", "dtype"),
    [("<f8", np.float32), ("<f4", np.float32), ("<f2", np.float16), ("<i8", np.float32), (">f4", np.float32)],
)
def test_token_matrices_travel_as_the_array_map_of_the_contract(source_dtype: Any, dtype: Any) -> None:
    array = np.asfortranarray(np.arange(6).reshape(3, 2).astype(source_dtype))
    body = wire.encode({"items": [wire.item({"multivector": array}, "i")]}, "items")
    expected = msgspec.msgpack.encode(arrays.pack(np.arange(6).reshape(3, 2).astype(dtype)))
    assert expected in body


@pytest.mark.parametrize(
    ("matrix", "why"), [(np.zeros(3), r"shape \(3,\)"), ([["a"]], "of numbers"), ([[1], [1, 2]], "of numbers")]
)
def test_what_is_no_matrix_is_refused(matrix: Any, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        wire.item({"multivector": matrix}, "items[0]")


@pytest.mark.parametrize("value", [object(), 1 << 70, {"a": {1, 2}, "b": object()}, "\ud800", np.array([object()])])
def test_what_msgpack_has_no_form_of_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"items\[0\]"):
        wire.encode({"items": [{"metadata": value}]}, "items[0]")


def nested() -> Any:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    return deep


def test_nesting_without_end_is_refused_too() -> None:
    with pytest.raises(InvalidInputError):
        wire.encode({"items": nested()}, "items")


def reply(values: Any) -> bytes:
    envelope = {
        "model": "m",
        "timing": {},
        "usage": {"prompt_tokens": 1, "total_tokens": 1, "truncated_items": []},
        "fingerprint": "f",
    }
    return msgspec.msgpack.encode({**envelope, "items": [{"dense": {"dims": 2, "dtype": "float32", "values": values}}]})


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 3), np.float32),
        np.ones((0, 4), np.float16),
        np.arange(70_000, dtype=np.int32),
        np.array([-1, 1], np.int8),
        np.zeros(300, np.uint8),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_an_array_of_a_reply_is_the_one_that_was_sent(array: Any) -> None:
    vector = wire.decode_vectors(reply(arrays.pack(array)))["items"][0]["dense"]
    assert (vector.dtype, vector.shape, vector.tolist()) == (array.dtype, array.shape, array.tolist())
    assert vector.flags.writeable
    assert vector.flags.aligned


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


@pytest.mark.parametrize("kind", ["float32", "float64", "int16", "int32", "uint8"])
@pytest.mark.parametrize("channels", [None, 1, 2])
def test_samples_become_a_wav_file(kind: str, channels: int | None) -> None:
    """soundfile reads the same samples from the file."""
    shape = (101,) if channels is None else (101, channels)
    values = np.random.default_rng(0).uniform(0, 0.9, shape)
    samples = values.astype(kind) if kind.startswith("float") else (values * np.iinfo(kind).max).astype(kind)
    sent = wire.item({"audio": {"data": samples, "sample_rate": np.uint16(22_050)}}, "items[0]")["audio"]
    assert (sent.keys(), sent["format"]) == ({"data", "format"}, "wav")
    bytes_a_second, bytes_a_frame = struct.unpack("<IH", sent["data"][28:34])
    assert bytes_a_second == 22_050 * bytes_a_frame
    read, rate = soundfile.read(io.BytesIO(sent["data"]), dtype="float64")
    levels = {"int16": 1 << 15, "int32": 1 << 31, "uint8": 1 << 7}.get(kind, 1)
    offset = 128 if kind == "uint8" else 0
    assert rate == 22_050
    assert np.array_equal(read.reshape(101, -1), ((samples.astype(np.float64) - offset) / levels).reshape(101, -1))


@pytest.mark.parametrize(
    ("audio", "message"),
    [
        (np.zeros(5, np.float32), "audio: samples need their rate"),
        ({"data": np.zeros(5, np.float32)}, "audio.sample_rate: expected the number of samples"),
        ({"data": np.zeros(5, np.float32), "sample_rate": True}, "audio.sample_rate"),
        ({"data": np.zeros(5, np.int64), "sample_rate": 8000}, r"audio.data: expected samples .* got int64 \[5\]"),
        ({"data": np.zeros((2, 2, 2), np.int16), "sample_rate": 8000}, "audio.data: expected samples"),
        ({"data": np.zeros(0, np.int16), "sample_rate": 8000}, "audio.data: expected samples"),
    ],
    ids=range(6),
)
def test_samples_that_make_no_file_are_refused(audio: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        wire.item({"audio": audio}, "items[0]")
