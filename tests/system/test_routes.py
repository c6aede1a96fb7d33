"""A text has the same vector by every route and in every format of a reply. Large requests run beside small ones."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pyarrow.ipc
import pytest
import shared
from cluster import MODEL, Cluster
from numpy.typing import NDArray
from oracle import model_folder, ragged_texts
from transformers import AutoTokenizer

from sie_client import SIEClient
from sie_contracts import arrays
from sie_gateway.http.routes import inference_route

Array = NDArray[np.float32]
TEXT = "Who wrote the first program, and for which machine?"
UNDER_LOAD = 1e-5  # the most that batch mates may change a value in float32
AT_ONCE = 2048


pytestmark = shared.OPEN


@pytest.fixture(scope="module")
def cluster(open_cluster: Cluster) -> Cluster:
    return open_cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=120, trust_env=False) as client:
        yield client


def post(client: httpx.Client, path: str, body: Any, **headers: str) -> httpx.Response:
    answer = client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def native(client: httpx.Client) -> Array:
    return np.float32(post(client, f"/v1/encode/{MODEL}", {"items": [TEXT]}).json()["items"][0]["dense"]["values"])


def as_msgpack(client: httpx.Client) -> Array:
    answer = post(client, f"/v1/encode/{MODEL}", {"items": [TEXT]}, accept="application/msgpack")
    return np.asarray(arrays.unpack(arrays.decode_msgpack(answer.content))["items"][0]["dense"]["values"])


def from_msgpack(client: httpx.Client) -> Array:
    body = msgspec.msgpack.encode({"items": [{"text": TEXT}]})
    answer = client.post(
        f"/v1/encode/{MODEL.replace('/', '%2F')}", content=body, headers={"content-type": "application/x-msgpack"}
    )
    return np.asarray(arrays.unpack(arrays.decode_msgpack(answer.content))["items"][0]["dense"]["values"])


def raw(client: httpx.Client) -> Array:
    answer = post(client, f"/v1/encode/{MODEL}", {"items": [TEXT]}, accept="application/octet-stream")
    assert (answer.headers["x-sie-shape"], answer.headers["x-sie-dtype"]) == ("1,384", "float32")
    assert answer.headers["content-length"] == str(4 * 384)
    return np.frombuffer(answer.content, "<f4")


def arrow(client: httpx.Client) -> Array:
    answer = post(
        client,
        f"/v1/encode/{MODEL}",
        {"items": [{"id": "a", "text": TEXT}]},
        accept="application/vnd.apache.arrow.stream",
    )
    assert answer.headers["content-type"] == "application/vnd.apache.arrow.stream"
    (row,) = pyarrow.ipc.open_stream(answer.content).read_all().to_pylist()
    assert (row["id"], row["error"]) == ("a", None)
    return np.float32(row["dense"])


def openai_floats(client: httpx.Client) -> Array:
    return np.float32(post(client, "/v1/embeddings", {"model": MODEL, "input": TEXT}).json()["data"][0]["embedding"])


def openai_base64(client: httpx.Client) -> Array:
    answer = post(client, "/embeddings", {"model": MODEL, "input": [TEXT], "encoding_format": "base64"})
    return np.frombuffer(base64.b64decode(answer.json()["data"][0]["embedding"]), "<f4")


def openai_ids(client: httpx.Client) -> Array:
    ids = AutoTokenizer.from_pretrained(model_folder())(TEXT)["input_ids"]
    body = {"model": MODEL, "input": ids, "token_encoding": "model"}
    return np.float32(post(client, "/v1/embeddings", body).json()["data"][0]["embedding"])


def openai_raw(client: httpx.Client) -> Array:
    answer = post(client, "/v1/embeddings", {"model": MODEL, "input": TEXT}, accept="application/octet-stream")
    return np.frombuffer(answer.content, "<f4")


def cohere(client: httpx.Client) -> Array:
    body = {"model": MODEL, "texts": [TEXT], "input_type": "search_document", "embedding_types": ["float", "base64"]}
    embeddings = post(client, "/v2/embed", body).json()["embeddings"]
    floats, packed = np.float32(embeddings["float"][0]), np.frombuffer(base64.b64decode(embeddings["base64"][0]), "<f4")
    np.testing.assert_array_equal(floats, packed)
    return floats


def tei(client: httpx.Client) -> Array:
    return np.float32(post(client, f"/tei/{MODEL}/embed", {"inputs": TEXT}).json()[0])


def sdk(client: httpx.Client) -> Array:
    with SIEClient(str(client.base_url)) as sie:
        return np.asarray(sie.encode(MODEL, TEXT)["dense"])


ROUTES: tuple[Callable[[httpx.Client], Array], ...] = (
    as_msgpack,
    from_msgpack,
    raw,
    arrow,
    openai_floats,
    openai_base64,
    openai_ids,
    openai_raw,
    *((cohere, tei) if inference_route("/v2/embed") else ()),  # of an extra
    sdk,
)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_a_text_alone_has_the_same_bytes_by_every_route(
    client: httpx.Client, route: Callable[[httpx.Client], Array]
) -> None:
    expected = native(client)
    vector = route(client)
    assert vector.dtype == np.float32
    assert vector.tobytes() == expected.tobytes()


async def test_under_load_routes_differ_by_what_a_batch_may_change(cluster: Cluster, client: httpx.Client) -> None:
    expected, stop = native(client), asyncio.Event()

    async def load() -> None:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60, trust_env=False) as http:
            for texts in iter(lambda: ragged_texts(8, seed=time.monotonic_ns() % 10_000, longest=60), None):
                if stop.is_set():
                    return
                await http.post(f"/v1/encode/{MODEL}", json={"items": texts}, headers={"x-sie-priority": "bulk"})

    loads = [asyncio.create_task(load()) for _ in range(6)]
    for route in ROUTES:
        vector = await asyncio.to_thread(route, client)
        np.testing.assert_allclose(vector, expected, atol=UNDER_LOAD, err_msg=route.__name__)
    stop.set()
    await asyncio.gather(*loads)


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_many_texts_in_one_call_come_in_order_and_leave_room_for_one(
    cluster: Cluster, client: httpx.Client
) -> None:
    """The OpenAI route takes 2,048 texts as bulk, and returns all of them in order, with their usage. Meanwhile single
    texts do not wait for the bulk request's end, only for batches that are at the adapter. One more text is refused at
    once.
    """
    texts = [f"number {number}" for number in range(AT_ONCE)]
    single: list[float] = []

    async def bulk(http: httpx.AsyncClient) -> tuple[dict[str, Any], float]:
        began_s = time.monotonic()
        body = {"model": MODEL, "input": texts, "encoding_format": "base64"}
        answer = await http.post("/v1/embeddings", json=body, headers={"x-sie-priority": "bulk"})
        assert answer.status_code == 200, answer.text
        return answer.json(), time.monotonic() - began_s

    async with httpx.AsyncClient(base_url=cluster.url, timeout=150, trust_env=False) as http:
        running_bulk = asyncio.create_task(bulk(http))
        while not running_bulk.done():
            began_s = time.monotonic()
            assert (await http.post(f"/v1/encode/{MODEL}", json={"items": ["one"]})).status_code == 200
            single.append(time.monotonic() - began_s)
        reply, bulk_s = running_bulk.result()
    assert [entry["index"] for entry in reply["data"]] == list(range(AT_ONCE))
    vectors = np.frombuffer(b"".join(base64.b64decode(entry["embedding"]) for entry in reply["data"]), "<f4").reshape(
        AT_ONCE, -1
    )
    some = list(range(0, AT_ONCE, 256))
    expected = post(client, "/v1/embeddings", {"model": MODEL, "input": [texts[index] for index in some]}).json()
    np.testing.assert_allclose(vectors[some], [entry["embedding"] for entry in expected["data"]], atol=UNDER_LOAD)
    per_text = expected["usage"]["prompt_tokens"] / len(some)
    assert (
        AT_ONCE * (per_text - 1)
        < reply["usage"]["prompt_tokens"]
        == reply["usage"]["total_tokens"]
        < AT_ONCE * (per_text + 1)
    )
    assert len(single) >= 3, "single texts were answered while the bulk request ran"
    assert sorted(single)[len(single) // 2] < bulk_s / 2
    began_s = time.monotonic()
    refused = await asyncio.to_thread(
        client.post, "/v1/embeddings", json={"model": MODEL, "input": ["a"] * (AT_ONCE + 1)}
    )
    assert (refused.status_code, refused.json()["error"]["reason"]) == (400, "too_many_items")
    assert time.monotonic() - began_s < bulk_s / 2, "it is refused before anything of it runs"


def test_raw_bytes_say_what_they_cannot_carry(client: httpx.Client) -> None:
    for params, reason in (
        ({"output_dtype": "int8"}, "unsupported_dtype"),
        ({"output_dtype": "uint8"}, "unsupported_dtype"),
    ):
        answer = client.post(
            f"/v1/encode/{MODEL}", json={"items": ["a"], **params}, headers={"accept": "application/octet-stream"}
        )
        assert (answer.status_code, answer.json()["error"]["reason"]) == (400, reason)
    failed = client.post(
        f"/v1/encode/{MODEL}",
        json={"items": ["a", "word " * 600], "truncate": "NONE"},
        headers={"accept": "application/octet-stream"},
    )
    assert (failed.status_code, failed.headers["content-type"]) == (400, "application/json")
    assert [error["index"] for error in failed.json()["errors"]] == [1]
    half = post(
        client,
        f"/v1/encode/{MODEL}",
        {"items": ["a", "b"], "output_dtype": "float16"},
        accept="application/octet-stream",
    )
    assert (half.headers["x-sie-shape"], half.headers["x-sie-dtype"], len(half.content)) == (
        "2,384",
        "float16",
        2 * 2 * 384,
    )


def test_large_replies_are_the_same_in_pieces(client: httpx.Client) -> None:
    texts = [f"number {number}" for number in range(300)]
    as_json = post(client, f"/v1/encode/{MODEL}", {"items": texts})
    packed = post(client, f"/v1/encode/{MODEL}", {"items": texts}, accept="application/msgpack")
    slots = arrays.unpack(arrays.decode_msgpack(packed.content))["items"]
    assert len(as_json.json()["items"]) == len(slots) == 300
    for left, right in zip(as_json.json()["items"], slots, strict=True):
        np.testing.assert_allclose(np.float32(left["dense"]["values"]), right["dense"]["values"], atol=UNDER_LOAD)
