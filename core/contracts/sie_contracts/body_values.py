"""Count of the values in a client's body. The count is computed from the bytes, before the body is decoded. It limits
the memory of the decoded body, because each byte of a body may become a Python object of 70 bytes.

    JSON ──{ [ , : outside of strings──► count ◄──headers of lists and maps── msgpack
                                           └ Malformed: too many values

The decoder, not this module, refuses a body that is incomplete or malformed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MAX_VALUES = 1_000_000  # maximum number of values in a body, which the decoder reads in less than 0.1 s
MAX_CONTAINERS = 250_000  # maximum number of lists, maps and keys of maps in a body
MAX_NESTING = 64
VALUE_BYTES = 80  # upper bound of the memory that a decoded value needs on average, in bytes

_PIECE_BYTES = 256 << 10  # size of the pieces in which a body is counted; other threads can run between two pieces
_NO_MARK = bytes(set(range(256)) - set(b"{[,:"))


class Malformed(ValueError):
    """Error for a body that cannot be decoded, or that contains too many values. `reason`: the `reason` in the error
    that the client gets. The message repeats no part of the body.
    """

    def __init__(self, message: str, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


def of_json(data: bytes) -> int:
    """Return the number of values and keys inside a JSON body. The number may be too high, because the fast count
    includes the marks `{[,:` inside strings. If the fast count exceeds a limit, a slower count omits these marks.
    Raises Malformed for too many values.
    """
    pieces = (data[begin : begin + _PIECE_BYTES] for begin in range(0, len(data), _PIECE_BYTES))
    try:
        return _count(piece.translate(None, _NO_MARK) for piece in pieces)
    except Malformed:
        return _count(_marks(data))


def _count(pieces: Iterable[bytes]) -> int:
    """Count values and keys by the marks `{`, `[`, `,` and `:`, because a value or a key follows each mark. The marks
    `{`, `[` and `:` also count towards the limit of lists, maps and keys (MAX_CONTAINERS).
    """
    values = containers = 0
    for marks in pieces:
        values += len(marks)
        containers += len(marks) - marks.count(b",")
        _check(values, containers)
    return values


def _check(values: int, containers: int) -> None:
    if values > MAX_VALUES:
        message = f"holds more than {MAX_VALUES:,} values: send fewer at a time, and vectors as arrays in msgpack"
        raise Malformed(message, "too_many_values")
    if containers > MAX_CONTAINERS:
        message = f"holds more than {MAX_CONTAINERS:,} lists, maps and keys: send fewer at a time"
        raise Malformed(message, "too_many_values")


def _marks(data: bytes) -> Iterator[bytes]:
    in_string = False
    for piece in _pieces(data):
        # after the escapes are removed, each remaining quote begins or ends a string
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[in_string::2]).translate(None, _NO_MARK)
        in_string ^= len(parts) % 2 == 0


def _pieces(data: bytes) -> Iterator[bytes]:
    """Yield the data in pieces. No piece ends between a backslash and the character that it escapes."""
    begin = 0
    while begin < len(data):
        piece = data[begin : begin + _PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = data[begin : begin + len(piece) + 1]
        yield piece
        begin += len(piece)


# Tables for msgpack, indexed by the first byte of a value. _SIZES: number of bytes of the whole value, 0 if it varies.
# _LENGTHS: number of bytes of the length field, which follows the first byte.
_SIZES = [1] * 128 + [0] * 32 + [1 + length for length in range(32)] + [1, 0, 1, 1] + [0] * 60
_SIZES[0xCA:0xD4] = 5, 9, 2, 3, 5, 9, 2, 3, 5, 9
_SIZES[0xD4:0xD9] = 3, 4, 6, 10, 18
_SIZES[0xE0:] = [1] * 32
_LENGTHS = {
    **dict(zip((0xC4, 0xC5, 0xC6), (1, 2, 4), strict=True)),
    **dict(zip((0xC7, 0xC8, 0xC9), (1, 2, 4), strict=True)),
    **dict(zip((0xD9, 0xDA, 0xDB), (1, 2, 4), strict=True)),
}
_EXTENSIONS = frozenset({0xC7, 0xC8, 0xC9})
_ONE_BYTE = bytes(byte for byte, size in enumerate(_SIZES) if size == 1)
# for a list or map of at least this many values, calling `_behind_alike` saves more time than the call takes
_ALIKE = 8


def of_msgpack(data: bytes) -> int:
    """Return the number of values and keys inside a msgpack body. A list or map may be counted twice. Raises Malformed
    for too many values, and for nesting deeper than MAX_NESTING.
    """
    values = containers = at = 0
    # `left`: number of values still to read in the innermost list or map; `outer`: in each list or map around it
    left, outer = 1, list[int]()
    end = len(data)
    while True:
        while not left:
            if not outer:
                return values
            left = outer.pop()
        if at >= end:
            return values
        left -= 1
        first = data[at]
        if size := _SIZES[first]:
            at += size
        elif width := _LENGTHS.get(first):
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "big") + (first in _EXTENSIONS)
        else:
            count, begin = _children(data, first, at)
            # with fewer than `count` bytes left, or a byte `first` that begins no value, the decoder refuses the body
            if count > end - begin:
                return values
            values += count + 1
            containers += 1 + (count >> 1 if _is_map(first) else 0)
            _check(values, containers)
            outer.append(left)
            if len(outer) > MAX_NESTING + 1:
                raise Malformed(f"nested deeper than {MAX_NESTING}")
            at = _behind_alike(data, begin, count) if count >= _ALIKE else begin
            left = count if at == begin else 0


def _is_map(first: int) -> bool:
    return first < 0x90 or first >= 0xDE


def _children(data: bytes, first: int, at: int) -> tuple[int, int]:
    if first < 0xA0:
        return (first & 15) << _is_map(first), at + 1
    width = {0xDC: 2, 0xDE: 2, 0xDD: 4, 0xDF: 4}.get(first)
    if width is None:
        return len(data), at + 1
    begin = at + 1 + width
    return int.from_bytes(data[at + 1 : begin], "big") << _is_map(first), begin


def _behind_alike(data: bytes, begin: int, count: int) -> int:
    """Skip `count` values at once if all begin with the same type byte and this type has a fixed size, or if each value
    is one byte long. Return the offset after these values, or `begin` if they were not skipped.
    """
    size = _SIZES[data[begin]]
    if not size or begin + count * size > len(data):
        return begin
    if size == 1:
        return begin if data[begin : begin + count].translate(None, _ONE_BYTE) else begin + count
    firsts = data[begin : begin + count * size : size]
    return begin + count * size if firsts == firsts[:1] * count else begin
