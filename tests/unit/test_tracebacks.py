"""Log of an exception in a process: the place where it was raised, never the text of a client."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator

import pytest

from sie_runtime.process import configure_logging, traceback_of

SECRET = "what a client sent"
FAULTS: list[Callable[[str], object]] = [
    int,
    float,
    {}.__getitem__,
    [].index,
    bytes.fromhex,
    json.loads,
    lambda text: getattr(1, text),
    lambda text: compile(text, text, "exec"),
]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_value_that_an_exception_quotes_is_not_logged(
    fault: Callable[[str], object], as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exception is the cause of another one. Both kinds of log are checked."""
    configure_logging(json=as_json)
    try:
        try:
            fault(SECRET)
        except Exception as cause:
            raise RuntimeError("a fault of ours") from cause
    except RuntimeError:
        logging.getLogger("sie.test").exception("request 1 failed")
    logged = capsys.readouterr().err
    assert SECRET not in logged
    assert "a fault of ours" in logged, "what quotes nothing is told"
    assert "test_tracebacks.py" in logged
    assert "came from" in logged


def test_causes_are_told_in_order_and_without_end() -> None:
    first, second = OSError("first"), RuntimeError("second")
    second.__cause__ = first
    assert traceback_of(second) == "builtins.RuntimeError: second\ncame from\nbuiltins.OSError: first"
    first.__cause__ = second
    assert traceback_of(first).count("came from") == 9
    assert traceback_of(None) == ""


def test_the_members_of_an_exception_group_are_logged_without_the_values_that_they_quote() -> None:
    group = ExceptionGroup("two tasks failed", [ValueError(SECRET), ExceptionGroup("inner", [OSError("no disk")])])
    logged = traceback_of(group)
    assert logged.startswith("builtins.ExceptionGroup: two tasks failed")
    assert "of which one is\nbuiltins.ValueError\n" in logged
    assert logged.endswith("of which one is\nbuiltins.OSError: no disk")
    assert SECRET not in logged
