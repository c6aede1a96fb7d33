"""Groups of tests that one process runs one after another: the tests of a file, or of a mark `xdist_group`."""

from __future__ import annotations

import pytest


def group(item: pytest.Item) -> str:
    """Return the group of a test."""
    mark = item.get_closest_marker("xdist_group")
    return str(mark.args[0]) if mark else item.path.stem
