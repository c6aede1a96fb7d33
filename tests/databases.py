"""Vector databases as their own clients see them: PostgreSQL with pgvector, and Qdrant's engine behind the routes
of qdrant_server.
"""

from __future__ import annotations

import asyncio
import json
import uuid
import warnings
from typing import Any, Protocol

import asyncpg
from postgres_server import PostgresServer
from qdrant_server import QdrantServer


class Database(Protocol):
    url: str

    async def create(self, collection: str, dims: int, distance: str) -> None: ...
    async def found(self, collection: str) -> dict[str, tuple[list[float], dict[str, Any]]]: ...
    async def nearest(self, collection: str, vector: list[float]) -> str: ...
    async def remove(self, collection: str) -> None: ...

    async def more_vectors(self, collection: str) -> dict[str, dict[str, Any]]:
        """Return the vectors of each row by output: dense and multivectors as lists, sparse as weights by index."""

    async def kill(self) -> None: ...
    async def start(self) -> None: ...


class Postgres:
    """PostgreSQL with pgvector, as a user who is no superuser."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.url = server.url()
        self.start = server.start

    async def _fetch(self, statement: str, *values: Any) -> list[Any]:
        connection = await asyncpg.connect(self.url)
        try:
            return list(await connection.fetch(statement, *values))
        finally:
            await connection.close()

    async def create(self, collection: str, dims: int, distance: str) -> None:
        """Create a table, which has no distance."""
        await self._fetch(f'CREATE TABLE "{collection}" (id text PRIMARY KEY, embedding vector({dims}), payload jsonb)')

    async def found(self, collection: str) -> dict[str, tuple[list[float], dict[str, Any]]]:
        rows = await self._fetch(f'SELECT id, embedding::text, payload FROM "{collection}"')
        assert len({row["id"] for row in rows}) == len(rows)
        return {row["id"]: (json.loads(row["embedding"]), json.loads(row["payload"])) for row in rows}

    async def nearest(self, collection: str, vector: list[float]) -> str:
        statement = f'SELECT id FROM "{collection}" ORDER BY embedding <=> $1::text::vector LIMIT 1'
        return str((await self._fetch(statement, json.dumps(vector)))[0]["id"])

    async def remove(self, collection: str) -> None:
        await self._fetch(f'DROP TABLE "{collection}"')

    async def more_vectors(self, collection: str) -> dict[str, dict[str, Any]]:
        stored: dict[str, dict[str, Any]] = {}
        for row in await self._fetch(
            f"SELECT id, to_jsonb(t) ->> 'embedding' AS dense, sparse::text FROM \"{collection}\" t"
        ):
            weights = row["sparse"].partition("}")[0].strip("{")
            # the text of a sparsevec counts from 1
            sparse = {int(place) - 1: float(value) for place, value in (pair.split(":") for pair in weights.split(","))}
            stored[row["id"]] = {"sparse": sparse, **({"dense": json.loads(row["dense"])} if row["dense"] else {})}
        return stored

    async def kill(self) -> None:
        self.server.kill()


class Qdrant:
    """Qdrant, through its own client."""

    def __init__(self, server: QdrantServer) -> None:
        self.server = server
        self.url = server.url

    def _client(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dependencies of the library emit warnings
            from qdrant_client import QdrantClient
        return QdrantClient(
            host="127.0.0.1", port=self.server.port, check_compatibility=False, trust_env=False, timeout=60
        )

    async def create(self, collection: str, dims: int, distance: str) -> None:
        from qdrant_client import models

        vectors = models.VectorParams(size=dims, distance=models.Distance(distance))
        client = self._client()
        await asyncio.to_thread(client.create_collection, collection, vectors)
        client.close()

    async def found(self, collection: str) -> dict[str, tuple[list[float], dict[str, Any]]]:
        client = self._client()
        points: list[Any] = []
        following = None
        while True:
            page, following = client.scroll(collection, limit=1000, offset=following, with_vectors=True)
            points += page
            if following is None:
                break
        assert client.count(collection, exact=True).count == len(points)
        client.close()
        for record in points:
            assert record.id == str(uuid.uuid5(uuid.NAMESPACE_URL, record.payload["_id"]))
        return {entry.payload.pop("_id"): (entry.vector, entry.payload) for entry in points}

    async def nearest(self, collection: str, vector: list[float]) -> str:
        client = self._client()
        (point,) = client.query_points(collection, vector, limit=1).points
        client.close()
        return str(point.payload["_id"])

    async def remove(self, collection: str) -> None:
        client = self._client()
        await asyncio.to_thread(client.delete_collection, collection)
        client.close()

    async def more_vectors(self, collection: str) -> dict[str, dict[str, Any]]:
        client = self._client()
        points, _ = client.scroll(collection, limit=1000, with_vectors=True)
        client.close()
        stored: dict[str, dict[str, Any]] = {}
        for point in points:
            vectors = dict(point.vector)
            if "sparse" in vectors:
                vectors["sparse"] = dict(zip(vectors["sparse"].indices, vectors["sparse"].values, strict=True))
            stored[point.payload["_id"]] = vectors
        return stored

    async def kill(self) -> None:
        self.server.kill()

    async def start(self) -> None:
        self.server.begin()  # in this thread, because the server ends with the thread that starts it
        await asyncio.to_thread(self.server.answers)


async def with_extension(server: PostgresServer) -> None:
    await server.answers()
    connection = await asyncpg.connect(server.root_url)
    await connection.execute("CREATE EXTENSION vector")
    await connection.close()
