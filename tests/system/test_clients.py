"""Unmodified public clients against a running cluster: their results, and how they report errors.

Each client returns the vectors or the scores of the native route bit for bit: it sends one text at a time to an idle
cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import shared
from cluster import Cluster, until
from selection import long_but

from sie_contracts import arrays
from sie_gateway.dialects import vocabulary
from sie_gateway.http.routes import inference_route

# warnings of the clients' own code
WARNINGS = (
    "DeprecationWarning",
    "PendingDeprecationWarning",
    "ResourceWarning",
    "pytest.PytestUnraisableExceptionWarning",
)
pytestmark = [shared.GUARDED, *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in WARNINGS)]

KEY = shared.USER
MINI, CROSS = "test/mini", "test/cross"
TEXT, LONG = "The river runs past the old mill.", "winter " * 600
QUERY, DOCUMENTS = (
    "river search queue",
    ["the winter garden (of music)", "kernel", "river river", "Zürich, 東京 and 😀"],
)
SENTENCES = ("mill is by the river", "people of the city", "man and the sea", "time was not long", "kernel of a queue")
# the file under which tiktoken caches its vocabulary: the SHA-1 of the address
CL100K = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
REJECTED = "sie_gateway_rejected_requests_total"
HEAVY = Path(__file__).parents[2] / ".venv-clients/bin/python"  # see `make test-long`


@pytest.fixture(scope="module")
def cluster(guarded_cluster: Cluster) -> Iterator[Cluster]:
    """The guarded cluster, which answers only requests with the key."""
    yield guarded_cluster
    gc.collect()  # closes connections that clients left open: a test of another file would get the warning


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=cluster.url, timeout=60, trust_env=False, headers={"authorization": f"Bearer {KEY}"}
    ) as client:
        yield client


@pytest.fixture(autouse=True)
def _no_surprises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Turn off proxies and telemetry, and take the vocabulary from the disk."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    packed = vocabulary.path("cl100k_base")
    assert packed is not None
    (tmp_path / CL100K).write_bytes(gzip.decompress(packed.read_bytes()))


def native(client: httpx.Client, text: str, model: str = MINI, **params: Any) -> list[float]:
    answer = client.post(
        f"/v1/encode/{model}", json={"items": [text], "params": params}, headers={"accept": "application/msgpack"}
    )
    assert answer.status_code == 200, answer.text
    values = arrays.unpack(arrays.decode_msgpack(answer.content))["items"][0]["dense"]["values"]
    assert values.dtype == np.float32
    return list(values.tolist())


def native_scores(
    client: httpx.Client, model: str = CROSS, documents: list[str] = DOCUMENTS
) -> list[tuple[int, float]]:
    answer = client.post(f"/v1/score/{model}", json={"query": QUERY, "items": documents})
    assert answer.status_code == 200, answer.text
    return [(int(entry["item_id"].removeprefix("item-")), entry["score"]) for entry in answer.json()["scores"]]


# the clients: all functions take the same arguments and raise an exception for an error


def openai_sync(url: str, model: str, text: str, key: str, retries: int) -> list[float]:
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries, timeout=30) as client:
        answer = client.embeddings.create(model=model, input=text)
    assert (answer.model, answer.object, answer.data[0].index) == (model, "list", 0)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 2
    return answer.data[0].embedding


def openai_async(url: str, model: str, text: str, key: str, retries: int) -> list[float]:
    import openai

    async def run() -> list[float]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries, timeout=30) as client:
            answer = await client.embeddings.create(model=model, input=[text], encoding_format="float")
        return answer.data[0].embedding

    return asyncio.run(run())


@contextlib.contextmanager
def cohere_v2(url: str, key: str, retries: int) -> Iterator[Any]:
    import cohere

    with httpx.Client(timeout=30) as http:
        yield cohere.ClientV2(
            key, base_url=url, max_retries=retries, httpx_client=http, log_warning_experimental_features=False
        )


def cohere_embed(url: str, model: str, text: str, key: str, retries: int) -> list[float]:
    with cohere_v2(url, key, retries) as client:
        answer = client.embed(model=model, texts=[text], input_type="search_document", embedding_types=["float"])
    assert answer.response_type == "embeddings_by_type"
    return list(answer.embeddings.float_[0])


def curl(url: str, model: str, text: str, key: str, retries: int) -> list[float]:
    body = json.dumps({"model": model, "input": text})
    with tempfile.NamedTemporaryFile() as file:  # each attempt overwrites the reply of the former one
        argv = ["curl", "-sS", "--fail-with-body", "--retry", str(retries), "-w", "%{http_code}", "-o", file.name]
        argv += [f"{url}/v1/embeddings", "-H", f"Authorization: Bearer {key}", "-d", body]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        reply = json.loads(Path(file.name).read_text())
    if done.returncode:
        raise Refused(int(done.stdout[-3:]), reply)
    return list(reply["data"][0]["embedding"])


def cohere_rerank_v2(url: str, model: str, text: str, key: str, retries: int) -> list[tuple[int, float]]:
    with cohere_v2(url, key, retries) as client:
        answer = client.rerank(model=model, query=QUERY, documents=DOCUMENTS)
    return [(entry.index, entry.relevance_score) for entry in answer.results]


def cohere_rerank_v1(url: str, model: str, text: str, key: str, retries: int) -> list[tuple[int, float]]:
    import cohere

    with httpx.Client(timeout=30) as http:
        client = cohere.Client(
            key, base_url=url, max_retries=retries, httpx_client=http, log_warning_experimental_features=False
        )
        answer = client.rerank(
            model=model, query=QUERY, documents=[{"text": text} for text in DOCUMENTS], return_documents=True
        )
    assert [entry.document.text for entry in answer.results if entry.document] == [
        DOCUMENTS[entry.index] for entry in answer.results
    ]
    return [(entry.index, entry.relevance_score) for entry in answer.results]


@contextlib.contextmanager
def voyage(url: str, key: str, retries: int) -> Iterator[Any]:
    import voyageai

    try:
        yield voyageai.Client(api_key=key, base_url=f"{url}/v1", max_retries=retries + 1, timeout=30)
    except voyageai.error.VoyageError as error:  # an error that comes before the body is read cannot be printed
        raise Refused(error.http_status, error.http_body) from error


def voyage_embed(url: str, model: str, text: str, key: str, retries: int) -> list[float]:
    with voyage(url, key, retries) as client:
        answer = client.embed([text], model=model, input_type="document")
    assert answer.total_tokens > 2
    return answer.embeddings[0]


def voyage_rerank(url: str, model: str, text: str, key: str, retries: int) -> list[tuple[int, float]]:
    with voyage(url, key, retries) as client:
        answer = client.rerank(QUERY, DOCUMENTS, model=model)
    assert answer.total_tokens > 2
    return [(entry.index, entry.relevance_score) for entry in answer.results]


@contextlib.contextmanager
def infinity(url: str, key: str) -> Iterator[Any]:
    from infinity_client import AuthenticatedClient

    with AuthenticatedClient(
        base_url=url, token=key, raise_on_unexpected_status=True, timeout=httpx.Timeout(30)
    ) as client:
        yield client


def infinity_embed(url: str, model: str, text: str, key: str, retries: int) -> list[float]:
    from infinity_client.api.default import embeddings
    from infinity_client.models import OpenAIEmbeddingInputText

    with infinity(url, key) as client:
        return embeddings.sync(client=client, body=OpenAIEmbeddingInputText([text], model)).data[0].embedding


def infinity_rerank(url: str, model: str, text: str, key: str, retries: int) -> list[tuple[int, float]]:
    from infinity_client.api.default import rerank
    from infinity_client.models import RerankInput

    with infinity(url, key) as client:
        answer = rerank.sync(client=client, body=RerankInput(QUERY, DOCUMENTS, return_documents=True, model=model))
    assert [entry.document for entry in answer.results] == [DOCUMENTS[entry.index] for entry in answer.results]
    return [(entry.index, entry.relevance_score) for entry in answer.results]


def ollama_client(url: str, key: str) -> Any:
    import ollama

    return ollama.Client(url, headers={"authorization": f"Bearer {key}"}, timeout=30)


def ollama_embed(url: str, model: str, text: str, key: str, retries: int) -> list[float]:
    name = f"{model}:latest"
    answer = ollama_client(url, key).embed(name, [text], keep_alive="5m", dimensions=384)
    assert answer.model == name
    assert answer.total_duration > 0
    assert answer.prompt_eval_count > 2
    return list(answer.embeddings[0])


def heavy(name: str) -> Callable[..., Any]:
    """Return a client for Python that is installed in `.venv-clients`."""
    return apart(name, str(HEAVY), "heavy.py")


def node(name: str) -> Callable[..., Any]:
    """Return a client for Node."""
    return apart(name, "node", "node/call.mjs")


def apart(name: str, program: str, script: str) -> Callable[..., Any]:
    def run(url: str, model: str, text: str, key: str, retries: int) -> Any:
        ranks = name.endswith("rerank")
        inputs = [QUERY, *DOCUMENTS] if ranks else [text]
        environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        path = str(Path(__file__).parents[1] / "clients" / script)
        argv = [program, path, name, url, key, model, str(retries), *inputs]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=110, env=environ)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout.splitlines()[-1])
        if "status" in report:
            raise Refused(report["status"], report["error"])
        return [tuple(pair) for pair in report["found"]] if ranks else report["found"][0]

    return run


class Refused(Exception):
    """A refusal that a client reports in a form without `status_code`."""

    def __init__(self, status_code: int, body: Any) -> None:
        super().__init__(str(body))
        self.status_code = status_code


@dataclass(frozen=True)
class Client:
    """`call` takes url, model, text, key and retries. `needs`: a route that the client calls."""

    name: str
    call: Callable[..., Any]
    long: bool = False
    needs: str = "/v1/embeddings"

    @property
    def ranks(self) -> bool:
        return "rerank" in self.name


# libraries that only long runs call, by the route that each calls: `node/call.mjs` and `heavy.py` know their names
NODE = {
    **dict.fromkeys(("ollama", "langchain-ollama"), "/api/embed"),
    **dict.fromkeys(("ai-sdk", "langchain-openai"), "/v1/embeddings"),
    "togetherai-rerank": "/v1/rerank",
}
HEAVY_NAMES = {
    **dict.fromkeys(("mistral", "together", "litellm-infinity", "litellm-jina"), "/v1/embeddings"),
    **dict.fromkeys(
        ("together-rerank", "mixedbread-rerank", "litellm-jina-rerank", "litellm-voyage-rerank"), "/v1/rerank"
    ),
    **dict.fromkeys(("litellm-rerank", "langchain-cohere-rerank"), "/v2/rerank"),
    "litellm-infinity-rerank": "/rerank",
}
_ALL = [
    Client("openai", openai_sync),
    Client("openai async", openai_async),
    Client("cohere embed", cohere_embed, needs="/v2/embed"),
    Client("curl", curl),
    Client("cohere rerank v2", cohere_rerank_v2),
    Client("cohere rerank v1", cohere_rerank_v1),
    Client("llama-index", heavy("llama-index"), long=True),
    Client("litellm", heavy("litellm"), long=True),
    Client("langchain cohere", heavy("langchain-cohere"), long=True, needs="/v2/embed"),
    Client("voyage", voyage_embed),
    Client("voyage rerank", voyage_rerank),
    Client("infinity", infinity_embed),
    Client("infinity rerank", infinity_rerank, needs="/rerank"),
    Client("ollama", ollama_embed, needs="/api/embed"),
    *(Client(f"node {name}", node(name), long=True, needs=path) for name, path in NODE.items()),
    *(Client(name, heavy(name), long=True, needs=path) for name, path in HEAVY_NAMES.items()),
]
CLIENTS = [client for client in _ALL if inference_route(client.needs)]
every_client = pytest.mark.parametrize(
    "public", long_but(CLIENTS, [library for library in CLIENTS if not library.long]), ids=lambda library: library.name
)


def model_of(public: Client) -> str:
    return CROSS if public.ranks else MINI


def refusal(public: Client, cluster: Cluster, model: str = "", key: str = KEY) -> int:
    """Return the status that the client reports to its user."""
    with pytest.raises(Exception) as raised:  # each client has exceptions of its own
        public.call(cluster.url, model or model_of(public), TEXT, key, 0)
    error: Any = raised.value
    while not hasattr(error, "status_code") and error.__cause__ is not None:
        error = error.__cause__
    assert hasattr(error, "status_code"), repr(raised.value)
    return int(error.status_code)


@every_client
def test_each_client_gets_what_the_native_route_gives(public: Client, cluster: Cluster, client: httpx.Client) -> None:
    """The same text alone has the same bits by every route."""
    numbers = public.call(cluster.url, model_of(public), TEXT, KEY, 0)
    if not public.ranks:
        assert np.array_equal(np.array(numbers, np.float32), native(client, TEXT))
    else:
        assert numbers == native_scores(client)


@every_client
def test_each_client_tells_of_an_unknown_model_and_of_a_bad_key(public: Client, cluster: Cluster) -> None:
    assert (refusal(public, cluster, "test/minj"), refusal(public, cluster, key="wrong")) == (404, 401)


def in_progress(cluster: Cluster) -> float:
    return cluster.gateway_metric("sie_gateway_requests_in_progress")


@contextlib.contextmanager
def occupied(cluster: Cluster) -> Iterator[None]:
    """Take all places of the gateway with uploads that do not end."""
    lines = ("POST /v1/embeddings HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}", "Content-Length: 10")
    head = "\r\n".join([*lines, "", ""])
    with contextlib.ExitStack() as uploads:
        for _ in range(shared.PLACES):
            upload = uploads.enter_context(socket.create_connection(("127.0.0.1", cluster.port)))
            upload.sendall(head.encode())
        until(lambda: in_progress(cluster) >= shared.PLACES, 60, "the uploads in progress")
        yield
    until(lambda: in_progress(cluster) == 0, 60, "the end of the uploads")


TRIES = 20  # about a second each: more than a busy machine takes to count a refusal and to free a place


# each library waits in its own way: the one that most others build on, and an unrelated one
@pytest.mark.parametrize("call", [openai_sync, voyage_embed])
def test_a_client_is_told_of_overload_and_comes_back_by_itself(
    call: Callable[..., Any], cluster: Cluster, client: httpx.Client
) -> None:
    """The client reports 503, or waits and gets its answer."""
    answers: list[Any] = []
    with occupied(cluster):
        assert refusal(Client("", call), cluster) == 503
        before = cluster.gateway_metric(REJECTED, reason="concurrency")
        arguments = cluster.url, MINI, TEXT, KEY, TRIES
        user = threading.Thread(target=lambda: answers.append(call(*arguments)))
        user.start()
        until(lambda: cluster.gateway_metric(REJECTED, reason="concurrency") > before, 60, "a refusal")
    user.join(60)
    assert answers
    assert np.array_equal(np.array(answers[0], np.float32), native(client, TEXT))


# what only some clients offer


@shared.needs("/tokenize")
def test_openai_takes_lists_token_ids_and_a_width(cluster: Cluster, client: httpx.Client) -> None:
    """Order, usage, ids of the model's own tokenizer, dimensions and the models API."""
    import openai

    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, max_retries=0, timeout=60) as api:
        texts = [TEXT, "kernel", QUERY]
        answer = api.embeddings.create(model=MINI, input=texts)
        assert [entry.index for entry in answer.data] == [0, 1, 2]
        for entry, text in zip(answer.data, texts, strict=True):
            assert np.allclose(entry.embedding, native(client, text), atol=1e-6)
        ids = client.post("/tokenize", json={"model": MINI, "inputs": TEXT}).json()[0]
        token_ids = [token["id"] for token in ids]
        own = {"token_encoding": "model"}
        by_ids = api.embeddings.create(model=MINI, input=token_ids, extra_body=own)
        assert np.array_equal(np.array(by_ids.data[0].embedding, np.float32), native(client, TEXT))
        assert by_ids.usage.prompt_tokens == len(token_ids)
        assert len(api.embeddings.create(model=MINI, input=[token_ids, token_ids[1:-1]], extra_body=own).data) == 2
        cut = api.embeddings.create(model="test/m3", input=TEXT, dimensions=16).data[0].embedding
        assert np.array_equal(np.array(cut, np.float32), native(client, TEXT, "test/m3", dimensions=16))
        with pytest.raises(openai.BadRequestError) as raised:
            api.embeddings.create(model=MINI, input=TEXT, dimensions=5)
        assert (raised.value.code, raised.value.param) == ("invalid_input", "dimensions")
        assert {model.id for model in api.models.list()} >= {MINI, CROSS}
        assert api.models.retrieve(MINI).owned_by == "test"


def test_langchain_with_default_settings_gets_the_vectors_of_its_texts(cluster: Cluster, client: httpx.Client) -> None:
    """LangChain sends ids of OpenAI's vocabulary, many of which are also ids of the model's own tokenizer."""
    from langchain_openai import OpenAIEmbeddings

    embedder = OpenAIEmbeddings(model=MINI, base_url=f"{cluster.url}/v1", api_key=KEY, max_retries=0)  # type: ignore[arg-type]
    texts = [f"{start} {rest}" for start in ("The old", "Zürich, 東京 and", "A 😀") for rest in SENTENCES]
    for text, vector in zip(texts, embedder.embed_documents(texts), strict=True):
        assert np.allclose(vector, native(client, text), atol=1e-6)


@shared.needs("/classify")
def test_infinity_lists_models_and_what_each_can_do(cluster: Cluster) -> None:
    """Infinity's client accepts no other owner than `infinity`."""
    from infinity_client.api.default import classify, models
    from infinity_client.models import ClassifyInput

    with infinity(cluster.url, KEY) as client:
        listing = {model.id: model for model in models.sync(client=client).data}
        classes = classify.sync(client=client, body=ClassifyInput([TEXT], "test/classes")).data[0]
    can = {name: listing[name].capabilities for name in (MINI, CROSS, "test/m3", "test/late", "test/classes")}
    assert can == {
        MINI: ["embed"],
        CROSS: ["rerank"],
        "test/m3": ["embed", "rerank"],
        "test/late": ["rerank"],
        "test/classes": ["classify"],
    }
    assert {str(model.owned_by) for model in listing.values()} == {"infinity"}
    assert sum(entry.score for entry in classes) == pytest.approx(1, abs=1e-4)
