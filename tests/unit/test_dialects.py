"""Compatible client families: refusals before anything is queued, counts of tokens, and conversions of
float32 vectors.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.ipc
import pytest
import torch
from fake_adapter import WIDTH, ids_of, toy_entry, vector_of
from format_requests import CHAT, ONE, RERANK, STREAM, timing_comes_last, vectors
from inprocess import GatewayProcess, InProcess, until

from sie_adapter.epilogues import dtypes
from sie_contracts.errors import InvalidInput
from sie_contracts.wire import messages
from sie_contracts.wire.messages import Failed, RunOptions, WorkResult
from sie_gateway.dialects import dialect, embedding_types, fields, openai, vocabulary
from sie_gateway.inference import reply


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path) as cluster:
        cluster.source.put(toy_entry("toy/ids", openai_token_encoding="model"))
        cluster.source.put(toy_entry("toy/score", outputs={"score": 0}))
        cluster.source.put(toy_entry("toy/wide", outputs={"sparse": 10}))
        for name in ("toy/classes", "toy/kinds"):
            cluster.source.put(toy_entry(name, outputs={"classifications": 0}))
        cluster.source.put(toy_entry("toy/find", outputs={"entities": 0}, family="token-classifier"))
        yield cluster


@pytest.fixture
async def gateway(cluster: InProcess) -> GatewayProcess:
    return await cluster.gateway()


async def post(gateway: GatewayProcess, path: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await gateway.client.post(path, content=content, headers=headers)


# refusals

EMBEDDINGS: list[tuple[Any, str, str]] = [
    (b"{", "malformed", "body"),
    ({"model": ONE}, "schema", "input"),
    ({"model": ONE, "input": ""}, "empty_item", "input"),
    ({"model": ONE, "input": []}, "empty_items", "input"),
    ({"model": ONE, "input": ["a", ""]}, "empty_item", "input[1]"),
    ({"model": ONE, "input": ["a", 1]}, "schema", "input[1]"),
    ({"model": ONE, "input": [None]}, "schema", "input[0]"),
    ({"model": ONE, "input": {"title": "a"}}, "schema", "input[0].text"),
    ({"model": ONE, "input": [{"text": ""}]}, "empty_item", "input[0].text"),
    ({"model": ONE, "input": [{"image": "data:image/png;base64,aGk="}]}, "unsupported_modality", "input[0]"),
    ({"model": ONE, "input": [{"content": [{"type": "video"}]}]}, "schema", "input[0].content[0].type"),
    ({"model": ONE, "input": "a", "embedding_type": "int4"}, "unsupported_dtype", "embedding_type"),
    ({"model": ONE, "input": "a", "output_dimension": 3}, "bad_dimensions", "output_dimension"),
    ({"model": ONE, "input": "a", "dimensions": 8, "output_dimension": 4}, "schema", "output_dimension"),
    ({"model": ONE, "input": "a", "return_multivector": True}, "unsupported_output", "model"),
    ({"model": ONE, "input": [[1, 2]], "token_encoding": "model", "late_chunking": True}, "schema", "late_chunking"),
    ({"model": ONE, "input": ["a", "b"], "late_chunking": True}, "unsupported_modality", "input[0]"),
    ({"model": ONE, "input": [[1], []]}, "empty_item", "input[1]"),
    ({"model": ONE, "input": [1, -1]}, "bad_token_id", "input[0]"),
    ({"model": ONE, "input": [[9906], [100277]]}, "bad_token_id", "input[1]"),
    ({"model": ONE, "input": [[1] * 300_001]}, "too_many_tokens", "input"),
    ({"model": ONE, "input": ["a"] * 2049}, "too_many_items", "input"),
    (b'{"model": "toy/one", "input": ["\\ud800"]}', "malformed", "body"),
    ({"model": ONE, "input": "a", "dimensions": 3}, "bad_dimensions", "dimensions"),
    ({"model": ONE, "input": "a", "token_encoding": "p50k_base"}, "schema", "token_encoding"),
    ({"input": "a"}, "model_required", "model"),
    ({"model": "toy/score", "input": "a"}, "unsupported_output", "model"),
    ({"model": ONE, "input": ["data:image/png;base64,aGk="], "modality": "image"}, "unsupported_modality", "input[0]"),
]
MULTI_VECTOR: list[tuple[Any, str, str]] = [
    *CHAT,
    ({"model": ONE, "input": "a"}, "unsupported_output", "model"),
    ({"model": ONE, "input": "a", "embedding_type": "binary"}, "unsupported_dtype", "embedding_type"),
    ({"model": "toy/score", "input": "a"}, "unsupported_output", "model"),
]
POOLING: list[tuple[Any, str, str]] = [
    *CHAT,
    ({"model": ONE, "input": "a", "task": "classify"}, "schema", "task"),
    ({"model": ONE, "input": "a", "task": "token_embed"}, "unsupported_output", "model"),
    ({"model": ONE, "input": "a", "encoding_format": "bytes"}, "schema", "encoding_format"),
]
SCORE: list[tuple[Any, str, str]] = [
    ({"model": "toy/score", "text_1": "q"}, "schema", "text_2"),
    ({"model": "toy/score", "text_2": "a"}, "schema", "text_1"),
    ({"model": "toy/score", "queries": ["q", 3], "documents": ["a", "b"]}, "schema", "queries[1]"),
    ({"model": "toy/score", "queries": ["q", "r"], "documents": ["a", "b"]}, "schema", "queries"),
    ({"model": "toy/score", "text_1": ["q", "q"], "text_2": ["a", "b", "c"]}, "schema", "text_1"),
    ({"model": "toy/score", "text_1": "q", "text_2": "a", "use_activation": 1}, "schema", "use_activation"),
    ({"model": ONE, "text_1": "q", "text_2": "a"}, "unsupported_task", "model"),
]
MIXEDBREAD: list[tuple[Any, str, str]] = [
    ({"model": "toy/score", "input": ["a"]}, "schema", "query"),
    ({"model": "toy/score", "query": "q", "input": []}, "empty_items", "input"),
    ({"model": "toy/score", "query": "q", "input": ["a", {"title": "b"}]}, "schema", "input[1].text"),
    ({"model": "toy/score", "query": "q", "input": ["a"], "top_k": -1}, "schema", "top_k"),
    ({"model": ONE, "query": "q", "input": ["a"]}, "unsupported_task", "model"),
]
RANKING: list[tuple[Any, str, str]] = [
    ({"model": "toy/score", "passages": ["a"]}, "schema", "query"),
    ({"model": "toy/score", "query": {"text": 3}, "passages": ["a"]}, "schema", "query.text"),
    ({"model": "toy/score", "query": {"text": "q"}}, "schema", "passages"),
    ({"model": "toy/score", "query": {"text": "q"}, "passages": []}, "empty_items", "passages"),
    ({"model": "toy/score", "query": {"text": "q"}, "passages": [{"text": "a"}, 3]}, "schema", "passages[1]"),
    ({"model": "toy/score", "query": "q", "passages": ["a"], "truncate": "START"}, "schema", "truncate"),
    ({"model": "toy/score", "query": "q", "passages": ["a"] * 2049}, "too_many_items", "passages"),
    ({"model": ONE, "query": {"text": "q"}, "passages": ["a"]}, "unsupported_task", "model"),
]
REFUSED = [
    *((path, *case) for path in ("/v1/embeddings", "/embeddings") for case in CHAT),
    *(("/v1/embeddings", *case) for case in EMBEDDINGS),
    *(("/v1/multi-vector", *case) for case in MULTI_VECTOR),
    *(("/pooling", *case) for case in POOLING),
    *((path, *case) for path in ("/v1/score", "/score") for case in SCORE),
    *((path, *case) for path in ("/v1/rerank", "/v2/rerank", "/v1/reranking") for case in RERANK),
    *((path, *case) for path in ("/v1/ranking", "/v1/reranking") for case in RANKING if "passages" in case[0]),
    *(("/v1/ranking", *case) for case in RANKING),
    *(("/reranking", *case) for case in MIXEDBREAD),
]


# members of an error's body beside `error` and `code`: Haystack's components for Jina read `detail`, Cohere's clients
# the others
MEMBERS = {
    **dict.fromkeys(("/v1/embeddings", "/embeddings", "/v1/ranking"), "detail"),
    **dict.fromkeys(("/pooling", "/v1/score", "/score"), "detail"),
    **dict.fromkeys(("/v1/multi-vector", "/v1/reranking", "/reranking"), "detail message id"),
    "/v1/rerank": "detail message id",
    "/v2/rerank": "message id",
}


async def test_what_cannot_be_done_is_refused_by_its_name_before_anything_is_queued(
    cluster: InProcess, gateway: GatewayProcess
) -> None:
    """A refusal has a code, a reason, the path of the field, and no input text."""
    for path, body, reason, param in REFUSED:
        answer = await post(gateway, path, body)
        report = answer.json()
        code = "invalid_input" if MEMBERS[path] == "detail" else "INVALID_INPUT"
        error = report["error"]
        assert (answer.status_code, error["code"], error.get("reason"), error["param"]) == (400, code, reason, param), (
            path,
            body,
            report,
        )
        assert report["code"] == "INVALID_INPUT"
        assert set(report) - {"errors"} == {"error", "code", *MEMBERS[path].split()}, path
        assert answer.headers["x-should-retry"] == "false"
        assert "aGk" not in answer.text
    assert cluster.server.streams[STREAM].last_sequence == 0


async def test_a_late_chunk_without_a_token_is_named_as_the_input_that_it_is(cluster: InProcess) -> None:
    cluster.source.put(toy_entry("toy/chunked", family="text-encoder"))
    gateway = await cluster.gateway()
    body = {"model": "toy/chunked", "input": ["a", " "], "late_chunking": True}
    reply_to = asyncio.create_task(post(gateway, "/v1/embeddings", body))
    stream = await until(lambda: cluster.server.streams.get(STREAM), "the stream of work")
    item = messages.decode_work((await until(lambda: stream.messages.get(stream.last_sequence), "a message")).data)
    failed = Failed(InvalidInput.at("chunks[1]", "the tokenizer finds no token", reason="no_tokens").info())
    result = WorkResult(item.request, item.chunk, "w0", (failed,), b"", revision="local", fingerprint="f")
    await cluster.send(item.reply, messages.encode(result))
    report = (await reply_to).json()
    error, listed = report["error"], report["errors"]
    assert (error["param"], error["message"]) == ("input[1]", "input[1]: the tokenizer finds no token")
    assert [(entry["index"], entry["message"]) for entry in listed] == [(1, "the tokenizer finds no token")]


@pytest.mark.parametrize("values_of_a_piece", [reply.PIECE_VALUES, 1])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/encode/toy/one", {"items": ["a", "b"]}),
        ("/v1/score/toy/score", {"query": "q", "items": ["a", "b"]}),
        ("/v1/extract/toy/classes", {"items": ["a", "b"]}),
        ("/v1/embeddings", {"model": ONE, "input": ["a", "b"]}),
        ("/v1/rerank", {"model": "toy/score", "query": "q", "documents": ["a", "b"]}),
        ("/v1/ranking", {"model": "toy/score", "query": {"text": "q"}, "passages": ["a", {"text": "b"}]}),
    ],
)
async def test_the_timing_of_a_body_is_its_last_entry_and_counts_the_writing_of_all_others(
    cluster: InProcess,
    gateway: GatewayProcess,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: Any,
    values_of_a_piece: int,
) -> None:
    monkeypatch.setattr(reply, "PIECE_VALUES", values_of_a_piece)
    await timing_comes_last(cluster, asyncio.create_task(post(gateway, path, body)), monkeypatch)


async def test_a_reply_that_breaks_off_is_seen_counted_and_logged(
    cluster: InProcess, gateway: GatewayProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The status was sent before, so the gateway can only close the connection before the end of the body."""

    def broken(*_: Any, **__: Any) -> tuple[Iterator[bytes], str]:
        return (piece() for piece in (lambda: b"{", lambda: b"" + None)), "application/json"  # type: ignore[operator]

    await cluster.sidecar()
    monkeypatch.setattr(reply, "body_of", broken)
    with pytest.raises(httpx.RemoteProtocolError):
        await gateway.encode("a")
    assert await gateway.metric("sie_gateway_requests_total", endpoint="encode", status="500") == 1
    assert [record.exc_info is not None for record in caplog.records if "broke off" in record.message] == [True]


async def test_a_model_tells_what_its_profiles_decide(cluster: InProcess, gateway: GatewayProcess) -> None:
    profiles = {"words": {"run": {"output_types": ["sparse"]}}, "tuned": {"run": {"lora": "org/lora"}}}
    cluster.source.put(toy_entry("toy/two", outputs={"dense": WIDTH, "sparse": 10}, profiles=profiles))
    gateway = await cluster.gateway()
    assert (await gateway.client.get("/v1/models/toy/two")).json()["profiles"] == {
        "default": {"is_default": True, "changes": {}},
        "words": {"is_default": False, "changes": {"output_types": ["sparse"]}, "output_types": ["sparse"]},
        "tuned": {"is_default": False, "changes": {"lora": "org/lora"}, "lora_id": "org/lora"},
    }


async def test_a_chat_is_one_input_and_its_system_message_the_instruction(
    cluster: InProcess, gateway: GatewayProcess
) -> None:
    """The assistant's empty message that clients of vLLM append is left out."""
    adapter = await cluster.adapter()
    await cluster.sidecar(adapter)
    chat = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "two"}]},
        {"role": "assistant", "content": [{"type": "text", "text": ""}]},
    ]
    answer = await post(gateway, "/v1/embeddings", {"model": ONE, "messages": chat})
    assert vectors(answer).tolist() == [vector_of(ids_of("one\ntwo")).tolist()]
    instructed = [{"role": "system", "content": "Find it"}, *chat]
    await post(gateway, "/v1/embeddings", {"model": ONE, "messages": instructed})
    assert adapter.batches[-1].groups[0].options.instruction == "Find it"


# token ids and counts


async def test_token_ids_are_run_as_they_are(cluster: InProcess, gateway: GatewayProcess) -> None:
    """Ids are the model's own where the entry or the request says so, and special tokens are added where they are
    missing. Ids of OpenAI's vocabularies are run as their text.
    """
    await cluster.sidecar()
    own = ids_of("hello")
    plain = await post(gateway, "/v1/embeddings", {"model": ONE, "input": "hello"})
    assert vectors(plain).tolist() == [vector_of(own).tolist()]
    for token_ids in (own[1:-1], own):
        for model_fields in ({"model": "toy/ids"}, {"model": ONE, "token_encoding": "model"}):
            answer = await post(gateway, "/v1/embeddings", {**model_fields, "input": [token_ids.tolist()]})
            assert (vectors(answer).tolist(), answer.json()["usage"]["prompt_tokens"]) == (vectors(plain).tolist(), 7)
            assert "warnings" not in answer.json()
    pooled = await post(gateway, "/pooling", {"model": ONE, "input": [own.tolist()]})
    assert np.array_equal(np.array(pooled.json()["data"][0]["data"], np.float32), vector_of(own))
    unsaid = await post(gateway, "/v1/embeddings", {"model": ONE, "input": [15339]})
    (warning,) = unsaid.json()["warnings"]
    assert warning.startswith("token_encoding: ids were read as cl100k_base")
    by_body = await post(
        gateway, "/v1/embeddings", {"model": ONE, "input": [[24912]], "token_encoding": "o200k_base", "user": 3}
    )
    assert vectors(unsaid).tolist() == vectors(by_body).tolist() == vectors(plain).tolist()
    unknown = await post(gateway, "/v1/embeddings", {"model": "toy/ids", "input": [[2], [2, 5000]]})
    error = unknown.json()["error"]
    assert (error["reason"], error["param"], error["message"].split(":")[0]) == ("bad_token_id", "input[1]", "input[1]")


async def test_texts_that_might_be_too_many_tokens_are_counted_before_they_are_queued(
    cluster: InProcess, gateway: GatewayProcess
) -> None:
    """The limit is 300,000 tokens in all, of the model's own tokenizer, before truncation. A token of the toy model is
    a byte, and two tokens are special.
    """
    await cluster.sidecar()
    counted = await post(gateway, "/v1/embeddings", {"model": ONE, "input": ["x" * 4998] * 60})
    assert counted.status_code == 200
    assert counted.json()["usage"] == {
        "prompt_tokens": 60 * 512,
        "total_tokens": 60 * 512,
        "completion_tokens": 0,
        "truncated_items": list(range(60)),
    }
    before = len(cluster.adapters[0].batches)
    refused = await post(gateway, "/v1/embeddings", {"model": ONE, "input": [*["x" * 4998] * 59, "x" * 4999]})
    error = refused.json()["error"]
    assert (refused.status_code, error["reason"], error["limit"]) == (400, "too_many_tokens", 300_000)
    assert "300001" in error["message"]
    assert len(cluster.adapters[0].batches) == before
    most = await post(
        gateway, "/v1/embeddings", {"model": "toy/ids", "input": [[5] * 500] * 600, "encoding_format": "base64"}
    )
    assert (most.status_code, len(most.json()["data"])) == (200, 600)


def test_no_text_becomes_more_tokens_than_are_foreseen() -> None:
    """A token has at least one byte. Normalisation may lengthen a text: U+FDFA has 3 bytes before it and 33
    after it.
    """
    run, limit = RunOptions(prefix="query: "), openai.MAX_TOKENS
    assert dialect.max_tokens(["abc", "\u00e4"], run, limit) == 3 + 2 + 2 * (7 + dialect.SPECIAL_TOKENS)
    assert dialect.max_tokens(["\ufdfa"], RunOptions(), limit) == 33 + dialect.SPECIAL_TOKENS
    assert dialect.max_tokens(["a" * 150_000, "\ufdfa" * 60_000], run, limit) > limit


async def test_both_formats_hold_the_same_bytes_in_order(cluster: InProcess, gateway: GatewayProcess) -> None:
    """The reply to 2,048 inputs is written in pieces. Floats, base64, raw bytes and Arrow have the same values."""
    await cluster.sidecar()
    texts = [f"text {number}" for number in range(2048)]
    as_floats = await post(gateway, "/v1/embeddings", {"model": ONE, "input": texts, "encoding_format": "float"})
    as_base64 = await post(gateway, "/v1/embeddings", {"model": ONE, "input": texts, "encoding_format": "base64"})
    raw = await post(gateway, "/v1/embeddings", {"model": ONE, "input": texts}, accept="application/octet-stream")
    arrow = await post(
        gateway, "/v1/embeddings", {"model": ONE, "input": texts}, accept="application/vnd.apache.arrow.stream"
    )
    expected = np.array([vector_of(ids_of(text)) for text in texts])
    decoded = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in as_base64.json()["data"]]
    assert np.array_equal(vectors(as_floats), expected)
    assert np.array_equal(decoded, expected)
    assert (
        raw.headers["x-sie-shape"],
        np.array_equal(np.frombuffer(raw.content, "<f4").reshape(-1, WIDTH), expected),
    ) == ("2048,8", True)
    rows = pyarrow.ipc.open_stream(arrow.content).read_all()["dense"].to_pylist()
    assert np.array_equal(
        np.array([row["values"] if isinstance(row, dict) else row for row in rows], np.float32), expected
    )
    assert [entry["index"] for entry in as_base64.json()["data"]] == list(range(2048))
    assert as_base64.json()["usage"]["prompt_tokens"] == sum(len(text) + 2 for text in texts)


# types


def test_types_of_cohere_are_those_of_the_contract_and_of_the_worker() -> None:
    """The oracle is the worker's own conversion of random and constant rows."""
    random = np.random.default_rng(3).normal(size=(64, 384)).astype(np.float32)
    rows = np.concatenate([random, np.zeros((1, 384), np.float32), np.full((1, 384), 0.3, np.float32)])
    signs = embedding_types.ubinary(rows)[0].astype(np.int16) - 128
    assert np.array_equal(embedding_types.binary(rows)[0], signs.astype(np.int8))
    for name, convert in (
        ("int8", embedding_types.int8),
        ("uint8", embedding_types.uint8),
        ("ubinary", embedding_types.ubinary),
    ):
        codes, extras = convert(rows)
        expected, scale, offset = dtypes.convert(torch.from_numpy(rows), name)
        assert np.array_equal(codes, expected)
        for key, values in (("scale", scale), ("offset", offset)):
            assert (key in extras) == (values is not None)
            if values is not None:
                assert np.array_equal(extras[key][:, 0], values)


@pytest.mark.parametrize("name", vocabulary.NAMES)
def test_a_vocabulary_is_the_published_one(name: str) -> None:
    """Ids are those of tiktoken: a word, a character in two halves, a special token, and an id beyond the end."""
    words, halves, special = {
        "cl100k_base": ([9906, 4435, 0], [9468, 99, 254, 117], 100257),
        "o200k_base": ([13225, 5922, 0], [112, 251, 121, 223], 199999),
    }[name]
    assert vocabulary.decode(name, words, "input[0]") == "Hello World!"
    assert vocabulary.decode(name, [special], "input[0]") == "<|endoftext|>"
    assert "\ufffd" in vocabulary.decode(name, halves[:1], "input[0]")
    with pytest.raises(InvalidInput, match=r"input\[2\]\[1\]: expected an id of"):
        vocabulary.decode(name, [words[0], 300_000], "input[2]")


async def test_ids_are_refused_where_their_vocabulary_is_not_installed(
    gateway: GatewayProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "path", lambda name: None)
    vocabulary.load.cache_clear()
    answer = await post(gateway, "/v1/embeddings", {"model": ONE, "input": [[15339]]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "token_encoding")
    assert "sie-cluster[openai-tokens]" in error["message"]
    assert "openai_token_encoding of its entry) to `model`" in error["message"]


@pytest.mark.parametrize(
    ("number", "expected"),
    [(None, "interactive"), (0, "interactive"), (499, "interactive"), (500, "bulk"), (999, "bulk")],
)
def test_low_numbers_are_served_first(number: int | None, expected: str) -> None:
    assert fields.priority({"priority": number}) == expected
