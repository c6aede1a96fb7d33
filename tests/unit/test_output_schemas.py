"""Schemas of an extraction as parts, their limits and refusals, and the values that are made of spans and scores."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sie_adapter.engine.schema_answers import FieldSpan, answer_parts, is_cut, number_in, value_of
from sie_contracts.errors import InvalidInput
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import parse_entry
from sie_contracts.models.options import run_options
from sie_contracts.models.output_schemas import (
    MAX_CHOICES,
    MAX_FIELDS,
    Decision,
    SchemaPart,
    TextField,
    TextRecord,
    parts_of,
    parts_of_groups,
    parts_of_schema,
)
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.runner import LABEL_RESULT_BYTES, ChunkLimits, plan, result_bytes

pytestmark = pytest.mark.usefixtures("sample_families")
PATH = "params.output_schema"
STRING = {"type": "string"}
ENUM = {"enum": ["a", "b"]}


class Line(msgspec.Struct):
    text: str
    price: float | None = None


class PydanticLine(pydantic.BaseModel):
    """A line of an order."""

    text: str
    price: float | None = None


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


class PydanticOrder(pydantic.BaseModel):
    buyer: str
    count: Annotated[int, pydantic.Field(ge=1, lt=9)]
    size: Size
    kind: Literal["a", "b"] | None
    lines: list[PydanticLine]
    first: PydanticLine | None = None


class Order(msgspec.Struct):
    buyer: str
    count: Annotated[int, msgspec.Meta(ge=1, lt=9)]
    size: Size
    kind: Literal["a", "b"] | None
    lines: list[Line]
    first: Line | None = None


def entry_of(name: str, family: str, output: str, **fields: Any) -> Any:
    raw = {"id": f"org/{name}", "weights": {"path": "x"}, "family": family, "outputs": {output: 0}}
    return parse_entry({**raw, "max_tokens": 512, **fields})


ENTRIES = [
    entry_of("spans", "sample-schemas", "entities"),
    entry_of("decide", "sample-schemas", "classifications"),
    entry_of("classes", "sample-classes", "classifications"),
    entry_of("nli", "zero-shot-classifier", "classifications"),
    entry_of("scales", "sample-scales", "classifications"),
    entry_of("finder", "sample-entities", "entities"),
    entry_of("tags", "token-classifier", "entities"),
    entry_of(
        "ready",
        "sample-schemas",
        "entities",
        run={"parameters": {"output_schema": {"type": "object", "properties": {"a": STRING}}}},
    ),
]
CATALOGUE = Catalogue({entry.id: entry for entry in ENTRIES})


def of(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **more}


def parts(schema: Any, *, finds_spans: bool = True) -> tuple[SchemaPart, ...]:
    return parts_of_schema(PATH, schema, "org/model", finds_spans=finds_spans)


def run(model: str, **params: Any) -> Any:
    return run_options(CATALOGUE.resolve(f"org/{model}"), {"items": ["a"], "params": params}, "extract")[1]


def refused(schema: Any, *, finds_spans: bool = True) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        parts(schema, finds_spans=finds_spans)
    assert caught.value.message.startswith(f"{caught.value.param}: ")
    return caught.value


# parts


def test_each_kind_of_value_is_a_decision_or_a_property_of_a_record() -> None:
    schema = of(
        {
            "name": {"type": "string", "description": "of the buyer"},
            "tags": {"type": "array", "items": STRING},
            "count": {"type": "integer", "minimum": 1, "exclusiveMaximum": 9},
            "price": {"type": ["number", "null"]},
            "mood": {"enum": ["calm", 3, True, None]},
            "topics": {"type": "array", "items": ENUM},
            "is_late": {"type": "boolean"},
            "seller": of({"name": STRING, "is_new": {"type": "boolean"}, "size": ENUM}),
            "lines": {"type": "array", "items": of({"text": STRING})},
        },
        title="order",
    )
    assert parts(schema) == (
        TextRecord(
            (),
            "order",
            (
                TextField("name", "string", "of the buyer"),
                TextField("tags", "string", is_list=True),
                TextField("count", "integer", minimum=1, below=9),
                TextField("price", "number", is_nullable=True),
            ),
        ),
        Decision(("mood",), ("calm", "3", "true"), ("calm", 3, True)),
        Decision(("topics",), ("a", "b"), ("a", "b"), is_many=True),
        Decision(("is_late",), ("is late",), (True, False)),
        TextRecord(
            ("seller",),
            "seller",
            (
                TextField("name", "string"),
                TextField("is_new", "choice", labels=("yes", "no"), values=(True, False)),
                TextField("size", "choice", labels=("a", "b"), values=("a", "b")),
            ),
        ),
        TextRecord(("lines",), "lines", (TextField("text", "string"),), is_many=True),
    )


# refusals


@pytest.mark.parametrize(
    ("schema", "place", "text"),
    [
        (STRING, "", "the schema of an object"),
        ({}, "", "expected one of"),
        (of({"a": of({"b": of({"c": STRING})})}), ".properties.a.properties.b", "too deep"),
        (
            of({"a": {"type": "array", "items": of({"b": of({"c": STRING})})}}),
            ".properties.a.items.properties.b",
            "deep",
        ),
        (
            of({"a": of({"b": {"type": "array", "items": {"type": "array"}}})}),
            ".properties.a.properties.b.items",
            "deep",
        ),
        (of({"a": {"type": "array", "items": {"type": "array", "items": STRING}}}), ".properties.a.items", "deep"),
        (of({"a": {"type": "string", "pattern": "x"}}), ".properties.a.pattern", "not supported"),
        (of({"a": {"type": "string", "format": "date"}}), ".properties.a.format", "not supported"),
        (of({"a": {"type": "array"}}), ".properties.a.items", "a JSON Schema"),
        (of({"a": {"type": "array", "items": {"type": "boolean"}}}), ".properties.a.items", "expected one boolean"),
        (of({"a": {"type": "integer", "minimum": "1"}}), ".properties.a.minimum", "finite number"),
        (of({"a": {"enum": []}}), ".properties.a.enum", "at least one"),
        (of({"a": {"enum": ["1", 1]}}), ".properties.a.enum", "twice"),
        (of({"a": {"enum": ["x", {"b": 1}]}}), ".properties.a.enum[1]", "a string"),
        (of({"a": {"enum": ["x" * 101]}}), ".properties.a.enum[0]", "100 characters"),
        (of({"a": {"type": "string", "description": "x" * 1001}}), ".properties.a.description", "1000"),
        (of({"": STRING}), ".properties.", "100 characters"),
        (of({"a": {"anyOf": [STRING, {"type": "number"}]}}), ".properties.a.anyOf", "null"),
        (of({"a": {"$ref": "#/$defs/b"}}), ".properties.a.$ref", "a definition"),
        (of({"a": {"$ref": "https://a/b"}}), ".properties.a.$ref", "a definition"),
        (of({"a": {"type": "object", "additionalProperties": STRING}}), ".properties.a.additionalProperties", "true"),
        (of({"a": {"type": "object"}}), ".properties.a", "with properties"),
        (of({"a": True}), ".properties.a", "a JSON Schema"),
        (of([]), ".properties", "a map"),  # type: ignore[arg-type]
        (of({f"p{n}": STRING for n in range(MAX_FIELDS + 1)}), ".properties", f"at most {MAX_FIELDS}"),
        (
            of({name: {"enum": [f"{n}" for n in range(MAX_CHOICES // 2 + 1)]} for name in "ab"}),
            "",
            f"at most {MAX_CHOICES}",
        ),
        (of({"a": STRING}, description="x" * (64 << 10)), "", "65536 bytes"),
    ],
)
def test_a_schema_without_an_answer_is_refused_with_its_json_path(schema: Any, place: str, text: str) -> None:
    error = refused(schema)
    assert (error.reason, error.param) == ("schema", PATH + place)
    assert text in error.message


def test_the_limits_are_inclusive() -> None:
    assert len(parts(of({f"p{n}": ENUM for n in range(MAX_FIELDS)}))) == MAX_FIELDS
    [decision] = parts(of({"a": {"enum": [str(n) for n in range(MAX_CHOICES)]}}))
    assert isinstance(decision, Decision)
    assert len(decision.labels) == MAX_CHOICES


def test_references_in_a_circle_are_refused() -> None:
    error = refused(of({"a": {"$ref": "#/$defs/b"}}, **{"$defs": {"b": {"$ref": "#/$defs/b"}}}))
    assert "at most 8 references" in error.message


@pytest.mark.parametrize(
    ("schema", "place", "subject"),
    [
        (of({"a": STRING}), ".properties.a", "a string"),
        (of({"a": ENUM, "b": {"type": "array", "items": {"type": "number"}}}), ".properties.b.items", "a number"),
        (of({"a": of({"b": {"type": "integer"}})}), ".properties.a.properties.b", "an integer"),
        (of({"a": {"type": "array", "items": of({"b": ENUM})}}), ".properties.a", "a list of objects"),
    ],
)
@pytest.mark.parametrize("model", ["decide", "classes", "nli"])
def test_a_part_that_a_family_cannot_answer_is_refused_by_name(
    model: str, schema: dict[str, Any], place: str, subject: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        run(model, output_schema=schema)
    assert (caught.value.reason, caught.value.param) == ("unsupported_output", PATH + place)
    assert f"org/{model} chooses among labels" in caught.value.message
    assert subject in caught.value.message


def test_an_integer_with_bounds_is_a_scale_where_the_family_reads_one() -> None:
    schema = of({"size": {"type": "integer", "minimum": -1, "maximum": 1, "description": "How large?"}})
    scale = Decision(("size",), ("-1", "0", "1"), (-1, 0, 1), "How large?", is_scale=True)
    assert parts_of(run("scales", output_schema=schema).run.parameters) == (scale,)
    nested = run("scales", output_schema=of({"a": schema})).run.parameters
    assert parts_of(nested) == (msgspec.structs.replace(scale, path=("a", "size")),)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "integer"}, "integers for minimum and maximum"),
        ({"type": "integer", "minimum": 0.5, "maximum": 2}, "integers for minimum and maximum"),
        ({"type": "integer", "minimum": True, "maximum": 2}, "integers for minimum and maximum"),
        ({"type": "integer", "minimum": 0, "maximum": 2, "exclusiveMaximum": 2}, "integers for minimum and maximum"),
        ({"type": "integer", "minimum": 0, "maximum": 10}, "got 11 levels"),
        ({"type": "integer", "minimum": 0, "maximum": 1 << 63}, f"got {(1 << 63) + 1} levels"),
        ({"type": "integer", "minimum": 1, "maximum": 0}, "got 0 levels"),
        ({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 1}}, "a list of integers"),
        ({"type": "number", "minimum": 0, "maximum": 1}, "not a number"),
    ],
)
def test_a_scale_that_is_none_is_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        run("scales", output_schema=of({"a": schema}))


# options of a run


def test_a_schema_takes_the_place_of_labels() -> None:
    options = run("spans", output_schema=of({"a": STRING})).run
    assert (options.labels, parts_of(options.parameters)) == ((), parts(of({"a": STRING}, title="record")))
    assert "output_schema" not in options.parameters
    with pytest.raises(InvalidInput, match="labels to look for, or an output_schema"):
        run("spans", output_schema={"type": "object"})
    assert run("classes", labels=["x"], output_schema={"type": "object"}).run.labels == ("x",)


def test_groups_of_a_request_replace_the_schema_of_a_profile() -> None:
    groups = {"g": ["p", "q"]}
    assert parts_of(run("ready", label_groups=groups).run.parameters) == parts_of_groups("", groups, is_many=False)


def test_labels_of_decisions_follow_those_of_a_request_where_each_has_a_row() -> None:
    schema = of({"a": ENUM, "is_new": {"type": "boolean"}})
    assert run("nli", labels=["x"], output_schema=schema).run.labels == ("x", "a", "b", "is new")
    assert run("classes", labels=["x"], output_schema=schema).run.labels == ("x",)
    assert run("nli", label_groups={"g": ["p", "q"]}, options={"multi_label": True}).run.labels == ("p", "q")


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"label_groups": {}}, "params.label_groups"),
        ({"label_groups": {"a": "b"}}, "params.label_groups.a"),
        ({"label_groups": {"a": ["b", "b"]}}, "params.label_groups.a"),
        ({"label_groups": {"a": [""]}}, "params.label_groups.a[0]"),
        ({"label_groups": {" ": ["b"]}}, "params.label_groups. "),
        ({"label_groups": {f"g{n}": ["b"] for n in range(MAX_FIELDS + 1)}}, "params.label_groups"),
        ({"label_groups": {"a": ["b"]}, "output_schema": of({"a": ENUM})}, "params.label_groups"),
        ({"labels": ["a"], "label_thresholds": {"a": 2}}, "params.label_thresholds.a"),
        ({"labels": ["a"], "label_thresholds": ["a"]}, "params.label_thresholds"),
        ({"labels": ["a"], "examples": [{"text": "a", "labels": {"g": 1}}]}, "params.examples[0]"),
    ],
)
def test_faults_of_groups_thresholds_and_examples_have_their_path(params: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        run("classes", **params)
    assert (caught.value.reason, caught.value.param) == ("schema", param)


def test_a_schema_counts_as_one_pass_for_each_part() -> None:
    """The classes of a schema count as bytes of the result."""
    items, limits = [RequestItem("x" * 400)], ChunkLimits(1 << 20, 1 << 20, 1 << 20)
    costs, sizes = [], []
    for params in ({"labels": ["x"]}, {"output_schema": of({"a": ENUM, "b": {"type": "boolean"}})}):
        [chunk], _ = plan(items, None, "extract", ENTRIES[0], run("spans", **params).run, limits)
        costs.append(chunk.cost)
        sizes.append(result_bytes("extract", ENTRIES[0], run("spans", **params).run)[0])
    assert costs[1] >= 2 * costs[0]
    assert sizes[1] - sizes[0] == sum(len(label) + LABEL_RESULT_BYTES for label in ("a.a", "a.b", "b.true", "b.false"))


# values


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", 12.0),
        ("-3.5 %", -3.5),
        ("\u22123", -3.0),
        ("covid-19", 19.0),
        ("1,299.50 EUR", 1299.5),
        ("1.299,50", 1299.5),
        ("1,299", 1299.0),
        ("0,299 kg", 0.299),
        ("-0,125", -0.125),
        ("1.299", 1.299),
        ("0,5", 0.5),
        ("12 345", 12345.0),
        ("12'345.60", 12345.6),
        ("1.299.000", 1299000.0),
        ("$12.", 12.0),
        ("3 to 5", None),
        ("3 5", None),
        ("1,29,3", None),
        ("none", None),
        ("", None),
        ("9" * 65, None),
    ],
)
def test_a_text_with_one_number_is_that_number(text: str, number: float | None) -> None:
    assert number_in(text) == number


@pytest.mark.parametrize(
    ("bounds", "text", "value"),
    [
        ({"minimum": 3}, "3", 3),
        ({"minimum": 3}, "2", None),
        ({"maximum": 3}, "3", 3),
        ({"maximum": 3}, "4", None),
        ({"above": 3}, "3", None),
        ({"below": 3}, "3", None),
        ({"above": 2, "below": 4}, "3", 3),
        ({}, "3.5", None),
        ({}, "9" * 20, None),
    ],
)
def test_a_whole_number_is_in_its_range(bounds: dict[str, float], text: str, value: int | None) -> None:
    assert value_of(TextField("a", "integer", **bounds), text) == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "span", "expected"),
    [
        ("about 3.5 km", "about 3", True),
        ("about 3.5 km", "5 km", True),
        ("1,299 EUR", "299 EUR", True),
        ("in 1843.", "1843", False),
        ("in 1843.", "1843.", False),
        ("3, 4", "3", False),
        ("x12", "12", False),
        ("at -5 degrees", "5", True),
        ("covid-19", "19", False),
    ],
)
def test_a_span_does_not_cut_a_number(text: str, span: str, expected: bool) -> None:
    start = text.index(span)
    assert is_cut(TextField("a", "number"), text, start, start + len(span)) is expected
    assert not is_cut(TextField("a", "string"), text, start, start + len(span))


def span(text: str, score: float, start: int) -> FieldSpan:
    return {"text": text, "score": score, "start": start, "end": start + len(text)}


def test_values_have_evidence_under_their_path() -> None:
    schema = of(
        {
            "name": STRING,
            "tags": {"type": "array", "items": STRING},
            "none": {"type": ["string", "null"]},
            "lost": STRING,
            "mood": ENUM,
            "topics": {"type": "array", "items": ENUM},
            "is_new": {"type": "boolean"},
            "lines": {"type": "array", "items": of({"price": {"type": "number"}, "size": ENUM})},
            "gone": of({"a": STRING}),
        }
    )
    candidates = {"name": [span("Ada", 0.9, 4), span("Bob", 0.6, 0)], "tags": [span("y", 0.8, 9), span("x", 0.7, 2)]}
    chosen: FieldSpan = {"text": "b", "score": 0.75, "start": None, "end": None}
    results = [
        [candidates],
        {"a": 0.25, "b": 0.75},
        {"a": 0.5, "b": 0.4},
        {"is new": 0.25},
        [{"price": [span("2.5", 0.9, 12)], "size": [chosen]}, {"size": [chosen]}],
        [],
    ]
    answer = answer_parts(parts(schema), results, {"topics": 0.45})
    assert answer.data == {
        "name": "Ada",
        "tags": ["x", "y"],
        "none": None,
        "mood": "b",
        "topics": ["a"],
        "is_new": False,
        "lines": [{"price": 2.5, "size": "b"}, {"size": "b"}],
    }
    assert [(row["label"], row["text"], row["score"]) for row in answer.entities] == [
        ("name", "Ada", 0.9),
        ("tags[0]", "x", 0.7),
        ("tags[1]", "y", 0.8),
        ("lines[0].price", "2.5", 0.9),
    ]
    assert [(row["label"], row["score"]) for row in answer.classifications] == [
        ("mood.b", 0.75),
        ("mood.a", 0.25),
        ("topics.a", 0.5),
        ("topics.b", 0.4),
        ("is_new.false", 0.75),
        ("is_new.true", 0.25),
        ("lines[0].size.b", 0.75),
        ("lines[1].size.b", 0.75),
    ]


KEYWORDS = ("type", "properties", "items", "enum", "const", "$ref", "anyOf", "oneOf", "$defs", "minimum", "required")
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["object", "array", "#/$defs/a", ""])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from((*KEYWORDS, "a")), inner, max_size=4),
    max_leaves=12,
)


def path_of(read: Callable[[], object]) -> str | None:
    """Return the parameter that is refused, or PATH if none is refused."""
    try:
        read()
    except InvalidInput as error:
        return error.param
    return PATH


@given(st.dictionaries(st.sampled_from(KEYWORDS), VALUES), st.booleans())
@example({"type": {"a": 1}}, True)
@example({"type": [["string"], "null"]}, False)
def test_whatever_stands_in_a_schema_is_answered_or_refused_with_its_path(
    schema: dict[str, Any], finds_spans: bool
) -> None:
    for wrapped in (schema, {"type": "object", "properties": {"a": schema}}):
        path = path_of(lambda wrapped=wrapped: parts_of_schema(PATH, wrapped, "org/model", finds_spans=finds_spans))
        assert (path or "").startswith(PATH)
    path = path_of(lambda: parts_of_groups(PATH, schema, is_many=True))
    assert (path or "").startswith(PATH)


def test_classes_of_msgspec_and_pydantic_have_the_same_parts() -> None:
    ours, theirs = parts(msgspec.json.schema(Order)), parts(PydanticOrder.model_json_schema())
    line = (TextField("text", "string"), TextField("price", "number", is_nullable=True))
    assert ours == (
        TextRecord((), "Order", (TextField("buyer", "string"), TextField("count", "integer", minimum=1, below=9))),
        Decision(("size",), ("large", "small"), ("large", "small")),
        Decision(("kind",), ("a", "b"), ("a", "b")),
        TextRecord(("lines",), "lines", line, is_many=True),
        TextRecord(("first",), "first", line, is_nullable=True),
    )
    [record, size, *rest] = theirs
    assert (record, *rest) == (msgspec.structs.replace(ours[0], name="PydanticOrder"), *ours[2:])
    assert isinstance(size, Decision)
    assert set(size.values) == {"small", "large"}


def test_a_text_that_cannot_be_scored_has_no_decision() -> None:
    answer = answer_parts(parts(of({"a": ENUM, "b": {"type": "array", "items": ENUM}})), [{}, {}], {})
    assert (answer.data, answer.classifications) == ({"b": []}, [])
