"""Arrays on the wire, byte for byte, in both directions."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sie_contracts import arrays
from sie_contracts.wire.messages import Vectors

ZEROS = bytes.fromhex("85c4026e64c3c40474797065a33c6634c4046b696e64c400c4057368617065920203c40464617461c418") + bytes(
    24
)
THREE = bytes.fromhex(
    "85c4026e64c3c40474797065a33c6634c4046b696e64c400c40573686170659103c40464617461c40c0000003f000080be0000803f"
)


def encoded(array: np.ndarray) -> bytes:
    return msgspec.msgpack.encode(arrays.pack(array))


def decoded(data: bytes) -> Any:
    return arrays.unpack(arrays.decode_msgpack(data))


def a_map(**changes: Any) -> dict[str, Any]:
    """A legal array map of float32 zeros [2, 3], with text keys."""
    return {"nd": True, "type": "<f4", "kind": b"", "shape": [2, 3], "data": bytes(24), **changes}


@pytest.mark.parametrize(
    ("array", "data", "size"),
    [(np.zeros((2, 3), np.float32), ZEROS, 66), (np.array([0.5, -0.25, 1.0], np.float32), THREE, 53)],
)
def test_the_documented_bytes(array: np.ndarray, data: bytes, size: int) -> None:
    """Five entries, keys of type bin, in this order."""
    assert len(data) == size
    assert encoded(array) == data
    output_array = decoded(data)
    assert output_array.dtype == np.float32
    np.testing.assert_array_equal(output_array, array)


@given(
    hnp.arrays(st.sampled_from(sorted(arrays.ACCEPTED)), hnp.array_shapes(max_dims=4, min_side=0, max_side=5)),
    st.booleans(),
)
def test_every_accepted_dtype_is_read_with_either_kind_of_keys(array: np.ndarray, text_keys: bool) -> None:
    fields = a_map(type=array.dtype.str, shape=list(array.shape), data=array.tobytes())
    raw: dict[Any, Any] = fields if text_keys else {key.encode(): value for key, value in fields.items()}
    output_array = decoded(msgspec.msgpack.encode(raw))
    assert (output_array.dtype, output_array.shape, output_array.tobytes()) == (
        array.dtype,
        array.shape,
        array.tobytes(),
    )


def test_order_and_endianness_of_memory_do_not_travel() -> None:
    """An array travels in C order and little endian, whatever its layout in memory."""
    plain = np.arange(12, dtype="<f4").reshape(3, 4)
    for same in (np.asfortranarray(plain), plain.astype(">f4"), np.repeat(plain, 2, axis=1)[:, ::2], plain[::-1][::-1]):
        assert encoded(same) == encoded(plain)


@pytest.mark.parametrize("nd", [True, False, None, 3])
def test_a_map_with_a_field_nd_but_no_data_is_no_array(nd: object) -> None:
    """Values of a user's schema and metadata may have any names."""
    value = {"data": {"nd": nd, "type": "<f4"}, "metadata": {"nd": nd}}
    assert decoded(msgspec.msgpack.encode(value)) == value


@pytest.mark.parametrize(
    "dtype", ["<f8", "<i8", "<i2", "<u2", "<u4", "<u8", "|b1", "O", "S3", "<U3", "<c8", "V4", "M8[s]"]
)
def test_a_dtype_that_clients_cannot_read_is_not_sent(dtype: str) -> None:
    """JavaScript has no exact int64."""
    with pytest.raises(ValueError, match="cannot be sent"):
        arrays.pack(np.zeros(2, dtype))


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "<f3"},
        {"type": ">f4"},
        {"type": "O"},
        {"type": [["x", "<f4"]]},
        {"type": "<c8"},
        {"kind": b"V"},
        {"data": bytes(23)},
        {"data": bytes(25)},
        {"data": "x" * 24},
        {"shape": [2, 2]},
        {"shape": [2, -3]},
        {"shape": [True, 6]},
        {"shape": [1, 1, 1, 2, 3]},
        {"shape": [1 << 31, 0]},
        {"shape": [1 << 16] * 4, "data": b""},
    ],
)
def test_a_map_that_is_not_an_array_of_numbers_is_refused(changes: dict[str, Any]) -> None:
    for fields in (a_map(**changes), {key.encode(): value for key, value in a_map(**changes).items()}):
        with pytest.raises(ValueError, match=r"^array"):
            decoded(msgspec.msgpack.encode({"items": [fields]}))


def test_kind_may_be_absent_and_the_type_may_be_bin() -> None:
    fields = a_map(type=b"<f4")
    del fields["kind"]
    assert decoded(msgspec.msgpack.encode(fields)).shape == (2, 3)


def test_arrays_are_found_at_any_depth_and_all_else_is_left_alone() -> None:
    body = {"a": [1, {"b": arrays.pack(np.ones(2, np.int8))}], "nd": "text", "c": {"nd": 1}, b"raw": b"\x00"}
    content = decoded(msgspec.msgpack.encode(body))
    assert content["a"][1]["b"].tolist() == [1, 1]
    assert {key: content[key] for key in ("nd", "c", b"raw")} == {"nd": "text", "c": {"nd": 1}, b"raw": b"\x00"}


def extended(payload: bytes, code: int = arrays.NUMPY_EXT) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, payload))


@given(hnp.arrays(st.sampled_from(["<f4", "<i4"]), hnp.array_shapes(max_dims=4, min_side=0, max_side=4)))
def test_the_ext_type_of_javascript_clients(array: np.ndarray) -> None:
    payload = f"{array.dtype.str}|{','.join(map(str, array.shape))}|".encode() + array.tobytes()
    output_array = decoded(extended(payload))
    assert (output_array.dtype, output_array.shape, output_array.tobytes()) == (
        array.dtype,
        array.shape,
        array.tobytes(),
    )


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"<f4",
        b"<f4|3|",
        b"<f4|3|" + bytes(11),
        b"<f4|x|" + bytes(4),
        b"<f4|-1|" + bytes(4),
        b"<i8|1|" + bytes(8),
        b"|O|1|" + bytes(8),
        b"\xff\xfe|1|" + bytes(4),
        b"<f4|" + b"65536," * 3 + b"65536|",
    ],
)
def test_a_malformed_ext_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"^array"):
        decoded(extended(payload))


@pytest.mark.parametrize("code", [-128, -2, 0, 1, 77, 79, 127])
def test_any_other_ext_type_is_refused(code: int) -> None:
    """The types are those that msgpack does not define itself."""
    with pytest.raises(ValueError, match=f"ext type {code} is not accepted"):
        decoded(extended(b"x" * 4, code))


@given(
    hnp.arrays(
        st.sampled_from(["<f4", "<f2", "<f8", "<i4", "|i1", "|u1", ">f4"]),
        st.tuples(st.integers(0, 4), st.integers(1, 4)),
    )
)
def test_a_multivector_is_one_matrix_in_each_of_its_forms(array: np.ndarray) -> None:
    """The forms are an array, its map with keys of either kind, and nested lists."""
    with np.errstate(over="ignore"):
        expected = array.astype("<f4")
    if not np.isfinite(expected).all():
        with pytest.raises(ValueError, match="finite"):
            arrays.multivector(array)
        return
    forms: list[Any] = [array]
    if array.dtype.str in arrays.EMITTED:
        packed = arrays.pack(array)
        forms += [packed, {key.decode(): value for key, value in packed.items()}]
    if len(array):
        forms.append(array.tolist())
    for form in forms:
        matrix = arrays.multivector(form)
        assert (matrix.dtype.str, matrix.shape) == ("<f4", array.shape)
        np.testing.assert_array_equal(matrix, expected)
        assert Vectors.from_array(matrix) == Vectors(len(array), array.shape[1], expected.tobytes())
        assert Vectors.from_array(matrix).fits


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ([[1.0], [2.0, 3.0]], "row 1"),
        ([1.0, 2.0], "in place of row 0"),
        ([], r"\[0, 0\]"),
        ([[]], r"\[1, 0\]"),
        ([["a"]], "got str in row 0"),
        ([[1e39]], "finite"),
        ([[10**400]], "float64"),
        (None, "got NoneType"),
        ([[float("nan")]], "finite"),
        ({"a": 1}, "got dict"),
        (np.zeros((2, 2), bool), "got bool"),
        (np.zeros(4), r"\[4\]"),
        ({"nd": True, "type": "|O8", "shape": [1, 1], "data": bytes(8)}, "^array type"),
    ],
)
def test_what_is_no_matrix_of_numbers_says_what_it_is(value: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        arrays.multivector(value)
