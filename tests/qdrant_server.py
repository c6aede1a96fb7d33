"""Routes of Qdrant's REST API over Qdrant's own engine, in a process of its own, because no package has a Qdrant
server.

    QdrantServer ──► a fork with the arguments PORT FOLDER [--key KEY]

The engine (qdrant-edge-py), which stores, checks and searches vectors, is real, and so are the models of qdrant-client,
which parse bodies. The routes, their statuses and the envelopes of results are of this module.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import httpx
from zygote import Forked

from sie_cli.serve.ports import free_port

MAX_BODY_BYTES = 32 << 20
START_TIMEOUT_S = 60.0


class QdrantServer:
    """A process of this module. It keeps its port and data over `kill` and `start`."""

    def __init__(self, folder: Path, key: str = "") -> None:
        self._folder = folder
        self._key = key
        self.port = free_port()
        self._process: Forked | None = None

    @property
    def url(self) -> str:
        return f"qdrant://{self._key}{'@' if self._key else ''}127.0.0.1:{self.port}"

    def begin(self) -> None:
        """Start the server, without waiting until it answers."""
        argv = [__file__, str(self.port), str(self._folder), "--key", self._key]
        self._process = Forked("qdrant", argv, os.environ)

    def start(self) -> None:
        self.begin()
        self.answers()

    def answers(self) -> None:
        """Wait until the server answers."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{self.port}/", trust_env=False).status_code:
                    return
            assert time.monotonic() < deadline_s, "the server does not answer"
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process.stdout.close()
            self._process = None


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Collections:
    """The collections on disk, each of which is a shard of the engine."""

    def __init__(self, folder: Path) -> None:
        from qdrant_edge import EdgeShard

        self._folder = folder
        self._lock = threading.Lock()
        self._shards: dict[str, Any] = {}
        self._params: dict[str, Any] = {}
        self._aliases_file = folder / "aliases.json"
        self._aliases: dict[str, str] = (
            json.loads(self._aliases_file.read_text()) if self._aliases_file.exists() else {}
        )
        for params in folder.glob("*/params.json"):
            self._params[params.parent.name] = json.loads(params.read_text())
            self._shards[params.parent.name] = EdgeShard.load(str(params.parent / "shard"))

    def answer(self, method: str, parts: list[str], query: dict[str, list[str]], body: bytes) -> Any:
        with self._lock:
            if (method, parts) == ("GET", ["aliases"]):
                return {
                    "aliases": [{"alias_name": alias, "collection_name": name} for alias, name in self._aliases.items()]
                }
            if (method, parts) == ("GET", ["collections"]):
                return {"collections": [{"name": name} for name in self._shards]}
            if (method, parts) == ("POST", ["collections", "aliases"]):
                return self._change_aliases(body)
            name, rest = self._aliases.get(parts[1], parts[1]), parts[2:]
            if method == "PUT" and not rest:
                return self._create(name, body)
            if name not in self._shards:
                raise Refused(404, f"Not found: Collection `{name}` doesn't exist!")
            shard = self._shards[name]
            if not rest and method == "GET":
                return self._info(name)
            if not rest and method == "DELETE":
                return self._delete(name)
            if rest not in _READS and (method, rest) != ("POST", ["points"]) and query.get("wait") != ["true"]:
                raise Refused(400, "these tests wait")
            if (method, rest) == ("PUT", ["index"]):
                return self._index(shard, body)
            if (method, rest) == ("PUT", ["points"]):
                return self._upsert(shard, body)
            if method == "POST" and (route := _ROUTES.get("/".join(rest))):
                return route(shard, body)
        raise Refused(404, "")

    def _change_aliases(self, body: bytes) -> bool:
        """Apply all actions, or none."""
        from qdrant_client import models

        changed = dict(self._aliases)
        for action in models.ChangeAliasesOperation.model_validate_json(body).actions:
            if isinstance(action, models.DeleteAliasOperation):
                changed.pop(action.delete_alias.alias_name, None)
            elif isinstance(action, models.CreateAliasOperation):
                alias, name = action.create_alias.alias_name, action.create_alias.collection_name
                if name not in self._shards:
                    raise Refused(404, f"Not found: Collection `{name}` doesn't exist!")
                if alias in self._shards:
                    raise Refused(409, f"Wrong input: Collection with the same name already exists: {alias}")
                changed[alias] = name
        self._aliases = changed
        part = self._aliases_file.with_suffix(".part")
        part.write_text(json.dumps(changed))
        part.rename(self._aliases_file)
        return True

    def _delete(self, name: str) -> bool:
        self._shards.pop(name).close()
        self._params.pop(name)
        shutil.rmtree(self._folder / name)
        self._aliases = {alias: target for alias, target in self._aliases.items() if target != name}
        return True

    def _create(self, name: str, body: bytes) -> bool:
        from qdrant_client import models
        from qdrant_edge import (
            Distance,
            EdgeConfig,
            EdgeShard,
            EdgeSparseVectorParams,
            EdgeVectorParams,
            MultiVectorComparator,
            MultiVectorConfig,
        )

        if name in self._shards:
            raise Refused(409, f"Wrong input: Collection `{name}` already exists!")
        request = models.CreateCollection.model_validate_json(body)
        assert request.vectors is not None
        named = request.vectors if isinstance(request.vectors, dict) else {"": request.vectors}
        params = {
            key: EdgeVectorParams(
                size=vector_params.size,
                distance=getattr(Distance, vector_params.distance.value),
                multivector_config=MultiVectorConfig(MultiVectorComparator.MaxSim)
                if vector_params.multivector_config
                else None,
            )
            for key, vector_params in named.items()
        }
        sparse = {key: EdgeSparseVectorParams() for key in request.sparse_vectors or {}}
        place = self._folder / name
        (place / "shard").mkdir(parents=True)
        dense = params if isinstance(request.vectors, dict) else params[""]
        self._shards[name] = EdgeShard.create(
            str(place / "shard"), EdgeConfig(vectors=dense, sparse_vectors=sparse or None)
        )
        shown = {key: vector_params.model_dump(mode="json", exclude_none=True) for key, vector_params in named.items()}
        self._params[name] = {
            "vectors": shown if isinstance(request.vectors, dict) else shown[""],
            **({"sparse_vectors": {key: {} for key in sparse}} if sparse else {}),
            "on_disk_payload": request.on_disk_payload is not False,
        }
        (place / "params.json").write_text(json.dumps(self._params[name]))
        return True

    def _info(self, name: str) -> Any:
        info = self._shards[name].info()
        return {
            "status": "green",
            "optimizer_status": "ok",
            "points_count": info.points_count,
            "segments_count": info.segments_count,
            "config": {
                "params": self._params[name],
                "hnsw_config": {"m": 16, "ef_construct": 100, "full_scan_threshold": 10000},
                "optimizer_config": {
                    "deleted_threshold": 0.2,
                    "vacuum_min_vector_number": 1000,
                    "default_segment_number": 0,
                    "flush_interval_sec": 5,
                },
            },
            "payload_schema": {key: {"data_type": "keyword", "points": 0} for key in info.payload_schema},
        }

    def _upsert(self, shard: Any, body: bytes) -> Any:
        from qdrant_client import models
        from qdrant_edge import Point, UpdateOperation

        upsert = models.PointsList.model_validate_json(body)
        points = [Point(point.id, _stored(point.vector), point.payload or {}) for point in upsert.points]
        shard.update(UpdateOperation.upsert_points(points, condition=_filter(upsert.update_filter)))
        shard.flush()
        return {"operation_id": 0, "status": "completed"}

    def _index(self, shard: Any, body: bytes) -> Any:
        from qdrant_client import models
        from qdrant_edge import PayloadSchemaType, UpdateOperation

        request = models.CreateFieldIndex.model_validate_json(body)
        assert isinstance(request.field_schema, models.PayloadSchemaType)
        schema = getattr(PayloadSchemaType, request.field_schema.value.capitalize())
        shard.update(UpdateOperation.create_field_index(request.field_name, schema))
        shard.flush()
        return {"operation_id": 0, "status": "completed"}


def _stored(vector: Any) -> Any:
    """Return a vector of a request in the form of the engine."""
    from qdrant_client import models
    from qdrant_edge import SparseVector

    if isinstance(vector, models.SparseVector):
        return SparseVector(vector.indices, vector.values)
    return {name: _stored(part) for name, part in vector.items()} if isinstance(vector, dict) else vector


def _shown(vector: Any) -> Any:
    """Return a vector of the engine in the form of a reply."""
    from qdrant_edge import SparseVector

    if isinstance(vector, SparseVector):
        return {"indices": vector.indices, "values": vector.values}
    return {name: _shown(part) for name, part in vector.items()} if isinstance(vector, dict) else vector


def _filter(query_filter: Any) -> Any:
    """Return a filter of a request in the form of the engine. It may have ids, and fields with one of some values."""
    from qdrant_client import models
    from qdrant_edge import FieldCondition, Filter, HasIdCondition, MatchAny

    if query_filter is None:
        return None
    assert query_filter == models.Filter(must=query_filter.must)
    conditions: list[Any] = []
    for clause in query_filter.must or ():
        if isinstance(clause, models.HasIdCondition):
            conditions.append(HasIdCondition(set(clause.has_id)))
        else:
            conditions.append(FieldCondition(clause.key, match=MatchAny(clause.match.any)))
    return Filter(must=conditions)


def _id(point_id: Any) -> Any:
    return point_id if isinstance(point_id, int) else str(point_id)


def _count(shard: Any, body: bytes) -> Any:
    from qdrant_edge import CountRequest

    return {"count": shard.count(CountRequest(exact=True))}


def _query(shard: Any, body: bytes) -> Any:
    from qdrant_client import models
    from qdrant_edge import Query, QueryRequest, Sample

    question = models.QueryRequest.model_validate_json(body)
    if isinstance(question.query, models.SampleQuery):
        query: Any = Sample.Random
    else:
        vector = question.query.nearest if isinstance(question.query, models.NearestQuery) else question.query
        vector = _stored(vector)
        query = Query.Nearest(vector, using=question.using) if question.using else Query.Nearest(vector)
    hits = shard.query(QueryRequest(limit=question.limit or 10, query=query, with_payload=bool(question.with_payload)))
    return {
        "points": [
            {"id": _id(hit.id), "version": hit.version, "score": hit.score, "payload": hit.payload} for hit in hits
        ]
    }


def _scroll(shard: Any, body: bytes) -> Any:
    from qdrant_client import models
    from qdrant_edge import ScrollRequest

    scroll = models.ScrollRequest.model_validate_json(body)
    records, following = shard.scroll(
        ScrollRequest(
            offset=scroll.offset,
            limit=scroll.limit,
            with_payload=scroll.with_payload,
            with_vector=scroll.with_vector,
        )
    )
    return {"points": _records(records), "next_page_offset": None if following is None else _id(following)}


def _records(records: Any) -> list[Any]:
    return [{"id": _id(record.id), "vector": _shown(record.vector), "payload": record.payload} for record in records]


def _retrieve(shard: Any, body: bytes) -> Any:
    from qdrant_client import models

    request = models.PointRequest.model_validate_json(body)
    return _records(shard.retrieve(list(request.ids), bool(request.with_payload), request.with_vector or False))


def _update(shard: Any, *operations: Any) -> Any:
    for operation in operations:
        shard.update(operation)
    shard.flush()
    return {"operation_id": 0, "status": "completed"}


def _delete_points(shard: Any, body: bytes) -> Any:
    from qdrant_client import models
    from qdrant_edge import UpdateOperation

    if "filter" in json.loads(body):
        selection = models.FilterSelector.model_validate_json(body).filter
        return _update(shard, UpdateOperation.delete_points_by_filter(_filter(selection)))
    return _update(shard, UpdateOperation.delete_points(list(models.PointIdsList.model_validate_json(body).points)))


def _set_payload(shard: Any, body: bytes) -> Any:
    from qdrant_client import models
    from qdrant_edge import UpdateOperation

    change = models.SetPayload.model_validate_json(body)
    return _update(shard, UpdateOperation.set_payload(list(change.points or ()), change.payload))


def _delete_payload(shard: Any, body: bytes) -> Any:
    from qdrant_client import models
    from qdrant_edge import Filter, UpdateOperation

    deletion = models.DeletePayload.model_validate_json(body)
    assert deletion.filter == models.Filter()
    return _update(shard, UpdateOperation.delete_payload_by_filter(Filter(), list(deletion.keys)))


def _batch(shard: Any, body: bytes) -> Any:
    from qdrant_client import models
    from qdrant_edge import PointVectors, UpdateOperation

    operations = []
    for operation in models.UpdateOperations.model_validate_json(body).operations:
        if isinstance(operation, models.UpdateVectorsOperation):
            points = operation.update_vectors.points
            present = {_id(point.id) for point in shard.retrieve([record.id for record in points], False, False)}
            if missing_ids := [point.id for point in points if point.id not in present]:
                raise Refused(404, f"Not found: No point with id {missing_ids[0]} found")
            changed = [PointVectors(point.id, _stored(point.vector)) for point in points]
            condition = _filter(operation.update_vectors.update_filter)
            operations.append(UpdateOperation.update_vectors(changed, condition=condition))
        else:
            assert isinstance(operation, models.SetPayloadOperation)
            change = operation.set_payload
            operations.append(UpdateOperation.set_payload_by_filter(_filter(change.filter), change.payload))
    return [_update(shard, *operations)]


_ROUTES = {
    "points": _retrieve,
    "points/count": _count,
    "points/query": _query,
    "points/scroll": _scroll,
    "points/delete": _delete_points,
    "points/payload": _set_payload,
    "points/payload/delete": _delete_payload,
    "points/batch": _batch,
}
_READS = (["points", "count"], ["points", "query"], ["points", "scroll"])


@contextlib.contextmanager
def _statuses() -> Iterator[None]:
    """Answer 400, as Qdrant does, if the models or the engine refuse the input."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        raise Refused(400, str(error)) from error


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are sent separately, and Nagle would delay the body up to 40 ms
    collections: Collections
    key = ""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        pieces = urlsplit(self.path)
        parts = [unquote(part) for part in pieces.path.split("/")[1:]]
        try:
            if parts == [""]:
                return self._send(200, {"title": "test", "version": "1.20.0"})
            if self.key and self.headers.get("api-key") != self.key:
                raise Refused(401, "Must provide an API key or an Authorization bearer token")
            if len(body) > MAX_BODY_BYTES:
                raise Refused(413, "Payload too large")
            if parts[0] not in ("collections", "aliases"):
                raise Refused(404, "")
            with _statuses():
                result = self.collections.answer(self.command, parts, parse_qs(pieces.query), body)
        except Refused as error:
            return self._send(error.status, {"status": {"error": str(error)}, "time": 0.0})
        return self._send(200, {"result": result, "status": "ok", "time": 0.0})

    do_GET = do_PUT = do_POST = do_DELETE = _answer

    def _send(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--key", default="")
    options = parser.parse_args()
    Handler.key = options.key
    Handler.collections = Collections(options.folder)
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
