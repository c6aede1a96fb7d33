"""Error texts for a body that is no JSON."""

from __future__ import annotations

import pytest

from sie_contracts.errors import InvalidInput
from sie_contracts.plain import from_json as decode
from sie_gateway.inference import body as bodies

CANARY = "canary-7f3a"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body is empty: expected a JSON object"),
        (b'{"a": NaN}', "NaN is not a number in JSON, at byte 6 (line 1, column 7): send a number, or null"),
        (b'{"a":\n  [1, -Infinity]}', "-Infinity is not a number in JSON, at byte 12 (line 2, column 7)"),
        (
            b'{"a": "x\\ud83d"}',
            "a string holds a lone surrogate, which is not valid Unicode, at byte 8 (line 1, column 9)",
        ),
        (
            b'{"a": "\\ud83d and more text"}',
            "a string holds a lone surrogate, which is not valid Unicode, at byte 7 (line 1, column 8)",
        ),
        (b'{"a": ["x", "y"', "it ends in the middle of a value, at byte 15 (line 1, column 16)"),
        (b'{"a": "\xff"}', "the text is not valid UTF-8, at byte 7 (line 1, column 8)"),
        (b'\xef\xbb\xbf{"a": 1}', "the body begins with a byte order mark of UTF-8"),
        (b"{'a': 1}", "single quotes, at byte 1 (line 1, column 2): strings in JSON have double quotes"),
        (b'{"a": 1,}', "trailing comma in object, at byte 8 (line 1, column 9)"),
        (
            b'{"a": "x\ny"}',
            "a control character in a string, at byte 8 (line 1, column 9): JSON writes a line break as \\n",
        ),
        (b"items=x", "it does not begin with a JSON value, at byte 0 (line 1, column 1): expected a JSON object"),
        (b'{"a": 1} x', "trailing characters, at byte 9 (line 1, column 10)"),
    ],
)
def test_a_body_that_is_no_json_is_told_in_plain_words_with_the_place(body: bytes, says: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        bodies.decode(body, msgpack=False)
    assert says in caught.value.message
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
