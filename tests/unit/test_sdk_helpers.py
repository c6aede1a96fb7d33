"""Helpers of the client: regions, MaxSim and progress."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from sie_client import InvalidInputError, Progress, late_interaction, maxsim, region
from sie_client.core import HttpAnswer, Pause, Session
from sie_client.progress import Meter


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


def naive(query: np.ndarray, document: np.ndarray) -> float:
    return float(sum(max(float(q @ d) for d in document) for q in query)) if len(document) and len(query) else 0.0


@pytest.mark.parametrize("block", [1, 50, 1 << 22])
def test_scores_are_those_of_the_definition_however_many_documents_go_at_once(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(late_interaction, "_BLOCK", block)
    random = np.random.default_rng(7)
    query = random.normal(size=(5, 16)).astype(np.float32)
    documents = [random.normal(size=(length, 16)).astype(np.float32) for length in (3, 0, 1, 40, 0, 7)]
    scores = maxsim(query, documents)
    assert scores.dtype == np.float32
    assert np.allclose(scores, [naive(query, document) for document in documents], atol=1e-4)


SQUARE, DISC = (60, 50, 81, 41), (200, 120, 61, 61)  # x, y, width, height


def test_a_callback_is_told_of_each_part_and_each_wait() -> None:
    reports: list[Progress] = []
    meter = Meter(Session(on_progress=reports.append), 10)
    for step in (HttpAnswer(4), Pause(1.0, "connection", 118.0), HttpAnswer(6)):
        meter.update(step)
    assert reports == [Progress(4, 10), Progress(4, 10, "connection", 118.0), Progress(10, 10)]
