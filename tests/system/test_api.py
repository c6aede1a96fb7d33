"""The API as clients see it. Each verb without a broker is in test_standalone.py."""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import oracle
import pytest
import shared
from click.testing import CliRunner
from cluster import MODEL, Cluster, running, until

from sie_cli.main import main
from sie_client import EncodeResult, Item, ModelNotFoundError, RequestError, SIEAsyncClient, SIEClient
from sie_contracts import arrays
from sie_contracts.stages import STAGES

TIMING_KEYS = {
    *STAGES,
    "total_time",
    "device_wait_time",
    "queue_ms",
    "tokenization_ms",
    "inference_ms",
    "postprocessing_ms",
    "unattributed_ms",
    "total_ms",
}


pytestmark = shared.OPEN


@pytest.fixture(scope="module", params=["cluster", pytest.param("standalone", marks=pytest.mark.long)])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if request.param == "cluster":
        yield request.getfixturevalue("open_cluster")
        return
    with running(tmp_path_factory.mktemp("api"), "--preload", MODEL, "--standalone") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        yield client


def post(client: httpx.Client, body: object, model: str = MODEL, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(f"/v1/encode/{model}", content=content, headers=headers)


def test_vectors_equal_those_of_sentence_transformers(client: httpx.Client) -> None:
    """One request holds texts of many lengths. The reference computes in float32."""
    texts = [*oracle.ragged_texts(40, seed=1), "", "Zürich, 東京 and 😀", "First line.\nSecond line."]
    answer = post(client, {"items": [{"text": text} for text in texts]})
    assert answer.status_code == 200
    got = np.array([slot["dense"]["values"] for slot in answer.json()["items"]], np.float32)
    assert oracle.cosines(got, oracle.encode(texts)).min() >= 0.999


def test_the_models_are_listed_by_the_command(cluster: Cluster) -> None:
    """The list comes from the config service, or from the gateway where there is no config service."""
    listed = CliRunner().invoke(main, ["models", "list", "--data-dir", str(cluster.data_dir)])
    assert listed.exit_code == 0, listed.output
    assert any({MODEL, "encode", "default"} <= set(line.split()) for line in listed.stdout.splitlines())
    if "--standalone" in cluster.argv:
        assert listed.stderr == f"models of {cluster.url}\n"


def test_msgpack_and_json_hold_the_same(client: httpx.Client) -> None:
    body = {"items": [{"id": "a", "text": "Hello", "metadata": {"n": 1}}, {"text": "World"}]}
    as_json = post(client, body, accept="application/json").json()
    answer = client.post(
        f"/v1/encode/{MODEL}", content=msgspec.msgpack.encode(body), headers={"content-type": "application/msgpack"}
    )
    assert answer.headers["content-type"] == "application/msgpack"
    raw = msgspec.msgpack.decode(answer.content)
    dense = raw["items"][0]["dense"]["values"]
    assert list(dense) == [b"nd", b"type", b"kind", b"shape", b"data"]
    as_msgpack = arrays.unpack(raw)
    assert as_json["items"][0]["id"] == as_msgpack["items"][0]["id"] == "a"
    assert as_json["items"][0]["metadata"] == as_msgpack["items"][0]["metadata"] == {"n": 1}
    assert "id" not in as_json["items"][1]
    for left, right in zip(as_json["items"], as_msgpack["items"], strict=True):
        assert np.allclose(np.array(left["dense"]["values"], np.float32), right["dense"]["values"], atol=2e-3)
        assert right["dense"]["values"].dtype == np.float32
    assert set(as_json["timing"]) == set(as_msgpack["timing"]) == TIMING_KEYS


def test_curl_gets_json_without_saying_so(client: httpx.Client) -> None:
    """Curl sends `Accept: */*` and a form content type."""
    answer = post(
        client, {"items": ["Hello"]}, **{"content-type": "application/x-www-form-urlencoded", "accept": "*/*"}
    )
    assert answer.headers["content-type"] == "application/json"
    assert len(answer.json()["items"][0]["dense"]["values"]) == 384


def test_a_reply_says_where_the_time_went_and_who_served(client: httpx.Client) -> None:
    """The stages add up to the total. Headers name the worker, the revision, the fingerprint and the request id."""
    answer = post(client, {"items": ["Hello"]}, **{"x-request-id": "mine-1", "x-sie-explain": "1"})
    timing = answer.json()["timing"]
    assert sum(timing[name] for name in STAGES) == pytest.approx(timing["total_time"], abs=0.01)
    assert timing["inference_time"] > 0
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["x-sie-model"] == MODEL
    assert answer.headers["x-sie-model-revision"] == "8b3219a92973c328a8e22fadcfa821b5dc75636a"
    assert answer.headers["x-sie-fingerprint"] == answer.json()["fingerprint"] != ""
    assert answer.headers["x-sie-worker"]
    assert float(answer.headers["x-queue-publish-time"]) > 0
    assert answer.json()["usage"] == {"prompt_tokens": 3, "total_tokens": 3, "truncated_items": []}
    (explanation,) = answer.json()["explain"]
    assert explanation["batch"]["items"] >= 1
    assert (explanation["priority"], explanation["lane"].split(".")[0], explanation["batch"]["swapped"]) == (
        "interactive",
        "_default",
        False,
    )


def test_truncation_is_never_silent(client: httpx.Client) -> None:
    """A text is cut at the model's limit of 256 tokens, and the reply says so. With NONE the item is refused with its
    number of tokens and the limit.
    """
    long, short = "retrieval " * 400, "short"
    answer = post(client, {"items": [short, long]})
    assert answer.json()["usage"]["truncated_items"] == [1]
    assert answer.headers["x-sie-truncated-items"] == "1"
    assert answer.json()["usage"]["prompt_tokens"] == 3 + 256
    refused = post(client, {"items": [short, long], "params": {"truncate": "NONE"}}).json()["items"]
    assert "dense" in refused[0]
    error = refused[1]["error"]
    assert (error["code"], error["reason"], error["tokens"], error["limit"]) == (
        "INVALID_INPUT",
        "input_too_long",
        402,
        256,
    )
    alone = post(client, {"items": [long], "params": {"truncate": "NONE"}})
    assert (alone.status_code, alone.json()["code"], alone.json()["errors"][0]["index"]) == (400, "INVALID_INPUT", 0)


def test_slots_keep_their_places_when_some_inputs_fail(client: httpx.Client) -> None:
    body = {"items": [{"text": "a"}, {"id": "x"}, {"text": "b"}, {"images": ["aGVsbG8="]}, {"text": ""}]}
    answer = post(client, body)
    assert answer.status_code == 200
    slots = answer.json()["items"]
    assert [("dense" in slot, slot.get("error", {}).get("reason")) for slot in slots] == [
        (True, None),
        (False, "empty_item"),
        (True, None),
        (False, "unsupported_modality"),
        (True, None),
    ]
    assert slots[1]["id"] == "x"
    assert answer.headers["x-sie-failed-items"] == "2"
    assert post(client, {**body, "params": {"on_item_error": "fail"}}).status_code == 400


def test_two_thousand_texts_come_back_in_order(client: httpx.Client) -> None:
    """2,048 inputs become many messages and one answer."""
    texts = [f"text number {number}" for number in range(2048)]
    answer = post(client, {"items": texts}, accept="application/msgpack")
    slots = arrays.unpack(arrays.decode_msgpack(answer.content))["items"]
    assert len(slots) == 2048
    some = list(range(0, 2048, 97))
    expected = oracle.encode([texts[index] for index in some])
    got = np.array([slots[index]["dense"]["values"] for index in some])
    assert oracle.cosines(got, expected).min() >= 0.998


def test_model_names(client: httpx.Client) -> None:
    """A name may have other case, escapes, a revision or a bundle. The reply has the model's own name."""
    revision = "8b3219a92973c328a8e22fadcfa821b5dc75636a"
    for name in (MODEL.upper(), MODEL.replace("/", "%2F"), f"{MODEL}@{revision}", f"default:/{MODEL}", MODEL + "/"):
        answer = post(client, {"items": ["Hello"]}, name)
        assert answer.status_code == 200, name
        assert answer.headers["x-sie-model"] == MODEL
    assert post(client, {"items": ["Hello"]}, f"{MODEL}@main").json()["error"]["reason"] == "revision_not_found"
    assert post(client, {"items": ["Hello"]}, f"{MODEL}:nope").json()["error"]["reason"] == "profile_not_found"
    assert post(client, {"items": ["Hello"]}, f"other:/{MODEL}").json()["code"] == "BUNDLE_CONFLICT"


def test_the_models_api(client: httpx.Client) -> None:
    answer = client.get("/v1/models").json()
    assert answer["object"] == "list"
    assert answer["data"] == answer["models"]

    def told_alike() -> Any:
        """Return the entry of the list if the model's own route has the same: a heartbeat may come in between."""
        listed = next(model for model in client.get("/v1/models").json()["data"] if model["id"] == MODEL)
        return client.get(f"/v1/models/{MODEL}").json() == listed and listed

    info: Any = until(told_alike, 60, "the list and the model to say the same")
    assert info["dims"] == {"dense": 384}
    assert (info["state"], info["loaded"], info["max_sequence_length"], info["tasks"]) == (
        "loaded",
        True,
        256,
        ["encode"],
    )
    assert (info["outputs"], info["score_scale"], info["supports_lora"]) == (["dense"], None, True)
    assert info["certificate"]["digests"] == ["model.safetensors"]
    assert min(info["certificate"]["packed"]["dense"], info["certificate"]["golden"]) >= 0.999
    assert all("score" in model["tasks"] for model in client.get("/v1/models?task=score").json()["data"])
    assert client.get("/v1/models/nope").status_code == 404


def test_health_names_what_is_in_use(cluster: Cluster, client: httpx.Client) -> None:
    health = client.get("/health").json()
    assert health["status"] == "healthy"
    assert health["type"] == "gateway"
    assert MODEL in health["workers"][0]["loaded_models"]
    if "--standalone" in cluster.argv:
        assert health["nats_url"] is health["nats_monitor_url"] is None
    else:
        assert health["nats_url"].startswith("nats://127.0.0.1:")
        assert health["nats_monitor_url"] is None
        for path in ("models", "export"):
            assert httpx.get(f"{health['config_url']}/v1/configs/{path}", timeout=60).status_code == 401
    assert client.get("/healthz").text == client.get("/readyz").text == "ok"


def test_an_unknown_model_is_refused_at_once_with_near_names(client: httpx.Client) -> None:
    """The refusal comes before the body is read. The bound is 50 ms; the test allows 150 ms."""
    post(client, {"items": ["warm"]})
    took_s = []
    for _ in range(5):  # the fastest counts: the machine may be busy with other tests
        started_s = time.perf_counter()
        answer = post(client, b"{broken", "all-MiniLM-L6-v3")
        took_s.append(time.perf_counter() - started_s)
    assert answer.status_code == 404
    assert answer.json()["code"] == "MODEL_NOT_FOUND"
    assert answer.json()["error"]["suggestions"][0] == MODEL
    assert min(took_s) < 0.15


BAD_JSON: list[tuple[object, str, str]] = [
    (b"{broken", "malformed", "body"),
    (b'{"items": ["\xff\xfe"]}', "malformed", "body"),
    (b"[" * 200 + b"]" * 200, "malformed", "body"),
    (b'{"items": ' + b"[" * 5000 + b"]" * 5000 + b"}", "malformed", "body"),
    (b'{"items": ["a"], "params": {"dimensions": NaN}}', "malformed", "body"),
    (b'{"items": ["\\ud800"]}', "malformed", "body"),
    (b"", "malformed", "body"),
    ([1], "schema", "body"),
    ({}, "empty_items", "items"),
    ({"items": []}, "empty_items", "items"),
    ({"inputs": None}, "empty_items", "items"),
    ({"items": 3}, "schema", "items"),
    ({"items": [3]}, "schema", "items[0]"),
    ({"items": ["a", {"text": 5}]}, "schema", "items[1].text"),
    ({"items": [{"id": 5, "text": "a"}]}, "schema", "items[0].id"),
    ({"items": ["a"], "params": 3}, "schema", "params"),
    ({"items": ["a"], "params": {"dimensions": "many"}}, "schema", "params.dimensions"),
    ({"items": ["a"], "params": {"dimensions": 7}}, "bad_dimensions", "params.dimensions"),
    ({"items": ["a"], "dimensions": 1.5}, "schema", "dimensions"),
    ({"items": ["a"], "options": {"normalize": "yes"}}, "schema", "options.normalize"),
    ({"items": ["a"], "params": {"output_types": ["sparse"]}}, "unsupported_output", "params.output_types"),
    ({"items": ["a"], "params": {"output_types": "dense"}}, "schema", "params.output_types"),
    ({"items": ["a"], "params": {"output_dtype": "int4"}}, "unsupported_dtype", "params.output_dtype"),
    ({"items": ["a"], "params": {"options": {"profile": "nope"}}}, "unknown_profile", "params.options.profile"),
    ({"items": ["a"], "params": {"truncate": "MIDDLE"}}, "schema", "params.truncate"),
    ({"items": ["a"] * 2049}, "too_many_items", "items"),
    ({"items": [{"text": "a", "metadata": {"n": [-(1 << 63) - 1]}}]}, "schema", "items[0].metadata"),
]


@pytest.mark.parametrize(("body", "reason", "param"), BAD_JSON, ids=range(len(BAD_JSON)))
def test_bad_json_is_a_400_that_names_the_field(client: httpx.Client, body: object, reason: str, param: str) -> None:
    """The reply has the one envelope of all errors, and the next request succeeds."""
    check_refusal(client, post(client, body), reason, param)


NAN_BODY = msgspec.msgpack.encode({"items": ["a"], "params": {"dimensions": math.nan}})
BAD_MSGPACK: list[tuple[bytes, str, str]] = [
    (b"\xc1", "malformed", "body"),
    (b"\x82\xa5items", "malformed", "body"),
    (msgspec.msgpack.encode({"items": ["a"]}) + b"\x00", "malformed", "body"),
    (b"\x81\xa5items\x91\xa2\xff\xfe", "malformed", "body"),
    (NAN_BODY, "schema", "params.dimensions"),
    (msgspec.msgpack.encode([1]), "schema", "body"),
    (b"\x81\xa5items\x91" + b"\x91" * 3000 + b"\xc0", "malformed", "body"),
    (msgspec.msgpack.encode({"items": [{"text": b"bytes"}]}), "schema", "items[0].text"),
    (b"\x81\xa5items\xc7\x03\x2aabc", "malformed", "body"),
    (msgspec.msgpack.encode({"items": [{"text": "a", "metadata": {(1, 2): 1}}]}), "malformed", "body"),
]


@pytest.mark.parametrize(("body", "reason", "param"), BAD_MSGPACK, ids=range(len(BAD_MSGPACK)))
def test_bad_msgpack_is_a_400_that_names_the_field(client: httpx.Client, body: bytes, reason: str, param: str) -> None:
    """A client that sends msgpack gets the error in JSON too."""
    check_refusal(client, post(client, body, **{"content-type": "application/msgpack"}), reason, param)


def check_refusal(client: httpx.Client, answer: httpx.Response, reason: str, param: str) -> None:
    body = answer.json()
    error = body["error"]
    assert (answer.status_code, body["code"], error["reason"], error["param"]) == (
        400,
        "INVALID_INPUT",
        reason,
        param,
    ), body
    assert body == {"error": error, "detail": error, "code": error["code"]}
    assert body["error"]["type"] == "invalid_request_error"
    assert error["request_id"] == answer.headers["x-sie-request-id"]
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers
    assert post(client, {"items": ["still serving"]}).status_code == 200


BAD_HEADERS = [
    ("x-sie-timeout-ms", "abc"),
    ("x-sie-timeout-ms", "0"),
    ("x-sie-timeout-ms", "600001"),
    ("x-sie-timeout-ms", "1" + "0" * 5000),
    ("x-sie-priority", "urgent"),
    ("x-sie-pool", "../x"),
    ("x-sie-machine-profile", "a/b/../c"),
    ("content-encoding", "br"),
]


@pytest.mark.parametrize(("name", "value"), BAD_HEADERS, ids=range(len(BAD_HEADERS)))
def test_a_bad_header_is_named(client: httpx.Client, name: str, value: str) -> None:
    """A mistake that the client can fix is never a 5xx."""
    answer = post(client, {"items": ["a"]}, **{name: value})
    assert answer.status_code in (400, 404, 415), answer.text
    assert answer.json()["error"]["param"].lower() in (name, "x-sie-pool")


def test_what_no_message_can_hold_is_413_and_a_foreign_traceparent_is_dropped(client: httpx.Client) -> None:
    """A permanent fault is not reported as a full or absent queue."""
    refused = post(client, {"items": ["a"], "params": {"instruction": "x" * 9_000_000}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (413, "instruction")
    assert post(client, {"items": ["a"]}, traceparent="x" * 60_000).status_code == 200


def test_a_text_of_ten_megabytes_is_answered_as_what_is_left_of_it(client: httpx.Client) -> None:
    """No message of the broker can hold the text: `sie serve` keeps it in a folder. The other inputs get their usual
    vectors.
    """
    words = "the quick brown fox jumps over the lazy dog "
    slots = post(client, {"items": [words * 230_000, words * 200, "fine"]}).json()["items"]
    whole, page, fine = (slot["dense"]["values"] for slot in slots)
    assert whole == pytest.approx(page, abs=1e-6)
    assert fine == pytest.approx(post(client, {"items": ["fine"]}).json()["items"][0]["dense"]["values"], abs=2e-3)


def test_unknown_paths_and_methods_answer_in_the_envelope(client: httpx.Client) -> None:
    assert client.get("/v1/nope").json()["code"] == "NOT_FOUND"
    answer = client.get(f"/v1/encode/{MODEL}")
    assert (answer.status_code, answer.json()["code"]) == (405, "METHOD_NOT_ALLOWED")
    assert answer.headers["allow"] == "POST, OPTIONS"
    assert post(client, {"items": ["a"]}, "../../etc/passwd").status_code in (400, 404)


def test_unknown_options_are_named_and_strict_refuses_them(client: httpx.Client) -> None:
    body = {"items": ["a"], "params": {"normalise": True}}
    (warning,) = post(client, body).json()["warnings"]
    expected = (
        "params.normalise: ignored, no such option of sentence-transformers/all-MiniLM-L6-v2 on this route; did you "
        "mean `normalize`?"
    )
    assert warning == expected
    strict = post(client, body, **{"x-sie-strict": "true"})
    assert (strict.status_code, strict.json()["error"]["reason"]) == (400, "unknown_option")


def test_no_input_reaches_the_log(cluster: Cluster, client: httpx.Client) -> None:
    """A canary is in requests that succeed and in requests that fail."""
    canary = "canary" + base64.b32encode(b"7-0-3-1").decode().strip("=")
    post(client, {"items": [canary]})
    post(client, {"items": [{"text": canary, "id": 5}]})
    post(client, {"items": [canary], "params": {"truncate": canary}})
    post(client, b'{"items": ["' + canary.encode() + b'"')
    until(lambda: cluster.said("encode 400"), 30, "the line of a refused request")
    assert not cluster.said(canary)


def test_openapi_and_docs_are_served(client: httpx.Client) -> None:
    assert "/v1/encode/{model}" in client.get("/openapi.json").json()["paths"]
    assert client.get("/docs").status_code == 200


def test_the_sync_client(cluster: Cluster) -> None:
    """The examples are those of the README, for one item and for a list."""
    with SIEClient(cluster.url) as client:
        single = client.encode(MODEL, Item(text="Hello", id="a"))
        several = client.encode(MODEL, [Item(text="Hello"), "World"])
        with pytest.raises(ModelNotFoundError) as caught:
            client.encode("all-minilm", "Hello")
        assert MODEL in [model["id"] for model in client.list_models()]
    check_results(single, several)
    assert caught.value.details["suggestions"][0] == MODEL


async def test_the_async_client(cluster: Cluster) -> None:
    async with SIEAsyncClient(cluster.url) as client:
        single = await client.encode(MODEL, Item(text="Hello", id="a"))
        several = await client.encode(MODEL, [Item(text="Hello"), "World"])
        with pytest.raises(RequestError):
            await client.encode(MODEL, "Hello", dimensions=7)
    check_results(single, several)


def check_results(single: EncodeResult, several: list[EncodeResult]) -> None:
    assert single["id"] == "a"
    assert set(single["timing"]) == TIMING_KEYS
    assert (single["dense"].shape, single["dense"].dtype) == ((384,), np.float32)
    assert (
        oracle.cosines(np.array([result["dense"] for result in several]), oracle.encode(["Hello", "World"])).min()
        >= 0.999
    )
    single["dense"][0] = 1.0


def test_a_slash_more_says_nothing(client: httpx.Client) -> None:
    for path in ("/v1/models/", "/healthz/", "/v1/pools/", "/docs/", f"/v1/models/{MODEL}/", "//v1//models//"):
        assert client.get(client.base_url.copy_with(path=path)).status_code == 200, path
    assert client.post("/v1/embeddings/", json={"model": MODEL, "input": "a"}).status_code == 200


def test_a_misspelt_key_of_an_item_is_told_with_the_one_that_is_missing(client: httpx.Client) -> None:
    answer = client.post(f"/v1/encode/{MODEL}", json={"items": [{"txet": "a"}]})
    error = answer.json()["error"]
    assert (answer.status_code, error["reason"], error["param"]) == (400, "empty_item", "items[0].text")
    assert error["message"] == "items[0].text: missing; unknown field `txet`; did you mean `text`?"
