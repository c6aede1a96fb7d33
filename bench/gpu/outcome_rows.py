"""Pytest plugin that appends a line of JSON to the file GPU_OUTCOMES (an environment variable) when a test ends."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

_FILE = Path(os.environ["GPU_OUTCOMES"])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write (test, outcome, seconds, last line of the failure) for a test's call, and for a setup or teardown that did
    not pass.
    """
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    message = "" if report.passed else str(report.longrepr).strip().splitlines()[-1][:200]
    with _FILE.open("a") as file:
        file.write(json.dumps([report.nodeid, report.outcome, report.duration, message]) + "\n")
