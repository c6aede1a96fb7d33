"""Rows of the routes in the native format and in the API formats of the core."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sie_contracts.api import dialects as api
from sie_contracts.api import inference as native_api
from sie_contracts.errors import FAMILIES
from sie_gateway.dialects import native, openai, rerank
from sie_gateway.http.route_kinds import HEADERS
from sie_gateway.inference.call import ErrorShape
from sie_gateway.inference.handler import Handler, InferenceRoute
from sie_runtime.http.routes import ARROW, JSON, RAW, Content

NATIVE = (
    native.route("encode", native.encode, "Vectors of inputs", native_api.Encode, native_api.Encoded, RAW, ARROW),
    native.route("score", native.score, "Scores of inputs against a query", native_api.Score, native_api.Scored),
    native.route("extract", native.extract, "Entities or classes in inputs", native_api.Extract, native_api.Extracted),
)


def dialect(
    path: str,
    endpoint: str,
    handler: Handler,
    names: tuple[str, str],
    body: Any,
    reply: Any,
    shape: ErrorShape,
    **more: Any,
) -> InferenceRoute:
    """Build a route in the API format of another server, such as Cohere. `names`: (tag, summary)."""
    return InferenceRoute(
        method="GET" if body is None else "POST",
        path=path,
        scope="infer",
        summary=names[1],
        tag=names[0],
        endpoint=endpoint,
        handler=handler,
        body=None if body is None else body if isinstance(body, Content) else Content(body),
        replies={200: reply if isinstance(reply, Content) else Content(reply)},
        parameters=HEADERS,
        shape=shape,
        **more,
    )


RERANK = "Cohere, Jina"
EMBEDDINGS = dialect(
    "/v1/embeddings",
    "embeddings",
    openai.embeddings,
    ("OpenAI, Jina, Voyage", "Vectors of texts or token ids"),
    api.EmbeddingsBody,
    Content(api.EmbeddingsReply, (JSON, RAW, ARROW)),
    FAMILIES["openai"],
)
DIALECTS = (
    EMBEDDINGS,
    replace(EMBEDDINGS, path="/embeddings", summary="As /v1/embeddings"),
    dialect(
        "/v1/multi-vector",
        "embed",
        openai.multi_vector,
        ("OpenAI, Jina, Voyage", "Vectors of the tokens of texts"),
        api.MultiVectorBody,
        api.MultiVectors,
        FAMILIES["jina"],
    ),
    dialect(
        "/pooling",
        "embed",
        openai.pooling,
        ("vLLM", "Vectors of texts or of their tokens"),
        api.PoolingBody,
        api.Pooled,
        FAMILIES["openai"],
    ),
    *(
        dialect(
            path,
            "rerank",
            rerank.pair_scores,
            ("vLLM", "Scores of documents against a query, in their order"),
            api.PairScores,
            api.PairScored,
            FAMILIES["openai"],
        )
        for path in ("/v1/score", "/score")
    ),
    *(
        dialect(
            path,
            "rerank",
            rerank.reranking,
            (RERANK, "As /v1/rerank; as /v1/ranking with `passages`; with `input` in the format of Mixedbread"),
            Content((api.Rerank, api.Ranking, api.MixedbreadRerank), example=api.MixedbreadRerank.EXAMPLE),
            (api.Ranked, api.Rankings, api.MixedbreadRanked),
            FAMILIES["jina"],
        )
        for path in ("/v1/reranking", "/reranking")
    ),
    *(
        dialect(
            path,
            "rerank",
            handler,
            (RERANK, "Documents, ranked by relevance to a query"),
            api.Rerank,
            api.Ranked,
            FAMILIES[name],
        )
        for path, handler, name in (("/v1/rerank", rerank.v1, "jina"), ("/v2/rerank", rerank.v2, "cohere"))
    ),
    dialect(
        "/v1/ranking",
        "rerank",
        rerank.ranking,
        ("NVIDIA", "Raw scores of passages, the best first"),
        api.Ranking,
        api.Rankings,
        FAMILIES["openai"],
    ),
)
