"""The fields `chunks` and `context` of an item: their forms, each refusal with its path, cost and reply."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from sie_contracts import arrays
from sie_contracts.errors import InternalFailure, InvalidInput, PayloadTooLarge
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.wire.messages import ArraySlice, ChunkRule, Ok, Operation, RunOptions, TextChunks, WorkResult
from sie_gateway.inference import body as bodies
from sie_gateway.inference import chunk_fields, reply, runner
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.runner import Runner

pytestmark = pytest.mark.usefixtures("sample_families")
TEXT = "0123456789" * 10
LIMITS = runner.ChunkLimits(cost=4096, payload_bytes=1 << 20, result_bytes=1 << 20)


def entry(**changes: Any) -> ModelEntry:
    fields = {
        "id": "org/m",
        "weights": {"hub": "org/m", "revision": "abc"},
        "family": "text-encoder",
        "outputs": {"dense": 4, "sparse": 100, "multivector": 2},
        "max_tokens": 128,
    }
    return parse_entry({**fields, **changes})


def read(chunks: Any, text: str | None = TEXT, **fields: Any) -> RequestItem:
    (item,) = bodies.items({"items": [{"text": text, "chunks": chunks, **fields}]}, limit=8)
    return item


def test_spans_are_read_as_pairs() -> None:
    item = read([[0, 5], [4, 20]], context=False)
    assert item.chunks is not None
    assert np.frombuffer(item.chunks.spans, "<i4").tolist() == [0, 5, 4, 20]
    assert not item.chunks.context


def test_a_rule_is_read_with_its_defaults() -> None:
    assert read({"max_tokens": 8}).chunks == TextChunks(ChunkRule(8))
    rule = {"max_tokens": 8, "overlap_tokens": 4, "boundary": "token", "min_tokens": 8}
    assert read(rule).chunks == TextChunks(ChunkRule(8, 4, "token", 8))


@pytest.mark.parametrize(
    ("chunks", "path", "reason"),
    [
        ("a", "items[0].chunks", "schema"),
        ([], "items[0].chunks", "schema"),
        ([[0, 5], 7], "items[0].chunks[1]", "schema"),
        ([[0, 5, 6]], "items[0].chunks[0]", "schema"),
        ([[0, 5.5]], "items[0].chunks[0]", "schema"),
        ([[-1, 5]], "items[0].chunks[0]", "schema"),
        ([[5, 5]], "items[0].chunks[0]", "schema"),
        ([[7, 5]], "items[0].chunks[0]", "schema"),
        ([[0, 101]], "items[0].chunks[0]", "schema"),
        ([[10, 20], [0, 5]], "items[0].chunks[1]", "schema"),
        ([[0, 20], [5, 20]], "items[0].chunks[1]", "schema"),
        ([[0, 20], [5, 25], [19, 30]], "items[0].chunks[2]", "schema"),
        ([[i, i + 1] for i in range(100_000)], "items[0].chunks", "too_many_chunks"),
        ({"max_tokens": 0}, "items[0].chunks.max_tokens", "schema"),
        ({"max_tokens": 8, "overlap_tokens": 5}, "items[0].chunks.overlap_tokens", "schema"),
        ({"max_tokens": 8, "min_tokens": 9}, "items[0].chunks.min_tokens", "schema"),
        ({"max_tokens": 8, "boundary": "page"}, "items[0].chunks.boundary", "schema"),
        ({"max_tokens": 8, "overlap": 1}, "items[0].chunks", "schema"),
    ],
)
def test_wrong_chunks_are_refused_with_their_field_and_index(chunks: Any, path: str, reason: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(chunks)
    assert (caught.value.param, caught.value.reason) == (path, reason)
    assert caught.value.message.startswith(path)


@pytest.mark.parametrize(
    ("text", "fields", "path"),
    [
        (None, {}, "items[0].chunks"),
        ("", {}, "items[0].chunks"),
        (TEXT, {"context": "yes"}, "items[0].context"),
        ("a" * (chunk_fields.MAX_TEXT + 1), {}, "items[0].text"),
        (TEXT, {"multivector": [[1.0, 2.0]]}, "items[0].chunks"),
        (TEXT, {"images": ["aGVsbG8="]}, "items[0].chunks"),
    ],
)
def test_an_item_that_cannot_have_chunks_is_refused(text: str | None, fields: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read({"max_tokens": 8}, text, **fields)
    assert caught.value.param == path


def test_the_spans_of_all_items_have_a_limit() -> None:
    text = "a" * 5000
    item = {"text": text, "chunks": [[place, place + 1] for place in range(4096)]}
    assert len(bodies.items({"items": [item] * 4}, limit=8)) == 4
    with pytest.raises(InvalidInput) as caught:
        bodies.items({"items": [item] * 5}, limit=8)
    assert (caught.value.param, caught.value.reason) == ("items", "too_many_chunks")


def test_a_text_with_chunks_costs_all_of_its_tokens() -> None:
    long = "a" * 40_000
    plain, _ = runner.plan([RequestItem(long)], None, "encode", entry(), RunOptions(), LIMITS)
    read_to_its_end, _ = runner.plan([read({"max_tokens": 50}, long)], None, "encode", entry(), RunOptions(), LIMITS)
    assert plain[0].cost == 128
    assert read_to_its_end[0].cost == 10_002
    assert read_to_its_end[0].squares == 10_002 * 128


def test_results_of_chunks_count_for_the_bound_of_a_reply() -> None:
    items = [read([[place, place + 1] for place in range(4096)], "a" * 4097)] * 4
    wide = entry(outputs={"dense": 32_768})
    with pytest.raises(PayloadTooLarge):
        runner.plan(items, None, "encode", wide, RunOptions(), LIMITS)
    assert runner.plan(items[:1], None, "encode", wide, RunOptions(), LIMITS)


def result_of_chunks() -> tuple[WorkResult, Ok]:
    parts = {
        "chunks": np.array([[0, 5, 2, 1, 2], [5, 20, 3, 2, 0]], "<i4"),
        "dense": np.arange(8, dtype="<f2").reshape(2, 4) / 7,
        "multivector": np.arange(6, dtype="<f2").reshape(3, 2) / 7,
        "sparse.indices": np.array([3, 9], "<i4"),
        "sparse.values": np.array([0.5, 0.25], "<f2"),
    }
    outputs, block = {}, b""
    for name, array in parts.items():
        outputs[name] = ArraySlice(array.dtype.str, array.shape, len(block))
        block += array.tobytes()
    outcome = Ok(outputs, 7)
    return WorkResult("r", 0, "w", (outcome,), block), outcome


@pytest.mark.parametrize("msgpack", [False, True])
def test_a_reply_has_a_slot_for_each_chunk(msgpack: bool) -> None:
    run = RunOptions(("dense", "sparse", "multivector"), dtype="float16")
    slots = reply.encode_slots([read([[0, 5], [5, 20]])], [result_of_chunks()], entry(), run, msgpack=msgpack)
    data, _ = reply.encode({"items": slots}, msgpack=msgpack)
    slot = (arrays.unpack(arrays.decode_msgpack(data)) if msgpack else json.loads(data))["items"][0]
    assert slot["usage"]["prompt_tokens"] == 7
    first, second = slot["chunks"]
    assert (first["start"], first["end"], first["tokens"], second["start"]) == (0, 5, 2, 5)
    assert np.asarray(second["dense"]["values"]).tolist() == (np.arange(4, 8, dtype=np.float16) / 7).tolist()
    assert (first["multivector"]["num_tokens"], second["multivector"]["num_tokens"]) == (1, 2)
    assert np.asarray(first["sparse"]["indices"]).tolist() == [3, 9]
    assert not len(second["sparse"]["values"])


def test_a_worker_that_knows_no_chunks_is_no_silent_answer() -> None:
    outcome = Ok({"dense": ArraySlice("<f4", (4,), 0)}, 7)
    result = WorkResult("r", 0, "w", (outcome,), bytes(16))
    with pytest.raises(InternalFailure):
        reply.encode_slots([read([[0, 5]])], [(result, outcome)], entry(), RunOptions(), msgpack=False)


def runner_of(entries: Any) -> Runner:
    feed = cast(Any, SimpleNamespace(catalogue=SimpleNamespace(entries=entries), on_change=Mock()))
    return Runner(feed, *(Mock(),) * 5, load_hold_s=0.0)


@pytest.mark.parametrize(
    ("family", "operation", "run", "reason"),
    [
        ("text-encoder", "encode", RunOptions(), ""),
        ("text-encoder", "encode", RunOptions(pooling="mean"), ""),
        ("text-encoder", "encode", RunOptions(pooling="cls"), "unsupported_pooling"),
        ("text-encoder", "encode", RunOptions(("sparse", "multivector"), pooling="cls"), ""),
        ("text-encoder", "score", RunOptions(), "unsupported_task"),
        ("sample-towers", "encode", RunOptions(), "unsupported_modality"),
    ],
)
def test_a_model_that_gives_no_vectors_of_chunks_is_refused_with_those_that_do(
    family: str, operation: Operation, run: RunOptions, reason: str
) -> None:
    entries = {model: entry(id=model, outputs={"dense": 4}, run={"pooling": "mean"}) for model in ("b/b", "a/a")}
    models = {"org/cls": entry(id="org/cls", outputs={"dense": 4}, run={"pooling": "cls"}), **entries}
    resolved = SimpleNamespace(entry=SimpleNamespace(id="org/m", family=family, inputs=("text",), outputs={"dense": 4}))
    items, options = [read([[0, 5]])], SimpleNamespace(run=run)
    request = cast(Any, SimpleNamespace(resolved=resolved, operation=operation, options=options, items=items))
    refused = runner_of(models).refused(request)
    assert [failure.error.reason for failure in refused.values()] == ([reason] if reason else [])
    if refused and reason != "unsupported_task":
        assert "models that support chunks: a/a, b/b" in refused[0].error.message
