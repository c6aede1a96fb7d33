"""Routes of Text Embeddings Inference (TEI). The path (/tei/{model}) or the body names the model. If neither of them
names a model, `selection` chooses a model.

Bodies of replies with results are plain lists, so the timing is in headers. Errors have the types and the statuses of
TEI, and their field `error` is a string.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

import sie_contracts
from sie_contracts.arrays import Array
from sie_contracts.errors import (
    CODE,
    RAW,
    ErrorFormat,
    InvalidInput,
    Member,
    QueueFull,
    RateLimited,
    ResourceExhausted,
    SIEError,
)
from sie_contracts.models import options
from sie_contracts.models.entries import ModelEntry, classifies, widths
from sie_contracts.models.option_values import bad
from sie_contracts.models.options import RequestOptions
from sie_gateway.dialects import fields
from sie_gateway.dialects.dialect import DialectHandler, ParsedRequest, RequestView
from sie_gateway.dialects.scores import ranked, scaled
from sie_gateway.dialects.selection import Capability, checked, model_for, unable
from sie_gateway.inference import body as bodies
from sie_gateway.inference import reply
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import Call, EncodedReply
from sie_gateway.inference.results import InferRequest, RequestResult

if TYPE_CHECKING:
    from sie_gateway.inference.handler import Inference

_STATUS = {"Overloaded": 429, "Unhealthy": 503, "Tokenizer": 422, "Empty": 400}
MAP_VALUES = 10  # one small map, such as an entry of a sparse vector, takes as long to write as this many numbers
_DIRECTIONS = {"left": "START", "right": "END"}
_INPUT = re.compile(r"inputs\[(\d+)\]")


def _error_type(error: SIEError) -> str:
    """Return the `error_type` that Text Embeddings Inference would send for this error."""
    if isinstance(error, QueueFull | ResourceExhausted | RateLimited):
        return "Overloaded"
    if error.retryable and error.status == 503:
        return "Unhealthy"
    if error.status >= 500 or error.reason in ("unsupported_task", "unsupported_output"):
        return "Backend"
    return {"empty_items": "Empty", "bad_token_id": "Tokenizer"}.get(error.reason, "Validation")


def _status(error: SIEError) -> int:
    """Return the status that Text Embeddings Inference would send for this error."""
    kind = _error_type(error)
    if isinstance(error, InvalidInput):
        return {"too_many_items": 413, "model_required": 400}.get(
            error.reason, 424 if kind == "Backend" else _STATUS.get(kind, 422)
        )
    if error.code in ("INFERENCE_ERROR", "ALL_ITEMS_FAILED") and kind == "Backend":
        return 424
    return _STATUS.get(kind, error.status)


shape = ErrorFormat(
    "tei",
    (
        Member("error", "message", "Text Embeddings Inference, huggingface_hub"),
        Member("error_type", _error_type, "Text Embeddings Inference"),
        RAW._replace(name="detail"),
        CODE,
    ),
    _status,
)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and set(map(type, value)) <= {int, float}


def _input(value: Any, path: str) -> RequestItem:
    if isinstance(value, str):
        return RequestItem(bodies.utf8(value, path))
    if _is_ids(value):
        return RequestItem(None, tokens=bodies.token_ids(value, path))
    raise bad(path, value, "a string or a list of token ids")


def _inputs(value: Any, most: int, name: str = "inputs") -> tuple[RequestItem, ...]:
    if isinstance(value, str) or _is_ids(value):
        value = [value]
    return tuple(_input(entry, f"{name}[{index}]") for index, entry in enumerate(_counted(value, most, name)))


def _counted(value: Any, most: int, name: str) -> list[Any]:
    """Return `value`, a list of one to `most` elements. Raises InvalidInput, also if `value` is None."""
    return fields.inputs([] if value is None else value, name, most)


def _texts(value: Any, most: int, name: str) -> tuple[RequestItem, ...]:
    return fields.items([] if value is None else value, name, most)


def _truncation(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return SIE's `truncate` for TEI's fields `truncate` and `truncation_direction`. Raises InvalidInput."""
    direction = body.get("truncation_direction")
    if direction is not None and (not isinstance(direction, str) or direction.lower() not in _DIRECTIONS):
        raise bad("truncation_direction", direction, "left or right")
    keep = _DIRECTIONS[direction.lower()] if isinstance(direction, str) else "END"
    return {"truncate": keep if fields.flag(body, "truncate", default=True) else "NONE"}


def _answer(call: Call, finished: RequestResult, body: Any) -> EncodedReply:
    headers = finished.headers(call.received_s, timed=True)
    headers["X-Queue-Time"] = str(finished.reported_times["queue_ms"])
    headers |= {name: str(int(float(value))) for name, value in headers.items() if name.endswith("-Time")}
    headers["X-Compute-Time"] = headers["X-Total-Time"]
    headers["X-Compute-Type"] = "cpu" if finished.request.lane.machine_profile == "cpu" else "gpu+optimized"
    headers["X-Compute-Characters"] = str(sum(len(item.text or "") for item in finished.request.items))
    headers["X-Compute-Tokens"] = str(finished.usage["total_tokens"])
    return EncodedReply(body if not isinstance(body, list | dict) else orjson.dumps(body), "application/json", headers)


def _encode(
    view: RequestView,
    capability: Capability,
    items: tuple[RequestItem, ...],
    params: Mapping[str, Any],
    render: Callable[[Call, RequestResult], EncodedReply],
    *,
    is_cosine: bool = False,
    rename: Callable[[SIEError], None] = lambda error: None,
) -> ParsedRequest:
    """Return the request for vectors of the inputs. `is_cosine`: normalise the vectors, even if `params` forbid it.
    Raises InvalidInput.
    """
    output = "sparse" if capability == "embed_sparse" else "dense"
    merged = {**_truncation(params), "output_types": [output], **fields.parameters(params, "dimensions", "prompt_name")}
    if capability == "embed":
        merged["normalize"] = fields.flag(params, "normalize", default=True) or is_cosine

    def adjust(planned: InferRequest) -> InferRequest:
        if capability != "embed_all":
            return planned
        return planned.with_run(options.unpooled(view.resolved.entry, planned.options.run))

    request = InferRequest("encode", view.resolved, items, merged, side="", inputs_field="inputs")
    return ParsedRequest(request=request, adjust=adjust, render=render, rename=rename)


async def _embed(view: RequestView, body: fields.Body) -> ParsedRequest:
    """Read a body for a list of dense vectors, also for a single input."""

    def render(call: Call, finished: RequestResult) -> EncodedReply:
        return _answer(call, finished, reply.listed(finished.arrays("inputs", "dense"), finished.values))

    return _encode(view, "embed", _inputs(body.get("inputs"), view.limit), body, render)


async def _embed_all(view: RequestView, body: fields.Body) -> ParsedRequest:
    """Read a body for the hidden states of all tokens, not pooled and not normalised."""

    def render(call: Call, finished: RequestResult) -> EncodedReply:
        return _answer(call, finished, reply.listed(finished.arrays("inputs", options.TOKEN_STATES), finished.values))

    return _encode(view, "embed_all", _inputs(body.get("inputs"), view.limit), body, render)


async def _embed_sparse(view: RequestView, body: fields.Body) -> ParsedRequest:
    """Read a body for sparse vectors. The reply has the index and the weight of each token of the vocabulary whose
    weight is not 0.
    """

    def render(call: Call, finished: RequestResult) -> EncodedReply:
        indices, values = finished.arrays("inputs", "sparse.indices"), finished.arrays("inputs", "sparse.values")
        rows = list(zip(indices, values, strict=True))
        return _answer(call, finished, reply.listed(rows, MAP_VALUES * sum(map(len, values)), row=_sparse))

    return _encode(view, "embed_sparse", _inputs(body.get("inputs"), view.limit), body, render)


def _sparse(row: tuple[Array, Array]) -> list[dict[str, Any]]:
    indices, weights = row
    return [{"index": index, "value": value} for index, value in zip(indices.tolist(), weights.tolist(), strict=True)]


async def _similarity(view: RequestView, body: fields.Body) -> ParsedRequest:
    """Read a body for the cosine similarities of a source sentence and each of the other sentences."""
    value = body.get("inputs")
    if not isinstance(value, dict):
        raise bad("inputs", value, "a map with source_sentence and sentences")
    source = fields.string(value.get("source_sentence"), "inputs.source_sentence")
    sentences = _texts(value.get("sentences"), view.limit, "inputs.sentences")
    parameters = body.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise bad("parameters", parameters, "a map or null")

    def render(call: Call, finished: RequestResult) -> EncodedReply:
        # the vectors have the length 1, so the cosine of two vectors is their dot product
        vectors = np.stack(finished.arrays("inputs", "dense")).astype(np.float32)
        return _answer(call, finished, (vectors[1:] @ vectors[0]).tolist())

    items = (RequestItem(source), *sentences)
    return _encode(view, "embed", items, parameters or {}, render, is_cosine=True, rename=_name_sentence)


def _name_sentence(error: SIEError) -> None:
    """Replace the path of an input in an error: input 0 is the source sentence, input n is sentence n - 1."""
    path = _INPUT.match(error.param)
    if path is not None:
        index = int(path[1])
        name = f"inputs.sentences[{index - 1}]" if index else "inputs.source_sentence"
        error.message = error.message.replace(path[0], name, 1)
        error.param = name + error.param.removeprefix(path[0])


async def parse_rerank(view: RequestView, body: fields.Body) -> ParsedRequest:
    """Read a body for the texts in the order of their relevance to a query, best first."""
    query = RequestItem(fields.text(body, "query"))
    items = _texts(body.get("texts"), view.limit, "texts")
    is_raw, with_text = fields.flag(body, "raw_scores"), fields.flag(body, "return_text")

    def render(call: Call, finished: RequestResult) -> EncodedReply:
        scores, order = ranked(finished, "texts")
        return _answer(
            call,
            finished,
            [
                {"index": index, "score": scores[index], **({"text": items[index].text} if with_text else {})}
                for index in order
            ],
        )

    request = InferRequest("score", view.resolved, items, _truncation(body), query, inputs_field="texts")
    return ParsedRequest(request=request, adjust=scaled(raw=is_raw), render=render)


async def _predict(view: RequestView, body: fields.Body, *, is_nested: bool = False) -> ParsedRequest:
    """Read a body for the classes of texts or pairs of texts. The reply has a list for one input, and a list of lists
    for a batch. If `is_nested`, the reply for one input is a list of lists too.
    """
    value = body.get("inputs")
    is_single = isinstance(value, str) or (
        isinstance(value, list) and 0 < len(value) <= 2 and all(isinstance(entry, str) for entry in value)
    )
    batch = [[value] if isinstance(value, str) else value] if is_single else value
    items = []
    for index, entry in enumerate(_counted(batch, view.limit, "inputs")):
        path = f"inputs[{index}]"
        pair = [entry] if isinstance(entry, str) else entry
        if not isinstance(pair, list) or not 1 <= len(pair) <= 2 or not all(isinstance(text, str) for text in pair):
            raise bad(path, entry, "a text, or a list of one or two texts")
        texts = [bodies.utf8(text, path) for text in pair]
        items.append(RequestItem(texts[0], pair=texts[1] if len(texts) == 2 else None))
    params = {**_truncation(body), "options": {"raw_scores": fields.flag(body, "raw_scores")}}

    def render(call: Call, finished: RequestResult) -> EncodedReply:
        predictions = classes(finished, "inputs")
        return _answer(call, finished, predictions[0] if is_single and not is_nested else predictions)

    request = InferRequest("extract", view.resolved, tuple(items), params, inputs_field="inputs")
    return ParsedRequest(request=request, render=render)


def classes(finished: RequestResult, name: str) -> list[list[dict[str, Any]]]:
    """Return the classes of each input, best first. Raises FailedRequest."""
    predictions: list[list[dict[str, Any]]] = []
    for _, outcome in finished.succeeded(name):
        classifications = (outcome.data or {})["classifications"]
        predictions.append([{"score": label["score"], "label": label["label"]} for label in classifications])
    return predictions


async def _tokenize(view: RequestView, body: fields.Body) -> ParsedRequest:
    """Read a body for the tokens of texts: id, text, and the byte offsets of the token's begin and end. The reply to a
    body with `prompt` has the ids of this one text, as from vLLM.
    """
    is_prompt = body.get("inputs") is None and body.get("prompt") is not None
    name = "prompt" if is_prompt else "inputs"
    value = fields.text(body, name) if is_prompt else body.get(name)
    items = _texts([value] if isinstance(value, str) else value, view.limit, name)
    template = _template(body, view.resolved.entry)
    run = options.tokenizing(*template, add_special_tokens=fields.flag(body, "add_special_tokens", default=True))
    with_texts = fields.flag(body, "return_token_strs") if is_prompt else False

    def render(call: Call, finished: RequestResult) -> EncodedReply:
        replies = [outcome.data or {} for _, outcome in finished.succeeded(name)]
        if is_prompt:
            (tokens,) = replies
            content = {
                "count": len(tokens["ids"]),
                "max_model_len": view.resolved.entry.max_tokens,
                "tokens": tokens["ids"],
                "token_strs": tokens["texts"] if with_texts else None,
            }
            return _answer(call, finished, content)
        size = MAP_VALUES * sum(len(entry["ids"]) for entry in replies)
        return _answer(call, finished, reply.listed(replies, size, row=_tokens))

    request = InferRequest("tokenize", view.resolved, items, {}, options=RequestOptions(run), inputs_field=name)
    return ParsedRequest(request=request, render=render)


_TOKEN = {"id": "ids", "text": "texts", "special": "special", "start": "starts", "stop": "stops"}


def _tokens(tokens: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    columns = zip(*(tokens[column] for column in _TOKEN.values()), strict=True)
    return [dict(zip(_TOKEN, values, strict=True)) for values in columns]


def _template(body: Mapping[str, Any], entry: ModelEntry) -> tuple[str, str]:
    """Return the texts that the prompt named by `prompt_name` puts before and after an input. Raises InvalidInput."""
    if body.get("prompt_name") is None:
        return "", ""
    before, _, after = options.prompt_template(entry, "prompt_name", body["prompt_name"]).partition("{text}")
    return before, after


async def _decode(view: RequestView, body: fields.Body) -> ParsedRequest:
    """Read a body for the texts of token ids."""
    value = body.get("ids")
    lists = _counted([value] if _is_ids(value) else value, view.limit, "ids")
    items = tuple(RequestItem(None, tokens=bodies.token_ids(ids, f"ids[{index}]")) for index, ids in enumerate(lists))
    run = options.decoding(skip_special_tokens=fields.flag(body, "skip_special_tokens", default=True))

    def render(call: Call, finished: RequestResult) -> EncodedReply:
        return _answer(call, finished, [(outcome.data or {})["text"] for _, outcome in finished.succeeded("ids")])

    request = InferRequest("decode", view.resolved, items, {}, options=RequestOptions(run), inputs_field="ids")
    return ParsedRequest(request=request, render=render)


async def _main_task(view: RequestView, body: fields.Body) -> ParsedRequest:
    """Read a body of `POST /` for the model's main task, or for similarities to a source sentence."""
    resolved, entry = view.resolved, view.resolved.entry
    value = body.get("inputs")
    if isinstance(value, dict) and "source_sentence" in value:
        checked(resolved, "embed")
        return await _similarity(view, body)
    if "dense" in widths(entry, resolved.run):
        return await _embed(view, body)
    if "sparse" in entry.outputs:
        return await _embed_sparse(view, body)
    if classifies(entry):
        return await _predict(view, body, is_nested=True)  # huggingface_hub takes the first list of lists
    if "score" in entry.tasks and ("query" in body or "encode" not in entry.tasks):
        return await parse_rerank(view, body)
    raise unable(resolved, "embed")


embed = DialectHandler("embed", _embed)
embed_all = DialectHandler("embed_all", _embed_all)
embed_sparse = DialectHandler("embed_sparse", _embed_sparse)
similarity = DialectHandler("embed", _similarity)
rerank = DialectHandler("rerank", parse_rerank)
predict = DialectHandler("predict", _predict)
tokenize = DialectHandler("embed", _tokenize, any_task=True)
decode = DialectHandler("embed", _decode, any_task=True)
main_task = DialectHandler("embed", _main_task, any_task=True)


async def health(inference: Inference, call: Call, _: fields.Body) -> EncodedReply:
    """Answer with an empty map if the catalogue has the model. A worker may still have to load it."""
    model_for(inference, call, "embed")
    return EncodedReply(b"{}", "application/json", {})


async def info(inference: Inference, call: Call, _: fields.Body) -> EncodedReply:
    """Answer with the description of the server in the format of TEI's /info."""
    resolved = model_for(inference, call, "embed")
    entry, workers = resolved.entry, inference.workers_of(resolved.bundle)
    loaded = (status for beat in workers for status in beat.models if status.model == resolved.residency)
    served = next(
        (status.precision.served for status in loaded if status.precision is not None),
        entry.load.precision or "float32",
    )
    kind: dict[str, Any] = {"embedding": {"pooling": entry.run.pooling or "mean"}}
    if "score" in entry.tasks and "encode" not in entry.tasks:
        kind = {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}
    elif classifies(entry):
        kind = {"classifier": {"id2label": {}, "label2id": {}}}
    return EncodedReply(
        orjson.dumps(
            {
                "model_id": entry.id,
                "model_sha": entry.revision,
                "model_dtype": served,
                "served_model_name": entry.id,
                "model_type": kind,
                "max_concurrent_requests": inference.slots.total,
                "max_input_length": entry.max_tokens,
                "max_batch_tokens": max((beat.batch_cost for beat in workers), default=0) or entry.max_tokens,
                "max_batch_requests": None,
                "max_client_batch_size": inference.max_items(call),
                "auto_truncate": True,
                "tokenization_workers": max(1, len(workers)),
                "version": sie_contracts.__version__,
                "sha": None,
                "docker_label": None,
            }
        ),
        "application/json",
        {},
    )
