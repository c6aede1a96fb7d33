"""Jobs as the public SDKs of SIE submit and read them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sie_bulk_jobs.datasets import templates
from sie_bulk_jobs.gateway.job_routes import is_public, requested
from sie_contracts.api.jobs import JobRequest
from sie_contracts.errors import InvalidInput

SENT: dict[str, Any] = {
    "src": "s3://bucket/in/",
    "connection": "bucket",
    "execution": "run",
    "operation": "encode",
    "model": "org/one",
    "field_map": {"input_field": "body", "id_field": "id", "carry": ["title"], "input_type": "text"},
}


def request_of(**changes: Any) -> JobRequest:
    """Return the native form of a public job, after the check of its input."""
    job_request = msgspec.convert(requested({**SENT, **changes}), JobRequest)
    templates.check(job_request.input, job_request.operation)
    return job_request


def test_the_fields_of_a_job_have_their_counterparts() -> None:
    job_request = request_of(output_types=["dense"], options={"instruction": "find"}, sink="s3://bucket/out/")
    assert (job_request.model, job_request.operation) == ("org/one", "encode")
    assert (job_request.input.url, job_request.input.text, job_request.input.id, job_request.input.keep) == (
        "s3://bucket/in/",
        "{body}",
        "id",
        ("title",),
    )
    assert job_request.output.url == "s3://bucket/out/"
    assert job_request.params == {"output_types": ["dense"], "options": {"instruction": "find"}}


def test_an_uploaded_file_is_named_by_its_id() -> None:
    assert request_of(src="upload://file-1", connection="").input.file == "file-1"


def test_a_score_has_one_query_for_all_rows_whose_braces_are_text() -> None:
    job_request = request_of(operation="score", options={"query": "what is {x}?"})
    assert (job_request.input.document, job_request.input.text, job_request.params) == ("{body}", "", {})
    assert templates.templates(job_request.input)["query"].text({}) == "what is {x}?"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"items": [{"text": "a"}]}, "items"),
        ({"execution": "plan"}, "execution"),
        ({"connection": "another"}, "connection"),
        ({"sink": "s3://other/", "sink_connection": "bucket"}, "sink_connection"),
        ({"sink": "inplace"}, "sink"),
        ({"sink": "upload://file-1"}, "sink"),
        ({"output_field": "vector"}, "output_field"),
        ({"field_map": {}}, "field_map.input_field"),
        ({"field_map": {"input_field": "{a}"}}, "field_map.input_field"),
        ({"field_map": {"input_field": "a", "input_type": "document"}}, "field_map.input_type"),
        ({"operation": "score"}, "options.query"),
        ({"operation": "generate"}, "operation"),
        ({"field_map": {"input_field": 3}}, "field_map.input_field"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_its_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        requested({**SENT, **changes})
    assert caught.value.param == param
    assert len(caught.value.message) > len(param) + 10


def test_a_job_of_ours_is_not_one_of_theirs() -> None:
    assert is_public(SENT)
    assert is_public({"items": []})
    assert not is_public({"input": {"file": "a"}, "source": 1})
