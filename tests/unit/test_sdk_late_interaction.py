"""MaxSim on the client."""

from __future__ import annotations

import numpy as np
import pytest

from sie_client import InvalidInputError, late_interaction, maxsim


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


def test_what_cannot_be_compared_is_named() -> None:
    good = np.zeros((2, 3), np.float32)
    with pytest.raises(InvalidInputError, match=r"documents\[1\]: expected the width of the query, 3, got 4"):
        maxsim(good, [good, np.zeros((2, 4), np.float32)])
    with pytest.raises(InvalidInputError, match=r"documents\[0\].*int8"):
        maxsim(good, [good.astype(np.int8)])
    with pytest.raises(InvalidInputError, match="query"):
        maxsim(good[0], [good])
