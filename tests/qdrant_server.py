"""Routes of Qdrant's REST API over Qdrant's own engine, in a process of its own: a server of Qdrant is in no registry
of packages.

    QdrantServer ──► a fork with the arguments PORT FOLDER [--key KEY] [--hold N]

Real here: the engine (qdrant-edge-py), which stores, checks and searches vectors; the models of qdrant-client, by
which bodies are read. Made here: the routes, their statuses and the words around a result. `--hold`: request N to write
points is carried out and never answered.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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
    """A process of this module. `kill` and `start` again keep port and data."""

    def __init__(self, folder: Path, key: str = "") -> None:
        self._folder = folder
        self._key = key
        self.port = free_port()
        self._process: Forked | None = None

    @property
    def url(self) -> str:
        return f"qdrant://{self._key}{'@' if self._key else ''}127.0.0.1:{self.port}"

    def begin(self, hold: int = 0) -> None:
        """Start, without waiting until it answers."""
        argv = [__file__, str(self.port), str(self._folder), "--key", self._key, "--hold", str(hold)]
        self._process = Forked("qdrant", argv, os.environ)

    def start(self, hold: int = 0) -> None:
        self.begin(hold)
        self.answers()

    def answers(self) -> None:
        """Wait until it answers."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{self.port}/", trust_env=False).status_code:
                    return
            assert time.monotonic() < deadline_s, "the server does not answer"
            time.sleep(0.05)

    def holds(self) -> None:
        """Wait until it has carried out the request that it does not answer."""
        assert self._process is not None
        assert self._process.stdout.readline() == "holds\n"

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
    """Collections on disk, each a shard of the engine."""

    def __init__(self, folder: Path) -> None:
        from qdrant_edge import EdgeShard

        self._folder = folder
        self._lock = threading.Lock()
        self._shards: dict[str, Any] = {}
        self._params: dict[str, Any] = {}
        for place in folder.iterdir():
            self._params[place.name] = json.loads((place / "params.json").read_text())
            self._shards[place.name] = EdgeShard.load(str(place / "shard"))

    def answer(self, method: str, parts: list[str], query: dict[str, list[str]], body: bytes) -> Any:
        with self._lock:
            name, rest = parts[1], parts[2:]
            if method == "PUT" and not rest:
                return self._create(name, body)
            if name not in self._shards:
                raise Refused(404, f"Not found: Collection `{name}` doesn't exist!")
            shard = self._shards[name]
            if method == "GET" and not rest:
                return self._info(name)
            if rest in (["points"], ["index"]) and query.get("wait") != ["true"]:
                raise Refused(400, "these tests wait")
            if (method, rest) == ("PUT", ["points"]):
                return self._upsert(shard, body)
            if (method, rest) == ("PUT", ["index"]):
                return self._index(shard, body)
            if (method, rest) == ("POST", ["points", "count"]):
                return _count(shard)
            if (method, rest) == ("POST", ["points", "query"]):
                return _query(shard, body)
            if (method, rest) == ("POST", ["points", "scroll"]):
                return _scroll(shard, body)
        raise Refused(404, "")

    def _create(self, name: str, body: bytes) -> bool:
        from qdrant_client import models
        from qdrant_edge import Distance, EdgeConfig, EdgeShard, EdgeVectorParams

        if name in self._shards:
            raise Refused(409, f"Wrong input: Collection `{name}` already exists!")
        wanted = models.CreateCollection.model_validate_json(body).vectors
        assert wanted is not None
        named = wanted if isinstance(wanted, dict) else {"": wanted}
        params = {
            key: EdgeVectorParams(size=each.size, distance=getattr(Distance, each.distance.value))
            for key, each in named.items()
        }
        place = self._folder / name
        (place / "shard").mkdir(parents=True)
        self._shards[name] = EdgeShard.create(
            str(place / "shard"), EdgeConfig(vectors=params if isinstance(wanted, dict) else params[""])
        )
        shown = {key: {"size": each.size, "distance": each.distance.value} for key, each in named.items()}
        self._params[name] = shown if isinstance(wanted, dict) else shown[""]
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
                "params": {"vectors": self._params[name]},
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

        found = models.PointsList.model_validate_json(body).points
        points = [Point(each.id, each.vector, each.payload or {}) for each in found]
        shard.update(UpdateOperation.upsert_points(points))
        shard.flush()
        return {"operation_id": 0, "status": "completed"}

    def _index(self, shard: Any, body: bytes) -> Any:
        from qdrant_client import models
        from qdrant_edge import PayloadSchemaType, UpdateOperation

        wanted = models.CreateFieldIndex.model_validate_json(body)
        assert isinstance(wanted.field_schema, models.PayloadSchemaType)
        schema = getattr(PayloadSchemaType, wanted.field_schema.value.capitalize())
        shard.update(UpdateOperation.create_field_index(wanted.field_name, schema))
        shard.flush()
        return {"operation_id": 0, "status": "completed"}


def _count(shard: Any) -> Any:
    from qdrant_edge import CountRequest

    return {"count": shard.count(CountRequest(exact=True))}


def _query(shard: Any, body: bytes) -> Any:
    from qdrant_client import models
    from qdrant_edge import Query, QueryRequest

    asked = models.QueryRequest.model_validate_json(body)
    query = asked.query.nearest if isinstance(asked.query, models.NearestQuery) else asked.query
    found = shard.query(QueryRequest(limit=asked.limit or 10, query=Query.Nearest(query), with_payload=True))
    return {
        "points": [
            {"id": str(each.id), "version": each.version, "score": each.score, "payload": each.payload}
            for each in found
        ]
    }


def _scroll(shard: Any, body: bytes) -> Any:
    from qdrant_client import models
    from qdrant_edge import ScrollRequest

    asked = models.ScrollRequest.model_validate_json(body)
    found, following = shard.scroll(
        ScrollRequest(offset=asked.offset, limit=asked.limit, with_payload=True, with_vector=True)
    )
    points = [{"id": str(each.id), "vector": each.vector, "payload": each.payload} for each in found]
    return {"points": points, "next_page_offset": following and str(following)}


@contextlib.contextmanager
def _statuses() -> Iterator[None]:
    """What the models or the engine do not take is a bad request, as it is to Qdrant."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        raise Refused(400, str(error)) from error


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    collections: Collections
    key = ""
    hold = 0
    written = 0

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
            if parts[0] != "collections" or len(parts) < 2:
                raise Refused(404, "")
            with _statuses():
                result = self.collections.answer(self.command, parts, parse_qs(pieces.query), body)
        except Refused as error:
            return self._send(error.status, {"status": {"error": str(error)}, "time": 0.0})
        if self.command == "PUT" and parts[2:] == ["points"]:
            type(self).written += 1
            if self.written == self.hold:
                print("holds", flush=True)
                threading.Event().wait()
        return self._send(200, {"result": result, "status": "ok", "time": 0.0})

    do_GET = do_PUT = do_POST = _answer

    def _send(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a test would not read it."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--key", default="")
    parser.add_argument("--hold", type=int, default=0)
    options = parser.parse_args()
    Handler.key, Handler.hold = options.key, options.hold
    Handler.collections = Collections(options.folder)
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
