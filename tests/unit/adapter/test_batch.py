"""One outcome per item, at its own position, whatever goes wrong with its mates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sie_adapter.batch import BatchRun
from sie_adapter.packing import Int64, Items, Packed, Positions, pack
from sie_contracts.errors import InternalFailure, InvalidInput
from sie_contracts.ipc import BatchDone, Group, RunBatch
from sie_contracts.messages import Failed, Ok

POISON, HEAVY = 90, 91


@dataclass
class FakeEncoder:
    """The state of a token is its id, 1, 2 and 3. POISON overflows; HEAVY does not fit the device, and `limit` tokens do."""

    limit: int = 1 << 30
    max_tokens: int = 40
    vocabulary: int = 100
    width: int = 4
    error: type[Exception] = torch.OutOfMemoryError
    passes: list[int] = field(default_factory=list)

    def pack(self, batch: Items, chosen: Int64) -> Packed:
        return pack(batch, chosen, Positions())

    def forward(self, packed: Packed) -> torch.Tensor:
        self.passes.append(len(packed.order))
        if len(packed.ids) > self.limit or HEAVY in packed.ids:
            raise self.error("DefaultCPUAllocator: can't allocate memory")
        states = torch.tensor([[float(token), 1.0, 2.0, 3.0] for token in packed.ids.tolist()])
        states[torch.from_numpy(packed.ids == POISON)] = torch.inf
        return states


def message(sequences: list[list[int]], **changes: Any) -> RunBatch:
    fields: dict[str, Any] = {
        "batch": "b", "model": "m", "operation": "encode",
        "lengths": np.array([len(ids) for ids in sequences], "<i4").tobytes(),
        "ids": np.array([token for ids in sequences for token in ids], "<i4").tobytes(),
        "groups": (Group(0, len(sequences), RunOptions(normalize=False)),),
        "pooling": "mean",
    }  # fmt: skip
    return RunBatch(**{**fields, **changes})


def run(sequences: list[list[int]], encoder: FakeEncoder | None = None, **changes: Any) -> BatchDone:
    with torch.inference_mode():
        return BatchRun(encoder or FakeEncoder(), torch.device("cpu"), message(sequences, **changes), "").run()


def results(done: BatchDone) -> list[list[float] | str]:
    """The vector of each item, or the reason of its error; and that consecutive slices are consecutive."""
    out: list[list[float] | str] = []
    offset = 0
    for outcome in done.outcomes:
        if isinstance(outcome, Failed):
            out.append(outcome.error.reason)
            continue
        array = outcome.outputs["dense"]
        assert array.offset == offset
        out.append(np.frombuffer(done.block, array.dtype, array.shape[0], array.offset).tolist())
        offset += 4 * array.shape[0]
    assert offset == len(done.block)
    return out


@given(st.lists(st.lists(st.integers(0, 89), min_size=1, max_size=9), min_size=1, max_size=30))
def test_each_item_gets_its_own_mean(sequences: list[list[int]]) -> None:
    """W1."""
    got = results(run(sequences))
    np.testing.assert_allclose(got, [[np.mean(ids), 1, 2, 3] for ids in sequences], rtol=1e-6)


def test_groups_have_their_own_options_and_never_split_the_pass() -> None:
    encoder = FakeEncoder()
    groups = (Group(0, 1, RunOptions(normalize=False)), Group(1, 3, RunOptions(dimensions=2)), Group(3, 3))
    done = run([[7], [3, 5], [8]], encoder, groups=groups)
    assert encoder.passes == [3]
    got = results(done)
    assert got[0] == [7, 1, 2, 3]
    np.testing.assert_allclose(got[1], np.array([4, 1]) / np.sqrt(17), rtol=1e-6)
    assert [outcome.tokens for outcome in done.outcomes if isinstance(outcome, Ok)] == [1, 2, 1]


def test_an_overflow_is_tried_alone_and_then_is_an_error_of_that_item_only() -> None:
    """W2."""
    encoder = FakeEncoder()
    got = results(run([[7], [8, POISON], [9]], encoder))
    assert got == [[7, 1, 2, 3], "non_finite", [9, 1, 2, 3]]
    assert encoder.passes == [3, 1]


def test_items_that_must_not_reach_the_device_are_errors_of_their_own() -> None:
    got = results(run([[7], [], [1] * 41, [100], [-1], [9]]))
    assert got == [[7, 1, 2, 3], "no_tokens", "too_long", "token_out_of_range", "token_out_of_range", [9, 1, 2, 3]]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, MemoryError])
def test_out_of_memory_splits_by_cost_until_it_fits(error: type[Exception]) -> None:
    """O3, O17: a long item is parted from the short ones at once."""
    encoder = FakeEncoder(limit=40, error=error)
    got = results(run([[5] * 40, [1], [2], [3], [4]], encoder))
    assert got == [[value, 1, 2, 3] for value in (5, 1, 2, 3, 4)]
    assert encoder.passes == [5, 4, 1]


def test_an_item_that_does_not_fit_alone_fails_and_its_mates_are_right() -> None:
    done = run([[1], [HEAVY, 2], [3]])
    assert results(done) == [[1, 1, 2, 3], "out_of_memory", [3, 1, 2, 3]]
    failed = done.outcomes[1]
    assert isinstance(failed, Failed)
    assert failed.error.code == "RESOURCE_EXHAUSTED"


def test_other_errors_of_the_device_are_not_swallowed() -> None:
    encoder = FakeEncoder(limit=0, error=ValueError)
    with pytest.raises(ValueError, match="memory"):
        run([[1]], encoder)


def test_a_family_that_returns_a_row_less_fails_the_batch_and_never_shifts() -> None:
    """W1."""

    class Short(FakeEncoder):
        def forward(self, packed: Packed) -> torch.Tensor:
            return super().forward(packed)[:-1]

    with pytest.raises(InternalFailure, match="1 states for 2 tokens"):
        run([[1], [2]], Short())


def test_an_output_or_a_width_that_is_not_there_is_an_error_of_those_items() -> None:
    groups = (Group(0, 1, RunOptions(outputs=("sparse",))), Group(1, 2, RunOptions(dimensions=5)), Group(2, 3, RunOptions(normalize=False)))
    assert results(run([[1], [2], [3]], groups=groups)) == ["unsupported_output", "bad_dimensions", [3, 1, 2, 3]]


@pytest.mark.parametrize("changes", [{"operation": "score"}, {"pooling": "max"}, {"pooling": ""}, {"lora": "x"}])
def test_what_this_model_does_not_serve_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        run([[1]], **changes)


@pytest.mark.parametrize(
    "changes", [{"ids": b""}, {"groups": ()}, {"groups": (Group(0, 2),)}, {"groups": (Group(1, 1),)}]
)
def test_a_batch_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InternalFailure):
        run([[1]], **changes)


def test_an_empty_batch_is_answered() -> None:
    done = run([], groups=())
    assert done.outcomes == ()
