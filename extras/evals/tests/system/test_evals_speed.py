"""`sie eval --type perf` against devices whose speed is known: a fixed cost of each batch, and a stall."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stack import Device, Plan, Stack

pytestmark = [pytest.mark.timeout(200), pytest.mark.xdist_group("evals-speed")]
MODEL = "toy/one"
BATCH_MS = 40.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack whose batches hold one request and take BATCH_MS."""
    environ = {"SIE_BATCHER_MAX_BATCH_REQUESTS": "1"}
    plan = Plan((MODEL,), workers=(Device(batch_ms=BATCH_MS),), environ=environ)
    with Stack(tmp_path_factory.mktemp("speed"), plan) as running:
        yield running


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("texts") / "words.txt"
    file.write_text("\n".join(f"text {number}" for number in range(100)))
    return f"texts/{file}"


def argv(stack: Stack, folder: Path, texts: str, *more: str) -> list[str]:
    where = ("--url", stack.urls[0], "--results", str(folder))
    return [sys.executable, "-m", "sie_cli", "eval", MODEL, "-t", texts, "--type", "perf", "--json", *where, *more]


def measured(argv: list[str], status: int = 0) -> dict[str, Any]:
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert ran.returncode == status, ran.stdout + ran.stderr
    report: dict[str, Any] = json.loads(ran.stdout)
    return report


def test_throughput_is_that_of_the_device(stack: Stack, texts: str, tmp_path: Path) -> None:
    result = measured(argv(stack, tmp_path, texts, "--clients", "4", "--seconds", "5"))
    (row,) = result["rows"]
    assert row["errors"] == {}
    assert 0.3 <= row["scores"]["items_per_s"] * BATCH_MS / 1000 <= 1.03
    # four clients always have a request under way: throughput and latency agree on a busy machine too;
    # the bounds allow that it stands still for two of the five seconds
    assert 0.4 <= row["scores"]["items_per_s"] * row["scores"]["p50_ms"] / 4000 <= 1.3
    assert row["scores"]["p50_ms"] >= BATCH_MS
    assert row["stages_ms"]["inference"] == pytest.approx(BATCH_MS, rel=0.25)
