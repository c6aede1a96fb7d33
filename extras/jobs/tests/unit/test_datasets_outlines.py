"""Outlines of documents: page and heading of a position in the Markdown."""

from __future__ import annotations

import time

import pytest

from sie_bulk_jobs.datasets.outlines import MAX_HEADING, Outline, Section

MARKDOWN = """Before.

# One ##

Text of one.

```
# no heading
~~~
# nor this
```

####### seven
#word
  ### Two #

End."""


@pytest.mark.parametrize(
    ("text", "heading"),
    [
        ("Before", None),
        ("# One", "One"),
        ("# no heading", "One"),
        ("# nor this", "One"),
        ("####### seven", "One"),
        ("#word", "One"),
        ("  ### Two", "Two"),
        ("End.", "Two"),
    ],
)
def test_at_returns_the_last_heading_outside_of_code(text: str, heading: str | None) -> None:
    outline = Outline.parsed(MARKDOWN, ())
    assert outline.at(MARKDOWN.index(text)) == Section(None, heading)


def test_at_returns_the_page_that_began_last() -> None:
    outline = Outline.parsed("one two four", [(0, 1), (4, 2), (8, 4)])
    assert [outline.at(position).page for position in (0, 3, 4, 7, 8, 12)] == [1, 1, 2, 2, 4, 4]
    assert Outline.parsed("one two", [(4, 7)]).at(0).page is None


def test_parsed_cuts_a_long_heading() -> None:
    assert Outline.parsed(f"# {'x' * 1000}", ()).at(0).heading == "x" * MAX_HEADING


@pytest.mark.parametrize("piece", ["# a\n", "```\n", "# ", "#\t#\n", "   ", "~~~a\n"])
def test_parsed_takes_a_time_that_grows_with_the_text_alone(piece: str) -> None:
    began_s = time.thread_time()
    Outline.parsed(piece * (262_144 // len(piece)), ())
    assert time.thread_time() - began_s < 5
