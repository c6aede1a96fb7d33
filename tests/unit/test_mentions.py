"""Entities that a client names in an item: how they are read, which are refused, and their way to the adapter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sie_adapter.engine.raw import extract_options
from sie_contracts.errors import InvalidInput
from sie_contracts.wire.ipc import Group, RunBatch
from sie_contracts.wire.messages import Input, Mention, RunOptions
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.entities import MAX_LABEL, MAX_MENTIONS, mentions
from sie_gateway.inference.runner import Runner
from sie_sidecar.prepare.rows import BatchPart, TokenRow, WorkItemInput, to_batch

TEXT = "Ada met 😀 Bob"
ADA, BOB = Mention("person", 0, 3), Mention("person", 10, 13)


def entity(**changes: Any) -> dict[str, Any]:
    return {"text": "Ada", "label": "person", "start": 0, "end": 3, **changes}


def test_they_keep_the_order_of_the_client() -> None:
    named = [entity(start=10, end=13), {**entity(), "note": 1}]
    assert mentions(RequestItem(TEXT, metadata={"entities": named})) == (BOB, ADA)


@pytest.mark.parametrize(
    ("entities", "path"),
    [
        ({"person": "Ada"}, "metadata.entities"),
        (["Ada"], "metadata.entities[0]"),
        ([entity(), entity(label=None)], "metadata.entities[1].label"),
        ([entity(label="")], "metadata.entities[0].label"),
        ([entity(label="x" * (MAX_LABEL + 1))], "metadata.entities[0].label"),
        ([entity(start="0")], "metadata.entities[0].start"),
        ([entity(start=True)], "metadata.entities[0].start"),
        ([entity(start=-1)], "metadata.entities[0].start"),
        ([entity(start=13, end=14)], "metadata.entities[0].start"),
        ([entity(end=0)], "metadata.entities[0].end"),
        ([entity(end=14)], "metadata.entities[0].end"),
        ([entity(end=3.0)], "metadata.entities[0].end"),
        ([entity()] * (MAX_MENTIONS + 1), "metadata.entities"),
    ],
)
def test_what_is_no_place_of_the_text_is_refused_with_its_path(entities: Any, path: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        mentions(RequestItem(TEXT, metadata={"entities": entities}))
    assert (refused.value.reason, refused.value.param) == ("schema", path)
    assert "Ada" not in refused.value.message


@pytest.mark.usefixtures("sample_families")
def test_an_item_whose_entities_are_no_places_of_its_text_fails_alone() -> None:
    entry = SimpleNamespace(id="m", inputs=("text",), outputs={"json": 0}, family="sample-mentions")
    items = [RequestItem(TEXT, metadata={"entities": [entity(**fields)]}) for fields in ({"end": 99}, {})]
    request: Any = SimpleNamespace(operation="extract", resolved=SimpleNamespace(entry=entry), items=items)
    feed: Any = SimpleNamespace(on_change=lambda clear: None)
    absent: Any = None
    refused = Runner(feed, absent, absent, absent, absent, absent, 0.0).refused(request)
    assert {index: failure.error.param for index, failure in refused.items()} == {0: "metadata.entities[0].end"}


def test_they_reach_the_options_of_their_own_text() -> None:
    row = TokenRow(np.zeros(2, np.int32), 2)
    parts = [
        BatchPart(
            [row, row],
            WorkItemInput([Input("one"), Input(TEXT, mentions=(ADA, BOB))], None, RunOptions(labels=("knows",))),
        ),
        BatchPart([row], WorkItemInput([Input("two")], None, RunOptions())),
    ]
    batch = to_batch("b", "org/model", "extract", "raw", parts)
    assert batch.mentions == ((), (ADA, BOB), ())
    assert [option.mentions for option in extract_options(batch)] == [(), (ADA, BOB), ()]
    assert to_batch("b", "org/model", "extract", "raw", parts[1:]).mentions == ()
    bare = RunBatch("b", "org/model", "extract", bytes(4), b"", (Group(0, 1),), texts=("two",))
    assert extract_options(bare)[0].mentions == ()
