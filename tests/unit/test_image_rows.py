"""Rows of images: their cost, their transport to the adapter, and refused inputs."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from sie_adapter.packed.packing import MalformedBatch, images, items
from sie_contracts.errors import InvalidInput
from sie_contracts.media.images import ImageTokens, Recipe
from sie_contracts.wire.ipc import Rows
from sie_contracts.wire.messages import Input, RunOptions
from sie_sidecar.prepare import layouts
from sie_sidecar.prepare.media_frames import PreparedImage
from sie_sidecar.prepare.rows import BatchPart, ModelTokenizer, WorkItemInput, to_batch

RECIPE = Recipe("squash", height=4, width=6, tokens=9)
LAYOUT = Rows(images=RECIPE)
FILE = b"a file"


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "river": 1, "x": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return ModelTokenizer(words.to_str().encode(), 16)


def prepared(seed: int, height: int = 4, width: int = 6) -> PreparedImage:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8).tobytes()
    return PreparedImage(1, height, width, 100 + seed, 50, False, hashlib.sha256(pixels).digest(), pixels)


def work(*inputs: Input, **prepared_images: list[PreparedImage] | InvalidInput) -> WorkItemInput:
    return WorkItemInput(
        inputs, None, RunOptions(), {int(name[1:]): preparation for name, preparation in prepared_images.items()}
    )


def test_an_input_with_images_is_a_row_without_ids_that_costs_what_its_images_cost(tokenizer: ModelTokenizer) -> None:
    """A text beside the images is not tokenised."""
    work_item = work(Input("river river", images=(FILE, FILE)), Input("river"), _0=[prepared(0), prepared(1)])
    (work_rows,) = layouts.make(tokenizer, LAYOUT, [work_item])
    image_row, text_row = work_rows.rows
    assert (len(image_row.ids), image_row.cost, len(image_row.images), image_row.truncated) == (0, 18, 2, False)
    assert (text_row.ids.tolist(), text_row.cost, text_row.images) == ([1], 1, ())


@pytest.mark.parametrize("recipe", [RECIPE, Recipe("crop", 4, 6, 8, tokens=9), Recipe("page", 4, 6, tokens=9)])
def test_an_image_of_the_one_size_of_its_model_counts_as_1_in_the_budget_of_a_batch(
    tokenizer: ModelTokenizer, recipe: Recipe
) -> None:
    """Memory, credit and time count the tokens of the image. Ids that stand for an image count as the ids of a text."""
    work_item = work(
        Input(images=(FILE, FILE)), Input("river"), Input(images=(FILE,)), _0=[prepared(0)] * 2, _2=[prepared(1)]
    )
    (work_rows,) = layouts.make(tokenizer, Rows(images=recipe), [work_item])
    assert [(row.cost, row.cost - row.uncounted) for row in work_rows.rows] == [(18, 2), (1, 1), (9, 1)]
    page = work(Input(images=(FILE,)), _0=[prepared(0)])
    tokens = ImageTokens(2, count=5, before=(1,), after=(1,))
    (work_rows,) = layouts.make(tokenizer, Rows(images=recipe, image_tokens=tokens), [page])
    assert (work_rows.rows[0].cost, work_rows.rows[0].uncounted) == (7 + 9, 8)


def test_an_image_that_is_none_and_a_model_that_takes_none_are_refused_for_their_input_alone(
    tokenizer: ModelTokenizer,
) -> None:
    broken = InvalidInput("images[0]: undecodable: the image file is empty", reason="invalid_media")
    work_item = work(Input(images=(FILE,)), Input("river"), Input(images=(FILE,)), _0=broken, _2=[prepared(0)])
    (work_rows,) = layouts.make(tokenizer, LAYOUT, [work_item])
    assert dict(work_rows.unfit) == {0: broken}
    assert [len(row.images) for row in work_rows.rows] == [0, 0, 1]
    (blind,) = layouts.make(tokenizer, Rows(), [work(Input(images=(FILE,)), Input("river"))])
    assert blind.unfit[0].reason == "unsupported_modality"
    assert set(blind.unfit) == {0}


def test_images_reach_the_adapter_with_their_rows_and_sizes(tokenizer: ModelTokenizer) -> None:
    """The images belong to two work items in one batch."""
    first = work(Input(images=(FILE,)), Input("river"), _0=[prepared(0)])
    second = work(Input(images=(FILE, FILE)), _0=[prepared(1), prepared(2, 2, 3)])
    parts = [
        BatchPart(work_rows.rows, work_item)
        for work_item in (first, second)
        for work_rows in layouts.make(tokenizer, LAYOUT, [work_item])
    ]
    batch = to_batch("b", "m", "encode", "text", parts)
    batch_images = images(batch.images, batch.pixels, RECIPE)
    assert batch_images is not None
    decoded = items(batch.lengths, batch.ids, batch.types, batch_images)
    assert decoded.lengths.tolist() == [0, 1, 0]
    assert decoded.costs.tolist() == [9, 1, 18]
    shown = [image for row in batch_images.for_items(np.arange(3)) for image in row]
    assert [(image.height, image.width) for image in shown] == [(100, 50), (101, 50), (102, 50)]
    for image, expected_image in zip(shown, (prepared(0), prepared(1), prepared(2, 2, 3)), strict=True):
        assert image.pixels.shape == (expected_image.height, expected_image.width, 3)
        assert image.pixels.tobytes() == expected_image.pixels
    assert [len(row) for row in batch_images.for_items(np.array([2, 0]))] == [2, 1]


@pytest.mark.parametrize(
    ("places", "pixels", "message"),
    [
        ([(0, 2, 2, 5)], 12, "is not a multiple of 20"),
        ([(0, 2, 2, 5, 5)], 11, "need 12 bytes, the batch has 11"),
        ([(0, 0, 2, 5, 5)], 0, "an image is empty"),
        ([(0, 2, 2, 0, 5)], 12, "an image is empty"),
        ([(-1, 1, 1, 5, 5)], 3, "not in the order"),
        ([(1, 1, 1, 5, 5), (0, 1, 1, 5, 5)], 6, "not in the order"),
    ],
)
def test_images_that_do_not_belong_to_their_batch_are_refused(
    places: list[tuple[int, ...]], pixels: int, message: str
) -> None:
    with pytest.raises(MalformedBatch, match=message):
        images(np.array(places, np.int32).tobytes(), bytes(pixels), RECIPE)


def test_images_have_keys_by_their_pixels_and_who_asked(tokenizer: ModelTokenizer) -> None:
    """An image without the name of its asker has no key, and serves no other request."""
    work_item = work(Input(images=(FILE, FILE, FILE)), _0=[prepared(0), prepared(1), prepared(0)])
    (work_rows,) = layouts.make(tokenizer, LAYOUT, [work_item])
    parts = [BatchPart(work_rows.rows, work_item, asker=asker) for asker in ("a", "b", "", "a")]
    batch = to_batch("b", "m", "encode", "text", parts)
    batch_images = images(batch.images, batch.pixels, RECIPE, batch.image_keys)
    assert batch_images is not None
    mine, theirs, nobodys, again = ([image.key for image in row] for row in batch_images.for_items(np.arange(4)))
    assert mine[0] == mine[2] != mine[1]
    assert not set(mine) & set(theirs)
    assert nobodys == [b"", b"", b""]
    assert again == mine
    with pytest.raises(MalformedBatch, match="12 images came with 191 bytes of keys"):
        images(batch.images, batch.pixels, RECIPE, batch.image_keys[1:])


def test_an_image_of_a_size_of_its_own_counts_as_its_blocks_in_the_budget_of_a_batch(tokenizer: ModelTokenizer) -> None:
    recipe = Recipe("blocks", multiple=2, min_pixels=4, max_pixels=64, block_tokens=3)
    (work_rows,) = layouts.make(tokenizer, Rows(images=recipe), [work(Input(images=(FILE,)), _0=[prepared(0)])])
    assert (work_rows.rows[0].cost, work_rows.rows[0].uncounted) == (1 + 3 * 6, 0)
