"""`sie eval` against a cluster: the figures of the public library, every source, and a model that got worse."""

from __future__ import annotations

import json
import math
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
from image_files import picture
from zygote import Forked

from sie_cli.main import main
from sie_client import SIEClient
from sie_evals import labelled_tasks, tasks

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


@pytest.mark.long
def test_stsb_and_its_retrieval_are_as_good_as_those_of_the_library(open_cluster: Cluster) -> None:
    for task, metric, bound in (("stsb", "spearman", 1e-4), ("stsb-retrieval", "ndcg@10", 0.0)):
        report = figures(MODEL, "-t", task, "-s", "sie,st,targets", "--url", open_cluster.url)
        assert report["missed"] == []
        by_source = scores(report)
        assert by_source["sie"][metric] == pytest.approx(by_source["st"][metric], abs=bound)
        assert task != "stsb" or by_source["sie"][metric] == pytest.approx(0.820, abs=0.001)


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


def test_a_redaction_by_a_model_leaks_no_more_than_the_patterns_alone(
    open_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has random weights: it replaces more, never less."""
    monkeypatch.setattr(labelled_tasks, "VALUES_PER_FORMAT", 1)
    report = figures("test/gliner", "-t", "redaction-forms", "-s", "sie,patterns", "--url", open_cluster.url)
    by_source = scores(report)
    leaks = {name: own["leak"] for name, own in by_source.items() if name.startswith("sie, ")}
    assert len(leaks) == 65
    for name, leak in leaks.items():
        assert leak <= by_source[name.replace("sie, ", "patterns, ")]["leak"], name
    assert by_source["sie"]["recall"] > by_source["patterns"]["recall"]
    monkeypatch.setattr(labelled_tasks, "STORIES", 5)
    process = evaluated("test/gliner", "-t", "relations", "--url", open_cluster.url)
    assert "sie, owns (" in process.stdout


def test_images_are_found_by_texts(open_cluster: Cluster, tmp_path: Path) -> None:
    """The model has random weights: the order of the images is that of its vectors."""
    folder = tmp_path / "pictures"
    (folder / "qrels").mkdir(parents=True)
    for number in range(8):
        picture(seed=number).save(folder / f"{number}.png")
    lines = [json.dumps({"_id": str(number), "image": f"{number}.png"}) for number in range(8)]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    (folder / "queries.jsonl").write_text('{"_id": "q", "text": "a picture"}')
    (folder / "qrels" / "test.tsv").write_text("q\t3\t1\n")
    where = ("--url", open_cluster.url)
    report = figures("test/clip", "-t", str(folder), "--outputs", "float16", *where)
    with SIEClient(open_cluster.url) as client:
        images = [{"images": [(folder / f"{number}.png").read_bytes()]} for number in range(8)]
        query, *vectors = (result["dense"] for result in client.encode("test/clip", ["a picture", *images]))
    rank = sum(query @ vector >= query @ vectors[3] for vector in vectors)
    assert scores(report)["sie"]["ndcg@10"] == pytest.approx(1 / math.log2(1 + rank), abs=1e-6)
    assert scores(report)["sie, float16"] == scores(report)["sie"]
    assert "takes text" in evaluated("test/dense", "-t", str(folder), *where, status=1).stderr
    perf = figures("test/clip", "-t", str(folder), "--type", "perf", "--clients", "2", "--seconds", "1", *where)
    assert perf["rows"][0]["errors"] == {}
    source = f"infinity:{open_cluster.url}/v1"
    stderr = evaluated("test/clip", "-t", str(folder), "-s", source, *where, status=1).stderr
    assert "accepts only texts, and the task has images" in stderr
    fast = ("--type", "perf", "--seconds", "1", *where)
    stderr = evaluated("test/clip", "-t", str(folder), "-s", source, *fast, status=1).stderr
    assert stderr.startswith("Error: infinity:")
    assert "st accepts only texts" in evaluated(MODEL, "-t", str(folder), "-s", "st", *where, status=1).stderr


def test_what_each_output_costs_is_one_table(open_cluster: Cluster, small: Path, tmp_path: Path) -> None:
    """The model has all outputs; random weights show nothing of their quality."""
    outputs = ["float16", "int8", "binary", "binary+rescore", "dims=16", "sparse", "multivector", "muvera"]
    page = tmp_path / "report.html"
    where = ("--url", open_cluster.url, "--html", str(page))
    report = figures("test/m3", "-t", str(small), "--outputs", ",".join(outputs), "--rerank", "test/cross", *where)
    assert [row["source"] for row in report["rows"]] == [
        "sie",
        *(f"sie, {output}" for output in outputs),
        "sie, test/cross",
    ]
    sizes = {row["source"]: row["bytes_per_item"] for row in report["rows"]}
    width = sizes["sie"] / 4
    assert (sizes["sie, float16"], sizes["sie, int8"], sizes["sie, binary"]) == (2 * width, width, width / 8)
    assert (sizes["sie, binary+rescore"], sizes["sie, dims=16"]) == (width / 8, 64)
    assert sizes["sie, multivector"] > sizes["sie"]
    assert sizes["sie, muvera"] == 4 * 10_240
    by_source = scores(report)
    assert by_source["sie, float16"] == pytest.approx(by_source["sie"], abs=0.05)
    assert "<svg" in page.read_text()


@pytest.mark.long
def test_a_bit_for_each_value_and_rescoring_lose_less_than_the_guide_says(open_cluster: Cluster) -> None:
    report = figures(MODEL, "-t", "stsb-retrieval", "--outputs", "int8,binary+rescore", "--url", open_cluster.url)
    by_source = scores(report)
    whole = by_source["sie"]["ndcg@10"]
    assert whole - by_source["sie, int8"]["ndcg@10"] < 0.005
    assert whole - by_source["sie, binary+rescore"]["ndcg@10"] < 0.01


def test_results_are_stored_and_what_changed_is_explained(open_cluster: Cluster, small: Path, tmp_path: Path) -> None:
    where = ("-t", str(small), "--url", open_cluster.url, "--results", str(tmp_path))
    assert "no earlier result is stored" in evaluated("test/dense", *where, "-s", "sie,targets", status=1).stderr
    evaluated("test/dense", *where)
    again = evaluated("test/dense", *where, "-s", "sie,targets")
    assert "targets are the values measured at" in again.stdout
    listed = sie("eval", "list", "--results", str(tmp_path)).output
    files = [line.split()[-1] for line in listed.splitlines()[1:]]
    assert len(files) == 2
    assert "ndcg@10" in sie("eval", "compare", *files).output
    both = evaluated("test/dense", MODEL, *where).stdout
    assert [f"{model} on small, quality" in both for model in ("test/dense", MODEL)] == [True, True]
    assert f"model: test/dense -> {MODEL}" in both
    assert "of resamples)" in both
    assert (
        "is no result of `sie eval`" in sie("eval", "compare", files[0], str(small / "corpus.jsonl"), status=1).output
    )


def test_what_cannot_be_measured_is_told(open_cluster: Cluster, small: Path) -> None:
    where = ("--url", open_cluster.url)
    assert "there is no task no/such" in evaluated(MODEL, "-t", "no/such", *where, status=1).stderr
    assert "no model named 'no/such'" in evaluated("no/such", "-t", str(small), *where, status=1).stderr
    nobody = evaluated(MODEL, "-t", str(small), "--url", "http://127.0.0.1:1", status=1).stderr
    assert "no gateway answers at http://127.0.0.1:1" in nobody
    server = evaluated(MODEL, "-t", str(small), "-s", "tei:http://127.0.0.1:1", status=1).stderr
    assert "tei:http://127.0.0.1:1 does not answer" in server
    texts = evaluated(MODEL, "-t", f"texts/{small}/corpus.jsonl", *where, status=1).stderr
    assert texts == "Error: the texts of corpus.jsonl have no judgements: use --type perf, which measures speed\n"
    nowhere = evaluated(MODEL, "-t", str(small), "--results", "/proc/nothing", *where, status=1).stderr
    assert nowhere == "Error: /proc/nothing: No such file or directory: name a writable folder with --results\n"
    kind = evaluated("test/gliner", "-t", str(small), *where, status=1).stderr
    assert "test/gliner has neither vectors nor scores" in kind
    for wrong in (("--rerank", MODEL), ("-t", "stsb", "--rerank", "test/cross")):
        assert "--rerank" in evaluated("test/dense", "-t", str(small), *wrong, *where, status=1).stderr
    scored = evaluated("test/cross", "-t", str(small), "--outputs", "int8", *where, status=1).stderr
    assert scored == "Error: --outputs: the model returns scores; only a model that returns vectors has other outputs\n"
    stderr = evaluated("test/dense", "-t", str(small), "--outputs", "sparse", *where, status=1).stderr
    assert "params.output_types: test/dense has no such output, it has dense" in stderr
    for message in (nobody, server, kind, stderr):
        assert "Traceback" not in message


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
