"""The TypeScript client in Node against a real server: its suite, and the examples of its README."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import local_models
import pytest
from cluster import MODEL, Cluster, running
from parity.gliner_checkpoints import gliner2_folder
from typescript_package import CLIENT, compiled, copied, ran

pytestmark = pytest.mark.debian


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
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    models = local_models.under(tmp_path_factory.mktemp("typescript-models"))
    for kind in ("mini", "m3", "cross", "gliner"):
        models.build(kind)
    gliner2_folder(models.weights / "spans")
    models.add("spans", {"family": "gliner2", "outputs": {"entities": 0}, "max_tokens": 250})
    folder = tmp_path_factory.mktemp("typescript-cluster")
    with running(folder, *models.arguments, "--no-spare") as cluster:
        yield cluster


def test_the_suite_passes_in_node(package: Path, cluster: Cluster) -> None:
    ran(["node", "--test", "build/test/node.test.js"], package, SIE_URL=cluster.url)


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
