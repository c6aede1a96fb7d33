"""The console uses the vocabulary of stages that replies have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sie_contracts.stages import STAGE_WORDS, STAGES

FOLDER = Path(__file__).parents[2]
SOURCES = FOLDER / "page" / "src"


def test_the_console_has_the_words_in_the_same_order() -> None:
    rows = re.findall(r'(\w+): \["([^"]+)", "(#\w+)"\]', (SOURCES / "stages.ts").read_text("utf-8"))
    assert [(stage, word) for stage, word, _ in rows] == list(STAGE_WORDS.items())
    assert len({colour for _, _, colour in rows}) == len(STAGES)


@pytest.mark.parametrize("name", ["charts.tsx", "waterfall.tsx", "requests.tsx"])
def test_the_views_of_the_console_have_no_words_of_their_own(name: str) -> None:
    code = (SOURCES / name).read_text("utf-8")
    assert 'from "./stages"' in code
    assert not [word for word in (*STAGES, "batch wait", "device wait", "model load") if word in code]


def test_the_page_of_the_console_has_the_words() -> None:
    page = (FOLDER / "console.md").read_text("utf-8")
    assert f"everywhere: {', '.join(STAGE_WORDS.values())}\n" in page
