"""Parameters that multiply, or that cannot travel, are refused by name before anything is queued."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from fake_adapter import toy_entry

from sie_contracts.errors import InvalidInput
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.option_values import MAX_HYPOTHESIS, MAX_OWN_BYTES
from sie_contracts.models.options import MAX_LORA, run_options
from sie_contracts.wire.messages import RunOptions

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
