"""The outputs of every head, scores and extractions as clients see them. Each verb without a broker is in
test_standalone.py.

Numbers are compared with the public library on the same folder, or with what a formula makes of the API's own float32
vectors.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import local_models
import msgspec
import muvera_naive
import numpy as np
import pytest
import shared
import torch
from cluster import Cluster, running
from local_models import M3_OUTPUTS, SKETCH, TOKEN_WIDTH, LocalModels
from numpy.typing import NDArray
from oracle import ragged_texts
from parity.heads_checkpoints import M3_WIDTH

from sie_adapter.loading.precision import bfloat16_lacks
from sie_client import SIEAsyncClient, SIEClient
from sie_contracts import arrays
from sie_contracts.models.muvera import Muvera
from sie_contracts.models.options import DTYPES

TEXTS = ["river search queue", "the winter garden (of music)", "Zürich, 東京 and 😀", "kernel"]
PAIRED = "planet history of the harbour"
EXTRACTED = {"entities", "relations", "classifications", "objects", "data"}
Array = NDArray[Any]
Json = dict[str, Any]


pytestmark = shared.OPEN


@pytest.fixture(scope="module", params=["cluster", pytest.param("standalone", marks=pytest.mark.long)])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, every_family: LocalModels
) -> Iterator[Cluster]:
    if request.param == "cluster":
        yield request.getfixturevalue("open_cluster")
        return
    args = ["--standalone", *every_family.arguments, "--no-spare", "--batcher-coalesce-ms", "20"]
    with running(tmp_path_factory.mktemp("every-family"), *args) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ask(client: httpx.Client, verb: str, model: str, body: object, **headers: str) -> Json:
    answer = client.post(f"/v1/{verb}/test/{model}", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def refusal(client: httpx.Client, verb: str, model: str, body: object) -> tuple[int, str, str]:
    answer = client.post(f"/v1/{verb}/test/{model}", json=body)
    return answer.status_code, answer.json()["code"], answer.json()["error"].get("reason", "")


def in_both_formats(client: httpx.Client, verb: str, model: str, body: Json) -> tuple[Json, Json]:
    """Return the reply in JSON and in msgpack, arrays of the latter decoded. Fail unless they hold the same values,
    except for the timing. Numbers are equal within a step of float16: these are two requests, and another batch rounds
    otherwise.
    """
    as_json = ask(client, verb, model, body, accept="application/json")
    answer = client.post(f"/v1/{verb}/test/{model}", json=body, headers={"accept": "application/msgpack"})
    assert answer.headers["content-type"] == "application/msgpack"
    as_msgpack = arrays.unpack(arrays.decode_msgpack(answer.content))
    assert _plain(as_msgpack) == _approximate({**as_json, "timing": as_msgpack["timing"]})
    return as_json, as_msgpack


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _approximate(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _approximate(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_approximate(item) for item in value]
    return pytest.approx(value, rel=1e-3, abs=1e-5) if isinstance(value, float) else value


def vectors(client: httpx.Client, model: str, texts: list[str], **params: Any) -> list[Json]:
    """Return the slots of a reply in msgpack."""
    body = msgspec.msgpack.encode({"items": texts, "params": params})
    answer = client.post(f"/v1/encode/test/{model}", content=body, headers={"content-type": "application/msgpack"})
    assert answer.status_code == 200, answer.text
    return arrays.unpack(arrays.decode_msgpack(answer.content))["items"]  # type: ignore[no-any-return]


def converted(rows: Array, dtype: str) -> tuple[Array, Array | None, Array | None]:
    """Convert float32 rows [n, width] to a dtype. Return them with scales and offsets [n]."""
    if dtype in ("float32", "float16"):
        return rows.astype(dtype), None, None
    if dtype == "int8":
        scale = np.abs(rows).max(1)
        return np.rint(rows / scale[:, None] * 127).astype(np.int8), scale / 127, None
    if dtype == "uint8":
        low, high = rows.min(1), rows.max(1)
        return np.rint((rows - low[:, None]) / (high - low)[:, None] * 255).astype(np.uint8), (high - low) / 255, low
    return np.packbits(rows > 0, axis=-1), None, None


def check_converted(slot: Json, rows: Array, dtype: str) -> None:
    values, scale, offset = converted(rows, dtype)
    np.testing.assert_array_equal(np.atleast_2d(slot["values"]), values)
    assert (slot["values"].dtype, slot["dtype"]) == (values.dtype, dtype)
    for name, expected in (("scale", scale), ("offset", offset)):
        assert (name in slot) == (expected is not None)
        if expected is not None:
            np.testing.assert_allclose(np.atleast_1d(slot[name]), expected, rtol=1e-6)


# encode


def test_sparse_vectors_equal_the_library_s(client: httpx.Client, every_family: LocalModels) -> None:
    from sentence_transformers import SparseEncoder

    expected = (
        SparseEncoder(str(every_family.weights / "sparse"), device="cpu").encode_document(TEXTS).to_dense().numpy()
    )
    _, reply = in_both_formats(client, "encode", "sparse", {"items": TEXTS})
    for slot, row in zip(reply["items"], expected, strict=True):
        sparse = slot["sparse"]
        assert set(slot) == {"sparse", "usage"}
        assert set(sparse) == {"dims", "dtype", "indices", "values"}
        assert (sparse["dims"], sparse["dtype"]) == (len(row), "float32")
        assert (sparse["indices"].dtype, sparse["values"].dtype) == (np.int32, np.float32)
        assert sparse["indices"].tolist() == np.flatnonzero(row).tolist()
        np.testing.assert_allclose(sparse["values"], row[row > 0], atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_output_in_every_dtype(client: httpx.Client, dtype: str) -> None:
    """Dense vectors and each row of a multivector are converted as their formula says. Values of sparse vectors change
    in float16 only.
    """
    for text in TEXTS:
        (exact,) = vectors(client, "m3", [text], output_types=M3_OUTPUTS)
        body = {"items": [text], "params": {"output_types": M3_OUTPUTS, "output_dtype": dtype}}
        (slot,) = in_both_formats(client, "encode", "m3", body)[1]["items"]
        assert set(slot) == {*M3_OUTPUTS, "usage"}
        check_converted(slot["dense"], exact["dense"]["values"][None], dtype)
        check_converted(slot["multivector"], exact["multivector"]["values"], dtype)
        assert slot["dense"]["dims"] == slot["multivector"]["token_dims"] == M3_WIDTH
        assert slot["multivector"]["num_tokens"] == len(exact["multivector"]["values"])
        kind = "float16" if dtype == "float16" else "float32"
        assert slot["sparse"]["values"].dtype == slot["sparse"]["dtype"] == kind
        assert np.array_equal(slot["sparse"]["values"], exact["sparse"]["values"].astype(kind))
        assert np.array_equal(slot["sparse"]["indices"], exact["sparse"]["indices"])
        assert (np.diff(slot["sparse"]["indices"]) > 0).all()


def test_rows_of_a_late_interaction_model_have_length_one_and_a_query_is_expanded(client: httpx.Client) -> None:
    (document,) = vectors(client, "late", [PAIRED])
    (query,) = vectors(client, "late", [PAIRED], is_query=True)
    for slot, count in ((document, document["multivector"]["num_tokens"]), (query, 16)):
        multivector = slot["multivector"]
        assert set(multivector) == {"token_dims", "num_tokens", "dtype", "values"}
        assert (
            multivector["values"].shape
            == (count, TOKEN_WIDTH)
            == (multivector["num_tokens"], multivector["token_dims"])
        )
        np.testing.assert_allclose(np.linalg.norm(multivector["values"], axis=1), 1, atol=1e-5)


def test_dimensions_cut_first_and_normalise_then(client: httpx.Client) -> None:
    (whole,) = vectors(client, "m3", [PAIRED], output_types=["dense", "multivector"], normalize=False)
    (cut,) = vectors(client, "m3", [PAIRED], output_types=["dense", "multivector"], dimensions=16)
    (raw,) = vectors(client, "m3", [PAIRED], dimensions=16, normalize=False)
    (native,) = vectors(client, "m3", [PAIRED], dimensions=M3_WIDTH)
    assert abs(np.linalg.norm(whole["dense"]["values"]) - 1) > 0.1
    first = whole["dense"]["values"][:16]
    assert cut["dense"]["dims"] == cut["multivector"]["token_dims"] == 16
    np.testing.assert_allclose(cut["dense"]["values"], first / np.linalg.norm(first), atol=1e-6)
    np.testing.assert_array_equal(raw["dense"]["values"], first)
    rows = whole["multivector"]["values"][:, :16]
    np.testing.assert_allclose(
        cut["multivector"]["values"], rows / np.linalg.norm(rows, axis=1, keepdims=True), atol=1e-6
    )
    assert native["dense"]["dims"] == M3_WIDTH
    assert refusal(client, "encode", "m3", {"items": ["a"], "params": {"dimensions": 15}})[2] == "bad_dimensions"


@pytest.mark.parametrize("is_query", [False, True])
def test_muvera_by_option_by_profile_and_by_name_are_one(client: httpx.Client, *, is_query: bool) -> None:
    (tokens,) = vectors(client, "late", [PAIRED], is_query=is_query)
    parameters = Muvera(**SKETCH)
    expected = muvera_naive.encode(tokens["multivector"]["values"], parameters, is_query=is_query)
    base: Json = {"items": [PAIRED], "params": {"is_query": is_query}}
    ways = [
        ("late", {**base, "muvera": SKETCH}),
        ("late:muvera", base),
        ("late", {**base, "options": {"profile": "muvera"}}),
    ]
    for model, body in ways:
        _, reply = in_both_formats(client, "encode", model, body)
        assert reply["muvera"] == msgspec.to_builtins(parameters)
        (slot,) = reply["items"]
        assert set(slot) == {"dense", "usage"}
        assert {**slot["dense"], "values": 0} == {"dims": 96, "dtype": "float32", "source": "muvera", "values": 0}
        np.testing.assert_allclose(slot["dense"]["values"], expected, atol=1e-4)
    (small,) = vectors(
        client, "late:muvera", [PAIRED], is_query=is_query, output_dtype="int8", output_types=["dense", "multivector"]
    )
    assert (small["dense"]["values"].dtype, small["dense"]["source"], set(small)) == (
        np.int8,
        "muvera",
        {"dense", "multivector", "usage"},
    )
    np.testing.assert_allclose(
        small["dense"]["values"] * small["dense"]["scale"], expected, atol=float(small["dense"]["scale"])
    )


def test_the_defaults_of_muvera_and_what_it_refuses(client: httpx.Client) -> None:
    reply = ask(client, "encode", "late", {"items": ["a"], "muvera": True})
    assert reply["muvera"] == msgspec.to_builtins(Muvera())
    assert len(reply["items"][0]["dense"]["values"]) == reply["items"][0]["dense"]["dims"] == 10240
    off = ask(client, "encode", "late:muvera", {"items": ["a"], "muvera": False})
    assert ("muvera" in off, set(off["items"][0])) == (False, {"multivector", "usage"})
    assert refusal(client, "encode", "mini", {"items": ["a"], "muvera": True}) == (
        400,
        "INVALID_INPUT",
        "muvera_unsupported",
    )
    assert refusal(client, "encode", "late", {"items": ["a"], "muvera": {"repetitions": 3}}) == (
        400,
        "INVALID_INPUT",
        "schema",
    )
    assert refusal(client, "encode", "sparse", {"items": ["a"], "output_types": ["dense"]})[2] == "unsupported_output"


MIXED: list[Json] = [
    {},
    {"output_dtype": "int8"},
    {"output_dtype": "ubinary", "dimensions": 16},
    {"normalize": False},
    {"muvera": SKETCH},
    {"output_types": ["sparse"]},
    {"output_types": ["multivector"], "output_dtype": "float16"},
    {"output_types": ["dense", "sparse", "multivector"], "output_dtype": "uint8"},
]


async def test_requests_of_one_batch_each_get_what_they_asked_for(cluster: Cluster, client: httpx.Client) -> None:
    """Output options are epilogues that never split a batch: any two of them must meet in one."""
    pairs = {frozenset(pair) for pair in itertools.combinations(range(len(MIXED)), 2)}
    alone = [ask(client, "encode", "m3", {"items": [PAIRED], "params": params})["items"] for params in MIXED]
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as many:

        async def one(params: Json) -> tuple[Any, str]:
            answer = await many.post(
                "/v1/encode/test/m3", json={"items": [PAIRED], "params": params}, headers={"x-sie-explain": "1"}
            )
            return answer.json()["items"], answer.json()["explain"][0]["batch"]["id"]

        for _ in range(60):
            answers = await asyncio.gather(*map(one, 3 * MIXED))
            mates: dict[str, set[int]] = {}
            for index, (slots, batch) in enumerate(answers):
                kind = index % len(MIXED)
                check_close(slots, alone[kind])
                mates.setdefault(batch, set()).add(kind)
            for kinds in mates.values():
                pairs -= set(map(frozenset, itertools.combinations(kinds, 2)))
            if not pairs:
                return
    pytest.fail(f"these kinds were never in one batch: {sorted(map(sorted, pairs))}")


def check_close(value: Any, expected: Any) -> None:
    """Check that values are equal except for the last bits of floats and the rounding of codes: a batch is computed in
    another order than a text alone.
    """
    if isinstance(expected, dict):
        assert set(value) == set(expected)
        for key in expected:
            check_close(value[key], expected[key])
    elif isinstance(expected, list) and expected and isinstance(expected[0], dict):
        for left, right in zip(value, expected, strict=True):
            check_close(left, right)
    elif isinstance(expected, list | float):
        is_codes = isinstance(expected, list) and bool(np.array(expected).dtype.kind == "i")
        np.testing.assert_allclose(value, expected, rtol=0, atol=1 if is_codes else 1e-5)
    else:
        assert value == expected


# score


def documents(count: int) -> list[str]:
    return ragged_texts(count, seed=2, longest=120)


def by_position(reply: Json) -> list[float]:
    scores = {entry["item_id"]: entry["score"] for entry in reply["scores"]}
    return [scores[f"item-{index}"] for index in range(len(scores))]


def cross_encoder_scores(every_family: LocalModels, query: str, texts: list[str]) -> Array:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(every_family.weights / "cross"), device="cpu")
    return np.asarray(model.predict([(query, text) for text in texts], show_progress_bar=False), np.float64)


def test_a_cross_encoder_scores_like_the_library_in_order_of_score(
    client: httpx.Client, every_family: LocalModels
) -> None:
    texts = documents(30)
    expected = cross_encoder_scores(every_family, PAIRED, texts)
    reply, _ = in_both_formats(client, "score", "cross", {"query": PAIRED, "items": texts})
    np.testing.assert_allclose(by_position(reply), expected, atol=1e-4)
    assert all(set(entry) == {"item_id", "score", "rank", "usage"} for entry in reply["scores"])
    assert sum(entry["usage"]["total_tokens"] for entry in reply["scores"]) == reply["usage"]["total_tokens"] > 0
    assert [entry["rank"] for entry in reply["scores"]] == list(range(30))
    scores = [entry["score"] for entry in reply["scores"]]
    assert scores == sorted(scores, reverse=True)
    assert (reply["model"], reply["query_id"], "items" in reply) == ("test/cross", None, False)
    assert reply["usage"]["truncated_items"] == []


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


def test_scores_and_entities_have_the_usage_that_public_clients_read(client: httpx.Client) -> None:
    answer = client.post("/v1/score/test/cross", json={"query": "kernel", "items": ["kernel", {"id": "x"}, "violin"]})
    usage = answer.json()["usage"]
    assert usage["input_tokens"] == usage["prompt_tokens"] > 0
    units = {name: answer.headers[f"x-sie-{name}"] for name in ("served-by", "units-input-tokens", "units-pairs")}
    assert units == {"served-by": "local", "units-input-tokens": str(usage["prompt_tokens"]), "units-pairs": "2"}
    entities = ask(client, "extract", "tags", {"items": ["Ada lived"]})["usage"]
    assert entities["input_tokens"] == entities["prompt_tokens"] > 0


def test_ids_and_metadata_come_back_and_failures_stand_last(client: httpx.Client) -> None:
    body = {
        "query": {"id": "q7", "text": PAIRED},
        "items": [
            {"images": ["aGVsbG8="], "id": "picture"},
            {"text": "kernel", "id": "a"},
            {"text": "violin", "metadata": {"n": 1}},
            {"id": "a"},
            {"text": "kernel"},
        ],
    }
    reply, _ = in_both_formats(client, "score", "cross", body)
    assert reply["query_id"] == "q7"
    entries = reply["scores"]
    assert [entry["rank"] for entry in entries] == [0, 1, 2, 3, 4]
    good, failed = entries[:3], entries[3:]
    assert [entry["item_id"] for entry in failed] == ["picture", "a"]
    assert [(entry["score"], entry["error"]["reason"]) for entry in failed] == [
        (None, "unsupported_modality"),
        (None, "empty_item"),
    ]
    twins = [entry["item_id"] for entry in good if entry["item_id"] != "item-2"]
    assert twins == ["a", "item-4"]  # equal scores stay in the order of the inputs
    assert next(entry for entry in good if entry["item_id"] == "item-2")["metadata"] == {"n": 1}
    assert refusal(client, "score", "cross", {**body, "on_item_error": "fail"}) == (
        400,
        "INVALID_INPUT",
        "unsupported_modality",
    )


def test_a_pair_that_is_cut_is_told(client: httpx.Client) -> None:
    long = "river " * 2000
    answer = client.post("/v1/score/test/cross", json={"query": PAIRED, "items": ["kernel", long]})
    assert answer.json()["usage"]["truncated_items"] == [1]
    assert answer.headers["x-sie-truncated-items"] == "1"
    refused = ask(client, "score", "cross", {"query": PAIRED, "items": ["kernel", long], "truncate": "NONE"})["scores"]
    assert [entry["score"] is None for entry in refused] == [False, True]
    assert refused[1]["error"]["reason"] == "input_too_long"
    assert refused[1]["error"]["tokens"] > refused[1]["error"]["limit"]


def test_a_query_of_each_bad_kind_is_a_400(client: httpx.Client) -> None:
    for query in (None, 5, [], {"text": 5}, {"images": ["aGVsbG8="]}, {}):
        status, code, _ = refusal(client, "score", "cross", {"query": query, "items": ["a"]})
        assert (status, code) == (400, "INVALID_INPUT"), query
    assert refusal(client, "score", "cross", {"query": "a", "items": []})[2] == "empty_items"


def test_three_hundred_documents_are_several_messages_and_score_as_alone(client: httpx.Client) -> None:
    texts = documents(300)
    reply = ask(client, "score", "cross", {"query": PAIRED, "items": texts}, **{"x-sie-explain": "1"})
    assert len(reply["explain"]) > 3
    scores = by_position(reply)
    for index in range(0, 300, 15):
        alone = ask(client, "score", "cross", {"query": PAIRED, "items": [texts[index]]})
        assert alone["scores"][0]["score"] == pytest.approx(scores[index], abs=1e-5)


def test_a_decoder_answers_yes_as_its_model_card_computes_it(client: httpx.Client, every_family: LocalModels) -> None:
    texts = documents(4)
    default = local_models.QWEN3_ENTRY["prompts"]["default_instruction"]
    for parameters, used in (({}, default), ({"instruction": "Find the river"}, "Find the river")):
        reply = ask(client, "score", "reranker", {"query": PAIRED, "items": texts, **parameters})
        expected = [
            local_models.yes_probability(every_family.weights / "reranker", used, PAIRED, text) for text in texts
        ]
        assert by_position(reply) == pytest.approx(expected, abs=1e-5)


def test_a_late_interaction_model_scores_by_maxsim(client: httpx.Client) -> None:
    (query,) = vectors(client, "late", [PAIRED], is_query=True)
    texts = documents(12)
    expected = [
        float((query["multivector"]["values"] @ slot["multivector"]["values"].T).max(1).sum())
        for slot in vectors(client, "late", texts)
    ]
    assert by_position(ask(client, "score", "late", {"query": PAIRED, "items": texts})) == pytest.approx(
        expected, abs=1e-4
    )


def m3_scores(client: httpx.Client, texts: list[str]) -> dict[str, list[float]]:
    """Return the scores of each mode by its formula, from the vectors."""
    query, *slots = vectors(client, "m3", [PAIRED, *texts], output_types=M3_OUTPUTS)
    weights = dict(zip(query["sparse"]["indices"].tolist(), query["sparse"]["values"].tolist(), strict=True))
    scores: dict[str, list[float]] = {"dense": [], "sparse": [], "colbert": []}
    for slot in slots:
        scores["dense"].append(float(query["dense"]["values"] @ slot["dense"]["values"]))
        shared = zip(slot["sparse"]["indices"].tolist(), slot["sparse"]["values"].tolist(), strict=True)
        scores["sparse"].append(sum(weight * weights.get(index, 0.0) for index, weight in shared))
        best = (query["multivector"]["values"] @ slot["multivector"]["values"].T).max(1)
        scores["colbert"].append(float(best.mean()))
    scores["hybrid"] = [
        0.4 * a + 0.2 * b + 0.4 * c
        for a, b, c in zip(scores["dense"], scores["sparse"], scores["colbert"], strict=True)
    ]
    return scores


def test_the_score_modes_of_bge_m3(client: httpx.Client) -> None:
    texts = documents(10)
    expected = m3_scores(client, texts)
    body = {"query": PAIRED, "items": texts}
    assert by_position(ask(client, "score", "m3", body)) == pytest.approx(expected["dense"], abs=1e-5)
    for mode, scores in expected.items():
        assert by_position(ask(client, "score", "m3", {**body, "options": {"score_mode": mode}})) == pytest.approx(
            scores, abs=1e-5
        )
    weighted = {"score_mode": "hybrid", "score_weights": {"dense": 1, "sparse": 3}}
    mixed = [(a + 3 * b) / 4 for a, b in zip(expected["dense"], expected["sparse"], strict=True)]
    assert by_position(ask(client, "score", "m3", {**body, "options": weighted})) == pytest.approx(mixed, abs=1e-5)
    assert refusal(client, "score", "m3", {**body, "options": {"score_mode": "best"}})[2] == "schema"


# extract


def check_slots(reply: Json) -> None:
    for index, slot in enumerate(reply["items"]):
        assert set(slot) - {"metadata", "error"} == EXTRACTED | {"id", "usage"}
        assert slot["id"] == slot.get("metadata", f"item-{index}")
        assert slot["data"] == {}
        for name in EXTRACTED - {"data"}:
            assert isinstance(slot[name], list)
        for entity in slot["entities"]:
            assert set(entity) == {"text", "label", "score", "start", "end", "bbox"}


ODD = ["Anna met 👩‍💻 in Zürich 😀😀 at the harbour", "e\u0301te\u0301 in winter, 東京", "", "שלום music"]


def zero_shot_pipeline(every_family: LocalModels) -> Callable[..., Any]:
    from transformers import pipeline

    return functools.partial(
        pipeline("zero-shot-classification", model=str(every_family.weights / "zero-shot"), device="cpu")
    )


@pytest.mark.parametrize("options", [{}, {"multi_label": True}, {"hypothesis_template": "It has {}, or not."}], ids=str)
def test_zero_shot_classes_equal_the_pipeline_s_best_first(
    client: httpx.Client, every_family: LocalModels, options: Json
) -> None:
    labels = ["music", "Winter Garden", "the harbour of a planet"]
    reply, _ = in_both_formats(client, "extract", "zero-shot", {"items": TEXTS, "labels": labels, "options": options})
    check_slots(reply)
    classify = zero_shot_pipeline(every_family)
    for text, slot in zip(TEXTS, reply["items"], strict=True):
        expected = classify(text, labels, **options)
        assert [classification["label"] for classification in slot["classifications"]] == expected["labels"]
        assert [classification["score"] for classification in slot["classifications"]] == pytest.approx(
            expected["scores"], abs=1e-5
        )


def test_tags_become_entities_as_the_pipeline_merges_them(client: httpx.Client, every_family: LocalModels) -> None:
    from transformers import pipeline

    reply, _ = in_both_formats(client, "extract", "tags", {"items": [*TEXTS, *ODD]})
    check_slots(reply)
    reference = pipeline(
        "token-classification", model=str(every_family.weights / "tags"), aggregation_strategy="simple", device="cpu"
    )
    for text, slot in zip([*TEXTS, *ODD], reply["items"], strict=True):
        expected = reference(text)
        spans = [(entity["entity_group"], entity["start"], entity["end"]) for entity in expected]
        assert [(entity["label"], entity["start"], entity["end"]) for entity in slot["entities"]] == spans
        assert [entity["score"] for entity in slot["entities"]] == pytest.approx(
            [float(entity["score"]) for entity in expected], abs=1e-5
        )
        assert [entity["text"] for entity in slot["entities"]] == [
            text[entity["start"] : entity["end"]] for entity in expected
        ]
    assert any(slot["entities"] for slot in reply["items"])


def test_labels_and_other_parameters_of_extract_are_checked(client: httpx.Client) -> None:
    assert refusal(client, "extract", "zero-shot", {"items": ["a"]}) == (400, "INVALID_INPUT", "labels_required")
    assert ask(client, "extract", "tags", {"items": ["a"]})["items"][0]["entities"] == []
    for params in ({"labels": "person"}, {"labels": [5]}, {"labels": [""]}, {"labels": ["a"], "threshold": "high"}):
        assert refusal(client, "extract", "zero-shot", {"items": ["a"], "params": params})[2] == "schema"
    schema = {"items": ["a"], "output_schema": {"type": "object"}}
    assert ask(client, "extract", "tags", schema)["warnings"][0].startswith("output_schema: ignored")


def test_a_failed_slot_has_all_keys_too(client: httpx.Client) -> None:
    body = {"items": [{"text": "river", "id": "a", "metadata": "a"}, {"images": ["aGVsbG8="]}], "labels": ["person"]}
    reply, _ = in_both_formats(client, "extract", "zero-shot", body)
    check_slots(reply)
    assert ["error" in slot for slot in reply["items"]] == [False, True]


# everything else


def test_a_verb_that_a_model_does_not_have_is_refused_before_any_load(client: httpx.Client) -> None:
    able = {
        "mini": {"encode"},
        "sparse": {"encode"},
        "late": {"encode", "score"},
        "m3": {"encode", "score"},
        "cross": {"score"},
        "reranker": {"score"},
        "zero-shot": {"extract"},
        "tags": {"extract"},
    }
    body = {"query": "a", "items": ["a"], "labels": ["a"]}
    for (model, verbs), verb in itertools.product(able.items(), ("encode", "score", "extract")):
        if verb not in verbs:
            assert refusal(client, verb, model, body) == (400, "INVALID_INPUT", "unsupported_task"), (model, verb)


def test_the_models_api_says_what_each_model_does(client: httpx.Client) -> None:
    for model in ("mini", "late", "m3", "cross", "reranker", "zero-shot"):  # each is loaded, whatever ran before
        verb = client.get(f"/v1/models/test/{model}").json()["tasks"][0]
        ask(client, verb, model, {"query": "a", "items": ["a"], "labels": ["a"]})
    infos = {info["id"].removeprefix("test/"): info for info in client.get("/v1/models").json()["data"]}
    assert {"late:muvera", "mini:bf16"} <= set(infos)
    summaries = {
        name: (info["outputs"], info["tasks"], info["score_scale"], info["supports_lora"])
        for name, info in infos.items()
    }
    assert summaries["mini"] == (["dense"], ["encode"], None, True)
    assert summaries["m3"] == (["dense", "sparse", "multivector", "score"], ["encode", "score"], "cosine", True)
    assert summaries["late"] == (["multivector", "score"], ["encode", "score"], "maxsim", True)
    assert summaries["cross"] == (["score"], ["score"], "probability", True)
    assert summaries["reranker"] == (["score"], ["score"], "probability", False)
    assert summaries["zero-shot"] == (["json"], ["extract"], None, False)
    assert infos["late:muvera"]["variant_of"] == "test/late"
    assert infos["late:muvera"]["dims"] == {"multivector": TOKEN_WIDTH, "dense": 96}
    assert (infos["m3"]["dims"]["dense"], infos["m3"]["matryoshka_dims"]) == (M3_WIDTH, [16])
    assert infos["cross"]["dims"] == {}
    for name in ("mini", "m3", "cross", "reranker"):
        assert infos[name]["loaded"], name
        assert infos[name]["fingerprint"]
        assert min(infos[name]["certificate"]["packed"].values()) >= 0.9999
    for task, able, unable in (
        ("score", {"late", "m3", "cross", "reranker"}, {"mini", "sparse", "tags"}),
        ("extract", {"zero-shot", "tags", "classes"}, {"mini", "late", "cross"}),
    ):
        models = client.get(f"/v1/models?task={task}&variants=false").json()["data"]
        names = {info["id"].removeprefix("test/") for info in models}
        assert names & (able | unable) == able


@pytest.mark.long
@pytest.mark.precision
def test_a_profile_in_another_precision_is_a_copy_of_its_own(client: httpx.Client) -> None:
    (exact,) = vectors(client, "mini", [PAIRED])
    (rounded,) = vectors(client, "mini:bf16", [PAIRED])
    assert float(exact["dense"]["values"] @ rounded["dense"]["values"]) > 0.999
    infos = [client.get(f"/v1/models/test/{name}").json() for name in ("mini", "mini:bf16")]
    assert all(info["loaded"] for info in infos)
    assert infos[0]["fingerprint"] != infos[1]["fingerprint"]
    # where the CPU has no bfloat16 the copy computes in float32, and the models API says so
    lacks = bfloat16_lacks()
    assert infos[0]["precision"] == {"requested": "float32", "served": ["float32"], "reason": None}
    assert infos[1]["precision"] == {
        "requested": "bfloat16",
        "served": ["float32" if lacks else "bfloat16"],
        "reason": lacks or None,
    }
    differs = np.abs(exact["dense"]["values"] - rounded["dense"]["values"]).max() > 1e-5
    assert bool(differs) == (not lacks)


def test_the_client_scores_and_extracts(cluster: Cluster) -> None:
    with SIEClient(cluster.url) as sie:
        scored = sie.score("test/cross", {"id": "q", "text": PAIRED}, ["kernel", {"id": "b", "text": "violin"}])
        several = sie.extract("test/zero-shot", TEXTS, labels=["music", "river"])
        single = sie.extract("test/tags", "river mountain", threshold=0.1)
        sparse = sie.encode("test/m3", PAIRED, output_types=["sparse", "multivector"], output_dtype="float16")
        sketch = sie.encode("test/late", [PAIRED], muvera=SKETCH)
    assert (scored["query_id"], {entry["item_id"] for entry in scored["scores"]}) == ("q", {"item-0", "b"})
    assert [entry["rank"] for entry in scored["scores"]] == [0, 1]
    assert all(
        {classification["label"] for classification in slot["classifications"]} == {"music", "river"}
        for slot in several
    )
    assert single["id"] == "item-0"
    assert sparse["sparse"]["indices"].dtype == np.int32
    assert sparse["multivector"].dtype == np.float16
    sparse["multivector"][0, 0] = 1
    assert sketch[0]["dense"].shape == (96,)
    assert sketch[0]["muvera"]["num_repetitions"] == 4


async def test_the_async_client_scores_and_extracts(cluster: Cluster) -> None:
    async with SIEAsyncClient(cluster.url) as sie:
        scored = await sie.score("test/late", PAIRED, TEXTS)
        tagged = await sie.extract("test/tags", TEXTS)
    assert len(scored["scores"]) == len(tagged) == len(TEXTS)
