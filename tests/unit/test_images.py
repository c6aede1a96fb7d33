"""Image files become pixels: unusual files, refused files, and the sizes of each step."""

from __future__ import annotations

import math
import re
import struct
import time
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from image_files import HEIGHT, WIDTH, bomb, encoded, picture, png, several, turned
from PIL import Image

from sie_contracts.errors import InvalidInput
from sie_contracts.media.images import (
    MAX_ASPECT,
    MAX_DECODED_PIXELS,
    MAX_RESIZED_PIXELS,
    Normalisation,
    Recipe,
    Size,
    UnknownProcessor,
    check,
    from_processor,
    max_tiles,
    pixels_of,
    resizes,
    tiles_of,
)
from sie_sidecar.prepare.images import Pixels, prepare

ASIS = Recipe("squash", height=HEIGHT, width=WIDTH)
SMALL = Recipe("crop", height=16, width=16, shorter=16)
RECIPES = {
    "squash": Recipe("squash", height=24, width=24),
    "crop": Recipe("crop", height=20, width=24, shorter=24),
    "blocks": Recipe("blocks", multiple=28, min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 60),
    "rounded": Recipe("blocks", multiple=28, min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 60, raised="rounded"),
    "floored": Recipe("blocks", multiple=28, min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 60, raised="floored"),
    "fit": Recipe("fit", longest=154, multiple=14),
    "bounded": Recipe("bounded", shorter=80, longest=133),
    "page": Recipe("page", height=256, width=192),
    "tiles": Recipe("tiles", longest=128, multiple=32),
    "odd tiles": Recipe("tiles", longest=97, multiple=48),
    "one tile": Recipe("tiles", longest=30, multiple=32),
}


def levels(prepared_image: Pixels) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(prepared_image.pixels, np.uint8).reshape(*prepared_image.size, 3)


def means(data: bytes, recipe: Recipe = ASIS) -> list[int]:
    return [round(mean) for mean in levels(prepare(data, recipe)).mean((0, 1)).tolist()]


def refusal(data: bytes, recipe: Recipe = SMALL) -> str:
    with pytest.raises(InvalidInput) as caught:
        prepare(data, recipe)
    assert caught.value.reason == "invalid_media"
    return caught.value.message


def transparent_palette() -> Image.Image:
    """Return an image whose left half is red, the transparent colour, and whose right half is blue."""
    image = Image.new("P", (WIDTH, HEIGHT))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.paste(1, (WIDTH // 2, 0, WIDTH, HEIGHT))
    return image


def sixteen_bits(most: int = 65535) -> Image.Image:
    return Image.fromarray(np.linspace(0, most, WIDTH * HEIGHT).reshape(HEIGHT, WIDTH).astype(np.uint16))


def clear_png(level: int, clear: int, *, bits: int, colour: int = 0) -> bytes:
    """Return a PNG that is `level` everywhere, and whose transparent level is `clear`."""
    channels = {0: 1, 2: 3}[colour]
    row = level.to_bytes(bits * channels // 8, "big") if bits > 8 else bytes([level * (255 // (2**bits - 1))])
    pixels = b"\0" + row * (WIDTH * channels * bits // 8 // len(row))
    samples = struct.pack(">H", clear) * channels
    return png(WIDTH, HEIGHT, colour=colour, bits=bits, body=zlib.compress(pixels * HEIGHT), clear=samples)


def tagged(image: Image.Image, tag: int, before: int, after: int) -> bytes:
    """Return a TIFF file in which the number `before` of this tag is replaced by `after`."""
    entries = [struct.pack("<HHII", tag, 3, 1, number) for number in (before, after)]
    return encoded(image, "TIFF").replace(*entries, 1)


ODD: dict[str, tuple[bytes, list[int]]] = {
    "rgba, half red": (encoded(Image.new("RGBA", (WIDTH, HEIGHT), (255, 0, 0, 128))), [255, 127, 127]),
    "la, all clear": (encoded(Image.new("LA", (WIDTH, HEIGHT), (0, 0))), [255, 255, 255]),
    "palette with a clear colour": (encoded(transparent_palette(), transparency=0), [128, 128, 255]),
    "gif with a clear colour": (encoded(transparent_palette(), "GIF", transparency=0), [128, 128, 255]),
    "grey with a clear level": (encoded(Image.new("L", (WIDTH, HEIGHT), 9), transparency=9), [255, 255, 255]),
    "16 bit png": (encoded(sixteen_bits()), [128, 128, 128]),
    "16 bit tiff": (encoded(sixteen_bits(), "TIFF"), [128, 128, 128]),
    "16 bit png with a clear level": (
        encoded(Image.fromarray(np.full((HEIGHT, WIDTH), 700, np.uint16)), transparency=700),
        [255, 255, 255],
    ),
    "4 bit png with a clear level": (clear_png(5, 5, bits=4), [255, 255, 255]),
    "48 bit png with a clear colour": (clear_png(0x123412341234, 0x1234, bits=16, colour=2), [255, 255, 255]),
    "16 bit tiff in which 0 is white": (tagged(sixteen_bits(2570), 262, 1, 0), [250, 250, 250]),
    "grey": (encoded(Image.new("L", (WIDTH, HEIGHT), 77)), [77, 77, 77]),
    "cmyk jpeg": (encoded(Image.new("CMYK", (WIDTH, HEIGHT), (0, 255, 255, 0)), "JPEG"), [254, 0, 0]),
    "animated gif": (several("GIF", "red", "blue"), [255, 0, 0]),
    "tiff of two pages": (several("TIFF", "red", "blue"), [255, 0, 0]),
}


def test_an_odd_file_has_the_colours_that_a_person_sees() -> None:
    for name, (data, expected) in ODD.items():
        prepared_image = prepare(data, ASIS)
        assert (prepared_image.size, prepared_image.upright) == ((HEIGHT, WIDTH), (HEIGHT, WIDTH)), name
        assert means(data) == pytest.approx(expected, abs=2), name
        assert prepared_image.animated == (name.startswith("animated") or "pages" in name), name


# by EXIF orientation: the sides of the upright image that the file stores as its first row and first column
FIRST_ROW_AND_COLUMN = {
    1: ("top", "left"),
    2: ("top", "right"),
    3: ("bottom", "right"),
    4: ("bottom", "left"),
    5: ("left", "top"),
    6: ("right", "top"),
    7: ("right", "bottom"),
    8: ("left", "bottom"),
}


@pytest.mark.parametrize(
    ("kind", "orientation"),
    [*(("JPEG", orientation) for orientation in FIRST_ROW_AND_COLUMN), ("PNG", 6), ("WEBP", 6), ("TIFF", 6)],
)
def test_an_image_is_turned_as_its_exif_says(kind: str, orientation: int) -> None:
    """The upright image has a red corner at the top left, wherever the file stores it."""
    scene = np.zeros((64, 32, 3), np.uint8)
    scene[:16, :16] = (255, 0, 0)
    row, column = FIRST_ROW_AND_COLUMN[orientation]
    stored = scene.swapaxes(0, 1) if row in ("left", "right") else scene
    stored = stored[::-1] if row in ("right", "bottom") else stored
    stored = stored[:, ::-1] if column in ("right", "bottom") else stored
    prepared_image = prepare(
        turned(orientation, Image.fromarray(stored.copy()), kind), Recipe("squash", height=64, width=32)
    )
    assert prepared_image.upright == Size(64, 32)
    corners = [int(levels(prepared_image)[down, right, 0]) for down, right in ((4, 4), (4, 28), (60, 4), (60, 28))]
    assert [level > 128 for level in corners] == [True, False, False, False]


UNUSABLE = {
    "empty": (b"", "undecodable"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg' width='4' height='4'/>", "undecodable"),
    "icon": (encoded(picture(), "ICO"), "undecodable"),
    "truncated jpeg": (encoded(picture(600, 400), "JPEG")[:9000], "undecodable"),
    "truncated png": (encoded(picture(600, 400))[:9000], "undecodable"),
    "header alone": (b"\x89PNG\r\n\x1a\n", "undecodable"),
    "float tiff": (encoded(Image.new("F", (WIDTH, HEIGHT), 0.5), "TIFF"), "undecodable"),
    "no pixels": (png(0, 5, body=b""), "undecodable"),
    "strip": (png(10_000, 10), "aspect"),
    "claim": (png(2_000_000_000, 2_000_000_000, body=b""), "too_large"),
}


def test_an_unusable_file_is_refused_at_once_with_its_cause() -> None:
    for name, (data, cause) in UNUSABLE.items():
        began = time.process_time()
        message = refusal(data)
        assert time.process_time() - began < 0.1, name
        assert message.startswith(f"{cause}: "), name
        assert not re.search(r"/|0x|\\x|BytesIO|Error", message), name


def test_a_bomb_is_refused_by_its_header() -> None:
    data = bomb()
    assert len(data) < 60_000
    began = time.process_time()
    assert refusal(data).startswith("too_large: ")
    assert time.process_time() - began < 0.1


def test_a_strip_that_would_grow_on_its_way_is_refused() -> None:
    """The shorter edge of 20 becomes 1920, so the longer one becomes 192,000."""
    assert refusal(png(2000, 20), Recipe("page", height=2560, width=1920)).startswith("too_large: ")


def test_the_tiles_of_an_image_lie_row_by_row_and_then_comes_the_whole() -> None:
    tiles = levels(prepare(encoded(picture(90, 60)), Recipe("tiles", longest=96, multiple=32)))
    image = Image.fromarray(levels(prepare(encoded(picture(90, 60)), Recipe("squash", height=64, width=96))))
    whole = np.asarray(picture(90, 60).resize((96, 64), Image.Resampling.BICUBIC))
    assert tiles.shape == (7 * 32, 32, 3)
    for row in range(2):
        for column in range(3):
            tile = tiles[(row * 3 + column) * 32 :][:32]
            assert np.array_equal(tile, whole[row * 32 :, column * 32 :][:32, :32])
    assert np.array_equal(tiles[-32:], np.asarray(image.resize((32, 32), Image.Resampling.BICUBIC)))


def test_the_middle_is_cropped_and_the_page_is_centred() -> None:
    stripes = Image.new("RGB", (60, 20), "red")
    stripes.paste("blue", (20, 0, 40, 20))
    middle = levels(prepare(encoded(stripes), Recipe("crop", height=20, width=20, shorter=20, resample="nearest")))
    assert middle.reshape(-1, 3).tolist() == [[0, 0, 255]] * 400
    page = Recipe("page", height=40, width=20, resample="nearest", fill=(9, 8, 7))
    placed = levels(prepare(encoded(Image.new("RGB", (20, 20), "red")), page))
    assert placed[:10].reshape(-1, 3).tolist() == placed[30:].reshape(-1, 3).tolist() == [[9, 8, 7]] * 200
    assert placed[10:30].reshape(-1, 3).tolist() == [[255, 0, 0]] * 400


def test_a_digest_is_of_the_pixels_and_their_size() -> None:
    data = encoded(picture())
    first = prepare(data, SMALL)
    assert prepare(encoded(picture(), "BMP"), SMALL).digest() == first.digest()
    assert prepare(data, Recipe("squash", height=16, width=16)).digest() != first.digest()
    assert (
        Pixels(b"abcabc", Size(1, 2), Size(1, 2), False).digest()
        != Pixels(b"abcabc", Size(2, 1), Size(2, 1), False).digest()
    )


edges = st.integers(1, 20_000)


@given(st.sampled_from(sorted(RECIPES)), edges, edges)
@example("bounded", 1, 135)
def test_sizes_are_what_each_kind_promises(name: str, height: int, width: int) -> None:
    recipe, size = RECIPES[name], Size(height, width)
    beyond = height * width > MAX_DECODED_PIXELS or max(size) > MAX_ASPECT * min(size)
    if beyond or any(not min(step) or step.height * step.width > MAX_RESIZED_PIXELS for step in resizes(recipe, size)):
        with pytest.raises(InvalidInput, match=r"too_large|aspect"):
            check(recipe, size)
        return
    check(recipe, size)
    steps, final_size = resizes(recipe, size), pixels_of(recipe, size)
    assert all(edge >= 1 for step in (*steps, final_size) for edge in step)
    match recipe.kind:
        case "squash" | "page" | "crop":
            assert final_size == (recipe.height, recipe.width)
        case "blocks":
            assert final_size.height % recipe.multiple == final_size.width % recipe.multiple == 0
            assert recipe.min_pixels <= final_size.height * final_size.width
            # one edge may not go below a multiple, so a strip may pass the bound
            assert final_size.height * final_size.width <= recipe.max_pixels or min(final_size) == recipe.multiple
        case "fit":
            assert final_size.height % recipe.multiple == final_size.width % recipe.multiple == 0
            assert max(final_size) < recipe.longest + recipe.multiple
        case "tiles":
            cut = tiles_of(recipe, size)
            assert 0 <= max_tiles(recipe) - max(cut) <= recipe.longest % 2
            assert final_size == (recipe.multiple * (math.prod(cut) + (max(cut) > 1)), recipe.multiple)
        case "bounded":
            assert min(final_size) <= recipe.shorter
            # a picture whose shorter edge would not change is kept as it is, as by the original processors
            assert max(final_size) <= recipe.longest + 1 or final_size == size
    if recipe.kind == "crop":
        assert min(steps[0]) == recipe.shorter
    if recipe.kind == "page":
        assert steps[-1].height <= final_size.height
        assert steps[-1].width <= final_size.width


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "squash", "height": 224},
        {"kind": "crop", "height": 30, "width": 20, "shorter": 24},
        {"kind": "blocks", "multiple": 28, "min_pixels": 0, "max_pixels": 9},
        {"kind": "bounded", "shorter": 800, "longest": 600},
        {"kind": "tiles", "longest": 2048},
        {"kind": "page", "height": 20, "width": 20, "fill": (0, 0, 256)},
        {"kind": "squash", "height": 224, "width": 224, "tokens": 0},
        {"kind": "stretch", "height": 224, "width": 224},
        {"kind": "squash", "height": 224, "width": 224, "resample": "cubic"},
    ],
)
def test_a_recipe_that_means_nothing_cannot_be_read(wrong: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, Recipe)


CLIP = {"image_processor_type": "CLIPImageProcessor"}
SIGLIP = {"image_processor_type": "SiglipImageProcessor"}
IDEFICS = {"image_processor_type": "Idefics3ImageProcessor"}
OLD = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 224, "crop_size": 224, "resample": 3}
READ: list[tuple[dict[str, Any], Recipe]] = [
    (CLIP, Recipe("crop", height=224, width=224, shorter=224)),
    (OLD, Recipe("crop", height=224, width=224, shorter=224)),
    (
        {**CLIP, "size": {"shortest_edge": 336}, "crop_size": {"height": 300, "width": 336}, "resample": 1},
        Recipe("crop", height=300, width=336, shorter=336, resample="lanczos"),
    ),
    ({**CLIP, "size": {"height": 768, "width": 768}, "do_center_crop": False}, Recipe("squash", height=768, width=768)),
    ({**CLIP, "size": {"height": 64, "width": 64}, "crop_size": 64}, Recipe("squash", height=64, width=64)),
    ({"image_processor_type": "CLIPImageProcessorFast"}, Recipe("crop", height=224, width=224, shorter=224)),
    (SIGLIP, Recipe("squash", height=224, width=224)),
    (
        {**SIGLIP, "size": {"height": 384, "width": 256}, "resample": 2},
        Recipe("squash", height=384, width=256, resample="bilinear"),
    ),
    ({**SIGLIP, "resample": None, "do_convert_rgb": None}, Recipe("squash", height=224, width=224)),
    (IDEFICS, Recipe("tiles", longest=1456, multiple=364, resample="lanczos")),
]


@pytest.mark.parametrize(("config", "recipe"), READ)
def test_the_file_of_a_checkpoint_is_read(config: dict[str, Any], recipe: Recipe) -> None:
    assert from_processor(config) == recipe


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"image_processor_type": "Owlv2ImageProcessor"},
        {**CLIP, "do_resize": False},
        {**CLIP, "do_center_crop": False},
        {**CLIP, "crop_size": {"height": 240, "width": 240}},
        {**CLIP, "size": {"height": 256, "width": 256}},
        {**CLIP, "size": {"longest_edge": 256}},
        {**CLIP, "size": "large"},
        {**CLIP, "size": {"shortest_edge": 0}},
        {**CLIP, "resample": 9},
        {**CLIP, "use_square_size": True},
        {**SIGLIP, "size": 384},
        {**SIGLIP, "do_pad": True},
        {"image_processor_type": "Qwen2VLImageProcessor"},
        {**IDEFICS, "do_image_splitting": False},
        {**IDEFICS, "max_image_size": {"height": 9, "width": 9}},
        {**IDEFICS, "size": {"longest_edge": 4097}},
    ],
)
def test_a_file_that_no_recipe_repeats_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UnknownProcessor):
        from_processor(config)


def test_the_arithmetic_of_a_checkpoint_is_read() -> None:
    assert Normalisation.from_processor(SIGLIP) == Normalisation((0.5,) * 3, (0.5,) * 3)
    assert Normalisation.from_processor({**SIGLIP, "do_rescale": False}).rescale == 1
    assert Normalisation.from_processor({**SIGLIP, "do_normalize": False}) == Normalisation()
    normalisation = Normalisation.from_processor(
        {**CLIP, "image_mean": 0.25, "image_std": [1, 2, 3], "rescale_factor": 0.5}
    )
    assert normalisation == Normalisation((0.25,) * 3, (1, 2, 3), 0.5)
    with pytest.raises(UnknownProcessor, match="4 channels"):
        Normalisation.from_processor({**CLIP, "image_mean": [0.5] * 4})


def test_an_image_of_which_nothing_would_be_left_is_refused() -> None:
    assert refusal(png(1990, 10), Recipe("fit", longest=100, multiple=14)).startswith("aspect: ")
