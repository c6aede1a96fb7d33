"""Groups of tests that one process runs, one after another: those of a file, or of the mark `xdist_group`."""

from __future__ import annotations

import pytest


def group(item: pytest.Item) -> str:
    """The group of a test."""
    mark = item.get_closest_marker("xdist_group")
    return str(mark.args[0]) if mark else item.path.stem


def is_first(item: pytest.Item) -> bool:
    """Whether its mark says that it comes before others of its group."""
    mark = item.get_closest_marker("xdist_group")
    return mark is not None and bool(mark.kwargs.get("first"))
