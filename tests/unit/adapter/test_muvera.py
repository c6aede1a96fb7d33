"""Fixed dimensional encodings against the contract's values and against the steps written out per item."""

from __future__ import annotations

import threading

import muvera_naive
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sie_adapter.epilogues import muvera
from sie_contracts.errors import InvalidInput
from sie_contracts.models.muvera import Muvera

PLAIN = Muvera(num_repetitions=1, num_simhash_projections=2, final_projection_dim=None)
TOKENS = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0.5, 0.5, 0.5, 0.5]])


def unit_rows(seed: int, count: int, dim: int) -> torch.Tensor:
    rows = np.random.default_rng(seed).normal(size=(count, dim))
    return torch.from_numpy((rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32))


def one(tokens: torch.Tensor, parameters: Muvera, *, is_query: bool) -> torch.Tensor:
    return muvera.encode([tokens], parameters, is_query=is_query)[0]


def changed(**changes: object) -> Muvera:
    return Muvera(**{**{name: getattr(PLAIN, name) for name in Muvera.__struct_fields__}, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parameters", "is_query", "expected"),
    [
        (PLAIN, True, [0.5, 0.5, 1.5, 0.5, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0]),
        (PLAIN, False, [0.25, 0.25, 0.75, 0.25, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0]),
        (changed(fill_empty_partitions=True), False, [0.25, 0.25, 0.75, 0.25, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0]),
        (changed(fill_empty_partitions=True), True, [0.5, 0.5, 1.5, 0.5, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0]),
        (changed(projection_dim=2), True, [0, -1, 0, 0, 0, 1, -1, 0]),
        (changed(final_projection_dim=8), True, [1.5, 0, 0, -0.5, 0, 2.5, -0.5, 0]),
    ],
)
def test_the_small_values_of_the_contract(parameters: Muvera, is_query: bool, expected: list[float]) -> None:
    assert one(TOKENS, parameters, is_query=is_query).tolist() == expected


def test_the_values_of_the_contract_for_the_defaults() -> None:
    query = one(unit_rows(7, 32, 128), Muvera(), is_query=True)
    tokens = unit_rows(8, 200, 128)
    document, filled = (one(tokens, Muvera(fill_empty_partitions=fill), is_query=False) for fill in (False, True))
    got = [query[:4].tolist(), query.norm().item(), document.norm().item(), (query @ document).item()]
    assert got == [
        pytest.approx([-0.2594, 0.3634, 0.3308, -0.1765], rel=1e-3),
        *(pytest.approx(v, rel=1e-3) for v in (35.878, 32.720, 36.132)),
    ]
    assert [filled.norm().item(), (query @ filled).item()] == pytest.approx([34.932, 34.509], rel=1e-3)


ROUNDING = 1e-6  # the error of a float32 product of a unit row and a plane
PARAMETERS = st.builds(
    Muvera,
    num_repetitions=st.integers(1, 5),
    num_simhash_projections=st.integers(0, 5),
    projection_dim=st.none() | st.integers(1, 20),
    final_projection_dim=st.none() | st.integers(1, 300),
    seed=st.integers(0, 2**40),
    normalize=st.booleans(),
    fill_empty_partitions=st.booleans(),
)


@given(
    PARAMETERS,
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(1, 24),
    st.booleans(),
    st.sampled_from([1 << 8, 1 << 12, 1 << 21]),
)
def test_a_ragged_batch_equals_the_steps_written_out(
    parameters: Muvera, lengths: list[int], dim: int, is_query: bool, budget: int
) -> None:
    """The result does not depend on the blocks. The smallest budget holds one item and one repetition."""
    rows = [unit_rows(seed, count, dim) if count else torch.zeros(0, dim) for seed, count in enumerate(lengths)]
    assume(all(muvera_naive.margin(item.numpy(), parameters) > ROUNDING for item in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muvera, "CPU_BLOCK_BYTES", budget)
        got = muvera.encode(rows, parameters, is_query=is_query)
    assert (got.dtype, got.shape) == (torch.float32, (len(rows), parameters.width(dim)))
    expected = np.stack([muvera_naive.encode(item.numpy(), parameters, is_query=is_query) for item in rows])
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("parameters", "is_query"),
    [
        (Muvera(), True),
        (Muvera(fill_empty_partitions=True), False),
        (Muvera(projection_dim=16, final_projection_dim=None), False),
    ],
)
def test_an_item_does_not_depend_on_its_batch_mates(parameters: Muvera, is_query: bool) -> None:
    """Results are equal bit for bit. The items themselves are not changed."""
    rows = [unit_rows(seed, count, 64) for seed, count in enumerate([1, 128, 3, 77, 300, 32, 32, 5])]
    before = [item.clone() for item in rows]
    together = muvera.encode(rows, parameters, is_query=is_query)
    for item, got in zip(rows, together, strict=True):
        assert torch.equal(got, one(item, parameters, is_query=is_query))
    assert torch.equal(together.flip(0), muvera.encode(rows[::-1], parameters, is_query=is_query))
    assert all(map(torch.equal, rows, before))


def test_tokens_in_a_plane_are_on_the_same_side_in_any_batch() -> None:
    """The products of these tokens with the plane are rounding errors. In float32 they depend on the shape of the
    batch.
    """
    parameters = Muvera(num_repetitions=1, final_projection_dim=None)
    plane = torch.from_numpy(muvera_naive.planes(parameters.seed, 128, 6)[:, :1]).double()
    tokens = unit_rows(5, 512, 128).double()
    tokens = (tokens - (tokens @ plane) @ plane.T / plane.square().sum()).float()
    together = muvera.encode(list(tokens.split(1)), parameters, is_query=True)
    for size in (1, 3, 7):
        rows = list(tokens[: size * 64].split(size))
        alone = torch.stack([one(item, parameters, is_query=True) for item in rows])
        assert torch.equal(muvera.encode(rows, parameters, is_query=True), alone)
        if size == 1:
            assert torch.equal(together[:64], alone)


def test_two_threads_at_once_get_what_one_gets() -> None:
    """Both threads use projection matrices that are not drawn yet."""
    rows = [unit_rows(seed, 40, 48) for seed in range(4)]
    jobs = [(Muvera(num_repetitions=8, seed=9000 + seed // 2), bool(seed % 2)) for seed in range(6)]
    got: list[dict[int, torch.Tensor]] = [{}, {}]
    together = threading.Barrier(2)

    def work(mine: dict[int, torch.Tensor]) -> None:
        for number, (parameters, is_query) in enumerate(jobs):
            together.wait(30)
            mine[number] = muvera.encode(rows, parameters, is_query=is_query)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (parameters, is_query) in enumerate(jobs):
        expected = np.stack([muvera_naive.encode(item.numpy(), parameters, is_query=is_query) for item in rows])
        for mine in got:
            np.testing.assert_allclose(mine[number].numpy(), expected, atol=1e-5)


def test_the_matrices_held_stay_below_their_bytes() -> None:
    cpu = torch.device("cpu")
    size = muvera._draw(Muvera(), 8, cpu).nbytes
    cache = muvera._ProjectionCache(2 * size, 64)
    for seed in range(5):
        cache.get(Muvera(seed=seed), 8, cpu)
        assert cache.nbytes <= 2 * size
    assert cache.get(Muvera(num_repetitions=128), 8, cpu).nbytes > 2 * size, "a set above the limit is served"


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns, in bytes."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return output


@pytest.mark.parametrize(
    "parameters", [Muvera(), Muvera(projection_dim=256, num_repetitions=16, fill_empty_partitions=True)]
)
def test_no_intermediate_grows_with_the_batch(parameters: Muvera) -> None:
    """All cells of the 96 items would take 96 MiB."""
    rows = list(unit_rows(0, 24 * 8, 128).view(24, 8, 128)) * 4
    muvera.encode(rows[:1], parameters, is_query=False)  # draws the matrices
    with Largest() as largest:
        muvera.encode(rows, parameters, is_query=False)
    result = 96 * parameters.width(128) * 4
    assert 1 << 20 <= largest.nbytes <= max(result, 2 * muvera.CPU_BLOCK_BYTES) <= 64 << 20


def test_a_result_that_would_be_too_wide_is_refused() -> None:
    with pytest.raises(InvalidInput, match="muvera"):
        one(unit_rows(0, 2, 2048), Muvera(final_projection_dim=None), is_query=True)
