"""Pooling against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sie_adapter.heads.pooling import POOLINGS, finish, pool

LENGTHS = [1, 1, 4, 7, 7, 30]


def packed(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    bounds = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32)
    hidden = torch.randn(int(bounds[-1]), 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    return hidden, torch.from_numpy(bounds), [[0, 2, 1], [2, 1, 4], [6, 2, 7], [20, 1, 30]]


def expected(hidden: torch.Tensor, bounds: torch.Tensor, pooling: str) -> np.ndarray:
    states = hidden.double().numpy()
    rows = [states[first:last] for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
    return np.stack([{"cls": row[0], "last": row[-1], "mean": row.mean(0)}[pooling] for row in rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_equals_numpy(pooling: str, dtype: torch.dtype) -> None:
    hidden, bounds, groups = packed(dtype)
    got = pool(hidden, bounds, groups, pooling)  # type: ignore[arg-type]
    assert got.dtype is torch.float32
    np.testing.assert_allclose(got.numpy(), expected(hidden, bounds, pooling), atol=1e-6)


def test_the_mean_of_cuda_is_the_same_number() -> None:
    hidden, bounds, _ = packed(torch.float32)
    got = torch.segment_reduce(hidden, "mean", offsets=bounds.long())
    np.testing.assert_allclose(got.numpy(), expected(hidden, bounds, "mean"), atol=1e-6)


@pytest.mark.parametrize("dimensions", [0, 4, 16])
def test_vectors_are_cut_and_then_normalised(dimensions: int) -> None:
    """W18."""
    pooled = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
    vectors, usable = finish(pooled, dimensions, normalize=True)
    cut = pooled[:, : dimensions or 16].double().numpy()
    np.testing.assert_allclose(vectors.numpy(), cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-6)
    assert usable.all()
    raw, _ = finish(pooled, dimensions, normalize=False)
    assert torch.equal(raw, pooled[:, : dimensions or 16])


def test_a_vector_that_is_not_finite_or_zero_is_named_and_its_mates_are_not() -> None:
    """W2."""
    pooled = torch.ones(5, 4)
    pooled[1, 2], pooled[2, 0], pooled[3] = torch.nan, torch.inf, 0.0
    assert finish(pooled, 0, normalize=True)[1].tolist() == [True, False, False, False, True]
