"""Form of a route in the API format of another server. `parse` makes a request to a model from a body, and `render` of
this request makes the reply from the result. Neither has access to the gateway, which does what is between them:

    body ──► model ──► parse ──► ParsedRequest ──► plan ──► count tokens ──► run ──► render ──► EncodedReply
"""

from __future__ import annotations

import unicodedata
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from sie_contracts.errors import InvalidInput, SIEError
from sie_contracts.models import options
from sie_contracts.models.catalogue import Catalogue, Resolved
from sie_contracts.models.options import RequestOptions
from sie_contracts.wire.messages import RunOptions
from sie_gateway.dialects import fields
from sie_gateway.dialects.selection import Capability, checked, model_for
from sie_gateway.inference.call import Call, EncodedReply, ErrorShape, cache_mode
from sie_gateway.inference.handler import Inference
from sie_gateway.inference.results import FailedRequest, InferRequest, RequestResult

SPECIAL_TOKENS = 8  # largest number of special tokens that a tokenizer adds to a text


@dataclass(frozen=True)
class RequestView:
    """Facts about a request that `parse` gets beside the body. `limit`: largest number of inputs. `in_path`: the path
    names the model.
    """

    resolved: Resolved
    headers: Mapping[str, str]
    limit: int
    in_path: bool


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """Request to a model, and the function that makes the reply from its result.

    `names`: SIE's name of a parameter -> the client's name, for errors. `adjust` changes the request after its
    parameters were merged; it raises InvalidInput for a request that cannot have a reply. `max_tokens`: largest number
    of tokens of all inputs; 0: no limit. `rename` replaces the path of an input in an error.
    """

    request: InferRequest
    render: Callable[[Call, RequestResult], EncodedReply]
    names: Mapping[str, str] = field(default_factory=dict)
    adjust: Callable[[InferRequest], InferRequest] = lambda planned: planned
    max_tokens: int = 0
    rename: Callable[[SIEError], None] = lambda error: None


Parse = Callable[[RequestView, fields.Body], Awaitable[ParsedRequest | EncodedReply]]
"""Function that reads the fields of a body. Returns a reply if the request needs no run. Raises InvalidInput."""


@dataclass(frozen=True)
class DialectHandler:
    """Handler of a route. `capability`: what the route needs of a model. A model without the task is refused, unless
    `any_task`. `name` returns the model that a body names. `shape` returns the format of errors that a body chooses;
    None for that of the route.
    """

    capability: Capability
    parse: Parse
    name: Callable[[Catalogue, fields.Body], object] = lambda catalogue, body: body.get("model")
    shape: Callable[[fields.Body], ErrorShape | None] = lambda body: None
    any_task: bool = False

    async def __call__(self, inference: Inference, call: Call, body: fields.Body) -> EncodedReply:
        call.shape = self.shape(body) or call.shape
        # before other fields are read: a body for another task has other fields, so an error about a field would hide
        # that the task is wrong
        resolved = model_for(inference, call, self.capability, self.name(inference.catalogue, body))
        if not self.any_task:
            checked(resolved, self.capability)
        view = RequestView(resolved, call.headers, inference.max_items(call), in_path=call.model is not None)
        parsed = await self.parse(view, body)
        if isinstance(parsed, EncodedReply):
            return parsed
        with fields.named(**parsed.names):
            planned = inference.understand(call, parsed.request)
        planned = parsed.adjust(planned)
        if parsed.max_tokens:
            await _check_tokens(inference, call, planned, parsed.max_tokens)
        try:
            return parsed.render(call, await inference.execute(call, planned))
        except FailedRequest as failed:
            parsed.rename(failed.error)
            raise
        except SIEError as error:
            parsed.rename(error)
            raise


def too_many_tokens(tokens: int, name: str, limit: int) -> InvalidInput:
    message = f"got {tokens} tokens, at most {limit} are allowed for all inputs together"
    return InvalidInput.at(name, message, reason="too_many_tokens", extras={"limit": limit})


async def _check_tokens(inference: Inference, call: Call, request: InferRequest, limit: int) -> None:
    """Refuse a request whose inputs have more than `limit` tokens in total, before its work is queued. A request
    that allows only cached answers is not checked, because it queues no work. Raises InvalidInput, and the errors of
    `Inference.run`.

    Only a worker can count the tokens of texts. The gateway asks a worker for the count only if an upper bound of the
    number of tokens is above the limit.
    """
    if cache_mode(call.headers) == "only":
        return
    run, name = request.options.run, request.inputs_field
    texts = tuple(item for item in request.items if item.text is not None)
    if max_tokens([item.text or "" for item in texts], run, limit) <= limit:
        return
    # The count has an id of its own, so that a late reply to the count cannot be mistaken for a reply to the request.
    # It has no charge, because the client does not pay for the count.
    counting = msgspec.structs.replace(call, id=f"{call.id}-count", charge=None)
    whole = tuple(msgspec.structs.replace(item, chunks=None) for item in texts)
    run = options.counting(run)
    counted = await inference.run(
        counting, InferRequest("tokenize", request.resolved, whole, {}, options=RequestOptions(run), inputs_field=name)
    )
    counted.check(name)
    total = counted.usage["total_tokens"]
    if total > limit:
        raise too_many_tokens(total, name, limit)


def max_tokens(texts: Sequence[str], run: RunOptions, limit: int) -> int:
    """Return an upper bound for the tokens of texts with their prompts: one token for each byte of the text or of its
    Unicode normal form, whichever has more bytes. Normal forms take long to compute, so they are not computed if the
    bytes of the texts alone exceed `limit`.
    """
    around = _max_bytes(run.prefix) + _max_bytes(run.suffix) + SPECIAL_TOKENS
    total = sum(around + (len(text) if text.isascii() else len(text.encode())) for text in texts)
    if total > limit:
        return total
    return sum(around + _max_bytes(text) for text in texts)


def _max_bytes(text: str) -> int:
    if text.isascii():
        return len(text)
    return max(len(text.encode()), len(unicodedata.normalize("NFKC", text).encode()))
