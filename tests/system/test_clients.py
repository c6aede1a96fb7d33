"""Unmodified public clients against a running cluster: their results, and how they report errors.

Each client returns the vectors or the scores of the native route bit for bit: it sends one text at a time to an idle
cluster.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import gzip
import json
import math
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


def openai_sync(url: str, model: str, text: str, key: str, retries: int, **more: Any) -> list[float]:
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries, timeout=30) as client:
        answer = client.embeddings.create(model=model, input=text, extra_body=more or None)
    assert (answer.model, answer.object, answer.data[0].index) == (model, "list", 0)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 2
    return answer.data[0].embedding


def openai_async(url: str, model: str, text: str, key: str, retries: int, **more: Any) -> list[float]:
    import openai

    async def run() -> list[float]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries, timeout=30) as client:
            answer = await client.embeddings.create(
                model=model, input=[text], encoding_format="float", extra_body=more or None
            )
        return answer.data[0].embedding

    return asyncio.run(run())


def langchain(url: str, model: str, text: str, key: str, retries: int, **more: Any) -> list[float]:
    from langchain_openai import OpenAIEmbeddings

    embedder = OpenAIEmbeddings(
        model=model,
        base_url=f"{url}/v1",
        api_key=key,
        max_retries=retries,
        check_embedding_ctx_length=False,
        model_kwargs={"extra_body": more} if more else {},
    )
    return embedder.embed_documents([text])[0]


def haystack(url: str, model: str, text: str, key: str, retries: int) -> list[float]:
    from haystack.components.embedders import OpenAITextEmbedder
    from haystack.utils import Secret

    embedder = OpenAITextEmbedder(
        api_key=Secret.from_token(key), model=model, api_base_url=f"{url}/v1", max_retries=retries, timeout=30
    )
    return list(embedder.run(text)["embedding"])


def haystack_documents(url: str, model: str, text: str, key: str, retries: int) -> list[float]:
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder
    from haystack.utils import Secret

    embedder = OpenAIDocumentEmbedder(
        api_key=Secret.from_token(key),
        model=model,
        api_base_url=f"{url}/v1",
        max_retries=retries,
        timeout=30,
        progress_bar=False,
        raise_on_failure=True,
    )
    (document,) = embedder.run([Document(content=text)])["documents"]
    assert document.embedding is not None
    return document.embedding


@contextlib.contextmanager
def cohere_v2(url: str, key: str, retries: int) -> Iterator[Any]:
    import cohere

    with httpx.Client(timeout=30) as http:
        yield cohere.ClientV2(
            key, base_url=url, max_retries=retries, httpx_client=http, log_warning_experimental_features=False
        )


def cohere_embed(url: str, model: str, text: str, key: str, retries: int, **more: Any) -> list[float]:
    with cohere_v2(url, key, retries) as client:
        answer = client.embed(
            model=model, texts=[text], input_type="search_document", embedding_types=["float"], **more
        )
    assert answer.response_type == "embeddings_by_type"
    return list(answer.embeddings.float_[0])


def curl(url: str, model: str, text: str, key: str, retries: int, **more: Any) -> list[float]:
    body = json.dumps({"model": model, "input": text, **more})
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
    assert answer.meta is not None
    assert answer.meta.billed_units is not None
    assert answer.meta.billed_units.search_units == 1
    return [(entry.index, entry.relevance_score) for entry in answer.results]


def cohere_embed_v1(url: str, model: str, text: str, key: str, retries: int, **more: Any) -> list[float]:
    """Embed without types: the reply then has bare vectors, which version 2 does not have."""
    import cohere

    with httpx.Client(timeout=30) as http:
        client = cohere.Client(
            key, base_url=url, max_retries=retries, httpx_client=http, log_warning_experimental_features=False
        )
        answer = client.embed(model=model, texts=[text], **more)
    assert (answer.response_type, answer.texts) == ("embeddings_floats", [text])
    return answer.embeddings[0]


@contextlib.contextmanager
def voyage(url: str, key: str, retries: int) -> Iterator[Any]:
    import voyageai

    try:
        yield voyageai.Client(api_key=key, base_url=f"{url}/v1", max_retries=retries + 1, timeout=30)
    except voyageai.error.VoyageError as error:  # an error that comes before the body is read cannot be printed
        raise Refused(error.http_status, error.http_body) from error


def voyage_embed(url: str, model: str, text: str, key: str, retries: int, **more: Any) -> list[float]:
    with voyage(url, key, retries) as client:
        answer = client.embed([text], model=model, input_type="document", truncation=more.get("truncate") != "NONE")
    assert answer.total_tokens > 2
    return answer.embeddings[0]


def voyage_rerank(url: str, model: str, text: str, key: str, retries: int) -> list[tuple[int, float]]:
    with voyage(url, key, retries) as client:
        answer = client.rerank(QUERY, DOCUMENTS, model=model)
    assert answer.total_tokens > 2
    return [(entry.index, entry.relevance_score) for entry in answer.results]


@contextlib.contextmanager
def told_by_jina() -> Iterator[None]:
    """Raise Refused for the `detail` that Haystack's components for Jina raise."""
    statuses = {"model_not_found": 404, "unauthenticated": 401, "queue_full": 503, "invalid_input": 400}
    try:
        yield
    except RuntimeError as error:
        raise Refused(statuses[error.args[0]["code"].lower()], error.args[0]["message"]) from error


def jina_embed(url: str, model: str, text: str, key: str, retries: int) -> list[float]:
    from haystack.utils import Secret
    from haystack_integrations.components.embedders.jina import JinaTextEmbedder

    embedder = JinaTextEmbedder(
        Secret.from_token(key), model, base_url=f"{url}/v1/embeddings", task="retrieval.passage", dimensions=384
    )
    with told_by_jina():
        return list(embedder.run(text)["embedding"])


def jina_rerank(url: str, model: str, text: str, key: str, retries: int) -> list[tuple[int, float]]:
    from haystack import Document
    from haystack.utils import Secret
    from haystack_integrations.components.rankers.jina import JinaRanker

    ranker = JinaRanker(model, Secret.from_token(key), base_url=f"{url}/v1/rerank")
    documents = [Document(id=str(index), content=text) for index, text in enumerate(DOCUMENTS)]
    with told_by_jina():
        return [(int(document.id), document.score) for document in ranker.run(QUERY, documents)["documents"]]


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


def ollama_embed(url: str, model: str, text: str, key: str, retries: int, **more: Any) -> list[float]:
    name = f"{model}:latest"
    truncate = more.get("truncate") != "NONE"
    answer = ollama_client(url, key).embed(name, [text], truncate=truncate, keep_alive="5m", dimensions=384)
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
    """`call` takes url, model, text, key and retries. `options` forbid that a text is cut; None if the client cannot.

    `comes_back`: whether the client can retry. `needs`: a route that the client calls.
    """

    name: str
    call: Callable[..., Any]
    options: dict[str, Any] | None = None
    gives: str = "vector"
    long: bool = False
    comes_back: bool = True
    needs: str = "/v1/embeddings"


NONE = {"truncate": "NONE"}
_ALL = [
    Client("openai", openai_sync, NONE),
    Client("openai async", openai_async, NONE),
    Client("langchain", langchain, NONE, long=True),
    Client("haystack", haystack, long=True),
    Client("haystack documents", haystack_documents, long=True),
    Client("cohere embed", cohere_embed, NONE, needs="/v2/embed"),
    Client("curl", curl, NONE),
    Client("cohere rerank v2", cohere_rerank_v2, gives="scores"),
    Client("cohere rerank v1", cohere_rerank_v1, gives="scores"),
    Client("llama-index", heavy("llama-index"), long=True),
    Client("litellm", heavy("litellm"), long=True),
    Client("litellm rerank", heavy("litellm-rerank"), gives="scores", long=True, comes_back=False),
    Client("cohere embed v1", cohere_embed_v1, NONE, needs="/v1/embed"),
    Client("langchain cohere", heavy("langchain-cohere"), long=True, needs="/v2/embed"),
    Client("langchain cohere rerank", heavy("langchain-cohere-rerank"), gives="scores", long=True, comes_back=False),
    Client("voyage", voyage_embed, NONE),
    Client("voyage rerank", voyage_rerank, gives="scores"),
    Client("jina", jina_embed, comes_back=False),
    Client("jina rerank", jina_rerank, gives="scores", comes_back=False),
    Client("infinity", infinity_embed, comes_back=False),
    Client("infinity rerank", infinity_rerank, gives="scores", comes_back=False, needs="/rerank"),
    Client("ollama", ollama_embed, NONE, comes_back=False, needs="/api/embed"),
    *(
        Client(f"node {name}", node(name), long=True, comes_back=False, needs="/api/embed")
        for name in ("ollama", "langchain-ollama")
    ),
    *(Client(f"node {name}", node(name), long=True, comes_back=False) for name in ("ai-sdk", "langchain-openai")),
    Client("node togetherai rerank", node("togetherai-rerank"), gives="scores", long=True, comes_back=False),
    *(Client(name, heavy(name), long=True, comes_back=False) for name in ("mistral", "together")),
    *(
        Client(f"{name} rerank", heavy(f"{name}-rerank"), gives="scores", long=True, comes_back=False)
        for name in ("together", "mixedbread")
    ),
    *(
        Client(f"litellm {name}", heavy(f"litellm-{name}"), long=True, comes_back=False)
        for name in ("infinity", "jina")
    ),
    *(
        Client(
            f"litellm {name} rerank",
            heavy(f"litellm-{name}-rerank"),
            gives="scores",
            long=True,
            comes_back=False,
            needs="/rerank" if name == "infinity" else "/v1/rerank",
        )
        for name in ("infinity", "jina", "voyage")
    ),
]
RERANKS = [path for path in ("/v1/rerank", "/v2/rerank", "/rerank") if inference_route(path)]
CLIENTS = [client for client in _ALL if inference_route(client.needs)]
every_client = pytest.mark.parametrize(
    "public", long_but(CLIENTS, [library for library in CLIENTS if not library.long]), ids=lambda library: library.name
)


def model_of(public: Client) -> str:
    return MINI if public.gives == "vector" else CROSS


def refusal(
    public: Client, cluster: Cluster, model: str = "", text: str = TEXT, key: str = KEY, **more: Any
) -> tuple[int, str]:
    """Return the status and the message that the client reports to its user."""
    with pytest.raises(Exception) as raised:  # each client has exceptions of its own
        public.call(cluster.url, model or model_of(public), text, key, 0, **more)
    error: Any = raised.value
    while not hasattr(error, "status_code") and error.__cause__ is not None:
        error = error.__cause__
    assert hasattr(error, "status_code"), repr(raised.value)
    return error.status_code, f"{error} {getattr(error, 'body', '')}"


@every_client
def test_each_client_gets_what_the_native_route_gives(public: Client, cluster: Cluster, client: httpx.Client) -> None:
    """The same text alone has the same bits by every route."""
    numbers = public.call(cluster.url, model_of(public), TEXT, KEY, 0)
    if public.gives == "vector":
        assert np.array_equal(np.array(numbers, np.float32), native(client, TEXT))
    else:
        assert numbers == native_scores(client)


@every_client
def test_each_client_tells_of_an_unknown_model(public: Client, cluster: Cluster) -> None:
    status, words = refusal(public, cluster, "test/minj")
    assert status == 404
    assert "no model named" in words


@every_client
def test_each_client_tells_of_a_bad_key(public: Client, cluster: Cluster) -> None:
    status, words = refusal(public, cluster, key="wrong")
    assert status == 401
    assert "token is not known" in words


@pytest.mark.parametrize("public", [pytest.param(library, id=library.name) for library in CLIENTS if library.options])
def test_a_client_that_wants_nothing_cut_is_told_what_is_too_long(
    public: Client, cluster: Cluster, client: httpx.Client
) -> None:
    status, words = refusal(public, cluster, text=LONG, **(public.options or {}))
    assert status == 400
    assert "602 tokens, the limit is 256" in words
    assert ("texts[0]" if public.name.startswith("cohere embed") else "input[0]") in words
    assert len(public.call(cluster.url, MINI, LONG, KEY, 0)) == 384


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


USUAL = ("openai", "voyage")  # clients of every run that wait and retry
TRIES = 20  # about a second each: more than a busy machine takes to count a refusal and to free a place


# each library waits in its own way: every run has the one that most others build on, and an unrelated one
@pytest.mark.parametrize(
    "public",
    long_but(CLIENTS, [library for library in CLIENTS if library.name in USUAL]),
    ids=lambda library: library.name,
)
def test_each_client_is_told_of_overload_and_comes_back_by_itself(
    public: Client, cluster: Cluster, client: httpx.Client
) -> None:
    """The client reports 503. A client that can retry waits, and gets its answer."""
    answers: list[Any] = []
    with occupied(cluster):
        status, words = refusal(public, cluster)
        assert status == 503
        assert "requests are in progress" in words
        if not public.comes_back:
            return
        before = cluster.gateway_metric(REJECTED, reason="concurrency")
        arguments = cluster.url, model_of(public), TEXT, KEY, TRIES
        user = threading.Thread(target=lambda: answers.append(public.call(*arguments)))
        user.start()
        until(lambda: cluster.gateway_metric(REJECTED, reason="concurrency") > before, 60, "a refusal")
    user.join(60)
    assert answers
    if public.gives == "vector":
        assert np.array_equal(np.array(answers[0], np.float32), native(client, TEXT))


# what only some clients offer


@pytest.mark.long
def test_litellm_ranks_in_the_form_of_nvidia_with_raw_scores(cluster: Cluster, client: httpx.Client) -> None:
    logits = heavy("litellm-nvidia-rerank")(cluster.url, CROSS, TEXT, KEY, 0)
    expected = native_scores(client)
    assert [index for index, _ in logits] == [index for index, _ in expected]
    probabilities = [1 / (1 + math.exp(-logit)) for _, logit in logits]
    assert np.allclose(probabilities, [score for _, score in expected], atol=1e-6)


@shared.needs("/api/embed")
def test_ollama_lists_and_shows_models_and_is_told_that_no_text_is_generated(
    cluster: Cluster, client: httpx.Client
) -> None:
    import ollama

    api = ollama_client(cluster.url, KEY)
    vector = api.embeddings(MINI, TEXT).embedding
    assert np.array_equal(np.array(vector, np.float32), native(client, TEXT, normalize=False))
    names = [model.model for model in api.list().models]
    assert f"{MINI}:latest" in names
    assert CROSS not in " ".join(map(str, names))
    shown = api.show(f"{MINI}:latest")
    assert shown.capabilities == ["embedding"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["text-encoder.context_length"] == 256
    assert f"{MINI}:latest" in [model.model for model in api.ps().models]
    for call in (api.generate, api.pull, lambda model: api.chat(model, [{"role": "user", "content": TEXT}])):
        with pytest.raises(ollama.ResponseError, match="does not generate text") as raised:
            call(MINI)
        assert raised.value.status_code == 404


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
        cut = api.embeddings.create(model="test/m3", input=TEXT, dimensions=16)
        assert np.array_equal(
            np.array(cut.data[0].embedding, np.float32), native(client, TEXT, "test/m3", dimensions=16)
        )
        with pytest.raises(openai.BadRequestError) as raised:
            api.embeddings.create(model=MINI, input=TEXT, dimensions=5)
        assert (raised.value.code, raised.value.param) == ("invalid_input", "dimensions")
        with pytest.raises(openai.NotFoundError) as missing:
            api.embeddings.create(model="test/minj", input=TEXT)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="wrong", max_retries=0).models.list()
        assert {model.id for model in api.models.list()} >= {MINI, CROSS}
        assert api.models.retrieve(MINI).owned_by == "test"


def test_langchain_with_default_settings_gets_the_vectors_of_its_texts(cluster: Cluster, client: httpx.Client) -> None:
    """LangChain sends ids of OpenAI's vocabulary, many of which are also ids of the model's own tokenizer."""
    from langchain_openai import OpenAIEmbeddings

    embedder = OpenAIEmbeddings(model=MINI, base_url=f"{cluster.url}/v1", api_key=KEY, max_retries=0)  # type: ignore[arg-type]
    texts = [f"{start} {rest}" for start in ("The old", "Zürich, 東京 and", "A 😀") for rest in SENTENCES]
    for text, vector in zip(texts, embedder.embed_documents(texts), strict=True):
        assert np.allclose(vector, native(client, text), atol=1e-6)
    assert np.allclose(embedder.embed_query("kernel"), native(client, "kernel"), atol=1e-6)
    assert np.allclose(
        asyncio.run(embedder.aembed_documents([TEXT, QUERY])),
        [native(client, line) for line in (TEXT, QUERY)],
        atol=1e-6,
    )


@shared.needs("/v2/embed")
def test_cohere_gets_every_type_out_of_one_run(cluster: Cluster, client: httpx.Client) -> None:
    """The types come with their scale and offset, and the codes are those of the native route."""
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    with cohere_v2(cluster.url, KEY, 0) as api:
        answer = api.embed(model=MINI, texts=[TEXT, "kernel"], input_type="clustering", embedding_types=types)
    vectors = answer.embeddings
    assert (answer.texts, answer.meta.billed_units.input_tokens) == ([TEXT, "kernel"], 13)
    raw = client.post(
        "/v2/embed", json={"model": MINI, "texts": [TEXT], "input_type": "search_document", "embedding_types": types}
    ).json()
    alone = np.array(native(client, TEXT), np.float32)
    assert np.array_equal(np.frombuffer(base64.b64decode(raw["embeddings"]["base64"][0]), "<f4"), alone)
    for name in ("int8", "uint8", "ubinary"):
        slot = client.post(f"/v1/encode/{MINI}", json={"items": [TEXT], "params": {"output_dtype": name}}).json()[
            "items"
        ][0]["dense"]
        assert raw["embeddings"][name][0] == slot["values"]
        scales = raw.get("embeddings_scale", {}).get(name, {})
        assert {key: values[0] for key, values in scales.items()} == {
            key: slot[key] for key in ("scale", "offset") if key in slot
        }
    assert [value + 128 for value in raw["embeddings"]["binary"][0]] == raw["embeddings"]["ubinary"][0]
    assert (
        len(vectors.int8[1])
        == 8 * len(vectors.binary[1])
        == 8 * len(vectors.ubinary[1])
        == len(vectors.uint8[1])
        == len(vectors.float_[1])
        == 384
    )
    assert len(base64.b64decode(vectors.base64[0])) == 4 * 384


@pytest.mark.parametrize("path", RERANKS)
@pytest.mark.parametrize("model", [CROSS, "test/m3", "test/late", "test/reranker"])
def test_relevance_is_from_0_to_1_in_the_order_of_the_scores(client: httpx.Client, path: str, model: str) -> None:
    """The scale of the model does not matter; raw scores come on demand. Each route has its own default for documents
    in the reply.
    """
    scores = native_scores(client, model)
    body = {"model": model, "query": QUERY, "documents": DOCUMENTS}
    reply = client.post(path, json=body).json()
    assert [entry["index"] for entry in reply["results"]] == [index for index, _ in scores]
    assert all(0 <= entry["relevance_score"] <= 1 for entry in reply["results"])
    assert ("document" in reply["results"][0]) == (path != "/v2/rerank")
    assert [[entry["index"], entry["relevance_score"]] for entry in reply.get("data", [])] == (
        [] if path == "/v2/rerank" else [[entry["index"], entry["relevance_score"]] for entry in reply["results"]]
    )
    raw = client.post(path, json={**body, "raw_scores": True, "top_n": 2, "return_documents": True}).json()
    has_logits = model in (CROSS, "test/reranker")  # the scores of these two are probabilities
    of_scale = (lambda score: math.log(score / (1 - score))) if has_logits else float
    expected = [(index, pytest.approx(of_scale(score), abs=1e-4)) for index, score in scores[:2]]
    assert [(entry["index"], entry["relevance_score"]) for entry in raw["results"]] == expected
    document = DOCUMENTS[scores[0][0]]
    assert raw["results"][0]["document"] == (document if path == "/rerank" else {"text": document})
    assert (reply["object"], reply["model"], reply["meta"]["billed_units"]) == ("rerank", model, {"search_units": 1})
    assert reply["meta"]["tokens"]["input_tokens"] == reply["usage"]["total_tokens"] > 0


@shared.needs("/tokenize")
@pytest.mark.parametrize("model", [CROSS, "test/m3", "test/late", "test/reranker"])
def test_a_document_is_read_up_to_the_tokens_that_it_may_have(client: httpx.Client, model: str) -> None:
    """`max_tokens_per_doc` cuts documents, never the query. The usage names the documents that were cut."""
    words = "river winter kernel music garden river search queue winter"
    ids = client.post("/tokenize", json={"model": model, "inputs": words, "add_special_tokens": False}).json()[0]
    short = words.encode()[: ids[4]["stop"]].decode()

    def ask(documents: list[str], **more: Any) -> Any:
        return client.post("/v2/rerank", json={"model": model, "query": QUERY, "documents": documents, **more}).json()

    cut, alone, whole = ask([words], max_tokens_per_doc=5), ask([short]), ask([words])
    assert cut["results"] == alone["results"] != whole["results"]
    assert (cut["usage"]["truncated_items"], alone["usage"]["truncated_items"]) == ([0], [])
    assert cut["usage"]["total_tokens"] == alone["usage"]["total_tokens"]


def test_fields_of_documents_are_read_in_their_order_one_per_line(client: httpx.Client) -> None:
    """`rank_fields` of Cohere v1 gives the order."""
    documents = [{"title": "river", "body": "kernel", "year": 1999}, {"body": "music", "title": "winter"}]
    body = {
        "model": CROSS,
        "query": QUERY,
        "documents": documents,
        "rank_fields": ["title", "year", "body"],
        "max_chunks_per_doc": 4,
    }
    reply = client.post("/v1/rerank", json=body).json()
    plain = client.post(
        "/v1/rerank", json={"model": CROSS, "query": QUERY, "documents": ["river\n1999\nkernel", "winter\nmusic"]}
    ).json()
    assert reply["results"] == plain["results"]
    assert reply["warnings"][0].startswith("max_chunks_per_doc: ignored")


@pytest.mark.parametrize("path", RERANKS)
def test_an_instruction_is_followed_by_a_model_that_reads_one_else_named(client: httpx.Client, path: str) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "instruction": "Find the river"}

    def ask(model: str, without: str = "", **headers: str) -> httpx.Response:
        return client.post(path, json={"model": model, **body, without: None}, headers=headers)

    assert ask(CROSS).json()["warnings"] == [f"instruction: ignored, no such option of {CROSS} on this route"]
    assert ask(CROSS).json()["results"] == ask(CROSS, without="instruction").json()["results"]
    strict = ask(CROSS, **{"X-SIE-Strict": "true"})
    assert (strict.status_code, strict.json()["error"]["param"]) == (400, "instruction")
    assert "warnings" not in ask("test/reranker").json()
    assert ask("test/reranker").json()["results"] != ask("test/reranker", without="instruction").json()["results"]


@shared.needs("/classify")
@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_infinity_gets_all_classes_of_each_text(client: httpx.Client, path: str) -> None:
    """The classes are those of TEI's route in Infinity's shape, with logits on demand. The only classifier need not be
    named.
    """
    texts = [TEXT, "kernel"]
    reply = client.post(path, json={"model": "test/classes", "input": texts}).json()
    alone = [client.post("/tei/test/classes/predict", json={"inputs": text}).json() for text in texts]
    for classes, expected in zip(reply["data"], alone, strict=True):
        assert [entry["label"] for entry in classes] == [entry["label"] for entry in expected]
        assert [entry["score"] for entry in classes] == pytest.approx([entry["score"] for entry in expected], abs=1e-6)
    assert (reply["object"], reply["model"], reply["id"].partition("-")[0]) == ("classify", "test/classes", "classify")
    assert reply["usage"]["total_tokens"] > 2 * len(texts)
    raw = client.post(path, json={"input": texts[0], "raw_scores": True}).json()["data"][0]
    assert np.log(reply["data"][0][0]["score"] / reply["data"][0][1]["score"]) == pytest.approx(
        raw[0]["score"] - raw[1]["score"], abs=1e-4
    )


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
    assert {(model.backend, str(model.owned_by), *model.stats.additional_properties) for model in listing.values()} == {
        ("torch", "infinity", "queue_absolute"),
        ("openvino", "infinity", "queue_absolute"),  # models that are loaded, on a CPU
    }
    assert sum(entry.score for entry in classes) == pytest.approx(1, abs=1e-4)


def test_jina_and_voyage_name_the_type_of_a_vector(cluster: Cluster, client: httpx.Client) -> None:
    """The codes are those of the native route. Voyage's client decodes their base64 by itself."""
    native_slots = {
        name: (
            client.post(f"/v1/encode/{MINI}", json={"items": [TEXT], "params": {"output_dtype": name}}).json()["items"][
                0
            ]["dense"]
        )
        for name in ("int8", "uint8", "ubinary")
    }
    body = {"model": MINI, "input": [{"text": TEXT}]}  # an object, as Jina has it
    for name, slot in native_slots.items():
        for field in ("embedding_type", "output_dtype"):
            entry = client.post("/v1/embeddings", json={**body, field: name}).json()["data"][0]
            assert entry["embedding"] == slot["values"]
            assert {key: entry[key] for key in ("scale", "offset") if key in entry} == {
                key: slot[key] for key in ("scale", "offset") if key in slot
            }
    as_base64 = client.post("/v1/embeddings", json={**body, "embedding_type": ["base64"]}).json()["data"][0][
        "embedding"
    ]
    assert np.array_equal(np.frombuffer(base64.b64decode(as_base64), "<f4"), np.array(native(client, TEXT), np.float32))
    mixed = client.post("/v1/embeddings", json={"model": MINI, "input": [TEXT, {"text": TEXT}]}).json()["data"]
    assert mixed[0]["embedding"] == pytest.approx(mixed[1]["embedding"], abs=1e-6)
    refused = client.post(
        "/v1/embeddings", json={**body, "output_dtype": "int8"}, headers={"accept": "application/octet-stream"}
    )
    assert refused.json()["error"]["reason"] == "unsupported_dtype"
    with voyage(cluster.url, KEY, 0) as api:
        codes = api.embed([TEXT], model=MINI, output_dtype="ubinary").embeddings[0]
        assert list(codes) == native_slots["ubinary"]["values"]
        assert len(api.embed([TEXT], model="test/m3", output_dimension=16).embeddings[0]) == 16
        query = api.embed([TEXT], model=MINI, input_type="query").embeddings[0]
    assert np.array_equal(np.array(query, np.float32), native(client, TEXT, is_query=True))


def test_errors_have_the_envelope_before_a_route_is_even_reached(cluster: Cluster) -> None:
    """Without a key, the OpenAI route answers with the lower-case code, Cohere's routes with the upper-case one."""
    for path, code in (("/v1/embeddings", "unauthenticated"), *((path, "UNAUTHENTICATED") for path in RERANKS)):
        answer = httpx.post(f"{cluster.url}{path}", json={}, trust_env=False, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"], answer.json()["code"]) == (
            401,
            code,
            "UNAUTHENTICATED",
        )
        assert answer.headers["www-authenticate"] == "Bearer"
