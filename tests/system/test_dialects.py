"""Replies of routes in the formats of other servers: their fields, vectors of each type, relevance of documents. Each
number is that of the native route. The clients of test_clients.py read the same replies.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import numpy as np
import pytest
import shared
from cluster import Cluster

from sie_gateway.http.routes import inference_route

pytestmark = shared.OPEN
DENSE, MINI, CROSS, LATE, CLASSES = "test/dense", "test/mini", "test/cross", "test/late", "test/classes"
TEXT = "The river runs past the old mill."
QUERY = "river search queue"
DOCUMENTS = ["the winter garden (of music)", "kernel", "river river", "Zürich, 東京 and 😀"]
RERANKS = [path for path in ("/v1/rerank", "/v2/rerank", "/rerank") if inference_route(path)]


@pytest.fixture(scope="module")
def client(open_cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=open_cluster.url, timeout=60, trust_env=False) as client:
        yield client


def post(client: httpx.Client, path: str, body: dict[str, Any], **headers: str) -> Any:
    answer = client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def native_scores(client: httpx.Client, model: str) -> list[tuple[int, float]]:
    entries = post(client, f"/v1/score/{model}", {"query": QUERY, "items": DOCUMENTS})["scores"]
    return [(int(entry["item_id"].removeprefix("item-")), entry["score"]) for entry in entries]


# fields: `/` leads into a map, or into the first entry of a list, and a value after `=` is the only one

HEAD = "id object=list created model usage/prompt_tokens usage/total_tokens usage/completion_tokens"
RANKED = "id object=rerank model usage/total_tokens results/index results/relevance_score results/document/text"
RANK: dict[str, Any] = {"model": CROSS, "query": "river", "documents": ["river", "kernel"]}
ASKED: dict[str, Any] = {"model": DENSE, "input": ["river", "kernel"]}
COHERE: dict[str, Any] = {"model": DENSE, "texts": ["river"], "input_type": "search_document"}
PASSAGES: dict[str, Any] = {"model": CROSS, "query": {"text": "a"}, "passages": [{"text": "b"}]}
MIXEDBREAD: dict[str, Any] = {"model": CROSS, "query": "river", "input": ["a", "b"]}
EMBEDDING = f"{HEAD} data/object=embedding data/index data/embedding"
# docs.jina.ai, docs.mistral.ai, docs.vllm.ai, docs.voyageai.com, docs.together.ai, mixedbread, docs.nvidia.com, TEI
REPLIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", ASKED, EMBEDDING),
    ("/embeddings", ASKED, EMBEDDING),
    (f"/tei/{DENSE}/v1/embeddings", ASKED, EMBEDDING),
    ("/v1/multi-vector", {**ASKED, "model": LATE}, f"{HEAD} data/object=embeddings data/index data/embeddings"),
    ("/pooling", ASKED, f"{HEAD} data/object=pooling data/index data/data"),
    *(
        (path, {"model": CROSS, "text_1": "a", "text_2": ["a"]}, f"{HEAD} data/object=score data/index data/score")
        for path in ("/v1/score", "/score")
    ),
    (
        "/v1/contextualizedembeddings",
        {"model": DENSE, "inputs": [["river", "kernel"]], "input_type": "document"},
        "object=list model usage/total_tokens data/object=list data/data/object=embedding data/data/embedding",
    ),
    ("/v1/rerank", RANK, f"{RANKED} data/index data/relevance_score"),
    *((path, RANK, RANKED) for path in ("/v1/reranking", "/reranking", "/api/rerank")),
    ("/v2/rerank", RANK, "id results/index results/relevance_score meta/billed_units/search_units"),
    *(
        (path, PASSAGES, "rankings/index rankings/logit usage/total_tokens")
        for path in ("/v1/ranking", "/v1/reranking", "/reranking")
    ),
    *(
        (path, MIXEDBREAD, "object=list model data/object=rank_result data/index data/score top_k return_input")
        for path in ("/v1/reranking", "/reranking")
    ),
    ("/v1/embed", COHERE, "id response_type=embeddings_floats embeddings texts meta/api_version"),
    ("/v2/embed", {**COHERE, "embedding_types": ["int8"]}, "id embeddings/int8 texts meta/billed_units/input_tokens"),
    ("/classify", {"model": CLASSES, "input": ["river"]}, "object=classify model id data/label data/score usage"),
    ("/api/embed", ASKED, "model embeddings total_duration prompt_eval_count"),
    (f"/tei/{CROSS}/rerank", {"query": "river", "texts": ["river"]}, "index score"),
    (f"/tei/{CLASSES}/predict", {"inputs": "river"}, "label score"),
    (f"/tei/{DENSE}/tokenize", {"inputs": "river"}, "id text special"),
    ("/tei/test/sparse/embed_sparse", {"inputs": "river"}, "index value"),
    (f"/tei/{CROSS}/invocations", {"query": "river", "texts": ["river"]}, "index score"),
]


def schema_of(fields: str) -> dict[str, Any]:
    """Return the JSON schema of a map that must have these fields, or of a list, or a list of lists, of such maps."""
    names: dict[str, list[str]] = {}
    values: dict[str, str] = {}
    for path in fields.split():
        name, _, rest = path.partition("/")
        name, _, value = name.partition("=")
        names.setdefault(name, []).append(rest)
        if value:
            values[name] = value
    properties = {name: {"const": values[name]} for name in values}
    for name, rests in names.items():
        if any(rests):
            properties[name] = schema_of(" ".join(rests))
    schema: dict[str, Any] = {"type": "object", "required": list(names), "properties": properties}
    listed = {"type": "array", "minItems": 1, "items": schema}
    return {"anyOf": [schema, listed, {"type": "array", "minItems": 1, "items": listed}]}


@pytest.mark.parametrize(
    ("path", "body", "fields"), [pytest.param(*row, id=row[0], marks=shared.needs(row[0])) for row in REPLIES]
)
def test_a_reply_has_the_fields_that_its_vendor_documents(
    client: httpx.Client, path: str, body: dict[str, Any], fields: str
) -> None:
    jsonschema_rs.validator_for(schema_of(fields)).validate(post(client, path, body))


@shared.needs("/tei/MODEL/embed_all")
def test_tei_gives_each_token_a_vector_and_describes_a_model(client: httpx.Client) -> None:
    (rows,) = post(client, f"/tei/{DENSE}/embed_all", {"inputs": "river"})
    assert len({len(row) for row in rows}) == 1 < len(rows)
    info = client.get(f"/tei/{DENSE}/info").json()
    assert (info["model_id"], info["max_input_length"] > 0, info["max_client_batch_size"] > 0) == (DENSE, True, True)


# relevance


@pytest.mark.parametrize("path", RERANKS)
@pytest.mark.parametrize("model", [CROSS, "test/m3", LATE, "test/reranker"])
def test_relevance_is_from_0_to_1_in_the_order_of_the_scores(client: httpx.Client, path: str, model: str) -> None:
    """The scale of the model does not matter; raw scores come on demand. Each route has its own default for documents
    in the reply.
    """
    scores = native_scores(client, model)
    body = {"model": model, "query": QUERY, "documents": DOCUMENTS}
    reply = post(client, path, body)
    assert [entry["index"] for entry in reply["results"]] == [index for index, _ in scores]
    assert all(0 <= entry["relevance_score"] <= 1 for entry in reply["results"])
    assert ("document" in reply["results"][0]) == (path != "/v2/rerank")
    raw = post(client, path, {**body, "raw_scores": True, "top_n": 2, "return_documents": True})
    has_logits = model in (CROSS, "test/reranker")  # the scores of these two are probabilities
    of_scale = (lambda score: math.log(score / (1 - score))) if has_logits else float
    expected = [(index, pytest.approx(of_scale(score), abs=1e-4)) for index, score in scores[:2]]
    assert [(entry["index"], entry["relevance_score"]) for entry in raw["results"]] == expected
    document = DOCUMENTS[scores[0][0]]
    assert raw["results"][0]["document"] == (document if path == "/rerank" else {"text": document})
    assert reply["meta"]["tokens"]["input_tokens"] == reply["usage"]["total_tokens"] > 0


def test_documents_are_cut_and_joined_as_the_request_says(client: httpx.Client) -> None:
    """`max_tokens_per_doc` cuts documents, never the query. `rank_fields` of Cohere v1 gives the order of the lines."""
    words = "river winter kernel music garden river search queue winter"
    asked = {"model": CROSS, "query": QUERY}
    cut = post(client, "/v2/rerank", {**asked, "documents": [words], "max_tokens_per_doc": 5})
    whole = post(client, "/v2/rerank", {**asked, "documents": [words]})
    alone = post(client, "/v2/rerank", {**asked, "documents": ["river winter kernel music garden"]})
    assert cut["results"] == alone["results"] != whole["results"]
    assert (cut["usage"]["truncated_items"], alone["usage"]["truncated_items"]) == ([0], [])
    documents = [{"title": "river", "body": "kernel", "year": 1999}, {"body": "music", "title": "winter"}]
    fields = {"rank_fields": ["title", "year", "body"], "max_chunks_per_doc": 4}
    reply = post(client, "/v1/rerank", {**asked, "documents": documents, **fields})
    plain = post(client, "/v1/rerank", {**asked, "documents": ["river\n1999\nkernel", "winter\nmusic"]})
    assert reply["results"] == plain["results"]
    assert reply["warnings"][0].partition(":")[0] == "max_chunks_per_doc"


@pytest.mark.parametrize("path", RERANKS)
def test_an_instruction_is_followed_by_a_model_that_reads_one_else_named(client: httpx.Client, path: str) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS}
    for model, reads in ((CROSS, False), ("test/reranker", True)):
        without = post(client, path, {"model": model, **body})
        reply = post(client, path, {"model": model, **body, "instruction": "Find the river"})
        assert ("warnings" in reply, reply["results"] == without["results"]) == (not reads, not reads)
    strict = client.post(
        path, json={"model": CROSS, **body, "instruction": "Find the river"}, headers={"X-SIE-Strict": "true"}
    )
    assert (strict.status_code, strict.json()["error"]["param"]) == (400, "instruction")


# types of vectors


def test_vectors_come_in_the_types_that_are_named_with_scale_and_offset(client: httpx.Client) -> None:
    """The codes are those of the native route, by the fields of Jina, Voyage and Cohere."""
    body = {"model": MINI, "input": [{"text": TEXT}]}  # an object, as Jina has it
    cohere = {"model": MINI, "texts": [TEXT], "input_type": "search_document"}
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    served = inference_route("/v2/embed") is not None
    embed = post(client, "/v2/embed", {**cohere, "embedding_types": types}) if served else None
    exact = post(client, f"/v1/encode/{MINI}", {"items": [TEXT]})["items"][0]["dense"]["values"]
    for name in ("int8", "uint8", "ubinary"):
        native = {"items": [TEXT], "params": {"output_dtype": name}}
        slot = post(client, f"/v1/encode/{MINI}", native)["items"][0]["dense"]
        scales = {key: slot[key] for key in ("scale", "offset") if key in slot}
        for field in ("embedding_type", "output_dtype"):
            entry = post(client, "/v1/embeddings", {**body, field: name})["data"][0]
            assert entry["embedding"] == slot["values"]
            assert {key: entry[key] for key in ("scale", "offset") if key in entry} == scales
        if embed is not None:
            assert embed["embeddings"][name][0] == slot["values"]
            told = embed.get("embeddings_scale", {}).get(name, {})
            assert {key: values[0] for key, values in told.items()} == scales
    packed = [post(client, "/v1/embeddings", {**body, "embedding_type": ["base64"]})["data"][0]["embedding"]]
    if embed is not None:
        packed += embed["embeddings"]["base64"]
        assert [code + 128 for code in embed["embeddings"]["binary"][0]] == embed["embeddings"]["ubinary"][0]
    for text in packed:
        assert np.array_equal(np.frombuffer(base64.b64decode(text), "<f4"), np.float32(exact))
    raw = {"accept": "application/octet-stream"}
    refused = client.post("/v1/embeddings", json={**body, "output_dtype": "int8"}, headers=raw)
    assert refused.json()["error"]["reason"] == "unsupported_dtype"


def test_failed_slots_keep_their_places_and_failed_documents_stand_last(client: httpx.Client) -> None:
    image: dict[str, Any] = {"images": ["aGVsbG8="], "id": "picture"}
    body: dict[str, Any] = {"items": ["a", {"id": "x"}, image, ""]}
    answer = client.post(f"/v1/encode/{DENSE}", json=body)
    assert [slot.get("error", {}).get("reason") for slot in answer.json()["items"]] == [
        None,
        "empty_item",
        "unsupported_modality",
        None,
    ]
    assert answer.headers["x-sie-failed-items"] == "2"
    items = [image, {"text": "kernel", "id": "a"}, {"text": "violin", "metadata": {"n": 1}}, {"text": "kernel"}]
    asked = {"query": {"id": "q7", "text": TEXT}, "items": items}
    reply = post(client, f"/v1/score/{CROSS}", asked)
    *scored, failed = reply["scores"]
    assert (reply["query_id"], [entry["rank"] for entry in reply["scores"]]) == ("q7", [0, 1, 2, 3])
    assert (failed["item_id"], failed["score"], failed["error"]["reason"]) == ("picture", None, "unsupported_modality")
    twins = [entry["item_id"] for entry in scored if entry["item_id"] != "item-2"]
    assert twins == ["a", "item-3"]  # equal scores stay in the order of the inputs
    assert next(entry for entry in scored if entry["item_id"] == "item-2")["metadata"] == {"n": 1}
    strict = client.post(f"/v1/score/{CROSS}", json={**asked, "on_item_error": "fail"})
    assert (strict.status_code, strict.json()["error"]["reason"]) == (400, "unsupported_modality")
