"""Parameters of fixed dimensional encodings: defaults, overrides one by one, and a refusal for everything else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie_contracts.errors import InvalidInput
from sie_contracts.models.muvera import MAX_CELLS, MAX_WIDTH, Muvera
from sie_contracts.models.option_values import muvera_parameters

LIMITS = {
    "num_repetitions": (1, 128),
    "num_simhash_projections": (0, 10),
    "projection_dim": (1, 1024),
    "final_projection_dim": (1, 1 << 20),
    "seed": (0, 2**53 - 1),
}
SMALL = Muvera(num_repetitions=1, num_simhash_projections=0, projection_dim=1)


def refusal(raw: Any, defaults: Muvera = SMALL) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        muvera_parameters("params.muvera", raw, defaults)
    assert caught.value.reason == "schema"
    assert caught.value.message.startswith(f"{caught.value.param}: ")
    return caught.value


def test_an_empty_map_is_the_defaults_of_the_model_else_of_the_contract() -> None:
    assert muvera_parameters("muvera", {}, Muvera()) == Muvera() == Muvera(40, 6, None, 10240, 42, False, False)
    assert muvera_parameters("muvera", {}, SMALL) == SMALL


def test_keys_override_the_defaults_one_by_one() -> None:
    defaults = Muvera(num_repetitions=20, fill_empty_partitions=True)
    got = muvera_parameters("muvera", {"seed": 7, "normalize": True}, defaults)
    assert got == Muvera(num_repetitions=20, seed=7, normalize=True, fill_empty_partitions=True)


def test_null_unsets_a_key_and_means_none_for_the_projections() -> None:
    raw = dict.fromkeys(Muvera.__struct_fields__)
    defaults = Muvera(num_repetitions=3, num_simhash_projections=2, projection_dim=8, seed=9, normalize=True)
    expected = msgspec.structs.replace(defaults, projection_dim=None, final_projection_dim=None)
    assert muvera_parameters("muvera", raw, defaults) == expected


@pytest.mark.parametrize("name", LIMITS)
def test_the_limits_are_inclusive(name: str) -> None:
    low, high = LIMITS[name]
    for value in (low, high, float(low)):
        got = getattr(muvera_parameters("muvera", {name: value}, SMALL), name)
        assert got == value
        assert type(got) is int
    for value in (low - 1, high + 1, low - 0.5):
        error = refusal({name: value}, SMALL)
        assert error.param == f"params.muvera.{name}"
        assert f"from {low} to {high}" in error.message
        assert error.message.endswith(f"got {value}")


@pytest.mark.parametrize("value", ["8", [], [8], {}, True, False, float("nan"), float("inf"), b"8"])
@pytest.mark.parametrize("name", LIMITS)
def test_a_number_of_another_type_is_refused_without_its_text(name: str, value: object) -> None:
    error = refusal({name: value})
    assert error.param == f"params.muvera.{name}"
    assert "8" not in error.message.partition("got ")[2]


@pytest.mark.parametrize("name", ["normalize", "fill_empty_partitions"])
def test_switches_are_booleans_or_0_and_1(name: str) -> None:
    for value in (True, False, 1, 0):
        assert getattr(muvera_parameters("muvera", {name: value}, Muvera()), name) is bool(value)
    for wrong in (2, -1, 1.0, "true", []):
        assert refusal({name: wrong}).param == f"params.muvera.{name}"


def test_an_unknown_key_is_named_with_the_known_ones() -> None:
    error = refusal({"seed": 1, "repetitions": 3})
    assert error.param == "params.muvera.repetitions"
    assert "num_repetitions" in error.message
    assert len(refusal({"x" * 10_000: 1}).param) < 100


@pytest.mark.parametrize(
    ("parameters", "dim", "width"),
    [
        (Muvera(), 128, 10240),
        (Muvera(final_projection_dim=None), 128, 40 * 64 * 128),
        (Muvera(final_projection_dim=None, projection_dim=16), 128, 40 * 64 * 16),
        (Muvera(num_repetitions=2, num_simhash_projections=0, final_projection_dim=None), 3, 6),
        (Muvera(num_repetitions=128, num_simhash_projections=6, final_projection_dim=None), 128, MAX_WIDTH),
        (Muvera(num_repetitions=64, num_simhash_projections=10), 128, 10240),
    ],
)
def test_the_width_of_a_result(parameters: Muvera, dim: int, width: int) -> None:
    assert parameters.width(dim) == width


@pytest.mark.parametrize(
    ("parameters", "dim", "limit"),
    [
        (Muvera(num_repetitions=128, final_projection_dim=None), 129, MAX_WIDTH),
        (Muvera(num_repetitions=64, num_simhash_projections=10), 129, MAX_CELLS),
    ],
)
def test_a_result_that_is_too_wide_is_refused_with_the_limit(parameters: Muvera, dim: int, limit: int) -> None:
    parameters.width(dim - 1)
    with pytest.raises(InvalidInput, match=str(limit)) as caught:
        parameters.width(dim, "params.muvera")
    assert (caught.value.reason, caught.value.param) == ("schema", "params.muvera")


def test_a_set_too_wide_for_any_model_is_refused_at_once() -> None:
    raw = {"num_repetitions": 128, "num_simhash_projections": 10, "projection_dim": 16, "final_projection_dim": None}
    assert str(MAX_WIDTH) in refusal(raw).message
    muvera_parameters("muvera", {**raw, "final_projection_dim": 10240}, Muvera())


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


@given(st.dictionaries(st.sampled_from([*Muvera.__struct_fields__, "other"]), ANYTHING))
def test_any_map_is_a_set_within_the_limits_or_a_typed_refusal(raw: dict[str, Any]) -> None:
    try:
        got = muvera_parameters("muvera", raw, Muvera())
    except InvalidInput as error:
        assert error.param.startswith("muvera")  # noqa: PT017
        return
    for name, (low, high) in LIMITS.items():
        value = getattr(got, name)
        assert (value is None and name.endswith("projection_dim")) or low <= value <= high
    assert got.width(1) <= MAX_WIDTH
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(got), type=Muvera) == got
