"""`sie eval`: tasks from files, metrics, targets, and requests to servers of other vendors."""

from __future__ import annotations

import json
import math
import resource
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
from click.testing import CliRunner
from scipy.stats import spearmanr

from sie_cli.bodies import MAX_ANSWER_BYTES
from sie_cli.main import main
from sie_cli.refusal import CommandRefused
from sie_evals import evaluation, opened, outputs, quality, report, results, steps, targets, tasks
from sie_evals.evaluation import EvalOutcome
from sie_evals.load import LoadFailure, LoadRequest, Send
from sie_evals.outputs import DENSE, VectorOutput
from sie_evals.quality import Measurement
from sie_evals.sources import BATCH, DIALECTS, ServerSource
from sie_evals.steps import EvalStep, EvalWork, ResultCache
from sie_evals.targets import ScoreTarget
from sie_evals.tasks import Retrieval, Similarity


class Table:
    """A source that knows the vector of each text, or the score of each document."""

    is_here, main = True, DENSE
    tokens = 0

    def __init__(
        self, rows: dict[str, Sequence[float]], *, scores_pairs: bool = False, identity: Sequence[str] = ()
    ) -> None:
        self.name, self.scores_pairs, self._rows = "table", scores_pairs, rows
        self.identity = identity
        self.asked = 0
        self.fails_after: int | None = None

    def sender(self) -> AbstractAsyncContextManager[Send]:
        raise NotImplementedError

    def vectors(self, texts: Sequence[str], output: VectorOutput, *, is_query: bool) -> Sequence[Any]:
        if self.fails_after is not None and self.asked >= self.fails_after:
            raise KeyboardInterrupt
        self.asked += len(texts)
        rows = np.array([self._rows[text] for text in texts], np.float32)
        dtype = (output.queries if is_query else output.documents)["output_dtype"]
        if dtype == "float16":
            return list(rows.astype(np.float16))
        if dtype == "int8":
            return list(np.round(rows / abs(rows).max(axis=1, keepdims=True) * 127).astype(np.int8))
        return list(np.packbits(rows > 0, axis=1).view(np.int8) if dtype == "binary" else rows)

    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        return [float(np.dot(self._rows[query], self._rows[document])) for document in documents]


def measured(task: Similarity | Retrieval, source: Table, output: VectorOutput = DENSE, **more: Any) -> Measurement:
    return quality.measure(
        task, EvalStep(source, output, **more), EvalWork(ResultCache(Path("/nowhere")), lambda done: None)
    )


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
    task_folder = folder(tmp_path / "fruits")
    expected = Retrieval("fruits", {"a": "An apple", "b": "bread"}, {"1": "fruit"}, {"1": {"a": 2, "b": 0}})
    assert tasks.find(str(task_folder)) == tasks.find(f"beir/{task_folder}") == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"corpus": '{"_id": "a", "text": "x"}\n{"_id": "a", "text": "y"}\n'}, "corpus.jsonl, line 2: the _id 'a'"),
        ({"corpus": '{"_id": "a"}\n'}, 'corpus.jsonl, line 1: expected {"_id": "...", "text": "..."}'),
        ({"corpus": "[]\n"}, "corpus.jsonl, line 1: Expected `object`, got `array`: expected"),
        ({"corpus": '{"_id": "a", "image": "no.png"}\n'}, "corpus.jsonl, line 1: there is no file"),
        ({"corpus": '{"_id": "a", "text": "x", "image": "no.png"}\n'}, "corpus.jsonl, line 1: expected"),
        ({"queries": "{\n"}, "queries.jsonl, line 1: "),
        ({"qrels": "1\tx\t1\n"}, "test.tsv, line 1: corpus.jsonl has no document 'x'"),
        ({"qrels": "1 a 1\n"}, "test.tsv, line 1: expected a query, a document and a whole number"),
        ({"qrels": "1\ta\t0\n"}, "no query of queries.jsonl has a relevant document"),
        ({"qrels": "1\ta\tmuch\n"}, "test.tsv, line 1: expected"),
        ({"qrels": "1\ta\t\u00b2\n"}, "test.tsv, line 1: expected"),
        ({"qrels": f"1\ta\t{'9' * 5000}\n"}, "test.tsv, line 1: expected"),
        ({"corpus": '{"_id": "a", "x": ' + "[" * 100_000 + "\n"}, "corpus.jsonl, line 1: maximum recursion depth"),
        ({"corpus": '{"_id": "a", "image": "/etc/hostname"}\n'}, "hostname is outside of the folder of the task"),
        ({"corpus": '{"_id": "a", "image": "../../x.png"}\n'}, "x.png is outside of the folder of the task"),
    ],
)
def test_what_is_wrong_in_a_folder_is_told_with_its_line(tmp_path: Path, changed: dict[str, str], message: str) -> None:
    with pytest.raises(CommandRefused) as refused:
        tasks.find(str(folder(tmp_path / "wrong", **changed)))
    assert message in str(refused.value)


def test_the_metrics_of_a_ranking_are_those_of_their_definitions() -> None:
    rng = np.random.default_rng(1)
    documents = {f"d{number}": f"document {number}" for number in range(40)}
    queries = {f"q{number}": f"query {number}" for number in range(6)}
    qrels = {query: {f"d{number}": int(rng.integers(1, 4)) for number in rng.choice(40, 5, False)} for query in queries}
    rows = {text: rng.normal(size=8).tolist() for text in (*documents.values(), *queries.values())}
    task = Retrieval("random", documents, queries, qrels)
    measurement = measured(task, Table(rows))
    for place, (query, text) in enumerate(queries.items()):
        asking = np.array(rows[text]) / np.linalg.norm(rows[text])
        cosine = {key: float(asking @ rows[own] / np.linalg.norm(rows[own])) for key, own in documents.items()}
        ranked = sorted(cosine, key=lambda key: -cosine[key])
        gains = [qrels[query].get(key, 0) for key in ranked]
        ideal = sorted(qrels[query].values(), reverse=True)
        dcg, best = (
            sum(g / np.log2(rank + 2) for rank, g in enumerate(relevances[:10])) for relevances in (gains, ideal)
        )
        hits = [rank for rank, gain in enumerate(gains) if gain]
        assert measurement.values["ndcg@10"][place] == pytest.approx(dcg / best)
        assert measurement.values["map"][place] == pytest.approx(
            sum((number + 1) / (rank + 1) for number, rank in enumerate(hits)) / 5
        )
        assert measurement.values["recall@10"][place] == pytest.approx(sum(rank < 10 for rank in hits) / 5)


@pytest.mark.parametrize("scores_pairs", [False, True])
def test_a_similarity_is_measured_by_ranks(scores_pairs: bool) -> None:
    rng = np.random.default_rng(2)
    texts = [f"text {number}" for number in range(20)]
    rows = {text: (row / np.linalg.norm(row)).tolist() for text in texts for row in [rng.normal(size=4)]}
    task = Similarity("pairs", texts[:10], texts[10:], rng.random(10).tolist())
    measurement = measured(task, Table(rows, scores_pairs=scores_pairs))
    alike = [np.dot(rows[a], rows[b]) for a, b in zip(task.left, task.right, strict=True)]
    assert measurement.scores["spearman"] == pytest.approx(spearmanr(alike, task.gold).statistic)


def test_a_difference_has_an_interval_that_tells_noise_from_a_loss() -> None:
    rng = np.random.default_rng(3)
    good = rng.random(300)
    baseline = Measurement("one", {"map": good.tolist()})
    same = Measurement("same", {"map": (good + rng.normal(0, 0.05, 300)).tolist()})
    worse = Measurement("worse", {"map": (good - 0.1 + rng.normal(0, 0.05, 300)).tolist()})
    near = quality.difference(baseline, same, "map")
    assert near.interval is not None
    assert near.interval[0] < 0 < near.interval[1]
    far = quality.difference(baseline, worse, "map")
    assert far.interval is not None
    assert 0.08 < far.interval[0] < far.value < far.interval[1] < 0.12
    assert quality.difference(baseline, worse, "map") == far


def test_a_metric_that_is_worse_than_its_target_is_missed(tmp_path: Path) -> None:
    file = tmp_path / "targets.yaml"
    reached = {"ndcg@10": 0.6, "map": 0.4}
    targets.save(file, "a/b", {"mine": targets.expected(reached, is_speed=False)})
    targets.save(file, "a/b", {"other": {"map": ScoreTarget(0.1)}})
    score_targets = targets.load(file, "a/b", "mine")
    assert score_targets == {"ndcg@10": ScoreTarget(0.6), "map": ScoreTarget(0.4)}
    assert targets.missed(score_targets, reached, "sie") == []
    assert targets.missed(score_targets, {"ndcg@10": 0.596, "map": 0.394}, "sie") == [
        "target missed: sie, map: 0.394 is worse than 0.4, with a tolerance of 0.005"
    ]
    assert targets.missed({"map": ScoreTarget(0.1)}, {"spearman": 0.0}, "sie") == [
        "target missed: sie, map: not measured; the metrics are spearman"
    ]
    assert targets.missed({"spearman": ScoreTarget(0.1)}, {"spearman": math.nan}, "sie")
    assert targets.load(file, "a/c", "mine") == targets.load(file, "a/b", "nothing") == {}


def test_targets_and_results_that_the_disk_has_no_room_for_leave_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "targets.yaml"
    targets.save(file, "a/b", {"mine": {"map": ScoreTarget(0.1)}})
    before = file.read_bytes()
    result = report.of_quality("a/b", "mine", "", [Measurement("sie", {"map": [0.5]})], {}, [], {"q": "text"})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before), hard))
    try:
        with pytest.raises(CommandRefused, match=r"targets\.yaml"):
            targets.save(file, "a/b", {"other": {"map": ScoreTarget(0.1)}})
        with pytest.raises(CommandRefused, match="the result was not stored"):
            results.store(tmp_path / "results", result, results.about({}, "cpu"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == before
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]


def test_less_milliseconds_are_better_and_a_ratio_is_of_the_same_run() -> None:
    scores = targets.of_speed({"sie": {"items_per_s": 300.0, "p99_ms": 10.0}, "st": {"items_per_s": 100.0}}, "sie")
    assert scores == {"items_per_s": 300.0, "p99_ms": 10.0, "items_per_s/st": 3.0}
    score_targets = targets.expected(scores, is_speed=True)
    assert score_targets["p99_ms"] == ScoreTarget(10.0, 1.0)
    assert targets.missed(score_targets, {**scores, "p99_ms": 5.0, "items_per_s": 900.0}, "sie") == []
    assert len(targets.missed(score_targets, {"items_per_s": 260.0, "p99_ms": 11.5, "items_per_s/st": 2.6}, "sie")) == 3


@pytest.mark.parametrize(
    "text", ["a: 1", "a/b: {t: {map: {value: x}}}", "a/b: {t: {map: {valu: 1}}}", "]", "a/b: !!bool maybe"]
)
def test_a_wrong_file_of_targets_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "targets.yaml"
    file.write_text(text)
    with pytest.raises(CommandRefused, match="expected MODEL: TASK: METRIC"):
        targets.read(file)


def test_each_output_of_a_vector_is_ranked_by_what_an_index_of_it_has() -> None:
    rng = np.random.default_rng(4)
    documents = {f"d{number}": f"document {number}" for number in range(600)}
    rows = {text: rng.normal(size=64).tolist() for text in documents.values()}
    queries = {f"q{number}": f"query {number}" for number in range(20)}
    near = {query: f"d{number}" for number, query in enumerate(queries)}
    rows |= {
        queries[query]: np.add(rows[documents[key]], rng.normal(0, 0.6, 64)).tolist() for query, key in near.items()
    }
    task = Retrieval("made", documents, queries, {query: {key: 1} for query, key in near.items()})
    measurements = {
        name: measured(task, Table(rows), outputs.find(name)) for name in ("dense", "float16", "int8", "binary+rescore")
    }
    assert [metrics.bytes_per_item for metrics in measurements.values()] == [256, 128, 64, 8]
    for measurement in measurements.values():
        assert measurement.scores["ndcg@10"] > 0.95, measurement.source
    assert measured(task, Table(rows), outputs.find("binary")).scores["ndcg@10"] > 0.8
    with pytest.raises(CommandRefused, match="there is no output int4: expected some of dense, float16, int8"):
        outputs.find("int4")
    assert outputs.find("dims=128").documents["dimensions"] == 128


def test_sparse_vectors_and_those_of_tokens_are_compared_by_their_definitions() -> None:
    first = {"indices": np.array([1, 5], np.int32), "values": np.array([1.0, 2.0], np.float32)}
    two = {"indices": np.array([5, 9], np.int32), "values": np.array([3.0, 7.0], np.float32)}
    sparse = outputs.find("sparse")
    assert sparse.similar([first], [first, two]).tolist() == [[5.0, 6.0]]
    assert sparse.size(first) == 16
    tokens = [np.eye(3, dtype=np.float32)[:2], np.eye(3, dtype=np.float32)[1:]]
    assert outputs.find("multivector").similar(tokens[:1], tokens).tolist() == [[2.0, 1.0]]
    assert outputs.find("muvera").similar([[2.0, 0.0]], [[3.0, 1.0]]).tolist() == [[6.0]]  # no cosine


def test_documents_in_chunks_are_ranked_by_their_nearest_chunk() -> None:
    alone, late = outputs.find("chunks=40"), outputs.find("chunks=40+context")
    assert (alone.documents["chunks"], alone.documents["context"]) == ({"max_tokens": 40}, False)
    assert (late.documents["context"], "chunks" in late.queries) == (True, False)
    result = {"chunks": [{"dense": np.array(row, np.float32)} for row in ([1, 0], [0, 2])]}
    document = late.vector(result)
    assert (document.tolist(), late.size(document)) == ([[1, 0], [0, 2]], 16)
    far_document = np.array([[-1, 0]], np.float32)
    assert late.similar([[0, 3], [1, 0]], [document, far_document, document]).tolist() == [[1, 0, 1], [1, -1, 1]]
    with pytest.raises(CommandRefused, match="there is no output chunks=0"):
        outputs.find("chunks=0")


def test_a_first_stage_is_ordered_again_by_a_reranker() -> None:
    documents = {f"d{number}": f"document {number}" for number in range(50)}
    rows = {text: [1.0, -0.01 * number] for number, text in enumerate(documents.values())}
    task = Retrieval("made", documents, {"q": "query"}, {"q": {"d20": 1}})
    dense, against = Table({**rows, "query": [1.0, 0.0]}), Table({**rows, "query": [0.0, -1.0]}, scores_pairs=True)
    alone = measured(task, dense)
    assert alone.values["map"] == [pytest.approx(1 / 21)]
    both = measured(task, dense, reranker=against)
    assert both.source == "table, table"
    assert both.values["map"] == [pytest.approx(1 / (quality.FIRST_STAGE - 20))]


def test_two_evaluations_at_once_store_the_same_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, caches = Path.replace, [ResultCache(tmp_path) for _ in range(2)]

    def replace_after_the_other(file: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        assert caches[1].part(["a"], ["x"], lambda: [1.0]) == [1.0]
        return file.replace(target)

    monkeypatch.setattr(Path, "replace", replace_after_the_other)
    assert caches[0].part(["a"], ["x"], lambda: [1.0]) == [1.0]
    assert len(list(tmp_path.iterdir())) == 1


def test_an_evaluation_that_was_interrupted_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "PART", 10)
    documents = {f"d{number}": f"document {number}" for number in range(35)}
    rows = {text: [1.0, 0.1 * number] for number, text in enumerate([*documents.values(), "query"])}
    task = Retrieval("made", documents, {"q": "query"}, {"q": {"d20": 1}})

    def run(source: Table) -> tuple[Measurement, int]:
        cache = ResultCache(tmp_path)
        with cache.until_done():
            return quality.measure(
                task, EvalStep(source, DENSE), EvalWork(cache, lambda done: None)
            ), cache.reused_texts

    whole = run(Table(rows, identity=["model 1"]))[0]
    assert list(tmp_path.iterdir()) == []

    def failing() -> Table:
        source = Table(rows, identity=["model 1"])
        source.fails_after = 20
        return source

    with pytest.raises(KeyboardInterrupt):
        run(failing())
    again = Table(rows, identity=["model 1"])
    assert run(again) == (whole, 20)
    assert again.asked == 16
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt):
        run(failing())
    second_table = Table(rows, identity=["model 2"])
    assert run(second_table) == (whole, 0)
    assert second_table.asked == 36


def test_what_changed_from_one_result_to_another_is_told(tmp_path: Path) -> None:
    def made(values: list[float], version: str) -> results.StoredReport:
        queries = {f"q{number}": f"text {number}" for number in range(20)}
        quality_report = report.of_quality("a/b", "mine", "", [Measurement("sie", {"map": values})], {}, [], queries)
        about = {**results.about({"fingerprint": version}, "cpu"), "version": version}
        return results.read(results.store(tmp_path, quality_report, about))

    old, new = made([0.5] * 20, "1"), made([0.5] * 19 + [0.1], "2")
    assert results.last(tmp_path, "a/b", "mine", "quality", "cpu") == new
    assert results.last(tmp_path, "a/b", "mine", "quality", "l4") is None
    assert [results.read(file) for file in results.every(tmp_path)] == [old, new]
    table, notes = results.compared(old, new)
    assert table[1][:4] == ["sie", "map", "0.5", "0.48"]
    assert table[1][4].startswith("-0.0200 (-0.0600 to +0.0000")
    assert notes == ["version: 1 -> 2", "fingerprint: 1 -> 2", 'sie, map, fell the most: q19 "text 19" -0.4000']
    new.figures["task"] = "other"
    with pytest.raises(CommandRefused, match="the results have a different task, mine and other"):
        results.compared(old, new)
    with pytest.raises(CommandRefused, match="sie eval list"):
        results.read(tmp_path / "none.json")
    lacking = b'{"time": "1", "about": {}, "figures": {"model": "a/b", "task": "mine"}}'
    for wrong in (b"", b"{}", b'{"time": "\xff"}', b'{"about": {"x": ' + b"[" * 100_000, lacking):
        (tmp_path / "wrong.json").write_bytes(wrong)
        with pytest.raises(CommandRefused, match=r"wrong\.json is no result"):
            results.read(tmp_path / "wrong.json")


def test_a_damaged_result_does_not_hide_the_others(tmp_path: Path) -> None:
    stored = results.store(tmp_path, made_outcome("a/b").report, results.about({}, "cpu"))
    (stored.parent / "9999-damaged.json").write_bytes(b"")
    assert results.last(tmp_path, "a/b", "mine", "quality", "cpu") == results.read(stored)
    ran = CliRunner().invoke(main, ["eval", "list", "--results", str(tmp_path)])
    assert (ran.exit_code, str(stored) in ran.stdout) == (0, True)
    assert "9999-damaged.json is no result" in ran.stderr


def made_outcome(model: str, **about: Any) -> EvalOutcome:
    """An outcome of a measurement of two queries."""
    eval_report = report.of_quality(model, "mine", "2 queries", [Measurement("sie", {"map": [0.5, 1.0]})], {}, [], {})
    return EvalOutcome(eval_report, {**results.about({}, "cpu"), **about}, {})


def stored_models(folder: Path) -> list[str]:
    return [results.read(file).figures["model"] for file in results.every(folder)]


@pytest.mark.parametrize(("end", "status"), [(KeyboardInterrupt(), 130), (CommandRefused("no such model"), 1)])
def test_a_model_that_was_measured_is_stored_if_the_next_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException, status: int
) -> None:
    outcomes = [made_outcome("a/b"), end]
    monkeypatch.setattr(evaluation, "run", Mock(side_effect=outcomes))
    ran = CliRunner().invoke(main, ["eval", "a/b", "c/d", "-t", "mine", "--results", str(tmp_path)])
    assert (ran.exit_code, stored_models(tmp_path)) == (status, ["a/b"])
    if status == 1:
        assert "a/b on mine, quality" in ran.stdout
        assert "no such model" in ran.stderr


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ("foo", "there is no source foo: expected some of sie, st, patterns, targets"),
        ("tei:localhost", "there is no source tei:localhost"),
        ("st:http://x", "there is no source"),
        ("sie,sie", "name each source only once"),
        ("targets", "name a source that is measured"),
        (",", "name a source that is measured"),
    ],
)
def test_a_source_that_nobody_knows_is_refused(sources: str, message: str) -> None:
    with pytest.raises(CommandRefused, match=message):
        opened.names(sources)


@contextmanager
def server(answers: dict[str, Any], status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """Serve the answers by their path, and record the requests."""
    requests: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            requests.append((self.path, body))
            answer = answers[self.path]
            payload = (
                answer
                if isinstance(answer, bytes)
                else json.dumps(answer(body) if callable(answer) else answer).encode()
            )
            self.send_response(status)
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}", requests
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

    with server({"/embeddings": vectors, "/rerank": ranked}) as (url, requests), httpx.Client(base_url=url) as client:
        source = ServerSource("openai", client, DIALECTS["openai"], "a/b", scores_pairs=False)
        texts = [str(number) for number in range(BATCH + 3)]
        assert [row[0] for row in source.vectors(texts, DENSE, is_query=False)] == list(range(BATCH + 3))
        assert source.scores("q", texts) == list(range(BATCH + 3))
        assert [len(body.get("input", body.get("documents"))) for _, body in requests] == [BATCH, 3, BATCH, 3]


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        ({"error": "no such model"}, 404, "POST /embed returned 404: .*no such model"),
        (
            [[1.0]],
            200,
            "does not answer in the format of this kind of server: 2 texts were sent, vectors of the shape .1, 1. were",
        ),
        ({"data": 1}, 200, "does not answer in the format"),
        ([[1.0], [1.0, 2.0]], 200, "does not answer in the format"),
        ([[1.0], [1e39]], 200, "not finite"),
        (b"[[1.0], [NaN]]", 200, "JSON is malformed"),
        (b"[" * 100_000, 200, "does not answer in the format"),
        (b" " * (MAX_ANSWER_BYTES + 1), 200, "its answer has more than 67108864 bytes"),
        ([[1.0], {"a": 1}], 200, "does not answer in the format"),
    ],
)
def test_a_server_that_answers_otherwise_is_told_of(answer: Any, status: int, message: str) -> None:
    with server({"/embed": answer}, status) as (url, _), httpx.Client(base_url=url) as client:
        source = ServerSource("tei:there", client, DIALECTS["tei"], "a/b", scores_pairs=False)
        with pytest.raises(CommandRefused, match=f"tei:there.*{message}"):
            source.vectors(["a", "b"], DENSE, is_query=True)


@pytest.mark.parametrize("body", [[1], b"[" * 100_000, b"{", {"usage": 1}])
async def test_a_load_counts_what_no_such_server_answers_as_failed(body: Any) -> None:
    with server({"/embeddings": body}) as (url, _), httpx.Client(base_url=url) as client:
        async with ServerSource("openai", client, DIALECTS["openai"], "a/b", scores_pairs=False).sender() as send:
            with pytest.raises(LoadFailure) as caught:
                await send(LoadRequest(["a"]))
            assert caught.value.code == "NOT_UNDERSTOOD"
