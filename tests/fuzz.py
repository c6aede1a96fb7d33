"""Bodies that nobody should send: valid ones of each route, bent. One seed is one sequence of bodies.

    valid body ──► a value somewhere becomes another, or goes, or is doubled ──► JSON or msgpack ──► some bytes flipped, cut, added
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from sie_contracts import arrays

MODEL = "toy/one"
_ARRAY = arrays.pack(np.zeros((2, 8), np.float32))
VALID: dict[str, Any] = {
    f"/v1/encode/{MODEL}": {
        "items": [{"id": "a", "text": "b", "metadata": {"c": [1, 2.5, None]}}, "plain"],
        "params": {"output_types": ["dense"], "output_dtype": "float32", "is_query": True, "truncate": "END", "dimensions": None,
                   "options": {"timing": "items"}},
    },
    f"/v1/score/{MODEL}": {"query": {"text": "a"}, "items": [{"text": "b", "multivector": _ARRAY}], "options": {"score_mode": "dense"}},
    f"/v1/extract/{MODEL}": {"items": ["a"], "params": {"labels": ["b", "c"], "threshold": 0.5, "output_schema": {"type": "object"}}},
    "/v1/embeddings": {"model": MODEL, "input": ["a", "b"], "encoding_format": "base64", "dimensions": 8, "user": "u"},
    "/embeddings": {"model": MODEL, "input": [[1, 2, 3], [4]], "encoding_format": "float"},
    "/v1/rerank": {"model": MODEL, "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True, "priority": 3},
    "/v2/embed": {"model": MODEL, "input_type": "search_query", "texts": ["a"], "embedding_types": ["float", "int8", "base64"]},
    "/rerank": {"query": "a", "texts": ["b"], "raw_scores": True, "truncate": True, "truncation_direction": "left"},
    "/embed": {"inputs": ["a", [1, 2]], "normalize": True, "truncate": None},
    "/predict": {"inputs": [["a"], ["a", "b"]], "raw_scores": False},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {"truncate": True}},
    "/tokenize": {"inputs": ["a"], "add_special_tokens": False},
    "/decode": {"ids": [[1, 2], [3]], "skip_special_tokens": True},
    "/classify": {"model": MODEL, "input": ["a"], "raw_scores": True},
}  # fmt: skip
_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, -(2**63), 2**63, 1e308, -0.0, 0.5, "", "a", "\x00", "\ud7ff", "\U0010ffff", "é" * 300, "../..",
    "%2e", "NaN", [], [[]], {}, {"": None}, {"nd": True}, {"nd": True, "type": "<f4", "shape": [2**40], "data": b"abcd"},
    {"nd": True, "type": "|O", "kind": b"O", "shape": [1], "data": b"\x80\x04."},
    {b"nd": True, b"type": "<f4", b"shape": [-1], b"data": b""},
    {"nd": False, "type": "<f8", "data": b"12345678"}, [None] * 70, "x" * 5000, b"\xff\xfe", ["a"] * 40, {"text": 1}, [1, "a", None, {}],
    "binary", "float16", "START", "http://127.0.0.1:1/", "data:image/png;base64,AAAA",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes


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
        headers = {"content-type": "application/msgpack" if as_msgpack else "application/json"}
        if chance.random() < 0.2:
            formats = ("application/msgpack", "application/octet-stream", "application/vnd.apache.arrow.stream", "x")
            headers["accept"] = chance.choice(formats)
        if chance.random() < 0.05:
            headers["x-sie-strict"] = "true"
        yield Case(path, headers, data)


def _bend(value: Any, chance: random.Random) -> None:
    """Change one thing somewhere below."""
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
            value[key] = copy.deepcopy(chance.choice(_ODD)) if chance.random() < 0.9 else _deep(chance.randrange(1, 200))
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


def _encoded(body: Any, as_msgpack: bool) -> bytes:
    if as_msgpack:
        try:
            return msgspec.msgpack.encode(body)
        except OverflowError:
            return b"\xc1"
    return json.dumps(body, default=repr, skipkeys=True).encode("utf-8", "surrogatepass")


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
