"""The line that a gateway writes for each request, plain and as JSON."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_adapter import toy_entry
from inprocess import InProcess, until

from sie_contracts.errors import InvalidInput
from sie_contracts.stages import STAGES
from sie_gateway.inference import call as calls
from sie_gateway.inference.call import Call, RequestLogger
from sie_runtime.process import configure_logging

TRACE = "0af7651916cd43dd8448eb211c80319c"

Lines = Callable[[], list[dict[str, Any]]]
TOKEN = "token-7d31"
BEARER = {"authorization": f"Bearer {TOKEN}"}
LINE = re.compile(r"(?P<endpoint>\w+) (?P<status>\d{3}) in (?P<ms>\d+\.\d) ms(?P<told>( \w+=\S+)*)")


@contextlib.contextmanager
def configured(*, json: bool, worker: str | None = None) -> Iterator[None]:
    """Configure the logs of a process until the end of the block."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    configure_logging(json=json, worker=worker)
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(level)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Configure JSON logs. Return a function that returns the lines of requests since its last call, with the fields of
    each message.
    """
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)

    def read() -> list[dict[str, Any]]:
        logging.getLogger().handlers[0].flush()
        entries = [msgspec.json.decode(line) for line in written.getvalue().splitlines()]
        written.seek(0)
        written.truncate()
        matches = [(entry, LINE.fullmatch(entry["message"])) for entry in entries if entry["logger"] == "sie.gateway"]
        return [
            {**entry, **match.groupdict(), "told": dict(pair.split("=") for pair in match["told"].split())}
            for entry, match in matches
            if match is not None
        ]

    with configured(json=True):
        yield read


@pytest.fixture
async def cluster(tmp_path: Path, lines: Lines) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path, toy_entry()) as cluster:
        yield cluster


async def test_a_line_says_what_the_reply_says_of_stages_and_tokens(cluster: InProcess, lines: Lines) -> None:
    gateway = await cluster.gateway()
    await cluster.sidecar()
    body = (await gateway.encode("one", "two words", traceparent=f"00-{TRACE}-b7ad6b7169203331-01")).json()
    raw = await gateway.client.post(
        "/v1/encode/toy/one", json={"items": ["one"]}, headers={"accept": "application/octet-stream"}
    )
    openai = (await gateway.client.post("/v1/embeddings", json={"model": "toy/one", "input": "one"})).json()
    encoded, as_bytes, embeddings = lines()
    assert (encoded["endpoint"], encoded["status"], encoded["model"], encoded["level"]) == (
        "encode",
        "200",
        "toy/one",
        "INFO",
    )
    assert (encoded["trace_id"], as_bytes["trace_id"]) == (TRACE, None)
    assert (encoded["worker"], encoded["key"]) == ("w0", None)
    assert encoded["told"] == {
        "items": "2",
        "tokens": str(body["usage"]["total_tokens"]),
        **{name: str(body["timing"][name]) for name in STAGES},
    }
    # more than the whole, where the fake adapter tells a longer inference than its own
    assert sum(float(encoded["told"][name]) for name in STAGES) >= body["timing"]["total_time"] - 0.01
    assert encoded["latency_ms"] >= body["timing"]["total_time"] - 0.01
    assert float(encoded["ms"]) == pytest.approx(encoded["latency_ms"], abs=0.06)
    assert float(as_bytes["told"]["inference_time"]) == pytest.approx(float(raw.headers["x-inference-time"]), abs=0.006)
    assert (embeddings["endpoint"], embeddings["told"]["inference_time"]) == (
        "embeddings",
        str(openai["timing"]["inference_time"]),
    )


async def test_headers_say_the_stages_where_the_body_does_not_and_on_request(cluster: InProcess) -> None:
    gateway = await cluster.gateway()
    await cluster.sidecar()
    plain, explained, raw = (
        await gateway.encode("one"),
        await gateway.encode("one", X_SIE_Explain="1"),
        await gateway.encode("one", Accept="application/octet-stream"),
    )
    for answer, timed in ((plain, False), (explained, True), (raw, True)):
        times = {name for name in answer.headers if name.endswith("-time")}
        assert ({"x-total-time", "x-inference-time", "x-queue-time"} <= times, bool(times)) == (timed, timed)
    assert float(explained.headers["x-total-time"]) == pytest.approx(
        explained.json()["timing"]["total_time"], abs=0.006
    )


async def test_every_request_has_one_line_whatever_becomes_of_it(cluster: InProcess, lines: Lines) -> None:
    gateway = await cluster.gateway(SIE_AUTH_MODE="static", SIE_AUTH_TOKEN=TOKEN)
    adapter = await cluster.adapter()
    await cluster.sidecar(adapter)
    adapter.failures["bad"] = InvalidInput("no", reason="schema").info()

    async def post(body: Any, path: str = "/v1/encode/toy/one", **headers: str) -> str:
        answer = await gateway.client.post(path, json=body, headers={**BEARER, **headers})
        return str(answer.headers["x-sie-request-id"])

    ids = [
        await post({"items": ["good"]}),
        await post({"items": ["bad"]}),
        await post({"items": ["good", "bad"]}),
        await post({"items": []}),
        await post({"items": ["x"]}, "/v1/encode/toy/none"),
        await post({"items": ["x"]}, authorization="Bearer other"),
        await post({"items": ["x"]}, **{"content-encoding": "br"}),
    ]
    log_lines = lines()
    assert [line["request_id"] for line in log_lines] == ids
    assert [
        (line["status"], line["told"].get("code"), line["told"].get("items"), line["model"]) for line in log_lines
    ] == [
        ("200", None, "1", "toy/one"),
        ("400", "INVALID_INPUT", "1", "toy/one"),
        ("200", None, "2", "toy/one"),
        ("400", "INVALID_INPUT", None, "toy/one"),
        ("404", "MODEL_NOT_FOUND", None, None),
        ("401", "UNAUTHENTICATED", None, None),
        ("415", "UNSUPPORTED_MEDIA_TYPE", None, None),  # refused before its model was looked for
    ]
    assert [set(STAGES) <= line["told"].keys() for line in log_lines] == [True, True, True, False, False, False, False]
    assert [line["told"].get("tokens") for line in log_lines[:2]] == ["6", "0"]
    assert [line["key"] for line in log_lines] == [*["static-1"] * 5, None, "static-1"]


async def test_refused_requests_are_counted_and_a_few_have_a_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MAX_REFUSED_LINES of 5,000 refusals have a line. One line counts the rest by kind. Each answer has a line."""
    monkeypatch.setattr(calls, "INTERVAL_S", 0.2)
    caplog.set_level(logging.INFO, "sie.gateway")
    log = RequestLogger()
    for number in range(5000):
        code, status = (("QUEUE_FULL", 503), ("RATE_LIMITED", 429))[number % 2]
        log.ended(Call(f"r{number}", 0.0, {}, code=code), "encode", status, 0.001)
        if number % 100 == 0:
            log.ended(Call(f"a{number}", 0.0, {}), "encode", 200, 0.1)
    await until(lambda: "more requests" in caplog.records[-1].getMessage(), "the line with the rest")
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("encode 200") for line in lines) == 50
    assert sum(line.startswith(("encode 503", "encode 429")) for line in lines) == calls.MAX_REFUSED_LINES
    assert len(lines) == 50 + calls.MAX_REFUSED_LINES + 1
    kinds = "encode 503 code=QUEUE_FULL 2490, encode 429 code=RATE_LIMITED 2490"
    assert re.fullmatch(rf"4980 more requests were refused in \d+ s: {kinds}", lines[-1])
    log.ended(Call("later", 0.0, {}, code="QUEUE_FULL"), "encode", 503, 0.001)
    assert caplog.records[-1].getMessage().startswith("encode 503")
