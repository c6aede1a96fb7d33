"""Requests in API formats of other servers that tests of the core and of an extra send, and what a worker answers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from fake_adapter import WIDTH
from inprocess import InProcess, until

from sie_contracts.wire import messages
from sie_contracts.wire.messages import ArraySlice, Ok, WorkResult

STREAM = "WORK__default"
ONE = "toy/one"
USER = {"role": "user", "content": "a"}
CHAT: list[tuple[Any, str, str]] = [
    ({"model": ONE, "messages": []}, "schema", "input"),
    ({"model": ONE, "messages": ["a"]}, "schema", "messages[0]"),
    ({"model": ONE, "messages": [USER, {"role": "user"}]}, "schema", "messages[1].content"),
    ({"model": ONE, "messages": [{"role": "system", "content": "a"}]}, "empty_item", "messages"),
    ({"model": ONE, "messages": [USER, {"content": [{"type": "x"}]}]}, "schema", "messages[1].content[0].type"),
    ({"model": ONE, "messages": [USER] * 2049}, "too_many_items", "messages"),
]
RERANK: list[tuple[Any, str, str]] = [
    ({"model": "toy/score", "documents": ["a"]}, "schema", "query"),
    ({"model": "toy/score", "query": "q"}, "schema", "documents"),
    ({"model": "toy/score", "query": "q", "documents": []}, "empty_items", "documents"),
    ({"model": "toy/score", "query": "q", "documents": ["a", 3]}, "schema", "documents[1]"),
    ({"model": "toy/score", "query": "q", "documents": [{"title": "a"}]}, "schema", "documents[0].text"),
    (
        {"model": "toy/score", "query": "q", "documents": [{"title": "a"}], "rank_fields": ["body"]},
        "empty_item",
        "documents[0]",
    ),
    (
        {"model": "toy/score", "query": "q", "documents": [{"title": []}], "rank_fields": ["title"]},
        "schema",
        "documents[0]",
    ),
    ({"model": "toy/score", "query": "q", "documents": ["a"], "top_n": -1}, "schema", "top_n"),
    ({"model": "toy/score", "query": "q", "documents": ["a"], "top_k": -1}, "schema", "top_k"),
    ({"model": "toy/score", "query": "q", "documents": ["a"], "max_tokens_per_doc": 0}, "schema", "max_tokens_per_doc"),
    ({"model": "toy/score", "query": "q", "documents": ["a"], "priority": 1000}, "schema", "priority"),
    ({"model": "toy/score", "query": "q", "documents": ["a"], "return_documents": "yes"}, "schema", "return_documents"),
    ({"model": "toy/score", "query": "q", "documents": [{"image": "aGk="}]}, "unsupported_modality", "documents[0]"),
    ({"model": "toy/score", "query": "q", "documents": [{"image": []}]}, "schema", "documents[0].image"),
    (
        {"model": "toy/score", "query": "q", "documents": [{"image": "ftp://h/a"}]},
        "invalid_media",
        "documents[0].image",
    ),
    ({"model": ONE, "query": "q", "documents": ["a"]}, "unsupported_task", "model"),
]


def vectors(answer: httpx.Response) -> np.ndarray:
    return np.array([entry["embedding"] for entry in answer.json()["data"]], np.float32)


async def answered(cluster: InProcess, reply_to: asyncio.Task[httpx.Response]) -> httpx.Response:
    """Answer a request of two inputs as a worker does, in one message with all outputs that a model may have. Return
    the reply to the client.
    """
    stream = await until(lambda: cluster.server.streams.get(STREAM), "the stream of work")
    message = await until(lambda: stream.messages.get(stream.last_sequence), "a message")
    item = messages.decode_work(message.data)
    block = np.ones((2, WIDTH), np.float32).tobytes()
    data = {"classifications": [{"label": "a", "score": 0.9}]}
    outcomes = tuple(
        Ok({"dense": ArraySlice("<f4", (WIDTH,), start)}, 3, score=0.5, data=data) for start in (0, 4 * WIDTH)
    )
    result = WorkResult(item.request, item.chunk, "w0", outcomes, block, revision="local", fingerprint="f")
    await cluster.send(item.reply, messages.encode(result))
    return await reply_to


async def timing_comes_last(
    cluster: InProcess, reply_to: asyncio.Task[httpx.Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answer a request, and check that `timing` is the last entry of its reply and counts the writing of all others,
    as postprocessing. Each piece of JSON takes 20 ms here.
    """
    dumps, slow_s, written = orjson.dumps, 0.02, []

    def slow(value: Any, *args: Any, **options: Any) -> bytes:
        time.sleep(slow_s)
        written.append(dumps(value, *args, **options))
        return written[-1]

    await until(lambda: (stream := cluster.server.streams.get(STREAM)) and stream.last_sequence, "a message")
    monkeypatch.setattr(orjson, "dumps", slow)
    answer = await answered(cluster, reply_to)
    assert answer.status_code == 200, answer.text
    content = answer.json()
    assert list(content)[-1] == "timing"
    assert b"timing" not in b"".join(written[:-1])
    assert len(written) > 1
    assert content["timing"]["postprocess_time"] >= 1000 * slow_s * (len(written) - 1)
