"""Faults of documents that msgspec refuses: each names its field and says what is expected there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sie_contracts.api import batches, jobs
from sie_contracts.schema_faults import fault_line, invalid_input

JOB: dict[str, Any] = {"model": "org/m", "input": {"file": "file-1"}}
SECRET = "a text of a client"


@pytest.mark.parametrize(
    ("kind", "document", "param", "text"),
    [
        (jobs.JobRequest, {"model": "org/m"}, "input", "missing"),
        (jobs.JobRequest, [], "body", "expected a map, got a list"),
        (jobs.JobRequest, {**JOB, "priority": 1}, "priority", "unknown field; expected some of model, input, output"),
        (jobs.JobRequest, {**JOB, "token_per_s": 1}, "token_per_s", "unknown field; did you mean `tokens_per_s`?"),
        (jobs.JobRequest, {**JOB, "shard_row": 1}, "shard_row", "unknown field; did you mean `shard_rows`?"),
        (jobs.JobRequest, {**JOB, "format": "npy"}, "format", "did you mean `input.format` or `output.format`?"),
        (
            jobs.JobRequest,
            {**JOB, "output": {"format": SECRET}},
            "output.format",
            "expected one of jsonl, npy, parquet",
        ),
        (jobs.JobRequest, {**JOB, "operation": SECRET}, "operation", "expected one of encode, extract, score"),
        (jobs.JobRequest, {**JOB, "deadline": SECRET}, "deadline", "expected a number, got a string"),
        (jobs.JobRequest, {**JOB, "x" * 5000: 1}, "x" * 64, "unknown field"),
        (batches.BatchRequest, {}, "input_file_id", "missing"),
    ],
)
def test_a_refused_body_names_the_field_and_no_value(kind: type, document: Any, param: str, text: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(document, kind)
    error = invalid_input(kind, refused.value)
    assert error.param == param
    assert text in error.message
    assert SECRET not in error.message
    assert len(error.message) < 500


def test_a_line_of_a_fault_has_the_path_of_its_field() -> None:
    for document, line in ((7, "expected a map, got a whole number"), ({"model": 7}, "model: expected a string")):
        with pytest.raises(msgspec.ValidationError) as refused:
            msgspec.convert(document, jobs.JobRequest)
        assert fault_line(jobs.JobRequest, refused.value).startswith(line)
