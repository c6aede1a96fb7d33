"""Rows of model families that packages bring by the entry points `sie.families`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sie_contracts import entry_points
from sie_contracts.models import bundles, families, options
from sie_contracts.models.families import FAMILIES, FOREIGN

ROW = """from sie_contracts.models.families import Family
ROWS = {{"{name}": Family(implementation="{module}.model:Model", parameters=frozenset({{"their_option"}}))}}
"""
Installed = Callable[[str, str], None]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    """Install a distribution that names `MODULE:ROWS`, as an installer does."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(entry_points, "FAULTS", {})
    caches, modules = (families.rows, options.known_fields), list[str]()

    def install(module: str, code: str) -> None:
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{families.ENTRY_POINTS}]\n{module} = {module}:ROWS\n")
        importlib.invalidate_caches()
        modules.append(module)
        for cache in caches:
            cache.cache_clear()

    yield install
    for module in modules:
        sys.modules.pop(module, None)
    for cache in caches:
        cache.cache_clear()


def test_rows_has_the_row_of_a_package_after_those_of_the_core(installed: Installed) -> None:
    installed("their_rows", ROW.format(name="theirs", module="their_rows"))
    assert list(families.rows())[: len(FAMILIES)] == list(FAMILIES)
    assert families.row("theirs").implementation == "their_rows.model:Model"
    assert "their_option" in options.known_fields()
    bundle = bundles.parse_bundle({"id": "b", "families": [bundles.BUILT_IN]})
    assert bundle.serves("theirs")


def test_rows_keeps_the_row_of_the_core_for_its_name(installed: Installed) -> None:
    installed("their_rows", ROW.format(name="text-encoder", module="their_rows"))
    assert families.row("text-encoder") is FAMILIES["text-encoder"]


def test_rows_leaves_out_a_package_that_cannot_be_imported(
    installed: Installed, caplog: pytest.LogCaptureFixture
) -> None:
    installed("broken_rows", "raise OSError('broken')")
    installed("their_rows", ROW.format(name="theirs", module="their_rows"))
    assert families.row("theirs") != FOREIGN
    assert [record.levelname for record in caplog.records if "broken_rows:ROWS" in record.getMessage()] == ["ERROR"]
