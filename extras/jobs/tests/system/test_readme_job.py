"""The README's example of a job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import shared
from cluster import Cluster
from pages import README, blocks

pytestmark = shared.OPEN


def test_the_example_of_a_job_writes_the_vectors_of_a_file(open_cluster: Cluster, tmp_path: Path) -> None:
    (block,) = [block for block in blocks(README, "bash") if block.code.startswith("sie jobs")]
    pyarrow.parquet.write_table(pyarrow.table({"title": ["Cats", "Dogs", "Taxes"]}), tmp_path / "docs.parquet")
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "SIE_BASE_URL": open_cluster.url,
    }
    subprocess.run(["bash", "-euc", block.code], cwd=tmp_path, env=environ, timeout=100, check=True)
    tables = [pyarrow.parquet.read_table(file) for file in (tmp_path / "vectors").glob("*.parquet")]
    assert sum(table.num_rows for table in tables) == 3
