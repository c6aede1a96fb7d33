"""The API over real processes, as clients see it: numbers of public libraries, one envelope for what is refused, shared
batches, and each verb without a broker as with one.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import oracle
import pytest
import shared
from cluster import MODEL, Cluster, running
from local_models import M3_OUTPUTS, SKETCH, TOKEN_WIDTH, LocalModels

from sie_client import EncodeResult, Item, ModelNotFoundError, RequestError, SIEAsyncClient, SIEClient
from sie_contracts import arrays
from sie_contracts.stages import STAGES

pytestmark = shared.OPEN
Json = dict[str, Any]
TEXTS = ["river search queue", "the winter garden (of music)", "Zürich, 東京 and 😀", "kernel"]
PAIRED = "planet history of the harbour"


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


@pytest.fixture(scope="module")
def cluster(open_cluster: Cluster) -> Cluster:
    return open_cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        yield client


def post(client: httpx.Client, body: object, model: str = MODEL, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(f"/v1/encode/{model}", content=content, headers=headers)


def ask(client: httpx.Client, verb: str, model: str, body: object, **headers: str) -> Json:
    answer = client.post(f"/v1/{verb}/test/{model}", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def refusal(client: httpx.Client, verb: str, model: str, body: object) -> tuple[int, str, str]:
    answer = client.post(f"/v1/{verb}/test/{model}", json=body)
    return answer.status_code, answer.json()["code"], answer.json()["error"].get("reason", "")


BIG = 20_000


ODD = {
    "empty": "",
    "no spaces": "x" * BIG,
    "one wide character": "\u6771" * (BIG // 3),
    "spaces": " " * 10_000,
    "emoji": "👩\u200d💻😀🏳\ufe0f\u200d🌈" * 50,
    "right to left": "שלום עולם \u202e مرحبا بالعالم",
    "controls": "".join(map(chr, range(32))) * 20,
    "nul": "\0",
    "nul inside": "a\0b",
    "marks": "e" + "\u0301" * 5000,
    "no characters": "\ufeff\u200b\ufffe\uffff\U0010ffff",
    "special tokens": "[CLS] [SEP] [PAD] [MASK] </s> <|im_end|>",
    "fields": "{query}{document}{text}{instruction}{}{0}%s$x",
}


def test_vectors_equal_those_of_sentence_transformers(client: httpx.Client) -> None:
    """One request holds texts of many lengths, and odd ones. The reference computes in float32."""
    texts = [*oracle.ragged_texts(40, seed=1), "First line.\nSecond line.", *ODD.values()]
    answer = post(client, {"items": [{"text": text} for text in texts]})
    assert answer.status_code == 200
    got = np.array([slot["dense"]["values"] for slot in answer.json()["items"]], np.float32)
    assert oracle.cosines(got, oracle.encode(texts)).min() >= 0.999


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
    answer = post(client, body)
    error = answer.json()["error"]
    assert answer.json() == {"error": error, "detail": error, "code": "INVALID_INPUT"}
    assert (answer.status_code, error["reason"], error["param"]) == (400, reason, param)
    assert error["type"] == "invalid_request_error"
    assert error["request_id"] == answer.headers["x-sie-request-id"]
    assert (answer.headers["x-should-retry"], "retry-after" in answer.headers) == ("false", False)


def test_a_text_of_ten_megabytes_is_answered_as_what_is_left_of_it(client: httpx.Client) -> None:
    """No message of the broker can hold the text: `sie serve` keeps it in a folder. The other inputs get their usual
    vectors.
    """
    words = "the quick brown fox jumps over the lazy dog "
    slots = post(client, {"items": [words * 230_000, words * 200, "fine"]}).json()["items"]
    whole, page, fine = (slot["dense"]["values"] for slot in slots)
    assert whole == pytest.approx(page, abs=1e-6)
    assert fine == pytest.approx(post(client, {"items": ["fine"]}).json()["items"][0]["dense"]["values"], abs=2e-3)


# batches


async def test_ragged_batches_equal_one_by_one(open_cluster: Cluster) -> None:
    """Concurrent requests share at least three passes. Each vector equals that of its text alone, in float32."""
    rng = random.Random(5)
    texts = oracle.ragged_texts(60, seed=5, longest=80)
    async with httpx.AsyncClient(timeout=60) as client:

        async def vectors(part: list[str]) -> tuple[np.ndarray, list[tuple[str, int]]]:
            content = json.dumps({"items": part})
            answer = await client.post(
                f"{open_cluster.url}/v1/encode/{MODEL}", content=content, headers={"x-sie-explain": "1"}
            )
            body = answer.json()
            batches = [(entry["batch"]["id"], entry["batch"]["chunks"]) for entry in body["explain"]]
            return np.array([slot["dense"]["values"] for slot in body["items"]], np.float32), batches

        alone = {text: (await vectors([text]))[0][0] for text in dict.fromkeys(texts)}
        worst, shared_batches = 1.0, set[str]()
        while len(shared_batches) < 3:
            requests = [rng.choices(texts, k=rng.randint(1, 6)) for _ in range(rng.randint(2, 6))]
            answers = await asyncio.gather(*(vectors(part) for part in requests))
            for part, (got, batches) in zip(requests, answers, strict=True):
                worst = min(worst, float(oracle.cosines(got, np.array([alone[text] for text in part])).min()))
                shared_batches |= {name for name, chunks in batches if chunks > 1}
    assert worst >= 0.9999
    sample = texts[:32]
    assert oracle.cosines(np.array([alone[text] for text in sample]), oracle.encode(sample)).min() >= 0.9999


# other verbs


def test_a_cross_encoder_scores_like_the_library_in_order_of_score(
    client: httpx.Client, every_family: LocalModels
) -> None:
    from sentence_transformers import CrossEncoder

    texts = oracle.ragged_texts(30, seed=2, longest=120)
    library = CrossEncoder(str(every_family.weights / "cross"), device="cpu")
    expected = library.predict([(PAIRED, text) for text in texts], show_progress_bar=False)
    reply = ask(client, "score", "cross", {"query": PAIRED, "items": texts})
    scores = {entry["item_id"]: entry["score"] for entry in reply["scores"]}
    np.testing.assert_allclose([scores[f"item-{index}"] for index in range(30)], expected, atol=1e-4)
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert [entry["rank"] for entry in reply["scores"]] == list(range(30))


def test_what_everybody_meets_who_comes_from_another_server(client: httpx.Client) -> None:
    """The cases are the table of docs/coming-from.md, line by line."""
    packed = msgspec.msgpack.encode({"items": ["a"]})
    for content, accept, expected in (
        (None, "*/*", "json"),
        (None, "application/msgpack", "msgpack"),
        (packed, "*/*", "msgpack"),
    ):
        sent = (
            {"content": content, "headers": {"accept": accept, "content-type": "application/msgpack"}}
            if content
            else {"json": {"items": ["a"]}, "headers": {"accept": accept}}
        )
        assert client.post("/v1/encode/test/dense", **sent).headers["content-type"] == f"application/{expected}"
    wrong = client.post("/v1/encode/test/nothing", json={"items": ["a"]}, headers={"accept": "application/msgpack"})
    assert wrong.headers["content-type"] == "application/json"
    both, plain = ask(client, "encode", "dense", {"items": [{"text": "a", "images": ["aGVsbG8="]}, "a"]})["items"]
    assert ("dense" in both, both["error"]["reason"], "dense" in plain) == (False, "unsupported_modality", True)
    schema: Json = {"type": "object"}
    (warning,) = ask(client, "extract", "tags", {"items": ["a"], "params": {"output_schema": schema}})["warnings"]
    assert warning.startswith("params.output_schema: ignored")
    schema["properties"] = {"mood": {"enum": ["calm", "angry"]}}
    reply = ask(client, "extract", "zero-shot", {"items": ["a"], "params": {"output_schema": schema}})
    assert reply["items"][0]["data"]["mood"] in ("calm", "angry")
    assert refusal(client, "extract", "zero-shot", {"items": ["a"]})[::2] == (400, "labels_required")
    for items in ([], None):
        assert refusal(client, "encode", "dense", {"items": items})[::2] == (400, "empty_items")
    id_slot, empty = ask(client, "encode", "dense", {"items": [{"id": "x"}, ""]})["items"]
    assert (id_slot["error"]["reason"], len(empty["dense"]["values"]) > 0) == ("empty_item", True)
    assert ask(client, "score", "cross", {"query": "a", "items": [""]})["scores"][0]["score"] is not None
    refused = client.post("/v1/embeddings", json={"model": "test/dense", "input": ""})
    assert (refused.status_code, refused.json()["error"]["reason"]) == (400, "empty_item")
    unknown = {"items": ["a"], "params": {"options": {"output_dtyp": "int8"}}}
    assert "output_dtype" in ask(client, "encode", "dense", unknown)["warnings"][0]
    strict = client.post("/v1/encode/test/dense", json=unknown, headers={"X-SIE-Strict": "true"})
    assert (strict.status_code, strict.json()["error"]["reason"]) == (400, "unknown_option")


def test_the_models_api_says_what_each_model_does(client: httpx.Client) -> None:
    for model in ("mini", "late", "m3", "cross"):  # each is loaded, whatever ran before
        verb = client.get(f"/v1/models/test/{model}").json()["tasks"][0]
        ask(client, verb, model, {"query": "a", "items": ["a"]})
    infos = {info["id"].removeprefix("test/"): info for info in client.get("/v1/models").json()["data"]}
    told = {name: (info["outputs"], info["tasks"], info["score_scale"]) for name, info in infos.items()}
    assert told["mini"] == (["dense"], ["encode"], None)
    assert told["m3"] == (["dense", "sparse", "multivector", "score"], ["encode", "score"], "cosine")
    assert told["cross"] == (["score"], ["score"], "probability")
    assert told["zero-shot"] == (["json"], ["extract"], None)
    assert [infos[name]["supports_lora"] for name in ("mini", "cross", "reranker")] == [True, True, False]
    assert infos["late:muvera"]["variant_of"] == "test/late"
    assert infos["late:muvera"]["dims"] == {"multivector": TOKEN_WIDTH, "dense": 96}
    for name in ("mini", "m3", "cross"):
        assert infos[name]["loaded"], name
        assert min(infos[name]["certificate"]["packed"].values()) >= 0.9999
    scoring = {info["id"] for info in client.get("/v1/models?task=score&variants=false").json()["data"]}
    assert {"test/late", "test/cross"} <= scoring
    assert "test/mini" not in scoring


# the clients


def test_the_sync_client(cluster: Cluster) -> None:
    with SIEClient(cluster.url) as client:
        single = client.encode(MODEL, Item(text="Hello", id="a"))
        several = client.encode(MODEL, [Item(text="Hello"), "World"])
        with pytest.raises(ModelNotFoundError) as caught:
            client.encode("all-minilm", "Hello")
        scored = client.score("test/cross", {"id": "q", "text": PAIRED}, ["kernel", {"id": "b", "text": "violin"}])
        found = client.extract("test/zero-shot", TEXTS, labels=["music", "river"])
        sketch = client.encode("test/late", [PAIRED], muvera=SKETCH)
    check_results(single, several)
    assert caught.value.details["suggestions"][0] == MODEL
    assert (scored["query_id"], {entry["item_id"] for entry in scored["scores"]}) == ("q", {"item-0", "b"})
    assert [len(slot["classifications"]) for slot in found] == [2] * len(TEXTS)
    assert (sketch[0]["dense"].shape, sketch[0]["muvera"]["num_repetitions"]) == ((96,), 4)


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
    assert single["dense"].dtype == np.float32
    got = np.array([result["dense"] for result in several])
    assert oracle.cosines(got, oracle.encode(["Hello", "World"])).min() >= 0.999
    single["dense"][0] = 1.0


# without a broker

VERBS: dict[str, tuple[str, dict[str, Any]]] = {
    "encode": ("m3", {"items": [TEXTS[0], {"id": "x"}, TEXTS[1]], "params": {"output_types": M3_OUTPUTS}}),
    "score": ("cross", {"query": TEXTS[0], "items": TEXTS}),
    "extract": ("zero-shot", {"items": TEXTS, "labels": ["music", "river"]}),
}


OF_A_RUN = {"timing"}


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory, every_family: LocalModels) -> Iterator[Cluster]:
    arguments = ["--standalone", "--no-spare", "--models-dir", str(every_family.folder)]
    with running(tmp_path_factory.mktemp("standalone"), *arguments) as cluster:
        yield cluster


def same(left: Any, right: Any) -> bool:
    """Return whether values are equal except for the last bits of numbers: each process chooses its kernels."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left.keys() - OF_A_RUN)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == pytest.approx(right, abs=1e-5)) if isinstance(left, float) else bool(left == right)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_answers_as_with_a_broker(standalone: Cluster, open_cluster: Cluster, verb: str) -> None:
    model, body = VERBS[verb]
    alone, together = (
        httpx.post(f"{cluster.url}/v1/{verb}/test/{model}", json=body, timeout=60)
        for cluster in (standalone, open_cluster)
    )
    assert alone.status_code == together.status_code == 200, alone.text
    assert same(alone.json(), together.json()), (alone.text, together.text)
    for name in ("x-sie-model", "x-sie-fingerprint", "x-sie-failed-items"):
        assert alone.headers.get(name) == together.headers.get(name), name
