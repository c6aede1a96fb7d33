"""Results become slots, scores and extractions; a request becomes chunks; a body becomes items. No processes."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pyarrow
import pyarrow.ipc
import pytest

from sie_contracts import arrays
from sie_contracts.errors import ErrorInfo, InvalidInput
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.models.muvera import Muvera
from sie_contracts.wire.messages import ArraySlice, Failed, Ok, Outcome, RunOptions, Stages, WorkResult
from sie_gateway.inference import arrow, body, reply, runner
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import Call
from sie_gateway.inference.results import Chunk, OutcomeCollector, RequestResult
from sie_gateway.inference.runner import ChunkLimits, result_bytes

ENTRY = parse_entry(
    {
        "id": "org/m3",
        "weights": {"package": "p"},
        "family": "text-encoder",
        "max_tokens": 64,
        "outputs": {"dense": 4, "sparse": 100, "multivector": 4, "score": 0},
    }
)
REFUSED = Failed(ErrorInfo("INVALID_INPUT", "no", reason="empty_item"))
NO_TOKENS = {"prompt_tokens": 0, "total_tokens": 0, "truncated": False}
BUSY = Failed(ErrorInfo("RESOURCE_EXHAUSTED", "no memory"))


def result_of(outputs: dict[str, Any]) -> tuple[WorkResult, Outcome]:
    """A result of one input with these arrays."""
    slices, block = {}, b"pad!"
    for name, values in outputs.items():
        array = np.asarray(values)
        slices[name] = ArraySlice(array.dtype.str, array.shape, len(block))
        block += array.tobytes()
    outcome = Ok(slices, 3)
    return WorkResult("r", 0, "w", (outcome,), block), outcome


def slot(output_arrays: dict[str, Any], *, msgpack: bool = True, **options: Any) -> dict[str, Any]:
    (encoded_slot,) = reply.encode_slots(
        [RequestItem("a")], [result_of(output_arrays)], ENTRY, RunOptions(**options), msgpack=msgpack
    )
    return (
        arrays.unpack(arrays.decode_msgpack(reply.encode(encoded_slot, msgpack=True)[0])) if msgpack else encoded_slot
    )  # type: ignore[no-any-return]


def placed(*outcomes: Outcome) -> list[tuple[WorkResult, Outcome]]:
    return [(WorkResult("r", 0, "w", (outcome,)), outcome) for outcome in outcomes]


# encode


def test_a_dense_vector_in_full_precision_has_no_extras() -> None:
    output = slot({"dense": np.arange(4, dtype="<f4")})
    assert {**output["dense"], "values": 0} == {"dims": 4, "dtype": "float32", "values": 0}
    assert output["dense"]["values"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("dtype", "extras"), [("int8", {"scale"}), ("uint8", {"scale", "offset"}), ("binary", set()), ("float16", set())]
)
def test_integer_dtypes_bring_what_restores_them(dtype: str, extras: set[str]) -> None:
    """A dense vector has one number, a multivector one number for each row."""
    kind = {"int8": "i1", "float16": "<f2"}.get(dtype, "u1")
    output_arrays: dict[str, Any] = {"dense": np.ones(4, kind), "multivector": np.ones((2, 4), kind)}
    for name in extras:
        output_arrays |= {f"dense.{name}": np.array([0.5], "<f4"), f"multivector.{name}": np.array([0.5, 0.25], "<f4")}
    output = slot(output_arrays, outputs=("dense", "multivector"), dtype=dtype)
    assert set(output["dense"]) - {"dims", "dtype", "values"} == extras
    assert set(output["multivector"]) - {"token_dims", "num_tokens", "dtype", "values"} == extras
    for name in extras:
        assert output["dense"][name] == 0.5
        assert isinstance(output["dense"][name], float)
        assert output["multivector"][name].tolist() == [0.5, 0.25]
    assert (output["dense"]["dtype"], output["multivector"]["num_tokens"]) == (dtype, 2)


def test_a_sparse_vector_has_float_values_whatever_the_dtype() -> None:
    output_arrays = {"sparse.indices": np.array([2, 9], "<i4"), "sparse.values": np.array([0.5, 1.5], "<f4")}
    output = slot(output_arrays, outputs=("sparse",), dtype="int8")
    assert {**output["sparse"], "indices": 0, "values": 0} == {
        "dims": 100,
        "dtype": "float32",
        "indices": 0,
        "values": 0,
    }
    assert (
        slot({**output_arrays, "sparse.values": np.ones(2, "<f2")}, outputs=("sparse",), dtype="float16")["sparse"][
            "dtype"
        ]
        == "float16"
    )


def test_float16_is_printed_exactly_in_json_and_sent_as_it_is_in_msgpack() -> None:
    """0.1 as float16 is 0.0999755859375. The shortest digits that identify it as a float16 are others."""
    output_arrays = {"dense": np.full(4, 0.1, "<f2")}
    data, _ = reply.encode(slot(output_arrays, msgpack=False, dtype="float16"), msgpack=False)
    assert b"0.0999755859375" in data
    data, _ = reply.encode(slot(output_arrays, dtype="float16"), msgpack=True)
    assert arrays.unpack(msgspec.msgpack.decode(data))["dense"]["values"].dtype == np.float16


def test_an_input_that_failed_has_its_error_in_its_slot() -> None:
    items = [RequestItem("a", "x", {"n": 1}), RequestItem("b")]
    outcomes = [*placed(REFUSED), result_of({"dense": np.zeros(4, "<f4")})]
    first, second = reply.encode_slots(items, outcomes, ENTRY, RunOptions(), msgpack=True)
    error = {"code": "INVALID_INPUT", "message": "no", "retryable": False, "reason": "empty_item"}
    assert first == {"id": "x", "metadata": {"n": 1}, "error": error, "usage": NO_TOKENS}
    assert set(second) == {"dense", "usage"}


def test_outcomes_stand_at_the_places_of_their_inputs() -> None:
    first = WorkResult("r", 0, "w", (Ok({}, score=1.0), Ok({}, score=2.0)))
    second = WorkResult("r", 1, "w", (Ok({}, score=3.0),))
    finished = RequestResult(SimpleNamespace(items=(None,) * 4), {1: REFUSED})  # type: ignore[arg-type]
    finished.add_results([0, 3, 2], [Chunk(0, 2, 1), Chunk(2, 3, 1)], [first, second], [1.0, 1.0])
    outcomes = [outcome for _, outcome in finished.outcomes]
    assert [outcome.score if isinstance(outcome, Ok) else None for outcome in outcomes] == [1.0, None, 3.0, 2.0]
    assert outcomes[1] is REFUSED


# score


def test_entries_stand_by_score_then_by_position_and_failures_last() -> None:
    items = [
        RequestItem("a"),
        RequestItem("b", "mine"),
        RequestItem("c"),
        RequestItem("d", metadata={"n": 1}),
        RequestItem("e", "mine"),
    ]
    scores = placed(Ok({}, score=0.5), REFUSED, Ok({}, score=-0.25), Ok({}, score=0.5), BUSY)
    entries = reply.score_entries(items, scores)
    assert [(entry["item_id"], entry["score"], entry["rank"]) for entry in entries] == [
        ("item-0", 0.5, 0),
        ("item-3", 0.5, 1),
        ("item-2", -0.25, 2),
        ("mine", None, 3),
        ("mine", None, 4),
    ]
    assert [entry.get("error", {}).get("code") for entry in entries] == [
        None,
        None,
        None,
        "INVALID_INPUT",
        "RESOURCE_EXHAUSTED",
    ]
    assert entries[4]["error"]["retry_after_s"] == 5
    assert entries[1] == {"item_id": "item-3", "score": 0.5, "rank": 1, "metadata": {"n": 1}, "usage": NO_TOKENS}


def test_a_slot_has_the_usage_of_its_input() -> None:
    outcome = Ok({"dense": ArraySlice("<f4", (4,), 0)}, score=1.0, tokens=5, truncated=True)
    result = WorkResult("r", 0, "w", (outcome,), np.zeros(4, "<f4").tobytes())
    expected = {"prompt_tokens": 5, "total_tokens": 5, "truncated": True}
    assert (
        reply.encode_slots([RequestItem("a")], [(result, outcome)], ENTRY, RunOptions(), msgpack=True)[0]["usage"]
        == expected
    )
    assert reply.score_entries([RequestItem("a")], [(result, outcome)])[0]["usage"] == expected
    assert reply.extract_slot(0, RequestItem("a"), outcome)["usage"] == expected


# extract


def test_all_keys_are_there_whatever_was_found() -> None:
    outcome = Ok({}, data={"entities": [{"text": "a", "label": "x", "score": 0.5, "start": 0, "end": 1}]})
    slot_inputs = zip(
        (RequestItem("a"), RequestItem("b", "mine"), RequestItem("c")),
        (outcome, Ok({}, data={"data": {"k": 1}}), REFUSED),
        strict=True,
    )
    slots = [reply.extract_slot(index, *slot_input) for index, slot_input in enumerate(slot_inputs)]
    empty: dict[str, Any] = {
        "entities": [],
        "relations": [],
        "classifications": [],
        "objects": [],
        "data": {},
        "usage": NO_TOKENS,
    }
    entity = {"text": "a", "label": "x", "score": 0.5, "start": 0, "end": 1, "bbox": None}
    assert slots[0] == {"id": "item-0", **empty, "entities": [entity]}
    assert slots[1] == {"id": "mine", **empty, "data": {"k": 1}}
    assert {**slots[2], "error": slots[2]["error"]["reason"]} == {"id": "item-2", **empty, "error": "empty_item"}


# chunks


def split(sizes: list[int], **limits: int) -> list[Chunk]:
    params = {"item_result_bytes": 0, "token_result_bytes": 0, "each_tokens": 0, "rows": 1}
    params |= {name: limits.pop(name) for name in list(limits) if name in params}
    bounds = ChunkLimits(**{"cost": 10**9, "payload_bytes": 10**9, "result_bytes": 10**9, **limits})
    return runner.split(sizes, max_tokens=100, limits=bounds, **params)


def test_a_query_counts_with_every_input_up_to_the_model_s_limit() -> None:
    """Texts of 10 tokens come without a query, with a query of 20 tokens, and with a query that fills every row."""
    sizes = [32] * 10
    assert split(sizes, cost=60) == [Chunk(0, 6, 60, 600), Chunk(6, 10, 40, 400)]
    assert split(sizes, cost=60, each_tokens=20) == [Chunk(start, start + 2, 60, 1800) for start in range(0, 10, 2)]
    assert [piece.cost for piece in split(sizes, cost=60, each_tokens=500)] == [100] * 10


def test_results_that_grow_with_tokens_bound_a_chunk() -> None:
    """A byte may be a token, in scripts that the tokenizer hardly knows."""
    sizes = [32, 32, 392, 32]  # at most 34, 34, 100 and 34 tokens
    assert [(piece.start, piece.stop) for piece in split(sizes, result_bytes=700, token_result_bytes=10)] == [
        (0, 2),
        (2, 3),
        (3, 4),
    ]
    assert [(piece.start, piece.stop) for piece in split(sizes, result_bytes=100, item_result_bytes=50)] == [
        (0, 2),
        (2, 4),
    ]


def test_an_input_that_is_run_once_for_each_label_costs_as_much() -> None:
    assert split([32] * 10, cost=60, rows=3) == [Chunk(start, start + 2, 60, 600) for start in range(0, 10, 2)]


def late_entry(_: float) -> dict[str, int]:
    return {"late": 1}


def test_a_matrix_of_many_values_is_written_some_rows_at_a_time() -> None:
    """A gateway serves no other request while it encodes a piece, and one long text can have as many values as a
    thousand short ones.
    """
    wide, narrow = np.arange(4 * reply.PIECE_VALUES, dtype=np.float32).reshape(-1, 100), np.ones((2, 100), np.float32)
    slots = [
        {"id": str(number), "multivector": {"dims": 100, "values": values}}
        for number, values in enumerate((narrow, wide, narrow))
    ]
    body = {"model": "m", "items": slots}
    content, _ = reply.body_of(body, 4 * reply.PIECE_VALUES, late_entry, msgpack=False)
    pieces = list(content)
    assert json.loads(b"".join(pieces)) == json.loads(reply.encode({**body, "late": 1}, msgpack=False)[0])
    assert max(piece.count(b",") for piece in pieces) <= reply.PIECE_VALUES


def test_timing_is_that_of_the_chunk_that_arrived_last_and_each_input_has_its_own() -> None:
    """The chunk that took longest at its worker does not count."""
    items = (RequestItem("a"), RequestItem(None), RequestItem("b"))
    finished = RequestResult(SimpleNamespace(items=items), {1: REFUSED})  # type: ignore[arg-type]
    stages = [Stages(inference_ms=40, worker_ms=50), Stages(inference_ms=20, worker_ms=30)]
    results = [WorkResult("r", number, "w", (Ok({}, 3),), b"", stages=times) for number, times in enumerate(stages)]
    finished.add_results([0, 2], [Chunk(0, 1, 1), Chunk(1, 2, 1)], results, [60.0, 90.0])
    timing = finished.timing(time.perf_counter() - 0.2)
    assert (timing["inference_time"], timing["queue_time"]) == (20, 60)
    assert timing["total_time"] >= 200
    first, refused, second = finished.item_timings()
    assert (first["inference_time"], first["queue_time"], first["total_time"]) == (40, 10, 60)
    assert (second["inference_time"], second["queue_time"], second["total_time"]) == (20, 60, 90)
    assert set(refused.values()) == {0.0}


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", "msgpack"),
        ("*/*", "msgpack"),
        ("text/html", "json"),
        ("application/json", "json"),
        ("application/octet-stream", "raw"),
        ("application/vnd.apache.arrow.stream, */*", "arrow"),
        ("application/msgpack, application/octet-stream", "msgpack"),
        ("application/octet-stream;q=0.5, application/json", "json"),
        ("application/json, application/octet-stream", "raw"),
        ("application/vnd.apache.arrow.stream;q=0.9, application/octet-stream;q=0.5", "arrow"),
        ("application/octet-stream;q=0", "json"),
        ("application/msgpack;q=0.1, application/json;q=0.2", "json"),
        ("application/octet-stream;q=x", "json"),
    ],
)
def test_the_format_of_a_reply_is_negotiated(accept: str, expected: str) -> None:
    assert reply.requested_format(accept, body_is_msgpack=True, raw=True) == expected


def chunk_of(count: int, **outputs: np.ndarray) -> list[tuple[WorkResult, Ok]]:
    """Return a result of `count` inputs, each with its row of every output, in one block."""
    block, outcomes = b"", []
    for row in range(count):
        slices = {}
        for name, values in outputs.items():
            array = np.asarray(values[row])
            slices[name] = ArraySlice(array.dtype.str, array.shape, len(block))
            block += array.tobytes()
        outcomes.append(Ok(slices, 3))
    result = WorkResult("r", 0, "w", tuple(outcomes), block)
    return [(result, outcome) for outcome in outcomes]


def test_neighbouring_vectors_are_sent_together_and_not_copied() -> None:
    first, second = np.random.default_rng(1).normal(size=(2, 5, 4)).astype("<f4")
    values = [*chunk_of(5, dense=first), *chunk_of(5, dense=second)]
    values = [values[0], values[1], values[4], values[5], values[6]]
    body = reply.Joined(values, "dense")
    pieces = list(body)
    assert [len(piece) for piece in pieces] == [32, 16, 32]
    assert all(piece.obj in (values[0][0].block, values[-1][0].block) for piece in pieces)
    assert b"".join(pieces) == first[[0, 1, 4]].tobytes() + second[:2].tobytes()
    assert body.nbytes == 80 == len(b"".join(body))


@pytest.mark.parametrize("step", [1, 3, 100])
def test_arrow_has_a_row_for_each_input_also_where_it_failed(step: int) -> None:
    chance = np.random.default_rng(2)
    dense, scale = chance.integers(-127, 127, (4, 6)).astype("|i1"), chance.random((4, 1)).astype("<f4")
    counts = [2, 0, 5, 1]
    multi = [chance.integers(-127, 127, (count, 3)).astype("|i1") for count in counts]
    scales = [chance.random(count).astype("<f4") for count in counts]
    indices = [np.arange(count, dtype="<i4") for count in counts]
    weights = [chance.random(count).astype("<f4") for count in counts]
    good: list[tuple[WorkResult, Outcome]] = list(
        chunk_of(
            4,
            **{
                "dense": dense,
                "dense.scale": scale,
                "multivector": multi,
                "multivector.scale": scales,
                "sparse.indices": indices,
                "sparse.values": weights,
            },
        )
    )
    outcomes = [*good[:2], *placed(REFUSED), *good[2:]]
    items = [RequestItem("a", "first"), RequestItem("b"), RequestItem(None), RequestItem("c", "ü"), RequestItem("d")]
    rows = arrow.ArrowRows(items, outcomes, RunOptions(outputs=("dense", "multivector", "sparse"), dtype="int8"))
    rows._step = step
    data = b"".join(rows)
    assert data == b"".join(rows)
    table = pyarrow.ipc.open_stream(data).read_all()
    table.validate(full=True)
    assert table.column_names == [
        "id",
        "dense",
        "dense_scale",
        "multivector",
        "multivector_scale",
        "sparse_indices",
        "sparse_values",
        "error",
    ]
    records = table.to_pylist()
    assert [row["id"] for row in records] == ["first", None, None, "ü", None]
    assert records[2] == {
        **dict.fromkeys(table.column_names),
        "error": {"code": "INVALID_INPUT", "message": "no", "reason": "empty_item", "retryable": False},
    }
    for index, row in enumerate(records[:2] + records[3:]):
        assert row["error"] is None
        assert row["dense"] == dense[index].tolist()
        assert row["dense_scale"] == pytest.approx(float(scale[index, 0]))
        assert row["multivector"] == multi[index].tolist()
        np.testing.assert_array_equal(np.float32(row["multivector_scale"]), scales[index])
        assert row["sparse_indices"] == indices[index].tolist()
        np.testing.assert_array_equal(np.float32(row["sparse_values"]), weights[index])


def test_what_does_not_fit_alone_is_a_chunk_alone_and_nothing_is_none() -> None:
    assert [(piece.start, piece.stop) for piece in split([400, 4, 400], cost=50)] == [(0, 1), (1, 2), (2, 3)]
    assert split([]) == []


def entry(**outputs: int) -> ModelEntry:
    return parse_entry(
        {"id": "org/a", "weights": {"package": "p"}, "family": "f", "max_tokens": 64, "outputs": outputs}
    )


def test_a_result_is_estimated_from_what_was_asked_for() -> None:
    """The estimate has the bytes of an input, with a constant, and the bytes of each of its tokens."""
    many = entry(dense=1024, sparse=30000, multivector=128, score=0, entities=0)
    constant, _ = result_bytes("score", many, RunOptions(outputs=("dense",)))
    assert result_bytes("score", many, RunOptions(outputs=("dense", "multivector"))) == (constant, 0)
    assert result_bytes("encode", many, RunOptions()) == (constant + 4096, 0)
    assert result_bytes("encode", many, RunOptions(outputs=("multivector",))) == (constant, 512)
    sketch = Muvera(final_projection_dim=500)
    assert result_bytes("encode", many, RunOptions(muvera=sketch, outputs=("dense", "multivector"))) == (
        constant + 2000,
        512,
    )
    assert result_bytes("encode", many, RunOptions(outputs=("sparse",)))[1] > 8
    assert result_bytes("extract", many, RunOptions())[1] > 0


# bodies


def test_a_query_is_an_item() -> None:
    assert body.query({"query": "who"}) == RequestItem("who")
    assert body.query({"query": {"id": "q", "text": "who"}}) == RequestItem("who", "q")
    assert body.query({"query": {"images": ["aGk"]}}) == RequestItem(None, modalities=("image",), images=(b"hi",))


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({}, "query", "schema"),
        ({"query": None}, "query", "schema"),
        ({"query": 5}, "query", "schema"),
        ({"query": ["a"]}, "query", "schema"),
        ({"query": {"text": 5}}, "query.text", "schema"),
        ({"query": "\ud800"}, "query", "malformed"),
    ],
)
def test_a_query_that_cannot_be_used_is_named(fields: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        body.query(fields)
    assert (caught.value.param, caught.value.reason) == (param, reason)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [{"deep": float("-inf")}]])
def test_metadata_that_json_has_no_number_for_is_refused(value: Any) -> None:
    """msgpack can encode such numbers, but no reply contains a number that is not finite."""
    data = msgspec.msgpack.encode({"items": [{"text": "a", "metadata": {"n": value}}]})
    with pytest.raises(InvalidInput, match="metadata"):
        body.items(body.decode(data, msgpack=True), limit=10)


@pytest.mark.parametrize("piece", [ArraySlice("<f4", (4,), -16), ArraySlice("<f4", (8,), 0), ArraySlice("O", (1,), 0)])
def test_an_array_outside_the_bytes_of_a_result_or_of_objects_is_refused(piece: ArraySlice) -> None:
    outcome = Ok({"dense": piece}, 3)
    with pytest.raises(ValueError):
        reply.array_of(WorkResult("r", 0, "w", (outcome,), bytes(16)), outcome, "dense")


def test_work_item_built_after_the_next_attempt_began_has_the_id_of_its_own() -> None:
    """With the id of the next attempt, whose first message has the same number, the broker would drop that message."""
    call = Call("r", time.perf_counter(), {}, budget_s=9.0)
    collector = OutcomeCollector(call.work_id, "sie.result.x", 1, "_default", "")
    resolved = SimpleNamespace(entry=SimpleNamespace(id="org/m"), revision="1", profile="default")
    options = SimpleNamespace(run=RunOptions())
    request: Any = SimpleNamespace(resolved=resolved, operation="encode", options=options, priority="interactive")
    call.again()
    item = runner._work_item(call, collector, request, [RequestItem("x")], [0], [Chunk(0, 1, 3)], None, 1, "", 0)
    assert (item.request, call.work_id) == ("r", "r-1")
