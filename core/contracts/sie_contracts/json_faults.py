"""Error messages for a body that is not JSON: the fault and its position. A message repeats no part of the body,
because the body is a client's input.

The JSON decoder reports the position of most faults. This module finds the position if a body ends early, has invalid
UTF-8, or has only one half of a surrogate pair.
"""

from __future__ import annotations

import re

_AT = re.compile(r"\(byte (\d+)\)")
_HIGH = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
# Number of bytes of one escape \uXXXX. `_lone_surrogate` computes the position of a lone half of a surrogate pair from
# the position that the decoder reports. The reported position is one escape after the half, or two escapes after it if
# the half is a high surrogate and another escape follows.
_ESCAPE_BYTES = 6
_NO_NUMBERS = (b"-Infinity", b"Infinity", b"NaN")
_MARKS = {b"\xef\xbb\xbf": "UTF-8", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def fault_of(body: bytes, error: Exception) -> str:
    """Return the error message for a body that the decoder refused with `error`."""
    if not body.strip():
        return "the body is empty: expected a JSON object"
    for mark, name in _MARKS.items():
        if body.startswith(mark):
            return f"the body begins with a byte order mark of {name}: send UTF-8 without one"
    # the UnicodeDecodeError has an offset from the start of a JSON string; `_not_utf8` computes the offset in the body
    if isinstance(error, UnicodeDecodeError):
        return f"the text is not valid UTF-8, {_place(body, _not_utf8(body))}"
    stopped = _AT.search(str(error))
    if "surrogate" in str(error) or (is_short := "truncated" in str(error)):
        at = _lone_surrogate(body, int(stopped[1]) if stopped else None)
        if at is not None:
            return (
                f"a string holds a lone surrogate, which is not valid Unicode, {_place(body, at)}: surrogates are "
                "valid only in pairs"
            )
    if stopped is None:
        if is_short:
            return (
                f"it ends in the middle of a value, {_place(body, len(body))}: the body is cut off, or a quote or "
                "bracket is not closed"
            )
        return str(error).partition(" - at")[0]
    return _explained(body, int(stopped[1]), str(error))


def _explained(body: bytes, at: int, says: str) -> str:
    if "trailing characters" in says:
        at = max(0, at - 1)  # the decoder has already read one of the trailing characters
    for number in _NO_NUMBERS:
        for begin in (at, at - 1):  # at -Infinity, the decoder stops after the minus sign
            if begin >= 0 and body.startswith(number, begin):
                return f"{number.decode()} is not a number in JSON, {_place(body, begin)}: send a number, or null"
    if body[at : at + 1] == b"'" or (at and body[at - 1 : at] == b"'"):
        return f"single quotes, {_place(body, at)}: strings in JSON have double quotes"
    if not at:
        return f"it does not begin with a JSON value, {_place(body, at)}: expected a JSON object"
    if at < len(body) and body[at] < 0x20 and "invalid character" in says:
        return f"a control character in a string, {_place(body, at)}: JSON writes a line break as \\n"
    return f"{says.removeprefix('JSON is malformed: ').partition(' (byte')[0]}, {_place(body, at)}"


def _place(body: bytes, at: int) -> str:
    line = body.count(b"\n", 0, at) + 1
    column = at - (body.rfind(b"\n", 0, at) + 1) + 1
    return f"at byte {at} (line {line}, column {column})"


def _not_utf8(body: bytes) -> int:
    try:
        body.decode()
    except UnicodeDecodeError as wrong:
        return wrong.start
    raise AssertionError("the decoder refused valid UTF-8")


def _lone_surrogate(body: bytes, stopped: int | None) -> int | None:
    """Return the offset of the lone half of a surrogate pair; None if there is none. `stopped`: offset at which the
    decoder stopped; None if it reached the end of the body. Then only the last bytes of the body are searched.
    """
    if stopped is None:
        offsets = [half.start() for half in _HIGH.finditer(body, max(0, len(body) - 2 * _ESCAPE_BYTES))]
        return offsets[-1] if offsets else None
    before = stopped - 2 * _ESCAPE_BYTES
    return before if before >= 0 and _HIGH.match(body, before) else stopped - _ESCAPE_BYTES
