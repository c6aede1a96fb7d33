"""`POST /api/embed` and `POST /api/embeddings` in the format of Ollama. Inputs are texts.

The client sends a model's name in SIE, with or without Ollama's tag `latest`. Workers manage their memory themselves,
so `keep_alive` has no effect. Of `options`, only `num_ctx` is used.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import orjson

from sie_contracts.errors import CODE, RAW, Family, Member
from sie_contracts.models.catalogue import Catalogue, Resolved
from sie_contracts.models.option_values import bad
from sie_gateway.dialects import fields
from sie_gateway.dialects import rerank as reranks
from sie_gateway.dialects.selection import able
from sie_gateway.inference import reply
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import Call, EncodedReply, InferRequest
from sie_gateway.inference.results import RequestResult

if TYPE_CHECKING:
    from sie_gateway.inference.handler import Inference

PREFIX = "/api/"
TAG = ":latest"
NS_PER_MS = 1_000_000
shape = Family(
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


async def embed(inference: Inference, call: Call, body: fields.Body) -> EncodedReply:
    """Answer `POST /api/embed` with a normalised vector for each input. The reply to an empty input has no vectors and
    no error, because clients send an empty input to test whether the model exists.
    """
    resolved = _model(inference, call, body)
    value = body.get("input")
    if value in (None, "", []):
        return _json({"model": _name(body, resolved), "embeddings": []})
    items = fields.items([value] if isinstance(value, str) else value, "input", inference.max_items(call))
    parameters: dict[str, Any] = {
        "truncate": "END" if fields.flag(body, "truncate", default=True) else "NONE",
        "normalize": True,
    }
    if width := fields.whole(body, "dimensions", 0):
        parameters["dimensions"] = width
    finished = await _run(inference, call, body, resolved, "input", items, parameters)
    began_s = time.perf_counter()
    content = {
        "embeddings": finished.arrays("input", "dense"),
        **finished.shared(explain=call.explains),
        "model": _name(body, resolved),
        "prompt_eval_count": finished.usage["total_tokens"],
        "load_duration": _nanoseconds(finished.last.stages.load_ms if finished.last else 0.0),
    }
    late = finished.late(call.received_s, began_s)

    def durations(spent_s: float) -> dict[str, Any]:
        timing = late(spent_s)
        return {"total_duration": _nanoseconds(timing["timing"]["total_time"]), **timing}

    data, content_type = reply.body_of(content, finished.values, durations, msgpack=False, name="embeddings")
    return EncodedReply(data, content_type, finished.headers(call.received_s))


async def embeddings(inference: Inference, call: Call, body: fields.Body) -> EncodedReply:
    """Answer `POST /api/embeddings` with a vector that is not normalised. A long text is truncated, as in Ollama."""
    resolved = _model(inference, call, body)
    if body.get("prompt") in (None, ""):
        return _json({"embedding": []})
    items = (RequestItem(fields.text(body, "prompt")),)
    parameters = {"truncate": "END", "normalize": False}
    finished = await _run(inference, call, body, resolved, "prompt", items, parameters)
    (vector,) = finished.arrays("prompt", "dense")
    data = orjson.dumps({"embedding": vector}, option=orjson.OPT_SERIALIZE_NUMPY)
    return EncodedReply(data, "application/json", finished.headers(call.received_s))


async def rerank(inference: Inference, call: Call, body: fields.Body) -> EncodedReply:
    """Answer `POST /api/rerank` as `/v1/rerank`. The name of the model may have Ollama's tag `latest`."""
    return await reranks.rerank(inference, call, body, version=1, name=bare_name(inference, body.get("model")))


def bare_name(inference: Inference, name: Any) -> Any:
    """Return the name of a model without the tag `latest`. A value that is no text is returned unchanged."""
    return untagged(inference.catalogue, name) if isinstance(name, str) else name


def _model(inference: Inference, call: Call, body: fields.Body) -> Resolved:
    return able(inference, call, "embed", bare_name(inference, body.get("model")))


def _name(body: fields.Body, resolved: Resolved) -> str:
    return str(body.get("model") or resolved.requested)


def _json(content: Any) -> EncodedReply:
    return EncodedReply(orjson.dumps(content), "application/json", {})


def _nanoseconds(milliseconds: float) -> int:
    return round(milliseconds * NS_PER_MS)


async def _run(
    inference: Inference,
    call: Call,
    body: fields.Body,
    resolved: Resolved,
    name: str,
    items: tuple[RequestItem, ...],
    parameters: dict[str, Any],
) -> RequestResult:
    """Run the model on the inputs in the field `name`. Raises InvalidInput, and the errors of `Inference.execute`."""
    options = body.get("options")
    if options is not None and not isinstance(options, dict):
        raise bad("options", options, "a map")
    with fields.named(num_ctx="options.num_ctx"):
        context = fields.whole(options or {}, "num_ctx", 1)
    if context is not None:
        parameters["max_seq_length"] = min(context, resolved.entry.max_tokens)
    parameters |= {"output_types": ["dense"], "output_dtype": "float32"}
    with fields.named(output_types="model", normalize="model"):
        understood = inference.understand(
            call, InferRequest("encode", resolved, items, parameters, side="", inputs_field=name)
        )
    return await inference.execute(call, understood)
