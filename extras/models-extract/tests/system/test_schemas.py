"""Schemas and groups of labels over HTTP: typed answers of our client, and the request shapes of the public SDK."""

from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

import httpx
import msgspec
import pydantic
import pytest
import shared
from cluster import Cluster
from local_models import LocalModels
from pages import ROOT
from parity.gliner_checkpoints import gliclass_folder, gliner2_folder

from sie_client import SIEClient

SPANS, CLASSES, NLI = "test/spans", "test/gliclass", "test/zero-shot"
LIMIT = 250
TEXT = "search engine queue worker stream index vector river mountain at 12 o'clock."
MOOD = {"enum": ["calm", "very angry"]}
pytestmark = shared.OPEN


@pytest.fixture(scope="module")
def client(open_cluster: Cluster, open_models: LocalModels) -> Iterator[httpx.Client]:
    entry = {
        "weights": {"path": str(gliner2_folder(open_models.weights / "spans"))},
        "family": "gliner2",
        "outputs": {"entities": 0},
        "max_tokens": LIMIT,
    }
    open_models.add("spans", entry)
    gliclass_folder(open_models.weights / "gliclass")
    open_models.add("gliclass", {"family": "gliclass", "outputs": {"classifications": 0}, "max_tokens": LIMIT})
    shared.wait_until_served(open_cluster, SPANS, CLASSES)
    with httpx.Client(base_url=open_cluster.url, timeout=60) as client:
        yield client


@pytest.fixture
def sie(client: httpx.Client) -> Iterator[SIEClient]:
    with SIEClient(str(client.base_url)) as sie:
        yield sie


class Line(msgspec.Struct):
    product: str | None = None
    price: float | None = None


class Order(msgspec.Struct):
    mood: Literal["calm", "very angry"]
    is_late: bool
    lines: list[Line]
    buyer: str | None = None


class PydanticOrder(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(title="Order")  # the title is the name of the record in the prompt

    mood: Literal["calm", "very angry"]
    is_late: bool
    buyer: str | None = None


class Decided(msgspec.Struct):
    mood: Literal["calm", "very angry"]
    is_late: bool


def test_a_class_gives_instances_with_evidence(sie: SIEClient) -> None:
    results = sie.extract(SPANS, [TEXT, "x"], schema=Order, threshold=0.3)
    order = results[0]["data"]
    assert isinstance(order, Order)
    places = {row["label"]: row for row in results[0]["entities"]}
    assert order.buyer == places["buyer"]["text"] == TEXT[places["buyer"]["start"] : places["buyer"]["end"]]
    assert order.lines
    shares = {row["label"]: row["score"] for row in results[0]["classifications"]}
    assert order.mood == max(("calm", "very angry"), key=lambda mood: shares[f"mood.{mood}"])
    assert order.is_late is (shares["is_late.true"] >= 0.5)
    instance = sie.extract(SPANS, TEXT, schema=PydanticOrder, threshold=0.3)["data"]
    assert isinstance(instance, PydanticOrder)
    assert (instance.mood, instance.is_late, instance.buyer) == (order.mood, order.is_late, order.buyer)
    for model in (CLASSES, NLI):
        assert isinstance(sie.extract(model, TEXT, schema=Decided)["data"], Decided)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


def test_a_fault_of_a_schema_has_its_json_path(client: httpx.Client) -> None:
    deep = {"a": {"type": "object", "properties": {"b": {"type": "object", "properties": {"c": MOOD}}}}}
    for model, properties, reason, place in (
        (SPANS, deep, "schema", ".properties.a.properties.b"),
        (SPANS, {f"p{number}": MOOD for number in range(65)}, "schema", ".properties"),
        (SPANS, {"a": {"type": "string", "pattern": "x"}}, "schema", ".properties.a.pattern"),
        (CLASSES, {"a": {"type": "string"}}, "unsupported_output", ".properties.a"),
        (NLI, {"a": {"type": "number"}}, "unsupported_output", ".properties.a"),
    ):
        body = {"items": [TEXT], "params": {"output_schema": {"type": "object", "properties": properties}}}
        answer = client.post(f"/v1/extract/{model}", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["reason"], error["param"]) == (400, reason, f"params.output_schema{place}")


PUBLIC = """
import json, sys
from sie_sdk import SIEClient
client = SIEClient(sys.argv[1])
schema = {
    "type": "object",
    "title": "order",
    "properties": {
        "buyer": {"type": "string", "description": "who pays"},
        "products": {"type": "array", "items": {"type": "string"}},
        "mood": {"type": "string", "enum": ["calm", "angry"]},
    },
    "required": ["buyer"],
    "additionalProperties": False,
}
groups = {"urgency": ["low", "high"], "topic": ["billing", "delivery"]}
by_group = {"urgency": "low", "topic": ["billing"]}
examples = [{"text": "Now!", "labels": ["urgency.high"]}, {"text": "Whenever", "labels": by_group}]
grouped = {"label_groups": groups}
asked = {
    "schema": ("test/spans", {"output_schema": schema}),
    "schema and labels": ("test/spans", {"output_schema": schema, "labels": ["person"]}),
    "schema of entities": ("test/gliner", {"output_schema": schema, "labels": ["person"]}),
    "schema of classes": ("test/gliclass", {"output_schema": {"type": "object"}, "labels": ["a", "b"]}),
    "groups": ("test/gliclass", {"options": grouped}),
    "groups and examples": ("test/gliclass", {"options": {**grouped, "examples": examples}, "instruction": "read"}),
    "many of a group": ("test/gliclass", {"options": {**grouped, "multi_label": True}}),
    "examples": ("test/gliclass", {"labels": ["a", "b"], "options": {"examples": [{"text": "x", "labels": ["a"]}]}}),
}
answers = {name: client.extract(model, {"text": sys.argv[2]}, **params) for name, (model, params) in asked.items()}
print(json.dumps(answers, default=str))
"""


def test_the_public_sdk_sends_schemas_groups_and_examples(client: httpx.Client, open_cluster: Cluster) -> None:
    root = ROOT / ".venv-sdks"
    path = os.pathsep.join(map(str, (root / "0.10.1", root / "needs")))
    done = subprocess.run(
        [sys.executable, "-c", PUBLIC, open_cluster.url, TEXT],
        env={**os.environ, "PYTHONPATH": path, "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert answers["schema"]["data"]["mood"] in ("calm", "angry")
    assert {"person"} <= {row["label"] for row in answers["schema and labels"]["entities"]}
    assert "data" not in answers["schema of entities"] | answers["schema of classes"], "the SDK leaves out empty ones"
    for name in ("groups", "groups and examples"):
        data = answers[name]["data"]
        assert (data["urgency"] in ("low", "high"), data["topic"] in ("billing", "delivery")) == (True, True)
        assert {row["label"] for row in answers[name]["classifications"]} == {
            *("urgency.low", "urgency.high", "topic.billing", "topic.delivery")
        }
    assert isinstance(answers["many of a group"]["data"]["urgency"], list)
    assert len(answers["examples"]["classifications"]) == 2
