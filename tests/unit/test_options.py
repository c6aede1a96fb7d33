"""Options of a request to a model: every parameter, its levels and its prompts."""

from __future__ import annotations

from typing import Any

import pytest
from catalogue_examples import CATALOGUE, LATE, entry, options, refused

from sie_contracts.errors import InvalidInput
from sie_contracts.models import families
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.muvera import Muvera
from sie_contracts.models.options import (
    DTYPES,
    MAX_LABELS,
    NEUTRAL,
    altered,
    counting,
    decoding,
    known_fields,
    run_options,
    tokenizing,
)
from sie_contracts.wire.messages import Operation, RunOptions

pytestmark = pytest.mark.usefixtures("sample_families")

# precedence

LEVELS = ("params.", "", "params.options.", "options.")


def at(level: str, name: str, value: Any) -> dict[str, Any]:
    body: dict[str, Any] = {name: value}
    for key in reversed(level.split(".")[:-1]):
        body = {key: body}
    return body


def merged(*bodies: dict[str, Any]) -> dict[str, Any]:
    union: dict[str, Any] = {}
    for body in bodies:
        for key, value in body.items():
            union[key] = (
                merged(union[key], value) if isinstance(value, dict) and isinstance(union.get(key), dict) else value
            )
    return union


PARAMETERS: list[tuple[str, list[Any], str, list[Any]]] = [
    ("max_seq_length", [16, 32, 64, 128], "max_tokens", [16, 32, 64, 128]),
    ("truncate", ["NONE", "START", "END", "START"], "truncate", ["NONE", "START", "END", "START"]),
    ("normalize", [False, True, False, True], "normalize", [False, True, False, True]),
    ("pooling", ["cls", "mean", "last", "last_token"], "pooling", ["cls", "mean", "last", "last"]),
    ("dimensions", [128, 256, 384, 128], "dimensions", [128, 256, 0, 128]),
    (
        "output_types",
        [["sparse"], ["dense"], ["dense", "sparse"], ["sparse", "dense"]],
        "outputs",
        [("sparse",), ("dense",), ("dense", "sparse"), ("sparse", "dense")],
    ),
    ("instruction", ["a", "b", "c", "d"], "prefix", [f"Instruct: {text}\nQuery: " for text in "abcd"]),
    ("default_instruction", ["a", "b", "c", "d"], "prefix", [f"Instruct: {text}\nQuery: " for text in "abcd"]),
    (
        "query_template",
        ["a {text}", "b{text}", "{text}c", "d {instruction}: {text}"],
        "prefix",
        ["a ", "b", "", "d retrieve: "],
    ),
    ("doc_template", ["a {text}", "b{text}", "c {text} c", "{text}"], "prefix", ["a ", "b", "c ", ""]),
    ("output_dtype", ["float16", "int8", "ubinary", "uint8"], "dtype", ["float16", "int8", "ubinary", "uint8"]),
    ("is_query", [True, False, 1, 0], "is_query", [True, False, True, False]),
    ("input_type", ["query", "document", "search_query", "x"], "is_query", [True, False, True, False]),
    ("lora_id", ["a", "b", "c", "d"], "lora", ["a", "b", "c", "d"]),
    ("lora", ["a", "b", "c", "d"], "lora", ["a", "b", "c", "d"]),
]


@pytest.mark.parametrize(
    ("name", "values", "field", "expected"), PARAMETERS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_one_precedence_for_every_parameter(name: str, values: list[Any], field: str, expected: list[Any]) -> None:
    """`params.X`, `X`, `params.options.X`, `options.X`: the first that is set wins, where null and [] are not set."""
    base = {"is_query": True} if "instruction" in name or name == "query_template" else {}
    levels = dict(zip(LEVELS, values, strict=True))
    for first, level in enumerate(LEVELS):
        below = [at(later_level, name, levels[later_level]) for later_level in LEVELS[first:]]
        for unset in (None, []):
            above = [at(earlier_level, name, unset) for earlier_level in LEVELS[:first]]
            body = merged(base, *above, *below)
            assert getattr(options(body).run, field) == expected[first], (level, unset)


def test_without_a_parameter_the_profile_counts_then_the_model_then_the_contract() -> None:
    assert options({}).run == RunOptions(prefix="passage: ", pooling="mean")
    assert options({}, "org/rich:cls").run == RunOptions(
        prefix="Instruct: from the profile\nQuery: ",
        suffix=" ?",
        pooling="cls",
        is_query=True,
        instruction="from the profile",
    )
    assert options({}, "org/rich:short").run.normalize is False
    assert options({"normalize": True}, "org/rich:short").run.normalize is True
    assert options({"is_query": False, "instruction": None}, "org/rich:cls").run.prefix == "passage: "
    assert options({}, "org/Model").run == RunOptions()


# fingerprint

Asked = tuple[str, Operation, dict[str, Any]]
ENCODE: Asked = ("org/rich", "encode", {})
QUERY: Asked = ("org/rich", "encode", {"is_query": True})
HYBRID: Asked = ("org/m3", "score", {})
LABELS = {"labels": ["person"]}
FINDER: Asked = ("org/finder", "extract", LABELS)
CLASSIFIER: Asked = ("org/labeller", "extract", LABELS)
RELATER: Asked = ("org/relater", "extract", LABELS)
RELATED: Asked = ("org/relations", "extract", {**LABELS, "relation_labels": ["knows"]})
PRUNER: Asked = ("org/pruner", "extract", {"instruction": "what is asked"})
NLI: Asked = ("org/nli", "extract", LABELS)
CLASSES: Asked = ("org/classes", "extract", {})
DETECTOR: Asked = ("org/detector", "extract", LABELS)
READER: Asked = ("org/reader", "extract", {})
LISTENER: Asked = ("org/listener", "extract", {})
MORE = [
    entry("org/labeller", family="sample-classes", outputs={"classifications": 0}),
    entry("org/relater", family="sample-mentions", outputs={"relations": 0}),
    entry("org/pruner", family="pruner", outputs={"entities": 0}),
    entry("org/classes", family="text-classifier", outputs={"classifications": 0}),
    entry("org/listener", family="sample-listener", inputs=["audio"], outputs={"entities": 0}),
]
ALL = Catalogue({**CATALOGUE.entries, **{model_entry.id: model_entry for model_entry in MORE}})
# each parameter that changes numbers: where, and two values other than the default
VARYING: dict[str, tuple[Asked, Any, Any]] = {
    "truncate": (ENCODE, "START", "NONE"),
    "max_seq_length": (ENCODE, 16, 32),
    "normalize": (("org/rich:short", "encode", {}), True, 1),
    "pooling": (ENCODE, "cls", "last"),
    "dimensions": (ENCODE, 128, 256),
    "output_dtype": (ENCODE, "int8", "binary"),
    "muvera": (("org/late", "encode", {}), True, {"seed": 7}),
    "instruction": (QUERY, "find", "look"),
    "default_instruction": (QUERY, "find", "look"),
    "query_template": (QUERY, "a {text}", "b {text}"),
    "doc_template": (ENCODE, "a {text}", "{text}"),
    "score_mode": (HYBRID, "dense", "sparse"),
    "score_weights": (HYBRID, {"dense": 0.5}, {"sparse": 1.0}),
    "threshold": (FINDER, 0.1, 0.2),
    "flat_ner": (FINDER, False, True),
    "multi_label": (NLI, True, False),
    "merge_adjacent_entities": (FINDER, True, False),
    "hypothesis_template": (NLI, "It is {}.", "About {}."),
    "raw_scores": (CLASSES, True, False),
    "top_k": (RELATER, 1, 2),
    "relation_threshold": (RELATED, 0.1, 0.2),
    "label_thresholds": (NLI, {"a": 0.1}, {"a": 0.2}),
    "examples": (CLASSIFIER, [{"text": "a", "labels": ["b"]}], [{"text": "a", "labels": ["c"]}]),
    "prune_threshold": (PRUNER, 0.1, 0.2),
    "highlight_threshold": (PRUNER, 0.1, 0.2),
    "box_threshold": (DETECTOR, 0.1, 0.2),
    "text_threshold": (DETECTOR, 0.1, 0.2),
    "score_threshold": (DETECTOR, 0.1, 0.2),
    "task": (READER, "<s_docvqa>", "<s_cord>"),
    "language": (LISTENER, "en", "de"),
    "max_new_tokens": (READER, 8, 16),
}
REGISTERED = families.rows()
NOT_PARAMETERS = {"items", "inputs", "input", "params", "options", "model", "query"}


def variant(case: Asked, **fields: Any) -> str:
    spec, operation, base = case
    return run_options(ALL.resolve(spec), {**base, **fields}, operation)[1].run.variant


def test_each_parameter_changes_the_fingerprint_or_has_a_reason_not_to() -> None:
    assert VARYING.keys() | NEUTRAL.keys() == known_fields() - NOT_PARAMETERS
    assert not VARYING.keys() & NEUTRAL.keys()


@pytest.mark.parametrize("family", REGISTERED)
def test_each_parameter_of_a_registered_family_is_one_of_these(family: str) -> None:
    assert REGISTERED[family].parameters <= VARYING.keys() | NEUTRAL.keys()


@pytest.mark.parametrize("name", VARYING)
def test_a_parameter_that_changes_numbers_changes_the_fingerprint_at_every_level(name: str) -> None:
    case, value, second_value = VARYING[name]
    assert variant(case) == ""
    variants = {variant(case, **at(level, name, value)) for level in LEVELS}
    assert len(variants) == 1
    assert "" not in variants
    if value != second_value:
        assert variant(case, **{name: second_value}) not in {"", *variants}


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        (ENCODE, {"is_query": True}),
        (ENCODE, {"input_type": "query", "output_types": ["sparse"], "lora": "a", "timing": "items"}),
        (ENCODE, {"normalize": True, "dimensions": 384, "pooling": "mean", "truncate": True}),
        (("org/late", "encode", {}), {"output_types": ["multivector"]}),
        (FINDER, {"labels": ["place"], "precompute_labels": True, "threshold": 0.4}),
        (PRUNER, {"instruction": "something else"}),
        (LISTENER, {"word_times": True}),
    ],
)
def test_parameters_that_change_no_number_leave_the_fingerprint(case: Asked, fields: dict[str, Any]) -> None:
    assert variant(case, **fields) == ""


def test_several_alterations_are_one_variant_that_depends_on_all_of_them() -> None:
    usual = RunOptions()
    first = altered(usual, document_tokens=64)
    assert altered(usual, document_tokens=0) is usual
    assert len({first.variant, altered(first, dimensions=8).variant, altered(usual, dimensions=8).variant, ""}) == 4


# parameters


def test_matryoshka_widths_are_the_native_one_and_those_of_the_profile() -> None:
    """In the options of a run 0 means the model's native width."""
    assert [options({"dimensions": width}).run.dimensions for width in (128, 256, 384, 128.0)] == [128, 256, 0, 128]
    assert options({"dimensions": 64}, "org/rich:short").run.dimensions == 64
    for width, spec in ((64, "org/rich"), (256, "org/rich:short"), (128, "org/Model"), (385, "org/rich")):
        error = refused({"params": {"dimensions": width}}, spec)
        assert (error.reason, error.param) == ("bad_dimensions", "params.dimensions")
        assert "384" in error.message, "the allowed ones are named"
    for wrong in (0, -1, 1.5, True, "128", [128], {}, float("nan"), float("inf")):
        assert refused({"dimensions": wrong}).reason == "schema"


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [(None, "END"), (True, "END"), (False, "NONE"), ("END", "END"), ("start", "START"), ("None", "NONE"), ([], "END")],
)
def test_truncation_has_three_ways_and_two_old_spellings(truncation: Any, expected: str) -> None:
    assert options({"truncate": truncation}).run.truncate == expected


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("truncate", "MIDDLE", "schema"),
        ("truncate", 1, "schema"),
        ("normalize", "yes", "schema"),
        ("normalize", 2, "schema"),
        ("is_query", "x", "schema"),
        ("input_type", 1, "schema"),
        ("instruction", 5, "schema"),
        ("pooling", "median", "schema"),
        ("output_types", "dense", "schema"),
        ("output_types", [1], "schema"),
        ("output_types", ["multivector"], "unsupported_output"),
        ("output_dtype", "bfloat16", "unsupported_dtype"),
        ("output_dtype", "int4", "unsupported_dtype"),
        ("max_seq_length", 0, "schema"),
        ("max_seq_length", 257, "schema"),
        ("max_seq_length", "10", "schema"),
        ("on_item_error", "skip", "schema"),
        ("timing", "all", "schema"),
    ],
)
def test_a_bad_parameter_is_refused_by_its_path_at_every_level(name: str, value: Any, reason: str) -> None:
    """The message repeats no text of the client."""
    for level in LEVELS:
        error = refused(at(level, name, value))
        assert (error.reason, error.param) == (reason, level + name)
        assert not isinstance(value, str) or value in ("bfloat16", "int4", "dense") or repr(value) not in error.message


@pytest.mark.parametrize("path", ["params", "options"])
@pytest.mark.parametrize("value", [[1], "x", 3, True])
def test_a_level_that_is_not_a_map_is_refused(path: str, value: Any) -> None:
    assert refused({path: value}).param == path


def test_how_the_reply_is_shaped() -> None:
    assert (options({}).on_item_error, options({}).item_timing) == ("slot", False)
    request_options = options({"params": {"on_item_error": "fail", "options": {"timing": "items"}}})
    assert (request_options.on_item_error, request_options.item_timing) == ("fail", True)


# one verb's own options


@pytest.mark.parametrize(
    ("spec", "operation"),
    [("org/Model", "score"), ("org/cross", "encode"), ("org/ner", "score"), ("org/late", "extract")],
)
def test_a_verb_that_the_model_does_not_do_is_refused(spec: str, operation: Operation) -> None:
    with pytest.raises(InvalidInput) as caught:
        options({"labels": ["x"]}, spec, operation=operation)
    assert (caught.value.reason, caught.value.param) == ("unsupported_task", "model")


def test_each_dtype_of_the_contract_and_no_other() -> None:
    assert [options({"output_dtype": name}).run.dtype for name in DTYPES] == [
        "float32",
        "float16",
        "int8",
        "uint8",
        "binary",
        "ubinary",
    ]
    specs = ("org/m3", "org/m3:sparse", "org/rich")
    dtypes = [options(body, spec).run.dtype for body in ({}, {"output_dtype": "float32"}) for spec in specs]
    assert dtypes == ["float16", "int8", "float32", "float32", "float32", "float32"]


def test_output_types_of_a_profile_yield_to_those_of_the_request() -> None:
    assert options({}, "org/m3:both").run.outputs == ("dense", "sparse")
    assert options({"output_types": ["multivector"]}, "org/m3:both").run.outputs == ("multivector",)
    assert options({"output_types": []}, "org/m3:both").run.outputs == ("dense", "sparse")


def test_is_query_of_a_profile_yields_to_the_request_in_either_spelling() -> None:
    assert options({}, "org/rich:cls").run.is_query
    for body in (
        {"is_query": False},
        {"options": {"is_query": 0}},
        {"input_type": "document"},
        {"is_query": 0, "input_type": "query"},
    ):
        assert not options(body, "org/rich:cls").run.is_query
    assert options({"is_query": True, "params": {"input_type": "document"}}).run.is_query, "is_query wins at any level"


MUVERA = Muvera(num_repetitions=10, seed=1)  # the keys of the entry over those of the contract


@pytest.mark.parametrize(
    ("spec", "value", "expected"),
    [
        ("org/late", None, None),
        ("org/late", False, None),
        ("org/late", True, MUVERA),
        ("org/late", {}, MUVERA),
        ("org/late", {"seed": 9}, Muvera(num_repetitions=10, seed=9)),
        ("org/late", {"seed": None, "num_repetitions": None}, MUVERA),
        ("org/late:index", None, Muvera(num_repetitions=20, seed=1, final_projection_dim=None)),
        ("org/late:index", {"final_projection_dim": 64}, Muvera(num_repetitions=20, seed=1, final_projection_dim=64)),
        ("org/late:index", True, Muvera(num_repetitions=20, seed=1, final_projection_dim=None)),
        ("org/late:index", False, None),
        ("org/late:plain", None, MUVERA),
        ("org/late:never", None, None),
        ("org/late:never", True, MUVERA),
        ("org/m3", True, Muvera()),
    ],
)
def test_muvera_is_merged_key_by_key_from_the_contract_to_the_request(
    spec: str, value: Any, expected: Muvera | None
) -> None:
    """The order is contract, entry, profile, request. False in a profile removes all, unless the request sets it."""
    for level in LEVELS:
        run = options(at(level, "muvera", value), spec).run
        assert run.muvera == expected
        assert run.outputs == (("dense",) if expected or spec == "org/m3" else ("multivector",))


@pytest.mark.parametrize(
    ("spec", "value", "reason", "path"),
    [
        ("org/rich", True, "muvera_unsupported", "muvera"),
        ("org/late", {"seeds": 1}, "schema", "muvera.seeds"),
        ("org/late", {"seed": "x"}, "schema", "muvera.seed"),
        ("org/late", 3, "schema", "muvera"),
        ("org/late", "yes", "schema", "muvera"),
        ("org/late", {"num_repetitions": 0}, "schema", "muvera.num_repetitions"),
    ],
)
def test_muvera_that_cannot_be_is_refused_by_its_path(spec: str, value: Any, reason: str, path: str) -> None:
    for level in LEVELS:
        error = refused(at(level, "muvera", value), spec)
        assert (error.reason, error.param) == (reason, level + path)


def test_muvera_gives_a_dense_output_beside_the_others() -> None:
    body = {"muvera": True, "output_types": ["multivector", "dense"]}
    assert options(body, "org/late").run.outputs == ("multivector", "dense")
    assert refused({"output_types": ["dense"]}, "org/late").reason == "unsupported_output"
    assert refused({"muvera": True, "output_types": ["sparse"]}, "org/late").reason == "unsupported_output"


def test_a_lora_is_the_request_s_then_the_profile_s_then_the_model_s() -> None:
    assert [options({}, spec).run.lora for spec in ("org/rich", "org/m3", "org/m3:sparse", "org/m3:both")] == [
        "",
        "org/base-lora",
        "org/sparse-lora",
        "org/sparse-lora",
    ]
    for name in ("lora", "lora_id"):
        assert options({"params": {name: "mine"}}, "org/m3:sparse").run.lora == "mine"
    assert options({"lora": "same", "options": {"lora_id": "same"}}).run.lora == "same"
    assert options({"lora_id": "x"}, "org/cross", operation="score").run.lora == "x"


def test_a_lora_that_is_ambiguous_or_that_the_model_cannot_have_is_refused() -> None:
    for level in LEVELS:
        error = refused(merged(at(level, "lora", "a"), {"lora_id": "b"}))
        assert (error.reason, error.param) == ("lora_conflict", f"{level}lora")
    for spec, operation, extra in (("org/judge", "score", {}), ("org/finder", "extract", {"labels": ["x"]})):
        for name in ("lora_id", "lora"):
            error = refused({"options": {name: "a"}, **extra}, spec, operation=operation)
            assert (error.reason, error.param) == ("lora_unsupported", f"options.{name}")


def test_a_score_has_the_mode_of_the_request_the_profile_the_model_or_the_contract() -> None:
    specs = ("org/late", "org/m3", "org/m3:sparse", "org/m3:both", "org/cross")
    runs = {spec: options({}, spec, operation="score").run for spec in specs}
    assert {spec: run.outputs for spec, run in runs.items()} == {
        "org/late": ("multivector",),
        "org/m3": ("dense", "sparse", "multivector"),
        "org/m3:sparse": ("sparse",),
        "org/m3:both": ("sparse",),
        "org/cross": (),
    }
    for level in LEVELS:
        run = options(at(level, "score_mode", "colbert"), "org/m3:sparse", operation="score").run
        assert run.outputs == ("multivector",)
        assert refused(at(level, "score_mode", "best"), "org/m3", operation="score").param == f"{level}score_mode"
    with pytest.raises(InvalidInput, match="no output dense") as caught:
        options({"score_mode": "hybrid"}, "org/late", operation="score")
    assert caught.value.reason == "unsupported_output"


def test_parameters_are_layered_key_by_key() -> None:
    """The order is the model, the profile that a profile extends, the profile itself, the request."""
    score_parameters = {
        spec: options({}, f"org/m3{spec}", operation="score").run.parameters for spec in ("", ":sparse", ":both")
    }
    assert score_parameters == {
        "": {"score_mode": "hybrid", "score_weights": {"dense": 1.0}},
        ":sparse": {"score_mode": "sparse", "score_weights": {"dense": 1.0}},
        ":both": {"score_mode": "sparse", "score_weights": {"colbert": 1.0}},
    }
    base = {"threshold": 0.4, "multi_label": True}
    finder_parameters = {
        spec: options({"labels": ["x"]}, f"org/finder{spec}", operation="extract").run.parameters
        for spec in ("", ":sure", ":nested")
    }
    assert finder_parameters == {
        "": base,
        ":sure": {**base, "threshold": 0.9},
        ":nested": {**base, "threshold": 0.9, "flat_ner": False},
    }
    over = options({"labels": ["x"], "flat_ner": 1}, "org/finder:nested", operation="extract").run.parameters
    assert over == {**base, "threshold": 0.9, "flat_ner": True}


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("score_weights", {"dense": -1}, ".dense"),
        ("score_weights", {"late": 1}, ""),
        ("score_weights", {"dense": 0}, ""),
        ("score_weights", {"dense": "1"}, ".dense"),
        ("score_weights", {"dense": float("nan")}, ".dense"),
        ("score_weights", 1, ""),
    ],
)
def test_score_weights_are_numbers_of_at_least_zero(name: str, value: Any, param: str) -> None:
    for level in LEVELS:
        error = refused(at(level, name, value), "org/m3", operation="score")
        assert (error.reason, error.param) == ("schema", level + name + param)


def test_a_query_and_its_documents_have_their_own_prompts() -> None:
    run = options({}, "org/late", operation="score").run
    assert (run.query_prefix, run.prefix) == ("q: ", "d: ")
    own = {"query_template": "find {text}!", "options": {"doc_template": "in {text}."}}
    run = options(own, "org/late", operation="score").run
    assert (run.query_prefix, run.query_suffix, run.prefix, run.suffix) == ("find ", "!", "in ", ".")


@pytest.mark.parametrize(
    ("spec", "body", "instruction"),
    [
        ("org/judge", {}, "judge"),
        ("org/judge:find", {}, "find"),
        ("org/judge:find", {"instruction": "mine"}, "mine"),
        ("org/judge", {"options": {"default_instruction": "else"}}, "else"),
        ("org/judge:find", {"default_instruction": "else"}, "find"),
        ("org/judge", {"instruction": "{query} {document} {instruction} {0}"}, "{query} {document} {instruction} {0}"),
    ],
)
def test_a_pair_template_is_cut_into_pieces_that_no_instruction_can_change(
    spec: str, body: dict[str, Any], instruction: str
) -> None:
    run = options(body, spec, operation="score").run
    assert run.pieces == ((f"<i> {instruction} <q> ", "query", ""), (" <d> ", "document", ""))
    assert run.outputs == ()


def test_labels_keep_their_order_and_their_case() -> None:
    body = {"labels": ["Zebra", "ant", "Ant", "ant"]}
    assert options(body, "org/finder", operation="extract").run.labels == ("Zebra", "ant", "Ant", "ant")
    levels = {level: at(level, "labels", [level or "top"]) for level in LEVELS}
    for first, level in enumerate(LEVELS):
        body = merged(
            *(at(above, "labels", []) for above in LEVELS[:first]), *(levels[below] for below in LEVELS[first:])
        )
        assert options(body, "org/nli", operation="extract").run.labels == (level or "top",)


@pytest.mark.parametrize("spec", ["org/finder", "org/nli"])
@pytest.mark.parametrize("body", [{}, {"labels": []}, {"params": {"labels": None}}])
def test_labels_are_required_where_there_is_nothing_to_look_for_without(spec: str, body: dict[str, Any]) -> None:
    error = refused(body, spec, operation="extract")
    assert (error.reason, error.param) == ("labels_required", "labels")
    assert options(body, "org/ner", operation="extract").run.labels == ()


@pytest.mark.parametrize("labels", ["person", [1], [""], [" "], {"person": 1}, [None], ["x"] * (MAX_LABELS + 1)])
def test_labels_that_are_none_are_refused(labels: Any) -> None:
    for level in LEVELS:
        error = refused(at(level, "labels", labels), "org/finder", operation="extract")
        assert (error.reason, error.param) == ("schema", f"{level}labels")


def test_a_threshold_is_the_request_s_the_profile_s_the_model_s_or_the_family_s() -> None:
    def threshold(spec: str, **body: Any) -> float | None:
        return options({"labels": ["x"], **body}, spec, operation="extract").run.threshold

    assert threshold("org/finder") == 0.4
    assert threshold("org/finder:sure") == threshold("org/finder:nested") == 0.9
    assert threshold("org/finder:sure", options={"threshold": 0}) == 0.0
    assert threshold("org/nli") is None
    for level in LEVELS:
        for wrong in ("0.5", True, float("inf"), [0.5]):
            error = refused(merged({"labels": ["x"]}, at(level, "threshold", wrong)), "org/finder", operation="extract")
            assert (error.reason, error.param) == ("schema", f"{level}threshold")


@pytest.mark.parametrize(
    ("spec", "name", "value"),
    [
        ("org/finder", "flat_ner", "no"),
        ("org/finder", "multi_label", 2),
        ("org/finder", "merge_adjacent_entities", "x"),
        ("org/nli", "hypothesis_template", "about it"),
        ("org/nli", "hypothesis_template", "{} {}"),
        ("org/nli", "hypothesis_template", 3),
        ("org/detector", "box_threshold", "0.5"),
        ("org/detector", "text_threshold", True),
        ("org/detector", "score_threshold", [0.5]),
        ("org/relations", "relation_labels", "knows"),
        ("org/relations", "relation_labels", ["knows", " "]),
        ("org/relations", "relation_labels", ["knows"] * 101),
        ("org/relations", "relation_threshold", 1.5),
        ("org/reader", "task", 1),
        ("org/reader", "task", "x" * 101),
        ("org/reader", "max_new_tokens", 0),
        ("org/reader", "max_new_tokens", "all"),
    ],
)
def test_an_option_of_a_family_is_checked(spec: str, name: str, value: Any) -> None:
    for level in LEVELS:
        error = refused(merged({"labels": ["x"]}, at(level, name, value)), spec, operation="extract")
        assert (error.reason, error.param) == ("schema", level + name)


def test_an_option_of_another_family_is_a_warning() -> None:
    request_options = options(
        {"labels": ["x"], "options": {"hypothesis_template": "about {}"}}, "org/finder", operation="extract"
    )
    assert request_options.warnings == (
        "options.hypothesis_template: ignored, no such option of org/finder on this route",
    )
    assert "hypothesis_template" not in request_options.run.parameters


@pytest.mark.parametrize("family", ["sample-schemas", "theirs"])
def test_the_parts_of_a_schema_come_from_no_request_and_no_entry(family: str) -> None:
    """They are what a schema becomes, so values of that name would be read as a schema that nobody has checked."""
    run = {"parameters": {"parts": 5}}
    own = entry("org/own", family=family, outputs={"classifications": 0}, run=run)
    body = {"params": {"labels": ["a"], "parts": "x"}}
    request_options = run_options(Catalogue({own.id: own}).resolve("org/own"), body, "extract")[1]
    assert "parts" not in request_options.run.parameters
    assert [warning.partition(":")[0] for warning in request_options.warnings] == ["params.parts"]


@pytest.mark.parametrize("operation", ["encode", "extract"])
def test_a_family_of_somebody_else_s_gets_all_options_that_no_route_knows(operation: Operation) -> None:
    """The options keep their JSON types. No warning is given, because the family checks its own options."""
    body = {
        "colour": ["blue"],
        "params": {"depth": {"a": [1, 2.5, None, True]}, "truncate": "START"},
        "options": {"size": 2},
    }
    request_options = options(body, "org/theirs", operation=operation, strict=True)
    assert request_options.run.parameters == {"colour": ["blue"], "size": 2, "depth": {"a": [1, 2.5, None, True]}}
    assert (request_options.run.truncate, request_options.warnings) == ("START", ())
    assert options({}, "org/theirs", operation=operation).run.parameters == {"colour": "red", "size": 1}


# prompts


@pytest.mark.parametrize(
    ("body", "prefix", "suffix"),
    [
        ({}, "passage: ", ""),
        ({"is_query": True}, "Instruct: retrieve\nQuery: ", " ?"),
        ({"is_query": 1, "instruction": "find"}, "Instruct: find\nQuery: ", " ?"),
        ({"input_type": "query"}, "Instruct: retrieve\nQuery: ", " ?"),
        ({"input_type": "search_query"}, "Instruct: retrieve\nQuery: ", " ?"),
        ({"input_type": "document"}, "passage: ", ""),
        ({"input_type": "anything"}, "passage: ", ""),
        ({"input_type": "query", "is_query": False}, "passage: ", ""),
        ({"instruction": "ignored without a place for it"}, "passage: ", ""),
        ({"is_query": True, "instruction": ""}, "Instruct: retrieve\nQuery: ", " ?"),
    ],
)
def test_the_prompt_is_the_models_own(body: dict[str, Any], prefix: str, suffix: str) -> None:
    run = options(body).run
    assert (run.prefix, run.suffix) == (prefix, suffix)


PROMPTED = entry(
    "org/prompted",
    prompts={"query": "q: {text}", "document": "d: {text}", "poem": "p: {text}"},
    default_prompt_name="poem",
    profiles={"instructed": {"run": {"instruction": "from the profile"}}, "queries": {"run": {"is_query": True}}},
)
UNASKED = {  # parameters: prefix on the native routes, prefix on those of other servers
    "nothing": ({}, "d: ", "p: "),
    "a side": ({"is_query": False}, "d: ", "d: "),
    "a query": ({"input_type": "search_query"}, "q: ", "q: "),
    "no prompt": ({"prompt_name": None}, "", ""),
    "no prompt, in options": ({"options": {"prompt_name": None}}, "", ""),
    "a prompt": ({"prompt_name": "document"}, "d: ", "d: "),
    "a prompt and a side": ({"prompt_name": "poem", "is_query": True}, "p: ", "p: "),
    "no prompt but an instruction": ({"prompt_name": None, "instruction": "find"}, "find ", "find "),
    "a template": ({"doc_template": "t: {text}"}, "t: ", "t: "),
    "a template and no prompt": ({"doc_template": "t: {text}", "prompt_name": None}, "t: ", "t: "),
}


@pytest.mark.parametrize("case", UNASKED)
def test_a_prompt_is_that_of_the_request_or_else_of_the_route(case: str) -> None:
    body, own, elsewhere = UNASKED[case]
    resolved = Catalogue({PROMPTED.id: PROMPTED}).resolve(PROMPTED.id)
    for side, prefix in (("document", own), ("", elsewhere)):
        request_options = run_options(resolved, {"params": body}, side=side)[1]
        assert request_options.run.prefix == prefix
        warned = case == "nothing" and side == "document"
        assert [warning.partition(":")[0] for warning in request_options.warnings] == ["prompt_name"] * warned


def test_a_named_query_prompt_makes_the_texts_queries() -> None:
    request_options = options({"prompt_name": "query"})
    assert (request_options.run.is_query, request_options.run.prefix, request_options.warnings) == (
        True,
        "Instruct: retrieve\nQuery: ",
        (),
    )


@pytest.mark.parametrize("name", ["nothing", "default_instruction", 3, []])
def test_a_prompt_that_the_model_lacks_is_refused(name: Any) -> None:
    assert refused({"options": {"prompt_name": name}}).param == "options.prompt_name"


@pytest.mark.parametrize("side", ["document", ""])
def test_a_score_knows_its_sides_on_every_route(side: Any) -> None:
    run = run_options(Catalogue({LATE.id: LATE}).resolve(LATE.id), {}, "score", side=side)[1].run
    assert (run.query_prefix, run.prefix) == ("q: ", "d: ")


def test_a_model_without_templates_takes_the_instruction_before_the_text() -> None:
    assert options({"instruction": "find this"}, "org/Model").run.prefix == "find this "
    assert options({"is_query": True}, "org/Model").run.prefix == ""


# unknown options


@pytest.mark.parametrize("level", LEVELS)
def test_an_unknown_option_is_a_warning_or_strictly_an_error(level: str) -> None:
    body = {"is_query": False} | at(level, "temperature", 0.5)
    assert options(body).warnings == (f"{level}temperature: ignored, no such option of org/rich on this route",)
    error = refused(body, strict=True)
    assert (error.reason, error.param) == ("unknown_option", f"{level}temperature")


def test_what_is_known_or_belongs_to_the_request_is_no_option() -> None:
    body = {
        "items": ["x"],
        "model": "m",
        "params": {"truncate": "END", "is_query": False, "options": {"timing": "items"}},
        "options": {"profile": "cls"},
    }
    assert options(body, strict=True).warnings == ()
    assert refused({"options": {"items": 1}}, strict=True).param == "options.items"


def test_the_options_of_what_the_tokenizer_answers() -> None:
    """The options of an encode do not count, except its prompt."""
    run = RunOptions(("sparse",), "query: ", " ?", "NONE", "cls", False, 16, 8, "lora", "int8", True)
    assert counting(run) == RunOptions((), "query: ", " ?", parameters={"count": True})
    assert tokenizing() == decoding() == RunOptions(())
    assert tokenizing("a ", " b", add_special_tokens=False) == RunOptions(
        (), "a ", " b", parameters={"add_special_tokens": False}
    )
    assert decoding(skip_special_tokens=False).parameters == {"skip_special_tokens": False}


@pytest.mark.parametrize("none", [{}, {"relation_labels": None}, {"relation_labels": []}])
def test_a_threshold_of_relations_without_their_labels_is_a_warning(none: dict[str, Any]) -> None:
    body = {"labels": ["x"], "params": {**none, "relation_threshold": 0.9}}
    warning = (
        "params.relation_threshold: ignored, no such option of org/relations on this route; it needs relation_labels"
    )
    assert options(body, "org/relations", operation="extract").warnings == (warning,)
    error = refused(body, "org/relations", operation="extract", strict=True)
    assert (error.reason, error.param) == ("unknown_option", "params.relation_threshold")


def test_relation_labels_stand_alone_where_the_family_needs_no_entities() -> None:
    outputs = {"entities": 0, "relations": 0}
    own = [
        entry("org/alone", family="sample-schemas", outputs=outputs),
        entry("org/between", family="sample-relations", outputs=outputs),
        entry("org/entities", family="sample-schemas", outputs={"entities": 0}),
    ]
    catalogue = Catalogue({model.id: model for model in own})
    body = {"params": {"relation_labels": ["knows"]}}
    request_options = run_options(catalogue.resolve("org/alone"), body, "extract")[1]
    assert (request_options.run.labels, request_options.run.parameters["relation_labels"]) == ((), ["knows"])
    for name, param, reason in (
        ("org/between", "labels", "labels_required"),
        ("org/entities", "params.relation_labels", "unsupported_output"),
    ):
        with pytest.raises(InvalidInput) as caught:
            run_options(catalogue.resolve(name), body, "extract")
        assert (caught.value.reason, caught.value.param) == (reason, param)
