"""Templates over columns, and the fields that the input of a job needs."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pytest

from sie_bulk_jobs.datasets.templates import ColumnFault, Template, check
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
