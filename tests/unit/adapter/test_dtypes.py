"""Output dtypes against the contract's table, and against numpy row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sie_adapter.epilogues.dtypes import convert

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
