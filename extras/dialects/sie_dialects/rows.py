"""Rows of the routes in the API formats of other servers, as a plug-in of the gateway."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sie_contracts.api import dialects as shared_api
from sie_contracts.errors import FAMILIES
from sie_dialects import cohere, contextual, infinity, ollama, ollama_models, tei, transcriptions
from sie_dialects.api import cohere as cohere_api
from sie_dialects.api import contextual as contextual_api
from sie_dialects.api import infinity as infinity_api
from sie_dialects.api import ollama as ollama_api
from sie_dialects.api import tei as tei_api
from sie_dialects.api import transcriptions as sounds_api
from sie_gateway.dialects.rows import EMBEDDINGS, RERANK, dialect
from sie_gateway.inference.handler import Handler, InferenceRoute
from sie_gateway.operations import handlers
from sie_gateway.plugin import Plugin
from sie_runtime.http.routes import FORM, JSON, TEXT, Content

_RANKS = Content(list[tei_api.TeiRank], example=[{"index": 0, "score": 0.98}])
_EMBED = ("Cohere", "Vectors of texts, in several dtypes at once")
_CLASSES = ("Infinity", "Classes of texts")
_CLASSIFY = dialect(
    "/v1/classify",
    "classify",
    infinity.classify,
    _CLASSES,
    infinity_api.Classify,
    infinity_api.Classified,
    infinity.shape,
)
DIALECTS = (
    dialect(
        "/v1/contextualizedembeddings",
        "embed",
        contextual.embeddings,
        ("Voyage", "Vectors of chunks, encoded within their whole documents"),
        contextual_api.ContextualizedRequest,
        contextual_api.ContextualizedReply,
        FAMILIES["voyage"],
    ),
    dialect(
        "/rerank",
        "rerank",
        infinity.rerank,
        (
            RERANK,
            "Documents, ranked by relevance to a query; with `texts`, the reply is as in Text Embeddings Inference",
        ),
        Content((shared_api.Rerank, tei_api.TeiRerank), example=tei_api.TeiRerank.EXAMPLE),
        (shared_api.Ranked, list[tei_api.TeiRank]),
        infinity.shape,
        shapes=(tei.shape,),
    ),
    dialect("/v1/embed", "embed", cohere.v1, _EMBED, cohere_api.EmbedV1Body, cohere_api.Embedded, FAMILIES["cohere"]),
    dialect("/v2/embed", "embed", cohere.v2, _EMBED, cohere_api.EmbedV2Body, cohere_api.Embedded, FAMILIES["cohere"]),
    _CLASSIFY,
    replace(_CLASSIFY, path="/classify"),
    *(
        dialect(
            f"/v1/audio/{name}",
            "transcribe",
            handler,
            ("OpenAI", summary),
            Content(form, (FORM,)),
            Content(sounds_api.Transcription, (JSON, TEXT, transcriptions.VTT)),
            FAMILIES["openai"],
        )
        for name, handler, summary, form in (
            (
                "transcriptions",
                transcriptions.transcriptions,
                "What is said in a recording",
                sounds_api.TranscriptionForm,
            ),
            (
                "translations",
                transcriptions.translations,
                "What is said in a recording, translated into English",
                sounds_api.TranslationForm,
            ),
        )
    ),
)


OLLAMA = (
    dialect(
        ollama.PREFIX + "embed",
        "embed",
        ollama.embed,
        ("Ollama", "Vectors of texts"),
        ollama_api.OllamaEmbed,
        ollama_api.OllamaEmbedded,
        ollama.shape,
    ),
    dialect(
        ollama.PREFIX + "embeddings",
        "embeddings",
        ollama.embeddings,
        ("Ollama", "The vector of one text"),
        ollama_api.OllamaPrompt,
        ollama_api.OllamaEmbedding,
        ollama.shape,
    ),
    dialect(
        ollama.PREFIX + "rerank",
        "rerank",
        ollama.rerank,
        ("Ollama", "Documents, ranked by relevance to a query"),
        Content((ollama_api.OllamaRerank, shared_api.Rerank)),
        shared_api.Ranked,
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
    (
        "embed",
        tei.embed,
        "Dense vectors of texts",
        tei_api.TeiEmbed,
        Content(shared_api.Embeddings, example=[[0.02, -0.07]]),
    ),
    (
        "embed_all",
        tei.embed_all,
        "The hidden state of every token",
        tei_api.TeiEmbedAll,
        Content(tei_api.TokenEmbeddings, example=[[[0.1, 0.2], [0.3, 0.4]]]),
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
        Content((list[infinity_api.Label], list[list[infinity_api.Label]]), example=infinity_api.CLASSES),
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
    return dialect(path, endpoint, handler, ("Text Embeddings Inference", summary), body, reply, tei.shape)


TEI = (
    _tei("/", _MAIN),
    *(_tei(f"/{row[0]}", row) for row in _EITHER_TEI),
    *(_tei(f"/tei/{{model:path}}/{row[0]}", row) for row in _NAMED_TEI),
    *(_tei(f"/tei/{{model:path}}{end}", _MAIN) for end in ("", "/invocations")),
    *(
        replace(EMBEDDINGS, path=f"/tei/{{model:path}}{end}", summary="As /v1/embeddings, of this model")
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


_MODELS, _MODEL = handlers.MODELS
MODELS = (
    replace(_MODELS, path="/models", summary="As /v1/models", handler=infinity.models),
    replace(_MODEL, path="/models/{model:path}", summary="As /v1/models/{model}"),
    *ollama_models.MODELS,
)
PLUGIN = Plugin(
    routes=(*DIALECTS, *OLLAMA, *TEI, *MODELS),
    shapes=((ollama.PREFIX, ollama.shape),),
    unserved=(ollama.GENERATION,),
)
