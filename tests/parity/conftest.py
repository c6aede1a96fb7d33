"""Fixtures of the parity tests. `--parity-table FILE` writes the worst values."""

from __future__ import annotations

import pytest
from support.parity import *  # noqa: F403


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-table", metavar="FILE", help="write the table of worst values there")
