"""A part of an image as the tokens that Florence-2 reads."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sie_client import InvalidInputError, region


@pytest.mark.parametrize(
    ("bbox", "size", "expected"),
    [
        ((0, 0, 300, 120), (300, 120), (0, 0, 999, 999)),  # the last bin ends at the edge
        ((0, 0, 1, 1), (2000, 1000), (0, 0, 0, 1)),
        ((31, 25, 120, 94), (300, 120), (103, 208, 503, 991)),
        ([0.5, 1.5, 2.0, 3.0], (4, 5), (125, 300, 625, 900)),
    ],
)
def test_corners_are_bins_of_a_thousandth(
    bbox: Sequence[float], size: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert region(bbox, size) == "".join(f"<loc_{coordinate}>" for coordinate in expected)


@pytest.mark.parametrize(
    "bbox",
    [(0, 0, 301, 10), (-1, 0, 10, 10), (0, 111, 10, 10), (5, 5, 0, 10), (5, 5, 10, -1), (5, 5, 10), (5, 5, 10, 10, 1)],
)
def test_what_is_no_box_within_the_image_is_refused(bbox: Sequence[float]) -> None:
    with pytest.raises(InvalidInputError, match="within an image of") as refused:
        region(bbox, (300, 120))
    assert refused.value.reason == "region"
