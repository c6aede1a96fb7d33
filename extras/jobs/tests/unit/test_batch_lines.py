"""The lines of batches: a file is cut into parts, a line is read, an answer is written."""

from __future__ import annotations

import json
import tracemalloc
from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie_bulk_jobs.gateway import envelope
from sie_bulk_jobs.gateway.envelope import (
    MAX_LINES,
    SHARD_BYTES,
    SHARD_LINES,
    BadLine,
    BatchCut,
    read,
    requests_of,
    written,
)
from sie_bulk_jobs.records import Plan
from sie_contracts.errors import InvalidInput

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}
ids = st.sampled_from(["a", "b", "c", "é", ""])
pieces_of_lines = st.one_of(
    ids.map(lambda id_: orjson.dumps({"custom_id": id_})),
    ids.map(lambda id_: orjson.dumps({"custom_id": id_}) + b" \r"),
    st.sampled_from(
        [b"", b" ", b"\r", b"\t \r", b"{", b"[]", b"7", b'{"custom_id": 7}', b'{\r"custom_id": "a"}', b"\xff"]
    ),
)


def planned(text: bytes, cuts: list[int]) -> Plan:
    cut = BatchCut("f")
    ends = sorted({0, len(text), *(place for place in cuts if place < len(text))})
    for start, end in pairwise(ends):
        cut.feed(text[start:end])
    return cut.plan()


@pytest.mark.parametrize(("shard_lines", "shard_bytes"), [(1, 1 << 20), (3, 1 << 20), (100, 40)])
@given(lines=st.lists(pieces_of_lines, max_size=12), ends=st.booleans(), cuts=st.lists(st.integers(0, 400), max_size=6))
def test_every_request_is_in_one_part_however_the_bytes_come(
    shard_lines: int, shard_bytes: int, lines: list[bytes], ends: bool, cuts: list[int]
) -> None:
    text = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    expected = [(number, line.strip()) for number, line in enumerate(lines) if line.strip()]
    if not expected:
        with pytest.raises(InvalidInput, match="no lines") as caught:
            planned(text, cuts)
        assert caught.value.reason == "empty_file"
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envelope, "SHARD_LINES", shard_lines)
        patch.setattr(envelope, "SHARD_BYTES", shard_bytes)
        plan = planned(text, cuts)
    parts = [requests_of(text[span.start : span.end], span) for span in plan.spans]
    assert [request for part in parts for request in part] == expected
    assert [len(part) for part in parts] == [span.rows for span in plan.spans] == list(plan.rows)
    assert all(0 < span.rows <= shard_lines for span in plan.spans)
    custom_ids: set[str] = set()
    repeated = []
    for number, line in expected:
        id_ = envelope.custom_id_of(line)
        if id_ in custom_ids:
            repeated.append(number)
        elif id_ is not None:
            custom_ids.add(id_)
    assert list(plan.repeated) == repeated


def test_a_part_is_bounded_in_lines_and_in_bytes() -> None:
    plan = planned(b"{}\n" * (SHARD_LINES + 1), [])
    assert plan.rows == (SHARD_LINES, 1)
    large = b'"' + b"x" * (SHARD_BYTES // 2) + b'"\n'
    assert planned(large * 5, [7]).rows == (2, 2, 1)


def test_as_many_lines_as_openai_takes_and_no_more() -> None:
    cut = BatchCut("f")
    cut.feed(b"{}\n\n" * MAX_LINES)
    assert sum(cut.plan().rows) == MAX_LINES
    with pytest.raises(InvalidInput, match="50000") as caught:
        cut.feed(b"{}\n")
    assert caught.value.reason == "too_many_items"


def test_a_line_without_an_end_is_refused_before_all_of_it_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelope, "MAX_LINE_BYTES", 100)
    cut = BatchCut("f")
    cut.feed(b"{}\n" + b"x" * 100)
    with pytest.raises(InvalidInput, match="line 2 has more than 100 bytes"):
        cut.feed(b"x")


@pytest.mark.parametrize(
    ("change", "code", "names"),
    [
        ({"custom_id": None}, "missing_required_parameter", "custom_id"),
        ({"custom_id": ""}, "missing_required_parameter", "custom_id"),
        ({"custom_id": 7}, "missing_required_parameter", "custom_id"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"url": "/v1/encode"}, "mismatched_url", "url"),
        ({"url": "/v1/embeddingsx"}, "mismatched_url", "url"),
        ({"url": None}, "mismatched_url", "url"),
        ({"body": None}, "missing_required_parameter", "body"),
        ({"body": [1]}, "missing_required_parameter", "body"),
    ],
)
def test_what_is_wrong_with_a_line_is_named(change: dict[str, object], code: str, names: str) -> None:
    with pytest.raises(BadLine, match=f"line 8: {names}: ") as caught:
        read(json.dumps({**GOOD, **change}).encode(), 7, "/v1/embeddings", is_repeated=False)
    assert caught.value.code == code


def test_a_request_is_read() -> None:
    line = json.dumps(GOOD).encode()
    assert read(line, 0, "/v1/embeddings", is_repeated=False) == ("a", "/v1/embeddings", b'{"input": "x"}')
    with pytest.raises(BadLine) as caught:
        read(line, 0, "/v1/embeddings", is_repeated=True)
    assert caught.value.code == "duplicate_custom_id"


def test_a_native_request_names_its_model_in_the_path_or_in_the_body() -> None:
    def path(**change: object) -> str:
        line = json.dumps({**GOOD, "url": "/v1/encode", "body": {"items": []}, **change}).encode()
        return read(line, 0, "/v1/encode", is_repeated=False).path

    assert path(body={"model": "a/b"}) == path(url="/v1/encode/a/b") == "/v1/encode/a/b"
    for body in ({}, {"model": ""}, {"model": 7}):
        with pytest.raises(BadLine, match=r"body\.model"):
            path(body=body)


def test_what_was_written_is_read_again() -> None:
    rows = [
        envelope.answer("a", "r1", 200, b'{"usage":{"total_tokens":7},"x":"\\n"}', 7),
        envelope.answer("b", "r2", 400, b'{"error":{"code":"invalid_input"}}'),
        envelope.answer("c", "r3", 404, b'{"code":"MODEL_NOT_FOUND"}'),
        envelope.answer("d", "r4", 500, b"[]"),
        envelope.answer("e\n", "r5", 200, b"[]"),
        envelope.failure(None, "invalid_json_line", "line 1: no JSON"),
    ]
    assert written(b"".join(row.text + b"\n" for row in rows)) == rows
    assert [row.code for row in rows] == [
        None,
        "invalid_input",
        "MODEL_NOT_FOUND",
        "HTTP_500",
        None,
        "invalid_json_line",
    ]
    assert json.loads(rows[0].text)["response"] == {
        "status_code": 200,
        "request_id": "r1",
        "body": {"usage": {"total_tokens": 7}, "x": "\n"},
    }


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body", "other"])
def test_a_line_of_many_values_is_cut_and_read_in_the_memory_of_its_text(name: str) -> None:
    """No part of the line is decoded before its route decodes it within the bounds of that route."""
    bomb = "[" + ",".join(["{}"] * 300_000) + "]"
    line = json.dumps({**GOOD, name: None}).replace("null", bomb).encode()
    tracemalloc.start()
    try:
        cut = BatchCut("f")
        cut.feed(line + b"\n")
        assert [span.rows for span in cut.plan().spans] == [1]
        if name == "other":
            assert read(line, 0, "/v1/embeddings", is_repeated=False).custom_id == "a"
        else:
            with pytest.raises(BadLine, match=name):
                read(line, 0, "/v1/embeddings", is_repeated=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(line)


def test_a_shard_has_so_many_inputs_by_lists_and_not_by_commas_in_texts() -> None:
    lists = json.dumps({**GOOD, "body": {"input": ["a, b"] * 1000}}).encode() + b"\n"
    texts = json.dumps({**GOOD, "body": {"input": "a, b" * 1000}}).encode() + b"\n"
    for line, expected in ((lists, [5, 5]), (texts, [10])):
        cut = BatchCut("f")
        cut.feed(line * 10)
        assert [span.rows for span in cut.plan().spans] == expected
