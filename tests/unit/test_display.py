"""Numbers as commands show them to people."""

from __future__ import annotations

import msgspec
import pytest

from sie_cli.display import MAX_LINE, document, printable


def test_json_for_a_terminal_has_no_character_that_it_would_obey() -> None:
    value = {"a": ["\x1b[2J\x9b2J\u202e", "é", "\x7f"]}
    line = document(value, indent=-1)
    assert line.isprintable()
    assert msgspec.json.decode(line) == msgspec.json.decode(document(value)) == value
    assert document(value).count("\n") > 3


@pytest.mark.parametrize(("lines", "length"), [(False, MAX_LINE), (True, 100_000)])
def test_an_untrusted_name_has_a_bound_and_a_text_with_lines_has_none(lines: bool, length: int) -> None:
    assert printable("x" * 100_000, lines=lines) == "x" * length
