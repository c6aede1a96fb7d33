"""A new user follows the guides word by word: every command is pasted, and prints what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import DOCS, Reader

pytestmark = pytest.mark.timeout(400)  # each step has its own bound


def test_the_quickstart_and_what_others_change_for_it(tmp_path: Path) -> None:
    """One cluster, which the quickstart starts; the page for who comes from another server is read beside it."""
    with Reader(tmp_path) as reader:
        reader.read(DOCS / "quickstart.md")
        reader.read(DOCS / "coming-from.md")
    assert reader.ran == 10


@pytest.mark.long
def test_the_tuning_guide(tmp_path: Path) -> None:
    with Reader(tmp_path) as reader:
        reader.read(DOCS / "tuning.md")
    assert reader.ran == 7
    assert (tmp_path / "made.svg").read_text().startswith("<svg")
