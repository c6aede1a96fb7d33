"""Fields with a misspelt name: the error or the warning names the field, and the name that was probably meant."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_adapter import toy_entry
from inprocess import GatewayProcess, InProcess

ONE = "toy/text"  # of a known family: options of an unknown family are not checked


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    async with InProcess(tmp_path) as cluster:
        cluster.source.put(toy_entry(ONE, family="text-encoder", run={"pooling": "mean"}))
        cluster.source.put(toy_entry("toy/score", family="cross-encoder", outputs={"score": 0}))
        gateway = await cluster.gateway()
        await cluster.sidecar()
        yield gateway


async def refused(gateway: GatewayProcess, path: str, body: Any, **headers: str) -> dict[str, Any]:
    """Return the error, which must be the same for a body in msgpack."""
    errors = []
    for encode, kind in ((msgspec.json.encode, "application/json"), (msgspec.msgpack.encode, "application/msgpack")):
        answer = await gateway.client.post(path, content=encode(body), headers={"content-type": kind, **headers})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        errors.append({key: value for key, value in error.items() if key != "request_id"})
    assert errors[0] == errors[1]
    return errors[0]


async def test_a_field_in_place_of_the_items_is_named(gateway: GatewayProcess) -> None:
    """The field is alone in the body, or beside others."""
    for route, field in itertools.product(("encode", "score", "extract"), ("itmes", "item", "Items")):
        for body in ({field: ["secret"]}, {"params": {}, "query": "secret", field: ["secret"], "labels": ["secret"]}):
            error = await refused(gateway, f"/v1/{route}/{ONE}", body)
            assert (error["code"], error["reason"], error["param"]) == ("INVALID_INPUT", "empty_items", "items")
            assert error["message"].endswith(f"; unknown field `{field}`; did you mean `items`?")


async def test_a_field_in_place_of_the_query_or_of_a_text_is_named(gateway: GatewayProcess) -> None:
    error = await refused(gateway, "/v1/score/toy/score", {"qurey": "secret", "items": ["secret"]})
    assert error["message"] == "query: missing; unknown field `qurey`; did you mean `query`?"
    error = await refused(gateway, f"/v1/encode/{ONE}", {"items": [{"id": "1", "txet": "secret"}]})
    assert (error["reason"], error["param"]) == ("empty_item", "items[0].text")
    assert error["message"].endswith("text: missing; unknown field `txet`; did you mean `text`?")


BESIDE: list[tuple[dict[str, Any], str, str]] = [
    ({"paramz": {"truncate": "NONE"}}, "paramz", "params"),
    ({"outputtypes": ["dense"]}, "outputtypes", "output_types"),
    ({"params": {"isquery": True}}, "params.isquery", "is_query"),
    ({"params": {"option": {}}}, "params.option", "options"),
    ({"options": {"trunkate": "END"}}, "options.trunkate", "truncate"),
    ({"colour": "red"}, "colour", ""),
    ({"chunks": {"max_tokens": 9}}, "chunks", "a field of an item"),
    ({"params": {"chunks": {"max_tokens": 9}}}, "params.chunks", "a field of an item"),
]


async def test_a_field_beside_the_items_is_a_warning_and_strictly_an_error(gateway: GatewayProcess) -> None:
    for body, path, suggestion in BESIDE:
        end = f"; it is {suggestion}" if " " in suggestion else f"; did you mean `{suggestion}`?" if suggestion else ""
        answer = await gateway.client.post(f"/v1/encode/{ONE}", json={"items": [{"text": "a", "note": 1}], **body})
        (warning,) = answer.json()["warnings"]
        assert warning.startswith(f"{path}: ignored")
        assert warning.endswith(f"on this route{end}")
        error = await refused(gateway, f"/v1/encode/{ONE}", {"items": ["a"], **body}, **{"x-sie-strict": "true"})
        assert (error["reason"], error["param"]) == ("unknown_option", path)


async def test_bodies_that_are_not_inference_are_strict(gateway: GatewayProcess) -> None:
    answer = await gateway.client.post("/v1/pools", json={"name": "p", "gpu": {"cpu": 1}})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "gpu: unknown field; did you mean `gpus`?")
    answer = await gateway.client.post("/v1/configs/resolve", json={"modle": ONE})
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "modle: no such field; did you mean `model`?",
    )


async def test_clients_of_other_families_may_send_more_than_we_know(gateway: GatewayProcess) -> None:
    body = {"model": ONE, "input": "a", "itmes": ["a"], "paramz": {}, "user": "u"}
    answer = await gateway.client.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    assert "itmes" not in answer.text


@pytest.mark.parametrize("encoder", [msgspec.json, msgspec.msgpack])
async def test_a_misspelt_field_of_an_item_and_another_model_are_told(gateway: GatewayProcess, encoder: Any) -> None:
    """A field that resembles no known one is the client's own, and causes no warning."""
    own = {f"x{number}": 1 for number in range(30)}
    body = {
        "model": "toy/score",
        "items": [{"text": "a"}, {"text": "b", **own, "metdata": {}}, {"text": "c", "foo": 2}],
    }
    kind = "application/msgpack" if encoder is msgspec.msgpack else "application/json"
    headers = {"content-type": kind, "accept": "application/json"}
    answer = await gateway.client.post(f"/v1/encode/{ONE}", content=encoder.encode(body), headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["warnings"] == [
        "items[1].metdata: ignored, an item has no such field; did you mean `metadata`?",
        "model: ignored, the path names the model",
    ]
    plain = {"model": ONE, "items": [{"text": "a", "id": "x"}]}
    answer = await gateway.client.post(f"/v1/encode/{ONE}", content=encoder.encode(plain), headers=headers)
    assert "warnings" not in answer.json()


@pytest.mark.parametrize(
    ("header", "wrong", "right"),
    [("X-SIE-Strict", ("1", "yes", ""), ("true", "TRUE", "false")), ("X-SIE-Explain", ("true", "2", ""), ("1", "0"))],
)
async def test_a_header_with_another_value_is_refused_by_its_name(
    gateway: GatewayProcess, header: str, wrong: tuple[str, ...], right: tuple[str, ...]
) -> None:
    for value in wrong:
        error = await refused(gateway, f"/v1/encode/{ONE}", {"items": ["a"]}, **{header: value})
        assert (error["code"], error["param"]) == ("INVALID_INPUT", header)
        assert error["message"].startswith(f"{header}: expected ")
    for value in right:
        answer = await gateway.client.post(f"/v1/encode/{ONE}", json={"items": ["a"]}, headers={header: value})
        assert answer.status_code == 200, answer.text
