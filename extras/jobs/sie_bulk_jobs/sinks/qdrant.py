"""Qdrant over its REST API.

    PUT /collections/{name}                    create; 409 if it exists
    GET /                                      version
    GET /collections/{name}                    dimensions and distance
    PUT /collections/{name}/index?wait=true    index a field of payloads
    PUT /collections/{name}/points?wait=true   replace points
    POST /collections/{name}/points/query      search

Qdrant accepts only UUIDs and integers as ids of points. So the id of a point is a UUID that is computed from the row's
id, and the row's id is in the payload.
"""

from __future__ import annotations

import asyncio
import functools
import re
import ssl
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import httpx
import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from sie_bulk_jobs.sinks.sink import (
    ROW_ID,
    CollectionMismatch,
    CollectionMissing,
    CollectionRefused,
    Kind,
    NearRow,
    Output,
    RowsRefused,
    SinkRows,
    SinkUnsuitable,
    SparseRow,
    Widths,
    check_dims,
    checked_name,
    encoded,
)
from sie_contracts.errors import UNDECODABLE
from sie_store.object_stores import AccessRefused, RetryPolicy, StoreError

DISTANCE = "Cosine"
COMPARATOR = "max_sim"  # how Qdrant compares multivectors
DISTANCES = (DISTANCE, "Dot", "Euclid", "Manhattan")
MAX_DIMS = 65_536
# largest number of bytes of a reply; the largest reply describes a collection and the fields of its payloads
ANSWER_BYTES = 4 << 20
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})[\w.+-]{0,32}", re.ASCII)
BODY_BYTES = 8 << 20  # largest number of bytes of a request body with several points
# largest number of bytes of a point; a large point has a request body of its own. Qdrant's default limit for a body is
# 32 MiB, of which 1 MiB is kept free for the filter of a conditional write
POINT_BYTES = 31 << 20
NUMBER_BYTES = 17  # largest number of bytes of a float32 in JSON, with its comma


def point_id(row_id: str) -> str:
    """Return the id of the point for a row: a UUID that is a hash of the row's id."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, row_id))


class _QdrantReply(msgspec.Struct):
    result: Any = None
    version: str = ""  # only in the reply to GET /


class _QdrantPoint(msgspec.Struct):
    id: str | int
    score: float
    payload: dict[str, Any] = {}


class _QdrantPoints(msgspec.Struct):
    points: list[_QdrantPoint]


class QdrantConnection:
    """Requests to the Qdrant server at `url`. `answer_bytes`: largest number of bytes of a reply."""

    def __init__(self, url: str, api_key: str, patience: RetryPolicy, answer_bytes: int = ANSWER_BYTES) -> None:
        self._patience = patience
        self._answer_bytes = answer_bytes
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"} | (
            {"api-key": api_key} if api_key else {}
        )
        verify: ssl.SSLContext | bool = ssl.create_default_context() if url.startswith("https:") else False
        self._client = httpx.AsyncClient(
            base_url=url, headers=headers, verify=verify, trust_env=False, timeout=patience.stall_s
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def check_version(self, needed: tuple[int, int], purpose: str) -> None:
        """Raise SinkUnsuitable if the server is older than `needed`. `purpose`: operation that the error text names."""
        reply = await self._patience.repeated(functools.partial(self._once, "GET", "/", None, False))
        version = _VERSION.match(reply.version)
        if version is None:
            raise SinkUnsuitable("the server does not reply as Qdrant does: its reply has no version")
        if (int(version[1]), int(version[2])) < needed:
            raise SinkUnsuitable(f"Qdrant is {version[0]}, and {purpose} needs {needed[0]}.{needed[1]} or later")

    async def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        missing: bool = False,
        exists: bool = False,
        completed: bool = False,
    ) -> Any:
        """Send a request, repeat it if another attempt may help, and return its result. `body`: JSON as bytes, or a
        value to encode. `missing`: return None if the collection does not exist. `exists`: return None if it already
        exists. `completed`: raise StoreError if Qdrant does not confirm that the rows are applied.
        """
        content = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        ask = functools.partial(self._once, method, path, content, completed)
        try:
            return (await self._patience.repeated(ask)).result
        except CollectionMissing:
            if not missing:
                raise
        except _Exists:
            if not exists:
                raise
        return None

    async def read(self, method: str, path: str, type: Any, body: Any = None) -> Any:
        """Send a request and return its result as a `type`. Raises SinkUnsuitable for a reply of another form."""
        result = await self.send(method, path, body)
        try:
            return msgspec.convert(result, type)
        except msgspec.ValidationError:
            raise SinkUnsuitable("the server does not reply as Qdrant does: check its URL") from None

    async def _once(self, method: str, path: str, content: bytes | None, completed: bool) -> _QdrantReply:
        try:
            async with (
                asyncio.timeout(self._patience.stall_s),
                self._client.stream(method, path, content=content) as response,
            ):
                if response.status_code != 200:
                    raise _refusal(response, rows=completed)
                reply = _reply(await _body(response, self._answer_bytes))
        except (TimeoutError, httpx.TimeoutException):
            raise StoreError(f"Qdrant did not answer within {self._patience.stall_s:.3g} s") from None
        except httpx.HTTPError as error:
            raise StoreError(f"Qdrant cannot be reached ({type(error).__name__})") from None
        if completed and (not isinstance(reply.result, dict) or reply.result.get("status") != "completed"):
            raise StoreError("Qdrant has not applied the rows yet")
        return reply


class QdrantSink:
    """Sink for Qdrant. If the only output is dense, each point has one vector without a name. Otherwise each vector has
    the name of its output.
    """

    def __init__(self, url: str, api_key: str, patience: RetryPolicy, body_bytes: int = BODY_BYTES) -> None:
        self._server = QdrantConnection(url, api_key, patience)
        self._body_bytes = body_bytes
        self._collection = ""
        self._widths: Widths = {}

    async def prepare(self, collection: str, widths: Widths, kinds: Mapping[str, Kind]) -> None:
        path = f"/collections/{checked_name(collection)}"
        for output, dims in widths.items():
            if output != "sparse":
                check_dims(dims, MAX_DIMS, "Qdrant")
        if any('"' in field for field in kinds):
            raise CollectionRefused("Qdrant cannot index a field with a quotation mark in its name: rename the column")
        settings = _settings(widths)
        collection_info = await self._server.send("GET", path, missing=True)
        if collection_info is None:
            await self._server.send("PUT", path, settings, exists=True)
            collection_info = await self._server.send("GET", path)
        _check(collection_info, collection, settings)
        for field, kind in kinds.items():
            index = {"field_name": f'"{field}"', "field_schema": kind}
            await self._server.send("PUT", f"{path}/index?wait=true", index)
        self._collection, self._widths = collection, widths

    async def upsert(self, rows: SinkRows) -> None:
        assert self._collection, "prepare comes first"
        latest = rows.latest(self._widths)
        bodies = point_bodies((self._point(latest, number) for number in range(len(latest.ids))), self._body_bytes)
        path = f"/collections/{self._collection}/points?wait=true"
        # A thread encodes the bodies, because encoding takes long and would block the event loop.
        while body := await asyncio.to_thread(next, bodies, b""):
            await self._server.send("PUT", path, body, completed=True)

    async def search(self, collection: str, vector: NDArray[np.float32], limit: int) -> list[NearRow]:
        path = f"/collections/{checked_name(collection)}"
        collection_info = await self._server.send("GET", path)
        vectors, _ = vector_settings(collection_info)
        name = "dense" if "dense" in vectors else ""
        _check_vector(vectors.get(name), collection, name, {"size": len(vector), "distance": DISTANCE})
        query = {"query": vector.tolist(), "limit": limit, "with_payload": True, "with_vector": False}
        if name:
            query["using"] = name
        near = await self._server.read("POST", f"{path}/points/query", _QdrantPoints, query)
        return [NearRow(str(point.payload.pop(ROW_ID, point.id)), point.score, point.payload) for point in near.points]

    async def close(self) -> None:
        await self._server.close()

    def refusals(self, rows: SinkRows) -> Mapping[int, str]:
        refused = {}
        for number, multivector in enumerate(rows.multivectors):
            if multivector.size * NUMBER_BYTES > POINT_BYTES:  # a smaller multivector is always within the limit
                size = len(_encoded_vector(multivector))
                if size > POINT_BYTES:
                    refused[number] = _oversize("the multivector", size)
        return refused

    def _point(self, rows: SinkRows, number: int) -> dict[str, Any]:
        row_id = rows.ids[number]
        return {
            # `encoded` must run before `point_id`, because `encoded` refuses ids from which no UUID can be computed
            "payload": msgspec.Raw(encoded({**rows.payloads[number], ROW_ID: row_id}, number)),
            "id": point_id(row_id),
            "vector": self._vector(rows, number),
        }

    def _vector(self, rows: SinkRows, number: int) -> Any:
        """Return the field `vector` of a Qdrant point: the dense vector of a row, or its vectors by name."""
        if set(self._widths) == {"dense"}:
            return json_vector(rows.vectors[number])
        outputs: dict[Output, Any] = {"dense": rows.vectors, "sparse": rows.sparse, "multivector": rows.multivectors}
        return {name: json_vector(outputs[name][number]) for name in self._widths}


def json_vector(vector: NDArray[np.float32] | SparseRow) -> Any:
    """Return a vector in Qdrant's JSON form."""
    if isinstance(vector, SparseRow):
        return {"indices": vector.indices.tolist(), "values": msgspec.Raw(_encoded_vector(vector.values))}
    return msgspec.Raw(_encoded_vector(vector))


def _encoded_vector(numbers: NDArray[np.float32]) -> bytes:
    """Return float32 numbers as JSON, with the fewest digits that identify each number."""
    return orjson.dumps(np.ascontiguousarray(numbers), option=orjson.OPT_SERIALIZE_NUMPY)


def _oversize(name: str, size: int) -> str:
    return f"{name} has {size} bytes as JSON, but a request to Qdrant takes at most {POINT_BYTES}: shorten the text"


def point_bodies(points: Iterable[Mapping[str, Any]], body_bytes: int = BODY_BYTES) -> Iterator[bytes]:
    """Yield request bodies with points, each of at most `body_bytes`. A larger point is alone in its body. Raises
    RowsRefused for a point of more than POINT_BYTES.
    """
    batch: list[bytes] = []
    size = empty = len(b'{"points":[]}')
    for fields in points:
        point = msgspec.json.encode(fields)
        if len(point) > POINT_BYTES:
            raise RowsRefused(_oversize(f"the point {fields['id']}", len(point)))
        if batch and size + len(point) > body_bytes:
            yield b'{"points":[' + b",".join(batch) + b"]}"
            batch, size = [], empty
        batch.append(point)
        size += len(point) + 1
    if batch:
        yield b'{"points":[' + b",".join(batch) + b"]}"


async def _body(response: httpx.Response, answer_bytes: int) -> bytes:
    """Return the raw body of a response, which is not compressed, because the request did not allow compression. Raises
    AnswerTooLarge for a body of more than `answer_bytes`.
    """
    data = bytearray()
    async for piece in response.aiter_raw():
        data += piece
        if len(data) > answer_bytes:
            raise AnswerTooLarge(
                f"a reply of Qdrant has more than {answer_bytes} bytes: ask for fewer rows, or store smaller payloads"
            )
    return bytes(data)


def _reply(body: bytes) -> _QdrantReply:
    try:
        return msgspec.json.decode(body, type=_QdrantReply)
    except UNDECODABLE:
        raise SinkUnsuitable("the server does not reply as Qdrant does: check its URL") from None


class AnswerTooLarge(SinkUnsuitable):
    """Error for a reply that is larger than the limit `answer_bytes` of the connection."""


class _Exists(StoreError):
    """Error for a collection that exists already."""


def _refusal(response: httpx.Response, rows: bool) -> StoreError:
    """Return the error for an HTTP status. The body of the response is not used, because it quotes rows."""
    status = response.status_code
    if status in (401, 403):
        return AccessRefused(f"Qdrant refuses the API key (status {status})")
    if status == 404:
        return CollectionMissing("Qdrant has no such collection")
    if status == 409 and not rows:
        return _Exists("the collection exists")
    if status in (400, 413, 422):
        return (RowsRefused if rows else CollectionRefused)(f"Qdrant refuses the request (status {status})")
    if 300 <= status < 500 and status not in (408, 409, 425, 429):
        return SinkUnsuitable(f"the server does not reply as Qdrant does (status {status}): check its URL")
    after = response.headers.get("retry-after", "")
    return StoreError(f"Qdrant replies with status {status}", float(after) if after.isdecimal() else 0.0)


def _settings(widths: Widths) -> dict[str, Any]:
    named = {name: {"size": dims, "distance": DISTANCE} for name, dims in widths.items() if name != "sparse"}
    if set(widths) == {"dense"}:
        return {"vectors": named["dense"]}
    if "multivector" in named:
        named["multivector"]["multivector_config"] = {"comparator": COMPARATOR}
    return {"vectors": named, **({"sparse_vectors": {"sparse": {}}} if "sparse" in widths else {})}


def vector_settings(settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (settings of dense vectors and multivectors, settings of sparse vectors), each by name. The name of an
    unnamed vector is empty. `settings`: body that creates a collection, or the server's description of a collection.
    """
    try:
        params = settings["config"]["params"] if "config" in settings else settings
        vectors, sparse = params.get("vectors") or {}, params.get("sparse_vectors") or {}
        return ({"": vectors} if "size" in vectors else dict(vectors)), dict(sparse)
    except (TypeError, KeyError, ValueError, AttributeError):
        raise SinkUnsuitable("the server does not reply as Qdrant does: check its URL") from None


def _check(collection_info: Any, collection: str, settings: dict[str, Any]) -> None:
    """Raise CollectionMismatch if the vectors of a collection differ from the vectors in `settings`."""
    vectors, sparse = vector_settings(collection_info)
    expected, expected_sparse = vector_settings(settings)
    if vectors.keys() != expected.keys() or sparse.keys() != expected_sparse.keys():
        shown = ", ".join(name or "a vector without a name" for name in (*expected, *expected_sparse))
        raise CollectionMismatch(f"the collection {collection} lacks vectors that this command writes: {shown}")
    for name, params in expected.items():
        _check_vector(vectors[name], collection, name, params)


def _check_vector(actual: Any, collection: str, name: str, expected: Mapping[str, Any]) -> None:
    """Raise CollectionMismatch if a vector of a collection does not have the parameters `expected`."""
    if actual is None:
        raise CollectionMismatch(f"the collection {collection} has no vector named dense and no vector without a name")
    try:
        size, distance = actual["size"], actual.get("distance")
        comparator = (actual.get("multivector_config") or {}).get("comparator")
    except (TypeError, KeyError, AttributeError):
        raise SinkUnsuitable("the server does not reply as Qdrant does: check its URL") from None
    if not isinstance(size, int) or distance not in DISTANCES or comparator not in (None, COMPARATOR):
        raise SinkUnsuitable("the server does not reply as Qdrant does: check its URL")
    place = f"the collection {collection}" + (f", vector {name}," if name else "")
    if (comparator is None) != ("multivector_config" not in expected):
        raise CollectionMismatch(f"{place} is no {'multivector' if comparator is None else 'single vector'}")
    if (size, distance) != (expected["size"], expected["distance"]):
        raise CollectionMismatch(
            f"{place} has {size} dimensions and the distance {distance}, "
            f"but {expected['size']} dimensions and the distance {expected['distance']} are needed"
        )
