"""One set of small models for all files of this folder, most of whose tests have the machine to themselves."""

from __future__ import annotations

from pathlib import Path

import local_models
import pytest
from local_models import LocalModels

_HERE = Path(__file__).parent
# these wait for most of their time, and bound seconds at most
_BESIDE_OTHERS = {
    f"test_{name}.py"
    for name in (
        "adversarial",
        "api",
        "broker_faults",
        "clients",
        "dlq",
        "docs",
        "doctor",
        "leases",
        "local_users",
        "lora",
        "openapi",
        "readme",
        "score_extract",
        "status",
        "tei",
        "topology_command",
    )
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE) and item.path.name not in _BESIDE_OTHERS:
            item.add_marker(pytest.mark.serial)


@pytest.fixture(scope="session")
def every_family(tmp_path_factory: pytest.TempPathFactory) -> LocalModels:
    """A model of each of `local_models.KINDS`, under its name."""
    models = local_models.under(tmp_path_factory.mktemp("every-family"))
    for name in local_models.KINDS:
        models.build(name)
    return models
