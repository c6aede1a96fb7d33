"""Table of all routes of a gateway, with one row for each method and path. Scopes, dispatch, labels in metrics and the
OpenAPI document are derived from the table. A path that is not in the table is not served.

To add a route, see "Where to add what" in ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from sie_contracts.api import dialects as api
from sie_contracts.api import inference as native_api
from sie_contracts.api import models as models_api
from sie_contracts.api import ollama as ollama_api
from sie_contracts.api import operations as operations_api
from sie_contracts.api import tei as tei_api
from sie_contracts.wire.configs import config_shape
from sie_gateway import plugin
from sie_gateway.dialects import (
    cohere,
    contextual,
    infinity,
    native,
    ollama,
    openai,
    rerank,
    tei,
    transcriptions,
)
from sie_gateway.fleet import assignments
from sie_gateway.http.route_kinds import HEADERS, PLACEHOLDERS, GatewayRoute, control
from sie_gateway.inference.call import ErrorShape, family
from sie_gateway.inference.handler import Handler, InferenceRoute
from sie_gateway.operations import configs, dead_letter_routes, handlers, overview, pools, whoami
from sie_gateway.operations import ollama as ollama_models
from sie_gateway.operations.status import CLUSTER_PATH, WORKER_PATH
from sie_runtime.http import config_routes, openapi
from sie_runtime.http.routes import ARROW, FORM, HTML, JSON, OPEN, RAW, TEXT, Content, Parameter, Route, Table

NATIVE = (
    native.route("encode", native.encode, "Vectors of inputs", native_api.Encode, native_api.Encoded, RAW, ARROW),
    native.route("score", native.score, "Scores of inputs against a query", native_api.Score, native_api.Scored),
    native.route("extract", native.extract, "Entities or classes in inputs", native_api.Extract, native_api.Extracted),
)


def _dialect(
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


_RERANK = "Cohere, Jina"
_RANKS = Content(list[tei_api.TeiRank], example=[{"index": 0, "score": 0.98}])
_EMBED = ("Cohere", "Vectors of texts, in several dtypes at once")
_CLASSES = ("Infinity", "Classes of texts")
_EMBEDDINGS = _dialect(
    "/v1/embeddings",
    "embeddings",
    openai.embeddings,
    ("OpenAI, Jina, Voyage", "Vectors of texts or token ids"),
    api.EmbeddingsBody,
    Content(api.EmbeddingsReply, (JSON, RAW, ARROW)),
    family("openai"),
)
_CLASSIFY = _dialect(
    "/v1/classify", "classify", infinity.classify, _CLASSES, api.Classify, api.Classified, family("infinity")
)
DIALECTS = (
    _EMBEDDINGS,
    replace(_EMBEDDINGS, path="/embeddings", summary="As /v1/embeddings"),
    _dialect(
        "/v1/multi-vector",
        "embed",
        openai.multi_vector,
        ("OpenAI, Jina, Voyage", "Vectors of the tokens of texts"),
        api.MultiVectorBody,
        api.MultiVectors,
        family("jina"),
    ),
    _dialect(
        "/pooling",
        "embed",
        openai.pooling,
        ("vLLM", "Vectors of texts or of their tokens"),
        api.PoolingBody,
        api.Pooled,
        family("openai"),
    ),
    *(
        _dialect(
            path,
            "rerank",
            rerank.pair_scores,
            ("vLLM", "Scores of documents against a query, in their order"),
            api.PairScores,
            api.PairScored,
            family("openai"),
        )
        for path in ("/v1/score", "/score")
    ),
    *(
        _dialect(
            path,
            "rerank",
            rerank.reranking,
            (_RERANK, "As /v1/rerank; as /v1/ranking with `passages`; with `input` in the format of Mixedbread"),
            Content((api.Rerank, api.Ranking, api.MixedbreadRerank), example=api.MixedbreadRerank.EXAMPLE),
            (api.Ranked, api.Rankings, api.MixedbreadRanked),
            family("jina"),
        )
        for path in ("/v1/reranking", "/reranking")
    ),
    _dialect(
        "/v1/contextualizedembeddings",
        "embed",
        contextual.embeddings,
        ("Voyage", "Vectors of chunks, encoded within their whole documents"),
        api.ContextualizedRequest,
        api.ContextualizedReply,
        family("voyage"),
    ),
    *(
        _dialect(
            path,
            "rerank",
            handler,
            (_RERANK, "Documents, ranked by relevance to a query"),
            api.Rerank,
            api.Ranked,
            family(name),
        )
        for path, handler, name in (("/v1/rerank", rerank.v1, "jina"), ("/v2/rerank", rerank.v2, "cohere"))
    ),
    _dialect(
        "/rerank",
        "rerank",
        rerank.either,
        (
            _RERANK,
            "Documents, ranked by relevance to a query; with `texts`, the reply is as in Text Embeddings Inference",
        ),
        Content((api.Rerank, tei_api.TeiRerank), example=tei_api.TeiRerank.EXAMPLE),
        (api.Ranked, list[tei_api.TeiRank]),
        family("infinity"),
        shapes=(tei.shape,),
    ),
    _dialect(
        "/v1/ranking",
        "rerank",
        rerank.ranking,
        ("NVIDIA", "Raw scores of passages, the best first"),
        api.Ranking,
        api.Rankings,
        family("openai"),
    ),
    _dialect("/v1/embed", "embed", cohere.v1, _EMBED, api.EmbedV1Body, api.Embedded, family("cohere")),
    _dialect("/v2/embed", "embed", cohere.v2, _EMBED, api.EmbedV2Body, api.Embedded, family("cohere")),
    _CLASSIFY,
    replace(_CLASSIFY, path="/classify"),
    *(
        _dialect(
            f"/v1/audio/{name}",
            "transcribe",
            handler,
            ("OpenAI", summary),
            Content(form, (FORM,)),
            Content(api.Transcription, (JSON, TEXT, transcriptions.VTT)),
            family("openai"),
        )
        for name, handler, summary, form in (
            ("transcriptions", transcriptions.transcriptions, "What is said in a recording", api.TranscriptionForm),
            (
                "translations",
                transcriptions.translations,
                "What is said in a recording, translated into English",
                api.TranslationForm,
            ),
        )
    ),
)


OLLAMA = (
    _dialect(
        ollama.PREFIX + "embed",
        "embed",
        ollama.embed,
        ("Ollama", "Vectors of texts"),
        ollama_api.OllamaEmbed,
        ollama_api.OllamaEmbedded,
        ollama.shape,
    ),
    _dialect(
        ollama.PREFIX + "embeddings",
        "embeddings",
        ollama.embeddings,
        ("Ollama", "The vector of one text"),
        ollama_api.OllamaPrompt,
        ollama_api.OllamaEmbedding,
        ollama.shape,
    ),
    _dialect(
        ollama.PREFIX + "rerank",
        "rerank",
        rerank.of_ollama,
        ("Ollama", "Documents, ranked by relevance to a query"),
        Content((ollama_api.OllamaRerank, api.Rerank)),
        api.Ranked,
        ollama.shape,
    ),
)


_MAIN = (
    "main_task",
    tei.main_task,
    "Result of the model's main operation, or the similarities of sentences",
    Content((tei_api.TeiEmbed, tei_api.TeiPredict, tei_api.TeiSimilarity, tei_api.TeiRerank)),
    Content(list[Any], example=[[0.02, -0.07]]),
)
_Tei = tuple[str, Handler, str, Any, Any]
_EITHER_TEI: tuple[_Tei, ...] = (
    ("embed", tei.embed, "Dense vectors of texts", tei_api.TeiEmbed, Content(api.Embeddings, example=[[0.02, -0.07]])),
    (
        "embed_all",
        tei.embed_all,
        "The hidden state of every token",
        tei_api.TeiEmbedAll,
        Content(api.TokenEmbeddings, example=[[[0.1, 0.2], [0.3, 0.4]]]),
    ),
    (
        "embed_sparse",
        tei.embed_sparse,
        "Sparse vectors of texts",
        tei_api.TeiEmbedAll,
        Content(list[list[tei_api.TeiWeight]], example=[[{"index": 7592, "value": 1.2}]]),
    ),
    (
        "predict",
        tei.predict,
        "Classes of texts or pairs",
        tei_api.TeiPredict,
        Content((list[api.Label], list[list[api.Label]]), example=api.CLASSES),
    ),
    (
        "similarity",
        tei.similarity,
        "Cosine similarity of one sentence with others",
        tei_api.TeiSimilarity,
        Content(list[float], example=[0.83]),
    ),
    (
        "tokenize",
        tei.tokenize,
        "Tokens of texts",
        Content((tei_api.TeiTokenize, tei_api.TokenizedPrompt)),
        Content(
            (list[list[tei_api.TeiToken]], tei_api.TokenizedText),
            example=[[{"id": 7592, "text": "hello", "special": False, "start": 0, "stop": 5}]],
        ),
    ),
    ("decode", tei.decode, "Texts from token ids", tei_api.TeiDecode, Content(list[str], example=["hello"])),
)
_NAMED_TEI: tuple[_Tei, ...] = (
    *_EITHER_TEI,
    ("rerank", tei.rerank, "Texts, ranked by relevance to a query", tei_api.TeiRerank, _RANKS),
)


def _tei(path: str, row: _Tei) -> InferenceRoute:
    endpoint, handler, summary, body, reply = row
    return _dialect(path, endpoint, handler, ("Text Embeddings Inference", summary), body, reply, tei.shape)


TEI = (
    _tei("/", _MAIN),
    *(_tei(f"/{row[0]}", row) for row in _EITHER_TEI),
    *(_tei(f"/tei/{{model:path}}/{row[0]}", row) for row in _NAMED_TEI),
    *(_tei(f"/tei/{{model:path}}{end}", _MAIN) for end in ("", "/invocations")),
    *(
        replace(_EMBEDDINGS, path=f"/tei/{{model:path}}{end}", summary="As /v1/embeddings, of this model")
        for end in ("/v1/embeddings", "/embeddings")
    ),
    *(
        _tei(
            f"/tei/{{model:path}}/{name}",
            ("health", tei.health, "Whether the model is known", None, Content(dict[str, Any], example={})),
        )
        for name in ("health", "ping")
    ),
    _tei("/info", ("info", tei.info, "The server and the default model", None, tei_api.TeiInfo)),
    _tei("/tei/{model:path}/info", ("info", tei.info, "The server and this model", None, tei_api.TeiInfo)),
)


_FLAG = Literal["true", "false"]
_MODEL_QUERY = (
    Parameter("task", "query", Literal["encode", "score", "extract"], "Only models that support this operation."),
    Parameter(
        "output", "query", Literal["dense", "sparse", "multivector", "score", "json"], "Only models with this output."
    ),
    Parameter("loaded", "query", _FLAG, "Only models that a worker has loaded."),
    Parameter("variants", "query", _FLAG, "Whether the reply also lists profiles, as `model:profile`."),
    Parameter(
        "filter",
        "query",
        str,
        "Only models with each of these words in their name, description, licence, tasks, inputs or outputs.",
    ),
    Parameter(
        "limit",
        "query",
        Annotated[int, Meta(ge=1, le=1000)],
        "Maximum number of models in the reply; `total` counts all that match.",
    ),
)
_MODELS = control(
    "GET",
    "/v1/models",
    "models",
    handlers.models,
    ("SIE", "The catalogue"),
    models_api.Models,
    parameters=_MODEL_QUERY,
)
_MODEL = control("GET", "/v1/models/{model:path}", "models", handlers.model, ("SIE", "One model"), models_api.ModelInfo)
_WORKER = Parameter("worker", "query", str, "The id of the worker, as in its heartbeats.", "w0", required=True)
CONTROL: tuple[GatewayRoute, ...] = (
    _MODELS,
    _MODEL,
    replace(_MODELS, path="/models", summary="As /v1/models", handler=handlers.models_of_infinity),
    replace(_MODEL, path="/models/{model:path}", summary="As /v1/models/{model}"),
    control("GET", "/v1/pools", "pools", pools.pools, ("Pools", "All pools"), operations_api.Pools),
    control(
        "POST",
        "/v1/pools",
        "pools",
        pools.create,
        ("Pools", "Reserve workers, or change or renew a reservation of the caller"),
        operations_api.Pool,
        scope="pools",
        status=201,
        body=operations_api.PoolRequest,
        body_bytes=pools.MAX_BODY_BYTES,
    ),
    control(
        "GET",
        assignments.PATH,
        "pools",
        pools.assignment,
        ("Pools", "The pool that a worker is to serve"),
        operations_api.Assignment,
        parameters=(_WORKER,),
        reader=True,
    ),
    control("GET", "/v1/pools/{name}", "pools", pools.pool, ("Pools", "One pool"), operations_api.Pool),
    control(
        "DELETE",
        "/v1/pools/{name}",
        "pools",
        pools.delete,
        ("Pools", "End a reservation"),
        operations_api.PoolDeleted,
        scope="pools",
    ),
    control(
        "POST",
        "/v1/pools/{name}/renew",
        "pools",
        pools.renew,
        ("Pools", "Renew the lease of a reservation"),
        operations_api.PoolRenewed,
        scope="pools",
    ),
)
CATALOGUE = tuple(
    GatewayRoute(**vars(route), shape=config_shape) for route in config_routes.bound(configs.HANDLERS, "configs")
)


def _operated(path: str, summary: str, media: str, handler: Any = None, **more: Any) -> GatewayRoute:
    """Build a GET route for metrics, the OpenAPI document, the page that shows this document, or a file of the page."""
    reply = Content(dict[str, Any], (media,))
    return control("GET", path, "other", handler, ("Operations", summary), reply, **more)


def _probe(path: str, summary: str, ready: tuple[str, ...], refused: dict[int, Content]) -> GatewayRoute:
    return GatewayRoute(
        method="GET",
        path=path,
        scope=OPEN,
        summary=summary,
        tag="Operations",
        replies={200: Content(operations_api.Readiness, ready), **refused},
        errors=None,
    )


def _socket(path: str, summary: str) -> GatewayRoute:
    frames = Content(media=(), description="A websocket: frames of JSON, from the server to the client")
    return control("GET", path, "ws", None, ("Operations", summary), frames, status=101)


OPERATIONS = (
    *(_probe(path, "Whether the process is alive", (TEXT,), {}) for path in ("/healthz", "/livez", "/ping")),
    _probe(
        "/readyz",
        "Whether the process is ready: 503 with the reason if not; JSON if `Accept` allows it",
        (TEXT, JSON),
        {
            503: Content(
                operations_api.Readiness,
                (TEXT, JSON),
                "Not ready",
                {"status": "not ready", "reason": "starting", "healthy_workers": 0},
            )
        },
    ),
    control(
        "GET",
        "/health",
        "health",
        handlers.health,
        ("Operations", "The catalogue in use, and the workers"),
        operations_api.Health,
    ),
    control(
        "GET",
        "/v1/scaling/{lane}",
        "scaling",
        handlers.scaling,
        ("Operations", "The load of a lane, and the number of workers that it needs"),
        operations_api.LaneFigures,
    ),
    _operated(
        "/metrics",
        "The metrics for Prometheus, if SIE_GATEWAY_API_METRICS is on",
        TEXT,
        handlers.metrics,
        scope="metrics",
    ),
    _operated("/docs", "The OpenAPI document as a web page", HTML),
    _operated("/docs/static/{file}", "Scripts and styles of the page `/docs`", "*/*"),
    _operated("/openapi.json", "The OpenAPI document", JSON),
    _socket(CLUSTER_PATH, "The status of workers and models, every second"),
    _socket(WORKER_PATH, "The status of a worker of this gateway, every 200 ms"),
)

_CORE: tuple[GatewayRoute, ...] = (
    *NATIVE,
    *DIALECTS,
    *OLLAMA,
    *TEI,
    *CONTROL,
    *ollama_models.MODELS,
    *handlers.RESIDENCY,
    *CATALOGUE,
    *configs.CONFIG_FORWARD,
    *overview.OVERVIEW,
    *dead_letter_routes.DEAD_LETTERS,
    *whoami.WHOAMI,
    *OPERATIONS,
)
PLUGINS = plugin.load(_CORE)
ROUTES: tuple[GatewayRoute, ...] = (*_CORE, *PLUGINS.routes)
TABLE = Table(ROUTES)


def inference_route(path: str) -> InferenceRoute | None:
    """Return the inference route that answers POST of this path; None if the path runs no inference."""
    route = TABLE.match(path).route("POST")
    return route if isinstance(route, InferenceRoute) else None


PROBES = frozenset(route.path for route in ROUTES if route.scope == OPEN and route.handler is None)


def _errors(route: Route) -> openapi.Statuses:
    assert isinstance(route, GatewayRoute)
    return openapi.statuses(route.shape, *route.shapes)


def openapi_document(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI document of a gateway. `about`: top-level members such as `openapi` and `info`."""
    return openapi.document(ROUTES, PLACEHOLDERS, _errors, about=about)
