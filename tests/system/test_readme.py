"""The README's commands do what it says."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator

import numpy as np
import oracle
import pytest
import shared
from cluster import Cluster, running
from local_models import LocalModels
from pages import DOCS, ELSEWHERE, README, blocks, differences, run

pytestmark = shared.OPEN
RESERVES = "client.reserve("  # an example with it wants a second worker


@pytest.fixture(scope="module")
def cluster(open_cluster: Cluster) -> Cluster:
    """The models that would be downloaded are small ones of their kinds there, under the same names."""
    return open_cluster


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, open_models: LocalModels) -> Iterator[Cluster]:
    """One of two workers may be reserved."""
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
    assert oracle.cosines(np.array(values), oracle.encode(["What is deep learning?"])[0]) >= 0.999


def test_the_python_example_prints_what_it_shows(cluster: Cluster) -> None:
    block = blocks(README, "python")[0]
    printed = run(block.code, cluster)
    assert differences(block.shown or "", "\n".join(printed), measured=block.measured) == []
    shape, timing = printed
    assert shape == "(384,) float32"
    assert re.fullmatch(r"\{'queue_ms': [\d.]+, 'inference_ms': [\d.]+, 'total_ms': [\d.]+\}", timing)


def test_the_example_of_the_other_verbs_scores_and_extracts(cluster: Cluster) -> None:
    ranked, found = map(ast.literal_eval, run(blocks(README, "python")[1].code, cluster))
    assert {item for item, _ in ranked} == {"item-0", "item-1"}
    assert ranked[0][1] >= ranked[1][1]
    assert all(
        "Ada met Charles in London."[start:].startswith(text) and label in ("person", "place")
        for text, label, start in found
    )


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


def test_the_examples_of_the_client_s_page_run(cluster: Cluster) -> None:
    """All of them as one program, but for the one that wants a second worker."""
    check_the_client_s_page(
        run("\n".join(code for code in examples_of_the_client_s_page() if RESERVES not in code), cluster), workers=1
    )


@pytest.mark.long
def test_the_examples_of_the_client_s_page_run_with_a_reservation(wide: Cluster) -> None:
    *printed, reserved = run("\n".join(examples_of_the_client_s_page()), wide)
    check_the_client_s_page(printed, workers=2)
    assert reserved == "8", "vectors of the reservation"


def test_the_example_of_the_start_message_works(cluster: Cluster) -> None:
    line = next(line for line in cluster.lines if "try     curl" in line)
    printed = subprocess.run(
        ["sh", "-c", line.partition("try")[2]], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert '"dims":384' in printed
