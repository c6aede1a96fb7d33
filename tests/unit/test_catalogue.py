"""What a model name means, and what a request asks of it."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie_contracts.catalogue import (
    Catalogue,
    LoadOptions,
    ModelEntry,
    Resolved,
    fingerprint,
    packaged_folder,
    parse_entry,
)
from sie_contracts.errors import BundleConflict, InvalidInput, ModelNotFound, ValidationFailed
from sie_contracts.messages import RunOptions
from sie_contracts.options import RequestOptions, describe, run_options
from sie_contracts.runtime.feed import packaged_catalogue, read_folder


def entry(model: str = "org/Model", **changes: Any) -> ModelEntry:
    return parse_entry({
        "id": model, "weights": {"hub": model, "revision": "abc123"}, "family": "text-encoder", "outputs": {"dense": 384},
        "max_tokens": 256, **changes,
    })  # fmt: skip


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
    prompts={"query": "Instruct: {instruction}\nQuery: {text} ?", "document": "passage: {text}", "default_instruction": "retrieve"},
    profiles=PROFILES,
)
CATALOGUE = Catalogue({each.id: each for each in (entry(), entry("org/other", bundle="vision"), RICH, entry("toy"), entry("TOY"))})


def options(body: dict[str, Any], spec: str = "org/rich", **kwargs: bool) -> RequestOptions:
    return run_options(CATALOGUE.resolve(spec), body, **kwargs)[1]


def refused(body: dict[str, Any], spec: str = "org/rich", **kwargs: bool) -> InvalidInput:
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
    """E13: bundle prefix, model in any case where one only is meant, revision, profile; echoed as asked, less the bundle."""
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
    assert found == extras or (reason == "" and extras["suggestions"] == found["suggestions"][: len(extras["suggestions"])])


@pytest.mark.parametrize("spec", ["vision:/org/Model", "none:/org/Model", "default:/org/other"])
def test_a_bundle_that_does_not_serve_the_model_is_a_conflict(spec: str) -> None:
    with pytest.raises(BundleConflict) as caught:
        CATALOGUE.resolve(spec)
    assert caught.value.extras == {"compatible_bundles": [CATALOGUE.resolve(spec.partition(":/")[2]).entry.bundle]}


def test_a_revision_with_a_colon_is_not_taken_for_a_profile() -> None:
    packaged = ModelEntry(id="p", weights=msgspec.convert({"package": "pkg"}, type(RICH.weights)), family="f", outputs={}, max_tokens=1)
    catalogue = Catalogue({"p": packaged})
    assert catalogue.resolve("p@pypi:pkg").canonical == "p"
    with pytest.raises(ModelNotFound, match="profile"):
        catalogue.resolve("p@pypi:pkg:fast")


@pytest.mark.parametrize(
    ("name", "first"),
    [("org/model", "org/Model"), ("Model", "org/Model"), ("org/mdoel", "org/Model"), ("orgg/rich", "org/rich"), ("RICH", "org/rich")],
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
    assert loads == {"default": LoadOptions("float32"), "half": LoadOptions("float16"), "half-child": LoadOptions("float16", True)}


def test_profiles_with_equal_load_options_share_one_copy_of_the_weights() -> None:
    residencies = {name: CATALOGUE.resolve(f"org/rich:{name}").residency for name in ("default", *PROFILES)}
    assert residencies == {
        "default": "org/rich", "short": "org/rich", "cls": "org/rich", "cls-short": "org/rich", "half": "org/rich:half",
        "half-again": "org/rich:half", "half-child": "org/rich:half-child",
    }  # fmt: skip


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
            found[key] = merged(found[key], value) if isinstance(value, dict) and isinstance(found.get(key), dict) else value
    return found


PARAMETERS: list[tuple[str, list[Any], str, list[Any]]] = [
    ("max_seq_length", [16, 32, 64, 128], "max_tokens", [16, 32, 64, 128]),
    ("truncate", ["NONE", "START", "END", "START"], "truncate", ["NONE", "START", "END", "START"]),
    ("normalize", [False, True, False, True], "normalize", [False, True, False, True]),
    ("pooling", ["cls", "mean", "last", "last_token"], "pooling", ["cls", "mean", "last", "last"]),
    ("dimensions", [128, 256, 384, 128], "dimensions", [128, 256, 0, 128]),
    ("output_types", [["sparse"], ["dense"], ["dense", "sparse"], ["sparse", "dense"]], "outputs",
     [("sparse",), ("dense",), ("dense", "sparse"), ("sparse", "dense")]),
    ("instruction", ["a", "b", "c", "d"], "prefix", [f"Instruct: {text}\nQuery: " for text in "abcd"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "field", "expected"), PARAMETERS, ids=lambda value: value if isinstance(value, str) else "")
def test_one_precedence_for_every_parameter(name: str, given: list[Any], field: str, expected: list[Any]) -> None:
    """`params.X`, `X`, `params.options.X`, `options.X`: the first that is set wins, where null and [] are not set."""
    base = {"is_query": True} if name == "instruction" else {}
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
        prefix="Instruct: from the profile\nQuery: ", suffix=" ?", pooling="cls"
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
        ("truncate", "MIDDLE", "schema"), ("truncate", 1, "schema"), ("normalize", "yes", "schema"), ("normalize", 2, "schema"),
        ("is_query", "x", "schema"), ("input_type", 1, "schema"), ("instruction", 5, "schema"), ("pooling", "max", "schema"),
        ("output_types", "dense", "schema"), ("output_types", [1], "schema"), ("output_types", ["multivector"], "unsupported_output"),
        ("output_dtype", "bfloat16", "unsupported_dtype"), ("output_dtype", "int4", "unsupported_dtype"),
        ("max_seq_length", 0, "schema"), ("max_seq_length", 257, "schema"), ("max_seq_length", "10", "schema"),
        ("on_item_error", "skip", "schema"), ("timing", "all", "schema"),
    ],
)  # fmt: skip
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
    assert options(body).warnings == (f"{level}temperature: ignored, no such option",)
    error = refused(body, strict=True)
    assert (error.reason, error.param) == ("unknown_option", f"{level}temperature")


def test_what_is_known_or_belongs_to_the_request_is_no_option() -> None:
    body = {"items": ["x"], "model": "m", "params": {"truncate": "END", "options": {"timing": "items"}}, "options": {"profile": "cls"}}
    assert options(body, strict=True).warnings == ()
    assert refused({"options": {"items": 1}}, strict=True).param == "options.items"


def test_warnings_are_few_and_short() -> None:
    """B10."""
    body = {f"{'x' * 1000}{number}": 1 for number in range(1000)}
    found = options(body).warnings
    assert len(found) == 20
    assert max(map(len, found)) < 100


@pytest.mark.parametrize(("value", "text"), [
    (None, "null"), (True, "True"), (3, "3"), (1.5, "1.5"), ("secret", "str"), (b"secret", "bytes"), ({"secret": 1}, "a map"),
    (["secret"], "a list"),
])  # fmt: skip
def test_a_value_in_a_message_is_told_by_its_kind(value: Any, text: str) -> None:
    """X4."""
    assert describe(value) == text


# fingerprint


def test_the_fingerprint_moves_with_all_that_moves_the_numbers_and_with_nothing_else() -> None:
    """W12."""
    load = LoadOptions("float32")
    base = fingerprint(RICH, load, "float32")
    moved = {
        "revision": {"weights": {"hub": "org/rich", "revision": "def"}}, "id": {"id": "org/rich2"}, "family": {"family": "other"},
        "max_tokens": {"max_tokens": 255}, "outputs": {"outputs": {"dense": 384}}, "prompts": {"prompts": {}},
        "pooling": {"run": {**msgspec.to_builtins(RICH.run), "pooling": "cls"}},
        "normalize": {"run": {**msgspec.to_builtins(RICH.run), "normalize": False}},
    }  # fmt: skip
    found = {name: fingerprint(parse_entry({**msgspec.to_builtins(RICH), **changes}), load, "float32") for name, changes in moved.items()}
    found["precision"] = fingerprint(RICH, load, "bfloat16")
    found["load options"] = fingerprint(RICH, LoadOptions("float32", True), "float32")
    assert len({base, *found.values()}) == len(found) + 1
    same = {**msgspec.to_builtins(RICH), "description": "new", "license": "mit", "bundle": "other"}
    assert fingerprint(parse_entry(same), load, "float32") == base
    assert len(base) == 16


def test_the_fingerprint_is_the_same_everywhere_and_always() -> None:
    """C7: a golden value; whoever changes how it is made changes every client's index."""
    assert fingerprint(entry(), LoadOptions(), "float32") == "526f6b4bbc25b313"


# entries


def raw(**changes: Any) -> dict[str, Any]:
    return {**msgspec.to_builtins(entry()), **changes}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"id": "a b"}, "$.id"), ({"id": "../x"}, "$.id"), ({"id": "a/../b"}, "$.id"), ({"id": ""}, "$.id"), ({"id": "x" * 256}, "$.id"),
        ({"id": "org/model/status"}, "$.id"), ({"id": "a:b"}, "$.id"), ({"id": "a@b"}, "$.id"), ({"id": 3}, "$.id"),
        ({"weights": {}}, "$.weights"), ({"weights": {"hub": "a/b"}}, "$.weights.revision"), ({"max_tokens": 0}, "$.max_tokens"),
        ({"outputs": {"dense": "wide"}}, "$.outputs[...]"), ({"unknown": 1}, "$"), ({"run": {"poling": "cls"}}, "$.run"),
        ({"run": {"pooling": "max"}}, "$.run.pooling"), ({"load": {"precision": "int4"}}, "$.load.precision"),
        ({"profiles": {"default": {}}}, "$.profiles"), ({"profiles": {"a b": {}}}, "$.profiles"),
        ({"profiles": {"a": {"extends": "none"}}}, "$.profiles.a.extends"), ({"prompts": {"query": "no place"}}, "$.prompts.query"),
    ],
)  # fmt: skip
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
    assert entry(outputs={"json": 0}).tasks == ()


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
        assert found.bundle in catalogue.bundles
        assert found.description
        assert found.license
