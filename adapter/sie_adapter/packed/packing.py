"""Packing: from the bytes of a batch to the input of a packed forward pass. Only numpy is used.

    lengths, ids (int32 bytes, item order) ──► Items ──► pack ──► PackedBatch (sequences by length, no padding,
    positions, bounds)
    images, pixels ──► BatchFiles, the images of each item
    sounds, features ──► BatchFiles, the sounds of each item

Sequences are ordered by length. Sequences of equal length are then adjacent, and one view of the packed array contains
them all, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sie_contracts.media.images import Recipe, Size, cost
from sie_contracts.media.sounds import Shape, SoundRecipe
from sie_contracts.wire.ipc import IMAGE_KEY_BYTES

# Pairs (limit, step), limits ascending, by which numbers of tokens or rows are rounded up, so that passes have few
# different shapes. A number is rounded to a multiple of the step of the first pair whose limit is at least the number.
# If all limits are lower, the step of the last pair is used.
Steps = Sequence[tuple[int, int]]
# Steps for the tokens of a pass. Passes of up to 64 tokens are not padded, because a padding sequence took 1 ms of the
# 4.5 ms of a pass with one short text.
_STEPS: Steps = ((64, 1), (256, 16), (1024, 32), (2048, 64))
# largest ratio of positions, padding included, to tokens in a group of sequences that is padded together; `evenly_long`
# begins another group before this ratio is exceeded
PADDED_WASTE = 1.25
UInt8 = NDArray[np.uint8]
Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class MalformedBatch(Exception):
    """Raised for a batch whose parts, such as its lengths and ids, contradict each other."""


class Shown(NamedTuple):
    """Image of a batch. `pixels`: the image, resized for the model, uint8 [rows, columns, 3]. `height`, `width`: size
    of the submitted image, upright. `key`: images with equal keys and sizes have equal outputs of an image encoder, so
    these outputs may be cached. If the key is empty, the output of the image is not cached.
    """

    pixels: UInt8
    height: int
    width: int
    key: bytes = b""


Heard = Float32  # features of a sound, [views, frames, bins]
T = TypeVar("T")


@dataclass(frozen=True)
class BatchFiles(Generic[T]):
    """Images or sounds of a batch. `shown`: the files; the files of one item are adjacent. `rows` [files]: the index of
    the item of each file, ascending. `tokens` [files]: the cost of each file, as a number of tokens.
    """

    rows: Int64
    shown: Sequence[T]
    tokens: Int64

    def for_items(self, items: Int64) -> list[list[T]]:
        starts, stops = np.searchsorted(self.rows, items), np.searchsorted(self.rows, items, side="right")
        return [list(self.shown[start:stop]) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]

    def costs(self, items: int) -> Int64:
        return np.bincount(self.rows, weights=self.tokens, minlength=items).astype(np.int64)


@dataclass(frozen=True)
class Items:
    """Token ids of a batch in item order. `lengths`: [items], `ids`: [sum of lengths].

    `types`: token types, [sum of lengths], None if all are 0. `visible`: the number of tokens of each item that are
    attended to, counted from its first token, [items]; None if all tokens are attended to. `images`, `sounds`: None if
    no item has images or sounds.
    """

    lengths: Int64
    ids: Int32
    types: UInt8 | None = None
    visible: Int64 | None = None
    images: BatchFiles[Shown] | None = None
    sounds: BatchFiles[Heard] | None = None

    @cached_property
    def costs(self) -> Int64:
        """Return the cost of each item on the device, as a number of tokens, [items]."""
        if self.images is None and self.sounds is None:
            return self.lengths
        files = [part for part in (self.images, self.sounds) if part is not None]
        return sum((part.costs(len(self.lengths)) for part in files), self.lengths)

    @cached_property
    def starts(self) -> Int64:
        """Return the index of the first token of each item, [items]."""
        return self.lengths.cumsum() - self.lengths

    def extremes(self) -> tuple[Int64, Int64]:
        """Return the smallest and the largest id of each item, [items]; 0 for an item without tokens."""
        low, high = np.zeros(len(self.lengths), np.int64), np.zeros(len(self.lengths), np.int64)
        filled = self.lengths > 0
        if filled.any():
            starts = self.starts[filled]
            low[filled], high[filled] = np.minimum.reduceat(self.ids, starts), np.maximum.reduceat(self.ids, starts)
        return low, high


def items(
    lengths: bytes,
    ids: bytes,
    types: bytes = b"",
    images: BatchFiles[Shown] | None = None,
    sounds: BatchFiles[Heard] | None = None,
) -> Items:
    if len(lengths) % 4 or len(ids) % 4:
        raise MalformedBatch("the number of bytes of the int32 lengths or ids is not a multiple of 4")
    counts = np.frombuffer(lengths, "<i4").astype(np.int64)
    if counts.size and counts.min() < 0:
        raise MalformedBatch("a length is negative")
    tokens = int(counts.sum())
    if tokens * 4 != len(ids):
        raise MalformedBatch(f"lengths add up to {tokens} tokens, the batch has {len(ids) // 4} ids")
    if types and len(types) != tokens:
        raise MalformedBatch(f"lengths add up to {tokens} tokens, the batch has {len(types)} token types")
    for name, files in (("an image", images), ("a sound", sounds)):
        if files is not None and len(files.rows) and files.rows[-1] >= len(counts):
            raise MalformedBatch(f"{name} belongs to row {files.rows[-1]}, the batch has {len(counts)} rows")
    own = np.frombuffer(types, np.uint8) if types else None
    return Items(counts, np.frombuffer(ids, "<i4"), own, images=images, sounds=sounds)


def images(places: bytes, pixels: bytes, recipe: Recipe | None, keys: bytes = b"") -> BatchFiles[Shown] | None:
    """Return the images of a batch; None without images. `places`: int32 [images, 5]: row, height and width of the
    pixels, height and width of the upright submitted image. `keys`: `ipc.RunBatch.image_keys`. Raises MalformedBatch.
    """
    if len(places) % 20:
        raise MalformedBatch("the number of bytes of the int32 rows and sizes of images is not a multiple of 20")
    if not places:
        return None
    if recipe is None:
        raise MalformedBatch("the batch has images, and the model reads no images")
    records = np.frombuffer(places, "<i4").reshape(-1, 5).astype(np.int64)
    rows, sizes = records[:, 0], records[:, 1] * records[:, 2] * 3
    if rows[0] < 0 or (np.diff(rows) < 0).any() or records[:, 1:].min() < 1:
        raise MalformedBatch("a row is negative, the images are not in the order of their rows, or an image is empty")
    if int(sizes.sum()) != len(pixels):
        raise MalformedBatch(f"the sizes of images need {int(sizes.sum())} bytes, the batch has {len(pixels)}")
    if len(keys) not in (0, IMAGE_KEY_BYTES * len(records)):
        raise MalformedBatch(f"{len(records)} images came with {len(keys)} bytes of keys, not {IMAGE_KEY_BYTES} each")
    parts = np.split(np.frombuffer(pixels, np.uint8), np.cumsum(sizes)[:-1])
    own = [keys[image * IMAGE_KEY_BYTES : (image + 1) * IMAGE_KEY_BYTES] for image in range(len(records))]
    shown = [
        Shown(part.reshape(height, width, 3), upright_height, upright_width, key if any(key) else b"")
        for part, (height, width, upright_height, upright_width), key in zip(
            parts, records[:, 1:].tolist(), own, strict=True
        )
    ]
    costs = [cost(recipe, Size(height, width)) for height, width in records[:, 1:3].tolist()]
    return BatchFiles(rows, shown, np.array(costs, np.int64))


def sounds(places: bytes, features: bytes, recipe: SoundRecipe | None) -> BatchFiles[Heard] | None:
    """Return the sounds of a batch; None if it has none. `places`: int32 [sounds, 4]: row, views, frames, bins."""
    if len(places) % 16 or len(features) % 4:
        raise MalformedBatch("the bytes of the rows and shapes (int32) or of the features (float32) are incomplete")
    if not places:
        return None
    if recipe is None:
        raise MalformedBatch("the batch has sounds, and the model reads no sounds")
    records = np.frombuffer(places, "<i4").reshape(-1, 4).astype(np.int64)
    rows, sizes = records[:, 0], records[:, 1:].prod(axis=1)
    if rows[0] < 0 or (np.diff(rows) < 0).any() or records[:, 1:].min() < 1:
        raise MalformedBatch("a row is negative, the sounds are not in the order of their rows, or a sound is empty")
    if 4 * int(sizes.sum()) != len(features):
        raise MalformedBatch(f"the shapes of sounds need {4 * int(sizes.sum())} bytes, the batch has {len(features)}")
    parts = np.split(np.frombuffer(features, "<f4"), np.cumsum(sizes)[:-1])
    arrays = [part.reshape(shape) for part, shape in zip(parts, records[:, 1:].tolist(), strict=True)]
    return BatchFiles(rows, arrays, np.array([recipe.cost(Shape(*array.shape)) for array in arrays], np.int64))


def expanded(batch: Items, minimums: Int64, filler: int, *, attended: bool) -> Items:
    """Pad items with `filler` ids to at least `minimums` tokens, [items]. The added tokens attend to the other tokens;
    with `attended`, the other tokens also attend to the added tokens. Token types are dropped. If no item is padded,
    the result's `visible` is None, so that one kernel can compute all sequences.
    """
    lengths = np.maximum(batch.lengths, minimums)
    ids = np.full(int(lengths.sum()), filler, np.int32)
    within = np.arange(int(batch.lengths.sum())) - np.repeat(batch.starts, batch.lengths)
    ids[np.repeat(np.cumsum(lengths) - lengths, batch.lengths) + within] = batch.ids
    visible = None if attended or np.array_equal(lengths, batch.lengths) else batch.lengths
    return Items(lengths, ids, None, visible, batch.images, batch.sounds)


@dataclass(frozen=True)
class Positions:
    """Numbering of the positions in a sequence, from `first` on. In models like RoBERTa, a token with the id `pad` has
    the position `first - 1`. Source: transformers, RobertaEmbeddings.create_position_ids_from_input_ids.
    """

    first: int = 0
    pad: int | None = None


class PlacedFeatures(NamedTuple):
    """Features that replace the embeddings of tokens with the id `token`. `values`: a row for each of these tokens, in
    packed order, on the device. `deeper[i]`: a tensor like `values`, which is added to the output of layer i; further
    layers have no such tensor.
    """

    token: int
    values: Any
    deeper: tuple[Any, ...] = ()


@dataclass
class PackedBatch:
    """Sequences side by side, shortest first. `order[i]` is the item of packed sequence i.

    `padding`: number of computed positions without a token, see `filled`; the sequence that `filled_up` appends is not
    counted. `features`: image features in place of the embeddings of image tokens. `axes`: positions in time, height
    and width, for models with three position axes; None if each axis has the values of `positions`. `engine`: the
    engine that runs the pass; None for the engine of the model.
    """

    ids: Int64  # shape [tokens]
    positions: Int64  # shape [tokens]
    bounds: Int32  # [sequences + 1], index of the first token of each sequence, then the number of tokens
    # [groups, 4]. A group has equally long sequences. Columns: index of the group's first token; number of sequences;
    # tokens of each sequence; tokens of each sequence that are attended to
    groups: Int64
    order: Int64  # shape [sequences]
    types: UInt8 | None = None  # shape [tokens]
    visible: Int64 | None = None  # [sequences], None if every token is attended to
    padding: int = 0
    features: PlacedFeatures | None = None
    axes: Int64 | None = None  # shape [3, tokens]
    engine: str | None = None

    @cached_property
    def lengths(self) -> Int64:
        return np.diff(self.bounds).astype(np.int64)

    def filled(self, positions: int) -> None:
        """Add to `padding` the number of positions that a pass computes although they have no token."""
        self.padding += positions


def pack(batch: Items, chosen: Int64, numbering: Positions) -> PackedBatch:
    """Lay out the `chosen` items (indices of items with at least one token) one after the other, shortest first."""
    if len(chosen) == 1:
        return _packed_alone(batch, chosen, numbering)
    if batch.visible is None:
        order = chosen[np.argsort(batch.lengths[chosen], kind="stable")]
        visible = batch.lengths[order]
    else:
        order = chosen[np.lexsort((batch.visible[chosen], batch.lengths[chosen]))]
        visible = batch.visible[order]
    lengths = batch.lengths[order]
    ends = np.cumsum(lengths)
    starts = ends - lengths
    tokens = np.arange(int(ends[-1]) if len(ends) else 0)
    within = tokens - np.repeat(starts, lengths)
    source = np.repeat(batch.starts[order], lengths) + within
    ids = batch.ids[source].astype(np.int64)
    firsts = np.flatnonzero((np.diff(lengths, prepend=-1) != 0) | (np.diff(visible, prepend=-1) != 0))
    groups = np.stack([starts[firsts], np.diff(firsts, append=len(lengths)), lengths[firsts], visible[firsts]], axis=1)
    positions = within + numbering.first
    if numbering.pad is not None and (ids == numbering.pad).any():
        positions = _positions_around_pads(ids, numbering, starts, lengths)
    bounds = np.concatenate([[0], ends]).astype(np.int32)
    types = None if batch.types is None else batch.types[source]
    return PackedBatch(ids, positions, bounds, groups, order, types, None if batch.visible is None else visible)


def _packed_alone(batch: Items, chosen: Int64, numbering: Positions) -> PackedBatch:
    """Lay out a single item like `pack`, but with less Python code. This saves 5 % of the time of one short text, such
    as the query of a search box.
    """
    item = int(chosen[0])
    length, start = int(batch.lengths[item]), int(batch.lengths[:item].sum())
    source = slice(start, start + length)
    visible = length if batch.visible is None else int(batch.visible[item])
    ids = batch.ids[source].astype(np.int64)
    if numbering.pad is not None and (ids == numbering.pad).any():
        positions = _positions_around_pads(ids, numbering, np.array([0]), np.array([length]))
    else:
        positions = np.arange(numbering.first, numbering.first + length)
    return PackedBatch(
        ids,
        positions,
        np.array([0, length], np.int32),
        np.array([[0, 1, length, visible]]),
        chosen,
        None if batch.types is None else batch.types[source],
        None if batch.visible is None else batch.visible[chosen],
    )


def filled_up(packed: PackedBatch, filler: int, numbering: Positions) -> PackedBatch:
    """Append one sequence of `filler` ids, so that batches have few different numbers of tokens: oneDNN keeps about
    1 MB of memory for each different number of rows of a matrix product. The `order` of the result does not list this
    sequence. The padding is about 2 % of all tokens.
    """
    tokens = len(packed.ids)
    more = missing(tokens)
    if not more:
        return packed
    beside = np.arange(more) + numbering.first
    ends = np.append(packed.bounds, np.int32(tokens + more))
    return replace(
        packed,
        ids=np.append(packed.ids, np.full(more, filler, np.int64)),
        positions=np.append(packed.positions, beside),
        axes=None if packed.axes is None else np.hstack([packed.axes, np.tile(beside, (3, 1))]),
        bounds=ends,
        groups=np.concatenate([packed.groups, [[tokens, 1, more, more]]]),
        types=None if packed.types is None else np.append(packed.types, np.zeros(more, np.uint8)),
    )


def missing(count: int, steps: Steps = _STEPS) -> int:
    """Return the number to add to `count` tokens or rows, so that the sum is a multiple of a step (see `Steps`)."""
    for limit, step in steps:
        if count <= limit:
            return -count % step
    return -count % steps[-1][1]


def evenly_long(
    lengths: Sequence[int], waste: float = PADDED_WASTE, budget: float = math.inf
) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each group of sequences that is padded together. `lengths` must ascend. A group has at
    most `waste` positions per token, and at most `budget` positions. A sequence of more than `budget` tokens is a group
    of its own.
    """
    start, real = 0, 0
    for place, length in enumerate(lengths):
        if place > start and (place + 1 - start) * length > min(budget, waste * (real + length)):
            yield start, place
            start, real = place, 0
        real += length
    if lengths:
        yield start, len(lengths)


class Padded(NamedTuple):
    """Sequences of a batch, one per row, padded on the right to one length: [sequences, columns]. `tokens`: the range
    of their tokens in the batch. `real`: True at positions with a token. `attended`: True at positions that are
    attended to. `types`: token types, None if all are 0.
    """

    tokens: slice
    real: NDArray[np.bool_]
    attended: NDArray[np.bool_]
    ids: Int64
    types: Int64 | None


def padded(packed: PackedBatch, start: int, stop: int, columns: int, filler: int, rows: int = 0) -> Padded:
    """Return the sequences from `start` to before `stop`, each padded with `filler` ids to `columns` tokens. If there
    are fewer than `rows` rows, add rows of `filler` ids, with `attended` True. Count all added positions in
    `packed.padding`.
    """
    places = np.arange(columns)[None, :]
    real = _with_rows(places < packed.lengths[start:stop, None], rows, False)
    tokens = slice(int(packed.bounds[start]), int(packed.bounds[stop]))
    packed.filled(real.size - (tokens.stop - tokens.start))
    ids = np.full(real.shape, filler, np.int64)
    ids[real] = packed.ids[tokens]
    types = None
    if packed.types is not None:
        types = np.zeros(real.shape, np.int64)
        types[real] = packed.types[tokens]
    visible = packed.lengths if packed.visible is None else packed.visible
    attended = _with_rows(places < visible[start:stop, None], rows, True)
    return Padded(tokens, real, attended, ids, types)


def _with_rows(mask: NDArray[np.bool_], rows: int, filling: bool) -> NDArray[np.bool_]:
    more = rows - len(mask)
    return mask if more <= 0 else np.concatenate([mask, np.full((more, mask.shape[1]), filling)])


def _positions_around_pads(ids: Int64, numbering: Positions, starts: Int64, lengths: Int64) -> Int64:
    real = (ids != numbering.pad).astype(np.int64)
    counted = np.cumsum(real)
    before = np.repeat(counted[starts] - real[starts], lengths)
    return np.where(real, counted - before, 0) + numbering.first - 1
