"""Invalid bodies, made from valid ones of each route. One seed gives one sequence of bodies.

    valid body ──► a value is replaced, removed or added ──► JSON or msgpack ──► some bytes are changed, cut or added

`everywhere` is not random: it puts each value that only msgpack has, and each invalid text, in each place and each
parameter.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from sie_contracts import arrays
from sie_contracts.models.options import known_fields

MODEL = "toy/one"
_ARRAY = arrays.pack(np.zeros((2, 8), np.float32))


def _ext(array: np.ndarray) -> msgspec.msgpack.Ext:
    """Return an array in the form of JavaScript clients."""
    head = f"{array.dtype.str}|{','.join(map(str, array.shape))}|".encode()
    return msgspec.msgpack.Ext(arrays.NUMPY_EXT, head + array.tobytes())


# Values that only msgpack has: extension types, arrays of no, one and several elements, times, bytes, keys that are no
# text.
ONLY_MSGPACK: tuple[Any, ...] = (
    _ext(np.float32(1.5).reshape(())),
    _ext(np.zeros(0, np.float32)),
    _ext(np.ones(1, np.int32)),
    _ext(np.arange(2, dtype=np.int32)),
    _ext(np.ones((2, 8), np.float32)),
    _ext(np.ones((2, 2, 2), np.float32)),
    arrays.pack(np.ones(2, np.int8)),
    arrays.pack(np.ones((2, 8), np.float32)),
    arrays.pack(np.zeros((0, 8), np.float32)),
    datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    msgspec.msgpack.Ext(5, b"x"),
    msgspec.msgpack.Ext(-1, b""),
    msgspec.msgpack.Ext(arrays.NUMPY_EXT, b"<f4|2|abc"),
    msgspec.msgpack.Ext(arrays.NUMPY_EXT, b""),
    b"",
    b"abc",
    b"\xff\xfe",
    [b"a", b"b"],
    {b"text": "a"},
    {b"\xff": 1},
    {1: 2},
    {None: 1},
    {True: "a"},
    {2.5: {}},
    [_ext(np.ones(2, np.float32)), _ext(np.ones(2, np.float32))],
    {"text": _ext(np.ones(2, np.float32))},
)
_NO_TEXT = "~no text~"  # a placeholder in JSON for bytes that are no valid text
NO_TEXT: tuple[bytes, ...] = (
    b'"\\ud800"',
    b'"a\\udc00b"',
    b'"\xff"',
    b'"\xed\xa0\x80"',
    b'"\xc0\xaf"',
    b'"\xf8\x88\x80\x80\x80"',
    b"NaN",
    b"\x00",
)
VALID: dict[str, Any] = {
    f"/v1/encode/{MODEL}": {
        "items": [
            {"id": "a", "text": "b", "metadata": {"c": [1, 2.5, None]}},
            "plain",
            {"images": ["aGVsbG8=", {"data": "aGVsbG8", "format": "png"}]},
            {"text": "abc", "chunks": [[0, 1], [1, 3]], "context": False},
            {"text": "abc", "chunks": {"max_tokens": 2, "overlap_tokens": 1, "boundary": "token", "min_tokens": 0}},
        ],
        "params": {
            "output_types": ["dense"],
            "output_dtype": "float32",
            "is_query": True,
            "truncate": "END",
            "dimensions": None,
            "options": {"timing": "items"},
        },
    },
    f"/v1/score/{MODEL}": {
        "query": {"text": "a"},
        "items": [{"text": "b", "multivector": _ARRAY}],
        "options": {"score_mode": "dense"},
    },
    f"/v1/extract/{MODEL}": {
        "items": ["a"],
        "params": {"labels": ["b", "c"], "threshold": 0.5, "output_schema": {"type": "object"}},
    },
    f"/v1/redact/{MODEL}": {
        "items": ["a"],
        "params": {"kinds": ["b", "iban"], "style": "hash", "key": "k" * 16, "region": "US", "offsets": "utf16"},
    },
    "/v1/embeddings": {"model": MODEL, "input": ["a", "b"], "encoding_format": "base64", "dimensions": 8, "user": "u"},
    "/embeddings": {"model": MODEL, "input": [[1, 2, 3], [4]], "encoding_format": "float"},
    "/v1/rerank": {
        "model": MODEL,
        "query": "a",
        "documents": ["b", {"text": "c"}],
        "top_n": 1,
        "return_documents": True,
        "priority": 3,
    },
    "/v2/rerank": {"model": MODEL, "query": "a", "documents": ["b", {"text": "c"}], "rank_fields": ["text"]},
    "/v1/classify": {"model": MODEL, "input": "a", "truncate": True},
    "/v2/embed": {
        "model": MODEL,
        "input_type": "search_query",
        "texts": ["a"],
        "embedding_types": ["float", "int8", "base64"],
    },
    "/v1/embed": {
        "model": MODEL,
        "inputs": [
            {
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                ]
            }
        ],
    },
    "/v1/contextualizedembeddings": {
        "model": MODEL,
        "inputs": [["a"], ["b"]],
        "input_type": "query",
        "output_dimension": 8,
        "output_dtype": "int8",
        "encoding_format": "base64",
        "enable_auto_chunking": False,
        "chunk_size": None,
        "chunk_overlap": None,
    },
    "/v1/ranking": {"model": MODEL, "query": {"text": "a"}, "passages": [{"text": "b"}, "c"], "truncate": "NONE"},
    "/v1/reranking": {
        "model": MODEL,
        "query": {"text": "a"},
        "passages": [{"text": "b"}],
        "truncate": "END",
        "top_n": 3,
    },
    "/reranking": {"model": MODEL, "query": "a", "input": ["b", "c"], "top_k": 2},
    "/api/rerank": {"model": MODEL, "query": "a", "documents": ["b", "c"], "top_n": 1},
    "/v1/score": {"model": MODEL, "text_1": "a", "text_2": ["b", "c"]},
    "/score": {"model": MODEL, "queries": "a", "documents": ["b"]},
    "/pooling": {"model": MODEL, "input": ["a", [1, 2]], "encoding_format": "float"},
    "/v1/multi-vector": {
        "model": MODEL,
        "input": ["a", {"text": "b"}],
        "embedding_type": "float",
        "input_type": "document",
    },
    "/rerank": {"query": "a", "texts": ["b"], "raw_scores": True, "truncate": True, "truncation_direction": "left"},
    "/embed": {"inputs": ["a", [1, 2]], "normalize": True, "truncate": None},
    "/embed_all": {"inputs": "a", "truncate": False},
    "/embed_sparse": {"inputs": ["a"], "truncation_direction": "right"},
    "/predict": {"inputs": [["a"], ["a", "b"]], "raw_scores": False},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {"truncate": True}},
    "/tokenize": {"inputs": ["a"], "add_special_tokens": False},
    "/decode": {"ids": [[1, 2], [3]], "skip_special_tokens": True},
    "/classify": {"model": MODEL, "input": ["a"], "raw_scores": True},
    "/api/embed": {
        "model": f"{MODEL}:latest",
        "input": ["a"],
        "truncate": False,
        "dimensions": 0,
        "options": {"num_ctx": 8},
        "keep_alive": "5m",
    },
    "/api/embeddings": {"model": MODEL, "prompt": "a", "options": None},
}
# the fields of valid forms: name, name of the file or an empty string, value
FORMS: dict[str, list[tuple[str, str, bytes]]] = {
    f"/v1/audio/{name}": [
        ("model", "", MODEL.encode()),
        ("file", "a.wav", b"RIFF\x24\x00\x00\x00WAVEfmt "),
        ("response_format", "", b"verbose_json"),
        ("temperature", "", b"0"),
        ("prompt", "", b"a"),
        *(() if name == "translations" else (("language", "", b"en"), ("timestamp_granularities[]", "", b"segment"))),
    ]
    for name in ("transcriptions", "translations")
}
_ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    -(2**63),
    2**63,
    1e308,
    -0.0,
    0.5,
    "",
    "a",
    "\x00",
    "\ud7ff",
    "\U0010ffff",
    "é" * 300,
    "../..",
    "%2e",
    "NaN",
    [],
    [[]],
    {},
    {"": None},
    {"nd": True},
    {"nd": True, "type": "<f4", "shape": [2**40], "data": b"abcd"},
    {"nd": True, "type": "|O", "kind": b"O", "shape": [1], "data": b"\x80\x04."},
    {b"nd": True, b"type": "<f4", b"shape": [-1], b"data": b""},
    {"nd": False, "type": "<f8", "data": b"12345678"},
    [None] * 70,
    "x" * 5000,
    b"\xff\xfe",
    ["a"] * 40,
    {"text": 1},
    [1, "a", None, {}],
    "binary",
    "float16",
    "START",
    "http://127.0.0.1:1/",
    "data:image/png;base64,AAAA",
    *ONLY_MSGPACK,
)


@dataclass(frozen=True)
class Case:
    """One request."""

    path: str
    headers: dict[str, str | bytes]
    body: bytes
    method: str = "POST"


def cases(seed: int, count: int) -> Iterator[Case]:
    chance = random.Random(seed)
    for _ in range(count):
        path = chance.choice(list(VALID))
        body = copy.deepcopy(VALID[path])
        for _ in range(chance.choice((0, 1, 1, 1, 2, 4))):
            _bend(body, chance)
        as_msgpack = chance.random() < 0.5
        data = _encoded(body, as_msgpack)
        for _ in range(chance.choice((0, 0, 0, 1, 3))):
            data = _damaged(data, chance)
        headers: dict[str, str | bytes] = {"content-type": "application/msgpack" if as_msgpack else "application/json"}
        if chance.random() < 0.2:
            formats = ("application/msgpack", "application/octet-stream", "application/vnd.apache.arrow.stream", "x")
            headers["accept"] = chance.choice(formats)
        if chance.random() < 0.05:
            headers["x-sie-strict"] = "true"
        yield Case(path, headers, data)


_ODD_FIELDS = (b"", b"\x00", b"\xff\xfe", b"x" * 5000, b'"', b"\r\n\r\n--b--", "é".encode() * 300, b"{}", b"NaN")


def forms(seed: int, count: int) -> Iterator[Case]:
    """Yield forms with missing, doubled or odd fields, and with damaged bytes."""
    chance = random.Random(seed)
    for _ in range(count):
        path = chance.choice(list(FORMS))
        fields = [(name.encode(), file.encode(), value) for name, file, value in FORMS[path]]
        for _ in range(chance.choice((0, 1, 1, 2, 4))):
            place = chance.randrange(len(fields))
            own = list(fields[place])
            match chance.randrange(3):
                case 0 if len(fields) > 1:
                    del fields[place]
                case 1:
                    fields.insert(place, fields[place])
                case _:
                    own[chance.randrange(3)] = chance.choice(_ODD_FIELDS)
                    fields[place] = (own[0], own[1], own[2])
        body = b"".join(
            b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
            % (name, b'; filename="%b"' % file if file else b"", value)
            for name, file, value in fields
        )
        body += b"--b--\r\n"
        for _ in range(chance.choice((0, 0, 0, 1, 3))):
            body = _damaged(body, chance)
        kinds = (*["multipart/form-data; boundary=b"] * 8, "multipart/form-data", "application/json", "x; boundary=b")
        yield Case(path, {"content-type": chance.choice(kinds)}, body)


def everywhere() -> Iterator[Case]:
    """Yield each odd value in each place of each valid body, and as each parameter at each level of parameters."""
    for path, body in VALID.items():
        for place in _places(body):
            yield from _with(path, body, place)
        for name in sorted({*known_fields(), "x"}):
            for level in ((), ("params",), ("options",), ("params", "options"))[
                : 4 if path.startswith("/v1/e") or "score" in path else 1
            ]:
                yield from _with(path, body, (*level, name))


def _places(value: Any) -> Iterator[tuple[Any, ...]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (key,)
        if isinstance(inner, dict | list):
            yield from ((key, *rest) for rest in _places(inner))


def _with(path: str, body: Any, place: tuple[Any, ...]) -> Iterator[Case]:
    for odd in ONLY_MSGPACK:
        yield packed(path, _put(body, place, odd))
    text = json.dumps(_put(body, place, _NO_TEXT), default=_shown, skipkeys=True).encode()
    for raw in NO_TEXT:
        yield Case(path, {"content-type": "application/json"}, text.replace(json.dumps(_NO_TEXT).encode(), raw))


def packed(path: str, body: Any) -> Case:
    return Case(path, {"content-type": "application/msgpack"}, msgspec.msgpack.encode(body))


def _put(body: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of `body` with another value at a place. Missing maps on the way are created."""
    changed_body = copy.deepcopy(body)
    here = changed_body
    for key in place[:-1]:
        if isinstance(here, dict) and not isinstance(here.get(key), dict | list):
            here[key] = {}
        here = here[key]
    here[place[-1]] = value
    return changed_body


def part(cases: Iterator[Case], every: int) -> Iterator[Case]:
    """Return each `every`th case."""
    return itertools.islice(cases, 0, None, every)


HEADERS = (
    "authorization",
    "content-type",
    "accept",
    "x-sie-machine-profile",
    "x-sie-pool",
    "x-sie-timeout-ms",
    "x-sie-priority",
    "x-sie-strict",
    "x-sie-on-item-error",
    "x-sie-explain",
    "x-sie-sdk-version",
    "x-sie-client-version",
    "x-sie-remote",
    "x-sie-route-key",
    "x-request-id",
    "traceparent",
    "tracestate",
    "if-match",
    "idempotency-key",
    "content-encoding",
    "user-agent",
    "accept-encoding",
    "expect",
)
ODD_HEADERS = (
    b"",
    b"\xff\xfe",
    "é".encode(),
    "\u2028".encode(),
    b"\xed\xa0\x80",
    b"a\tb",
    b"1e999",
    b"-1",
    b"nan",
    b"9" * 400,
    b"x" * 9000,
    b"*/*;q=\xff",
    b"application/msgpack",
    b"00-" + b"f" * 32 + b"-" + b"f" * 16 + b"-ff",
    "٣".encode(),
    b'W/"1"',
)


def requests() -> Iterator[Case]:
    """Yield odd headers at one route of each kind, and odd names and parameters in paths and queries."""
    body = json.dumps(VALID[f"/v1/encode/{MODEL}"]).encode()
    for name, odd in itertools.product(HEADERS, ODD_HEADERS):
        yield Case(f"/v1/encode/{MODEL}", {name: odd}, body)
        yield Case("/v1/models", {name: odd}, b"", "GET")
        yield Case("/v1/configs/resolve", {name: odd}, b'{"model": "toy/one"}')
    for odd_text in (
        "%ff",
        "%ed%a0%80",
        "%00",
        "%F0%9F%98%80",
        "%0d%0a",
        "%25",
        "+",
        "a" * 5000,
        "%C0%AF",
        "..",
        "%5B",
    ):
        for path in (
            "models/{}",
            "models?task={}",
            "models?output={}&loaded={}",
            "configs/models/{}",
            "configs/models/{}/status",
            "configs/bundles/{}",
            "pools/{}",
            "pools/assignments?worker={}",
            "scaling/{}",
            "{}",
        ):
            yield Case("/v1/" + path.format(odd_text, odd_text), {}, b"", "GET")
        for path in ("/v1/encode/{}", "/v1/score/{}", "/v1/extract/{}", "/tei/{}/embed", "/v1/pools/{}/renew"):
            yield Case(path.format(odd_text), {}, body)
        yield Case(f"/v1/pools/{odd_text}", {}, b"", "DELETE")
    for raw in (*NO_TEXT, b"", b"[]", b"1", b"{", b"null"):
        for pool in (
            b"%b",
            b'{"name": %b, "gpus": {"x": 1}}',
            b'{"name": "a", "gpus": %b}',
            b'{"name": "a", "gpus": {%b: 1}}',
        ):
            yield Case("/v1/pools", {}, pool % raw)


_WEIGHTS = b'{"hub": "a/b", "unpinned": true}'
_ENTRY = (
    b'{"id": "fuzz/one", "family": "text-encoder", "outputs": {"dense": 8}, "max_tokens": 8, "weights": %b}' % _WEIGHTS
)
_PARTS = (
    b'"fuzz/one"',
    b'"text-encoder"',
    b'{"dense": 8}',
    b"8,",
    b'"dense"',
    b'"a/b"',
    b'"hub"',
    b'"weights"',
    b"true",
    _WEIGHTS,
)
_KINDS = ("application/json", "application/yaml", "application/json; charset=utf-16")


def documents(authorization: str) -> Iterator[Case]:
    """Yield writes of configurations with invalid text in each place, and with bodies that are no document."""
    odd = (
        *NO_TEXT,
        b"",
        b"[]",
        b"1",
        b"null",
        b"{",
        b"!!python/object:os.system a",
        b"&a [*a]",
        b"2026-01-01",
        b"!!binary /w==",
        b".nan",
        b"? [a] : b",
        b"{1: 2}",
        b"{~: 1}",
        b"0x" + b"f" * 40,
        b"1e999",
    )
    bodies = [*odd]
    for old in _PARTS:
        bodies += [_ENTRY.replace(old, raw, 1) for raw in odd]
    for raw in odd:
        yield Case("/v1/configs/resolve", {"authorization": authorization}, raw)
        yield Case("/v1/configs/resolve", {"authorization": authorization}, b'{"model": %b}' % raw)
        yield Case("/v1/configs/resolve", {"authorization": authorization}, b'{"model": "toy/one", "bundle": %b}' % raw)
    for kind, body in itertools.product(_KINDS, bodies):
        headers: dict[str, str | bytes] = {"authorization": authorization, "content-type": kind}
        yield Case("/v1/configs/models?dry_run=true", headers, body)
        for method in ("PUT", "PATCH"):
            yield Case("/v1/configs/models/fuzz/one?dry_run=true", headers, body, method)
        yield Case("/v1/configs/models/fuzz/one/rollback?dry_run=true", headers, body)
    for name, value in itertools.product(("if-match", "idempotency-key", "accept", "content-type"), ODD_HEADERS):
        yield Case("/v1/configs/models?dry_run=true", {"authorization": authorization, name: value}, _ENTRY)


def _bend(value: Any, chance: random.Random) -> None:
    """Change, remove or add one value at a random depth."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            _grow(value, chance)
            return
        key = chance.choice(keys)
        if isinstance(value[key], dict | list) and chance.random() < 0.6:
            value = value[key]
            continue
        action = chance.random()
        if action < 0.7:
            value[key] = (
                copy.deepcopy(chance.choice(_ODD)) if chance.random() < 0.9 else _deep(chance.randrange(1, 200))
            )
        elif action < 0.85:
            del value[key]
        else:
            _grow(value, chance)
        return


def _grow(value: Any, chance: random.Random) -> None:
    odd = copy.deepcopy(chance.choice(_ODD))
    if isinstance(value, dict):
        value[chance.choice(("", "x", "options", "params", "model", "profile", "muvera", "lora_id", "pooling"))] = odd
    else:
        value.append(odd)


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def _shown(value: Any) -> str:
    """Return the text that replaces a value that JSON cannot hold."""
    return repr(value) if isinstance(value, bytes) else type(value).__name__


def _encoded(body: Any, as_msgpack: bool) -> bytes:
    if as_msgpack:
        try:
            return msgspec.msgpack.encode(body)
        except OverflowError:
            return b"\xc1"
    return json.dumps(body, default=_shown, skipkeys=True).encode("utf-8", "surrogatepass")


def _damaged(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data) + 1)
    match chance.randrange(4):
        case 0:
            return data[:place]
        case 1:
            return data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :]
        case 2:
            return data[:place] + chance.randbytes(chance.randrange(1, 9)) + data[place:]
        case _:
            return data[:place] + data[place // 2 :]
