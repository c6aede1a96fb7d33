"""Our client and the public SDK in one environment: both import and encode, in whatever order they come and go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import foreign
import pytest
from cluster import MODEL, Cluster

ROOT = Path(__file__).parents[2]
OURS, SDK, LANGCHAIN = "ours", "sie-sdk", "sie-langchain"
PINS = {name: f"{name}==0.10.1" for name in (SDK, LANGCHAIN)}
# a step installs a package, or removes it if it has a minus
ORDERS = (
    (OURS, SDK, LANGCHAIN),
    (OURS, LANGCHAIN, SDK),
    (SDK, OURS, LANGCHAIN),
    (SDK, LANGCHAIN, OURS),
    (LANGCHAIN, OURS, SDK),
    (LANGCHAIN, SDK, OURS),
    (OURS, SDK, "-" + SDK, SDK, "-" + OURS),
    (SDK, OURS, "-" + OURS, OURS, "-" + SDK),
)
ENCODE = """
import sys
from {package} import SIEClient
with SIEClient(sys.argv[1]) as client:
    print(SIEClient.__module__.partition(".")[0], len(client.encode(sys.argv[2], {{"text": "x"}})["dense"]))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Build the wheels of our client with its commands, and of the distribution with the client's second name."""
    out = tmp_path_factory.mktemp("wheels")
    for folder in (ROOT, ROOT / "sdk/alias"):
        argv = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out), str(folder)]
        subprocess.run(argv, capture_output=True, check=True, timeout=120)
    return [f"{path}[cli]" if path.name.startswith("sie_cluster") else str(path) for path in out.glob("*.whl")]


def run(environment: foreign.Environment, *argv: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SIE_", "PYTHON"))}
    return subprocess.run(
        [str(environment.python), *argv], env={**environ, "NO_PROXY": "*"}, capture_output=True, text=True, timeout=60
    )


def check(environment: foreign.Environment, package: str, url: str, owner: str) -> None:
    done = run(environment, "-c", ENCODE.format(package=package), url, MODEL)
    assert (done.stdout.split(), done.stderr) == ([owner, "384"], ""), (package, done.stderr)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_both_sdks_encode_after_each_step(
    order: tuple[str, ...], wheels: list[str], open_cluster: Cluster, tmp_path: Path
) -> None:
    environment = foreign.Environment(tmp_path / "environment")
    present: set[str] = set()
    for step in order:
        name = step.removeprefix("-")
        if step != name:
            environment.uninstall(*(("sie-cluster", "sie-sdk-alias") if name == OURS else (name,)))
            present.remove(name)
        elif name == OURS:
            environment.install(*wheels)
            present.add(name)
        else:  # with the SDK that the integration requires
            environment.install_public(*dict.fromkeys((PINS[name], PINS[SDK])))
            present |= {name, SDK}
        if OURS in present:
            check(environment, "sie_client", open_cluster.url, "sie_client")
            command = run(
                environment, str(environment.python.with_name("sie")), "models", "list", "--url", open_cluster.url
            )
            assert command.returncode == 0, command.stderr
        check(environment, "sie_sdk", open_cluster.url, "sie_sdk" if SDK in present else "sie_client")


@pytest.mark.long
def test_pip_installs_both_by_one_command(wheels: list[str], tmp_path: Path) -> None:
    foreign.Environment(tmp_path / "environment").solve(*wheels, public=tuple(PINS.values()))
