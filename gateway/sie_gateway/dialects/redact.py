"""`POST /v1/redact/{model}`: texts without personal data, in the native format. The entities are those that an extract
request to the model returns. `redaction/` has the patterns, the rule for overlaps and the replacements.

A text that the model cannot read to its end is refused: the part that it did not read would pass unredacted.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast, get_args

from sie_contracts.api.inference import Offsets, RedactionStyle
from sie_contracts.errors import GatewayTimeout, InferenceFailed, InvalidInput
from sie_contracts.models.entries import ModelEntry, needs_labels
from sie_contracts.models.options import MAX_LABELS
from sie_contracts.wire.messages import Ok
from sie_gateway.dialects import fields
from sie_gateway.dialects.selection import able
from sie_gateway.inference import body as bodies
from sie_gateway.inference import reply
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import Call, EncodedReply, InferRequest, beside, decode_body
from sie_gateway.inference.results import RequestResult
from sie_gateway.redaction.patterns import KINDS, is_region, pattern_of, ranges_of
from sie_gateway.redaction.replacements import Replacer, redacted
from sie_gateway.redaction.spans import SensitiveSpan, disjoint, utf16_offsets, with_marks

if TYPE_CHECKING:
    from sie_gateway.inference.handler import Inference

MAX_TEXT = 1 << 18  # largest number of code points of a text; the slowest pattern takes 4 s for such a text
MAX_KIND = 1000  # largest number of characters in the name of a kind of personal data
KEY_CHARACTERS = (16, 1024)  # shortest and longest key: a shorter one could be guessed, and with it the values
_ASIDE = 1 << 13  # number of code points: if the texts of a request have more, they are redacted in a thread
_CODE_POINTS_PER_VALUE = 20  # number of code points that take as long to write in a reply as one number
_OWN = ("kinds", "style", "key", "region", "offsets", "restorable")
_SHARED = ("id", "metadata", "error", "usage")  # fields of a slot that an extract and a redaction have in common
_STYLES: tuple[str, ...] = get_args(RedactionStyle)
_OFFSETS: tuple[str, ...] = get_args(Offsets)


@dataclass(frozen=True)
class RedactionRules:
    """Fields of the body that only this route has. `kinds` is empty if the client names none. `region`: the region of
    national phone numbers. `restorable`: the reply has a map of the replaced values.
    """

    kinds: tuple[str, ...]
    style: RedactionStyle
    key: bytes = field(repr=False)
    region: str
    offsets: str
    restorable: bool = True

    @cached_property
    def patterns(self) -> Mapping[str, str]:
        """Return the kind that the reply shows, by the pattern to look for: the client's first kind for it."""
        if not self.kinds:
            return {name: name for name in KINDS}
        return {name: kind for kind in reversed(self.kinds) if (name := pattern_of(kind))}


async def redact(inference: Inference, call: Call, raw: bytes) -> EncodedReply:
    """Answer `POST /v1/redact/{model}`."""
    is_msgpack = "msgpack" in call.headers.get("content-type", "").lower()
    body = await decode_body(call, raw, msgpack=is_msgpack)
    resolved = able(inference, call, "redact")
    rules, parameters = _rules(body, resolved.entry)
    items = await beside(raw, lambda: bodies.items(body, limit=inference.max_items(call)))
    _check_texts(items)
    with fields.named(labels="kinds"):
        planned = inference.understand(call, InferRequest("extract", resolved, items, parameters))
    warnings = bodies.ignored(items, None)
    if rules.kinds and not needs_labels(resolved.entry):
        message = (
            f"kinds: chooses patterns only, {resolved.requested} has kinds of its own and all of them are redacted"
        )
        warnings = (message, *warnings)
    finished = await inference.execute(call, planned.with_warnings(*warnings))
    finished.check()
    began_s = time.perf_counter()
    size = sum(len(item.text or "") for item in items)
    one_thread = inference.one_thread if size >= _ASIDE else None
    content = {
        "model": resolved.requested,
        "items": [slot async for slot in _slots(call, finished, rules, one_thread)],
        **finished.shared(explain=call.explains),
    }
    format_ = reply.requested_format(call.headers.get("accept", ""), body_is_msgpack=is_msgpack)
    values = finished.values + size // _CODE_POINTS_PER_VALUE
    late = finished.late(call.received_s, began_s)
    data, content_type = reply.body_of(content, values, msgpack=format_ == "msgpack", late=late)
    return EncodedReply(data, content_type, finished.headers(finished.reported_times))


def _rules(body: Mapping[str, Any], entry: ModelEntry) -> tuple[RedactionRules, dict[str, Any]]:
    """Return the fields of this route, and the parameters of the extract. Fields may be at the same levels as the
    parameters of an extract. Raises InvalidInput.
    """
    params = {} if body.get("params") is None else body["params"]
    if not isinstance(params, dict):
        raise fields.refused("params", params, "a map or null")
    levels = [level for level in (params, body, params.get("options"), body.get("options")) if isinstance(level, dict)]
    own = {name: level[name] for level in reversed(levels) for name in _OWN if level.get(name) is not None}
    for level in levels:
        if level.get("labels") is not None:
            raise fields.refused("labels", level["labels"], "kinds in their place")
        truncate = level.get("truncate")
        if truncate is not None and truncate is not False and not (isinstance(truncate, str) and truncate == "NONE"):
            raise fields.refused("truncate", truncate, "NONE: a text is redacted whole or refused")
    rules = _read(own)
    of_model = _without_own(body)
    labels = list(rules.kinds) if needs_labels(entry) else None
    of_model["params"] = {**_without_own(params), "labels": labels, "truncate": "NONE"}
    return rules, of_model


def _without_own(level: Mapping[str, Any]) -> dict[str, Any]:
    """Return `level` (a map of parameters), and the options in it, without the fields of this route."""
    rest = {name: value for name, value in level.items() if name not in _OWN}
    if isinstance(options := rest.get("options"), dict):
        rest["options"] = _without_own(options)
    return rest


def _read(own: Mapping[str, Any]) -> RedactionRules:
    style = cast(RedactionStyle, fields.choice(own, "style", _STYLES, "mask"))
    region = fields.text(own, "region") if "region" in own else ""
    if region and not is_region(region):
        raise fields.refused("region", region, "an ISO 3166 code of two upper-case letters that has phone numbers")
    return RedactionRules(
        _kinds(own.get("kinds")),
        style,
        _key(own, style),
        region,
        fields.choice(own, "offsets", _OFFSETS, "code_points"),
        fields.flag(own, "restorable", default=True),
    )


def _kinds(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    kinds = fields.inputs(value, "kinds", MAX_LABELS)
    for index, kind in enumerate(kinds):
        if not isinstance(kind, str) or not kind.strip() or len(kind) > MAX_KIND:
            raise fields.refused(f"kinds[{index}]", kind, f"a name of 1 to {MAX_KIND} characters")
        bodies.utf8(kind, f"kinds[{index}]")
    return tuple(dict.fromkeys(kinds))


def _key(own: Mapping[str, Any], style: RedactionStyle) -> bytes:
    """Return the key of the style `hash`: the client's key, or a key that exists for this request only."""
    if "key" not in own:
        return secrets.token_bytes(32) if style == "hash" else b""
    low, high = KEY_CHARACTERS
    if style != "hash":
        raise fields.refused("key", own["key"], "none: only the style hash reads it")
    if not isinstance(own["key"], str) or not low <= len(own["key"]) <= high:
        raise fields.refused("key", own["key"], f"a string of {low} to {high} characters")
    return bodies.utf8(own["key"], "key").encode()


def _check_texts(items: Sequence[RequestItem]) -> None:
    for index, item in enumerate(items):
        path = f"items[{index}]"
        if item.text is None or item.modalities:
            message = f"{path}: expected a text and nothing else, only texts are redacted"
            raise InvalidInput(message, reason="unsupported_modality", param=path)
        if len(item.text) > MAX_TEXT:
            message = f"{path}.text: it has {len(item.text)} code points, at most {MAX_TEXT} are redacted"
            raise InvalidInput(message, reason="too_long", param=f"{path}.text", extras={"limit": MAX_TEXT})


async def _slots(
    call: Call, finished: RequestResult, rules: RedactionRules, one_thread: asyncio.Lock | None
) -> AsyncIterator[dict[str, Any]]:
    """Yield the slot of each text. A text that failed has its error and no text. With `one_thread`, texts are redacted
    in a thread while the lock is held. Raises GatewayTimeout.
    """
    until_s = call.received_s + call.budget_s
    for index, (item, (_, outcome)) in enumerate(zip(finished.request.items, finished.outcomes, strict=True)):
        extracted = reply.extract_slot(index, item, outcome)
        slot = {name: value for name, value in extracted.items() if name in _SHARED}
        if "error" not in slot:
            assert item.text is not None, "checked before the run"
            if not isinstance(outcome, Ok) or "entities" not in (outcome.data or {}):
                raise InferenceFailed("the model returned no list of entities")
            if extracted["usage"]["truncated"]:
                message = f"items[{index}]: longer than the model reads, so it cannot be redacted"
                raise InvalidInput(message, reason="input_too_long", param=f"items[{index}]")
            work = partial(_redacted, item.text, extracted["entities"], rules)
            try:
                async with asyncio.timeout(until_s - time.perf_counter()):
                    slot |= work() if one_thread is None else await _aside(work, one_thread)
            except TimeoutError as error:
                message = f"the texts were not redacted within the budget of {call.budget_s:g} s"
                raise GatewayTimeout(message) from error
        yield slot


async def _aside(work: Callable[[], dict[str, Any]], one_thread: asyncio.Lock) -> dict[str, Any]:
    """Run `work` in a thread. The lock is held until the thread has ended, even if the caller is cancelled."""
    await one_thread.acquire()
    thread = asyncio.get_running_loop().run_in_executor(None, work)
    thread.add_done_callback(lambda _: one_thread.release())
    return await asyncio.shield(thread)


def _redacted(text: str, entities: Sequence[Mapping[str, Any]], rules: RedactionRules) -> dict[str, Any]:
    spans = disjoint(with_marks(text, span) for span in _spans(text, entities, rules))
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


def _spans(text: str, entities: Sequence[Mapping[str, Any]], rules: RedactionRules) -> Iterator[SensitiveSpan]:
    """Yield the spans (ranges of the text to replace) of the model and of the patterns. Raises InferenceFailed for an
    entity without a place in the text: it cannot be replaced.
    """
    for entity in entities:
        start, end = entity["start"], entity["end"]
        if type(start) is not int or type(end) is not int or not 0 <= start <= end <= len(text):
            raise InferenceFailed(
                "the model returned an entity without valid positions, so the text cannot be redacted"
            )
        if start < end:
            yield SensitiveSpan(start, end, entity["label"], entity["score"], "model")
    for name, kind in rules.patterns.items():
        for start, end in ranges_of(text, name, rules.region):
            yield SensitiveSpan(start, end, kind, None, "pattern")
