"""The TypeScript client: its suite against a real server, in Node and in Chromium, and the examples of its README."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import local_models
import pytest
from browser import browsing, tab
from cluster import MODEL, Cluster, running
from parity.gliner_checkpoints import gliner2_folder
from typescript_package import CLIENT, compiled, copied, ran

pytestmark = pytest.mark.debian

PAGE = """<!doctype html><title>suite</title>
<script type="importmap">{"imports": {"@msgpack/msgpack": "/node_modules/@msgpack/msgpack/dist.esm/index.mjs"}}</script>
<script type="module">
import { suite } from "/build/test/suite.js";
const told = {};
for (const [name, run] of Object.entries(suite({ baseUrl: "BASE" }))) {
  try { await run(); told[name] = "passed"; } catch (error) { told[name] = String(error.stack); }
}
window.told = told;
</script>"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Discard the line."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, with its suite and its examples compiled."""
    folder = copied(tmp_path_factory)
    examples = re.findall(r"```ts\n(.*?)```", (CLIENT / "README.md").read_text("utf-8"), re.DOTALL)
    assert len(examples) == 4
    for number, code in enumerate(examples):
        (folder / "test" / f"example-{number}.ts").write_text(code, "utf-8")
    compiled(folder)
    return folder


@pytest.fixture(scope="module")
def site(package: Path) -> Iterator[str]:
    """The address of a server of the package's files, whose origin is not the cluster's."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(package))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, site: str) -> Iterator[Cluster]:
    models = local_models.under(tmp_path_factory.mktemp("typescript-models"))
    for kind in ("mini", "m3", "cross", "gliner"):
        models.build(kind)
    gliner2_folder(models.weights / "spans")
    models.add("spans", {"family": "gliner2", "outputs": {"entities": 0}, "max_tokens": 250})
    folder = tmp_path_factory.mktemp("typescript-cluster")
    with running(folder, *models.arguments, "--no-spare", environ={"SIE_CORS_ORIGINS": site}) as cluster:
        yield cluster


def test_the_suite_passes_in_node(package: Path, cluster: Cluster) -> None:
    ran(["node", "--test", "build/test/node.test.js"], package, SIE_URL=cluster.url)


def test_the_suite_passes_in_chromium(
    package: Path, cluster: Cluster, site: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (package / "page.html").write_text(PAGE.replace("BASE", cluster.url), "utf-8")
    with browsing(tmp_path_factory.mktemp("chromium")) as devtools, tab(devtools) as page:
        page.open(f"{site}/page.html")
        outcomes = page.wait("window.told ?? null", lambda value: value is not None, timeout_s=240)
    assert len(outcomes) >= 15
    assert set(outcomes.values()) == {"passed"}, json.dumps(outcomes, indent=2)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_the_examples_of_the_readme_run(package: Path, cluster: Cluster, number: int) -> None:
    """A model of this server replaces the one that an example names."""
    code = (package / f"build/test/example-{number}.js").read_text("utf-8")
    code = code.replace("http://127.0.0.1:8080", cluster.url)
    code = code.replace(MODEL, "test/mini").replace("fastino/gliner2-base-v1", "test/spans")
    program = package / f"example-{number}.mjs"
    program.write_text(code, "utf-8")
    output = ran(["node", str(program)], package)
    expected = ("Float32Array", "no model named", "mood", "384000")[number]
    assert expected in output, output
