"""The integrations of the public SDK and its MCP server, unmodified, each in a process of its own against a real
`sie serve`. `make test` installs three of them beside the tests; the long lane gives each an environment of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import foreign
import local_models
import pytest
import shared
from cluster import Cluster
from parity.toys import image, png

pytestmark = shared.OPEN
ROOT = Path(__file__).parents[2]
SDKS = ROOT / ".venv-sdks"
VERSION = "0.10.1"
# number of cases of each integration, and of those that need a small model of an extra
CASES: dict[str, tuple[int, Mapping[str, int]]] = {
    "langchain": (9, {"gliner": 2}),
    "haystack": (8, {"gliner": 1, "clip": 1}),
    "qdrant": (5, {}),
    "llamaindex": (9, {"gliner": 1, "clip": 5}),
    "dspy": (7, {"gliner": 1}),
    "crewai": (4, {"gliner": 1}),
    "chroma": (5, {}),
    "weaviate": (4, {"gliner": 6}),
    "lancedb": (8, {"gliner": 2}),
    "mcp": (7, {"gliner": 2}),
}
QUICK = ("langchain", "haystack", "qdrant")


def expected(name: str) -> int:
    """Return how many cases an integration has with the models that the extras of this tree bring."""
    count, of_extras = CASES[name]
    return count + sum(more for kind, more in of_extras.items() if kind in local_models.KINDS)


def passed(name: str, python: str | Path, cluster: Cluster, folder: Path, environ: Mapping[str, str]) -> int:
    """Return how many cases of an integration were right. Check that the process writes nothing to stderr."""
    picture = folder / "picture.png"
    picture.write_bytes(png(image(8, 8)))
    argv = [str(python), str(ROOT / "tests/clients/integrations.py"), name, cluster.url, str(picture)]
    argv += [f"test/{kind}" for kind in local_models.KINDS]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("SIE_")}
    done = subprocess.run(
        argv,
        env={**inherited, "NO_PROXY": "*", "HOME": str(folder), **environ},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout.count("ok: ")


@pytest.mark.parametrize("name", QUICK)
def test_an_integration_works_beside_the_tests_own_libraries(name: str, open_cluster: Cluster, tmp_path: Path) -> None:
    path = os.pathsep.join(str(SDKS / folder) for folder in ("integrations", VERSION, "needs"))
    assert passed(name, sys.executable, open_cluster, tmp_path, {"PYTHONPATH": path}) == expected(name)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
def test_an_integration_works_in_an_environment_of_its_own(name: str, open_cluster: Cluster, tmp_path: Path) -> None:
    environment = foreign.Environment(tmp_path / "environment")
    environment.install_public(f"sie-{name}=={VERSION}", f"sie-sdk=={VERSION}")
    telemetry = {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}
    assert passed(name, environment.python, open_cluster, tmp_path, telemetry) == expected(name)
