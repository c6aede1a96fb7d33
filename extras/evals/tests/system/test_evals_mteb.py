"""`sie eval -t mteb/NAME`: the library mteb for real, with datasets of a hub on loopback, and a folder that is used
without a hub.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import shared
from click.testing import CliRunner
from cluster import MODEL, Cluster
from hub_stub import HubStub

from sie_cli.main import main
from sie_evals import tasks

ROWS = 60  # documents
NFCORPUS = ("datasets/mteb/nfcorpus", "ec0fa4fe99da2ff19ca1214b7966684033a58814")
RERANKING = ("datasets/mteb/AskUbuntuDupQuestions", "c5691e3c48741d5f83b5cc8e630653d7a8cfc048")
pytestmark = [
    shared.OPEN,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:The task 'STSBenchmark' is superseded:UserWarning"),  # mteb warns
]


def parquet(**columns: Sequence[Any]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({name: list(values) for name, values in columns.items()}), file)
    return file.getvalue()


def retrieval(**more: bytes) -> dict[str, bytes]:
    """Return a dataset in the format of mteb, made of the shipped pairs."""
    pairs = tasks.stsb()
    numbers = range(ROWS)
    files = {
        "corpus": parquet(id=[f"d{number}" for number in numbers], title=[""] * ROWS, text=pairs.right[:ROWS]),
        "queries": parquet(id=[f"q{number}" for number in numbers], text=pairs.left[:ROWS]),
        "qrels": parquet(
            **{
                "query-id": [f"q{number}" for number in numbers],
                "corpus-id": [f"d{number}" for number in numbers],
                "score": [1] * ROWS,
            }
        ),
        **more,
    }
    configs = [f"- config_name: {name}\n  data_files:\n  - split: test\n    path: {name}.parquet\n" for name in files]
    card = f"---\nconfigs:\n{''.join(configs)}---\n"
    return {"README.md": card.encode(), **{f"{name}.parquet": data for name, data in files.items()}}


@pytest.fixture
def hub() -> Iterator[HubStub]:
    with HubStub().serving() as serving:
        yield serving


@pytest.fixture
def at_hub(hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubStub:
    """Point the libraries of this process to the hub: a new import of them, with its address, takes 8 s."""
    import datasets.config
    from huggingface_hub import constants

    before = constants.ENDPOINT
    for module in (constants, datasets.config):
        for name, value in list(vars(module).items()):
            if isinstance(value, str) and value.startswith(before):
                monkeypatch.setattr(module, name, value.replace(before, hub.url))
            elif name.endswith("_CACHE"):
                monkeypatch.setattr(module, name, str(tmp_path / "hf" / name))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return hub


def figures(*arguments: str) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        ran = CliRunner().invoke(main, ["eval", *arguments, "--json", "--results", folder])
    assert ran.exit_code == 0, ran.output + repr(ran.exception)
    return {row["source"]: row["scores"] for row in json.loads(ran.stdout)["rows"]}


def test_a_retrieval_and_a_reranking_of_the_library_run(open_cluster: Cluster, at_hub: HubStub) -> None:
    where = ("--url", open_cluster.url)
    at_hub.repositories[NFCORPUS[0]], at_hub.commit = retrieval(), NFCORPUS[1]
    by_source = figures(MODEL, "-t", "mteb/NFCorpus", "-s", "sie,st", *where)
    assert next(iter(by_source["sie"])) == "ndcg_at_10"
    assert by_source["sie"] == pytest.approx(by_source["st"], abs=1e-3)
    numbers = [f"q{number}" for number in range(ROWS)]
    ranked = [[f"d{(number + step) % ROWS}" for step in range(10)] for number in range(ROWS)]
    top = parquet(**{"query-id": numbers, "corpus-ids": ranked})
    at_hub.repositories[RERANKING[0]], at_hub.commit = retrieval(top_ranked=top), RERANKING[1]
    vectors = figures(MODEL, "-t", "mteb/AskUbuntuDupQuestions", *where)["sie"]
    scores = figures("test/cross", "-t", "mteb/AskUbuntuDupQuestions", *where)["sie"]
    main = next(iter(vectors))
    assert next(iter(scores)) == main
    assert vectors[main] > scores[main] > 0  # the weights of test/cross are random
