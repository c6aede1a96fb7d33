"""Preparation of images for a model, from the file to pixels. The adapter sends a `Recipe` to the sidecar. From the
recipe, the functions of this module compute image sizes; they open no file.

    header ──► check ──► decode ──► upright RGB ──► resize to each size of `resizes` ──► crop, pad or cut to `pixels_of`

The functions compute the same sizes, to the pixel, as the image processors of transformers 5.23 that use Pillow
(`...ImageProcessorPil`). The device does the last step, from uint8 to the model's numbers (`Normalisation`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from sie_contracts.media.media import fault

MAX_ASPECT = 200  # maximum ratio of the longer edge to the shorter edge of an image
MAX_DECODED_PIXELS = 100_000_000  # maximum number of pixels of an image file
# maximum number of pixels after each resize; a long, narrow image can grow when its shorter edge is enlarged
MAX_RESIZED_PIXELS = 64_000_000
MAX_RESULT_BYTES = 3 * MAX_RESIZED_PIXELS
MAX_TILED_EDGE = 4096  # maximum `longest` of a recipe of kind `tiles`. Source: transformers, Idefics3ImageProcessorPil

Kind = Literal["squash", "crop", "blocks", "fit", "bounded", "page", "tiles"]
Filter = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
Raised = Literal["no", "rounded", "floored"]


class Size(NamedTuple):
    height: int
    width: int


class Recipe(msgspec.Struct, frozen=True, omit_defaults=True):
    """Steps that prepare an upright RGB image. Each kind of recipe uses the fields in its line below; these fields are
    at least 1.

        squash   height width                    resize to that size; the aspect ratio is lost
        crop     height width shorter            resize the shorter edge to `shorter`; then take the middle
        blocks   multiple min_pixels max_pixels  make edges multiples of `multiple`, their product within the bounds
        fit      longest multiple                shrink to `longest` at most; then enlarge edges to multiples
        bounded  shorter longest                 resize the shorter edge to `shorter`; longer edge: at most `longest`
        page     height width                    resize as large as fits; then add a border of the colour `fill`
        tiles    longest multiple                resize to `longest`, enlarge edges to multiples; then cut squares

    The squares of `tiles`, row by row, lie one below the other. The last square is the whole image, shrunk to a square;
    if the resized image fits into one square, there is only this square.

    `raised`, for `blocks`: with `rounded` or `floored`, an image with an edge below `multiple` is first enlarged, until
    this edge is `multiple`. `rounded` rounds the other edge to the nearest whole number, `floored` rounds it down. With
    `no`, such an image is not enlarged first.

    `tokens`: cost of one image, in tokens. `block_tokens`: cost of each block in addition to `tokens`.
    """

    kind: Kind = "squash"
    height: int = 0
    width: int = 0
    shorter: int = 0
    longest: int = 0
    multiple: int = 0
    min_pixels: int = 0
    max_pixels: int = 0
    raised: Raised = "no"
    resample: Filter = "bicubic"
    fill: tuple[int, int, int] = (0, 0, 0)
    tokens: int = 1
    block_tokens: int = 0

    def __post_init__(self) -> None:
        for name in (*_NEEDS[self.kind], "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"an image recipe of kind {self.kind} needs {name} of at least 1")
        if self.kind == "crop" and max(self.height, self.width) > self.shorter:
            raise ValueError(
                f"an image with a shorter edge of {self.shorter} cannot be cropped to {self.height} x {self.width}"
            )
        if self.kind == "bounded" and self.longest < self.shorter:
            raise ValueError(f"`longest` is {self.longest}, expected at least `shorter`, {self.shorter}")
        if not all(0 <= level <= 255 for level in self.fill):
            raise ValueError(f"`fill` is {self.fill}, expected levels from 0 to 255")


_NEEDS: Mapping[Kind, tuple[str, ...]] = {
    "squash": ("height", "width"),
    "crop": ("height", "width", "shorter"),
    "blocks": ("multiple", "min_pixels", "max_pixels"),
    "fit": ("longest", "multiple"),
    "bounded": ("shorter", "longest"),
    "page": ("height", "width"),
    "tiles": ("longest", "multiple"),
}


class TileTokens(msgspec.Struct, frozen=True):
    """Token ids around the tiles of an image. A reduced copy of the whole image follows the tiles.
    `before[row][column]`: the ids before the tile at this place; those of the first tile include the ids that begin the
    image.
    `overview`: the ids between the last tile and the reduced copy.
    """

    before: tuple[tuple[tuple[int, ...], ...], ...]
    overview: tuple[int, ...]


class ImageTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token ids that represent an image in a row of token ids: `before`, then `token` repeated `count` times, then
    `after`. If `count` is 0, `token` is repeated once for each block of pixels that the model turns into one token. If
    `tiles` is set, the image is split into tiles: `token` is repeated `count` times for each tile, and `before` is used
    only for an image of one tile.

    If `beside_text` is false, an input has one image, these ids are the whole row of the input, and the model does not
    read a text. If `beside_text` is true, the ids of all images of an input are put before the ids of its text.
    """

    token: int
    count: int = 0
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    beside_text: bool = False
    tiles: TileTokens | None = None


class Normalisation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Conversion of uint8 levels to the model's numbers in float32, per channel: `(level * rescale - mean) / std`."""

    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    rescale: float = 1 / 255

    def __post_init__(self) -> None:
        if 0 in self.std:
            raise UnknownProcessor(f"the standard deviations are {self.std}, expected numbers other than 0")

    @staticmethod
    def from_processor(config: Mapping[str, Any]) -> Normalisation:
        """Return the conversion that a preprocessor_config.json describes. Raises UnknownProcessor."""
        settings = _completed(config)
        rescale = float(settings["rescale_factor"]) if settings["do_rescale"] else 1.0
        if not settings["do_normalize"]:
            return Normalisation(rescale=rescale)
        return Normalisation(channels(settings, "image_mean"), channels(settings, "image_std"), rescale)


def check(recipe: Recipe, size: Size) -> None:
    """Raise InvalidInput if an image exceeds the limits. `size`: size in the file's header, before any rotation."""
    height, width = size
    if min(size) < 1:
        raise fault("undecodable", f"the image is {width} x {height} pixels, expected at least 1 x 1")
    if height * width > MAX_DECODED_PIXELS:
        raise fault(
            "too_large",
            f"the image has {height * width} pixels ({width} x {height}), at most {MAX_DECODED_PIXELS} are read",
        )
    if max(size) > MAX_ASPECT * min(size):
        raise fault(
            "aspect", f"the image is {width} x {height} pixels, one edge may be at most {MAX_ASPECT} times the other"
        )
    for step in resizes(recipe, size):
        if min(step) < 1:
            raise fault(
                "aspect", f"the image is {width} x {height} pixels, too narrow to resize: one edge would have no pixel"
            )
        if step.height * step.width > MAX_RESIZED_PIXELS:
            raise fault(
                "too_large",
                f"the image of {width} x {height} pixels would be resized to {step.width} x {step.height} pixels, "
                f"expected at most {MAX_RESIZED_PIXELS} pixels",
            )


def resizes(recipe: Recipe, size: Size) -> tuple[Size, ...]:
    """Return the sizes to which an upright image is resized, one after the other."""
    return _RESIZES[recipe.kind](recipe, size)


def pixels_of(recipe: Recipe, size: Size) -> Size:
    """Return the size at which the model reads an upright image of size `size`."""
    if recipe.kind in ("crop", "page"):
        return Size(recipe.height, recipe.width)
    if recipe.kind == "tiles":
        tiles = math.prod(tiles_of(recipe, size))
        return Size(recipe.multiple * (tiles if tiles == 1 else tiles + 1), recipe.multiple)
    return resizes(recipe, size)[-1]


def grid_of(recipe: Recipe, pixels: Size) -> Size:
    """Return the numbers of rows and columns of blocks or tiles in an image that the model reads at size `pixels`."""
    return Size(pixels.height // recipe.multiple, pixels.width // recipe.multiple)


def tiles_of(recipe: Recipe, size: Size) -> Size:
    """Return the numbers of rows and columns of tiles into which an upright image of size `size` is cut. The additional
    tile with a reduced copy of the whole image is not counted.
    """
    return grid_of(recipe, resizes(recipe, size)[-1])


def has_one_size(recipe: Recipe) -> bool:
    return recipe.kind in ("squash", "crop", "page")


def max_tiles(recipe: Recipe) -> int:
    """Return the largest number of rows of tiles that an image can have. The number of columns has the same limit."""
    # `_tiles` rounds the shorter edge up to an even number, which may exceed `longest` if the image is a square
    return math.ceil((recipe.longest + recipe.longest % 2) / recipe.multiple)


def max_blocks(recipe: Recipe) -> int:
    """Return the largest number of blocks or tiles that one image can have; 0 if images are not split."""
    if recipe.kind == "tiles":
        rows = max_tiles(recipe)
        return 1 if rows == 1 else rows**2 + 1
    if recipe.kind != "blocks":
        return 0
    # an image with one row of blocks may have more than `max_pixels` pixels, because no edge is shorter than a block
    in_a_row = math.isqrt(MAX_ASPECT * recipe.max_pixels) // recipe.multiple
    return max(recipe.max_pixels // recipe.multiple**2, in_a_row)


def placeholders(recipe: Recipe, tokens: ImageTokens, pixels: Size) -> int:
    """Return how many times `tokens.token` is repeated for an image that the model reads at the size `pixels`."""
    if tokens.tiles is None and tokens.count:
        return tokens.count
    return max(1, tokens.count) * math.prod(grid_of(recipe, pixels))


def image_ids(recipe: Recipe, tokens: ImageTokens, pixels: Size, upright: Size) -> tuple[int, ...]:
    """Return the token ids that represent an image of the size `upright`. `pixels`: the size at which the model reads
    the image.
    """
    if tokens.tiles is not None and max(tiles := tiles_of(recipe, upright)) > 1:
        own = (tokens.token,) * tokens.count
        before = [ids for row in tokens.tiles.before[: tiles.height] for ids in row[: tiles.width]]
        return (*(number for ids in before for number in (*ids, *own)), *tokens.tiles.overview, *own, *tokens.after)
    return (*tokens.before, *(tokens.token,) * placeholders(recipe, tokens, pixels), *tokens.after)


def max_ids(recipe: Recipe, tokens: ImageTokens) -> int:
    """Return the largest number of token ids that represent one image."""
    if tokens.tiles is None:
        return len(tokens.before) + (tokens.count or max_blocks(recipe)) + len(tokens.after)
    square = Size(recipe.longest, recipe.longest)
    return len(image_ids(recipe, tokens, pixels_of(recipe, square), square))


def cost(recipe: Recipe, pixels: Size) -> int:
    """Return the cost, in tokens, of an image that the model reads at the size `pixels`."""
    if not recipe.block_tokens:
        return recipe.tokens
    rows, columns = grid_of(recipe, pixels)
    return recipe.tokens + rows * columns * recipe.block_tokens


def _with_shorter(size: Size, shorter: int) -> Size:
    longer = int(shorter * max(size) / min(size))
    return Size(longer, shorter) if size.width <= size.height else Size(shorter, longer)


def _blocks(recipe: Recipe, size: Size) -> tuple[Size, ...]:
    (height, width), unit = size, recipe.multiple
    if recipe.raised == "rounded":
        if height < unit:
            height, width = unit, round(width * unit / height)
        if width < unit:
            height, width = round(height * unit / width), unit
    elif recipe.raised == "floored" and min(height, width) < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    rounded = Size(round(height / unit) * unit, round(width / unit) * unit)
    if rounded.height * rounded.width > recipe.max_pixels:
        shrink = math.sqrt(height * width / recipe.max_pixels)
        edges = (max(unit, math.floor(edge / shrink / unit) * unit) for edge in (height, width))
        return (Size(*edges),)
    if rounded.height * rounded.width < recipe.min_pixels:
        grow = math.sqrt(recipe.min_pixels / (height * width))
        return (Size(*(math.ceil(edge * grow / unit) * unit for edge in (height, width))),)
    return (rounded,)


def _fit(recipe: Recipe, size: Size) -> tuple[Size, ...]:
    ratio = max(size) / recipe.longest
    edges = (math.floor(edge / ratio) if ratio > 1 else edge for edge in size)
    return (Size(*(((edge - 1) // recipe.multiple + 1) * recipe.multiple for edge in edges)),)


def _bounded(recipe: Recipe, size: Size) -> tuple[Size, ...]:
    (height, width), shorter = size, recipe.shorter
    exact = float(shorter)
    if max(size) / min(size) * shorter > recipe.longest:
        exact = recipe.longest * min(size) / max(size)
        shorter = round(exact)
    if min(size) == shorter:
        return (size,)
    if width < height:
        return (Size(int(exact * height / width), shorter),)
    return (Size(shorter, int(exact * width / height)),)


def _page(recipe: Recipe, size: Size) -> tuple[Size, ...]:
    first = _with_shorter(size, min(recipe.height, recipe.width))
    height, width = min(first.height, recipe.height), min(first.width, recipe.width)
    if (height, width) == first:
        return (first,)
    if first.height > first.width:
        width = int(first.width * height / first.height)
    elif first.width > first.height:
        height = int(first.height * width / first.width)
    return first, Size(height, width)


def _tiles(recipe: Recipe, size: Size) -> tuple[Size, ...]:
    """Return two sizes: one whose longer edge is `longest`, and this size with both edges raised to multiples of
    `multiple`. Idefics3ImageProcessorPil rounds in the same way.
    """
    ratio, longest = size.width / size.height, recipe.longest
    is_wide = size.width >= size.height
    shorter = int(longest / ratio) if is_wide else int(longest * ratio)
    shorter = max(shorter + shorter % 2, 1)
    first = Size(shorter, longest) if is_wide else Size(longest, shorter)
    ratio = first.width / first.height
    if first.width >= first.height:
        width = _raised(first.width, recipe.multiple)
        return first, Size(_raised(int(width / ratio), recipe.multiple), width)
    height = _raised(first.height, recipe.multiple)
    return first, Size(height, _raised(int(height * ratio), recipe.multiple))


def _raised(edge: int, unit: int) -> int:
    return math.ceil(edge / unit) * unit


_RESIZES: Mapping[Kind, Callable[[Recipe, Size], tuple[Size, ...]]] = {
    "squash": lambda recipe, size: (Size(recipe.height, recipe.width),),
    "crop": lambda recipe, size: (_with_shorter(size, recipe.shorter),),
    "blocks": _blocks,
    "fit": _fit,
    "bounded": _bounded,
    "page": _page,
    "tiles": _tiles,
}


class UnknownProcessor(ValueError):
    """Error for a preprocessor_config.json that no recipe can express. The message names the unsupported setting."""


_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
# filters, indexed by their numbers in Pillow
_FILTERS: tuple[Filter, ...] = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
_COMMON = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "resample": _FILTERS.index("bicubic"),
    "image_mean": _CLIP_MEAN,
    "image_std": _CLIP_STD,
}


def from_processor(config: Mapping[str, Any]) -> Recipe:
    """Return the recipe for a checkpoint's preprocessor_config.json. The recipe results in the same uint8 pixels as the
    image processor that the file names. Raises UnknownProcessor.
    """
    settings = _completed(config)
    if not settings["do_resize"]:
        raise UnknownProcessor("do_resize is false, but every recipe resizes images")
    number = settings["resample"]
    if not isinstance(number, int) or not 0 <= number < len(_FILTERS):
        raise UnknownProcessor(f"resample is {number!r}, which is not the number of a filter of Pillow")
    read, _ = _PROCESSORS[_name(config)]
    try:
        return msgspec.structs.replace(read(settings), resample=_FILTERS[number])
    except ValueError as error:
        raise UnknownProcessor(str(error)) from error


def _name(config: Mapping[str, Any]) -> str:
    """Return the class of the image processor in the file, without a suffix such as Fast. Raises UnknownProcessor."""
    name = config.get("image_processor_type") or config.get("feature_extractor_type") or ""
    plain = str(name).removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    if plain not in _PROCESSORS:
        raise UnknownProcessor(
            f"the image processor is {name or 'not named'}, known are {', '.join(sorted(_PROCESSORS))}"
        )
    return plain


def _completed(config: Mapping[str, Any]) -> dict[str, Any]:
    _, defaults = _PROCESSORS[_name(config)]
    return {**_COMMON, **defaults, **{key: value for key, value in config.items() if value is not None}}


def channels(settings: Mapping[str, Any], key: str) -> tuple[float, float, float]:
    """Return the setting `key`, such as image_mean, as numbers for red, green and blue. A single number in the file
    applies to all three. Raises UnknownProcessor.
    """
    value = settings.get(key)
    values: list[Any] = list(value) if isinstance(value, list | tuple) else [value] * 3
    if len(values) != 3:
        raise UnknownProcessor(f"{key} has {len(values)} channels, images have 3")
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in values):
        raise UnknownProcessor(f"{key} is {value!r}, expected a number or three numbers")
    return float(values[0]), float(values[1]), float(values[2])


def _sides(settings: Mapping[str, Any], key: str, *, square: bool) -> dict[str, int]:
    """Return the setting `key`, a size, as edge -> pixels. A single number is the shorter edge, or with `square` both
    edges.
    """
    value = settings.get(key)
    if isinstance(value, int):
        value = {"height": value, "width": value} if square else {"shortest_edge": value}
    elif isinstance(value, list | tuple) and len(value) == 2:
        value = dict(zip(("height", "width"), value, strict=True))
    if not isinstance(value, Mapping):
        raise UnknownProcessor(f"{key} is {value!r}, expected a number or a map of edges")
    edges = {str(name): edge for name, edge in value.items() if edge is not None}
    if not all(isinstance(edge, int) and edge > 0 for edge in edges.values()):
        raise UnknownProcessor(f"{key} is {value!r}, expected edges of at least 1")
    return edges


def _fixed(settings: Mapping[str, Any]) -> Recipe:
    for key in ("do_pad", "use_square_size"):
        if settings.get(key):
            raise UnknownProcessor(f"{key} is true, which no recipe supports")
    size = _sides(settings, "size", square=bool(settings.get("default_to_square")))
    crop = _sides(settings, "crop_size", square=True) if settings["do_center_crop"] else None
    if crop is not None and crop.keys() != {"height", "width"}:
        raise UnknownProcessor(f"crop_size has {', '.join(sorted(crop))}, expected height and width")
    if size.keys() == {"height", "width"}:
        if crop not in (None, size):
            raise UnknownProcessor(f"images are resized to {size} and then cropped to {crop}, which no recipe supports")
        return Recipe("squash", size["height"], size["width"])
    if size.keys() == {"shortest_edge"} and crop is not None:
        return Recipe("crop", crop["height"], crop["width"], size["shortest_edge"])
    lacks = ", without do_center_crop" if crop is None else ""
    raise UnknownProcessor(
        f"size has {', '.join(sorted(size))}{lacks}: images would have different sizes, which no recipe supports"
    )


def _smart(settings: Mapping[str, Any], raised: Raised, frames: int) -> Recipe:
    """Return the recipe of image encoders that read images of any size. Each block of patches becomes one token.
    `frames`: number of video frames that share the bounds in the file. The file's bounds are divided by this number.
    """
    bounds = settings.get("size")
    size = dict(bounds) if isinstance(bounds, Mapping) else {}
    least = settings.get("min_pixels") or size.get("shortest_edge")
    most = settings.get("max_pixels") or size.get("longest_edge")
    if not isinstance(least, int) or not isinstance(most, int):
        raise UnknownProcessor(
            "expected size, or min_pixels and max_pixels, as bounds: each processor class has other default bounds"
        )
    if least % frames or most % frames:
        raise UnknownProcessor(f"the bounds {least} and {most} are not multiples of the {frames} frames of a video")
    unit = int(settings["patch_size"]) * int(settings["merge_size"])
    return Recipe("blocks", multiple=unit, min_pixels=least // frames, max_pixels=most // frames, raised=raised)


def _pixtral(settings: Mapping[str, Any]) -> Recipe:
    if settings.get("do_center_crop"):
        raise UnknownProcessor("do_center_crop is true, which no recipe of the kind `fit` supports")
    size, patch = _sides(settings, "size", square=True), _sides(settings, "patch_size", square=True)
    if size.keys() == {"height", "width"} and size["height"] == size["width"]:
        size = {"longest_edge": size["height"]}
    if size.keys() != {"longest_edge"}:
        raise UnknownProcessor(f"size is {size}, expected longest_edge")
    if patch.keys() != {"height", "width"} or patch["height"] != patch["width"]:
        raise UnknownProcessor(f"patch_size is {patch}, expected a square")
    return Recipe("fit", longest=size["longest_edge"], multiple=patch["height"])


def _grounding_dino(settings: Mapping[str, Any]) -> Recipe:
    if settings.get("pad_size"):
        raise UnknownProcessor("pad_size is set, which no recipe supports")
    size = _sides(settings, "size", square=False)
    if isinstance(settings["size"], int):
        size["longest_edge"] = int(settings["max_size"])
    if size.keys() != {"shortest_edge", "longest_edge"}:
        raise UnknownProcessor(f"size has {', '.join(sorted(size))}, expected shortest_edge and longest_edge")
    return Recipe("bounded", shorter=size["shortest_edge"], longest=size["longest_edge"])


def _donut(settings: Mapping[str, Any]) -> Recipe:
    for key, expected in (("do_thumbnail", True), ("do_pad", True), ("do_align_long_axis", False)):
        if bool(settings[key]) != expected:
            raise UnknownProcessor(f"{key} is {str(not expected).lower()}, which no recipe supports")
    page_size = settings["size"]
    if isinstance(page_size, list | tuple):  # in a list, the width comes first; in a map, the edges have names
        page_size = list(reversed(page_size))
    size = _sides({"size": page_size}, "size", square=True)
    if size.keys() != {"height", "width"}:
        raise UnknownProcessor(f"size has {', '.join(sorted(size))}, expected height and width")
    return Recipe("page", size["height"], size["width"])


def _idefics(settings: Mapping[str, Any]) -> Recipe:
    if not settings["do_image_splitting"]:
        raise UnknownProcessor("do_image_splitting is false, which no recipe supports")
    sizes = [_sides(settings, key, square=False) for key in ("size", "max_image_size")]
    for key, size in zip(("size", "max_image_size"), sizes, strict=True):
        if size.keys() != {"longest_edge"}:
            raise UnknownProcessor(f"{key} has {', '.join(sorted(size))}, expected longest_edge")
    longest, tile = (size["longest_edge"] for size in sizes)
    if longest > MAX_TILED_EDGE:
        raise UnknownProcessor(f"size is {longest}, expected at most {MAX_TILED_EDGE}")
    return Recipe("tiles", longest=longest, multiple=tile)


_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_PATCHES = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
_BILINEAR = {"resample": _FILTERS.index("bilinear")}
# class of an image processor -> (function that builds a recipe from settings, default settings of the class)
_PROCESSORS: Mapping[str, tuple[Callable[[Mapping[str, Any]], Recipe], Mapping[str, Any]]] = {
    "CLIPImageProcessor": (_fixed, {"size": {"shortest_edge": 224}, "crop_size": 224, "do_center_crop": True}),
    "SiglipImageProcessor": (_fixed, {"size": {"height": 224, "width": 224}, "do_center_crop": False, **_HALF}),
    "Qwen2VLImageProcessor": (lambda settings: _smart(settings, "no", 1), _PATCHES),
    "Glm46VImageProcessor": (
        lambda settings: _smart(settings, "floored", int(settings["temporal_patch_size"])),
        _PATCHES,
    ),
    "PaddleOCRVLImageProcessor": (lambda settings: _smart(settings, "rounded", 1), _PATCHES),
    "PixtralImageProcessor": (_pixtral, {"size": {"longest_edge": 1024}, "patch_size": 16}),
    "Idefics3ImageProcessor": (
        _idefics,
        {
            "size": {"longest_edge": 4 * 364},
            "max_image_size": {"longest_edge": 364},
            "do_image_splitting": True,
            "resample": _FILTERS.index("lanczos"),
            **_HALF,
        },
    ),
    "GroundingDinoImageProcessor": (
        _grounding_dino,
        {"size": {"shortest_edge": 800, "longest_edge": 1333}, "max_size": 1333, **_BILINEAR, **_IMAGENET},
    ),
    "DonutImageProcessor": (
        _donut,
        {
            "size": {"height": 2560, "width": 1920},
            "do_thumbnail": True,
            "do_pad": True,
            "do_align_long_axis": False,
            **_BILINEAR,
            **_HALF,
        },
    ),
}
