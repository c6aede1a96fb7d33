"""`POST /v2/embed` as clients of Cohere write it: one run of the model, whose float32 vectors become every type that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import orjson

from sie_contracts.arrays import Array
from sie_contracts.catalogue import ModelEntry
from sie_contracts.errors import InvalidInput
from sie_contracts.runtime.http import Body
from sie_gateway import body as bodies
from sie_gateway import reply
from sie_gateway.body import Item
from sie_gateway.call import Answer, Asked, Call
from sie_gateway.dialects import fields
from sie_gateway.dialects.selection import model_for
from sie_gateway.finished import Finished
from sie_gateway.inference import Inference

INPUT_TYPES = ("search_query", "search_document", "classification", "clustering", "image")
EMBEDDING_TYPES = ("float", "int8", "uint8", "binary", "ubinary", "base64")


async def embed(inference: Inference, call: Call, raw: bytes) -> Answer:
    """`POST /v2/embed`."""
    body = bodies.decode(raw, msgpack=False)
    resolved = model_for(inference, call, "embed", body.get("model"))
    kind = fields.choice(body, "input_type", INPUT_TYPES, "")
    if not kind:
        raise fields.refused("input_type", None, f"one of {', '.join(INPUT_TYPES)}")
    name, items = _items(body, inference.max_items(call))
    types = _types(body)
    params: dict[str, Any] = {**_side(kind, resolved.entry), "output_types": ["dense"], "output_dtype": "float32"}
    params |= fields.parameters(body, "truncate", "normalize", "options")
    if (width := fields.whole(body, "output_dimension", 1)) is not None:
        params["dimensions"] = width
    if (most := fields.whole(body, "max_tokens", 1)) is not None:
        params["max_seq_length"] = min(most, resolved.entry.max_tokens)
    with fields.named(output_types="model", dimensions="output_dimension"):
        understood = inference.understand(call, Asked("encode", resolved, items, params, priority=fields.priority(body)))
    return _answer(call, await inference.execute(call, understood), name, types)


def _side(kind: str, entry: ModelEntry) -> dict[str, Any]:
    """The side of a search that the input is on, and the prompt that the model has for just this use."""
    is_query = kind == "search_query"
    prompt = entry.prompts.get(kind)
    return {"is_query": is_query, **({} if prompt is None else {"query_template" if is_query else "doc_template": prompt})}


def _types(body: fields.Body) -> list[str]:
    given = body.get("embedding_types")
    if given is None or given == []:
        return ["float"]
    if not isinstance(given, list):
        raise fields.refused("embedding_types", given, "a list")
    for index, each in enumerate(given):
        if not isinstance(each, str) or each not in EMBEDDING_TYPES:
            raise fields.refused(f"embedding_types[{index}]", each, f"one of {', '.join(EMBEDDING_TYPES)}", "unsupported_dtype")
    return list(dict.fromkeys(given))


def _items(body: fields.Body, limit: int) -> tuple[str, tuple[Item, ...]]:
    """The field that the inputs are in, and the inputs."""
    names = [name for name in ("texts", "images", "inputs") if body.get(name) is not None]
    if len(names) != 1:
        message = f"texts: expected exactly one of texts, images and inputs, got {' and '.join(names) or 'none'}"
        raise InvalidInput(message, reason="schema" if names else "empty_items", param="texts")
    name = names[0]
    if name == "inputs":
        given = fields.inputs(body[name], name, limit)
        return name, tuple(_content(each, f"inputs[{index}]") for index, each in enumerate(given))
    items = fields.items(body[name], name, limit)
    return name, items if name == "texts" else tuple(Item(None, modalities=("image",)) for _ in items)


def _content(value: Any, path: str) -> Item:
    """One input of several parts: its texts, one per line."""
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, list) or not content:
        raise fields.refused(f"{path}.content", content, "a list of parts")
    texts: list[str] = []
    modalities: tuple[str, ...] = ()
    for index, part in enumerate(content):
        where = f"{path}.content[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            texts.append(fields.text({f"{where}.text": part.get("text")}, f"{where}.text"))
        elif kind == "image_url":
            modalities = ("image",)
        else:
            raise fields.refused(f"{where}.type", kind, "text or image_url")
    return Item("\n".join(texts) if texts else None, modalities=modalities)


# what goes out


def _answer(call: Call, finished: Finished, name: str, types: Sequence[str]) -> Answer:
    vectors = finished.arrays(name, "dense")
    timing = finished.timing(call)
    parts: list[Body] = []
    scales: dict[str, dict[str, list[float]]] = {}
    for kind in types:
        rows, extras = _converted(vectors, kind)
        if extras:
            scales[kind] = extras
        before = f'"{kind}":['.encode()
        parts += [b"," if parts else b'{"embeddings":{', reply.listed(rows, len(rows) * vectors[0].size, before)]
    tokens = finished.usage["total_tokens"]
    rest: dict[str, Any] = {
        "id": str(uuid4()), "response_type": "embeddings_by_type", "texts": [item.text for item in finished.request.items],
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}}, **finished.shared(call, timing),
    }  # fmt: skip
    if scales:
        rest["embeddings_scale"] = scales
    parts.append(b"}," + orjson.dumps(rest)[1:])
    return Answer(_Chain(parts), "application/json", finished.headers(timing))


class _Chain:
    """Bodies one after the other."""

    def __init__(self, parts: Sequence[Body]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for part in self._parts:
            if isinstance(part, bytes):
                yield part
            else:
                yield from part


def _converted(vectors: Sequence[Array], kind: str) -> tuple[list[Any], dict[str, list[float]]]:
    """Each vector as `kind`, a view where nothing is computed; and by name, for each vector, what its codes are to be read with."""
    if kind == "float":
        return list(vectors), {}
    if kind == "base64":
        return [vector.data for vector in vectors], {}
    rows: list[Any] = []
    extras: dict[str, list[float]] = {}
    step = max(1, reply.PIECE_VALUES // vectors[0].size)
    for start in range(0, len(vectors), step):
        codes, found = _CODES[kind](np.stack(vectors[start : start + step]))
        rows += list(codes)
        for name, values in found.items():
            extras.setdefault(name, []).extend(values[:, 0].tolist())
    return rows, extras


def int8(vectors: Array) -> tuple[Array, dict[str, Array]]:
    """Codes of float32 [rows, width] in -127..127, half to even; x is about code * scale. All of it in float32 (contract 11)."""
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    codes = np.rint(vectors / np.where(largest > 0, largest, np.float32(1)) * np.float32(127)).astype(np.int8)
    return codes, {"scale": largest / np.float32(127)}


def uint8(vectors: Array) -> tuple[Array, dict[str, Array]]:
    """Codes of float32 [rows, width] in 0..255, half to even; x is about code * scale + offset."""
    low = vectors.min(axis=1, keepdims=True)
    extent = vectors.max(axis=1, keepdims=True) - low
    codes = np.rint((vectors - low) / np.where(extent > 0, extent, np.float32(1)) * np.float32(255)).astype(np.uint8)
    return codes, {"scale": extent / np.float32(255), "offset": low}


def ubinary(vectors: Array) -> tuple[Array, dict[str, Array]]:
    """A bit for each x > 0, eight to a byte, the first one highest."""
    return np.packbits(vectors > 0, axis=1), {}


def binary(vectors: Array) -> tuple[Array, dict[str, Array]]:
    """The same bytes less 128."""
    return (np.packbits(vectors > 0, axis=1) ^ 0x80).view(np.int8), {}


_CODES: dict[str, Callable[[Array], tuple[Array, dict[str, Array]]]] = {"int8": int8, "uint8": uint8, "ubinary": ubinary, "binary": binary}
