"""Values of clients become plain values, or are refused: no array, time or other extension type gets any further."""

from __future__ import annotations

import datetime
import itertools
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from body_bombs import BOMBS, MIB, Bomb

from sie_contracts import arrays, body_values, plain
from sie_contracts.body_values import MAX_CONTAINERS, MAX_VALUES
from sie_contracts.plain import MAX_NESTING, Malformed, from_json, from_msgpack

MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3)
PLAIN = {dict, list, str, int, float, bool, type(None), bytes}


def ext(array: np.ndarray) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(
        arrays.NUMPY_EXT, f"{array.dtype.str}|{','.join(map(str, array.shape))}|".encode() + array.tobytes()
    )


def kinds(value: Any) -> set[type]:
    types = {type(value)}
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            types |= kinds(inner)
    if isinstance(value, dict):
        assert set(map(type, value)) <= {str}
    return types


@pytest.mark.parametrize(
    "array", [MATRIX, MATRIX[:0], MATRIX[0], np.float32(1).reshape(()), np.arange(2, dtype=np.int32)]
)
def test_an_array_of_the_extension_type_is_a_map_until_it_is_unpacked(array: np.ndarray) -> None:
    document = from_msgpack(msgspec.msgpack.encode({"a": [ext(array)], "b": ext(array)}))
    assert kinds(document) <= PLAIN
    assert document["b"] == document["a"][0], "which arrays could not be asked"
    unpacked = arrays.unpack(document)["b"]
    assert (unpacked.dtype, unpacked.shape, unpacked.tobytes()) == (array.dtype, array.shape, array.tobytes())


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
    body = from_msgpack(msgspec.msgpack.encode({b"b": [{b"a": b"kept"}], "a": 1}))
    assert list(body.items()) == [("b", [{"a": b"kept"}]), ("a", 1)]


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


# how many values there are


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb.name)
def test_a_body_of_many_values_is_refused_before_they_are_made(bomb: Bomb) -> None:
    """The refusal takes at most twice the size of the body. The objects would take up to 70 times that size."""
    body = bomb.body(12 * MIB)
    tracemalloc.start()
    try:
        with pytest.raises(Malformed) as caught:
            (from_msgpack if bomb.is_msgpack else from_json)(body)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(body)
    finally:
        tracemalloc.stop()
    assert caught.value.reason == ("malformed" if bomb.name == "msgpack depth" else "too_many_values")


@pytest.mark.parametrize("make", [from_json, from_msgpack], ids=["json", "msgpack"])
def test_as_many_values_as_are_allowed_are_decoded(make: Any) -> None:
    encode = msgspec.json.encode if make is from_json else msgspec.msgpack.encode
    numbers = {"x": [[0.5] * 128] * 7000}
    assert make(encode(numbers)) == numbers
    for element, most in (([], MAX_CONTAINERS), ({}, MAX_CONTAINERS), (1.5, MAX_VALUES), ("ab", MAX_VALUES)):
        assert (
            len(make(encode([element] * (most - 2) if element in ("ab", 1.5) else [element] * (most // 2))))
            >= most // 2 - 2
        )
        with pytest.raises(Malformed, match=f"holds more than {most:,}"):
            make(encode([element] * (most + 2)))


def test_marks_in_a_text_are_no_values() -> None:
    """A table, a program or JSON as a text has many such marks."""
    text = '{"a": [1, 2, "\\"], }' * 100_000
    for value in ({"text": text}, {"texts": [text[:200]] * 5000}, {"text": "\\" * 1_000_001 + text}):
        assert from_json(msgspec.json.encode(value)) == value
        assert from_msgpack(msgspec.msgpack.encode(value)) == value


def test_whatever_the_bytes_are_they_are_counted_or_refused() -> None:
    """The data are cut off, or have another byte in front. Nothing is raised."""
    whole = msgspec.msgpack.encode({"a": [1, "x" * 300, [2.5] * 20, {"b": b"x" * 70_000}], "c": None})
    for data in itertools.chain((whole[:end] for end in range(700)), (bytes([first]) + whole for first in range(256))):
        body_values.of_msgpack(data)
