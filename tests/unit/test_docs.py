"""The pages: links, tables that match the code, a section for each alert, metrics and settings that exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import api_page
import click
import measure
import models_page
import pages
import pytest
import readme_tables
import settings_page
import yaml
from metrics_page import every
from pages import DOCS, README, ROOT

from sie_cli.main import main
from sie_contracts import client_environment
from sie_contracts.settings import BY_NAME, ROWS
from sie_runtime.feed import packaged_catalogue

ALERTS = ROOT / "charts" / "sie-cluster" / "files" / "alerts.yaml"
SECTIONS = ("**Means**", "**See**", "**Do**")
# number of blocks of a shell or of Python by page and mark; the mark of blocks that are run is ""
BLOCKS = {
    "README.md": {"install": 1, "": 4},
    "air-gap.md": {"": 3, "server": 1, "machine": 3},
    "bundles.md": {"server": 1, "": 2},
    "cache.md": {"server": 1, "": 2},
    "chunks.md": {"": 3},
    "clients.md": {"machine": 2},
    "coming-from.md": {"": 4},
    "custom-adapters.md": {"file": 1, "install": 1},
    "extending.md": {"file": 4, "install": 2},
    "engines.md": {"install": 1},
    "evals.md": {"install": 1, "": 6},
    "families.md": {"file": 2},
    "first-hour.md": {"kubernetes": 10},
    "doctor.md": {"": 1, "machine": 1},
    "documents.md": {"": 1},
    "image-search.md": {"": 4},
    "sounds.md": {"": 3},
    "files.md": {"": 1},
    "jobs.md": {"": 5, "machine": 1},
    "kubernetes.md": {"kubernetes": 3},
    "lora.md": {"": 2},
    "mcp.md": {"machine": 2},
    "migration.md": {"server": 1, "": 4, "machine": 3},
    "models.md": {"server": 1, "": 3},
    "objects.md": {"": 1},
    "parsing.md": {"vision": 1, "install": 1},
    "pools.md": {"server": 1, "": 1},
    "profiles.md": {"": 1},
    "quantisation.md": {"": 2},
    "quickstart.md": {"install": 1, "server": 1, "": 6, "hub": 1},
    "rag.md": {"file": 4},
    "redaction.md": {"": 2},
    "request-lifecycle.md": {"": 1},
    "routing.md": {"": 1},
    "runbook.md": {"kubernetes": 1, "machine": 1},
    "sdk.md": {"install": 1, "": 10, "vision": 1},
    "schemas.md": {"": 1},
    "security.md": {"server": 1, "": 2},
    "status.md": {"": 1},
    "tuning.md": {"server": 2, "": 5},
    "upgrade.md": {"kubernetes": 1},
    "weights.md": {"": 1},
}


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


def test_the_site_needs_nothing_from_elsewhere() -> None:
    assert re.search(r"^  font: false", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)


OUTSIDE = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted(ROOT.glob("extras/*/*.md"))]


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_from_outside_the_site_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(((?!https?:)[^)#]+)", page.read_text("utf-8"))
    assert links or page.parent != ROOT
    gone = [link for link in links if not (page.parent / link).is_file()]
    # those to the page of an extra that was removed lead nowhere
    assert [link for link in gone if "extras/" not in link or (page.parent / link).parent.is_dir()] == []


@pages.WHOLE
def test_each_method_that_a_page_names_exists() -> None:
    names: dict[str, set[str]] = {}  # by class: its methods, and all names in its body
    for _, node in measure.nodes():
        if isinstance(node, ast.ClassDef):
            names.setdefault(node.name, set()).update(re.findall(r"\w+", ast.unparse(node)))
    references = [
        (page.name, *reference)
        for page in (ROOT / "ARCHITECTURE.md", *pages.every_page())
        for reference in re.findall(r"`([A-Z]\w+)\.([a-z_]\w+)`", page.read_text("utf-8"))
        if reference[0] in names
    ]
    assert references
    assert [reference for reference in references if reference[2] not in names[reference[1]]] == []


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


def test_the_first_page_of_the_site_leads_to_every_page() -> None:
    links = set(re.findall(r"\]\(((?:\.\./extras/[\w-]+/)?[\w-]+\.md)\)", (DOCS / "index.md").read_text("utf-8")))
    assert {DOCS / "index.md", *((DOCS / link).resolve() for link in links)} >= {*pages.every_page()}
    assert all((DOCS / link).is_file() for link in links if "/" not in link)


def test_the_readme_is_short_before_more() -> None:
    first, mark, _ = README.read_text("utf-8").partition("\n## More\n")
    assert mark
    assert len(first.split()) <= 500


def test_every_alert_has_a_section_of_the_runbook() -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text("utf-8"))["groups"] for rule in group["rules"]]
    sections = re.split(r"^## (\w+)$", (DOCS / "runbook.md").read_text("utf-8"), flags=re.MULTILINE)[1:]
    text_by_alert = dict(zip(sections[::2], sections[1::2], strict=True))
    assert list(text_by_alert) == [rule["alert"] for rule in rules]
    for name, text in text_by_alert.items():
        assert [section for section in SECTIONS if section not in text] == [], name


@pages.WHOLE
def test_no_page_names_a_metric_that_no_process_exports() -> None:
    exported = {name for metric in every().values() for name in (metric.name, *metric.exported)}
    # names of the packages and of the broker's buckets
    foreign_names = re.compile(
        r"sie_(cli|client|sdk|contracts|broker|runtime|store|gateway|sidecar|adapter|config|config_service)(?![a-z_])"
        r"|sie_(catalogue|demand|jobs|keys|leases|placement|poison|pools|shards)(_copy)?(?![a-z_])"
    )
    wrong = [
        (page.name, name)
        for page in pages.every_page()
        for name in re.findall(r"`[^`\n]*?\b(sie_[a-z0-9_]+)", page.read_text("utf-8"))
        if name not in exported
        and name not in measure.FOLDERS
        and not foreign_names.fullmatch(name)
        and not any(exported_name.startswith(name) for exported_name in exported)
    ]
    assert wrong == []


@pages.WHOLE
def test_no_page_names_a_setting_that_does_not_exist() -> None:
    wrong = [
        (page.name, name)
        for page in (*pages.every_page(), README)
        for name in re.findall(r"\bSIE_[A-Z0-9]+(?:_[A-Z0-9]+)*\b(?!\*|_)", page.read_text("utf-8"))
        if name not in BY_NAME and name not in client_environment.NAMES
    ]
    assert wrong == []


def test_every_block_of_a_shell_or_of_python_is_run_or_says_why_not() -> None:
    """Blocks without a mark, and those of servers, are run. tests/system/test_readme.py runs those of the README and of
    sdk.md, tests of the extras those of their pages, test_docs.py all others.
    """
    block_counts = {page.name: dict(pages.marks(page)) for page in (*pages.every_page(), README)}
    assert {name: counts for name, counts in block_counts.items() if counts} == {
        name: counts for name, counts in BLOCKS.items() if name in block_counts
    }
    assert {mark for counts in BLOCKS.values() for mark in counts} <= {"", "server", *pages.ELSEWHERE}


def test_nothing_is_shown_of_what_is_not_run_and_measured_numbers_are_fractions_or_rates() -> None:
    """A block that is not run shows no output, because no test would compare it. Output without measured fractions is
    the same on every machine, so a test can compare it.
    """
    for page in (*pages.every_page(), README):
        every = pages.blocks(page)
        assert [block.code for block in every if block.shown is not None and block.mark in pages.ELSEWHERE] == [], (
            page.name
        )
        assert [
            block.code for block in every if block.measured and not re.search(r"\d\.\d", block.shown or "")
        ] == [], page.name


def test_no_command_hides_in_a_block_of_another_language() -> None:
    word = "sie|curl|pip|python|make|docker|kubectl|helm|export|import|from"
    command = re.compile(rf"^ *(?:\$ |(?:[A-Z_]+=\S+ )*(?:{word}) \S)", re.MULTILINE)
    for page in (*pages.every_page(), README):
        text = page.read_text("utf-8")
        every = pages.blocks(page)
        assert text.count("```") == 2 * len(every) + 2 * sum(block.shown is not None for block in every), page.name
        assert {block.language for block in every} <= {*pages.RUN, *pages.SHOWN}, page.name
        assert [block.code for block in every if block.language in pages.SHOWN and command.search(block.code)] == [], (
            page.name
        )


@pages.WHOLE
def test_every_command_that_a_page_names_is_there() -> None:
    """Options are checked too."""
    wrong, command_count = [], 0
    for page in (*pages.every_page(), README, ROOT / "ARCHITECTURE.md"):
        for words in re.findall(r"(?:`|^|[=(;] ?|\| )sie ([a-z][^`\n#|)]*)", page.read_text("utf-8"), re.MULTILINE):
            command: click.Command = main
            rest = words.split()
            while isinstance(command, click.Group) and rest and rest[0] in command.commands:
                command = command.commands[rest.pop(0)]
            if isinstance(command, click.Group) and rest and hasattr(command, "default"):
                command = command.commands[command.default]
            options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
            flags = {word.partition("=")[0] for word in rest if re.match(r"--[a-z]", word)}
            command_count += 1
            if command is main or (isinstance(command, click.Group) and rest) or not flags <= options:
                wrong.append((page.name, words))
    assert command_count > 100
    assert wrong == []


def test_what_a_page_shows_is_compared_with_what_is_printed() -> None:
    assert pages.differences("a 1.5 b\nc…\n", "a -20 b\nc and more\n", measured=True) == []
    assert pages.differences("0.34 24\n[-0.077…\n", "0.3391 24\n[-0.07712, 0.5]\n") == []
    for shown, printed in (
        ("0.44 12", "0.34 12"),
        ("0.34 12", "0.34 24"),
        ("7 a", "7 a 7"),
        ("[0.5…", "[0.9, 0.5]"),
        ("a1…", "b1 c"),
    ):
        assert pages.differences(shown, printed) == [f"{printed!r} in place of {shown!r}"]
    assert pages.differences("a 1 b\n", "a 1 c\n", measured=True) == ["'a 1 c' in place of 'a 1 b'"]
    assert pages.differences("a\nb\n", "a\n") == ["1 lines in place of 2"]
