"""Plans (see `core`) for encode, score, extract and redact. A plan splits a list into parts, sends each part as one
request, and joins the replies.

    items ──part by part: files read, sizes summed──► requests, some at a time ──► replies ──► results in input order

Only the parts that are being sent are in memory as request bodies.
"""

from __future__ import annotations

import difflib
import itertools
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie_client import wire
from sie_client.core import (
    BlockingWork,
    HttpAnswer,
    Patience,
    Plan,
    Received,
    Send,
    Session,
    Together,
    call,
    quoted,
    reading,
)
from sie_client.errors import SIEError, invalid
from sie_client.types import (
    EncodeParams,
    EncodeResult,
    ExtractParams,
    Item,
    Params,
    PrintableResult,
    Ranked,
    RedactOptions,
    RedactResult,
    RestoreMap,
    Results,
    ScoreResult,
)

MAX_ITEMS = 2048
PART_BYTES = 32 << 20  # largest number of bytes of one request body: a third of what the server accepts by default
ASIDE_BYTES = 1 << 20  # the asyncio client encodes or decodes a body of at least this number of bytes in a thread
ASIDE_ITEMS = 256
_KEY_BYTES = 32
# unit of offsets -> encoding of a text, and number of bytes of one unit in this encoding
_ENCODINGS = {"code_points": ("utf-32-le", 4), "utf16": ("utf-16-le", 2)}
GROWTH = 1.25  # growth factor of an array of vectors whose final number is unknown
_SHARED = ("model", "timing", "usage", "fingerprint")
_OPTIONAL = ("muvera", "warnings", "explain")


class _ListPart(NamedTuple):
    """Part of a list of items, in the form for one request. `start`: position of its first item in the whole list."""

    start: int
    items: list[Any]
    size_bytes: int


class _PartReply(NamedTuple):
    """Reply to the part that begins at `start`. `shared`: fields that every result of the part gets."""

    start: int
    body: dict[str, Any]
    shared: dict[str, Any]


@dataclass(frozen=True)
class _VerbRequest:
    """Request of a call, without its items. `fixed`: body fields that all parts have. `answers`: name of the list in a
    reply, `items` or `scores`.
    """

    path: str
    fixed: Mapping[str, Any]
    session: Session
    decode: Callable[[bytes], dict[str, Any]]
    answers: str
    patience: Patience = field(default_factory=Patience)

    def send(self, part: _ListPart, *, by_place: bool) -> Plan[_PartReply]:
        """Send one part and return its reply. `by_place`: items get their positions in the whole list as ids."""
        count = len(part.items)
        subject = f"items[{part.start}] to items[{part.start + count - 1}], the query or a parameter"
        sent: list[Any] = part.items
        if by_place:
            sent = [
                {**wire.mapped(item, subject), "id": str(part.start + number)} for number, item in enumerate(part.items)
            ]
        body = yield from _aside(lambda: wire.encode({"items": sent, **self.fixed}, subject), part.size_bytes)
        sent = []
        part.items.clear()  # free memory: the encoded body has a copy of the items
        headers = {
            **self.session.sent_headers(),
            "accept": "application/msgpack",
            "content-type": "application/msgpack",
        }
        request = Send("POST", self.path, headers, body, self.session.within_s, self.session.hedge_after_s)
        try:
            answer = yield from call(request, self.session, self.patience)
        except SIEError as error:
            _place(error, part.start)
            raise
        reply = yield from _aside(lambda: self.read(part.start, count, answer), len(answer.body))
        yield HttpAnswer(count)
        return cast(_PartReply, reply)

    def send_one_of_several(self, part: _ListPart, *, by_place: bool) -> Plan[_PartReply | SIEError]:
        """Send one part. If all its items failed, return the error and do not raise it: other parts may succeed."""
        count = len(part.items)
        try:
            return (yield from self.send(part, by_place=by_place))
        except SIEError as error:
            failures = error.details.get("errors") or ()
            places = [failure.get("index") for failure in failures if isinstance(failure, dict)]
            fails = self.fixed["params"].get("on_item_error") == "fail"
            if fails or places != list(range(part.start, part.start + count)):
                raise
            yield HttpAnswer(count)
            return error

    def read(self, start: int, count: int, answer: Received) -> _PartReply:
        with reading(answer.headers):
            body = self.decode(answer.body)
            if len(body[self.answers]) != count:
                raise ValueError(f"{self.answers}: expected {count} entries, got {len(body[self.answers])}")
            shared = {name: body[name] for name in _SHARED} | {name: body[name] for name in _OPTIONAL if name in body}
            headers = dict(answer.headers)
            self.session.warnings.warn(body.get("warnings"))
            return _PartReply(
                start, body, {**shared, "request_id": headers.get("x-sie-request-id", ""), "headers": headers}
            )


def _aside(function: Callable[[], Any], size_bytes: int) -> Plan[Any]:
    """Call a function and return its result. If `size_bytes`, the size of the data that the function encodes or
    decodes, is at least ASIDE_BYTES, the asyncio client calls the function in a thread.
    """
    if size_bytes >= ASIDE_BYTES:
        return (yield BlockingWork(function))
    return function()


def _parts(items: Iterable[Any], session: Session, each_tokens: int) -> Iterator[_ListPart]:
    """Yield a list in parts; an empty list gives one part without items. `each_tokens`: tokens that the server adds to
    each item, for example the tokens of the query.
    """
    start, held, tokens, size = 0, list[Any](), 0, 0
    for index, item in enumerate(items):
        sent = wire.item(item, f"items[{index}]")
        own_tokens, own_bytes = wire.weight(sent)
        own_tokens += each_tokens
        if held and (
            len(held) == MAX_ITEMS or tokens + own_tokens > session.part_tokens or size + own_bytes > PART_BYTES
        ):
            yield _ListPart(start, held, size)
            start, held, tokens, size = index, [], 0, 0
        held.append(sent)
        tokens += own_tokens
        size += own_bytes
    yield _ListPart(start, held, size)


def _send_parts(
    verb: str,
    model: str,
    items: Sequence[Any],
    fixed: Mapping[str, Any],
    session: Session,
    decode: Callable[[bytes], dict[str, Any]],
    answers: str = "items",
    each_tokens: int = 0,
) -> Plan[list[_PartReply]]:
    request = _VerbRequest(f"/v1/{verb}/{quoted(model, 'model')}", fixed, session, decode, answers)
    parts = _parts(items, session, each_tokens)
    is_long = len(items) >= ASIDE_ITEMS or any(map(wire.has_files, items))
    first = yield from _aside(lambda: next(parts), ASIDE_BYTES if is_long else 0)
    if len(first.items) == len(items):
        return [(yield from request.send(first, by_place=False))]
    # score: a reply is sorted by score, and ids of items may be equal, so the items' positions are sent as ids
    plans = (request.send_one_of_several(part, by_place=verb == "score") for part in itertools.chain([first], parts))
    outcomes: list[_PartReply | SIEError] = yield Together(plans, session.concurrency)
    replies = [outcome for outcome in outcomes if isinstance(outcome, _PartReply)]
    if not replies:
        raise cast(SIEError, outcomes[0])
    with reading(replies[-1].shared["headers"]):
        usage = _summed(replies)
    replies += [_failed_part(verb, error, items, replies[-1]) for error in outcomes if isinstance(error, SIEError)]
    for reply in replies:
        reply.shared["usage"] = usage
    return sorted(replies, key=lambda reply: reply.start)


def _failed_part(verb: str, error: SIEError, items: Sequence[Any], good: _PartReply) -> _PartReply:
    """Return a reply for a part whose items all failed. Its results look like the results of failed items in a reply
    that also has successful items. `good`: reply to another part, from which the model and its fingerprint are copied.
    """
    slots = []
    for failure in error.details["errors"]:
        place = failure["index"]
        slot = {name: value for name, value in failure.items() if name not in ("index", "id")}
        slot = {"error": slot, "usage": {"prompt_tokens": 0, "total_tokens": 0, "truncated": False}}
        own = {} if isinstance(items[place], str) else items[place]
        echoed = ("metadata",) if verb == "score" else ("id", "metadata")
        slot |= {name: own[name] for name in echoed if own.get(name) is not None}
        if verb == "encode":
            slot["outputs"] = {}
        elif verb == "extract":
            slot |= {"entities": [], "relations": [], "classifications": [], "objects": [], "data": {}}
        elif verb == "score":
            slot |= {"item_id": str(place), "score": None}
        slots.append(slot)
    shared = {name: good.shared[name] for name in ("model", "fingerprint")}
    body = {"scores" if verb == "score" else "items": slots}
    return _PartReply(
        error.details["errors"][0]["index"],
        body,
        {**shared, "timing": {}, "request_id": error.request_id, "headers": {}},
    )


def _of_items(replies: Sequence[_PartReply], items: Sequence[Item | str], *, named: bool) -> Results[Any]:
    """Return a result for each item: the fields of its entry in the reply, and the fields that all results of the reply
    share. With `named`, each result gets the id of its item.
    """
    results: Results[Any] = Results(usage=replies[-1].shared["usage"])
    for reply in replies:
        shared = {name: value for name, value in reply.shared.items() if name != "usage"}
        results += [PrintableResult(shared | slot) for slot in reply.body["items"]]
    if named:
        for place, result in enumerate(results):
            result["id"] = _id_of(items, place)
    return results


def _check_names(verb: str, params: Mapping[str, Any]) -> None:
    """Raise TypeError for a parameter that no model has, like Python for an unknown argument."""
    names = _PARAMS[verb]
    if params.keys() <= names:
        return
    # imported only here, because few calls need it: `known_fields` has the parameters of all model families
    from sie_contracts.models.options import known_fields

    for name in params:
        if name not in names and name not in known_fields():
            like = difflib.get_close_matches(name, sorted(names), 1, 0.5)
            suggestion = f"did you mean {like[0]}?" if like else "pass a parameter of your own model in options={...}"
            raise TypeError(f"{verb}() got an unexpected parameter {name!r}; {suggestion}")


_PARAMS = {
    "encode": EncodeParams.__annotations__.keys(),
    "score": Params.__annotations__.keys(),
    "extract": ExtractParams.__annotations__.keys(),
    "redact": RedactOptions.__annotations__.keys(),
}


def encode(
    model: str, items: Sequence[Item | str], params: Mapping[str, Any], session: Session
) -> Plan[Results[EncodeResult]]:
    if not items:
        return Results()
    session, params = session.for_call(params)
    _check_names("encode", params)
    items, params = _with_chunks(items, params)
    replies = yield from _send_parts("encode", model, items, {"params": params}, session, wire.decode_vectors)
    return _of_items(replies, items, named=False)


def _with_chunks(
    items: Sequence[Item | str], params: Mapping[str, Any]
) -> tuple[Sequence[Item | str], Mapping[str, Any]]:
    """Copy the parameters `chunks` and `context` into items without these fields. Return items and other parameters."""
    own = {name: params[name] for name in ("chunks", "context") if params.get(name) is not None}
    rest = {name: value for name, value in params.items() if name not in ("chunks", "context")}
    if not own:
        return items, rest
    mapped = (wire.mapped(item, f"items[{index}]") for index, item in enumerate(items))
    return [cast("Item", {**own, **item}) for item in mapped], rest


def embed(
    model: str, texts: Iterable[Item | str], count: int | None, params: Mapping[str, Any], session: Session
) -> Plan[NDArray[Any]]:
    """Return the dense vectors of texts as the rows of one array, in input order. `count`: number of texts; None for an
    iterator, which is read while earlier texts are sent. Raises SIEError if any text fails, and InvalidInputError for
    `chunks` and for integer vectors with a scale or an offset, because the array cannot have these values.
    """
    session, params = session.for_call({**params, "output_types": ["dense"], "on_item_error": "fail"})
    _check_names("encode", params)
    if params.get("chunks") is not None:
        raise invalid("chunks: embed returns only one vector for each text; call encode instead")
    path = f"/v1/encode/{quoted(model, 'model')}"
    request = _VerbRequest(path, {"params": params}, session, wire.decode_vectors, "items")
    rows = _VectorRows(count)
    plans = (rows.filled(request, part) for part in _parts(texts, session, 0) if part.items)
    yield Together(plans, session.concurrency)
    return rows.array()


class _VectorRows:
    """Array of vectors. Several threads may write parts of the array. If the number of rows is unknown, the array grows
    by `ndarray.resize`.
    """

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._whole: NDArray[Any] | None = None
        self._end = 0

    def filled(self, request: _VerbRequest, part: _ListPart) -> Plan[None]:
        reply = yield from request.send(part, by_place=False)
        with reading(reply.shared["headers"]), self._lock:
            if any({"scale", "offset"} & slot["outputs"]["dense"].keys() for slot in reply.body["items"]):
                raise invalid("output_dtype: embed cannot return the scale of these vectors; call encode instead")
            vectors = np.stack([slot["dense"] for slot in reply.body["items"]])
            end, shape = reply.start + len(vectors), vectors.shape[1:]
            if self._whole is None:
                self._whole = np.empty((self._count or end, *shape), vectors.dtype)
            if end > len(self._whole):
                self._whole.resize((max(end, int(GROWTH * len(self._whole))), *shape), refcheck=False)
            self._whole[reply.start : end] = vectors
            self._end = max(self._end, end)

    def array(self) -> NDArray[Any]:
        if self._whole is None:
            return np.empty((0, 0), np.float32)
        self._whole.resize((self._end, *self._whole.shape[1:]), refcheck=False)
        return self._whole


def score(
    model: str, query: Item | str, items: Sequence[Item | str], params: Mapping[str, Any], session: Session
) -> Plan[ScoreResult]:
    """Send `POST /v1/score/{model}`. Return the entries of all items together, best first, failed items last."""
    session, params = session.for_call(params)
    _check_names("score", params)
    sent = yield from _aside(lambda: wire.item(query, "query"), ASIDE_BYTES if wire.has_files(query) else 0)
    fixed = {"query": sent, "params": params}
    replies = yield from _send_parts("score", model, items, fixed, session, _scores, "scores", wire.weight(sent)[0])
    last = [reply for reply in replies if "model" in reply.body][-1]  # only failed parts lack `model`
    result = PrintableResult(last.body | last.shared)
    if len(replies) == 1:
        return cast(ScoreResult, result)
    with reading(last.shared["headers"]):
        result["scores"] = entries = [entry for reply in replies for entry in reply.body["scores"]]
        entries.sort(key=lambda entry: (entry["score"] is None, -(entry["score"] or 0.0), int(entry["item_id"])))
        for rank, entry in enumerate(entries):
            entry |= {"rank": rank, "item_id": _id_of(items, int(entry["item_id"]))}
    return cast(ScoreResult, result)


def rerank(
    model: str,
    query: Item | str,
    documents: Sequence[Item | str],
    top_n: int | None,
    params: Mapping[str, Any],
    session: Session,
) -> Plan[list[Ranked]]:
    """Return the `top_n` documents (None: all) with the best scores, and their positions. Raises SIEError if a document
    fails.
    """
    if top_n is not None and top_n < 1:
        raise invalid(f"top_n: expected a number of at least 1, got {top_n}")
    if not documents:
        return []
    by_place = [
        {**wire.mapped(document, f"documents[{place}]"), "id": str(place)} for place, document in enumerate(documents)
    ]
    options = {**params, "on_item_error": "fail"}
    result = yield from score(model, query, cast("list[Item]", by_place), options, session)
    with reading(result["headers"]):
        best = [(int(entry["item_id"]), entry["score"]) for entry in result["scores"] if entry["score"] is not None][
            :top_n
        ]
        return [{"index": place, "score": value, "document": documents[place]} for place, value in best]


def extract(
    model: str,
    items: Sequence[Item | str],
    params: Mapping[str, Any],
    session: Session,
    schema: type[Any] | None = None,
) -> Plan[Results[Any]]:
    """Send `POST /v1/extract/{model}`. Return the results in input order. `schema`: the class of `data`."""
    if not items:
        return Results()
    if schema is not None:
        if params.get("output_schema") is not None:
            raise invalid("schema: expected schema or output_schema, got both")
        params = {**params, "output_schema": _json_schema(schema)}
    session, params = session.for_call(params)
    _check_names("extract", params)
    replies = yield from _send_parts("extract", model, items, {"params": params}, session, _slots)
    results = _of_items(replies, items, named=True)
    if schema is not None:
        for place, result in enumerate(results):
            if "error" not in result:
                _make_instance(result, schema, place, fails=params.get("on_item_error") == "fail")
    return results


def _json_schema(schema: type[Any]) -> dict[str, Any]:
    if not isinstance(schema, type):
        message = f"schema: expected a class, got {type(schema).__name__}: pass a JSON Schema as output_schema"
        raise invalid(message, reason="schema")
    try:
        stated = _pydantic(schema).json_schema() if _is_of_pydantic(schema) else msgspec.json.schema(schema)
    except Exception as error:  # pydantic and msgspec raise many kinds of exceptions
        message = f"schema: {schema.__name__} has a field without a JSON Schema: {error}"
        raise invalid(message, reason="schema") from error
    return dict(_unrestricted(stated))


# keywords that only restrict a value: the model cannot obey them, and msgspec or pydantic checks the instances
_RESTRICTIONS = frozenset(
    {"format", "pattern", "minLength", "maxLength", "multipleOf", "minItems", "maxItems", "uniqueItems"}
)


def _unrestricted(schema: Any) -> Any:
    """Return a JSON Schema without the keywords that only restrict values."""
    if isinstance(schema, list):
        return [_unrestricted(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {}
    for keyword, value in schema.items():
        if keyword in ("properties", "$defs"):
            parts[keyword] = {name: _unrestricted(part) for name, part in value.items()}
        elif keyword not in _RESTRICTIONS:
            parts[keyword] = _unrestricted(value) if keyword in ("items", "anyOf", "oneOf") else value
    return parts


def _is_of_pydantic(schema: type[Any]) -> bool:
    return hasattr(schema, "__pydantic_core_schema__")  # models and dataclasses of pydantic


def _pydantic(schema: type[Any]) -> Any:
    # pydantic is no dependency of the client; a caller that passes a pydantic class has installed it
    from pydantic import TypeAdapter

    return TypeAdapter(schema)


def _make_instance(result: dict[str, Any], schema: type[Any], place: int, *, fails: bool) -> None:
    """Replace `data` by an instance of `schema`. If the values do not fit, set `error` of the result; with `fails`,
    raise InvalidInputError instead.
    """
    values = result.get("data")
    try:
        if _is_of_pydantic(schema):
            # as JSON, because a strict class accepts strings for dates and enums only in JSON
            result["data"] = _pydantic(schema).validate_json(msgspec.json.encode(values))
        else:
            result["data"] = msgspec.convert(values, schema)
    except Exception as fault:  # a validator or `__post_init__` of the class may raise any exception
        message = f"items[{place}]: its values do not fit {schema.__name__}: {type(fault).__name__}: {fault}"
        if fails:
            raise invalid(message) from fault
        result["error"] = {"code": "INVALID_INPUT", "message": message, "retryable": False}


def redact(
    model: str, items: Sequence[Item | str], kinds: Sequence[str] | None, params: Mapping[str, Any], session: Session
) -> Plan[Results[RedactResult]]:
    """Send `POST /v1/redact/{model}`. Return the results in input order. For the style `hash` without a `key`, all
    requests for `items` have the same random key, so that equal values get equal hashes.
    """
    if not items:
        return Results()
    session, params = session.for_call(params)
    _check_names("redact", params)
    if params.get("style") == "hash" and params.get("key") is None:
        params = {**params, "key": secrets.token_hex(_KEY_BYTES)}
    # no `list(kinds)`: it would split a string into letters; the server refuses a string
    sent = {"params": {**params, "kinds": kinds}}
    replies = yield from _send_parts("redact", model, items, sent, session, _slots)
    return _of_items(replies, items, named=True)


def restore(text: str, map: RestoreMap) -> str:
    """Return the text before its redaction. Raises InvalidInputError if `map` belongs to another text."""
    encoding, size = _ENCODINGS[map["offsets"]]
    data = text.encode(encoding)
    pieces: list[bytes] = []
    end = 0
    is_same = len(data) == size * map["length"]
    for part in map["parts"]:
        start, stop = size * part["start"], size * part["end"]
        is_same = is_same and end <= start and data[start:stop] == part["replacement"].encode(encoding)
        pieces += [data[end:start], part["text"].encode(encoding)]
        end = stop
    if not is_same:
        raise invalid("map: this map belongs to another text")
    return b"".join([*pieces, data[end:]]).decode(encoding)


def _scores(body: bytes) -> dict[str, Any]:
    """Decode a reply of score. Raises ValueError if an entry lacks the fields by which entries are sorted."""
    reply = wire.decode(body)
    for entry in reply["scores"]:
        if not isinstance(entry["item_id"], str) or not isinstance(entry["score"], int | float | None):
            raise ValueError("scores: expected entries with item_id and score")
    return reply


def _slots(body: bytes) -> dict[str, Any]:
    """Decode a reply of extract or redact. Raises ValueError if the result of an item is not a map."""
    reply = wire.decode(body)
    if not all(isinstance(slot, dict) for slot in reply["items"]):
        raise ValueError("items: expected a list of maps")
    return reply


def _id_of(items: Sequence[Item | str], place: int) -> str:
    own = None if isinstance(item := items[place], str) else item.get("id")
    return f"item-{place}" if own is None else own


def _summed(replies: Sequence[_PartReply]) -> dict[str, Any]:
    """Return the usage of a whole call: the sums over the usages of its parts."""
    usages = [(reply.start, reply.body["usage"]) for reply in replies]
    usage: dict[str, Any] = {
        name: sum(usage.get(name, 0) for _, usage in usages) for name in ("prompt_tokens", "total_tokens")
    }
    for name in ("images", "cached_items", "cached_tokens"):
        if any(name in part for _, part in usages):
            usage[name] = sum(part.get(name, 0) for _, part in usages)
    usage["truncated_items"] = [start + index for start, usage in usages for index in usage.get("truncated_items", ())]
    return usage


_PATH = re.compile(r"\bitems\[(\d+)\]")


def _place(error: SIEError, start: int) -> None:
    """Change the item positions in an error about a part to positions in the whole list, by adding `start`."""

    def moved(text: Any) -> str:
        return _PATH.sub(lambda match: f"items[{start + int(match[1])}]", str(text))

    if not start:
        return
    error.args = (moved(error), *error.args[1:])
    for details in (
        error.details,
        *(document for document in error.details.get("errors") or () if isinstance(document, dict)),
    ):
        details |= {name: moved(details[name]) for name in ("param", "message") if details.get(name) is not None}
        if isinstance(details.get("index"), int):
            details["index"] += start
