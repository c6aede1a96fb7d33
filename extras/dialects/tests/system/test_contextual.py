"""Chunks in the formats of Voyage and Jina, by their unmodified clients."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import shared
from cluster import MODEL, Cluster

from sie_client import SIEClient

pytestmark = shared.OPEN

DOCUMENTS = [
    ["Berlin is the capital of Germany.", "The city has 3.7 million inhabitants.", " It lies on the Spree. "],
    ["A cat sleeps."],
]
JOINED = "Berlin is the capital of Germany. The city has 3.7 million inhabitants. It lies on the Spree. "
SPANS = [[0, 33], [34, 71], [71, 94]]
TOLERANCE = 1e-5  # results of batches of other sizes differ by less


@pytest.fixture(scope="module")
def voyage(open_cluster: Cluster) -> Any:
    import voyageai

    return voyageai.Client(api_key="key", base_url=f"{open_cluster.url}/v1", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(open_cluster: Cluster) -> Iterator[SIEClient]:
    with SIEClient(open_cluster.url) as client:
        yield client


def native(client: SIEClient, text: str, chunks: Any) -> Any:
    return np.stack([chunk["dense"] for chunk in client.encode(MODEL, text, chunks=chunks)["chunks"]])


def test_voyage_gets_a_vector_for_each_chunk_pooled_from_its_document(voyage: Any, client: SIEClient) -> None:
    answer = voyage.contextualized_embed(DOCUMENTS, model=MODEL, input_type="document")
    assert [(document.index, len(document.embeddings)) for document in answer.results] == [(0, 3), (1, 1)]
    expected = native(client, JOINED, SPANS)
    assert np.abs(np.array(answer.results[0].embeddings) - expected).max() < TOLERANCE
    alone = client.encode(MODEL, DOCUMENTS[1][0])
    assert np.abs(np.array(answer.results[1].embeddings[0]) - alone["dense"]).max() < TOLERANCE
    whole = client.encode(MODEL, JOINED)
    assert answer.total_tokens == whole["usage"]["total_tokens"] + alone["usage"]["total_tokens"]
    assert answer.chunk_texts is None


def test_voyage_gets_queries_dimensions_and_types(voyage: Any, client: SIEClient) -> None:
    query = voyage.contextualized_embed([["inhabitants"]], model=MODEL, input_type="query").results[0].embeddings[0]
    assert np.abs(np.array(query) - client.encode(MODEL, "inhabitants", is_query=True)["dense"]).max() < TOLERANCE
    plain = np.array(voyage.contextualized_embed(DOCUMENTS[:1], model=MODEL).results[0].embeddings)
    codes = voyage.contextualized_embed(DOCUMENTS[:1], model=MODEL, output_dtype="int8").results[0].embeddings
    assert np.abs(np.array(codes) - plain / np.abs(plain).max(1, keepdims=True) * 127).max() < 0.6
    bits = voyage.contextualized_embed(DOCUMENTS[:1], model=MODEL, output_dtype="ubinary").results[0].embeddings
    assert np.array_equal(bits, np.packbits(plain > 0, axis=1))
    with pytest.raises(Exception, match="output_dimension: "):
        voyage.contextualized_embed(DOCUMENTS[:1], model=MODEL, output_dimension=100_000)


def test_voyage_chunks_a_document_automatically(voyage: Any, client: SIEClient) -> None:
    text = JOINED * 20
    options = {"model": MODEL, "input_type": "document", "enable_auto_chunking": True}
    answer = voyage.contextualized_embed([text, "A cat sleeps."], chunk_size=40, chunk_overlap=10, **options)
    native_chunks = client.encode(MODEL, text, chunks={"max_tokens": 40, "overlap_tokens": 10})["chunks"]
    texts = [text[chunk["start"] : chunk["end"]] for chunk in native_chunks]
    assert answer.chunk_texts == [texts, ["A cat sleeps."]]
    expected = np.stack([chunk["dense"] for chunk in native_chunks])
    assert np.abs(np.array(answer.results[0].embeddings) - expected).max() < TOLERANCE
    (whole,) = voyage.contextualized_embed([JOINED], **options).chunk_texts
    assert whole == [JOINED]


def test_jina_late_chunking_pools_each_input_from_all_of_them(open_cluster: Cluster, client: SIEClient) -> None:
    from haystack import Document
    from haystack.utils import Secret
    from haystack_integrations.components.embedders.jina import JinaDocumentEmbedder

    embedder = JinaDocumentEmbedder(
        Secret.from_token("key"),
        MODEL,
        base_url=f"{open_cluster.url}/v1/embeddings",
        task="retrieval.passage",
        late_chunking=True,
        progress_bar=False,
    )
    documents = embedder.run([Document(content=text) for text in DOCUMENTS[0]])["documents"]
    actual = np.array([document.embedding for document in documents])
    expected = native(client, JOINED, SPANS)
    assert np.abs(actual - expected).max() < TOLERANCE
    body = {"model": MODEL, "input": [{"text": text} for text in DOCUMENTS[0]], "late_chunking": True}
    reply = httpx.post(
        f"{open_cluster.url}/v1/embeddings", json={**body, "encoding_format": "base64"}, timeout=60
    ).json()
    assert [entry["index"] for entry in reply["data"]] == [0, 1, 2]
    coded = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in reply["data"]]
    assert np.abs(np.stack(coded) - expected).max() < TOLERANCE
    assert reply["usage"]["total_tokens"] == client.encode(MODEL, JOINED)["usage"]["total_tokens"]


@pytest.mark.parametrize("accept", ["application/octet-stream", "application/vnd.apache.arrow.stream"])
def test_late_chunking_is_refused_for_a_format_without_a_place_for_it(open_cluster: Cluster, accept: str) -> None:
    body = {"model": MODEL, "input": ["a", "b"], "late_chunking": True}
    answer = httpx.post(f"{open_cluster.url}/v1/embeddings", json=body, headers={"accept": accept}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (400, "unsupported_output")
