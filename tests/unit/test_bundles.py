"""Choice of the bundle of a model: by its family, by the one that it names, by the one that a request or a pool
names.
"""

from __future__ import annotations

from typing import Any

import pytest
from fake_adapter import toy_entry
from inprocess import settings_of

from sie_broker.memory import MemoryServer
from sie_contracts.errors import BundleConflict, ValidationFailed
from sie_contracts.models import families
from sie_contracts.models.bundles import BundleEntry, parse_bundle, serving
from sie_contracts.models.catalogue import Catalogue, packaged_folder
from sie_contracts.models.entries import ModelEntry
from sie_contracts.wire.records import ReservationSpec
from sie_gateway.fleet.lanes import Fleet
from sie_runtime.feed import read_bundles

BUNDLES = {
    bundle.id: bundle
    for bundle in (
        BundleEntry("spare", priority=7),
        BundleEntry("texts", priority=1, families=("toy", "other")),
        BundleEntry("eyes", families=("eye",)),
    )
}


def entry(model: str, family: str = "toy", bundle: str = "", **more: Any) -> ModelEntry:
    return toy_entry(model, family=family, bundle=bundle, **more)


CATALOGUE = Catalogue(
    {
        model_entry.id: model_entry
        for model_entry in (
            entry("org/free", profiles={"plain": {"run": {"normalize": False}}}),
            entry("org/pinned", bundle="spare"),
            entry("org/eye", "eye"),
            entry("org/lost", bundle="gone"),
            entry("org/wrong", "toy", "eyes"),
        )
    },
    {},
    BUNDLES,
)


def test_the_lowest_priority_number_of_those_that_have_the_family_comes_first() -> None:
    assert serving(BUNDLES, "toy") == ("texts", "spare")
    assert serving(BUNDLES, "eye") == ("eyes", "spare")
    assert serving(BUNDLES, "nose") == ("spare",)
    assert serving({"b": BundleEntry("b"), "a": BundleEntry("a")}, "toy") == ("a", "b")
    assert serving(BUNDLES, "toy", "spare") == ("spare",)
    assert serving(BUNDLES, "toy", "eyes") == serving(BUNDLES, "toy", "gone") == ()
    assert serving({}, "toy") == ("default",)
    assert serving({}, "toy", "named") == ("named",)


def test_built_in_stands_for_every_row_that_needs_no_environment_of_its_own() -> None:
    built_in = tuple(name for name, row in families.rows().items() if not row.extra)
    assert parse_bundle({"id": "a", "families": ["built-in"]}).families == built_in
    more = parse_bundle({"id": "a", "families": ["text-encoder", "built-in", "mine"]}).families
    assert set(more) == {*built_in, "mine"}
    packaged = read_bundles(packaged_folder() / "bundles")
    assert packaged["default"].families == built_in
    assert not packaged["default"].serves("mine")
    assert {name for bundle in packaged.values() for name in bundle.families} >= {*families.rows()}


@pytest.mark.parametrize(
    ("spec", "bundle"),
    [
        ("org/free", "texts"),
        ("spare:/org/free", "spare"),
        ("texts:/org/free:plain", "texts"),
        ("org/pinned", "spare"),
        ("org/eye", "eyes"),
        ("spare:/ORG/eye", "spare"),
    ],
)
def test_a_name_resolves_to_a_bundle_that_can_serve_it(spec: str, bundle: str) -> None:
    assert CATALOGUE.resolve(spec).bundle == bundle


@pytest.mark.parametrize(
    ("spec", "able"),
    [
        ("eyes:/org/free", ["texts", "spare"]),
        ("none:/org/free", ["texts", "spare"]),
        ("texts:/org/pinned", ["spare"]),
        ("org/lost", []),
        ("org/wrong", []),
    ],
)
def test_what_no_bundle_can_serve_is_a_conflict_that_names_those_that_can(spec: str, able: list[str]) -> None:
    with pytest.raises(BundleConflict) as caught:
        CATALOGUE.resolve(spec)
    assert caught.value.extras == {"compatible_bundles": able}


def test_the_lane_is_of_the_bundle_and_a_pool_may_ask_for_another_that_can() -> None:
    fleet = Fleet(
        MemoryServer().connect("gateway"),
        settings_of(SIE_MACHINE_PROFILE="cpu"),
        spec=lambda pool: None if pool == "_default" else ReservationSpec(pool, {"cpu": 1}, bundle=pool),
    )
    pools = ("_default", "spare", "eyes")

    def lane(spec: str, pool: str) -> str:
        return str(fleet.lane(CATALOGUE.resolve(spec), pool=pool, machine_profile="", known_pools=pools))

    assert lane("org/free", "_default") == "_default.cpu.texts"
    assert lane("spare:/org/free", "_default") == "_default.cpu.spare"
    assert lane("org/free", "spare") == "spare.cpu.spare"
    for spec, pool in (("org/free", "eyes"), ("texts:/org/free", "spare")):
        with pytest.raises(BundleConflict):
            lane(spec, pool)


@pytest.mark.parametrize(
    ("raw", "loc"),
    [
        ({"id": "Big"}, "$.id"),
        ({"id": "a" * 64}, "$.id"),
        ({}, "$"),
        ({"id": "a", "priority": "x"}, "$.priority"),
        ([], "$"),
        ({"id": "a", "requires": ["torch 2"]}, "$.requires[0]"),
        ({"id": "a", "families": "toy"}, "$.families"),
        ({"id": "a", 1: 2}, "$"),
    ],
)
def test_a_broken_bundle_names_its_field(raw: Any, loc: str) -> None:
    with pytest.raises(ValidationFailed) as caught:
        parse_bundle(raw)
    assert caught.value.param == loc
