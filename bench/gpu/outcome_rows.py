"""A plugin of pytest: a line of JSON for each test that has ended, at once, in the file that GPU_OUTCOMES names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

_FILE = Path(os.environ["GPU_OUTCOMES"])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test has one line: of its call, or of what kept it from being called, or failed after it."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    message = "" if report.passed else str(report.longrepr).strip().splitlines()[-1][:200]
    with _FILE.open("a") as file:
        file.write(json.dumps([report.nodeid, report.outcome, report.duration, message]) + "\n")
