"""Values of options, query parameters and documents: their limits, and a refusal by name for everything else."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import yaml
from fake_adapter import toy_entry
from starlette.datastructures import QueryParams

from sie_contracts import yaml_text
from sie_contracts.api import batches, jobs
from sie_contracts.errors import InvalidInput
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.muvera import MAX_CELLS, MAX_WIDTH, Muvera
from sie_contracts.models.option_values import MAX_HYPOTHESIS, MAX_OWN_BYTES, muvera_parameters
from sie_contracts.models.options import MAX_LORA, run_options
from sie_contracts.schema_faults import fault_line, invalid_input
from sie_contracts.wire.messages import RunOptions
from sie_contracts.yaml_text import NotYAML, load, load_with_node
from sie_gateway.operations.handlers import flag, number, whole

CLASSES = toy_entry("toy/classes", family="zero-shot-classifier", outputs={"classifications": {}})
PRUNER = toy_entry("toy/pruner", family="pruner", outputs={"score": {}, "entities": {}})
MOODS = toy_entry("toy/moods", family="text-classifier", outputs={"classifications": {}})
ENCODER = toy_entry("toy/encoder", family="text-encoder")
OWN = toy_entry("toy/own", family="somebody/else")
HUGE = 10**400


def merged(entry: ModelEntry, operation: Any = "encode", **params: Any) -> RunOptions:
    return run_options(Catalogue.resolve_profile(entry, "default", entry.id), {"params": params}, operation)[1].run


@pytest.mark.parametrize(
    ("entry", "operation", "params", "path"),
    [
        (CLASSES, "extract", {"labels": ["a"], "threshold": HUGE}, "params.threshold"),
        (CLASSES, "extract", {"labels": ["a"], "threshold": float("nan")}, "params.threshold"),
        (CLASSES, "extract", {"labels": ["a"], "threshold": True}, "params.threshold"),
        (CLASSES, "extract", {"labels": ["a"], "threshold": 50}, "params.threshold"),
        (CLASSES, "extract", {"labels": ["a"], "threshold": -0.1}, "params.threshold"),
        (MOODS, "extract", {"threshold": 50}, "params.threshold"),
        (PRUNER, "extract", {"instruction": "a", "prune_threshold": 1.5}, "params.prune_threshold"),
        (
            CLASSES,
            "extract",
            {"labels": ["a"], "hypothesis_template": "canary" * MAX_HYPOTHESIS + "{}"},
            "params.hypothesis_template",
        ),
        (ENCODER, "encode", {"lora_id": "canary" * MAX_LORA}, "params.lora_id"),
        (ENCODER, "encode", {"dimensions": HUGE}, "params.dimensions"),
        (OWN, "encode", {"of_its_own": {"deep": [HUGE]}}, "params.of_its_own"),
        (OWN, "encode", {"of_its_own": ["canary"] * MAX_OWN_BYTES}, "params.of_its_own"),
    ],
)
def test_what_cannot_travel_is_named_and_not_repeated(
    entry: ModelEntry, operation: str, params: dict[str, Any], path: str
) -> None:
    with pytest.raises(InvalidInput) as raised:
        merged(entry, operation, **params)
    assert (raised.value.param, raised.value.reason) == (path, "schema")
    assert raised.value.message.startswith(f"{path}: expected ")
    assert "canary" not in raised.value.message


@pytest.mark.parametrize("least", [0, 1, 0.5])
def test_a_least_score_is_a_fraction_or_that_of_a_logit(least: float) -> None:
    assert merged(CLASSES, "extract", labels=["a"], threshold=least).parameters["threshold"] == least
    raw = merged(MOODS, "extract", raw_scores=True, threshold=-7.5).parameters
    assert (raw["threshold"], raw["raw_scores"]) == (-7.5, True)
    assert merged(OWN, threshold=50).parameters == {"threshold": 50}


def test_a_template_that_repeats_an_instruction_is_refused_before_it_is_filled() -> None:
    """The filled template would have 1 GB, from a request of 230 KB."""
    template, instruction = "{instruction}" * 10_000 + "{text}", "canary" * 16_000
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match=r"params\.doc_template: expected a prompt of at most") as raised:
            merged(ENCODER, doc_template=template, instruction=instruction)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
    assert "canary" not in raised.value.message
    assert merged(ENCODER, doc_template="{instruction}: {instruction} {text}", instruction="a").prefix == "a: a "


def test_options_of_a_foreign_family_keep_their_types() -> None:
    values = {"list": [1, 2.5, None, True], "map": {"a": {"b": "c"}}}
    assert merged(OWN, of_its_own=values).parameters == {"of_its_own": values}


LIMITS = {
    "num_repetitions": (1, 128),
    "num_simhash_projections": (0, 10),
    "projection_dim": (1, 1024),
    "final_projection_dim": (1, 1 << 20),
    "seed": (0, 2**53 - 1),
}
SMALL = Muvera(num_repetitions=1, num_simhash_projections=0, projection_dim=1)


def refusal(raw: Any, defaults: Muvera = SMALL) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        muvera_parameters("params.muvera", raw, defaults)
    assert caught.value.reason == "schema"
    assert caught.value.message.startswith(f"{caught.value.param}: ")
    return caught.value


def test_an_empty_map_is_the_defaults_of_the_model_else_of_the_contract() -> None:
    assert muvera_parameters("muvera", {}, Muvera()) == Muvera() == Muvera(40, 6, None, 10240, 42, False, False)
    assert muvera_parameters("muvera", {}, SMALL) == SMALL


def test_null_unsets_a_key_and_means_none_for_the_projections() -> None:
    raw = dict.fromkeys(Muvera.__struct_fields__)
    defaults = Muvera(num_repetitions=3, num_simhash_projections=2, projection_dim=8, seed=9, normalize=True)
    expected = msgspec.structs.replace(defaults, projection_dim=None, final_projection_dim=None)
    assert muvera_parameters("muvera", raw, defaults) == expected


@pytest.mark.parametrize("name", LIMITS)
def test_the_limits_are_inclusive(name: str) -> None:
    low, high = LIMITS[name]
    for value in (low, high, float(low)):
        got = getattr(muvera_parameters("muvera", {name: value}, SMALL), name)
        assert got == value
        assert type(got) is int
    for value in (low - 1, high + 1, low - 0.5):
        error = refusal({name: value}, SMALL)
        assert error.param == f"params.muvera.{name}"
        assert f"from {low} to {high}" in error.message
        assert error.message.endswith(f"got {value}")


@pytest.mark.parametrize("value", ["8", [], [8], {}, True, False, float("nan"), float("inf"), b"8"])
@pytest.mark.parametrize("name", LIMITS)
def test_a_number_of_another_type_is_refused_without_its_text(name: str, value: object) -> None:
    error = refusal({name: value})
    assert error.param == f"params.muvera.{name}"
    assert "8" not in error.message.partition("got ")[2]


@pytest.mark.parametrize("name", ["normalize", "fill_empty_partitions"])
def test_switches_are_booleans_or_0_and_1(name: str) -> None:
    for value in (True, False, 1, 0):
        assert getattr(muvera_parameters("muvera", {name: value}, Muvera()), name) is bool(value)
    for wrong in (2, -1, 1.0, "true", []):
        assert refusal({name: wrong}).param == f"params.muvera.{name}"


@pytest.mark.parametrize(
    ("parameters", "dim", "width"),
    [
        (Muvera(), 128, 10240),
        (Muvera(final_projection_dim=None), 128, 40 * 64 * 128),
        (Muvera(final_projection_dim=None, projection_dim=16), 128, 40 * 64 * 16),
        (Muvera(num_repetitions=2, num_simhash_projections=0, final_projection_dim=None), 3, 6),
        (Muvera(num_repetitions=128, num_simhash_projections=6, final_projection_dim=None), 128, MAX_WIDTH),
        (Muvera(num_repetitions=64, num_simhash_projections=10), 128, 10240),
    ],
)
def test_the_width_of_a_result(parameters: Muvera, dim: int, width: int) -> None:
    assert parameters.width(dim) == width


@pytest.mark.parametrize(
    ("parameters", "dim", "limit"),
    [
        (Muvera(num_repetitions=128, final_projection_dim=None), 129, MAX_WIDTH),
        (Muvera(num_repetitions=64, num_simhash_projections=10), 129, MAX_CELLS),
    ],
)
def test_a_result_that_is_too_wide_is_refused_with_the_limit(parameters: Muvera, dim: int, limit: int) -> None:
    parameters.width(dim - 1)
    with pytest.raises(InvalidInput, match=str(limit)) as caught:
        parameters.width(dim, "params.muvera")
    assert (caught.value.reason, caught.value.param) == ("schema", "params.muvera")


READERS: dict[str, Callable[[QueryParams], Any]] = {
    "flag": lambda query: flag(query, "field", default=True),
    "number": lambda query: number(query, "field", 2.5, 1.0, 4.0),
    "whole": lambda query: whole(query, "field", 2, 1, 4),
}


@pytest.mark.parametrize(
    ("reader", "query", "value"),
    [
        ("flag", "", True),
        ("flag", "field=false", False),
        ("flag", "field=true", True),
        ("number", "", 2.5),
        ("number", "field=4", 4.0),
        ("whole", "", 2),
        ("whole", "field=4", 4),
    ],
)
def test_a_right_value_or_the_default_is_read(reader: str, query: str, value: Any) -> None:
    assert READERS[reader](QueryParams(query)) == value


@pytest.mark.parametrize(
    ("reader", "values"),
    [
        ("flag", ["1", "True", "yes", ""]),
        ("number", ["0.9", "4.1", "nan", "inf", "x", ""]),
        ("whole", ["0", "5", "2.0", "x", "", "9" * 5000]),
    ],
)
def test_another_value_is_refused_by_the_name_of_its_parameter(reader: str, values: list[str]) -> None:
    for value in values:
        with pytest.raises(InvalidInput, match="expected") as refused:
            READERS[reader](QueryParams({"field": value}))
        assert refused.value.param == "field"


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


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "x: !!bool q",
        "x: !!timestamp a",
        "x: !!int abc",
        "x: !!python/name:os.system",
        "x: 2024-13-45",
        "x: " + "9" * 5000,
        "x: 0x" + "f" * 5000,
        "0x" + "f" * 500 + ": x",
        "[" * 100 + "]" * 100,
        "[" * 2000 + "]" * 2000,
        "[" * 200_000,
        "- " * 100 + "x",
        "a: &a [*a]",
        "a: 1\na: 2",
        "a: 1\n---\nb: 2",
    ],
)
@pytest.mark.parametrize("loader", ["CSafeLoader", "SafeLoader"])
def test_a_text_that_is_not_accepted_is_one_kind_of_error(
    text: str, loader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yaml_text, "_LOADER", getattr(yaml, loader))
    with pytest.raises(NotYAML):
        load(text)


def test_a_document_has_its_value_and_its_lines() -> None:
    value, node = load_with_node(b"a: [1, x]\nb: 2024-01-02 03:04:05\n")
    assert value["a"] == [1, "x"]
    assert node is not None
    assert [key.start_mark.line for key, _ in node.value] == [0, 1]
    assert load("") is None
