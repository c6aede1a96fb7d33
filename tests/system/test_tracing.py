"""Traces of a whole cluster, as a collector gets them: from HTTP through the queue and the socket to the
forward pass.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from cluster import Cluster, running
from local_models import LocalModels
from otlp import Collector, Seen

from sie_contracts.stages import STAGES

CANARY = "canary-7e4b"
TEXTS = ["river search queue", "the winter garden", "kernel", "planet history of the harbour"]
MODEL = "mini"
BODY = {"items": TEXTS}
TRACED = [name.removesuffix("_time") for name in STAGES if name != "unattributed_time"]
TOGETHER = 12  # requests at once, more than there are lanes
ROUNDS = 30  # at most, until several requests shared a batch
ROUNDED_MS = 0.002  # times are rounded to microseconds


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector, every_family: LocalModels
) -> Iterator[Cluster]:
    models = LocalModels(tmp_path_factory.mktemp("models"), every_family.weights)
    shutil.copy(every_family.folder / f"{MODEL}.yaml", models.folder)
    environ = {
        "SIE_TRACING_ENABLED": "true",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    args = [*models.arguments, "--batcher-coalesce-ms", "50"]
    with running(tmp_path_factory.mktemp("tracing"), *args, environ=environ) as cluster:
        with httpx.Client(base_url=cluster.url, timeout=120) as client:
            # loads the model: later requests wait for the device alone
            assert ask(client, **{"x-sie-timeout-ms": "120000"}).status_code == 200
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=120, limits=httpx.Limits(max_connections=TOGETHER)) as client:
        yield client


def ask(client: httpx.Client, **headers: str) -> httpx.Response:
    return client.post(f"/v1/encode/test/{MODEL}", json=BODY, headers={"x-sie-explain": "1", **headers})


class Asked:
    """A request that belongs to a trace of its client."""

    def __init__(self, client: httpx.Client) -> None:
        self.trace, self.parent = secrets.token_hex(16), secrets.token_hex(8)
        self.answer = ask(client, traceparent=f"00-{self.trace}-{self.parent}-01", tracestate="vendor=1")
        assert self.answer.status_code == 200, self.answer.text

    @property
    def mates(self) -> int:
        """Return the number of work items in the batch that ran the request."""
        return int(self.answer.json()["explain"][0]["batch"]["chunks"])


def sharing(client: httpx.Client) -> list[Asked]:
    """Send requests at once, until at least two ran in one batch. Return these requests."""
    with ThreadPoolExecutor(TOGETHER) as threads:
        for _ in range(ROUNDS):
            requests = list(threads.map(lambda _: Asked(client), range(TOGETHER)))
            if any(call.mates > 1 for call in requests):
                return requests
    raise AssertionError(f"no two of {TOGETHER} requests shared a batch in {ROUNDS} rounds")


def whole(collector: Collector, trace: str) -> list[Seen]:
    """Return the spans of a request's trace, once all of them have come."""
    needed = {"work", "queue", "inference", "postprocess"}

    def complete(spans: list[Seen]) -> list[Seen]:
        own_spans = [span for span in spans if span.trace == trace]
        names = {span.name for span in own_spans}
        return own_spans if needed <= names and any(span.name.startswith("POST ") for span in own_spans) else []

    trace_spans: list[Seen] = collector.until(complete, f"the trace {trace}")
    return trace_spans


def test_each_request_of_a_shared_batch_is_one_trace_down_to_the_device(
    client: httpx.Client, collector: Collector
) -> None:
    """The trace is connected from the client's span on, and has the stages of the reply. The batch is linked to all
    requests that ran in it.
    """
    requests = sharing(client)
    works: dict[str, Asked] = {}
    for request in requests:
        spans, timing = whole(collector, request.trace), request.answer.json()["timing"]
        assert request.answer.headers["x-trace-id"] == request.trace
        ids = {span.id for span in spans}
        (root,) = [span for span in spans if span.parent not in ids]
        assert (root.name, root.parent) == ("POST encode", request.parent)
        assert {span.component for span in spans} == {"gateway", "sidecar", "adapter"}
        assert {span.state for span in spans} == {"vendor=1"}
        assert not any(span.is_error for span in spans)
        assert root.attributes["sie.request_id"] == request.answer.headers["x-sie-request-id"]
        for stage in TRACED:
            ms = sum(span.ms for span in spans if span.attributes.get("sie.stage") == stage)
            assert ms == pytest.approx(timing[f"{stage}_time"], abs=ROUNDED_MS), stage
            assert root.attributes[f"sie.timing.{stage}_time"] == timing[f"{stage}_time"]
        parts = sum(timing[name] for name in STAGES)
        assert parts == pytest.approx(timing["total_time"], abs=0.01)
        assert root.attributes["sie.timing.total_time"] == timing["total_time"]
        assert root.ms > timing["total_time"] - ROUNDED_MS
        (work,) = [span for span in spans if span.name == "work"]
        works[work.id] = request
    batches = [
        span for span in collector.spans if span.name == "batch" and {link[1] for link in span.links} & works.keys()
    ]
    assert {link for batch in batches for _, link in batch.links} == works.keys()
    assert sum(len(batch.links) for batch in batches) == len(works)
    for batch in batches:
        assert {works[link].trace for _, link in batch.links} == {trace for trace, _ in batch.links}
        assert len(batch.links) == batch.attributes["sie.batch.chunks"] == works[batch.links[0][1]].mates
        (forward,) = collector.until(
            lambda spans, batch=batch: [span for span in spans if span.name == "forward" and span.parent == batch.id],
            "its forward pass",
        )
        assert forward.component == "adapter"
        assert forward.attributes["sie.batch"] == batch.attributes["sie.batch"]
        for trace, work_id in batch.links:
            adapter_spans = {
                span.name: span
                for span in collector.of(trace)
                if span.component == "adapter" and span.parent == work_id
            }
            assert adapter_spans.keys() == {"inference", "postprocess"}
            assert all(span.links == ((forward.trace, forward.id),) for span in adapter_spans.values())
            assert adapter_spans["inference"].end_ns <= forward.end_ns
    assert max(len(batch.links) for batch in batches) > 1


def test_what_is_refused_is_a_trace_with_its_code_and_nothing_of_a_client_is_in_any(
    client: httpx.Client, cluster: Cluster, collector: Collector
) -> None:
    """The canary is in texts, ids, metadata, names, parameters, headers, paths and bodies that cannot be read."""
    item, path = {"text": CANARY, "id": CANARY, "metadata": {"a": CANARY}}, f"/v1/encode/test/{MODEL}"
    headers = {"authorization": f"Bearer {CANARY}", "x-request-id": CANARY, "user-agent": CANARY}
    wrong = {"items": [item], "params": {"truncate": CANARY}}
    answers = [
        client.post(path, json={"items": [item]}, headers=headers),
        client.post(path, params={"q": CANARY}, json=wrong, headers=headers),
        client.post(path, content=f'{{"items": ["{CANARY}'.encode(), headers=headers),
        client.post(f"/v1/encode/{CANARY}", json={"items": [item]}, headers=headers),
        client.delete(f"/v1/models/{CANARY}", headers=headers),
        client.post(path, json={"items": [item]}, headers={"traceparent": CANARY, "tracestate": CANARY}),
    ]
    for answer in answers:
        request_spans = collector.until(
            lambda spans, answer=answer: [
                span
                for span in spans
                if span.trace == answer.headers["x-trace-id"] and "http.response.status_code" in span.attributes
            ],
            "its span",
        )
        assert request_spans[0].attributes["http.response.status_code"] == answer.status_code
        assert request_spans[0].attributes.get("error.type", "") == answer.headers.get("x-sie-error-code", "")
    assert [answer.status_code for answer in answers] == [200, 400, 400, 404, 405, 200]
    assert CANARY.encode() not in collector.raw.lower()
