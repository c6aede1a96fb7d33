"""Pooling against numpy in float64, and the cut, norm and layers of pooled vectors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sie_adapter.engine.item_results import ItemResult, vectors
from sie_adapter.heads import States
from sie_adapter.heads.pooling import DenseHead, finite_rows, pool
from sie_adapter.packed.packing import Items, PackedBatch, Positions, pack
from sie_contracts.errors import InvalidInput
from sie_contracts.models.entries import POOLINGS
from sie_contracts.wire.messages import RunOptions

LENGTHS = [1, 1, 4, 7, 7, 30]


def states_of(dtype: torch.dtype) -> tuple[torch.Tensor, PackedBatch]:
    lengths = np.array(LENGTHS)
    items = Items(lengths, np.zeros(lengths.sum(), np.int32))
    hidden = torch.randn(int(lengths.sum()), 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    return hidden, pack(items, np.arange(len(lengths)), Positions())


def expected(hidden: torch.Tensor, packed: PackedBatch, pooling: str) -> np.ndarray:
    rows = np.split(hidden.double().numpy(), packed.bounds[1:-1])
    if pooling == "weighted":  # token i counts i times
        return np.stack([np.average(row, 0, np.arange(1, len(row) + 1)) for row in rows])
    return np.stack(
        [
            {
                "cls": row[0],
                "last": row[-1],
                "mean": row.mean(0),
                "max": row.max(0),
                "sqrt": row.sum(0) / len(row) ** 0.5,
            }[pooling]
            for row in rows
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_equals_numpy(pooling: str, dtype: torch.dtype) -> None:
    hidden, packed = states_of(dtype)
    got = pool(hidden, packed, pooling)  # type: ignore[arg-type]
    assert got.dtype is torch.float32
    np.testing.assert_allclose(got.numpy(), expected(hidden, packed, pooling), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_with_a_value_that_is_not_finite_are_marked(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    rows = torch.tensor([[largest, largest], [torch.inf, -torch.inf], [1.0, torch.nan], [-largest, -0.0]], dtype=dtype)
    assert finite_rows(rows).tolist() == [True, False, False, True]
    assert finite_rows(rows[:0]).tolist() == []


@pytest.mark.parametrize("dimensions", [0, 4, 16])
@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_are_cut_and_then_normalised(dimensions: int, normalize: bool) -> None:
    pooled = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
    options = RunOptions(dimensions=dimensions, normalize=normalize)
    answers = vectors(options, {"dense": list(pooled)})
    cut = pooled[:, : dimensions or 16].double().numpy()
    expected = cut / np.linalg.norm(cut, axis=1, keepdims=True) if normalize else cut
    np.testing.assert_allclose(
        [answer.arrays["dense"] for answer in answers if isinstance(answer, ItemResult)], expected, atol=1e-6
    )


def test_a_vector_that_is_not_finite_or_zero_is_named_and_its_mates_are_not() -> None:
    """Row 4 is zero only after the cut to 3 dimensions."""
    pooled = torch.ones(6, 4)
    pooled[1, 2], pooled[2, 0], pooled[3], pooled[4, :3] = torch.nan, torch.inf, 0.0, 0.0
    answers = vectors(RunOptions(dimensions=3), {"dense": list(pooled)})
    assert [isinstance(answer, ItemResult) for answer in answers] == [True, False, False, False, False, True]


def states(queries: list[bool] | None = None, pooling: str = "") -> States:
    hidden, packed = states_of(torch.float32)
    return States(hidden, packed, np.array(queries or [False] * 6), pooling)


def test_a_dense_head_pools_what_is_asked_for_and_then_applies_its_layers() -> None:
    layer = torch.nn.Linear(16, 3).requires_grad_(False)
    head = DenseHead("mean", torch.nn.Sequential(layer), torch.device("cpu"))
    token_states = states()
    chosen = np.array([1, 4])
    for own, name in (("", "mean"), ("cls", "cls"), ("weighted", "weighted")):
        reduced = head.reduce(replace(token_states, pooling=own), chosen)
        pooled = torch.from_numpy(expected(token_states.hidden, token_states.packed, name)[chosen]).float()
        torch.testing.assert_close(torch.stack(list(reduced.rows)), layer(pooled), atol=1e-5, rtol=0)
        assert reduced.usable.tolist() == [True, True]


def test_a_dense_head_joins_poolings_and_refuses_one_of_another_width() -> None:
    own = states()
    reduced = DenseHead("cls+max", None, torch.device("cpu")).reduce(own, np.arange(6))
    joined = np.concatenate([expected(own.hidden, own.packed, name) for name in ("cls", "max")], 1)
    np.testing.assert_allclose(torch.stack(list(reduced.rows)).numpy(), joined, atol=1e-6)
    for own_pooling, pooling in (("cls+max", "cls"), ("mean", "cls+max"), ("mean", "median"), ("mean", "cls+")):
        with pytest.raises(InvalidInput):
            DenseHead(own_pooling, None, torch.device("cpu")).reduce(states(pooling=pooling), np.arange(6))


def test_a_pooling_that_there_is_not_is_refused() -> None:
    """An unknown pooling must never be replaced by another one."""
    with pytest.raises(InvalidInput, match="pooling"):
        DenseHead("mean", None, torch.device("cpu")).reduce(states(pooling="median"), np.arange(6))
