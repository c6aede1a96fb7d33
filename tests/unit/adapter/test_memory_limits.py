"""Real allocation failures and real unloading, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from unit.adapter import toys

# Free memory in a second arena would count as used. A process that starts under a limit sets the same capacity of
# oneDNN's cache.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
_HEADROOM_MIB = 120


def ended(script: str, *arguments: object, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a script beside this file to its end."""
    return subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **_ENVIRONMENT},
        check=False,
    )


def child(script: str, *arguments: object, timeout_s: float) -> dict[str, Any]:
    """Run a script beside this file and return the JSON of its last line."""
    ran = ended(script, *arguments, timeout_s=timeout_s)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer whose activations are large beside its weights."""
    return toys.save(
        tmp_path_factory.mktemp("wide") / "bert",
        "bert",
        vocab_size=500,
        hidden_size=64,
        intermediate_size=2048,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=512,
    )


def fail_and_learn(folder: Path, cache: Path, batches: int, min_failures: int, timeout_s: float) -> None:
    """Check that passes fail, and no batch does, while the learnt limit rises before every batch. Check that after a
    restart with a limit that does not rise at most two passes fail.
    """
    arguments = folder, cache, _HEADROOM_MIB
    doubting = child("allocation_failures.py", *arguments, batches, 1, 3000, "torch", timeout_s=timeout_s)
    assert list(doubting["codes"]) == ["ok"]
    assert doubting["failures"] >= min_failures
    assert doubting["right"]
    assert doubting["total"] == doubting["limit"], "the limit is what the engine takes for its memory"
    believing = child("allocation_failures.py", *arguments, 10, 1, 0, "torch", timeout_s=timeout_s)
    assert list(believing["codes"]) == ["ok"]
    assert believing["failures"] <= 2
    assert believing["right"]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_no_batch_fails_when_memory_does_and_what_was_learnt_outlives_the_process(wide: Path, tmp_path: Path) -> None:
    fail_and_learn(wide, tmp_path, 20, 4, 180)


def cycle(folder: Path, layers: int, cycles: int, timeout_s: float) -> None:
    """Check that every unload gives the memory back, within 5 % of the weights. A layer has 48 MiB."""
    layer = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "max_position_embeddings": 64}
    small = toys.save(folder / "small", "bert", **layer, num_hidden_layers=1)
    large = toys.save(folder / "large", "bert", **layer, num_hidden_layers=layers)
    report = child("load_cycles.py", small, large, cycles, timeout_s=timeout_s)
    before, *after = report["resident"]
    assert report["weights"] >= layers * 50e6
    assert max(after) - before <= 0.05 * report["weights"], (
        f"MiB: {[resident >> 20 for resident in report['resident']]}"
    )


# long: each load compiles the graph, which takes 2 s on a quiet processor, and 15 s on a slow one
@pytest.mark.long
@pytest.mark.timeout(240)
def test_loading_a_graph_again_takes_no_more_memory(tmp_path: Path) -> None:
    folder = toys.save(tmp_path / "deep", "bert", num_hidden_layers=6, max_position_embeddings=64)
    _, first, *later = child("load_cycles.py", folder, folder, 5, timeout_s=200)["resident"]
    assert max(later) - first < 6e6, "each layer of each load takes less than 0.25 MB"


@pytest.mark.long
@pytest.mark.timeout(240)
def test_unloading_gives_the_memory_back(tmp_path: Path) -> None:
    """Two cycles of a model of more than 150 MB."""
    cycle(tmp_path, 3, 2, 200)
