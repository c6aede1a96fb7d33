"""`sie mcp` at a real gateway: each tool, called by the client of the package `mcp`, and refused calls."""

from __future__ import annotations

import asyncio
import base64
import gc
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema_rs
import msgspec
import numpy as np
import pytest
from inprocess import GatewayProcess, InProcess, inference_of, until, until_told
from mcp.shared.exceptions import MCPError
from mcp_fixtures import DENSE, FIND, HELD, MARKDOWN, PARSE, RANK, Door, door, served, started

from sie_broker import Write
from sie_client import AuthenticationError, SIEConnectionError
from sie_contracts.settings import SettingError
from sie_mcp_server import clients, config, http, results, schemas, server, tools
from sie_mcp_server.callers import AWAY_S, CHECK_EVERY_S, AgentCaller, KeyNames
from sie_mcp_server.config import DefaultModels, McpConfig, SearchCollection
from sie_mcp_server.results import PagedText, PagedVectors, ResultMissing, ResultStore, ResultTooLarge
from sie_mcp_server.tools import ToolRefused
from sie_runtime import keys as records

MODELS = DefaultModels(encode=DENSE, rerank=RANK, extract=FIND, redact=FIND, parse=PARSE)
CONFIG = McpConfig(models=MODELS)
MODES = ("auto", "legacy")
TEXTS = ["a cat", "a kitten", "Ada met Bob"]
CALLS: dict[str, dict[str, Any]] = {
    "encode": {"texts": TEXTS},
    "similarity": {"query": "a cat", "texts": TEXTS},
    "rerank": {"query": "who", "documents": TEXTS},
    "extract": {"texts": TEXTS, "labels": ["person"]},
    "redact": {"texts": TEXTS, "kinds": ["person"]},
    "parse_document": {"data": base64.b64encode(b"%PDF-1.7").decode()},
    "list_models": {},
}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path, *served()) as cluster:
        yield cluster


@pytest.fixture
async def keys(cluster: InProcess) -> dict[str, str]:
    """Return the token of each key by the key's name."""
    bucket = await records.bucket_of(cluster.server.connect("operator"), 1).open()
    tokens = {}
    for name, scopes in {
        "both": ("infer", "read"),
        "other": ("infer", "read"),
        "infer": ("infer",),
        "read": ("read",),
    }.items():
        key, tokens[name] = records.create(name, scopes, now_s=time.time())
        await bucket.write([Write(key.id, records.encode(key))])
    return tokens


@pytest.fixture
async def gateway(cluster: InProcess, keys: dict[str, str], tmp_path: Path) -> GatewayProcess:
    return await cluster.gateway(SIE_AUTH_MODE="token", SIE_PAYLOAD_STORE_URL=str(tmp_path / "payloads"))


@pytest.fixture
async def running(cluster: InProcess, gateway: GatewayProcess) -> AsyncIterator[Door]:
    async with door(cluster, gateway, CONFIG) as running:
        yield running


def structured(answer: Any) -> dict[str, Any]:
    """Return the structured content of an answer. The text of the answer holds the same content."""
    assert not answer.is_error, answer.content
    assert msgspec.json.decode(answer.content[0].text) == answer.structured_content
    content: dict[str, Any] = answer.structured_content
    return content


def sentence(answer: Any) -> str:
    """The sentence of an error."""
    assert answer.is_error
    (content,) = answer.content
    text: str = content.text
    assert text.endswith(".")
    return text


@pytest.mark.parametrize("mode", MODES)
async def test_every_tool_answers_by_its_schema(running: Door, keys: dict[str, str], mode: str) -> None:
    async with running.client(keys["both"], mode) as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert listed.keys() == {*CALLS, "read_result"}
        answers = {name: structured(await client.call_tool(name, arguments)) for name, arguments in CALLS.items()}
        reference = answers["parse_document"]["more"]["reference"]
        answers["read_result"] = structured(await client.call_tool("read_result", {"reference": reference, "page": 2}))
    for name, tool in listed.items():
        assert tool.input_schema["type"] == tool.output_schema["type"] == "object"
        assert tool.input_schema["additionalProperties"] is False
        assert tool.annotations.read_only_hint
        assert len(tool.description) > 80
        jsonschema_rs.validate(tool.output_schema, answers[name])
    assert "path" not in listed["parse_document"].input_schema["properties"]


async def test_encode_keeps_vectors_out_of_the_answer(running: Door, keys: dict[str, str]) -> None:
    async with running.client(keys["both"]) as client:
        answer = structured(await client.call_tool("encode", {"texts": TEXTS}))
        assert (answer["count"], answer["dimensions"], answer["values"]) == (3, 8, None)
        reference = answer["vectors"]["reference"]
        with_values = structured(await client.call_tool("encode", {"texts": TEXTS, "values": True}))["values"]
        page = structured(await client.call_tool("read_result", {"reference": reference}))
        assert [msgspec.json.decode(line) for line in page["text"].splitlines()] == with_values
        similar = structured(await client.call_tool("similarity", {"query": "a kitten", "reference": reference}))
        refused = await client.call_tool("similarity", {"query": "a", "reference": reference, "model": "org/other"})
        assert "leave `model` out" in sentence(refused)
        assert similar["results"][0] == {"index": 1, "similarity": 1.0}
        many = {"texts": ["a"] * 64, "values": True}
        assert not (await client.call_tool("encode", many)).is_error


async def test_rerank_and_similarity_put_the_best_first(running: Door, keys: dict[str, str]) -> None:
    async with running.client(keys["both"]) as client:
        ranked = structured(await client.call_tool("rerank", {"query": "q", "documents": TEXTS, "top_n": 2}))
        assert [entry["index"] for entry in ranked["results"]] == [2, 1]
        similar = structured(await client.call_tool("similarity", {"query": "a cat", "texts": TEXTS, "top_n": 1}))
        assert similar["results"] == [{"index": 0, "similarity": 1.0}]
        for wrong in ({"query": "a"}, {"query": "a", "texts": ["b"], "reference": "c"}):
            assert "either" in sentence(await client.call_tool("similarity", wrong))


async def test_redact_returns_neither_values_nor_a_map(running: Door, keys: dict[str, str]) -> None:
    async with running.client(keys["both"]) as client:
        answer = await client.call_tool("redact", {"texts": ["Ada met Ada"], "kinds": ["person"]})
    assert structured(answer)["results"] == [
        {"index": 0, "text": "[PERSON_1] met [PERSON_1]", "replaced": {"person": 2}}
    ]
    assert "Ada" not in answer.content[0].text


async def test_a_long_document_is_read_in_pages(running: Door, keys: dict[str, str]) -> None:
    async with running.client(keys["both"]) as client:
        answer = structured(await client.call_tool("parse_document", CALLS["parse_document"]))
        more = answer["more"]
        assert (answer["document_pages"], answer["characters"]) == (7, len(MARKDOWN))
        assert len(answer["markdown"]) <= results.PAGE_CHARS
        pages = []
        for number in range(1, more["pages"] + 1):
            arguments = {"reference": more["reference"], "page": number}
            pages.append(structured(await client.call_tool("read_result", arguments))["text"])
            uri = more["uri"].rpartition("/")[0] + f"/{number}"
            (content,) = (await client.read_resource(uri)).contents
            assert content.text == pages[-1]
        assert "".join(pages) == MARKDOWN
        assert pages[0] == answer["markdown"]
        beyond = {"reference": more["reference"], "page": more["pages"] + 1}
        assert "there is no page" in sentence(await client.call_tool("read_result", beyond))


async def test_an_answer_that_is_too_long_has_its_first_part_and_a_reference(
    running: Door, keys: dict[str, str]
) -> None:
    texts = ["Ada " * 60 for _ in range(10)]
    async with running.client(keys["both"]) as client:
        raw = await client.call_tool("extract", {"texts": texts, "labels": ["person"]})
        answer = structured(raw)
        assert 0 < len(answer["results"]) < 10
        assert len(raw.content[0].text) < tools.ANSWER_CHARS + 500
        reference, pages = answer["more"]["reference"], answer["more"]["pages"]
        whole = "".join(
            [
                structured(await client.call_tool("read_result", {"reference": reference, "page": number}))["text"]
                for number in range(1, pages + 1)
            ]
        )
        lines = [msgspec.json.decode(line) for line in whole.splitlines()]
        assert [line["index"] for line in lines] == list(range(10))
        assert lines[: len(answer["results"])] == answer["results"]


async def test_a_wrong_scope_is_an_error_that_names_the_scope(running: Door, keys: dict[str, str]) -> None:
    async with running.client(keys["read"]) as client:
        for name in ("encode", "rerank", "extract", "redact", "parse_document"):
            text = sentence(await client.call_tool(name, CALLS[name]))
            assert "lacks the scope infer" in text
            assert "sie keys create" in text
        assert structured(await client.call_tool("list_models", {}))["models"]
    async with running.client(keys["infer"]) as client:
        assert "lacks the scope read" in sentence(await client.call_tool("list_models", {}))
        with pytest.raises(MCPError, match="lacks the scope read"):
            await client.read_resource(server.MODELS)
        assert structured(await client.call_tool("encode", CALLS["encode"]))


async def test_without_a_valid_key_no_request_passes(running: Door, keys: dict[str, str]) -> None:
    ping = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
    accept = {"accept": "application/json, text/event-stream"}
    async with httpx2.AsyncClient(trust_env=False) as client:
        wrong = (b"Bearer sie_wrong", f"Basic {keys['both']}".encode(), b"Bearer \xff", b"Bearer")
        for headers in ({}, *({"authorization": value} for value in wrong)):
            for method in ("POST", "GET", "DELETE"):
                answer = await client.request(method, running.url, json=ping, headers={**accept, **headers})
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert answer.json()["code"] == "UNAUTHENTICATED"


async def test_pages_of_other_origins_and_foreign_hosts_are_refused(running: Door, keys: dict[str, str]) -> None:
    key = {"authorization": f"Bearer {keys['both']}", "accept": "application/json, text/event-stream"}
    async with httpx2.AsyncClient(trust_env=False, timeout=30) as client:
        for method in ("POST", "GET", "DELETE"):
            tls = running.url.removesuffix(http.PATH).replace("http:", "https:")
            for wrong in ({"origin": "https://evil.example"}, {"origin": tls}, {"host": "evil.example"}):
                answer = await client.request(method, running.url, json={}, headers={**key, **wrong})
                assert (answer.status_code, answer.json()["code"]) == (403, "PERMISSION_DENIED"), (method, wrong)
        own = {"origin": running.url.removesuffix(http.PATH)}
        assert (await client.post(running.url, json={}, headers={**key, **own})).status_code != 403


async def test_an_oversized_document_is_one_sentence(
    running: Door, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running.client(keys["both"]) as client:
        too_long = {"data": "A" * (schemas.INLINE_BYTES + 1)}
        assert "data: expected a string of length <= " in sentence(await client.call_tool("parse_document", too_long))
        monkeypatch.setattr(tools, "MAX_BYTES", 3)
        uploaded = await running.gateway.client.post(
            "/v1/files", files={"file": ("a.pdf", b"%PDF-1.7")}, data={"purpose": "jobs"}, headers=bearer(keys["both"])
        )
        assert uploaded.status_code == 200, uploaded.text
        large = await client.call_tool("parse_document", {"file": uploaded.json()["id"]})
        assert "The document has 8 bytes, and at most 3 are accepted: split the document." in sentence(large)
        monkeypatch.undo()
        assert structured(await client.call_tool("parse_document", {"file": uploaded.json()["id"]}))
        missing = {"file": "file-0192f0c17d3e70008000000000000000"}
        assert "There is no such thing at the gateway" in sentence(await client.call_tool("parse_document", missing))
    async with running.client(keys["other"]) as client:
        theirs = await client.call_tool("parse_document", {"file": uploaded.json()["id"]})
        assert "There is no such thing at the gateway" in sentence(theirs)


@pytest.mark.parametrize("mode", MODES)
async def test_a_cancelled_call_is_cancelled_at_the_gateway(running: Door, keys: dict[str, str], mode: str) -> None:
    inference = inference_of(running.gateway)
    async with running.client(keys["both"], mode) as client:
        arguments = {"query": "q", "documents": ["d"], "model": HELD}
        call = asyncio.create_task(client.call_tool("rerank", arguments))
        await started(running.worker, HELD)
        assert inference.slots.used == 1
        call.cancel()
        await until(lambda: not inference.slots.used, "the gateway has given the request up")
        await asyncio.gather(call, return_exceptions=True)
        assert structured(await client.call_tool("rerank", {"query": "q", "documents": ["d"]}))
    assert await running.gateway.metric("sie_gateway_abandoned_total") == 1


@pytest.mark.parametrize("mode", MODES)
async def test_a_call_in_progress_is_answered_before_the_server_ends(
    running: Door, keys: dict[str, str], mode: str
) -> None:
    async with running.client(keys["both"], mode) as client:
        await client.list_tools()  # the client checks answers by these schemas
        call = asyncio.create_task(client.call_tool("rerank", {"query": "q", "documents": ["d"], "model": HELD}))
        await started(running.worker, HELD)
        running.stop.request()
        async with httpx2.AsyncClient(trust_env=False) as prober:

            async def is_leaving() -> bool:
                try:
                    return (await prober.get(running.url.replace("/mcp", "/readyz"))).status_code == 503
                except httpx2.TransportError:
                    return True

            await until_told(is_leaving, "the server says that it ends")
        (item,) = (item for item in running.worker.items if item.model == HELD)
        await running.worker.answer(item)
        assert structured(await call)["results"] == [{"index": 0, "score": 1.0}]


async def test_documents_wait_for_their_turn_and_not_for_ever(
    cluster: InProcess, gateway: GatewayProcess, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "DOCUMENTS_AT_ONCE", 0)
    async with door(cluster, gateway, CONFIG, timeout_s=0.1) as running, running.client(keys["both"]) as client:
        answer = await client.call_tool("parse_document", CALLS["parse_document"])
    assert "Other documents are being read" in sentence(answer)


async def test_a_gateway_that_is_down_is_one_sentence(
    cluster: InProcess, gateway: GatewayProcess, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "CONNECTION_S", 0.1)
    async with door(cluster, gateway, CONFIG) as running, running.client(keys["both"]) as client:
        stored = structured(await client.call_tool("encode", CALLS["encode"]))["vectors"]["reference"]
        await gateway.end()
        for name, arguments in CALLS.items():
            text = sentence(await client.call_tool(name, arguments))
            assert text.startswith("The gateway does not answer: ")
            assert gateway.url not in text
        assert structured(await client.call_tool("read_result", {"reference": stored}))
        # a key that was not checked before stays out
        async with httpx2.AsyncClient(trust_env=False, timeout=30) as stranger:
            answer = await stranger.post(running.url, headers={"authorization": f"Bearer {keys['other']}"})
            assert (answer.status_code, answer.json()["code"]) == (503, "NOT_READY")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("second", ["both", "other"])
async def test_two_sessions_see_nothing_of_each_other(
    running: Door, keys: dict[str, str], mode: str, second: str
) -> None:
    """A session of another key cannot read a result, even with its reference. Another session of the same key needs the
    reference. In protocol revisions with sessions it cannot read the result even then.
    """
    async with running.client(keys["both"], mode) as first_client, running.client(keys[second], mode) as two:
        answer = structured(await first_client.call_tool("encode", CALLS["encode"]))["vectors"]
        own = structured(await two.call_tool("encode", CALLS["encode"]))["vectors"]
        assert own["reference"] != answer["reference"]
        listed = [str(resource.uri) for resource in (await two.list_resources()).resources]
        assert listed == [server.MODELS]
        if (mode, second) != ("auto", "both"):  # revisions without sessions know a caller by its key alone
            for name, arguments in (
                ("read_result", {"reference": answer["reference"]}),
                ("similarity", {"query": "a", "reference": answer["reference"]}),
            ):
                assert "There is no result of this reference" in sentence(await two.call_tool(name, arguments))
            with pytest.raises(MCPError, match="There is no result"):
                await two.read_resource(answer["uri"])
        assert structured(await first_client.call_tool("read_result", {"reference": answer["reference"]}))


async def test_a_session_belongs_to_its_key(running: Door, keys: dict[str, str]) -> None:
    async with running.client(keys["both"], "legacy") as client:
        await client.list_tools()
        (session,) = await sessions_of(running)
        ping = {"jsonrpc": "2.0", "id": 9, "method": "ping"}
        accept = {"accept": "application/json, text/event-stream", "mcp-session-id": session}
        async with httpx2.AsyncClient(trust_env=False) as stranger:
            for method in ("POST", "DELETE"):
                answer = await stranger.request(
                    method, running.url, json=ping, headers={**accept, **bearer(keys["other"])}
                )
                assert answer.status_code == 404
        assert structured(await client.call_tool("encode", CALLS["encode"]))


async def sessions_of(running: Door) -> list[str]:
    """The ids of open sessions."""
    (manager,) = (
        instance for instance in gc.get_objects() if type(instance) is http._Sessions and instance._task_group
    )
    return list(manager._server_instances)


async def test_a_key_opens_a_limited_number_of_sessions(
    running: Door, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_SESSIONS_OF_KEY", 2)
    hello = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "a", "version": "1"}},
    }
    accept = {"accept": "application/json, text/event-stream"}
    async with httpx2.AsyncClient(trust_env=False) as client:

        async def opened(key: str) -> int:
            return (await client.post(running.url, json=hello, headers={**accept, **bearer(keys[key])})).status_code

        assert [await opened("both") for _ in range(3)] == [200, 200, 503]
        assert await opened("other") == 200


async def test_a_caller_has_a_limited_number_of_calls_in_progress(
    running: Door, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CALLS_OF_CALLER", 2)
    async with running.client(keys["both"]) as first_client, running.client(keys["other"]) as two:
        held = [
            asyncio.create_task(
                first_client.call_tool("rerank", {"query": "q", "documents": [str(number)], "model": HELD})
            )
            for number in range(2)
        ]
        await until(lambda: sum(item.model == HELD for item in running.worker.items) == 2, "two calls in progress")
        assert "Too many calls are in progress" in sentence(await first_client.call_tool("encode", CALLS["encode"]))
        assert structured(await two.call_tool("encode", CALLS["encode"]))
        for call in held:
            call.cancel()
        await asyncio.gather(*held, return_exceptions=True)

        async def is_free() -> bool:
            return not (await first_client.call_tool("encode", CALLS["encode"])).is_error

        await until_told(is_free, "the cancelled calls are over")


async def test_arguments_that_do_not_fit_name_the_field(running: Door, keys: dict[str, str]) -> None:
    secret = "s3cr3t-of-an-agent"
    async with running.client(keys["both"]) as client:
        for name, arguments, says in (
            ("encode", {"texts": []}, "texts: expected a list of length >= 1"),
            ("encode", {"texts": [secret, ""]}, "texts[1]: expected a string of length >= 1"),
            ("encode", {"texts": ["a"] * 65}, "texts: expected a list of length <= 64"),
            ("encode", {"texts": ["a" * 50_001]}, "texts[0]: expected a string of length <= 50000"),
            ("encode", {"texts": [secret], "x": 1}, "x: unknown field; expected some of "),
            ("rerank", {"documents": [secret]}, "query: missing"),
            ("rerank", {"query": "q", "documents": ["a"], "top_n": 51}, "top_n: expected a whole number <= 50"),
            ("redact", {"texts": [secret], "style": "hash"}, "style: expected one of "),
            ("parse_document", {}, "in exactly one way"),
            ("parse_document", {"data": "?"}, "is not base64"),
            ("parse_document", {"data": "é"}, "is not base64"),
            ("parse_document", {"path": "/etc/passwd"}, "reads no files by path"),
            ("parse_document", {"file": "../x"}, "file: expected a string matching regex"),
        ):
            text = sentence(await client.call_tool(name, arguments))
            assert says in text, (name, text)
            assert secret not in text


async def test_an_unexpected_failure_shows_nothing_of_itself(
    running: Door, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_info: Any) -> Any:
        raise RuntimeError("s3cr3t")

    monkeypatch.setattr(tools, "limits_of", broken)
    async with running.client(keys["both"]) as client:
        assert sentence(await client.call_tool("list_models", {})) == server.FAILED
        with pytest.raises(MCPError, match="its log has the details"):
            await client.read_resource(server.MODELS)
        assert structured(await client.call_tool("encode", CALLS["encode"]))


async def test_no_argument_and_no_key_is_logged(
    running: Door, keys: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    secret = "s3cr3t-of-an-agent"
    caplog.set_level(logging.INFO)
    for mode in MODES:
        async with running.client(keys["both"], mode) as client:
            await client.call_tool("encode", {"texts": [secret]})
            await client.call_tool("encode", {"texts": [secret], "model": f"no/{secret}"})
            with pytest.raises(MCPError):
                await client.call_tool(secret, {secret: secret})
            with pytest.raises(MCPError):
                await client.read_resource(f"sie://models/{secret}")
    own = [record.getMessage() for record in caplog.records if record.name.startswith(("sie.mcp", "mcp.server"))]
    assert "an agent's call failed: MODEL_NOT_FOUND" in own
    assert not [line for line in own if secret in line or any(key in line for key in keys.values())]


# parts of `sie mcp`


def test_pages_of_a_text_end_at_lines_and_join_to_the_text() -> None:
    text = "".join(f"line {number}\n" for number in range(5000))
    content = PagedText(text)
    pages = [content.page(number) for number in range(1, content.pages + 1)]
    assert "".join(pages) == text
    assert all(len(page) <= results.PAGE_CHARS and page.endswith("\n") for page in pages)
    solid = PagedText("x" * (2 * results.PAGE_CHARS + 1))
    assert [len(solid.page(number)) for number in range(1, solid.pages + 1)] == [results.PAGE_CHARS] * 2 + [1]
    assert (PagedText("").pages, PagedText("").page(1)) == (1, "")


def test_results_expire_after_their_last_use() -> None:
    now_s = 0.0
    store = ResultStore(lambda: now_s)
    first, second = store.add("a", "s", PagedText("1")), store.add("a", "s", PagedText("2"))
    now_s = results.TTL_S - 1
    assert store.get("a", "s", first).page(1) == "1"
    now_s = results.TTL_S + 1
    with pytest.raises(ResultMissing):
        store.get("a", "s", second)
    assert store.get("a", "s", first).page(1) == "1"
    now_s = 3 * results.TTL_S
    with pytest.raises(ResultMissing):
        store.get("a", "s", first)
    assert (store.size_bytes, store._owners) == (0, {})


def test_results_of_an_owner_are_bounded_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResultStore()
    references = [store.add("a", "s", PagedText(str(number))) for number in range(results.MAX_RESULTS + 1)]
    with pytest.raises(ResultMissing):
        store.get("a", "s", references[0])
    assert store.get("a", "s", references[1]).page(1) == "1"
    for owner, session in (("b", "s"), ("a", ""), ("a", "t")):
        with pytest.raises(ResultMissing):
            store.get(owner, session, references[1])
    vectors = PagedVectors("m", np.zeros((results.OWNER_BYTES // 4 // 1024, 1024), np.float32))
    store.add("a", "s", vectors)
    assert store.size_bytes == results.OWNER_BYTES
    with pytest.raises(ResultTooLarge):
        store.add("a", "s", PagedText("x" * (results.OWNER_BYTES // 4 + 1)))
    monkeypatch.setattr(results, "TOTAL_BYTES", results.OWNER_BYTES)
    reference = store.add("b", "s", PagedText("y"))
    assert (store.get("b", "s", reference).page(1), store.size_bytes) == ("y", 4)


async def test_a_key_is_checked_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    names = KeyNames("http://127.0.0.1:1", lambda: now_s)
    answers: list[Any] = ["one", "two", SIEConnectionError("away"), SIEConnectionError("away"), "three"]

    async def checked(_key: str) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(names, "_checked", checked)
    assert [await names.name_of("k"), await names.name_of("k")] == ["one", "one"]
    now_s += CHECK_EVERY_S
    assert await names.name_of("k") == "two"
    now_s += CHECK_EVERY_S
    assert await names.name_of("k") == "two"
    now_s += AWAY_S
    with pytest.raises(SIEConnectionError):
        await names.name_of("k")
    answers[:] = ["three", AuthenticationError("revoked"), SIEConnectionError("away")]
    assert await names.name_of("k") == "three"
    now_s += CHECK_EVERY_S
    with pytest.raises(AuthenticationError):
        await names.name_of("k")
    with pytest.raises(SIEConnectionError):
        await names.name_of("k")


async def test_clients_of_keys_are_reused_and_the_oldest_unused_ones_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clients, "MAX_CLIENTS", 2)
    pool = clients.GatewayClients("http://127.0.0.1:1", 1.0)
    async with pool.of_key("a") as first, pool.of_key("a") as same, pool.of_key("b") as second_client:
        assert first is same is not second_client
        assert [pooled._session.api_key for pooled in (first, second_client)] == ["a", "b"]
        for key in ("c", "d", None):
            async with pool.of_key(key) as client:
                assert client._session.api_key == key
        assert list(pool._clients) == ["a", "b"]
        assert not first._driver._http.is_closed
    async with pool.of_key("e"):
        pass
    assert list(pool._clients) == ["b", "e"]
    assert first._driver._http.is_closed
    await pool.close()
    assert second_client._driver._http.is_closed


def test_a_file_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "a.pdf").write_bytes(b"inside")
    (tmp_path / "b.pdf").write_bytes(b"outside")
    (folder / "link.pdf").symlink_to(tmp_path / "b.pdf")
    assert tools._read_below(folder, "a.pdf") == b"inside"
    assert tools._read_below(folder, str(folder / "a.pdf")) == b"inside"
    for name in ("../b.pdf", "link.pdf", str(tmp_path / "b.pdf"), "missing.pdf", ".", "a.pdf/x", "\0", "x" * 5000):
        with pytest.raises(ToolRefused, match="no such file"):
            tools._read_below(folder, name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "not YAML"),
        ("models: !!binary x", "not YAML"),
        ("collections: {a: !!bool maybe}", "not YAML"),
        ("models: {encoder: x}", "models.encoder: unknown field; did you mean `encode`?"),
        ("collections: {a: {store: s}}", "collections[...].collection: missing"),
        ("collections: {a: {store: s, collection: 'x;y', model: m, description: d}}", "the name of a collection"),
        ("- a", "mcp.yaml: expected a map, got a list"),
    ],
)
def test_a_wrong_file_of_settings_is_refused_with_its_field(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mcp.yaml"
    path.write_text(text)
    with pytest.raises(SettingError, match="--config") as refused:
        config.read(path)
    assert says in str(refused.value)


def test_a_collection_is_open_to_the_keys_that_it_names() -> None:
    collection = SearchCollection(store="s", collection="c", model="m", description="d")
    named = msgspec.structs.replace(collection, keys=("one",))
    everybody = msgspec.structs.replace(collection, keys=("*",))
    assert [collection.is_open_to(name) for name in (None, "one", "")] == [True, False, False]
    assert [named.is_open_to(name) for name in (None, "one", "two")] == [True, True, False]
    assert [everybody.is_open_to(name) for name in (None, "one", "two")] == [True, True, True]
    unknown = McpConfig(collections={"a": collection})
    with pytest.raises(SettingError, match="SIE_JOBS_SINKS has no database s"):
        tools.AgentTools("http://x", unknown, {}, ResultStore(), timeout_s=1)


def test_a_caller_shows_no_key() -> None:
    assert "s3cr3t" not in repr(AgentCaller("s3cr3t", "owner", "session", "name"))
