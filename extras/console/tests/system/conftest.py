"""Fixtures of this folder."""

import axe
import pytest
from support.system import *  # noqa: F403


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The rules of axe-core."""
    return axe.source(tmp_path_factory.mktemp("axe"))
