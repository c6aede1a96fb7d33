"""`sie eval` against a cluster: the figures of the public library, every source, and a model that got worse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import psutil
import pytest
import shared
from click.testing import CliRunner, Result
from cluster import MODEL, SIE, Cluster
from zygote import Forked

from sie_cli.main import main
from sie_evals import tasks

pytestmark = [shared.OPEN, pytest.mark.timeout(400)]


def sie(*arguments: str, status: int = 0) -> Result:
    """Run a command in this process, which has imported the libraries already: a process of its own would take 10 s for
    that.
    """
    ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code == status, ran.output + repr(ran.exception)
    return ran


def evaluated(*arguments: str, status: int = 0) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        named = () if "--results" in arguments else ("--results", folder)
        return sie("eval", *arguments, *named, status=status)


def figures(*arguments: str, status: int = 0) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(evaluated(*arguments, "--json", status=status).stdout)
    return report


def scores(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the scores of each source."""
    return {row["source"]: row["scores"] for row in report["rows"]}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of the shipped task in the format of BEIR."""
    whole = tasks.stsb_retrieval()
    folder = tmp_path_factory.mktemp("task") / "small"
    (folder / "qrels").mkdir(parents=True)
    chosen = list(whole.queries)[:40]
    keys = [*{key for query in chosen for key in whole.qrels[query]}, *list(whole.corpus)[:80]]
    lines = [json.dumps({"_id": key, "text": whole.corpus[key]}) for key in dict.fromkeys(keys)]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    (folder / "queries.jsonl").write_text(
        "\n".join(json.dumps({"_id": query, "text": whole.queries[query]}) for query in chosen)
    )
    judged = [f"{query}\t{key}\t1" for query in chosen for key in whole.qrels[query]]
    (folder / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged]))
    return folder


@pytest.mark.parametrize(
    ("model", "templates"),
    [(MODEL, ("st", "sie:{url}", "openai:{url}/v1", "infinity:{url}/v1")), ("test/dense", ("tei:{url}",))],
)
def test_every_source_of_one_model_gives_one_quality(
    open_cluster: Cluster, small: Path, tmp_path: Path, model: str, templates: tuple[str, ...]
) -> None:
    url, page = open_cluster.url, tmp_path / "report.md"
    sources = ["sie", *(template.format(url=url) for template in templates)]
    report = figures(model, "-t", str(small), "-s", ",".join(sources), "--url", url, "--markdown", str(page))
    by_source = scores(report)
    assert list(by_source) == sources
    assert model != MODEL or by_source["sie"]["ndcg@10"] > 0.9
    for source, own in by_source.items():
        assert own == pytest.approx(by_source["sie"], abs=1e-6), source
    for difference in report["differences"]:
        assert difference["low"] <= difference["value"] <= difference["high"]
        assert difference["high"] - difference["low"] < 1e-6
    assert f"| {sources[-1]} |" in page.read_text()


def test_a_model_that_is_worse_misses_the_targets_that_were_saved(
    open_cluster: Cluster, small: Path, tmp_path: Path
) -> None:
    file = tmp_path / "targets.yaml"
    arguments = ("--url", open_cluster.url, "-t", str(small), "-s", "sie,targets", "--targets", str(file))
    file.write_text("{}")
    assert f"has no targets of {MODEL} for small" in evaluated(MODEL, *arguments, status=1).stderr
    evaluated(MODEL, "--url", open_cluster.url, "-t", str(small), "--save-targets", str(file))
    evaluated(MODEL, *arguments)
    file.write_text(file.read_text().replace(MODEL, "test/dense"))  # the weights of test/dense are random
    assert "target missed: sie, ndcg@10: " in evaluated("test/dense", *arguments, status=1).stdout


def test_a_reranker_is_measured_by_its_scores(open_cluster: Cluster, small: Path) -> None:
    sources = f"sie,infinity:{open_cluster.url}/v1"
    report = figures("test/cross", "-t", str(small), "-s", sources, "--url", open_cluster.url)
    first, second = scores(report).values()
    assert first == pytest.approx(second, abs=1e-6)


class ForkedServe(Forked):
    """The `sie serve` that an evaluation starts, forked from a process that has its imports."""

    def __init__(self, argv: list[str], stdout: IO[str], stderr: IO[str]) -> None:
        assert argv[1:4] == ["-m", "sie_cli", "serve"]
        with open(os.devnull, "rb") as devnull:
            self._start("engine", [SIE, *argv[3:]], os.environ, (devnull.fileno(), stdout.fileno(), stderr.fileno()))

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def test_without_a_cluster_one_is_started_and_ended(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forking = SimpleNamespace(Popen=ForkedServe, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("sie_evals.opened.subprocess", forking)
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)  # the cluster makes its folder there
        ran = evaluated(MODEL, "-t", str(small))
        assert "no cluster is named and none runs: starting one" in ran.stderr
        assert "ndcg@10" in ran.stdout
        data = f"{folder}/sie-eval-"
        assert not [
            process for process in psutil.process_iter(["cmdline"]) if data in " ".join(process.info["cmdline"] or [])
        ]
