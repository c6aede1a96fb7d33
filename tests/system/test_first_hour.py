"""The commands of docs/first-hour.md, as an operator pastes them, with a node of real containers in place of a cluster:
from the images to a first vector and what `sie doctor` says, and the end. `tests/kubelet/programs.py` has the programs
that need a cluster or a registry.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import oracle
import pytest
from cluster import until
from kubelet import Node
from kubelet.programs import Programs
from kubelet.release import BROKER, MARKS, check_images
from pages import DOCS, ROOT, blocks

pytestmark = [pytest.mark.long, pytest.mark.serial, *MARKS]

FORWARDED = re.compile(r"port-forward \S+ (\d+):")
PAGE = blocks(DOCS / "first-hour.md", "bash")
NUMBER = next(number for number, block in enumerate(PAGE) if "sie doctor" in block.code)
FIRST, LAST = PAGE[: NUMBER + 1], PAGE[-1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout as the page uses it: the chart, and the values file that it has the operator save."""
    (tmp_path / "charts").symlink_to(ROOT / "charts")
    (tmp_path / "my-values.yaml").write_text(blocks(DOCS / "first-hour.md", "yaml")[0].code)
    return tmp_path


@contextlib.contextmanager
def pasted(code: Sequence[str], folder: Path, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a shell that executes one block after another. Its background processes end with the context."""
    environ = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "XDG_DATA_HOME": "",
    }
    with output.open("wb") as file:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail"],
            cwd=folder,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    assert shell.stdin is not None
    try:
        for number, block in enumerate(code):
            shell.stdin.write(f"{block}\necho '== {number}'\n".encode())
            shell.stdin.flush()
            until(
                lambda number=number: f"== {number}\n" in output.read_text() or shell.poll() is not None,
                1200,
                f"block {number}",
                output.read_text,
            )
            assert shell.poll() is None, f"{block}\n{output.read_text()}"
            for port in FORWARDED.findall(block):
                until(lambda port=port: listens(int(port)), 30, f"port {port} is forwarded", output.read_text)
        yield shell
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_page_leads_to_a_vector_and_to_nothing_that_is_wrong(folder: Path) -> None:
    check_images()
    output, began_s = folder / "output", time.monotonic()
    with Node.started(namespace="sie") as node, Programs(node, folder):
        with pasted([block.code for block in FIRST], folder, output):
            pass
        text = output.read_text()
        print(f"{time.monotonic() - began_s:.0f} s\n{text}")
        (answer,) = [line for line in text.splitlines() if line.startswith("{")]
        values = json.loads(answer.partition("== ")[0])["items"][0]["dense"]["values"]
        assert np.abs(np.asarray(values, np.float32) - oracle.encode(["Hello"])[0]).max() < 5e-3
        assert "nothing is wrong" in text
        with pasted([LAST.code], folder, folder / "end"):
            pass
        assert node.pods == []
        for pod in node.ended:
            assert {container.exits[-1].status for container in pod.containers} == {0} or pod.workload == BROKER
