"""The pages: links, tables that match the code, a section for each alert, metrics and settings that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import api_page
import models_page
import pages
import readme_tables
import settings_page
import yaml
from pages import DOCS, ROOT

from sie_contracts.settings import ROWS
from sie_runtime.feed import packaged_catalogue

ALERTS = ROOT / "charts" / "sie-cluster" / "files" / "alerts.yaml"
SECTIONS = ("**Means**", "**See**", "**Do**")


def test_the_site_is_built_without_a_broken_link(tmp_path: Path) -> None:
    """With `--quiet`, `--strict` would count no warnings."""
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "site" / "quickstart.html").is_file()


@pages.WHOLE
def test_the_page_of_settings_is_the_code() -> None:
    """`python tests/settings_page.py` regenerates the page."""
    text = settings_page.PAGE.read_text("utf-8")
    assert settings_page.page(text) == text
    for row in ROWS:
        assert f"| `{row.name}` |" in text


@pages.WHOLE
def test_the_page_of_models_is_the_catalogue() -> None:
    """`python tests/models_page.py` regenerates the page."""
    text, entries = models_page.PAGE.read_text("utf-8"), packaged_catalogue().entries
    assert models_page.page(text) == text
    assert f"The catalogue has {len(entries)} models" in text
    assert all(f"\n| `{model}`" in text for model in entries)


@pages.WHOLE
async def test_the_page_of_the_api_is_what_a_gateway_answers() -> None:
    """`python tests/api_page.py` regenerates the page."""
    text = api_page.PAGE.read_text("utf-8")
    document = await api_page.document()
    assert api_page.page(text, document) == text
    assert [path for path in document["paths"] if path not in text] == []


@pages.WHOLE
def test_the_tables_of_the_readme_are_the_catalogue_and_the_results() -> None:
    """`python tests/readme_tables.py` regenerates the tables."""
    text = readme_tables.PAGE.read_text("utf-8")
    assert readme_tables.page(text) == text


def test_every_alert_has_a_section_of_the_runbook() -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text("utf-8"))["groups"] for rule in group["rules"]]
    sections = re.split(r"^## (\w+)$", (DOCS / "runbook.md").read_text("utf-8"), flags=re.MULTILINE)[1:]
    text_by_alert = dict(zip(sections[::2], sections[1::2], strict=True))
    assert list(text_by_alert) == [rule["alert"] for rule in rules]
    for name, text in text_by_alert.items():
        assert [section for section in SECTIONS if section not in text] == [], name
