"""One set of small models for all files of this folder."""

from __future__ import annotations

import local_models
import pytest
from local_models import LocalModels


@pytest.fixture(scope="session")
def every_family(tmp_path_factory: pytest.TempPathFactory) -> LocalModels:
    """A model of each of `local_models.KINDS`, under its name."""
    models = local_models.under(tmp_path_factory.mktemp("every-family"))
    for name in local_models.KINDS:
        models.build(name)
    return models
