"""Every field of an entry: it changes the fingerprint of answers, or no number depends on it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sie_contracts.models.catalogue import Catalogue, fingerprint, profile_fingerprint
from sie_contracts.models.entries import (
    HeadOptions,
    LoadOptions,
    ModelEntry,
    Profile,
    RunDefaults,
    Weights,
    parse_entry,
)

DIGESTS: dict[str, str] = {"model.safetensors": "0" * 64}
BASE: dict[str, Any] = {
    "id": "org/base",
    "weights": {"path": "/models/base", "digests": DIGESTS},
    "family": "text-encoder",
    "outputs": {"dense": 64, "sparse": 100, "multivector": 32},
    "max_tokens": 128,
    "prompts": {"query": "q: {instruction}{text}", "document": "d: {text}"},
    "profiles": {"plain": {"run": {"pooling": "last"}}},
}

# by struct and field, a value that changes numbers
CHANGES: dict[type, dict[str, Any]] = {
    ModelEntry: {
        "id": "org/another",
        "weights": {"path": "/models/base", "digests": {"model.safetensors": "1" * 64}},
        "family": "sparse",
        "outputs": {"dense": 64},
        "max_tokens": 64,
        "prompts": {"query": "query: {text}"},
        "default_prompt_name": "document",
        "pair": ["{query}", "{document}"],
        "head": {"skip_punctuation": True},
        "load": {"precision": "float16"},
        "run": {"normalize": False},
    },
    Weights: {"revision": "a" * 40, "package": "some-weights", "digests": {"model.safetensors": "1" * 64}},
    LoadOptions: {
        "precision": "float16",
        "trust_remote_code": True,
        "causal": True,
        "append_eos": True,
        "min_pixels": 4,
        "max_pixels": 9,
        "accept_unproven": True,
    },
    HeadOptions: {
        "sparse_activation": "log1p_relu",
        "sparse_special_tokens": False,
        "query_encoder": "idf",
        "query_marker": "[Q] ",
        "document_marker": "[D] ",
        "query_length": 8,
        "document_length": 9,
        "query_expansion": False,
        "attend_expansion": True,
        "skip_punctuation": True,
        "muvera": {"seed": 3},
        "activation": "identity",
        "yes_token": "yes",
        "no_token": "no",
        "score": "difference",
    },
    RunDefaults: {
        "pooling": "cls",
        "truncate": "START",
        "normalize": False,
        "dimensions": [16],
        "output_types": ["sparse"],
        "output_dtype": "int8",
        "instruction": "find",
        "is_query": True,
        "lora": "org/lora",
        "muvera": True,
        "parameters": {"score_mode": "hybrid"},
    },
    Profile: {"load": {"precision": "float16"}, "run": {"normalize": False}, "extends": "plain"},
}
# values of fields that change no number
UNCHANGED: dict[type, dict[str, Any]] = {
    ModelEntry: {
        "bundle": "default",
        "machine_profiles": ["l4"],
        "inputs": ["text", "image"],
        "profiles": {**BASE["profiles"], "late": {"load": {"precision": "float16"}}},
        "golden": "golden.json",
        "openai_token_encoding": "model",
        "unproven": "no oracle",
        "description": "a model",
        "license": "MIT",
        "languages": ["de"],
        "download_bytes": 1,
    },
    Weights: {"hub": "org/hub", "unpinned": True, "path": "/models/moved"},
    LoadOptions: {"engine": "openvino"},
}
PLACES = {Weights: "weights", LoadOptions: "load", HeadOptions: "head", RunDefaults: "run"}


def rows(table: dict[type, dict[str, Any]]) -> list[Any]:
    return [
        pytest.param(struct, name, value, id=f"{struct.__name__}.{name}")
        for struct, fields in table.items()
        for name, value in fields.items()
    ]


def answered(document: dict[str, Any], profile: str = "default") -> str:
    """The fingerprint of an answer of a profile, by a worker that computes in the precision of the entry."""
    entry = parse_entry(document)
    resolved = Catalogue.resolve_profile(entry, profile, entry.id)
    loaded = fingerprint(resolved.entry, resolved.load, resolved.load.precision or "float32")
    return profile_fingerprint(loaded, entry, profile)


def changed(struct: type, name: str, value: Any) -> dict[str, Any]:
    """The entry with another value of a field, at the level of the model."""
    if struct is ModelEntry:
        return {**BASE, name: value}
    place = PLACES[struct]
    changes = {"hub": "org/hub", name: value} if name in ("revision", "unpinned") else {name: value}
    if name == "hub":
        changes["unpinned"] = True
    return {**BASE, place: {**BASE.get(place, {}), **changes}}


@pytest.mark.parametrize("struct", CHANGES)
def test_each_field_of_an_entry_has_a_ruling(struct: type[msgspec.Struct]) -> None:
    changing, neutral = CHANGES[struct].keys(), UNCHANGED.get(struct, {}).keys()
    assert not changing & neutral
    assert changing | neutral == set(struct.__struct_fields__)


@pytest.mark.parametrize(("struct", "name", "value"), [row for row in rows(CHANGES) if row.values[0] is not Profile])
def test_a_field_that_changes_numbers_changes_the_fingerprint(struct: type, name: str, value: Any) -> None:
    assert answered(changed(struct, name, value)) != answered(BASE)


@pytest.mark.parametrize(("struct", "name", "value"), rows(UNCHANGED))
def test_a_field_that_changes_no_number_leaves_the_fingerprint(struct: type, name: str, value: Any) -> None:
    assert answered(changed(struct, name, value)) == answered(BASE)


@pytest.mark.parametrize(
    "profile",
    [
        *(pytest.param({name: value}, id=f"Profile.{name}") for name, value in CHANGES[Profile].items()),
        *(pytest.param({"load": {name: value}}, id=f"load.{name}") for name, value in CHANGES[LoadOptions].items()),
        *(pytest.param({"run": {name: value}}, id=f"run.{name}") for name, value in CHANGES[RunDefaults].items()),
    ],
)
def test_an_option_of_a_profile_changes_the_fingerprint_of_its_answers_alone(profile: dict[str, Any]) -> None:
    document = {**BASE, "profiles": {**BASE["profiles"], "own": profile}}
    assert answered(document, "own") != answered(BASE)
    assert answered(document) == answered(BASE)
    assert answered(document, "plain") == answered(BASE, "plain")


def test_the_precision_and_the_engine_that_run_are_in_the_fingerprint() -> None:
    entry = parse_entry(BASE)
    prints = {
        fingerprint(entry, entry.load, precision, engine)
        for precision in ("float32", "bfloat16", "int8")
        for engine in ("torch", "openvino")
    }
    assert len(prints) == 6
