"""The audit of pinned versions: which advisories a version is in, and that each line of constraints.txt
is understood.
"""

from __future__ import annotations

from typing import Any

import audit
import pytest
from packaging.version import Version


def advisory(*events: dict[str, str], name: str = "Some.Package", **more: Any) -> dict[str, Any]:
    ranges = [{"type": "ECOSYSTEM", "events": list(events)}]
    return {
        "id": "PYSEC-1",
        "summary": "bad",
        "affected": [{"package": {"ecosystem": "PyPI", "name": name}, "ranges": ranges}],
        **more,
    }


@pytest.mark.parametrize(
    ("version", "is_found"),
    [("0.9", False), ("1.0", True), ("1.4.9", True), ("1.5", False), ("2.0rc1", False), ("2.0", True), ("2.1", False)],
)
def test_a_version_is_in_an_advisory_by_its_ranges(version: str, is_found: bool) -> None:
    record = advisory({"introduced": "1.0"}, {"fixed": "1.5"}, {"introduced": "2.0"}, {"last_affected": "2.0"})
    assert bool(audit.findings({"some-package": Version(version)}, iter([record]))) == is_found
    assert not audit.findings({"other": Version(version)}, iter([record]))


def test_a_listed_version_and_all_versions_are_found() -> None:
    listed = {"id": "A", "affected": [{"package": {"ecosystem": "PyPI", "name": "a"}, "versions": ["1.0", "junk"]}]}
    every = advisory({"introduced": "0"}, name="a")
    npm_advisory = {"id": "B", "affected": [{"package": {"ecosystem": "npm", "name": "a"}, "versions": ["1.0"]}]}
    assert audit.findings({"a": Version("1.0")}, iter([listed, every, npm_advisory])) == [
        "a==1.0: A",
        "a==1.0: PYSEC-1 bad",
    ]
