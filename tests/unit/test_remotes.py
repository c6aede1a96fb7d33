"""Remote servers: their proof, the requests that leave the cluster, and faults of a remote server. The remote servers
are gateways of a second cluster, called over HTTP on their own routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import yaml
from fake_adapter import ids_of, toy_entry, vector_of
from inprocess import GatewayProcess, InProcess, SidecarProcess, until, until_told

from sie_broker import Write
from sie_broker.memory import MemoryServer
from sie_broker.record import Record, RecordBucket
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.settings import SettingError
from sie_contracts.wire import messages, topology
from sie_contracts.wire.records import RemoteUsage, decode_remote
from sie_gateway.remotes import proof as proofs
from sie_gateway.remotes import remotes as module
from sie_gateway.remotes.budget import BudgetUsed, MonthlyBudget
from sie_gateway.remotes.client import RemoteClient, RemoteFailed
from sie_gateway.remotes.configuration import RemoteServer, read_remotes
from sie_gateway.remotes.proof import BOUNDS, Deviates, ProbeAgreement, Prompt, Reference
from sie_runtime import keys as records

MODEL = "toy/one"
Change = Callable[[bytes], bytes]


class Relay:
    """An HTTP server before another one. `change` changes the body of each answer. With `status` the other one is not
    called.
    """

    def __init__(self, url: str) -> None:
        self._to = httpx.URL(url)
        self.change: Change = bytes
        self.status = 0
        self.info = {"model_id": MODEL, "model_sha": "1", "model_dtype": "float32", "max_input_length": 128}
        self.requests: list[tuple[bytes, bytes]] = []  # head and body
        self._server: asyncio.Server | None = None
        self.url = ""
        self.holds = False
        self._serving: set[asyncio.Task[None]] = set()
        self.left = 0  # connections that the client closed while their answers were held

    async def start(self) -> None:
        port = httpx.URL(self.url).port if self.url else 0
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer), name="relay")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answers(reader, writer)
        finally:
            writer.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                fields = {
                    name.strip().lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in head.decode().split("\r\n")[1:])
                }
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                if head.startswith(b"POST"):
                    self.requests.append((head, body))
                if self.holds and await reader.read(1) == b"":
                    self.left += 1
                    break
                status, answer, more = await self._answer(head.split(b" ")[1].decode(), body, fields)
                writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(answer)}\r\n{more}\r\n".encode() + answer)
                await writer.drain()

    async def _answer(self, path: str, body: bytes, fields: dict[str, str]) -> tuple[int, bytes, str]:
        if self.status:
            return self.status, b"{}", "location: http://127.0.0.1:1/\r\n"
        if path == "/info":
            return 200, json.dumps(self.info).encode(), ""
        headers = {
            name: fields[name] for name in ("content-type", "accept", "authorization", "x-sie-remote") if name in fields
        }
        async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
            answer = await client.post(self._to.join(path), content=body, headers=headers)
        return answer.status_code, self.change(answer.content), ""


def moved(by: float, times: float = 1.0) -> Change:
    """Return a change that multiplies each float of a body by `times` and adds `by`."""

    def walk(value: Any) -> Any:
        if isinstance(value, float):
            return value * times + by
        if isinstance(value, dict):
            return {key: walk(inner) for key, inner in value.items() if key != "timing"}
        return [walk(inner) for inner in value] if isinstance(value, list) else value

    return lambda raw: json.dumps(walk(json.loads(raw))).encode()


class Fallback:
    """A cluster without room, and the remote server of another one behind a relay."""

    def __init__(self, here: InProcess, gateway: GatewayProcess, sidecar: SidecarProcess, relay: Relay) -> None:
        self.here = here
        self.gateway = gateway
        self.sidecar = sidecar
        self.relay = relay

    async def ready(self, value: float = 1.0) -> None:
        async def is_so() -> bool:
            return await self.gateway.metric("sie_gateway_remote_ready", remote="spare") == value

        await until_told(is_so, f"the remote server has the state {value}")

    async def finding(self, words: str) -> str:
        async def found() -> str:
            view = (await self.gateway.client.get("/v1/cluster")).json()
            return next((entry["wrong"] for entry in view["findings"] if entry["check"] == "remotes"), "")

        return str(await until_told(lambda: _holding(found, words), f"a finding with {words!r}"))

    async def without_workers(self) -> None:
        await self.sidecar.end()
        await until_told(self._is_empty, "no worker")

    async def _is_empty(self) -> bool:
        return (await self.gateway.client.get("/v1/cluster")).json()["cluster"]["worker_count"] == 0


async def _holding(question: Callable[[], Awaitable[str]], words: str) -> str:
    text = await question()
    return text if words in text else ""


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_S", 0.05)
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.2)


Start = Callable[..., Awaitable[Fallback]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    async with contextlib.AsyncExitStack() as stack:

        async def begin(kind: str = "sie", environ: dict[str, str] | None = None, **fields: Any) -> Fallback:
            for folder in ("here", "there"):
                (tmp_path / folder).mkdir()
            there = await stack.enter_async_context(InProcess(tmp_path / "there"))
            remote = await there.gateway(SIE_DEFAULT_MODELS=f"embed={MODEL}")
            await there.sidecar()
            relay = Relay(remote.url)
            await relay.start()
            stack.push_async_callback(relay.stop)
            server = {"name": "spare", "model": MODEL, "kind": kind, "url": relay.url, "monthly_tokens": 1_000_000}
            file = tmp_path / "remotes.yaml"
            file.write_text(yaml.safe_dump({"remotes": [{**server, **fields}]}))
            here = await stack.enter_async_context(InProcess(tmp_path / "here"))
            gateway = await here.gateway(SIE_REMOTES=str(file), SIE_LOAD_HOLD_S="0", **(environ or {}))
            sidecar = await here.sidecar()
            return Fallback(here, gateway, sidecar, relay)

        yield begin


async def proven(start: Start, kind: str = "sie", **more: Any) -> Fallback:
    """Return a cluster whose worker had the model and has left after the proof."""
    fallback = await start(kind, **more)
    assert (await fallback.gateway.encode("warm")).headers["x-sie-served-by"] == "local"
    await fallback.ready()
    await fallback.without_workers()
    return fallback


def dense(answer: httpx.Response) -> Any:
    return [item["dense"]["values"] for item in answer.json()["items"]]


@pytest.mark.parametrize("kind", ["sie", "tei", "openai"])
async def test_a_refused_request_has_the_vectors_of_the_proven_remote_server(start: Start, kind: str) -> None:
    """SIE_REMOTES names the remote server."""
    fallback = await proven(start, kind)
    answer = await fallback.gateway.encode("a text", "another", x_sie_explain="1")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-sie-served-by"] == "spare"
    assert answer.headers["x-sie-worker"] == "remote/spare"
    np.testing.assert_allclose(dense(answer), [vector_of(ids_of(text)) for text in ("a text", "another")], atol=1e-6)
    body = answer.json()
    assert body["explain"][0]["worker"] == "remote/spare"
    assert body["usage"]["total_tokens"] > 0
    assert body["fingerprint"]
    assert await fallback.gateway.metric("sie_gateway_remote_requests_total", remote="spare", result="served") == 1
    assert await fallback.gateway.metric("sie_gateway_remote_tokens_total") == body["usage"]["total_tokens"]
    assert all(b"x-sie-remote: forbid" in head.lower() for head, _ in fallback.relay.requests)


async def test_a_text_that_the_model_truncates_is_answered_equally(start: Start) -> None:
    fallback = await start("openai")
    long = "word " * 300
    local = await fallback.gateway.encode(long)
    await fallback.ready()
    await fallback.without_workers()
    remote = await fallback.gateway.encode(long)
    assert remote.headers["x-sie-served-by"] == "spare"
    assert dense(remote) == dense(local)
    assert local.json()["usage"]["truncated_items"] == [0]
    assert remote.json()["warnings"] == [module.MAYBE_TRUNCATED]
    assert "warnings" not in (await fallback.gateway.encode("a short text")).json()


async def test_a_healthy_lane_is_never_replaced(start: Start) -> None:
    fallback = await start("sie")
    await fallback.gateway.encode("warm")
    await fallback.ready()
    probes = len(fallback.relay.requests)
    for number in range(5):
        assert (await fallback.gateway.encode(f"text {number}")).headers["x-sie-served-by"] == "local"
    assert len(fallback.relay.requests) == probes


@pytest.mark.parametrize("change", [moved(1e-3), moved(0.0, 1.001)], ids=["added", "multiplied"])
async def test_a_remote_server_that_drifts_by_a_thousandth_is_refused_with_the_figure(
    start: Start, change: Change
) -> None:
    fallback = await start("openai")
    fallback.relay.change = change
    await fallback.gateway.encode("warm")
    wrong = await fallback.finding("relative difference")
    assert "cosine 0.9999" in wrong or "cosine 1.0" in wrong
    assert "bound 0.0005" in wrong
    assert await fallback.gateway.metric("sie_gateway_remote_difference", remote="spare") > 5e-4
    await fallback.without_workers()
    answer = await fallback.gateway.encode("a text")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "PROVISIONING")
    assert await fallback.gateway.metric("sie_gateway_remote_requests_total", result="unproven") == 1


async def test_a_remote_server_that_dies_is_out_within_two_requests_and_comes_back_by_itself(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.0)
    fallback = await proven(start)
    await fallback.relay.stop()
    for _ in range(2):
        assert (await fallback.gateway.encode("a text")).status_code == 503
    assert await fallback.gateway.metric("sie_gateway_remote_ready", remote="spare") == 0
    failed = await fallback.gateway.metric("sie_gateway_remote_requests_total", result="failed")
    assert failed in (1, 2)  # a probe that fails between the two requests ends the proof as well
    await fallback.gateway.encode("a text")
    assert await fallback.gateway.metric("sie_gateway_remote_requests_total", result="failed") == failed
    await fallback.relay.start()
    await fallback.ready()
    assert (await fallback.gateway.encode("a text")).headers["x-sie-served-by"] == "spare"


@pytest.mark.parametrize(("kind", "field"), [("sie", "fingerprint"), ("openai", "model"), ("tei", "model_sha")])
async def test_an_answer_of_another_model_than_in_the_proof_is_not_used(
    start: Start, monkeypatch: pytest.MonkeyPatch, kind: str, field: str
) -> None:
    """The server is replaced by one with another model of the same width."""
    monkeypatch.setattr(module, "AGAIN_S", 0.0)
    fallback = await proven(start, kind)
    negative, report = moved(0.0, -1.0), {field: "another"}
    fallback.relay.change = negative
    if kind == "tei":
        fallback.relay.info |= report
    else:
        fallback.relay.change = lambda raw: json.dumps({**json.loads(negative(raw)), **report}).encode()
    assert (await fallback.gateway.encode("a text")).status_code == 503
    await fallback.finding("its vectors are not those of")


async def test_replicas_that_report_several_models_are_proven_one_after_the_other(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.0)
    fallback = await proven(start)
    report = {"fingerprint": "of a replica"}
    fallback.relay.change = lambda raw: json.dumps({**json.loads(raw), **report}).encode()
    assert (await fallback.gateway.encode("a text")).status_code == 503
    await fallback.ready()
    for change in (fallback.relay.change, bytes):
        fallback.relay.change = change
        assert (await fallback.gateway.encode("a text")).headers["x-sie-served-by"] == "spare"


async def test_one_failed_call_brings_a_probe(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.0)
    fallback = await proven(start, "tei")
    fallback.relay.status = 500
    assert (await fallback.gateway.encode("a text")).status_code == 503
    fallback.relay.status, fallback.relay.change = 0, moved(0.0, -1.0)
    await fallback.finding("its vectors are not those of")


async def test_a_server_of_kind_tei_without_its_report_is_not_used(start: Start) -> None:
    fallback = await proven(start, "tei")
    fallback.relay.info.clear()
    assert (await fallback.gateway.encode("a text")).status_code == 503
    assert await fallback.gateway.metric("sie_gateway_remote_requests_total", result="failed") == 1


async def test_a_changed_entry_voids_the_proof(start: Start) -> None:
    fallback = await proven(start)
    fallback.here.source.put(toy_entry(MODEL, max_tokens=256))
    await fallback.finding(f"{MODEL} has no vectors to compare with")
    assert (await fallback.gateway.encode("a text")).status_code == 503


async def test_a_header_keeps_a_request_here(start: Start) -> None:
    fallback = await proven(start)
    sent = len(fallback.relay.requests)
    for headers in ({"x_sie_remote": "forbid"}, {"x_sie_pool": "default"}, {"x_sie_priority": "bulk"}):
        assert (await fallback.gateway.encode("a text", **headers)).status_code == 503
    assert len(fallback.relay.requests) == sent
    refused = await fallback.gateway.encode("a text", x_sie_remote="allow")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-SIE-Remote")


async def test_a_key_uses_a_remote_server_only_if_it_was_made_so(start: Start) -> None:
    fallback = await start(environ={"SIE_AUTH_MODE": "token"})
    bucket = await records.bucket_of(fallback.here.server.connect("operator"), 1).open()
    tokens = []
    for remote in (True, False):
        key, token = records.create(f"key {remote}", ("infer", "read"), now_s=time.time(), remote=remote)
        await bucket.write([Write(key.id, records.encode(key))])
        tokens.append(token)
    fallback.gateway.client.headers["authorization"] = f"Bearer {tokens[0]}"

    async def is_served() -> bool:
        return (await fallback.gateway.encode("warm")).status_code == 200

    await until_told(is_served, "the key is read")
    await fallback.ready()
    await fallback.without_workers()
    answers = [await fallback.gateway.encode("a text", authorization=f"Bearer {token}") for token in tokens]
    assert [answer.status_code for answer in answers] == [200, 503]
    assert answers[0].headers["x-sie-served-by"] == "spare"
    assert answers[1].json()["error"]["code"] == "PROVISIONING"


async def test_options_and_prompts_that_were_not_compared_stay_here(start: Start) -> None:
    fallback = await proven(start)
    sent = len(fallback.relay.requests)
    for params in ({"normalize": False}, {"output_dtype": "int8"}, {"options": {"doc_template": "passage: {text}"}}):
        body = {"items": ["a text"], "params": params}
        assert (await fallback.gateway.client.post(f"/v1/encode/{MODEL}", json=body)).status_code == 503, params
    assert len(fallback.relay.requests) == sent


async def test_a_request_with_more_text_than_one_event_loop_should_write_stays_here(start: Start) -> None:
    fallback = await proven(start)
    sent = len(fallback.relay.requests)
    texts = ["x" * 100_000] * (module.MAX_BYTES // 100_000 + 1)
    assert (await fallback.gateway.encode(*texts)).status_code == 503
    assert len(fallback.relay.requests) == sent


async def usage(fallback: Fallback) -> RemoteUsage:
    bucket = await fallback.here.server.connect("reader").key_value(topology.REMOTES_BUCKET)
    entry = await bucket.get("budget.spare")
    assert entry is not None
    assert entry.value is not None
    value = decode_remote(entry.value)
    assert isinstance(value, RemoteUsage)
    return value


async def test_the_monthly_budget_is_counted_in_the_broker_and_not_exceeded(start: Start) -> None:
    fallback = await proven(start)
    before = await usage(fallback)
    answer = await fallback.gateway.encode("a text")
    assert (await usage(fallback)).tokens == before.tokens + answer.json()["usage"]["total_tokens"]
    bucket = await fallback.here.server.connect("writer").key_value(topology.REMOTES_BUCKET)
    await bucket.write([Write("budget.spare", messages.encode(RemoteUsage(before.month, 999_999)), None)])
    sent = len(fallback.relay.requests)
    assert (await fallback.gateway.encode("a text")).status_code == 503
    assert len(fallback.relay.requests) == sent
    assert await fallback.gateway.metric("sie_gateway_remote_requests_total", result="budget") == 1
    await bucket.write([Write("budget.spare", messages.encode(RemoteUsage("2020-01", 999_999)), None)])
    assert (await fallback.gateway.encode("a text")).headers["x-sie-served-by"] == "spare"


async def test_a_correction_after_the_end_of_the_month_changes_no_charge_of_the_next_month() -> None:
    broker, now_s = MemoryServer().connect("gateway"), [1_700_000_000.0]
    record: Record[Any] = Record(RecordBucket(broker, topology.REMOTES_BUCKET), module._decode, lambda *_: None)
    budget = MonthlyBudget(record, "spare", 1000, lambda: now_s[0])
    before = await budget.spend(100)
    now_s[0] += 31 * 86_400
    month = await budget.spend(60)
    await budget.correct(-50, before)
    with pytest.raises(BudgetUsed, match=f"60 of 1000 tokens of {month}"):
        await budget.spend(941)
    await budget.correct(-50, month)
    await budget.spend(941)
    await broker.close()


async def test_an_answer_waits_for_the_correction_no_longer_than_its_budget(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    fallback = await proven(start)
    monkeypatch.setattr(MonthlyBudget, "correct", lambda *_: asyncio.sleep(30))
    began_s = time.perf_counter()
    answer = await fallback.gateway.encode("a text", x_sie_timeout_ms="1000")
    assert answer.headers["x-sie-served-by"] == "spare"
    assert time.perf_counter() - began_s < module.BROKER_S


@pytest.mark.parametrize("reported", [-1, 0, 1])
async def test_a_report_of_fewer_tokens_than_texts_leaves_the_estimate(start: Start, reported: int) -> None:
    fallback = await proven(start)
    before = await usage(fallback)

    def cheap(raw: bytes) -> bytes:
        body = json.loads(raw)
        body["usage"]["total_tokens"] = reported
        return json.dumps(body).encode()

    fallback.relay.change = cheap
    answer = await fallback.gateway.encode("a text of some words", "another text of some words")
    assert answer.headers["x-sie-served-by"] == "spare"
    assert answer.json()["usage"]["total_tokens"] >= 10
    assert (await usage(fallback)).tokens == before.tokens + answer.json()["usage"]["total_tokens"]


async def test_a_budget_too_small_for_a_probe_is_named(start: Start) -> None:
    fallback = await start(monthly_tokens=10)
    await fallback.gateway.encode("warm")
    assert "0 of 10 tokens" in await fallback.finding("tokens of")


async def test_without_vectors_to_compare_the_remedy_is_named(start: Start) -> None:
    fallback = await start()
    assert f"`sie models load {MODEL}`" in await fallback.finding("no vectors to compare with")
    assert fallback.relay.requests == []


async def test_the_deadline_of_a_client_is_no_fault_of_the_remote_server(start: Start) -> None:
    fallback = await proven(start)
    fallback.relay.holds = True
    for _ in range(3):
        assert (await fallback.gateway.encode("a text", x_sie_timeout_ms="600")).status_code == 503
    await until(lambda: fallback.relay.left == 3, "the calls are cancelled")
    assert await fallback.gateway.metric("sie_gateway_remote_ready", remote="spare") == 1


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"[[1, 2]]", "vectors of width"),
        (b"[[1, 2, 3], [1, 2, 3]]", "2 vectors"),
        (b"[[1e300, 0, 0]]", "not finite"),
        (b"{}", "not in the format of a server of kind tei"),
        (b"[[NaN, 0, 0]]", "not in the format of a server of kind tei"),
        (b"[" * 30_000, "not in the format of a server of kind tei"),
        (b"[[1, 2, 3" + b" " * 70_000 + b"]]", "more than"),
    ],
)
async def test_an_answer_that_is_no_row_of_finite_numbers_for_each_text_is_refused(raw: bytes, words: str) -> None:
    relay = Relay("http://127.0.0.1:1")
    relay.status = 200
    await relay.start()

    async def answer(path: str, body: bytes, fields: dict[str, str]) -> tuple[int, bytes, str]:
        return 200, raw, ""

    relay._answer = answer  # type: ignore[method-assign]
    server = RemoteServer(name="a", model="m", kind="tei", url=relay.url, monthly_tokens=1)
    client = RemoteClient(server, None)
    with pytest.raises(RemoteFailed, match=words):
        await client.encode(["a secret text"], 3, 5.0)
    await client.close()
    await relay.stop()


@pytest.mark.parametrize(("status", "is_fault"), [(302, True), (500, True), (401, True), (400, False), (413, False)])
async def test_no_redirect_is_followed_and_what_a_request_causes_is_no_fault(status: int, is_fault: bool) -> None:
    relay = Relay("http://127.0.0.1:1")
    relay.status = status
    await relay.start()
    client = RemoteClient(RemoteServer(name="a", model="m", kind="tei", url=relay.url, monthly_tokens=1), None)
    with pytest.raises(RemoteFailed, match=str(status)) as caught:
        await client.encode(["a"], 3, 5.0)
    assert caught.value.is_fault is is_fault
    assert len(relay.requests) == 1
    await client.close()
    await relay.stop()


GOOD = {"name": "a", "model": "m", "kind": "tei", "url": "https://tei.example.com", "monthly_tokens": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": "ftp://host"}, "expected http"),
        ({"url": "https://user:secret@host"}, "no credentials"),
        ({"name": "local"}, "means this cluster"),
        ({"name": "Upper"}, "name"),
        ({"monthly_tokens": 0}, "monthly_tokens"),
        ({"token": "secret"}, "unknown field"),
        ({"kind": "cohere"}, "kind"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"kind": "sie", "served_model": "../jobs/x/cancel"}, "served_model: expected a name"),
        ({"kind": "sie", "model": "a/.."}, "model: expected a name"),
    ],
)
def test_a_file_with_a_fault_is_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    file = tmp_path / "remotes.yaml"
    file.write_text(yaml.safe_dump({"remotes": [{**GOOD, **change}]}))
    with pytest.raises(SettingError, match=words) as caught:
        read_remotes(str(file))
    assert "SIE_REMOTES" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["[", "remotes: !!binary x", "remotes: [!!bool maybe]", "\xff"])
def test_a_file_that_is_not_yaml_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "remotes.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingError, match="not YAML"):
        read_remotes(str(file))


def test_two_remotes_of_one_name_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "remotes.yaml"
    file.write_text(yaml.safe_dump({"remotes": [GOOD, dict(GOOD)]}))
    with pytest.raises(SettingError, match="two remotes"):
        read_remotes(str(file))
    with pytest.raises(SettingError, match="No such file"):
        read_remotes(str(tmp_path / "none.yaml"))


def test_the_document_may_be_the_value_itself() -> None:
    assert read_remotes(json.dumps({"remotes": [GOOD]})) == (RemoteServer(**GOOD),)
    with pytest.raises(SettingError, match="the document"):
        read_remotes('{"remotes": 1}')


async def test_a_token_comes_from_the_named_variable_and_a_missing_or_wrong_one_ends_the_start(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARE_TOKEN", "the-token")
    fallback = await start(token_env="SPARE_TOKEN")
    await fallback.gateway.encode("warm")
    await fallback.ready()
    assert all(b"authorization: bearer the-token" in head.lower() for head, _ in fallback.relay.requests)
    for value in ("the-token\n", "the-tökén"):
        monkeypatch.setenv("SPARE_TOKEN", value)
        with pytest.raises(SettingError, match="SPARE_TOKEN, must have only printable") as caught:
            await fallback.here.gateway(SIE_REMOTES=fallback.gateway.settings.remotes or "")
        assert "the-t" not in str(caught.value)
    monkeypatch.delenv("SPARE_TOKEN")
    with pytest.raises(SettingError, match="SPARE_TOKEN, is not set"):
        await fallback.here.gateway(SIE_REMOTES=fallback.gateway.settings.remotes or "")


ENTRY = toy_entry("toy/golden", prompts={"query": "query: {text}"})
RESOLVED = Catalogue.resolve_profile(ENTRY, "default", ENTRY.id)


def reference(precision: str = "float32", long: int | None = None) -> Reference:
    vectors = np.eye(3, 8, dtype=np.float32)
    prompt = Prompt.from_options(proofs.plain_run(RESOLVED))
    return Reference(("a", "b", "c"), vectors, frozenset({prompt}), precision, "f", long)


@pytest.mark.parametrize("precision", BOUNDS)
def test_vectors_are_equal_up_to_the_bound_of_the_precision(precision: str) -> None:
    own, run = reference(precision), proofs.plain_run(RESOLVED)
    within, beyond = own.vectors.copy(), own.vectors.copy()
    within[1, 7] += 0.9 * BOUNDS[precision].difference
    beyond[1, 7] += 1.1 * BOUNDS[precision].difference
    proof = proofs.prove(ENTRY, run, own, within)
    assert proof.cosine < 1
    assert proof.difference == pytest.approx(0.9 * BOUNDS[precision].difference, rel=1e-3)
    with pytest.raises(Deviates, match="probe 1 has cosine"):
        proofs.prove(ENTRY, run, own, beyond)
    with pytest.raises(Deviates):
        proofs.prove(ENTRY, run, own, own.vectors * np.float32(1 + 1.1 * BOUNDS[precision].difference))


def test_a_long_text_that_deviates_limits_the_proof_to_texts_that_surely_fit() -> None:
    own, run = reference(long=2), proofs.plain_run(RESOLVED)
    bad_vectors = own.vectors.copy()
    bad_vectors[2] = 0
    short = proofs.prove(ENTRY, run, own, bad_vectors)
    assert short.covers(ENTRY, run, ["x" * (512 - proofs.SPECIAL_TOKENS)])
    assert not short.covers(ENTRY, run, ["x" * 512])
    assert not short.covers(ENTRY, run, ["\ufdfa" * 40])  # one character whose normal form has eighteen
    assert proofs.prove(ENTRY, run, own, own.vectors).covers(ENTRY, run, ["x" * 5000])


def test_a_proof_covers_its_entry_its_options_and_its_prompts_alone() -> None:
    run = proofs.plain_run(RESOLVED)
    proof = proofs.prove(ENTRY, run, reference(), reference().vectors)
    assert proof.covers(ENTRY, run, ["a"])
    assert not proof.covers(toy_entry("toy/golden"), run, ["a"])
    for change in (
        {"prefix": "query: "},
        {"is_query": True},
        {"normalize": False},
        {"variant": "x"},
        {"lora": "x"},
        {"instruction": "x"},
    ):
        assert not proof.covers(ENTRY, msgspec.structs.replace(run, **change), ["a"]), change
    assert not proof.accepts(np.ones((1, 8), np.float32))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", " "),
        lambda text: text.replace("\r\n", "\n"),
        lambda text: text.replace("\t", " "),
        str.lstrip,
        str.rstrip,
        lambda text: text.replace("  ", " "),
    ],
)
def test_a_server_that_changes_white_space_is_seen(change: Callable[[str], str]) -> None:
    own, actual = ([vector_of(ids_of(edit(text))) for text in proofs.PROBES] for edit in (str, change))
    expected = Reference(proofs.PROBES, np.stack(own), reference().prompts, "float32")
    run = proofs.plain_run(RESOLVED)
    assert proofs.prove(ENTRY, run, expected, np.stack(own)).covers(ENTRY, run, ["two\nlines"])
    with pytest.raises(Deviates):
        proofs.prove(ENTRY, run, expected, np.stack(actual))


def test_a_proof_without_white_space_covers_words_with_single_spaces() -> None:
    run = proofs.plain_run(RESOLVED)
    proof = proofs.prove(ENTRY, run, reference(), reference().vectors)
    assert proof.covers(ENTRY, run, ["two words"])
    for text in ("two\nlines", "a\ttab", " before", "after ", "two  spaces"):
        assert not proof.covers(ENTRY, run, ["two words", text]), text


def test_golden_vectors_of_an_entry_prove_texts_without_a_prompt() -> None:
    entry = msgspec.structs.replace(ENTRY, golden="golden/all-MiniLM-L6-v2.json")
    golden = proofs.golden_reference(entry, proofs.plain_run(RESOLVED))
    assert golden is not None
    assert golden.vectors.shape == (7, 384)
    assert golden.precision == "float32"
    assert golden.prompts == {Prompt("", "", False)}
    unproven = msgspec.structs.replace(entry, load=msgspec.structs.replace(entry.load, accept_unproven=True))
    assert proofs.golden_reference(unproven, proofs.plain_run(RESOLVED)) is None
    assert proofs.golden_reference(ENTRY, proofs.plain_run(RESOLVED)) is None


def test_the_prompts_of_an_entry_are_compared_with_both_sides() -> None:
    assert list(proofs.prompts_of(RESOLVED)) == [
        Prompt("", "", False),
        Prompt("query: ", "", True),
    ]


def test_the_worst_probe_is_named() -> None:
    left = np.eye(2, dtype=np.float32)
    agreements = list(proofs.measure(left, np.array([[1, 0], [0, 1.1]], np.float32)))
    assert agreements[0] == ProbeAgreement(1.0, 0.0, 0)
    assert agreements[1].difference == pytest.approx(0.1, rel=1e-5)
