"""`sie serve --standalone`: each verb answers without a broker as with one. Only the transport differs: in a long run
the files that ask a cluster all else also ask a standalone server.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import shared
from click.testing import CliRunner
from cluster import MODEL, Cluster, running
from local_models import M3_OUTPUTS, LocalModels

from sie_cli.main import main

pytestmark = shared.OPEN
TEXTS = ["river search queue", "the winter garden (of music)", "Zürich, 東京 and 😀", "kernel"]
VERBS: dict[str, tuple[str, dict[str, Any]]] = {
    "encode": ("m3", {"items": [TEXTS[0], {"id": "x"}, TEXTS[1]], "params": {"output_types": M3_OUTPUTS}}),
    "score": ("cross", {"query": TEXTS[0], "items": TEXTS}),
    "extract": ("zero-shot", {"items": TEXTS, "labels": ["music", "river"]}),
}
OF_A_RUN = {"timing"}


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory, every_family: LocalModels) -> Iterator[Cluster]:
    arguments = ["--standalone", "--no-spare", "--models-dir", str(every_family.folder)]
    with running(tmp_path_factory.mktemp("standalone"), *arguments) as cluster:
        yield cluster


def same(left: Any, right: Any) -> bool:
    """Return whether values are equal except for the last bits of numbers: each process chooses its kernels."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left.keys() - OF_A_RUN)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == pytest.approx(right, abs=1e-5)) if isinstance(left, float) else bool(left == right)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_answers_as_with_a_broker(standalone: Cluster, open_cluster: Cluster, verb: str) -> None:
    model, body = VERBS[verb]
    alone, together = (
        httpx.post(f"{cluster.url}/v1/{verb}/test/{model}", json=body, timeout=60)
        for cluster in (standalone, open_cluster)
    )
    assert alone.status_code == together.status_code == 200, alone.text
    assert same(alone.json(), together.json()), (alone.text, together.text)
    for name in ("x-sie-model", "x-sie-fingerprint", "x-sie-failed-items"):
        assert alone.headers.get(name) == together.headers.get(name), name


def test_what_it_has_is_told_by_the_gateway(standalone: Cluster) -> None:
    listed = CliRunner().invoke(main, ["models", "list", "--data-dir", str(standalone.data_dir)])
    assert listed.exit_code == 0, listed.output
    assert any({MODEL, "encode", "default"} <= set(line.split()) for line in listed.stdout.splitlines())
    assert listed.stderr == f"models of {standalone.url}\n"
    health = httpx.get(f"{standalone.url}/health", timeout=10).json()
    assert (health["status"], health["nats_url"], health["nats_monitor_url"]) == ("healthy", None, None)
