"""The version: its one source, and the copies that are written from there."""

from __future__ import annotations

import json
import re

import measure
import pages
import pytest
import typescript_types
import version

import sie_client

pytestmark = pytest.mark.xdist_group("sources")  # one process parses all files


def test_every_copy_is_the_version() -> None:
    versions = dict(version.found())
    assert set(versions.values()) == {version.current()}
    files = {place.partition(":")[0] for place in versions}
    assert {"core/contracts/sie_contracts/__init__.py", "charts/sie-cluster/Chart.yaml", "docs/kubernetes.md"} <= files


def test_no_module_has_a_copy_of_its_own() -> None:
    copy = re.compile(rf"""["']{re.escape(version.current())}["']""")
    assert [
        module.name for folder in measure.PACKAGES for module in measure.modules(folder) if copy.search(module.text)
    ] == ["sie_contracts"]


@pages.WHOLE
def test_the_types_are_those_of_the_openapi_document() -> None:
    assert f"sha256 of its schemas: {typescript_types.digest()}\n" in typescript_types.TYPES.read_text("utf-8")


def test_the_version_is_that_of_the_python_packages() -> None:
    package = json.loads((typescript_types.CLIENT / "package.json").read_text("utf-8"))
    assert package["version"] == sie_client.__version__
    assert f'VERSION = "{sie_client.__version__}"' in (typescript_types.CLIENT / "src" / "version.ts").read_text(
        "utf-8"
    )
