"""Error texts for a body that is no JSON."""

from __future__ import annotations

import pytest

from sie_contracts.errors import InvalidInput
from sie_contracts.plain import from_json as decode
from sie_gateway.inference import body as bodies

CANARY = "canary-7f3a"


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b"", ""),
        (b'{"a": NaN}', "byte 6 (line 1, column 7)"),
        (b'{"a":\n  [1, -Infinity]}', "byte 12 (line 2, column 7)"),
        (b'{"a": "x\\ud83d"}', "byte 8 (line 1, column 9)"),
        (b'{"a": "\\ud83d and more text"}', "byte 7 (line 1, column 8)"),
        (b'{"a": ["x", "y"', "byte 15 (line 1, column 16)"),
        (b'{"a": "\xff"}', "byte 7 (line 1, column 8)"),
        (b'\xef\xbb\xbf{"a": 1}', ""),
        (b"{'a': 1}", "byte 1 (line 1, column 2)"),
        (b'{"a": 1,}', "byte 8 (line 1, column 9)"),
        (b'{"a": "x\ny"}', "byte 8 (line 1, column 9)"),
        (b"items=x", "byte 0 (line 1, column 1)"),
        (b'{"a": 1} x', "byte 9 (line 1, column 10)"),
    ],
)
def test_a_body_that_is_no_json_is_told_with_the_place(body: bytes, place: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        bodies.decode(body, msgpack=False)
    assert place in caught.value.message
    assert (caught.value.reason, caught.value.param) == ("malformed", "body")


@pytest.mark.parametrize(
    "body",
    [
        f'{{"a": "{CANARY}", "b": {CANARY}}}',
        f'{{"{CANARY}": "\\ud800"}}',
        f'{{"a": "{CANARY}',
        f"{CANARY}=1",
        f"{{'{CANARY}': 1}}",
    ],
)
def test_no_part_of_the_body_is_repeated(body: str) -> None:
    with pytest.raises(ValueError) as caught:
        decode(body.encode())
    assert CANARY not in str(caught.value)
