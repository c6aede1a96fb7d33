"""`POST /v1/redact/{model}`: texts without personal data, in the native format. The route replaces the entities that an
extract request returns, and matches of patterns. `redaction/` has the patterns, the rule for overlaps and the
replacements.

The route refuses a text that the model cannot read to its end, because the rest of the text would not be redacted.
"""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast, get_args

import msgspec

from sie_contracts.api.inference import Offsets, Redact, Redacted, RedactionStyle
from sie_contracts.errors import GatewayTimeout, InferenceFailed, InvalidInput
from sie_contracts.models.catalogue import Resolved
from sie_contracts.models.entries import needs_labels
from sie_contracts.models.option_values import bad
from sie_contracts.models.options import MAX_LABELS
from sie_contracts.wire.messages import Failed, Ok, Outcome
from sie_gateway.admission.slots import KeyTurns
from sie_gateway.dialects import fields, native
from sie_gateway.dialects.selection import able, checked
from sie_gateway.fleet.capabilities import CAN
from sie_gateway.inference import body as bodies
from sie_gateway.inference import reply
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import Call, EncodedReply, beside
from sie_gateway.inference.handler import Inference
from sie_gateway.inference.results import InferRequest, RequestResult
from sie_gateway.plugin import Plugin
from sie_redact.patterns import KINDS, Proceed, is_region, pattern_of, ranges_of
from sie_redact.replacements import Replacer, redacted
from sie_redact.spans import SensitiveSpan, disjoint, utf16_offsets, with_marks

MAX_TEXT = 1 << 18  # largest number of code points of a text
MAX_NAME = 1000  # largest number of characters in the name of a kind of personal data or of a model
MAX_MODELS = 3  # largest number of names in `models`; each of these models reads all texts
KEY_CHARACTERS = (16, 1024)  # shortest and longest key of the style `hash`; an attacker could guess a shorter key
_ASIDE = 1 << 11  # texts with at least this many code points in total are redacted in a thread, not in the event loop
# The time to write a reply is measured in vector numbers: the gateway writes this many code points of a text in the
# time in which it writes one number of a vector.
_CODE_POINTS_PER_VALUE = 20
_OWN = ("kinds", "models", "style", "key", "region", "offsets", "restorable")
_OF_ONE_MODEL = ("profile", "lora", "lora_id")  # parameters for the model in the path, not for those in `models`
_SHARED = ("id", "metadata", "error", "usage")  # fields of a slot that an extract and a redaction have in common
_STYLES: tuple[str, ...] = get_args(RedactionStyle)
_OFFSETS: tuple[str, ...] = get_args(Offsets)


@dataclass(frozen=True)
class RedactionRules:
    """Fields that only bodies of /v1/redact have. `kinds` is empty if the client names none. `region`: code of the
    country whose national phone numbers are replaced. `restorable`: the reply has a map of the replaced values.
    `models`: names of further models that read the texts.
    """

    kinds: tuple[str, ...]
    style: RedactionStyle
    key: bytes = field(repr=False)
    region: str
    offsets: str
    restorable: bool = True
    models: tuple[str, ...] = ()

    @cached_property
    def patterns(self) -> Mapping[str, str]:
        """Return the names of the patterns to search for, each with the kind that the reply shows. If several of the
        client's kinds mean the same pattern, the reply shows the first of these kinds. If the client names no kinds,
        return all patterns.
        """
        if not self.kinds:
            return {name: name for name in KINDS}
        return {name: kind for kind in reversed(self.kinds) if (name := pattern_of(kind))}


async def redact(inference: Inference, call: Call, body: fields.Body) -> EncodedReply:
    resolved = able(inference, call, "redact")
    rules, parameters = _rules(body)
    items = await beside(call, inference.body_threads, lambda: bodies.items(body, limit=inference.max_items(call)))
    _check_texts(items)
    # check the requests to all models before the first model runs, so that no model runs for an invalid request
    plans = [_plan(inference, call, resolved, items, rules, parameters)]
    for number, further in enumerate(_further(inference, call, resolved, rules)):
        own = msgspec.structs.replace(call, id=f"{call.id}-model{number}", labels=dict(call.labels))
        plans.append(_plan(inference, own, further, items, rules, _without(parameters, _OF_ONE_MODEL)))
    results = []
    for own, planned in plans:
        results.append(await inference.execute(own, planned))
        results[-1].check(labels="kinds")
    call.finished = finished = results[0]
    # a text that failed with any of the models is a failed input of the request
    finished.outcomes = [
        next((placed for placed in every if isinstance(placed[1], Failed)), every[0])
        for every in zip(*(result.outcomes for result in results), strict=True)
    ]
    finished.check(labels="kinds")
    tokens = sum(result.usage["prompt_tokens"] for result in results)
    finished.usage = {**finished.usage, "prompt_tokens": tokens, "total_tokens": tokens}
    began_s = time.perf_counter()
    size = sum(len(item.text or "") for item in items)
    one_thread = inference.one_thread if size >= _ASIDE else None
    shared = finished.shared(explain=call.explains)
    warnings = [warning for _, planned in plans for warning in planned.options.warnings]
    content = {
        "model": resolved.requested,
        "items": [slot async for slot in _slots(call, results, rules, one_thread)],
        **shared,
        **({"warnings": list(dict.fromkeys(warnings))} if warnings else {}),
    }
    format_ = reply.requested_format(call.headers.get("accept", ""), body_is_msgpack=call.is_msgpack)
    values = sum(result.values for result in results) + size // _CODE_POINTS_PER_VALUE
    return native.written(call, finished, content, began_s, values, msgpack=format_ == "msgpack")


def _plan(
    inference: Inference,
    call: Call,
    resolved: Resolved,
    items: tuple[RequestItem, ...],
    rules: RedactionRules,
    parameters: Mapping[str, Any],
) -> tuple[Call, InferRequest]:
    """Return the call and the request with which a model reads the texts. Raises SIEError."""
    takes_labels = needs_labels(resolved.entry)
    labels = list(rules.kinds) if takes_labels else None
    params = {**parameters.get("params", {}), "labels": labels, "truncate": "NONE"}
    with fields.named(labels="kinds"):
        planned = inference.understand(call, InferRequest("extract", resolved, items, {**parameters, "params": params}))
    if rules.kinds and not takes_labels:
        message = (
            f"kinds: selects only patterns; {resolved.requested} has kinds of its own, and all of them are redacted"
        )
        planned = planned.with_warnings(message)
    return call, planned


def _further(inference: Inference, call: Call, first: Resolved, rules: RedactionRules) -> list[Resolved]:
    """Return the models of the field `models`. Raises SIEError."""
    models = [first]
    for number, name in enumerate(rules.models):
        with fields.named(model=f"models[{number}]"):
            resolved = checked(inference.resolve(name, call, CAN["redact"]), "redact")
        if resolved.canonical in [model.canonical for model in models]:
            raise InvalidInput.at(f"models[{number}]", "expected another model, this model already reads the texts")
        models.append(resolved)
    return models[1:]


def _rules(body: Mapping[str, Any]) -> tuple[RedactionRules, dict[str, Any]]:
    """Return the fields that only this route has, and the body without these fields, as parameters of the extract
    request. The fields may be at the top of the body, in `params` or in `options`. Raises InvalidInput.
    """
    params = {} if body.get("params") is None else body["params"]
    if not isinstance(params, dict):
        raise bad("params", params, "a map or null")
    levels = [level for level in (params, body, params.get("options"), body.get("options")) if isinstance(level, dict)]
    own = {name: level[name] for level in reversed(levels) for name in _OWN if level.get(name) is not None}
    for level in levels:
        if level.get("labels") is not None:
            raise bad("labels", level["labels"], "no labels: the field `kinds` replaces them")
        truncate = level.get("truncate")
        if truncate is not None and truncate is not False and not (isinstance(truncate, str) and truncate == "NONE"):
            raise bad("truncate", truncate, "NONE: a text is redacted whole or refused")
    return _read(own), _without({**body, "params": params}, _OWN)


def _without(level: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a copy of a map of parameters without the fields `names`, also in its maps `params` and `options`."""
    rest = {name: value for name, value in level.items() if name not in names}
    for inner in ("params", "options"):
        if isinstance(rest.get(inner), dict):
            rest[inner] = _without(rest[inner], names)
    return rest


def _read(own: Mapping[str, Any]) -> RedactionRules:
    style = cast(RedactionStyle, fields.choice(own, "style", _STYLES, "mask"))
    region = fields.text(own, "region") if "region" in own else ""
    if region and not is_region(region):
        raise bad("region", region, "an ISO 3166 code of two upper-case letters that has phone numbers")
    return RedactionRules(
        _names(own, "kinds", MAX_LABELS),
        style,
        _key(own, style),
        region,
        fields.choice(own, "offsets", _OFFSETS, "code_points"),
        fields.flag(own, "restorable", default=True),
        _names(own, "models", MAX_MODELS),
    )


def _names(own: Mapping[str, Any], name: str, most: int) -> tuple[str, ...]:
    if name not in own:
        return ()
    values = fields.inputs(own[name], name, most)
    for index, value in enumerate(values):
        if not isinstance(value, str) or not value.strip() or len(value) > MAX_NAME:
            raise bad(f"{name}[{index}]", value, f"a name of 1 to {MAX_NAME} characters")
        bodies.utf8(value, f"{name}[{index}]")
    return tuple(dict.fromkeys(values))


def _key(own: Mapping[str, Any], style: RedactionStyle) -> bytes:
    """Return the key of the style `hash`: the client's key, or a random key for this request. The key of other styles
    is empty. Raises InvalidInput.
    """
    if "key" not in own:
        return secrets.token_bytes(32) if style == "hash" else b""
    low, high = KEY_CHARACTERS
    if style != "hash":
        raise bad("key", own["key"], "none: only the style hash uses a key")
    if not isinstance(own["key"], str) or not low <= len(own["key"]) <= high:
        raise bad("key", own["key"], f"a string of {low} to {high} characters")
    return bodies.utf8(own["key"], "key").encode()


def _check_texts(items: Sequence[RequestItem]) -> None:
    for index, item in enumerate(items):
        path = f"items[{index}]"
        if item.text is None or item.modalities:
            message = "expected a text and nothing else, only texts are redacted"
            raise InvalidInput.at(path, message, reason="unsupported_modality")
        if len(item.text) > MAX_TEXT:
            message = f"the text has {len(item.text)} code points, at most {MAX_TEXT} are redacted"
            raise InvalidInput.at(f"{path}.text", message, reason="too_long", extras={"limit": MAX_TEXT})


async def _slots(
    call: Call, results: Sequence[RequestResult], rules: RedactionRules, one_thread: KeyTurns | None
) -> AsyncIterator[dict[str, Any]]:
    """Yield the slot (reply entry) of each text. If a model failed on a text, the slot has the error and no text. The
    first of `results` includes the failures of all models. With `one_thread`, that thread redacts the texts, else the
    event loop. Raises GatewayTimeout, and the errors of `_model_spans`.
    """
    until_s = call.received_s + call.budget_s
    for index, item in enumerate(results[0].request.items):
        outcomes = [result.outcomes[index][1] for result in results]
        extracted = reply.extract_slot(index, item, outcomes[0])
        slot = {name: value for name, value in extracted.items() if name in _SHARED}
        if "error" not in slot:
            assert item.text is not None, "checked before the run"
            tokens = sum(outcome.tokens for outcome in outcomes if isinstance(outcome, Ok))
            slot["usage"] |= {"prompt_tokens": tokens, "total_tokens": tokens}
            work = partial(_redacted, item.text, outcomes, f"items[{index}]", rules)
            try:
                async with asyncio.timeout(until_s - time.perf_counter()):
                    slot |= work() if one_thread is None else await _aside(call.grant.key, work, one_thread)
            except TimeoutError as error:
                message = f"the texts were not redacted within the budget of {call.budget_s:g} s"
                raise GatewayTimeout(message) from error
        yield slot


async def _aside(key: str, work: Callable[[Proceed], dict[str, Any]], one_thread: KeyTurns) -> dict[str, Any]:
    """Run `work` in a thread. If the caller is cancelled, because the time of the request is over or its client has
    left, `work` ends soon, and the thread is free for others.
    """
    is_over = threading.Event()

    def proceed() -> None:
        if is_over.is_set():
            raise InterruptedError

    try:
        return await one_thread.run(key, partial(work, proceed))
    finally:
        is_over.set()


def _redacted(
    text: str, outcomes: Sequence[Outcome], path: str, rules: RedactionRules, proceed: Proceed = lambda: None
) -> dict[str, Any]:
    """Return the fields of a text's slot. `outcomes`: one for each model. Raises the errors of `_model_spans` and of
    `proceed`.
    """
    spans = [span for outcome in outcomes for span in _model_spans(text, outcome, path)]
    # each span includes the combining marks after it
    spans = disjoint(with_marks(text, span) for span in (*spans, *_pattern_spans(text, rules, proceed)))
    new_text, parts = redacted(text, spans, Replacer(rules.style, rules.key))
    places = [place for span in spans for place in (span.start, span.end)]
    new_places = [place for part in parts for place in (part.start, part.end)]
    length = len(new_text)
    if rules.offsets == "utf16":
        places = utf16_offsets(text, places)
        *new_places, length = utf16_offsets(new_text, [*new_places, length])
    slot: dict[str, Any] = {
        "text": new_text,
        "spans": [
            {"start": start, "end": end, "kind": span.kind, "score": span.score, "source": span.source}
            for span, start, end in zip(spans, places[::2], places[1::2], strict=True)
        ],
    }
    if rules.restorable:
        listed = [
            {"start": start, "end": end, "replacement": part.replacement, "text": part.value}
            for part, start, end in zip(parts, new_places[::2], new_places[1::2], strict=True)
        ]
        slot["map"] = {"offsets": rules.offsets, "length": length, "parts": listed}
    return slot


def _pattern_spans(text: str, rules: RedactionRules, proceed: Proceed) -> Iterator[SensitiveSpan]:
    for name, start, end in ranges_of(text, rules.patterns, rules.region, proceed):
        yield SensitiveSpan(start, end, rules.patterns[name], None, "pattern")


def _model_spans(text: str, outcome: Outcome, path: str) -> list[SensitiveSpan]:
    """Return the parts of a text that are entities of the model. `path`: place of the text in the body.

    Raises InvalidInput if the model did not read the whole text. Raises InferenceFailed if the model returned no list
    of entities, or an entity without valid offsets, which could not be replaced.
    """
    if not isinstance(outcome, Ok) or "entities" not in (outcome.data or {}):
        raise InferenceFailed("the model returned no list of entities")
    if outcome.truncated:
        raise InvalidInput.at(path, "the text is longer than the model can read: split it", reason="input_too_long")
    spans = []
    for entity in (outcome.data or {})["entities"]:
        start, end = entity.get("start"), entity.get("end")
        if type(start) is not int or type(end) is not int or not 0 <= start <= end <= len(text):
            raise InferenceFailed(
                "the model returned an entity without valid positions, so the text cannot be redacted"
            )
        if start < end:
            spans.append(SensitiveSpan(start, end, entity["label"], entity["score"], "model"))
    return spans


# the first redaction imports it, because it takes 10 MB; without it this package adds nothing
if importlib.util.find_spec("phonenumbers") is None:
    raise ModuleNotFoundError("phonenumbers is not installed", name="phonenumbers")
PLUGIN = Plugin(routes=(native.route("redact", redact, "Texts without personal data", Redact, Redacted),))
