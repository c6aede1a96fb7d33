"""`POST /v1/embeddings` in the format of OpenAI. Inputs are texts or token ids. The reply has dense vectors, as lists
or as base64, or as raw bytes or Arrow if `Accept` prefers these.

Jina and Voyage have the same route with more fields: inputs as objects, types of the vectors, whether the inputs are
queries or documents, truncation. Infinity has the same route with the field `modality` for images and sounds.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from sie_contracts.errors import InvalidInput
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.option_values import bad
from sie_gateway.dialects import embedding_types, fields, joined_texts, multimodal, native, vocabulary
from sie_gateway.dialects.dialect import DialectHandler, ParsedRequest, RequestView, too_many_tokens
from sie_gateway.inference import body as bodies
from sie_gateway.inference import reply
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import Call, EncodedReply
from sie_gateway.inference.results import FailedRequest, InferRequest, RequestResult

MAX_TOKENS = 300_000  # largest number of tokens of all inputs of a request
DEFAULT_ENCODING = "cl100k_base"  # vocabulary that OpenAI's clients use for unknown models
_ENCODINGS = ("model", *vocabulary.NAMES)
_CHUNK = re.compile(r"input\[0\]: chunks\[(\d+)\]")  # start of an error text about a chunk of the joined document
_UNNAMED = f"token_encoding: ids were read as {DEFAULT_ENCODING}, because no encoding was named; {vocabulary.OWN_IDS}"


async def _embeddings(view: RequestView, body: fields.Body) -> ParsedRequest:
    """Read a body of `POST /v1/embeddings`. With Jina's field `return_multivector`, read it as of `/v1/multi-vector`.
    The reply has the vectors in the order of the inputs.
    """
    if fields.flag(body, "return_multivector"):
        return await _multi_vector(view, body)
    cut = fields.truncation(body)
    kind, is_base64 = embedding_types.requested(body, "embedding_type", "output_dtype")
    is_late = fields.flag(body, "late_chunking")
    format_ = reply.requested_format(view.headers.get("accept", ""), raw=True, msgpack=False)
    if format_ in ("raw", "arrow") and kind != "float":
        message = f"{format_} replies of this route contain float32 vectors; /v1/encode also returns other types"
        raise InvalidInput.at("Accept", message, reason="unsupported_dtype")
    if format_ != "json" and is_late:
        message = f"{format_} replies cannot contain chunks, but JSON can"
        raise InvalidInput.at("Accept", message, reason="unsupported_output")
    parameters = {**cut, **_parameters(body), **_task(body, view.resolved.entry)}

    def adjust(planned: InferRequest) -> InferRequest:
        if format_ == "raw":
            native.check_raw(planned.options.run)
        if is_late and planned.options.run.is_query:
            raise InvalidInput.at("late_chunking", "a query cannot have chunks: send documents")
        return planned

    def render(call: Call, finished: RequestResult) -> EncodedReply:
        name = finished.request.inputs_field
        if format_ == "raw":
            return native.raw_answer(call, finished, name)
        if format_ == "arrow":
            finished.check(name)
            return native.arrow_answer(call, finished)
        return _answer(call, finished, kind, is_base64=is_base64)

    return await _parsed(view, body, parameters, "dense", render, adjust, is_late=is_late)


async def _multi_vector(view: RequestView, body: fields.Body) -> ParsedRequest:
    """Read a body of Jina's `POST /v1/multi-vector`. The reply has the vectors of the tokens of each input."""
    cut = fields.truncation(body)
    kind, is_base64 = embedding_types.requested(body, "embedding_type", "output_dtype")
    if kind != "float" or is_base64:
        message = "vectors of tokens are lists of float; /v1/encode also returns other types"
        raise InvalidInput.at("embedding_type", message, reason="unsupported_dtype")
    parameters = {**cut, **_parameters(body), **_task(body, view.resolved.entry)}

    def render(call: Call, finished: RequestResult) -> EncodedReply:
        began_s = time.perf_counter()
        data = [
            {"object": "embeddings", "index": index, "embeddings": rows}
            for index, rows in enumerate(finished.arrays(finished.request.inputs_field, "multivector"))
        ]
        return listed(call, finished, data, began_s)

    return await _parsed(view, body, parameters, "multivector", render)


POOLING_TASKS = {"embed": "dense", "token_embed": "multivector"}  # task of vLLM -> output of the model


async def _pooling(view: RequestView, body: fields.Body) -> ParsedRequest:
    """Read a body of vLLM's `POST /pooling`. The reply has a vector of each input, or the vectors of its tokens.
    Without the field `task`, a model that has vectors of tokens returns these.
    """
    usual = "token_embed" if "multivector" in view.resolved.entry.outputs else "embed"
    output = POOLING_TASKS[fields.choice(body, "task", tuple(POOLING_TASKS), usual)]
    is_base64 = fields.choice(body, "encoding_format", ("float", "base64"), "float") == "base64"

    def render(call: Call, finished: RequestResult) -> EncodedReply:
        began_s = time.perf_counter()
        data = [
            {"object": "pooling", "index": index, "data": rows.data if is_base64 else rows}
            for index, rows in enumerate(finished.arrays(finished.request.inputs_field, output))
        ]
        return listed(call, finished, data, began_s)

    return await _parsed(view, body, _parameters(body), output, render, encoding="model")


embeddings = DialectHandler("embed", _embeddings, shape=fields.error_shape)
multi_vector = DialectHandler("embed", _multi_vector, shape=fields.error_shape)
pooling = DialectHandler("embed", _pooling)


async def _parsed(
    view: RequestView,
    body: fields.Body,
    parameters: Mapping[str, Any],
    output: str,
    render: Callable[[Call, RequestResult], EncodedReply],
    adjust: Callable[[InferRequest], InferRequest] = lambda planned: planned,
    *,
    encoding: str = "",
    is_late: bool = False,
) -> ParsedRequest:
    """Return the request for the inputs in `input`, or for a chat in `messages` (vLLM). `encoding`: vocabulary of token
    ids, unless the body names one. A path with a model is one of TEI, where ids are those of the model. `is_late`: the
    inputs are chunks of one document. Raises InvalidInput.
    """
    usual = encoding or view.resolved.entry.openai_token_encoding or ("model" if view.in_path else "")
    encoding = fields.choice(body, "token_encoding", _ENCODINGS, usual)
    name, merged = "input", {**parameters, "output_types": [output], "output_dtype": "float32"}
    if body.get("messages") not in (None, []) and body.get("input") is None:
        name = "messages"
        items, instruction = multimodal.conversation(body["messages"], name, view.limit)
        if instruction:
            merged.setdefault("instruction", instruction)
    else:
        items = await _items(body, encoding or DEFAULT_ENCODING, view.limit)
    if is_late:
        items = (_document(items),)
    warnings = (_UNNAMED,) if not encoding and name == "input" and _has_ids(body) else ()
    return ParsedRequest(
        request=InferRequest("encode", view.resolved, items, merged, side="", inputs_field=name),
        render=render,
        names={
            "output_types": "model",
            **({"dimensions": "output_dimension"} if body.get("dimensions") is None else {}),
        },
        adjust=lambda planned: adjust(planned.with_warnings(*warnings)),
        max_tokens=MAX_TOKENS,
    )


def _has_ids(body: fields.Body) -> bool:
    """Return whether the inputs of a body are token ids. `_items` must have checked the inputs before."""
    value = body["input"]
    return isinstance(value, list) and isinstance(value[0], int | float | list)


def _task(body: fields.Body, entry: ModelEntry) -> dict[str, Any]:
    """Return the parameters for Jina's field `task`. Raises InvalidInput."""
    if body.get("task") is None:
        return {}
    return {**fields.side(fields.text(body, "task"), entry), **fields.parameters(body, "is_query")}


def _parameters(body: fields.Body) -> dict[str, Any]:
    """Return the parameters of the body (OpenAI, Jina, Voyage or SIE) under SIE's names. Raises InvalidInput."""
    parameters = fields.parameters(
        body, "dimensions", "input_type", "is_query", "prompt_name", "instruction", "truncate", "normalize", "options"
    )
    if parameters.get("dimensions") == 0:  # Infinity's client sends 0 to get vectors of full width
        del parameters["dimensions"]
    width = fields.whole(body, "output_dimension", 1)
    if width is not None and parameters.setdefault("dimensions", width) != width:
        raise bad("output_dimension", width, "the same number as dimensions")
    if body.get("normalized") is not None:
        parameters.setdefault("normalize", fields.flag(body, "normalized"))
    return parameters


async def _items(body: fields.Body, encoding: str, limit: int) -> tuple[RequestItem, ...]:
    """Return the inputs: texts or token ids of the model. Token ids of OpenAI's models become texts. If Infinity's
    field `modality` is `image` or `audio`, the inputs are images or sounds. Raises InvalidInput.

    An input of Jina may also be an object: `{"text": "a dog"}` or `{"image": "data:..."}`. An object may also have a
    list of parts in `content`.
    """
    value = body.get("input")
    if isinstance(value, dict):
        value = [value]
    modality = fields.choice(body, "modality", ("text", "image", "audio"), "text")
    if isinstance(value, str):
        if modality == "text":
            _check_text(value, "input")
        value = [value]
    elif isinstance(value, list) and value and type(value[0]) in (int, float):
        value = [value]
    inputs = fields.inputs(value, "input", limit)
    if modality != "text":
        read = _image if modality == "image" else _sound
        return tuple(read(entry, f"input[{index}]") for index, entry in enumerate(inputs))
    if any(type(entry) is dict for entry in inputs):
        return tuple(_object(entry, f"input[{index}]") for index, entry in enumerate(inputs))
    first = inputs[0]
    if not isinstance(first, str | list):
        raise bad("input[0]", first, "a string, a list of token ids, or an object with text")
    expected = "a string" if isinstance(first, str) else "a list of token ids"
    for index, entry in enumerate(inputs):
        if type(entry) is not type(first):
            raise bad(f"input[{index}]", entry, f"{expected} like input[0]")
        if isinstance(entry, str) and not (entry and entry.isascii()):
            _check_text(entry, f"input[{index}]")
    if isinstance(first, str):
        return tuple(map(RequestItem, inputs))
    total = sum(map(len, inputs))
    if total > MAX_TOKENS:
        raise too_many_tokens(total, "input", MAX_TOKENS)
    ids = [bodies.token_ids(entry, f"input[{index}]") for index, entry in enumerate(inputs)]
    if encoding == "model":
        return tuple(RequestItem(None, tokens=entry) for entry in ids)
    await asyncio.to_thread(vocabulary.load, encoding)  # in a thread: the first call reads the vocabulary file
    return tuple(RequestItem(vocabulary.decode(encoding, entry, f"input[{index}]")) for index, entry in enumerate(ids))


def _document(items: Sequence[RequestItem]) -> RequestItem:
    """Return the inputs as one document with a chunk for each input. Raises InvalidInput for inputs without a text."""
    texts = [item.text or "" for item in items if not item.files and not item.links]
    if len(texts) < len(items) or not all(texts):
        raise InvalidInput.at("late_chunking", "expected only texts: each input is a chunk of one document")
    return joined_texts.joined(texts, "input")


def _object(value: Any, path: str) -> RequestItem:
    """Read an input that is an object: a text or image in Jina's fields, or a list of parts. Raises InvalidInput."""
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, dict):
        raise bad(path, value, "a string or an object, because another input is an object")
    if value.get("content") is not None and value.get("text") is None:
        return multimodal.parts(value["content"], f"{path}.content")
    if value.get("type") == "image_url":
        return multimodal.pictured(None, [multimodal.address(value, path)], path)
    if value.get("text") == "":
        _check_text("", f"{path}.text")
    return multimodal.item(value, path, "image", "bytes", "url")


def _image(value: Any, path: str) -> RequestItem:
    if not isinstance(value, str | dict):
        raise bad(path, value, "a data URI")
    return multimodal.image(value, path) if isinstance(value, str) else _object(value, path)


def _sound(value: Any, path: str) -> RequestItem:
    if not isinstance(value, str):
        raise bad(path, value, "a data URI")
    return multimodal.sound(value, path)


def _check_text(text: str, path: str) -> None:
    if not text:
        raise InvalidInput.at(path, "expected a text that is not empty", reason="empty_item")
    bodies.utf8(text, path)


def _answer(call: Call, finished: RequestResult, kind: str, *, is_base64: bool) -> EncodedReply:
    began_s = time.perf_counter()
    try:
        vectors = itertools.chain.from_iterable(joined_texts.vectors_of(finished, finished.request.inputs_field))
    except FailedRequest as failed:
        _name_input(failed)
        raise
    return listed(call, finished, embedding_types.entries(list(vectors), kind, is_base64=is_base64), began_s)


def _name_input(failed: FailedRequest) -> None:
    """Rewrite an error about chunk n of the joined document so that it names input n of the client. With
    `late_chunking`, the gateway has joined the inputs to one document, so the error names `input[0]: chunks[n]`.
    """
    error = failed.error
    path = _CHUNK.match(error.message)
    if path is not None:
        error.param = f"input[{path[1]}]"
        error.message = error.param + error.message.removeprefix(path[0])
        message = failed.errors[0]["message"]
        failed.errors[0] |= {"index": int(path[1]), "message": message.removeprefix(f"chunks[{path[1]}]: ")}


def listed(call: Call, finished: RequestResult, data: list[dict[str, Any]], began_s: float) -> EncodedReply:
    """Return a reply with the list `data`. `began_s`: time at which the gateway began to build the reply. Clients of
    Mistral require `id`, clients of vLLM `created`.
    """
    content = {
        "id": f"embd-{uuid4()}",
        "object": "list",
        "created": int(time.time()),
        "data": data,
        "model": finished.request.resolved.requested,
        **fields.shared(call, finished),
    }
    return native.written(call, finished, content, began_s, finished.values, name="data")
