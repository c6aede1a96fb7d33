"""Bodies that would become many objects: each is filled up to a size with values of one kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

MIB = 1 << 20
JSON_VALUES = {
    "maps": b"{},",
    "lists": b"[],",
    "maps of one": b'{"a":0},',
    "numbers": b"1.5,",
    "texts": b'"ab",',
    "nested": b"[[[[[]]]]],",
    "texts of marks": b'"{[\\"\\\\",{},',
}
MSGPACK_VALUES = {
    "maps": b"\x80",
    "lists": b"\x90",
    "maps of one": b"\x81\xa1a\x01",
    "numbers": b"\xcb" + bytes(8),
    "texts": b"\xa2ab",
    "extensions": b"\xd4\x00\x00",
    "lists of 15": b"\x9f" + b"\x80" * 15,
}
JSON_PLACES: Mapping[str, tuple[bytes, bytes]] = {
    "unknown": (b'{"items":["a"],"x":[', b"]}"),
    "params": (b'{"items":["a"],"params":{"x":[', b"]}}"),
    "metadata": (b'{"items":[{"text":"a","metadata":{"x":[', b"]}}]}"),
    "items": (b'{"items":[', b"]}"),
}
MSGPACK_PLACES: Mapping[str, bytes] = {
    "unknown": b"\x82\xa5items\x91\xa1a\xa1x",
    "params": b"\x82\xa5items\x91\xa1a\xa6params\x81\xa1x",
    "metadata": b"\x81\xa5items\x91\x82\xa4text\xa1a\xa8metadata\x81\xa1x",
    "items": b"\x81\xa5items",
}


@dataclass(frozen=True)
class Bomb:
    """A kind of body. `body(size)` returns one of about `size` bytes."""

    name: str
    is_msgpack: bool
    body: Callable[[int], bytes]

    @property
    def headers(self) -> dict[str, str]:
        return {"content-type": "application/msgpack" if self.is_msgpack else "application/json"}


def _json(before: bytes, value: bytes, after: bytes) -> Callable[[int], bytes]:
    return lambda size: before + (value * (size // len(value)))[:-1] + after


def _msgpack(before: bytes, value: bytes) -> Callable[[int], bytes]:
    def body(size: int) -> bytes:
        count = size // len(value)
        return before + b"\xdd" + count.to_bytes(4, "big") + value * count

    return body


def _keys(size: int) -> bytes:
    return b'{"items":["a"],' + b",".join(b'"%08d":0' % number for number in range(size // 13)) + b"}"


def _msgpack_keys(size: int) -> bytes:
    count = size // 10
    keys = b"".join(b"\xa8%08d\x00" % number for number in range(count))
    return b"\xdf" + count.to_bytes(4, "big") + keys


def _claims(size: int) -> bytes:
    """Return nested lists, each of which announces as many values as bytes follow."""
    return b"".join(b"\xdd" + (size - 5 * level - 5).to_bytes(4, "big") for level in range(60)) + bytes(size - 300)


BOMBS = [
    *(
        Bomb(f"json {name} in {place}", is_msgpack=False, body=_json(before, value, after))
        for name, value in JSON_VALUES.items()
        for place, (before, after) in JSON_PLACES.items()
    ),
    *(
        Bomb(f"msgpack {name} in {place}", is_msgpack=True, body=_msgpack(before, value))
        for name, value in MSGPACK_VALUES.items()
        for place, before in MSGPACK_PLACES.items()
    ),
    Bomb("json keys", is_msgpack=False, body=_keys),
    Bomb("json depth", is_msgpack=False, body=lambda size: b"[" * size),
    Bomb("json unclosed", is_msgpack=False, body=lambda size: b'{"items":["a"],"x":[' + b"{}," * (size // 3)),
    Bomb("msgpack keys", is_msgpack=True, body=_msgpack_keys),
    Bomb("msgpack depth", is_msgpack=True, body=lambda size: b"\x91" * size),
    Bomb("msgpack claims", is_msgpack=True, body=_claims),
]
