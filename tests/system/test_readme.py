"""The README's commands do what it says."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import numpy as np
import oracle
import pytest
import shared
from cluster import Cluster, running
from local_models import LocalModels
from pages import DOCS, ELSEWHERE, README, WHOLE, blocks, differences, run

pytestmark = shared.OPEN
RESERVES = "client.reserve("  # an example with it needs a second worker


@pytest.fixture(scope="module")
def cluster(open_cluster: Cluster) -> Cluster:
    """The open cluster: small models of the same kinds stand in, under the same names, for models to download."""
    return open_cluster


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, open_models: LocalModels) -> Iterator[Cluster]:
    """A cluster with two workers, one of which may be reserved."""
    arguments = ["--no-spare", "--models-dir", str(open_models.folder)]
    with running(tmp_path_factory.mktemp("readme"), *arguments, workers=2) as cluster:
        yield cluster


def test_the_curl_example_prints_the_vector(cluster: Cluster) -> None:
    block = next(block for block in blocks(README, "bash") if block.code.startswith("curl"))
    script = block.code.replace("http://127.0.0.1:8080", cluster.url)
    printed = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout
    assert differences(block.shown or "", printed) == []
    values = [float(value) for value in re.search(r'"values":\[([^\]]*)\]', printed)[1].split(",")]  # type: ignore[index]
    assert len(values) == 384
    assert oracle.cosines(np.array(values), oracle.encode(["Hello"])[0]) >= 0.999


def test_the_example_of_a_search_ranks_the_nearest_texts(cluster: Cluster) -> None:
    search, _ = blocks(README, "python")
    printed = [line.partition(" ") for line in run(search.code, cluster)]
    ranked, chunks = printed[:2], printed[2:]
    scores = [float(score) for score, _, _ in ranked]
    assert scores == sorted(scores, reverse=True)
    assert "Ada Lovelace wrote the first program." in [text for _, _, text in ranked]
    assert len(chunks) > 1
    assert chunks[0][0] == "0"
    assert all(shape.endswith(" (384,)") for _, _, shape in chunks)


def test_the_example_of_openai_s_client_prints_what_it_shows(cluster: Cluster) -> None:
    _, example = blocks(README, "python")
    assert differences(example.shown or "", "\n".join(run(example.code, cluster))) == []


def examples_of_the_client_s_page() -> list[str]:
    return [block.code for block in blocks(DOCS / "sdk.md", "python") if block.mark not in ELSEWHERE]


def check_the_client_s_page(printed: list[str], workers: int) -> None:
    assert printed[0] == "(384,) float32 {'dims': 384, 'dtype': 'float32'}"
    assert "loaded" in printed, "the model that was waited for"
    assert "MODEL_NOT_FOUND sentence-transformers/all-MiniLM-L6-v2" in printed
    assert printed[1].endswith(" a 3 6"), "the tokens of an item, and of the two"
    count, of_first, of_all = map(int, [line for line in printed if line.startswith("2500 ")][-1].split())
    assert count * (of_first - 1) < of_all < count * (of_first + 4), "the tokens of one text, and of the long list"
    assert printed[-1] == str(workers), "the workers of a frame"


@WHOLE
def test_the_examples_of_the_client_s_page_run(cluster: Cluster) -> None:
    """All examples run as one program, except for the one that needs a second worker."""
    check_the_client_s_page(
        run("\n".join(code for code in examples_of_the_client_s_page() if RESERVES not in code), cluster), workers=1
    )
