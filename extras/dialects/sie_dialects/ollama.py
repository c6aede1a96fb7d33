"""`POST /api/embed` and `POST /api/embeddings` in the format of Ollama. Inputs are texts.

The client sends a model's name in SIE, with or without Ollama's tag `latest`. Workers manage their memory themselves,
so `keep_alive` has no effect. Of `options`, only `num_ctx` is used.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from typing import Any

import orjson

from sie_contracts.errors import CODE, RAW, ErrorFormat, Member
from sie_contracts.models.catalogue import Catalogue, Resolved
from sie_contracts.models.option_values import bad
from sie_gateway.dialects import fields
from sie_gateway.dialects import rerank as reranks
from sie_gateway.dialects.dialect import DialectHandler, ParsedRequest, RequestView
from sie_gateway.inference import reply
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import Call, EncodedReply
from sie_gateway.inference.results import InferRequest, RequestResult

PREFIX = "/api/"
TAG = ":latest"
NS_PER_MS = 1_000_000
shape = ErrorFormat(
    "ollama", (Member("error", "message", "Ollama, whose clients print it"), RAW._replace(name="detail"), CODE)
)
# paths that clients of Ollama try, and that no gateway serves, with the error message
GENERATION = (
    re.compile(r"/api/(generate|chat|blobs|pull|push|create|copy|delete)(/|$)"),
    "this server does not generate text, and `sie models add` adds its models; it has these routes of Ollama:"
    " /api/embed, /api/embeddings, /api/tags, /api/show, /api/ps and /api/version",
)


def untagged(catalogue: Catalogue, name: str) -> str:
    """Return the name without the tag `latest`. If the model has a profile `latest`, return the whole name."""
    bare = name.removesuffix(TAG)
    entry = catalogue.find(bare) if bare != name else None
    return name if entry is not None and TAG[1:] in entry.profiles else bare


def tagged(name: str, resolved: Resolved, profile: str | None) -> str:
    """Return the name with the tag that Ollama shows. The tag is the name of the profile. For the default profile, and
    for an alias (`profile` is None), the tag is `latest`. If the model has a profile `latest`, the default profile gets
    no tag.
    """
    if profile not in (None, "default"):
        return f"{name}:{profile}"
    return name if profile and TAG[1:] in resolved.entry.profiles else name + TAG


async def _embed(view: RequestView, body: fields.Body) -> ParsedRequest | EncodedReply:
    """Read a body of `POST /api/embed`. The reply has a normalised vector for each input. The reply to an empty input
    has no vectors and no error, because clients send an empty input to test whether the model exists.
    """
    name = str(body.get("model") or view.resolved.requested)
    value = body.get("input")
    if value in (None, "", []):
        return _json({"model": name, "embeddings": []})
    items = fields.items([value] if isinstance(value, str) else value, "input", view.limit)
    parameters: dict[str, Any] = {
        "truncate": "END" if fields.flag(body, "truncate", default=True) else "NONE",
        "normalize": True,
    }
    if width := fields.whole(body, "dimensions", 0):
        parameters["dimensions"] = width
    return _parsed(view, body, "input", items, parameters, functools.partial(_embedded, name))


def _embedded(name: str, call: Call, finished: RequestResult) -> EncodedReply:
    began_s = time.perf_counter()
    content = {
        "embeddings": finished.arrays("input", "dense"),
        **finished.shared(explain=call.explains),
        "model": name,
        "prompt_eval_count": finished.usage["total_tokens"],
        "load_duration": _nanoseconds(finished.last.stages.load_ms if finished.last else 0.0),
    }
    prepared_s = time.perf_counter() - began_s

    def durations(spent_s: float) -> dict[str, Any]:
        timing = finished.late(call.received_s, prepared_s, spent_s)
        return {"total_duration": _nanoseconds(timing["timing"]["total_time"]), **timing}

    data, content_type = reply.body_of(content, finished.values, durations, msgpack=False, name="embeddings")
    if call.explains and not isinstance(data, bytes):  # the headers leave before the body is written
        durations(0.0)
    return EncodedReply(data, content_type, finished.headers(call.received_s, timed=call.explains))


async def _embeddings(view: RequestView, body: fields.Body) -> ParsedRequest | EncodedReply:
    """Read a body of `POST /api/embeddings`. The reply has a vector that is not normalised. A long text is truncated,
    as in Ollama.
    """
    if body.get("prompt") in (None, ""):
        return _json({"embedding": []})
    items = (RequestItem(fields.text(body, "prompt")),)
    return _parsed(view, body, "prompt", items, {"truncate": "END", "normalize": False}, _embedding)


def _embedding(call: Call, finished: RequestResult) -> EncodedReply:
    (vector,) = finished.arrays("prompt", "dense")
    data = orjson.dumps({"embedding": vector}, option=orjson.OPT_SERIALIZE_NUMPY)
    return EncodedReply(data, "application/json", finished.headers(call.received_s, timed=True))


def _bare_name(catalogue: Catalogue, body: fields.Body) -> object:
    """Return the name of the model without the tag `latest`. A value that is no text is returned unchanged."""
    name = body.get("model")
    return untagged(catalogue, name) if isinstance(name, str) else name


embed = DialectHandler("embed", _embed, _bare_name)
embeddings = DialectHandler("embed", _embeddings, _bare_name)
# the body and the reply of /v1/rerank, for programs that take the address of Ollama
rerank = DialectHandler("rerank", functools.partial(reranks.parse, version=1), _bare_name, fields.error_shape)


def _json(content: Any) -> EncodedReply:
    return EncodedReply(orjson.dumps(content), "application/json", {})


def _nanoseconds(milliseconds: float) -> int:
    return round(milliseconds * NS_PER_MS)


def _parsed(
    view: RequestView,
    body: fields.Body,
    name: str,
    items: tuple[RequestItem, ...],
    parameters: dict[str, Any],
    render: Callable[[Call, RequestResult], EncodedReply],
) -> ParsedRequest:
    """Return the request for the inputs in the field `name`. Raises InvalidInput."""
    options = body.get("options")
    if options is not None and not isinstance(options, dict):
        raise bad("options", options, "a map")
    with fields.named(num_ctx="options.num_ctx"):
        context = fields.whole(options or {}, "num_ctx", 1)
    if context is not None:
        parameters["max_seq_length"] = min(context, view.resolved.entry.max_tokens)
    parameters |= {"output_types": ["dense"], "output_dtype": "float32"}
    return ParsedRequest(
        request=InferRequest("encode", view.resolved, items, parameters, side="", inputs_field=name),
        names={"output_types": "model", "normalize": "model"},
        render=render,
    )
