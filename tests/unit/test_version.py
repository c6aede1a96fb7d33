"""The version: its one source, the copies that are written from there, `sie --version` and the changelog."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import measure
import pytest
import version
from click.testing import CliRunner

from sie_cli.main import main

ROOT = version.ROOT
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")
pytestmark = pytest.mark.xdist_group("sources")  # one process parses all files


def test_every_copy_is_the_version() -> None:
    versions = dict(version.found())
    assert set(versions.values()) == {version.current()}
    files = {place.partition(":")[0] for place in versions}
    assert {"core/contracts/sie_contracts/__init__.py", "charts/sie-cluster/Chart.yaml", "docs/kubernetes.md"} <= files


def test_sie_tells_it() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"sie, version {version.current()}\n"


def test_no_module_has_a_copy_of_its_own() -> None:
    copy = re.compile(rf"""["']{re.escape(version.current())}["']""")
    assert [
        module.name for folder in measure.PACKAGES for module in measure.modules(folder) if copy.search(module.text)
    ] == ["sie_contracts"]


def test_a_new_version_is_written_everywhere_and_nowhere_else(tmp_path: Path) -> None:
    now = version.current()
    for place in {version.SOURCE, *(str(path.relative_to(ROOT)) for path, _ in version.copies())}:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / place, tmp_path / place)
    page = tmp_path / "docs" / "page.md"
    text = (
        f"`registry/sie-gateway:{now}`, sie-$image:{now}. helm install sie sie-cluster-{now}.tgz;"
        f" sie_cluster-{now}-py3-none-any.whl, sie-cluster-{now}.cdx.json; other=={now}, other:{now}\n"
    )
    page.write_text(text)
    before = len([*version.found(tmp_path)])
    version.write("1.22.0rc1", tmp_path)
    assert version.current(tmp_path) == "1.22.0rc1"
    assert [copy_version for _, copy_version in version.found(tmp_path)] == ["1.22.0rc1"] * before
    assert page.read_text() == text.replace(now, "1.22.0rc1", 5)
    source = (tmp_path / version.SOURCE).read_text("utf-8")
    assert source == (ROOT / version.SOURCE).read_text("utf-8").replace(
        f'\nversion = "{now}"', '\nversion = "1.22.0rc1"'
    )
    with pytest.raises(ValueError, match="expected a version"):
        version.write("v1", tmp_path)


def test_the_changelog_is_of_this_version_and_of_all_that_were_released() -> None:
    """The newest version comes first, each with its date. Only the newest may be untagged, without a date."""
    headings = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    parts = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d|untagged)", heading) for heading in headings[1:]]
    assert all(parts)
    numbers = [tuple(map(int, part.groups()[:3])) for part in parts if part]
    assert numbers == sorted(numbers, reverse=True)
    assert ".".join(map(str, numbers[0])) == version.current()
    assert [heading for heading in headings[2:] if heading.endswith("untagged")] == []
    kinds = set(re.findall(r"^### (.*)$", CHANGELOG, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    if (ROOT / ".git").exists() and shutil.which("git"):
        tags = subprocess.run(["git", "tag", "--list", "v*"], cwd=ROOT, capture_output=True, text=True, check=True)
        assert {f"[{tag[1:]}]" for tag in tags.stdout.split()} <= {heading.partition(" ")[0] for heading in headings}
