"""encode, score and extract in the native format. The reply has an entry (slot) for each input, even for a failed
input. A reply of raw bytes cannot contain errors. So a request for raw bytes fails if any of its inputs fails.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sie_contracts.api.faults import Provisioning
from sie_contracts.errors import InvalidInput
from sie_contracts.wire.messages import Operation, RunOptions
from sie_gateway.http.route_kinds import HEADERS
from sie_gateway.inference import arrow, reply
from sie_gateway.inference import body as bodies
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import LARGE_BYTES, Call, EncodedReply, beside
from sie_gateway.inference.handler import Handler, Inference, InferenceRoute
from sie_gateway.inference.results import InferRequest, RequestResult
from sie_runtime.http.routes import ARROW, JSON, MSGPACK, RAW, Content


async def infer(operation: Operation, inference: Inference, call: Call, body: Mapping[str, Any]) -> EncodedReply:
    """Answer `POST /v1/{operation}/{model}`. Accept selects JSON or msgpack, for encode also Arrow or raw bytes."""
    assert call.resolved is not None
    most = inference.max_items(call)
    if len(call.body) <= LARGE_BYTES:
        items = bodies.items(body, limit=most)
    else:
        items = await beside(call, inference.body_threads, functools.partial(bodies.items, body, limit=most))
    query = bodies.query(body) if operation == "score" else None
    format_ = reply.requested_format(
        call.headers.get("accept", ""), body_is_msgpack=call.is_msgpack, raw=operation == "encode"
    )
    if format_ in ("raw", "arrow"):
        _check_whole(items, format_)
    understood = inference.understand(call, InferRequest(operation, call.resolved, items, body, query))
    if "model" in body or not bodies.all_plain(items, query):
        warnings = *bodies.ignored(items, query), *_other_model(body, call.resolved.requested)
        understood = understood.with_warnings(*warnings)
    if format_ == "raw":
        check_raw(understood.options.run)
    finished = await inference.execute(call, understood)
    if format_ == "raw":
        return raw_answer(call, finished, "items")
    finished.check()
    return arrow_answer(call, finished) if format_ == "arrow" else _answer(call, finished, msgpack=format_ == "msgpack")


def _check_whole(items: Sequence[RequestItem], format_: str) -> None:
    """Raise InvalidInput if an item has `chunks`, because the formats `raw` and `arrow` have one row for each item."""
    index = next((index for index, item in enumerate(items) if item.chunks is not None), None)
    if index is not None:
        media = RAW if format_ == "raw" else ARROW
        message = f"Accept: {media} cannot contain chunks, but JSON and msgpack can"
        raise InvalidInput(message, reason="unsupported_output", param=f"items[{index}].chunks")


def _other_model(body: Mapping[str, Any], requested: str) -> tuple[str, ...]:
    named = body.get("model")
    if named is None or (isinstance(named, str) and named.rpartition(":/")[2].casefold() == requested.casefold()):
        return ()
    return ("model: ignored, the path names the model",)


encode = functools.partial(infer, "encode")
score = functools.partial(infer, "score")
extract = functools.partial(infer, "extract")


def check_raw(run: RunOptions) -> None:
    """Check that the output can be sent as raw bytes: dense vectors without scales. Raises InvalidInput."""
    if run.outputs != ("dense",):
        raise InvalidInput(
            f"Accept: {RAW} can contain only dense vectors", reason="unsupported_output", param="output_types"
        )
    if run.dtype in reply.EXTRAS:
        message = f"Accept: {RAW} cannot contain the scales of {run.dtype}"
        raise InvalidInput(message, reason="unsupported_dtype", param="output_dtype")


def raw_answer(call: Call, finished: RequestResult, name: str) -> EncodedReply:
    """Return dense vectors as raw bytes, in C order, little-endian. Raises FailedRequest if any input failed."""
    vectors = finished.succeeded(name)
    body = reply.Joined(vectors, "dense")
    width = vectors[0][1].outputs["dense"].shape[-1]
    headers = finished.headers(call.received_s, timed=True) | {"Content-Length": str(body.nbytes)}
    headers |= {"X-SIE-Shape": f"{len(vectors)},{width}", "X-SIE-Dtype": finished.request.options.run.dtype}
    return EncodedReply(body, RAW, headers)


def arrow_answer(call: Call, finished: RequestResult) -> EncodedReply:
    """Return an Arrow reply with a row for each input, even a failed one. The caller has called `finished.check`."""
    request = finished.request
    return EncodedReply(
        arrow.ArrowRows(request.items, finished.outcomes, request.options.run),
        ARROW,
        finished.headers(call.received_s, timed=True),
    )


def _answer(call: Call, finished: RequestResult, *, msgpack: bool) -> EncodedReply:
    began_s = time.perf_counter()
    request = finished.request
    items, options = request.items, request.options
    content: dict[str, Any] = {"model": request.resolved.requested}
    slots: list[dict[str, Any]] = []
    if request.operation == "score":
        content["query_id"] = request.query.id if request.query is not None else None
        content["scores"] = reply.score_entries(items, finished.outcomes)
    elif request.operation == "extract":
        content["items"] = range(len(items))
    else:
        slots = content["items"] = reply.encode_slots(
            items, finished.outcomes, request.resolved.entry, options.run, msgpack=msgpack
        )
    if options.item_timing:
        for slot, own in zip(slots, finished.item_timings() if slots else (), strict=True):
            slot["timing"] = own
    content |= finished.shared(explain=call.explains)
    if request.operation != "encode":  # public SDKs read `input_tokens`; the other fields have OpenAI's names
        content["usage"] = {"input_tokens": finished.usage["prompt_tokens"], **finished.usage}
    if options.run.muvera is not None:
        content["muvera"] = msgspec.to_builtins(options.run.muvera)

    def slot_of(index: int) -> dict[str, Any]:
        return reply.extract_slot(index, items[index], finished.outcomes[index][1])

    row = slot_of if request.operation == "extract" else None
    return written(call, finished, content, began_s, finished.values, msgpack=msgpack, row=row)


def written(
    call: Call,
    finished: RequestResult,
    content: dict[str, Any],
    began_s: float,
    values: int = 0,
    *,
    msgpack: bool = False,
    name: str = "items",
    row: reply.Row | None = None,
) -> EncodedReply:
    """Return a reply with this content and the times of the stages. `began_s`: time at which the gateway began to build
    the content. The other parameters are those of `reply.body_of`.
    """
    late = functools.partial(finished.late, call.received_s, time.perf_counter() - began_s)
    data, content_type = reply.body_of(content, values, late, msgpack=msgpack, name=name, row=row)
    if call.explains and not isinstance(data, bytes):  # the headers leave before the body is written
        late(0.0)
    return EncodedReply(data, content_type, finished.headers(call.received_s, timed=call.explains))


def route(verb: str, handler: Handler, summary: str, body: Any, reply: Any, *media: str) -> InferenceRoute:
    """Build the row of a route in the native format, with the model in its path."""
    not_yet = (
        "Only for public SDKs below 0.6.5: no worker is ready yet (PROVISIONING); repeat the request after Retry-After"
    )
    return InferenceRoute(
        method="POST",
        path=f"/v1/{verb}/{{model:path}}",
        scope="infer",
        summary=summary,
        tag="SIE",
        endpoint=verb,
        handler=handler,
        body=Content(body, (JSON, MSGPACK)),
        replies={200: Content(reply, (JSON, MSGPACK, *media)), 202: Content(Provisioning, description=not_yet)},
        parameters=HEADERS,
    )
