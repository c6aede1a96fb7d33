"""`draw`, which draws the objects of an image on it."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from sie_client import InvalidInputError, draw

GROUND = (200, 200, 200)
SQUARE, DISC = (60, 50, 81, 41), (200, 120, 61, 61)  # x, y, width, height


def scene() -> Image.Image:
    image = Image.new("RGB", (320, 240), GROUND)
    pen = ImageDraw.Draw(image)
    for (x, y, width, height), shape, colour in ((SQUARE, pen.rectangle, "navy"), (DISC, pen.ellipse, "darkgreen")):
        shape((x, y, x + width - 1, y + height - 1), fill=colour)
    return image


def an_object(label: str, bbox: Any, score: float = 0.5) -> dict[str, Any]:
    return {"label": label, "score": score, "bbox": bbox}


def png(image: Image.Image, **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, "PNG", **options)
    return written.getvalue()


def changed(drawn: Image.Image, original: Image.Image) -> np.ndarray[Any, Any]:
    return np.asarray((np.asarray(drawn) != np.asarray(original)).any(2))


@pytest.mark.parametrize("bbox", [SQUARE, DISC])
def test_a_frame_is_drawn_on_the_outermost_pixels_of_the_box(bbox: tuple[int, int, int, int]) -> None:
    """No other pixels change, except those of the label above the frame."""
    original = scene()
    drawn = draw(original, {"objects": [an_object("a thing", list(bbox))]})
    x, y, width, height = bbox
    different = changed(drawn, original)
    box = different[y : y + height, x : x + width]
    for edge in (box[0], box[-1], box[:, 0], box[:, -1]):
        assert edge.all()
    assert not box[1:-1, 1:-1].any()
    assert len({drawn.getpixel((x, y + down)) for down in range(height)}) == 1
    assert not different[y + height :].any()
    assert not different[:, :x].any()
    assert different[y - 10 : y, x : x + 20].any()
    assert not different[: y - 20].any()


def test_entities_with_a_box_are_drawn_and_those_without_are_not() -> None:
    original = scene()
    entity = {"text": "Total", "label": "text", "score": 1.0, "start": None, "end": None}
    drawn = draw(original, {"entities": [{**entity, "bbox": list(SQUARE)}, {**entity, "bbox": None}], "objects": []})
    assert changed(drawn, original)[50, 60:141].all()
    assert not changed(draw(original, {"entities": [{**entity, "bbox": None}]}), original).any()
    assert not changed(draw(original, {}), original).any()


@pytest.mark.parametrize("form", ["path", "bytes", "data URI", "file", "map"])
def test_an_image_is_taken_in_every_form_in_which_it_may_be_sent(form: str, tmp_path: Path) -> None:
    original = scene()
    data = png(original)
    (tmp_path / "scene.png").write_bytes(data)
    forms: dict[str, Any] = {
        "path": tmp_path / "scene.png",
        "bytes": data,
        "data URI": "data:image/png;base64," + base64.b64encode(data).decode(),
        "file": io.BytesIO(data),
        "map": {"data": data},
    }
    drawn = draw(forms[form], {"objects": [an_object("a thing", list(SQUARE))]})
    expected = draw(original, {"objects": [an_object("a thing", list(SQUARE))]})
    assert np.array_equal(np.asarray(drawn), np.asarray(expected))
    assert original.tobytes() == scene().tobytes()


def test_boxes_are_in_the_upright_image() -> None:
    original, exif = scene(), Image.Exif()
    exif[0x0112] = 6
    file = png(original.transpose(Image.Transpose.ROTATE_90), exif=exif)
    drawn = draw(file, {"objects": [an_object("a thing", list(SQUARE))]})
    assert drawn.size == original.size
    assert changed(drawn, original)[50, 60:141].all()


def test_what_is_no_image_is_refused() -> None:
    for source in (b"text", "data:image/png;base64,*", 7):
        with pytest.raises(InvalidInputError, match=r"^image: "):
            draw(source, {})
