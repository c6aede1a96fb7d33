"""The packed layout: no token is lost, and sequences share none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie_adapter.packed.attention import Kernel, layout_of
from sie_adapter.packed.packing import Items, MalformedBatch, Positions, expanded, filled_up, items, pack


def as_items(sequences: list[list[int]], types: bytes = b"") -> Items:
    lengths = np.array([len(ids) for ids in sequences], "<i4")
    ids = np.array([token for ids in sequences for token in ids], "<i4")
    return items(lengths.tobytes(), ids.tobytes(), types)


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=40), min_size=1, max_size=30))
def test_every_sequence_is_in_one_place_with_its_own_positions(sequences: list[list[int]]) -> None:
    packed = pack(as_items(sequences), np.arange(len(sequences)), Positions(2))
    assert sorted(packed.order) == list(range(len(sequences)))
    assert sorted(packed.lengths) == list(packed.lengths)
    for row, item in enumerate(packed.order):
        place = slice(packed.bounds[row], packed.bounds[row + 1])
        assert list(packed.ids[place]) == sequences[item]
        assert list(packed.positions[place]) == list(range(2, 2 + len(sequences[item])))


@pytest.mark.parametrize("attended", [False, True])
def test_items_are_filled_up_at_their_end(attended: bool) -> None:
    batch = as_items([[1], [2, 3, 4], [], [5, 6]])
    filled = expanded(batch, np.array([3, 2, 1, 0]), 9, attended=attended)
    assert filled.lengths.tolist() == [3, 3, 1, 2]
    assert filled.ids.tolist() == [1, 9, 9, 2, 3, 4, 9, 5, 6]
    assert (filled.visible is None) == attended
    if filled.visible is not None:
        assert filled.visible.tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("numbering", [Positions(), Positions(2, 1)])
@pytest.mark.parametrize("is_hidden", [False, True])
@pytest.mark.parametrize("has_types", [False, True])
def test_an_item_alone_is_laid_out_as_beside_others(numbering: Positions, is_hidden: bool, has_types: bool) -> None:
    types = np.arange(7, dtype=np.uint8) if has_types else None
    plain = replace(as_items([[9], [1, 9, 1, 8], [4, 5]]), types=types)
    batch = expanded(plain, np.array([3, 6, 2]), 7, attended=False) if is_hidden else plain
    beside = pack(batch, np.arange(3), numbering)
    for row, item in enumerate(beside.order):
        alone = pack(batch, np.array([item]), numbering)
        place = slice(beside.bounds[row], beside.bounds[row + 1])
        length = place.stop - place.start
        assert alone.ids.tolist() == beside.ids[place].tolist()
        assert alone.positions.tolist() == beside.positions[place].tolist()
        assert alone.bounds.tolist() == [0, length]
        assert alone.order.tolist() == [item]
        visible = length if beside.visible is None else int(beside.visible[row])
        assert alone.groups.tolist() == [[0, 1, length, visible]]
        assert (None if alone.visible is None else alone.visible.tolist()) == (
            None if beside.visible is None else [visible]
        )
        assert (None if alone.types is None else alone.types.tolist()) == (
            None if beside.types is None else beside.types[place].tolist()
        )
        for name in ("ids", "positions", "bounds", "groups", "order"):
            assert getattr(alone, name).dtype == getattr(beside, name).dtype, name


def test_a_pad_id_inside_a_text_has_the_position_that_roberta_gives_it() -> None:
    packed = pack(as_items([[9, 1, 8], [1, 9, 9]]), np.arange(2), Positions(2, 1))
    assert packed.positions.tolist() == [2, 1, 3, 1, 2, 3]


@pytest.mark.parametrize(
    ("lengths", "ids", "types"),
    [
        (b"\1\0\0", b"", b""),
        (b"\1\0\0\0", b"", b""),
        (b"\1\0\0\0", b"\0\0\0\0\0\0\0\0", b""),
        (b"\xff\xff\xff\xff\1\0\0\0", b"", b""),
        (b"", b"\0", b""),
        (b"\1\0\0\0", b"\5\0\0\0", b"\0\0"),
        (b"", b"", b"\0"),
    ],
)
def test_lengths_ids_and_types_that_do_not_belong_together_are_refused(
    lengths: bytes, ids: bytes, types: bytes
) -> None:
    with pytest.raises(MalformedBatch):
        items(lengths, ids, types)


def test_a_layout_names_the_kernel_of_each_group_or_one_for_all_sequences() -> None:
    packed = pack(as_items([[1] * 8, [1] * 9, [1] * 9, [1] * 600]), np.arange(4), Positions())
    assert layout_of(Kernel.BLOCKS, packed).tolist() == [
        [0, 1, 8, 8, Kernel.BLOCKS],
        [8, 2, 9, 9, Kernel.BLOCKS],
        [26, 1, 600, 600, Kernel.BLOCKS],
    ]
    assert layout_of(Kernel.VARLEN, packed).tolist() == [[0, 4, 600, 600, Kernel.VARLEN]]


def test_a_kernel_for_all_sequences_at_once_is_not_used_where_a_part_is_hidden() -> None:
    batch = expanded(as_items([[1, 2], [3]]), np.array([4, 0]), 9, attended=False)
    packed = pack(batch, np.arange(2), Positions())
    assert layout_of(Kernel.FLASH, packed).tolist() == [[0, 1, 1, 1, Kernel.SDPA], [1, 1, 4, 2, Kernel.SDPA]]


@pytest.mark.parametrize("numbering", [Positions(), Positions(2, 1)])
def test_a_batch_is_filled_up_to_one_of_few_sizes_with_a_sequence_of_its_own(numbering: Positions) -> None:
    sizes = set()
    for tokens in range(1, 2100, 7):
        packed = pack(as_items([[7] * min(tokens, 5), [8] * tokens]), np.arange(2), numbering)
        filled = filled_up(packed, 3, numbering)
        real = len(packed.ids)
        sizes.add(len(filled.ids))
        assert 0 <= len(filled.ids) - real < 64
        assert np.array_equal(filled.ids[:real], packed.ids)
        assert set(filled.ids[real:]) <= {3}
        assert np.array_equal(filled.positions[:real], packed.positions)
        assert np.array_equal(filled.order, packed.order)
        assert filled.bounds[-1] == len(filled.ids)
        assert int((filled.groups[:, 1] * filled.groups[:, 2]).sum()) == len(filled.ids)
        assert filled_up(filled, 3, numbering) is filled
    assert len([size for size in sizes if size > 64]) <= 12 + 24 + 17 + 1
