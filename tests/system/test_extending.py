"""The package of docs/extending.md, installed by pip beside a `sie serve`, adds all that the page says."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import pytest
from cluster import until

from sie_cli.serve.ports import free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text("utf-8")
FILES = dict(re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
READY_S = 120


class Served(NamedTuple):
    url: str
    environ: dict[str, str]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Install the package, and serve its two models."""
    folder = tmp_path_factory.mktemp("acme")
    weights = folder / "weights"
    weights.mkdir()
    (weights / "README.md").write_text("This model has no weights.\n")
    for name, text in FILES.items():
        file = folder / name if name.startswith("models/") else folder / "acme-sie" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("/srv/models/letters", str(weights)), "utf-8")
    site = folder / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*install, str(site), str(folder / "acme-sie")], check=True, timeout=120)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SIE_")}
    # in bfloat16, two engines round differently
    environ |= {"SIE_MODELS_DIR": str(folder / "models"), "SIE_DEFAULT_COMPUTE_PRECISION": "float32"}
    environ["PYTHONPATH"] = os.pathsep.join([str(site), *sys.path])
    port = free_port()
    argv = [sys.executable, "-m", "sie_cli", "serve", "--port", str(port), "--data-dir", str(folder / "data")]
    log = folder / "log"
    with log.open("w") as written:
        process = subprocess.Popen(argv, env=environ, cwd=folder, stdout=written, stderr=subprocess.STDOUT, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, trust_env=False, headers={"accept": "application/json"}) as client:

            def has_worker() -> bool:
                assert process.poll() is None, log.read_text()
                with contextlib.suppress(httpx.TransportError):
                    return bool(client.get("/readyz").json()["healthy_workers"])
                return False

            until(has_worker, READY_S, "the worker is ready")
        yield Served(url, environ)
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, trust_env=False, timeout=READY_S) as client:
        yield client


def test_package_of_the_page_adds_a_route_and_a_dialect(client: httpx.Client) -> None:
    assert client.get("/acme/workers").json() == {"workers": 1}
    answer = client.post("/acme/embed", json={"model": "acme/letters", "texts": ["Banana", "zz"]})
    assert answer.status_code == 200, answer.text
    banana, zz = np.array(answer.json()["vectors"])
    expected = np.zeros(26)
    expected[[0, 1, 13]] = 3, 1, 2
    assert np.allclose(banana, expected / np.linalg.norm(expected), atol=1e-6)
    assert (zz[25], np.count_nonzero(zz)) == (1, 1)
    refused = client.post("/acme/embed", json={"model": "acme/letters", "texts": [1]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "texts[0]")
    assert {"/acme/workers", "/acme/embed"} <= client.get("/openapi.json").json()["paths"].keys()


def test_package_of_the_page_adds_a_command(served: Served) -> None:
    argv = [sys.executable, "-m", "sie_cli", "acme", "hello", "--url", served.url]
    done = subprocess.run(argv, env=served.environ, capture_output=True, text=True, timeout=READY_S)
    assert (done.returncode, done.stdout.strip()) == (0, "26"), done.stderr


def test_package_of_the_page_adds_an_engine(client: httpx.Client) -> None:
    """Its vectors are those of the model's own engine."""
    texts = ["hello", "a longer text of some words", ""]
    own, reference = (
        np.array([item["dense"]["values"] for item in client.post(path, json={"items": texts}).json()["items"]])
        for path in ("/v1/encode/acme/plain", "/v1/encode/sentence-transformers/all-MiniLM-L6-v2")
    )
    assert np.abs(own - reference).max() <= 1e-5
    engine = client.get("/v1/models/acme/plain").json()["engine"]
    assert engine["served"] == ["acme-plain"]
