"""Aliases: their documents, the target of a key, and names that resolve through them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sie_contracts.errors import BundleConflict, ModelNotFound, ValidationFailed
from sie_contracts.models.alias_checks import changes_vectors, check
from sie_contracts.models.aliases import MAX_TARGETS, Alias, Shadow, Target, choose
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import ModelEntry, parse_document, parse_entry

COMMIT = "a" * 40


def model(name: str, commit: str = COMMIT, **more: Any) -> ModelEntry:
    weights = {"hub": "org/hub", "revision": commit}
    return parse_entry(
        {"id": name, "weights": weights, "family": "text-encoder", "outputs": {"dense": 4}, "max_tokens": 16, **more}
    )


PROFILES = {"plain": {"run": {"normalize": False}}, "short": {"run": {"dimensions": [2]}}}
LOCAL = {"path": "/models/x"}
SUMS, PINNED = {"digests": {"w": "1" * 64}}, {"hub": "org/hub", "revision": COMMIT}
RANKER = {"family": "cross-encoder", "outputs": {"score": 0}}
CATALOGUE = Catalogue.from_documents(
    {
        entry.id: entry
        for entry in (
            model("org/one", profiles=PROFILES),
            model("org/two", "b" * 40, profiles=PROFILES),
            model("org/Same", profiles=PROFILES),
            model("org/other-profile", profiles={**PROFILES, "plain": {}}),
            model("org/pooled", run={"pooling": "cls"}),
            parse_entry({**msgspec.to_builtins(model("org/local")), "weights": LOCAL}),
            parse_entry({**msgspec.to_builtins(model("org/local2")), "weights": LOCAL}),
            *(
                parse_entry(
                    {**msgspec.to_builtins(model(f"org/folder-{name}")), "weights": {"path": f"/{name}", **weights}}
                )
                for name, weights in (
                    ("a", SUMS),
                    ("b", SUMS),
                    ("c", {"digests": {"w": "2" * 64}}),
                    ("d", PINNED),
                    ("e", PINNED),
                )
            ),
            model("org/rank-a", **RANKER),
            model("org/rank-b", "c" * 40, **RANKER),
        )
    },
    {},
    {},
    "test:1",
)


def alias(*targets: Any, name: str = "search", **more: Any) -> Alias:
    document = parse_document({"id": name, "alias": list(targets), **more})
    assert isinstance(document, Alias)
    return document


def having(*aliases: Alias) -> Catalogue:
    return Catalogue.from_documents({**CATALOGUE.entries, **{entry.id: entry for entry in aliases}}, {}, {}, "test:2")


# ---- documents


SIX = [f"org/{number}" for number in range(MAX_TARGETS + 1)]
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"alias": []}, "$.alias"),
    ({"alias": SIX}, "$.alias"),
    ({"alias": [{"model": "org/one", "weight": 0}]}, "$.alias[0].weight"),
    ({"alias": ["org/one", f"org/one@{COMMIT}"]}, "$.alias[1].model"),
    ({"alias": "org/one", "weights": LOCAL}, "$.alias"),
    ({"alias": "org/one", "shadow": {"model": "org/two", "share": 0}}, "$.shadow.share"),
    ({"alias": "org/one", "id": "a b"}, "$.id"),
    ({"alias": "org/one", "id": "org/two"}, "$.id"),
    ({"alias": "org/one", "id": "ORG/TWO"}, "$.id"),
    ({"alias": "search"}, "$.alias[0].model"),
    ({"alias": "org/on"}, "$.alias[0].model"),
    ({"alias": "org/one@main"}, "$.alias[0].model"),
    ({"alias": "org/one:fast"}, "$.alias[0].model"),
    ({"alias": ["org/one", "org/two"]}, "$.alias[1].model"),
    ({"alias": ["org/one", "org/one:plain"]}, "$.alias[1].model"),
    ({"alias": ["org/one", "org/other-profile"]}, "$.alias[1].model"),
    ({"alias": ["org/folder-a", "org/folder-c"]}, "$.alias[1].model"),
    ({"alias": ["org/one", "org/folder-d"]}, "$.alias[1].model"),
    ({"alias": ["org/one", "org/rank-a"]}, "$.alias[1].model"),
    ({"alias": "org/one", "shadow": "org/rank-a"}, "$.shadow.model"),
    ({"alias": "org/one", "shadow": "org/one"}, "$.shadow.model"),
]


@pytest.mark.parametrize(("raw", "loc"), BROKEN)
def test_what_an_alias_may_not_say_names_the_field(raw: dict[str, Any], loc: str) -> None:
    with pytest.raises(ValidationFailed) as caught:
        check(parse_document({"id": "search", **raw}), CATALOGUE)  # type: ignore[arg-type]
    (fault,) = caught.value.extras["errors"]
    assert (caught.value.param, fault["loc"]) == (loc, loc)


ALIKE: list[dict[str, Any]] = [
    {"alias": "org/one:plain", "shadow": "org/two"},
    {"alias": ["org/one", "org/Same"]},  # the same weights and options by another name
    {"alias": ["org/one:short", "org/other-profile:short"]},
    {"alias": ["org/folder-a", "org/folder-b"]},
    {"alias": ["org/rank-a", "org/rank-b"]},  # scores fill no index
    {"alias": ["org/one", "org/two"], "force": True},
    {"alias": ["org/local", "org/local2"], "force": True},
    {"alias": ["org/one", "org/rank-a"], "force": True},
    {"alias": f"org/one@{COMMIT}:short"},
]


@pytest.mark.parametrize("raw", ALIKE)
def test_what_holds_is_let_through(raw: dict[str, Any]) -> None:
    check(alias(raw["alias"]) if isinstance(raw["alias"], str) else parse_document({"id": "search", **raw}), CATALOGUE)  # type: ignore[arg-type]


def test_an_alias_names_no_alias_and_no_twin_of_one() -> None:
    catalogue = having(alias("org/one"))
    for raw, loc in (
        ({"id": "find", "alias": "search"}, "$.alias[0].model"),
        ({"id": "find", "alias": "org/two", "shadow": "SEARCH"}, "$.shadow.model"),
        ({"id": "Search", "alias": "org/one"}, "$.id"),
    ):
        with pytest.raises(ValidationFailed) as caught:
            check(parse_document(raw), catalogue)  # type: ignore[arg-type]
        assert caught.value.param == loc
    check(alias("org/two"), catalogue)  # its own former version is no twin


@pytest.mark.parametrize(
    ("before", "after", "differs"),
    [
        (["org/one"], ["org/two"], True),
        (["org/one"], ["org/Same"], False),
        (["org/one"], ["org/one:plain"], True),
        (["org/rank-a"], ["org/rank-b"], False),
        (["org/gone"], ["org/one"], True),
        (["org/local"], ["org/local"], True),
        (["org/one", "org/Same"], ["org/Same"], False),
    ],
)
def test_whether_an_index_outlives_a_change_is_told(before: list[str], after: list[str], differs: bool) -> None:
    assert changes_vectors(alias(*before), alias(*after), CATALOGUE) is differs


# ---- names


def test_a_name_goes_through_an_alias() -> None:
    catalogue = having(alias("org/one", name="search"), alias("org/one:plain", name="fixed"))
    resolution = catalogue.resolve("search")
    assert (resolution.canonical, resolution.alias, resolution.requested) == ("org/one", "search", "search")
    assert catalogue.resolve("SEARCH").alias == "search"
    assert catalogue.resolve("default:/search").requested == "search"
    assert catalogue.resolve("search:plain").canonical == catalogue.resolve("fixed").canonical == "org/one:plain"
    assert catalogue.resolve(f"search@{COMMIT}").entry.id == "org/one"
    assert catalogue.resolve("fixed:plain").canonical == catalogue.resolve("fixed:default").canonical == "org/one:plain"
    assert catalogue.resolve("org/one").alias == ""
    for name, reason in (
        ("search@main", "revision_not_found"),
        ("search:fast", "profile_not_found"),
        ("fixed:short", "profile_not_found"),
    ):
        with pytest.raises(ModelNotFound) as caught:
            catalogue.resolve(name)
        assert caught.value.reason == reason
    with pytest.raises(BundleConflict):
        catalogue.resolve("other:/search")
    with pytest.raises(ModelNotFound):
        catalogue.resolve("search", follow=False)


def test_a_write_of_an_alias_makes_a_new_snapshot() -> None:
    two = CATALOGUE.with_model("search", alias("org/one"), 3, "test:2")
    three = two.with_model("search", alias("org/two"), 4, "test:3")
    assert [catalogue.resolve("search").entry.id for catalogue in (two, three)] == ["org/one", "org/two"]
    assert (two.revisions["search"], two.entries, CATALOGUE.aliases) == (3, CATALOGUE.entries, {})
    assert (two.resolve("SEARCH").alias, two.near("serch")) == ("search", ["search"])
    four = three.with_model("search", None, 5, "test:4")
    assert (four.aliases, four.near("serch")) == ({}, [])
    with pytest.raises(ModelNotFound):
        four.resolve("SEARCH")


# ---- keys

KEYS = [f"key {number}" for number in range(1500)]
weights = st.lists(st.integers(1, 1000), min_size=2, max_size=MAX_TARGETS)


def split(*parts: int, name: str = "search") -> Alias:
    return alias(*({"model": f"org/{number}", "weight": weight} for number, weight in enumerate(parts)), name=name)


@settings(max_examples=20)
@given(weights)
def test_keys_are_shared_out_by_weight(parts: list[int]) -> None:
    """The bound is five standard deviations of a binomial: a correct implementation exceeds it once in a million
    checks.
    """
    search_alias = split(*parts)
    counts = dict.fromkeys((target.model for target in search_alias.alias), 0)
    for key in KEYS:
        counts[choose(search_alias, key).model] += 1
    for target in search_alias.alias:
        share = target.weight / sum(parts)
        assert abs(counts[target.model] - share * len(KEYS)) <= 5 * (share * (1 - share) * len(KEYS)) ** 0.5 + 1


@settings(max_examples=60)
@given(weights, st.text(max_size=30), st.data())
def test_a_key_keeps_its_target(parts: list[int], key: str, data: st.DataObject) -> None:
    """The order of the targets, their revisions and the shadow do not matter. A higher weight costs a target no key."""
    search_alias = split(*parts)
    chosen = choose(search_alias, key)
    mixed = data.draw(st.permutations(search_alias.alias))
    if key:
        assert choose(msgspec.structs.replace(search_alias, alias=tuple(mixed), shadow=Shadow("org/x")), key) == chosen
    pinned = msgspec.structs.replace(
        search_alias, alias=tuple(Target(f"{target.model}@{COMMIT}", target.weight) for target in search_alias.alias)
    )
    assert choose(pinned, key).model == f"{chosen.model}@{COMMIT}"
    more = tuple(
        Target(target.model, target.weight + data.draw(st.integers(0, 50))) if target == chosen else target
        for target in search_alias.alias
    )
    assert choose(msgspec.structs.replace(search_alias, alias=more), key).model == chosen.model


def test_other_aliases_share_out_other_keys_and_nobody_gets_the_heaviest() -> None:
    search_alias, find_alias = split(50, 50), split(50, 50, name="find")
    same = sum(choose(search_alias, key).model == choose(find_alias, key).model for key in KEYS)
    assert 0.4 < same / len(KEYS) < 0.6
    assert choose(split(10, 90), "").model == "org/1"
    assert choose(split(50, 50), "").model == "org/0"


def test_the_target_of_a_key_is_the_same_on_every_gateway_and_in_every_version() -> None:
    """The targets are recorded: another hash would move keys in use to other targets."""
    search_alias = alias({"model": "org/one", "weight": 90}, {"model": "org/two", "weight": 10}, force=True)
    assert "".join(choose(search_alias, f"key {number}").model[-1] for number in range(40)) == GOLDEN


GOLDEN = "eeeeeeeeeeeeoeeeeeeeeeeeeeeoeeeoeeeeeeee"  # the last letters of one and two
