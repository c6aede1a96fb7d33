"""Rows of JSON Lines and CSV by the positions of their bytes, and the spans that are made of them."""

from __future__ import annotations

import csv
import io
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie_bulk_jobs.datasets.fields import fields
from sie_bulk_jobs.datasets.scan import Cut, Cutter, Scanner, rows_of

ENDS = st.sampled_from([b"\n", b"\r\n"])
BLANKS = st.sampled_from([b"", b" ", b"\t ", b"\r"])
# lines with bytes that begin a row and look blank, and with quotes that only CSV knows
LINES = st.one_of(BLANKS, st.text("ab \t\"'\\{}é,", max_size=12).map(str.encode))
FIELDS = st.text('ab ,"\n\ré', max_size=8)


def scanned(data: bytes, piece: int, *, is_quoted: bool, max_rows: int, max_bytes: int = 1 << 30) -> list[Cut]:
    """Return the cuts of the planner, with pieces of any size."""
    scanner, cutter = Scanner(is_quoted=is_quoted), Cutter(max_rows, max_bytes)
    cuts = []
    for start in range(0, len(data), piece):
        for starts, ends in scanner.feed(data[start : start + piece]):
            cuts += cutter.feed(starts, ends)
    return [*cuts, *cutter.feed(*scanner.end()), *cutter.end()]


def check_spans(data: bytes, cuts: list[Cut], rows: list[bytes], *, is_quoted: bool, max_rows: int) -> None:
    """Check that only blank lines are between the spans, that each has the rows that it states, and that together they
    have all rows.
    """
    assert [cut.first for cut in cuts] == [sum(cut.rows for cut in cuts[:at]) for at in range(len(cuts))]
    assert not b"".join(data[before.end : after.start] for before, after in pairwise(cuts)).strip()
    assert all(0 < cut.rows <= max_rows for cut in cuts)
    parts = [rows_of(data[cut.start : cut.end], is_quoted=is_quoted) for cut in cuts]
    assert [len(part) for part in parts] == [cut.rows for cut in cuts]
    assert [row for part in parts for row in part] == rows


@given(st.lists(st.tuples(LINES, ENDS)), LINES, st.integers(1, 40), st.integers(1, 5))
def test_the_spans_of_json_lines_have_all_rows_once_for_any_size_of_the_pieces(
    lines: list[tuple[bytes, bytes]], last: bytes, piece: int, max_rows: int
) -> None:
    data = b"".join(line + end for line, end in lines) + last
    rows = [line for line in data.split(b"\n") if line.strip(b" \t\r")]
    cuts = scanned(data, piece, is_quoted=False, max_rows=max_rows)
    check_spans(data, cuts, [row.removesuffix(b"\r") for row in rows], is_quoted=False, max_rows=max_rows)


@given(st.lists(st.lists(FIELDS, min_size=1, max_size=3), max_size=12), ENDS, st.integers(1, 40), st.integers(1, 5))
def test_the_spans_of_csv_have_the_records_that_the_csv_module_wrote(
    records: list[list[str]], end: bytes, piece: int, max_rows: int
) -> None:
    """Records have line feeds, quotes and commas within quotes. Blank lines are between records, and the last line has
    no end.
    """
    file = io.StringIO()
    writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator=end.decode() * 2)
    writer.writerows(records)
    data = file.getvalue().removesuffix(end.decode() * 2).encode()
    rows = rows_of(data, is_quoted=True)
    assert [list(fields(row) or ()) for row in rows] == records
    cuts = scanned(data, piece, is_quoted=True, max_rows=max_rows)
    check_spans(data, cuts, rows, is_quoted=True, max_rows=max_rows)


@given(st.lists(st.integers(1, 30), max_size=20), st.integers(1, 64), st.integers(1, 6), st.integers(1, 40))
def test_a_span_is_bounded_in_bytes_unless_one_row_has_more(
    lengths: list[int], max_bytes: int, max_rows: int, piece: int
) -> None:
    data = b"".join(b"x" * length + b"\n" for length in lengths)
    cuts = scanned(data, piece, is_quoted=False, max_rows=max_rows, max_bytes=max_bytes)
    check_spans(data, cuts, data.split(b"\n")[:-1], is_quoted=False, max_rows=max_rows)
    assert all(cut.end - cut.start <= max_bytes or cut.rows == 1 for cut in cuts)
    for cut, after in pairwise(cuts):
        first = len(rows_of(data[after.start :], is_quoted=False)[0]) + 1
        assert cut.rows == max_rows or cut.end - cut.start + first > max_bytes, "a span is as long as it may be"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (b"a,b", ("a", "b")),
        (b"", ("",)),
        (b",", ("", "")),
        (b'"a,""b""\n",c', ('a,"b"\n', "c")),
        (b'"' + b"x" * 200_000 + b'"', ("x" * 200_000,)),
        (b'a"b,c', None),
        (b'"a"b,c', None),
        (b'"a', None),
        (b"a\rb", None),
        (b"\xff", None),
    ],
)
def test_fields_are_those_of_rfc_4180_and_nothing_is_guessed(row: bytes, expected: tuple[str, ...] | None) -> None:
    assert fields(row) == expected
