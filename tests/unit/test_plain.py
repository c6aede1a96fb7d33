"""What clients send becomes plain values, or is refused: no array, time or other extension type gets any further."""

from __future__ import annotations

import datetime
from typing import Any

import msgspec
import numpy as np
import pytest

from sie_contracts import arrays, plain
from sie_contracts.plain import MAX_NESTING, Malformed, from_json, from_msgpack

MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3)
PLAIN = {dict, list, str, int, float, bool, type(None), bytes}


def ext(array: np.ndarray) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(
        arrays.NUMPY_EXT, f"{array.dtype.str}|{','.join(map(str, array.shape))}|".encode() + array.tobytes()
    )


def kinds(value: Any) -> set[type]:
    found = {type(value)}
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            found |= kinds(inner)
    if isinstance(value, dict):
        assert set(map(type, value)) <= {str}
    return found


@pytest.mark.parametrize(
    "array", [MATRIX, MATRIX[:0], MATRIX[0], np.float32(1).reshape(()), np.arange(2, dtype=np.int32)]
)
def test_an_array_of_the_extension_type_is_a_map_until_it_is_unpacked(array: np.ndarray) -> None:
    found = from_msgpack(msgspec.msgpack.encode({"a": [ext(array)], "b": ext(array)}))
    assert kinds(found) <= PLAIN
    assert found["b"] == found["a"][0], "which arrays could not be asked"
    unpacked = arrays.unpack(found)["b"]
    assert (unpacked.dtype, unpacked.shape, unpacked.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_both_kinds_of_arrays_are_the_same_multivector() -> None:
    for sent in (ext(MATRIX), arrays.pack(MATRIX), {key.decode(): value for key, value in arrays.pack(MATRIX).items()}):
        found = from_msgpack(msgspec.msgpack.encode({"items": [{"multivector": sent}]}))
        assert arrays.multivector(found["items"][0]["multivector"]).tolist() == MATRIX.tolist()


@pytest.mark.parametrize(
    "odd",
    [
        datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        msgspec.msgpack.Ext(-1, b""),
        msgspec.msgpack.Ext(5, b"x"),
        msgspec.msgpack.Ext(arrays.NUMPY_EXT, b"<f4|2|abc"),
        {1: 2},
        {None: 1},
        {True: 1},
        {2.5: 1},
        {b"\xff": 1},
    ],
)
def test_what_is_not_plain_is_refused_in_every_place(odd: Any) -> None:
    for place in (odd, [odd], {"a": odd}, {"a": [{"b": [odd]}]}):
        with pytest.raises(Malformed):
            from_msgpack(msgspec.msgpack.encode(place))


def test_keys_of_bytes_are_text_at_every_depth_in_their_order() -> None:
    found = from_msgpack(msgspec.msgpack.encode({b"b": [{b"a": b"kept"}], "a": 1}))
    assert list(found.items()) == [("b", [{"a": b"kept"}]), ("a", 1)]


@pytest.mark.parametrize(
    "data", [b'"\\ud800"', b'"\xff"', b'{"\xed\xa0\x80": 1}', b"NaN", b" ", b"{", b"[1] 2", b"\x00", b'"\xc0\xaf"']
)
def test_what_is_no_json_is_refused(data: bytes) -> None:
    for place in (data, b'{"a": [1, %b]}' % data):
        with pytest.raises(Malformed):
            from_json(place)


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize(
    ("decode", "encode"), [(from_json, msgspec.json.encode), (from_msgpack, msgspec.msgpack.encode)]
)
def test_nesting_is_bounded(decode: Any, encode: Any) -> None:
    assert decode(encode(nested(MAX_NESTING))) == nested(MAX_NESTING)
    with pytest.raises(Malformed, match=f"deeper than {MAX_NESTING}"):
        decode(encode(nested(MAX_NESTING + 1)))
    for data in (b"[" * 100_000, b'{"a":' * 100_000, b"\x91" * 100_000):
        with pytest.raises(Malformed):
            decode(data)


def test_a_message_repeats_nothing_of_what_was_sent() -> None:
    for data in (b'{"secret": nul', b'"secret\xff"', b"secret"):
        with pytest.raises(Malformed) as caught:
            plain.from_json(data)
        assert "secret" not in str(caught.value)
