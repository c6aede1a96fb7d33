"""The README's commands do what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import oracle
import pytest
from cluster import Cluster, running

README = Path(__file__).parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("readme"), "--no-spare") as cluster:
        yield cluster


def test_the_curl_example_prints_the_vector(cluster: Cluster) -> None:
    command = next(block for block in blocks("sh") if block.startswith("curl"))
    script = command.replace("http://127.0.0.1:8080", cluster.url)
    printed = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout
    values = [float(value) for value in re.search(r'"values":\[([^\]]*)\]', printed)[1].split(",")]  # type: ignore[index]
    assert len(values) == 384
    assert oracle.cosines(np.array(values), oracle.encode(["What is deep learning?"])[0]) >= 0.999


def test_the_python_example_prints_what_it_shows(cluster: Cluster) -> None:
    (code,) = blocks("python")
    script = code.replace("http://127.0.0.1:8080", cluster.url)
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout
    shape, timing = printed.strip().splitlines()
    assert shape == "(384,) float32"
    assert re.fullmatch(r"\{'queue_ms': [\d.]+, 'inference_ms': [\d.]+, 'total_ms': [\d.]+\}", timing)


def test_the_example_of_the_start_message_works(cluster: Cluster) -> None:
    line = next(line for line in cluster.lines if "try     curl" in line)
    printed = subprocess.run(["sh", "-c", line.partition("try")[2]], capture_output=True, text=True, timeout=60, check=True).stdout
    assert '"dims":384' in printed
