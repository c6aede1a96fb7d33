"""Pooling against numpy in float64, the cut, norm and layers of pooled vectors, and the output dtypes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sie_adapter.engine.item_results import ItemResult, vectors
from sie_adapter.epilogues.dtypes import convert
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


# output dtypes


LINE = np.linspace(-1, 1, 8, dtype=np.float32)
MIXED = np.array([0.5, -0.25, 0, 0.125, -1, 0.75, 0.3, -0.0, 1, -0.6], np.float32)
TABLE = [
    (LINE, "int8", [-127, -91, -54, -18, 18, 54, 91, 127]),
    (LINE, "uint8", [0, 36, 73, 109, 146, 182, 219, 255]),
    (LINE, "ubinary", [15]),
    (MIXED, "int8", [64, -32, 0, 16, -127, 95, 38, 0, 127, -76]),
    (MIXED, "uint8", [191, 96, 128, 143, 0, 223, 166, 128, 255, 51]),
    (MIXED, "binary", [150, 128]),
    (np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], np.float32), "int8", [127, 0, 2, 2, 0, -2, -2]),
    (np.array([0, 0.5, 1.5, 2.5, 3.5, 255], np.float32), "uint8", [0, 0, 2, 2, 4, 255]),
]
TYPES = {"float32": "<f4", "float16": "<f2", "int8": "|i1", "uint8": "|u1", "binary": "|u1", "ubinary": "|u1"}
ROWS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=20),
    elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False),
)


@pytest.mark.parametrize(("vector", "dtype", "expected"), TABLE)
def test_the_table_of_the_contract(vector: np.ndarray, dtype: str, expected: list[int]) -> None:
    assert convert(torch.from_numpy(vector), dtype)[0].tolist() == expected


@pytest.mark.parametrize("shape", [(5, 12), (0, 12), (2, 3, 12)])
@pytest.mark.parametrize("dtype", TYPES)
def test_types_and_shapes(dtype: str, shape: tuple[int, ...]) -> None:
    values, scale, offset = convert(torch.randn(shape, generator=torch.Generator().manual_seed(0)), dtype)
    assert values.dtype.str == TYPES[dtype]
    assert values.shape == (*shape[:-1], 2 if "binary" in dtype else 12)
    for extra, owners in ((scale, {"int8", "uint8"}), (offset, {"uint8"})):
        assert (extra is not None) == (dtype in owners)
        if extra is not None:
            assert (extra.dtype.str, extra.shape) == ("<f4", shape[:-1])


@given(ROWS)
def test_codes_are_within_half_a_step_and_use_the_whole_range(rows: np.ndarray) -> None:
    for dtype, steps in (("int8", 127), ("uint8", 255)):
        codes, scale, offset = convert(torch.from_numpy(rows), dtype)
        assert scale is not None
        step = scale[:, None].astype(np.float64)
        base = 0.0 if offset is None else offset[:, None].astype(np.float64)
        assert (np.abs(codes * step + base - rows) <= 0.5 * step * (1 + 1e-4) + 1e-6 * np.abs(rows)).all()
        extent = np.abs(rows).max(1) if dtype == "int8" else rows.max(1) - rows.min(1)
        assert (np.abs(codes.astype(int)).max(1) == np.where(extent > 0, steps, 0)).all()


def test_constant_rows_come_back_exactly() -> None:
    rows = torch.tensor([[0.3, 0.3], [0.0, 0.0], [-2.0, -2.0]])
    codes, scale, offset = convert(rows, "uint8")
    assert scale is not None
    assert offset is not None
    assert not codes.any()
    np.testing.assert_array_equal(codes * scale[:, None] + offset[:, None], rows.numpy())
    codes, scale, _ = convert(rows[1:2], "int8")
    assert scale is not None
    assert (codes.tolist(), scale.tolist()) == ([[0, 0]], [0.0])


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        convert(torch.zeros(1, 8), "bfloat16")
