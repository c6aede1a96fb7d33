"""Inputs of jobs: templates over columns, rows by the positions of their bytes, and places that clients may name."""

from __future__ import annotations

import csv
import datetime
import decimal
import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import obstore
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie_bulk_jobs.datasets import plans, rows
from sie_bulk_jobs.datasets.fields import fields
from sie_bulk_jobs.datasets.places import Place
from sie_bulk_jobs.datasets.scan import Cut, Cutter, Scanner, rows_of
from sie_bulk_jobs.datasets.templates import ColumnFault, Template, check
from sie_bulk_jobs.records import RowSpan
from sie_contracts.api.jobs import JobChunkRule, JobInput
from sie_contracts.errors import InvalidInput

ROW = {"a": "x", "n": 3, "f": 1.5, "b": True, "d": datetime.date(2026, 1, 2), "m": decimal.Decimal("1.10"), "l": [1]}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{a}", "x"),
        ("{a}\n{n} {{{f}}}", "x\n3 {1.5}"),
        ("{b} {d} {m}", "true 2026-01-02 1.10"),
        ("the same", "the same"),
    ],
)
def test_columns_stand_in_a_text_as_they_are(template: str, text: str) -> None:
    assert Template.parsed(template, "input.text").text(ROW) == text


@pytest.mark.parametrize("template", ["{", "}", "{}", "{a.b}", "{a[0]}", "{a!r}", "{a:>5}", "{a:{n}}", "{a.__class__}"])
def test_nothing_but_names_of_columns_is_a_template(template: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Template.parsed(template, "input.query")
    assert caught.value.param == "input.query"


def test_a_template_does_not_repeat_a_column_until_its_texts_fill_the_memory() -> None:
    assert Template.parsed("{a}" * 4, "input.text").text(ROW) == "xxxx"
    with pytest.raises(InvalidInput, match="names 'a' 5 times, expected at most 4"):
        Template.parsed("{a}" * 5, "input.text")


@pytest.mark.parametrize("value", [None, [1], {"x": 1}, b"x", float("nan")])
def test_a_value_that_is_no_text_is_a_fault_that_names_the_column_alone(value: Any) -> None:
    template = Template.parsed("{c}", "input.text")
    with pytest.raises(ColumnFault, match="column 'c' is"):
        template.text({"c": value})
    with pytest.raises(ColumnFault, match="column 'c' is missing"):
        template.text({"d": 1})


GOOD = [
    ("encode", JobInput(file="f", text="{a}")),
    ("encode", JobInput(url="u", image="i")),
    ("encode", JobInput(url="u", image="i", text="{a}", keep=("a", "b"))),
    ("encode", JobInput(url="s3://b/pictures/", format="images")),
    ("encode", JobInput(url="s3://b/pictures/")),
    ("encode", JobInput(file="f", text="{a}", keep=("text", "chunk"))),
    ("encode", JobInput(file="f", text="{a}", chunks=JobChunkRule(9), context=False)),
    ("encode", JobInput(file="f", text="{a}", chunks="spans", keep=("spans",))),
    ("encode", JobInput(file="f", text="{a}", chunks="spans", keep=("page", "heading"))),
    ("encode", JobInput(file="f", documents="d", chunks=JobChunkRule(9), parser="p", keep=("d",))),
    ("encode", JobInput(url="u/", documents="d", chunks=JobChunkRule(9), context=False)),
    ("extract", JobInput(file="f", text="{a}", id="a")),
    ("score", JobInput(file="f", query="the same query", document="{a}")),
]
BAD = [
    ("encode", JobInput(text="{a}"), "input"),
    ("encode", JobInput(file="f", url="u", text="{a}"), "input"),
    ("encode", JobInput(file="f", format="csv"), "input.text"),
    ("encode", JobInput(file="f", text="no column"), "input.text"),
    ("encode", JobInput(file="f", text="{a}", query="{a}"), "input.query"),
    ("extract", JobInput(file="f", text="{a"), "input.text"),
    ("score", JobInput(file="f", document="{a}"), "input.query"),
    ("score", JobInput(file="f", query="{a}"), "input.document"),
    ("score", JobInput(file="f", query="{a}", document="same"), "input.document"),
    ("score", JobInput(file="f", query="{a}", document="{a}", image="i"), "input.image"),
    ("encode", JobInput(file="f", text="{a}", keep=("dense",)), "input.keep"),
    ("encode", JobInput(file="f", text="{a}", keep=("fingerprint",)), "input.keep"),
    ("encode", JobInput(file="f", text="{a}", keep=("a", "a")), "input.keep"),
    ("encode", JobInput(file="f", text="{a}", keep=("row_tokens",)), "input.keep"),
    ("encode", JobInput(file="f", text="{a}", chunks="spans", keep=("text",)), "input.keep"),
    ("encode", JobInput(file="f", image="i", chunks=JobChunkRule(9)), "input.chunks"),
    ("encode", JobInput(file="f", documents="d"), "input.chunks"),
    ("extract", JobInput(file="f", documents="d", chunks=JobChunkRule(9)), "input.chunks"),
    ("encode", JobInput(file="f", documents="d", text="{a}", chunks=JobChunkRule(9)), "input.text"),
    ("encode", JobInput(file="f", documents="d", image="i", chunks=JobChunkRule(9)), "input.image"),
    ("encode", JobInput(file="f", documents="d", chunks=JobChunkRule(9), keep=("page",)), "input.keep"),
    ("encode", JobInput(file="f", text="{a}", chunks=JobChunkRule(9), parser="p"), "input.parser"),
    ("encode", JobInput(url="u/", format="images", documents="d"), "input.documents"),
    ("encode", JobInput(file="f", text="{a}", image="i", chunks=JobChunkRule(9)), "input.chunks"),
    ("extract", JobInput(file="f", text="{a}", chunks=JobChunkRule(9)), "input.chunks"),
    ("encode", JobInput(file="f", text="{a}", context=False), "input.context"),
    ("encode", JobInput(url="u", format="images", text="{a}"), "input.text"),
    ("encode", JobInput(url="u/", id="a"), "input.id"),
    ("score", JobInput(url="u/", format="images"), "input.query"),
]


@pytest.mark.parametrize(("operation", "source"), GOOD)
def test_an_input_says_what_its_operation_needs(operation: str, source: JobInput) -> None:
    check(source, operation)


@pytest.mark.parametrize(("operation", "source", "param"), BAD)
def test_an_input_that_says_too_little_or_too_much_is_refused(operation: str, source: JobInput, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check(source, operation)
    assert caught.value.param == param


# rows of JSON Lines and CSV by the positions of their bytes, and the spans that are made of them


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


# sIE_JOBS_URLS: the places that clients may name for inputs and outputs


@pytest.fixture(autouse=True)
def _region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us-east-1")


ALLOWED = ("s3://bucket/a/b", "gs://other", "/srv/jobs")


@pytest.mark.parametrize(
    ("url", "folder", "name"),
    [
        ("s3://bucket/a/b", "", ""),
        ("s3://bucket/a/b/", "", ""),
        ("s3://bucket/a/b/c.csv", "", "c.csv"),
        ("s3://bucket/a/b/c/", "c/", ""),
        ("s3://bucket/a/b/c/d%20e.csv", "c/", "d e.csv"),
        ("gs://other/x/y.jsonl", "x/", "y.jsonl"),
    ],
)
def test_what_is_below_an_allowed_url_is_opened(url: str, folder: str, name: str) -> None:
    place = Place.opened(url, ALLOWED)
    assert (place.folder, place.name) == (folder, name)


def test_a_place_on_the_disk_is_opened_by_its_path_and_by_its_url(tmp_path: Path) -> None:
    for allowed in (str(tmp_path), f"file://{tmp_path}", f"{tmp_path}/"):
        for url in (f"{tmp_path}/in/rows.csv", f"file://{tmp_path}/in/rows.csv"):
            place = Place.opened(url, (allowed,))
            assert (place.folder, place.name) == ("in/", "rows.csv")
        output = Place.opened(f"{tmp_path}/out", (allowed,), is_output=True)
        assert (output.folder, output.name) == ("out/", "")


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a/bc",
        "s3://bucket/a",
        "s3://bucket",
        "s3://bucket2/a/b",
        "gs://bucket/a/b",
        "s3://bucket/a/b/../c",
        "s3://bucket/a/b/%2e%2e/c",
        "s3://bucket/a/b/./c",
        "s3://bucket/a/b//c",
        "s3://bucket/a/b/..",
        "s3://bucket/a/b/c%00d",
        "s3://bucket/a/b/c%5c..",
        "/srv/jobs/../other",
        "file:///srv/jobs/../other",
        "file:///srv/jobs/%2e%2e/other",
        "/srv/jobs2/x",
        "file:///etc/passwd",
        "../jobs/x",
        "file://host/srv/jobs/x",
        "http://bucket/a/b",
        "s3://user@bucket/a/b",
        "s3://bucket/a/b?x=1",
        "",
    ],
)
@pytest.mark.parametrize("is_output", [False, True])
def test_anything_else_is_refused(url: str, is_output: bool) -> None:
    with pytest.raises(InvalidInput) as caught:
        Place.opened(url, ALLOWED, is_output=is_output)
    assert caught.value.param == ("output.url" if is_output else "input.url")


async def test_a_symbolic_link_leads_nowhere_else(tmp_path: Path) -> None:
    """A link to a file or a folder outside of the place is not planned, read, or written through. A link within the
    place is followed.
    """
    inside, outside = tmp_path / "in", tmp_path / "secret"
    (inside / "real").mkdir(parents=True)
    outside.mkdir()
    (outside / "rows.jsonl").write_text('{"t": "secret"}\n')
    (inside / "real" / "rows.jsonl").write_text('{"t": "own"}\n')
    (inside / "a.jsonl").symlink_to(outside / "rows.jsonl")
    (inside / "folder").symlink_to(outside)
    (inside / "near.jsonl").symlink_to(inside / "real" / "rows.jsonl")
    place, source = Place.opened(f"{inside}/", (str(inside),)), JobInput(url="u", text="{t}")
    planned = [entry async for entry in plans.plan(place, source, 10)]
    broken = [entry for entry in planned if isinstance(entry, plans.Broken)]
    assert {fault.error.reason for fault in broken} == {"not_allowed"}
    spans = [span for entry in planned if isinstance(entry, list) for span in entry]
    assert [span.source for span in spans] == ["near.jsonl", "real/rows.jsonl"]
    assert [row.text for span in spans for row in await rows.read(place, span, source)] == ["own", "own"]
    for name in ("a.jsonl", "folder/rows.jsonl"):
        tag = obstore.head(place.store, name)["e_tag"] or ""
        with pytest.raises(InvalidInput, match="symbolic link"):
            await rows.read(place, RowSpan(name, "jsonl", 0, 1, 0, 16, tag=tag), source)
    output = Place.opened(f"{inside}/folder", (str(inside),), is_output=True)
    with pytest.raises(InvalidInput, match="symbolic link") as caught:
        await output.check(output.folder + "part-00000.parquet")
    assert caught.value.param == "output.url"
