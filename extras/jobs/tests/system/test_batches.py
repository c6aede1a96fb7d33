"""Batches of the unmodified OpenAI client at a real `sie serve`: every request is answered once, as a direct call
answers it; the states and ends of a batch; owners.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import local_models
import numpy as np
import openai
import pytest
from cluster import Cluster, running, until
from openai.types import Batch
from openai_client import client_of

from sie_bulk_jobs.gateway.envelope import SHARD_LINES

ADMIN, ONE, OTHER = (f"batch-token-{secrets.token_urlsafe(12)}" for _ in range(3))
ENDED = {"completed", "failed", "cancelled", "expired"}
EMBEDDINGS = "/v1/embeddings"
DENSE = "test/dense"
HELD_LINES = 4000  # more than a worker answers before its adapter is paused


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of two gateways, with small models that compute in float32."""
    models = local_models.under(tmp_path_factory.mktemp("models"))
    for name in ("dense", "cross", "gliner"):
        models.build(name)
    environ = {"SIE_AUTH_MODE": "static", "SIE_ADMIN_TOKEN": ADMIN, "SIE_AUTH_TOKENS": f"{ONE},{OTHER}"}
    arguments = [*models.arguments, "--no-spare"]
    with running(tmp_path_factory.mktemp("batches"), *arguments, environ=environ, gateways=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def frail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose processes are paused and killed, with keys that can be revoked."""
    models = local_models.under(tmp_path_factory.mktemp("frail-models"))
    models.build("dense")
    environ = {"SIE_AUTH_MODE": "token", "SIE_ADMIN_TOKEN": ADMIN, "SIE_AUTH_TOKENS": ONE}
    arguments = [*models.arguments, "--no-spare", "--preload", DENSE]
    with running(tmp_path_factory.mktemp("frail"), *arguments, environ=environ, gateways=2) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with client_of(cluster, ONE) as client:
        yield client


@pytest.fixture
def frail_client(frail: Cluster) -> Iterator[openai.OpenAI]:
    with client_of(frail, ONE) as client:
        yield client


def request(id_: object, body: Mapping[str, Any], url: str = EMBEDDINGS, **change: object) -> bytes:
    return json.dumps({"custom_id": id_, "method": "POST", "url": url, "body": body, **change}).encode()


def embeddings(count: int) -> list[bytes]:
    return [request(f"r{number}", {"model": DENSE, "input": text(number)}) for number in range(count)]


def text(number: int) -> str:
    return f"line {number} of {('bread', 'rivers', 'a long letter about the weather of last year')[number % 3]}"


def submitted(client: openai.OpenAI, lines: Sequence[bytes], endpoint: str = EMBEDDINGS, **more: Any) -> Batch:
    file = client.files.create(file=("requests.jsonl", b"\n".join(lines) + b"\n"), purpose="batch")
    options = {"completion_window": "24h", **more}
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, **options)  # type: ignore[arg-type]


def ended(cluster: Cluster, client: openai.OpenAI, batch: Batch, timeout_s: float = 120) -> list[Batch]:
    """Return the snapshots of a batch until its end."""
    snapshots = [batch]

    def look() -> bool:
        snapshots.append(client.batches.retrieve(batch.id))
        return snapshots[-1].status in ENDED

    until(look, timeout_s, "the batch ends", lambda: (snapshots[-1], cluster.log()))
    return snapshots


def counts(batch: Batch) -> tuple[int, int, int]:
    assert batch.request_counts is not None
    return batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed


def states(snapshots: Sequence[Batch]) -> list[str]:
    return [
        batch.status
        for place, batch in enumerate(snapshots)
        if not place or snapshots[place - 1].status != batch.status
    ]


def read(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()] if file_id else []


def ids(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [row["custom_id"] for row in rows]


def asked_directly(cluster: Cluster, path: str, body: Mapping[str, Any]) -> httpx.Response:
    headers = {"authorization": f"Bearer {ONE}"}
    return httpx.post(f"{cluster.url}{path}", json=body, headers=headers, timeout=60)


# answers


def check_batch_of(cluster: Cluster, client: openai.OpenAI, count: int, timeout_s: float) -> None:
    """Upload, submit, poll and download. Each answer stands where its request was and equals that of a direct call."""
    expiry = {"anchor": "created_at", "seconds": 86_400}
    new_batch = submitted(client, embeddings(count), metadata={"run": "nightly"}, output_expires_after=expiry)
    assert (new_batch.object, new_batch.status, new_batch.endpoint, new_batch.completion_window) == (
        "batch",
        "validating",
        EMBEDDINGS,
        "24h",
    )
    assert (counts(new_batch), new_batch.metadata, new_batch.in_progress_at) == ((0, 0, 0), {"run": "nightly"}, None)
    assert new_batch.expires_at == new_batch.created_at + 86_400
    snapshots = ended(cluster, client, new_batch, timeout_s)
    last = snapshots[-1]
    order = ["validating", "in_progress", "finalizing", "completed"]
    assert [state for state in order if state in states(snapshots)] == states(snapshots), "none comes again"
    assert (last.status, counts(last)) == ("completed", (count, count, 0))
    every = [counts(batch) for batch in snapshots]
    assert every == sorted(every)
    assert all(completed + failed <= (total or 0) for total, completed, failed in every)
    times = [last.created_at, last.in_progress_at, last.finalizing_at, last.completed_at]
    assert times == sorted(times, key=lambda at: at or 0)
    assert (last.failed_at, last.expired_at, last.cancelled_at, last.errors, last.error_file_id) == (None,) * 5
    assert last.metadata == {"run": "nightly"}
    rows = read(client, last.output_file_id)
    assert ids(rows) == [f"r{number}" for number in range(count)]
    assert len({row["id"] for row in rows}) == len({row["response"]["request_id"] for row in rows}) == count
    assert {(row["response"]["status_code"], row["error"]) for row in rows} == {(200, None)}
    sample = sorted({0, 1, SHARD_LINES - 1, SHARD_LINES, count // 2, count - 1})
    direct = client.embeddings.create(model=DENSE, input=[text(number) for number in sample], encoding_format="float")
    for number, embedding in zip(sample, direct.data, strict=True):
        body = rows[number]["response"]["body"]
        assert np.abs(np.array(body["data"][0]["embedding"]) - np.array(embedding.embedding)).max() <= 1e-5
        assert body["usage"]["total_tokens"] > 0
    file = client.files.retrieve(str(last.output_file_id))
    assert (file.purpose, file.filename) == ("batch_output", f"{last.id}_output.jsonl")
    assert file.expires_at == file.created_at + 86_400
    assert last.usage is not None
    assert last.usage.total_tokens == sum(row["response"]["body"]["usage"]["total_tokens"] for row in rows)


@pytest.mark.timeout(300)
def test_every_request_is_answered_as_a_direct_call_answers_it(cluster: Cluster, client: openai.OpenAI) -> None:
    check_batch_of(cluster, client, 2000, 180)


def test_what_is_wrong_with_a_line_is_in_the_error_file_and_the_others_are_answered(
    cluster: Cluster, client: openai.OpenAI
) -> None:
    wrong = {"model": "no/such-model", "input": "a"}
    lines = embeddings(2)
    lines[1:1] = [b"{no json", b"", request(None, wrong), lines[0], request("model", wrong)]
    last = ended(cluster, client, submitted(client, lines))[-1]
    assert (last.status, counts(last)) == ("completed", (6, 2, 4))
    assert ids(read(client, last.output_file_id)) == ["r0", "r1"]
    *never, refused = read(client, last.error_file_id)
    assert [(row["custom_id"], row["error"]["code"], row["response"]) for row in never] == [
        (None, "invalid_json_line", None),
        (None, "missing_required_parameter", None),
        ("r0", "duplicate_custom_id", None),
    ]
    direct = asked_directly(cluster, EMBEDDINGS, wrong)
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("model", direct.status_code)
    assert refused["response"]["body"]["error"]["code"] == direct.json()["error"]["code"]


@pytest.mark.parametrize(
    ("endpoint", "url", "body"),
    [
        ("/v1/encode", "/v1/encode", {"model": DENSE, "items": [{"id": "i", "text": "a"}, {"text": "b"}]}),
        (
            "/v1/score",
            "/v1/score",
            {"model": "test/cross", "query": {"text": "q"}, "items": [{"text": "a"}, {"text": "b"}]},
        ),
        (
            "/v1/extract",
            "/v1/extract/test/gliner",
            {"items": [{"text": "Ada in Rome"}], "params": {"labels": ["city"]}},
        ),
        (
            "/v1/redact",
            "/v1/redact/test/gliner",
            {
                "items": [{"text": "Ada in Rome, ada@example.org " * 300}, {"text": "…"}],
                "params": {"kinds": ["city", "email"], "style": "tag"},
            },
        ),
        ("/v1/rerank", "/v1/rerank", {"model": "test/cross", "query": "q", "documents": ["a", "b"]}),
    ],
)
def test_every_endpoint_answers_as_it_does_alone(
    cluster: Cluster, client: openai.OpenAI, endpoint: str, url: str, body: dict[str, Any]
) -> None:
    last = ended(cluster, client, submitted(client, [request("a", body, url), request("b", body, url)], endpoint))[-1]
    assert (last.status, counts(last)) == ("completed", (2, 2, 0)), read(client, last.error_file_id)
    path = url if "test/" in url or endpoint in (EMBEDDINGS, "/v1/rerank") else f"{url}/{body['model']}"
    direct = asked_directly(cluster, path, {key: value for key, value in body.items() if path == url or key != "model"})
    assert direct.status_code == 200, direct.text
    for row in read(client, last.output_file_id):
        assert_alike(row["response"]["body"], direct.json())


def assert_alike(left: Any, right: Any, name: str = "") -> None:
    """Check that two replies have the same shape and texts. Numbers may differ as far as batch mates change them. Ids
    and times are not compared.
    """
    assert type(left) is type(right) or {type(left), type(right)} <= {int, float}, name
    if isinstance(left, dict):
        assert left.keys() == right.keys(), name
        for key in left.keys() - {"id", "request_id", "timing"}:
            assert_alike(left[key], right[key], f"{name}.{key}")
    elif isinstance(left, list):
        assert len(left) == len(right), name
        for place, (left_value, right_value) in enumerate(zip(left, right, strict=True)):
            assert_alike(left_value, right_value, f"{name}[{place}]")
    elif isinstance(left, float):
        assert abs(left - right) <= 1e-5, name
    elif not name.endswith("].embedding"):  # base64 of floats
        assert left == right, name


# refusals


def test_a_batch_belongs_to_its_key(cluster: Cluster, client: openai.OpenAI) -> None:
    new_batch = submitted(client, embeddings(3))
    with client_of(cluster, OTHER, 1) as stranger, client_of(cluster, ADMIN, 1) as admin:
        for ask in (stranger.batches.retrieve, stranger.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(new_batch.id)
        assert list(stranger.batches.list()) == []
        until(lambda: new_batch.id in {entry.id for entry in admin.batches.list()}, 60, "the other gateway knows it")
        last = ended(cluster, client, new_batch)[-1]
        assert admin.batches.retrieve(new_batch.id) == last
        assert len(read(admin, last.output_file_id)) == 3
        with pytest.raises(openai.NotFoundError):
            stranger.files.content(str(last.output_file_id))
    headers = {"authorization": f"Bearer {ONE}"}
    jobs = f"{cluster.url}/v1/jobs/{new_batch.id}"
    assert httpx.get(jobs, headers=headers, timeout=60).status_code == 404, "it is no job of the other kind"
    assert {
        httpx.post(f"{jobs}/{verb}", headers=headers, timeout=60).status_code for verb in ("pause", "resume", "retry")
    } == {404}


# batches that are cancelled or expire


def held(frail: Cluster, client: openai.OpenAI, **more: Any) -> tuple[Batch, int]:
    """Return a batch of which some requests are answered, and the paused adapter, which answers no more of them."""
    (adapter, *_) = frail.pids("adapter")
    batch = submitted(client, embeddings(HELD_LINES), **more)
    until(lambda: counts(client.batches.retrieve(batch.id))[1], 60, "some are answered", frail.log)
    os.kill(adapter, signal.SIGSTOP)
    return batch, adapter


def check_parts(client: openai.OpenAI, last: Batch, failures: str = "") -> None:
    """Check that the output has the answered requests in order, and that the rest has `failures` or nothing."""
    answered, failed = read(client, last.output_file_id), read(client, last.error_file_id)
    assert 0 < len(answered) < HELD_LINES
    places = [int(id_[1:]) for id_ in ids(answered)]
    assert places == sorted(set(places))
    assert counts(last) == (HELD_LINES, len(answered), len(failed))
    assert {row["error"]["code"] for row in failed} == ({failures} if failures else set())
    if failures:
        left = [f"r{number}" for number in range(HELD_LINES) if number not in set(places)]
        assert ids(failed) == left


@pytest.mark.timeout(300)
def test_a_batch_that_is_cancelled_keeps_what_was_answered(frail: Cluster, frail_client: openai.OpenAI) -> None:
    new_batch, adapter = held(frail, frail_client)
    try:
        cancelled_batch = frail_client.batches.cancel(new_batch.id)
        assert (cancelled_batch.status, cancelled_batch.cancelling_at is not None) == ("cancelling", True)
        snapshots = ended(frail, frail_client, cancelled_batch)
    finally:
        os.kill(adapter, signal.SIGCONT)
    last = snapshots[-1]
    assert states(snapshots) == ["cancelling", "cancelled"]
    assert [counts(batch)[1] for batch in snapshots] == sorted(counts(batch)[1] for batch in snapshots)
    assert last.cancelled_at is not None
    assert (last.completed_at, last.expired_at) == (None, None)
    check_parts(frail_client, last)
    with pytest.raises(openai.ConflictError):
        frail_client.batches.cancel(new_batch.id)


# faults
