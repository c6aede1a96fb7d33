"""Query parameters of control routes: a value of another kind is refused by the name of its parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from starlette.datastructures import QueryParams

from sie_contracts.errors import InvalidInput
from sie_gateway.operations.handlers import flag, number, whole

READERS: dict[str, Callable[[QueryParams], Any]] = {
    "flag": lambda query: flag(query, "field", default=True),
    "number": lambda query: number(query, "field", 2.5, 1.0, 4.0),
    "whole": lambda query: whole(query, "field", 2, 1, 4),
}


@pytest.mark.parametrize(
    ("reader", "query", "value"),
    [
        ("flag", "", True),
        ("flag", "field=false", False),
        ("flag", "field=true", True),
        ("number", "", 2.5),
        ("number", "field=4", 4.0),
        ("whole", "", 2),
        ("whole", "field=4", 4),
    ],
)
def test_a_right_value_or_the_default_is_read(reader: str, query: str, value: Any) -> None:
    assert READERS[reader](QueryParams(query)) == value


@pytest.mark.parametrize(
    ("reader", "values"),
    [
        ("flag", ["1", "True", "yes", ""]),
        ("number", ["0.9", "4.1", "nan", "inf", "x", ""]),
        ("whole", ["0", "5", "2.0", "x", "", "9" * 5000]),
    ],
)
def test_another_value_is_refused_by_the_name_of_its_parameter(reader: str, values: list[str]) -> None:
    for value in values:
        with pytest.raises(InvalidInput, match="expected") as refused:
            READERS[reader](QueryParams({"field": value}))
        assert refused.value.param == "field"
