"""docs/parity.md is the page that a run of these tests writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pages
import pytest
from parity.checkpoints import ARCHITECTURES
from parity.table import ORACLES, Agreement, ParityTable, Scores

from sie_runtime.feed import packaged_catalogue


@pytest.fixture
def page(request: pytest.FixtureRequest) -> str:
    if request.config.getoption("parity_table", default=None):
        pytest.skip("the page is being written")
    return (Path(__file__).parents[2] / "docs" / "parity.md").read_text()


def test_a_cell_keeps_the_worst_of_each_number() -> None:
    table = ParityTable()
    for cosine, difference in ((0.99, 1e-3), (0.999, 2e-3)):
        table.record("dense toy", "packed", "bfloat16", Agreement(cosine, difference, 0.0))
    for difference, tau in ((3e-6, None), (2e-6, 0.98), (1e-6, 0.99)):
        table.record("gliner toy", "padded", "float32", Scores(difference, tau))
    rows = table.markdown({"org/model": "its code is remote"}).splitlines()
    assert f"| dense toy | - | cos 0.9900000, Δ 2e-03 | - | - | - | - | - | {ORACLES['dense']} |" in rows
    assert f"| gliner toy | - | - | Δ 3e-06, tau 0.980 | - | - | - | - | {ORACLES['gliner']} |" in rows
    assert rows[-1] == "| org/model | its code is remote |"


def test_the_page_has_the_measurements_of_all_folders(tmp_path: Path) -> None:
    """The tests of each extra have a conftest.py of their own."""
    for folder in ("core", "extra"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "conftest.py").write_text("from support.parity import *\n")
        (tmp_path / folder / f"test_{folder}.py").write_text(
            "from parity.table import Agreement\n\n\n"
            f"def test(table):\n    table.record('dense {folder}', 'packed', 'float32', Agreement(1, 0, 0))\n"
        )
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--parity-table')\n")
    page = tmp_path / "page.md"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--parity-table={page}", "--rootdir=."]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run(command, cwd=tmp_path, env=environ, check=True)
    kinds = [line.split(" |")[0] for line in page.read_text().splitlines() if line.startswith("| dense")]
    assert kinds == ["| dense core", "| dense extra"]


def test_the_page_has_every_architecture_and_every_kind(page: str) -> None:
    for kind in (*(f"dense {name}" for name in ARCHITECTURES), *(f"{oracle} " for oracle in ORACLES)):
        assert f"\n| {kind}" in page


def test_every_family_of_an_entry_that_is_proven_has_a_row(page: str) -> None:
    """Every kind of reader has a row too: all readers are one family."""
    kinds = {"text-encoder": "dense", "zero-shot-classifier": "zero-shot"}
    families = {entry.family for entry in packaged_catalogue().entries.values() if not entry.unproven}
    families.discard("docling")  # it gives no numbers: the tests of its extra compare its texts
    missing = {family for family in families if f"\n| {kinds.get(family, family)} " not in page}
    assert not missing
    for name in ("donut", "florence2", "florence2 as published", "lighton", "glm", "paddle"):
        assert f"\n| document-reader {name} |" in page


def unproven() -> set[str]:
    entries = packaged_catalogue().entries
    return {f"| {model} | {entry.unproven} |" for model, entry in entries.items() if entry.unproven}


def listed(page: str) -> set[str]:
    lines = page.partition("## Unproven")[2].splitlines()
    return {line for line in lines if line.startswith("| ")} - {"| model | reason |"}


def test_the_page_lists_every_entry_that_is_unproven_with_its_reason(page: str) -> None:
    """`python -m pytest tests/parity --parity-table docs/parity.md` writes the page."""
    assert set() < unproven() <= listed(page)


@pages.WHOLE
def test_the_page_lists_no_other_entry_as_unproven(page: str) -> None:
    assert listed(page) <= unproven()
