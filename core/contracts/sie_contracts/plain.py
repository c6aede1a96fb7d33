"""Bodies of clients as plain values: maps with text keys, lists, text, numbers, booleans, null, and bytes in msgpack.

    bytes ──count──► upper bound of the number of values
    bytes ──from_json, from_msgpack──► plain value

Each function may raise Malformed. A numpy array in a msgpack extension type becomes a map (see `arrays`); the code that
reads the field converts the map to a numpy array. All other extension types, such as timestamps, raise Malformed. So
the readers of a body get only the types above, and can compare and encode every value.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

import msgspec

from sie_contracts import arrays, body_values
from sie_contracts.body_values import MAX_NESTING
from sie_contracts.body_values import Malformed as Malformed
from sie_contracts.json_faults import fault_of

SMALL_BYTES = 4096  # the values of a body of at most this size are not counted: they cannot be too many
_CONTAINERS = frozenset({dict, list})
_PLAIN = frozenset({dict, list, str, int, float, bool, type(None), bytes})
_TEXT_KEYS = frozenset({str})
_TOO_DEEP = f"nested deeper than {MAX_NESTING}"
_MAX_EXACT = 1 << 53  # above it a float may differ from the whole number that was written
T = TypeVar("T")


def count(data: bytes, *, msgpack: bool) -> int:
    """Return an upper bound of the number of values inside a body; 0 for a body of at most SMALL_BYTES, whose values
    are not counted. Raises Malformed for too many values, and in msgpack for nesting deeper than MAX_NESTING.
    """
    if len(data) <= SMALL_BYTES:
        return 0
    return body_values.of_msgpack(data) if msgpack else body_values.of_json(data)


def from_json(data: bytes, *, is_counted: bool = False) -> Any:
    """Decode JSON. Raises Malformed for bytes that are not JSON, invalid UTF-8, a lone surrogate, nesting deeper than
    MAX_NESTING, and too many values. `is_counted`: the caller has already called `count`.
    """
    if not is_counted:
        count(data, msgpack=False)
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise Malformed(_TOO_DEEP) from None
    except ValueError as error:
        raise Malformed(f"not valid JSON: {fault_of(data, error)}") from None
    _check(value, is_json=True)
    return value


def from_msgpack(data: bytes, *, is_counted: bool = False) -> Any:
    """Decode msgpack. Keys that are bytes become text, and numpy arrays become maps. Raises Malformed for bytes that
    are not msgpack, invalid UTF-8, nesting deeper than MAX_NESTING, too many values, and values or keys of other types.
    """
    if not is_counted:
        count(data, msgpack=True)
    try:
        value = arrays.decode_msgpack(data)
    except RecursionError:
        raise Malformed(_TOO_DEEP) from None
    except UnicodeDecodeError:
        raise Malformed("a string is not valid UTF-8") from None
    except (ValueError, TypeError) as error:
        raise Malformed(f"not valid msgpack: {_clean(error)}") from None
    _check(value, is_json=False)
    return value


def whole_number(value: Any) -> Any:
    """Return a whole number that is written as a float, such as 3.0, as an int. Return any other value unchanged. JSON
    has only one type of numbers, so a field for whole numbers accepts both forms.
    """
    return int(value) if type(value) is float and value.is_integer() and abs(value) <= _MAX_EXACT else value


def struct_of(value: Any, kind: type[T]) -> T:
    """Return a plain value as a struct of the type `kind`. A field for whole numbers accepts 3.0. Raises
    msgspec.ValidationError.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        try:
            return msgspec.convert(_with_whole_numbers(value), kind)
        except msgspec.ValidationError:
            raise error from None


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_whole_numbers(entry) for key, entry in value.items()}
    return [_with_whole_numbers(entry) for entry in value] if isinstance(value, list) else whole_number(value)


def _clean(error: Exception) -> str:
    """Return the decoder's message without quoted fragments of the body, because the body is a client's input."""
    return str(error).split("'")[0].split('"')[0].strip()[:120]


def _check(root: Any, *, is_json: bool) -> None:
    """Raise Malformed for values that are nested too deep, and in msgpack for wrong types of values and keys. The types
    in a list or map are first collected in a set: a test of each single value would take five times as long.
    """
    level: list[Any] = [[root]]
    for _ in range(MAX_NESTING + 1):
        below: list[Any] = []
        for parent in level:
            values: Collection[Any] = parent.values() if isinstance(parent, dict) else parent
            kinds = set(map(type, values))
            if not is_json:
                if not kinds <= _PLAIN:
                    odd = next(iter(kinds - _PLAIN)).__name__
                    raise Malformed(f"has a value of the msgpack extension type {odd}, which is not accepted")
                if isinstance(parent, dict):
                    _name_by_text(parent)
                    values = parent.values()
            if not kinds.isdisjoint(_CONTAINERS):
                below += [value for value in values if type(value) in _CONTAINERS]
        if not below:
            return
        level = below
    raise Malformed(_TOO_DEEP)


def _name_by_text(mapping: dict[Any, Any]) -> None:
    if set(map(type, mapping)) <= _TEXT_KEYS:
        return
    pairs = list(mapping.items())
    mapping.clear()
    for key, value in pairs:
        if isinstance(key, bytes):
            try:
                key = key.decode()
            except UnicodeDecodeError:
                raise Malformed("a key of a map is not valid UTF-8") from None
        if not isinstance(key, str):
            raise Malformed(f"expected text for each key of a map, got {type(key).__name__}")
        mapping[key] = value
