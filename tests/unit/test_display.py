"""Numbers as commands show them to people."""

from __future__ import annotations

import msgspec
import pytest

from sie_cli.display import MAX_LINE, document, printable, problem, rounded_size, size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "-"),
        (7, "7 B"),
        (4_321, "4.3 kB"),
        (91_000_000, "91 MB"),
        (996_000_000, "1 GB"),
        (2_271_000_000, "2.3 GB"),
        (30_450_000_000, "30 GB"),
    ],
)
def test_an_estimate_of_bytes_has_two_figures(count: int, text: str) -> None:
    assert rounded_size(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.0 GiB"), (5 << 40, "5.0 TiB")],
)
def test_a_number_of_bytes_has_a_unit_of_1024(count: int, text: str) -> None:
    assert size(count) == text


def test_json_for_a_terminal_has_no_character_that_it_would_obey() -> None:
    value = {"a": ["\x1b[2J\x9b2J\u202e", "é", "\x7f"]}
    line = document(value, indent=-1)
    assert line.isprintable()
    assert msgspec.json.decode(line) == msgspec.json.decode(document(value)) == value
    assert document(value).count("\n") > 3


@pytest.mark.parametrize(("lines", "length"), [(False, MAX_LINE), (True, 100_000)])
def test_an_untrusted_name_has_a_bound_and_a_text_with_lines_has_none(lines: bool, length: int) -> None:
    assert printable("x" * 100_000, lines=lines) == "x" * length


def test_the_text_of_an_error_lacks_what_is_null() -> None:
    assert problem({"code": "NOT_READY", "message": "no model"}) == "NOT_READY: no model"
    assert problem({"code": None, "message": "no model"}) == "no model"
    assert problem({"code": "NOT_READY"}) == "NOT_READY"
