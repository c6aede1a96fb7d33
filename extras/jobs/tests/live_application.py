"""Applications that search and write a collection in use, through PostgreSQL and the client of Qdrant.

`stored_rows` returns the rows that searches see, as text and vector by id. `beside` returns them with the vectors that
a migration keeps beside those in use.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import asyncpg
import numpy as np
from postgres_server import PostgresServer
from qdrant_server import QdrantServer

from sie_bulk_jobs.sinks.live import Side
from sie_bulk_jobs.sinks.sink import Output

Stored = Mapping[str, tuple[str | None, list[float] | None]]  # id -> text and vector


class Application(Protocol):
    output: Output
    url: str
    collection: str  # the name that the application uses

    async def create(self, dims: int) -> None: ...
    async def write(self, rows: Stored) -> None: ...
    async def change_text(self, row_id: str, text: str) -> None: ...
    async def delete(self, *ids: str) -> None: ...
    async def stored_rows(self) -> Stored: ...
    async def beside(self, side: Side) -> Stored: ...
    async def new_vectors(self) -> int: ...
    async def is_clean(self) -> bool: ...
    def close(self) -> None: ...


class Table:
    """A table of PostgreSQL with an integer key and a column that no migration knows."""

    def __init__(self, server: PostgresServer, collection: str, output: Output = "dense") -> None:
        self.server = server
        self.output = output
        self._type = "sparsevec" if output == "sparse" else "vector"
        self.url = server.url()
        self.collection = collection

    def close(self) -> None:
        """Do nothing: each statement has a connection of its own."""

    async def run(self, statement: str, *values: Any) -> list[Any]:
        connection = await asyncpg.connect(self.url)
        try:
            return list(await connection.fetch(statement, *values))
        finally:
            await connection.close()

    async def create(self, dims: int) -> None:
        await self.run(
            f'CREATE TABLE "{self.collection}" (number bigint PRIMARY KEY, body text, price numeric DEFAULT 1, '
            f"embedding {self._type}({dims}) NOT NULL)"
        )

    async def write(self, rows: Stored) -> None:
        connection = await asyncpg.connect(self.url)
        try:
            await connection.executemany(
                f'INSERT INTO "{self.collection}" (number, body, embedding) VALUES ($1, $2, $3::text::vector::'
                f"{self._type}) "
                "ON CONFLICT (number) DO UPDATE SET body = EXCLUDED.body, embedding = EXCLUDED.embedding",
                [(int(row_id), text, vector and json.dumps(vector)) for row_id, (text, vector) in rows.items()],
            )
        finally:
            await connection.close()

    async def change_text(self, row_id: str, text: str) -> None:
        await self.run(f'UPDATE "{self.collection}" SET body = $2 WHERE number = $1', int(row_id), text)

    async def delete(self, *ids: str) -> None:
        await self.run(f'DELETE FROM "{self.collection}" WHERE number = ANY($1::bigint[])', [*map(int, ids)])

    async def _rows(self, column: str) -> Stored:
        rows = await self.run(f'SELECT number, body, {column}::vector::text AS vector FROM "{self.collection}"')
        return {str(row["number"]): (row["body"], row["vector"] and json.loads(row["vector"])) for row in rows}

    async def stored_rows(self) -> Stored:
        return await self._rows("embedding")

    async def beside(self, side: Side) -> Stored:
        return await self._rows("embedding_next" if side == "new" else "embedding_before")

    async def new_vectors(self) -> int:
        """Return how many rows have a new vector; 0 before the migration begins."""
        try:
            (row,) = await self.run(f'SELECT count(embedding_next) AS count FROM "{self.collection}"')
        except asyncpg.UndefinedColumnError:
            return 0
        return int(row["count"])

    async def is_clean(self) -> bool:
        rows = await self.run(
            "SELECT attname, attnotnull FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0 "
            "AND NOT attisdropped",
            f'"{self.collection}"',
        )
        columns = {row["attname"]: row["attnotnull"] for row in rows}
        return columns.keys() == {"number", "body", "price", "embedding"}


class Points:
    """Points behind an alias, with a sparse vector that no migration changes if `is_hybrid`."""

    def __init__(
        self, server: QdrantServer, collection: str, *, is_hybrid: bool = False, output: Output = "dense"
    ) -> None:
        self.output = output
        self.server = server
        self.url = server.url
        self.collection = collection
        self.first = f"{collection}-1"
        self.is_hybrid = is_hybrid
        self._client: Any = None

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def client(self) -> Any:
        if self._client is not None:
            return self._client
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dependencies of the library emit warnings
            from qdrant_client import QdrantClient
        key = self.server.url.rpartition("@")[0].removeprefix("qdrant://") or None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the client warns of a key without TLS
            self._client = QdrantClient(
                host="127.0.0.1",
                port=self.server.port,
                api_key=key,
                https=False,
                check_compatibility=False,
                trust_env=False,
                timeout=60,
            )
        return self._client

    def _create(self, dims: int) -> None:
        from qdrant_client import models

        client = self.client()
        vector = models.VectorParams(size=dims, distance=models.Distance.COSINE)
        if self.output == "multivector":
            vector.multivector_config = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
        if self.output == "sparse":
            client.create_collection(self.first, {}, sparse_vectors_config={"words": models.SparseVectorParams()})
        elif self.is_hybrid:
            client.create_collection(
                self.first, {"text": vector}, sparse_vectors_config={"words": models.SparseVectorParams()}
            )
        else:
            client.create_collection(self.first, vector, on_disk_payload=False)
        client.create_payload_index(self.first, "price", models.PayloadSchemaType.INTEGER)
        self.name()

    def name(self) -> None:
        """Create the alias."""
        from qdrant_client import models

        alias = models.CreateAlias(collection_name=self.first, alias_name=self.collection)
        self.client().update_collection_aliases([models.CreateAliasOperation(create_alias=alias)])

    async def create(self, dims: int) -> None:
        await asyncio.to_thread(self._create, dims)

    def _write(self, rows: Stored) -> None:
        from qdrant_client import models

        points = []
        for row_id, (text, vector) in rows.items():
            content: Any = [vector] if vector and self.output == "multivector" else vector
            if vector and self.output == "sparse":
                content = {"words": models.SparseVector(indices=[*range(len(vector))], values=vector)}
            if self.is_hybrid:
                content = {"words": models.SparseVector(indices=[int(row_id), 7000], values=[0.5, 0.25])}
                if vector is not None:
                    content["text"] = vector
            payload = {"price": int(row_id), **({} if text is None else {"body": text})}
            points.append(models.PointStruct(id=int(row_id), vector=content or {}, payload=payload))
        client = self.client()
        for start in range(0, len(points), 500):
            client.upsert(self.collection, points[start : start + 500])

    async def write(self, rows: Stored) -> None:
        await asyncio.to_thread(self._write, rows)

    async def change_text(self, row_id: str, text: str) -> None:
        client = self.client()
        await asyncio.to_thread(client.set_payload, self.collection, {"body": text}, [int(row_id)])

    async def delete(self, *ids: str) -> None:
        client = self.client()
        await asyncio.to_thread(client.delete, self.collection, [*map(int, ids)])

    def _rows(self, name: str) -> Stored:
        client = self.client()
        rows: dict[str, tuple[str | None, list[float] | None]] = {}
        following = None
        while True:
            page, following = client.scroll(name, limit=1000, offset=following, with_vectors=True)
            for point in page:
                vector = point.vector
                if self.is_hybrid:
                    assert vector["words"].indices == sorted([point.id, 7000]), point
                    vector = vector.get("text")
                elif vector and self.output == "sparse":
                    vector = vector["words"].values if "words" in vector else None
                elif vector and self.output == "multivector":
                    (vector,) = vector
                assert point.payload["price"] == point.id
                rows[str(point.id)] = (point.payload.get("body"), vector or None)
            if following is None:
                return rows

    def names(self) -> dict[str, str]:
        """Return the collections by alias."""
        client = self.client()
        return {alias.alias_name: alias.collection_name for alias in client.get_aliases().aliases}

    async def stored_rows(self) -> Stored:
        return await asyncio.to_thread(self._rows, self.collection)

    async def beside(self, side: Side) -> Stored:
        if side == "old":
            return await asyncio.to_thread(self._rows, self.names()[f"{self.collection}--before"])
        (name,) = self.unnamed()
        return await asyncio.to_thread(self._rows, name)

    def unnamed(self) -> list[str]:
        """Return the collections of a migration that no alias names."""
        client = self.client()
        names = [collection.name for collection in client.get_collections().collections]
        in_use = self.names().values()
        return [name for name in names if name.startswith(f"{self.collection}--") and name not in in_use]

    async def new_vectors(self) -> int:
        """Return how many rows have a new vector; 0 before the migration begins."""
        client = self.client()
        counts = [client.count(name, exact=True).count for name in self.unnamed()]
        return sum(counts)

    async def is_clean(self) -> bool:
        client = self.client()
        points, _ = client.scroll(self.collection, limit=10_000)
        count = sum(collection.name.startswith(self.collection) for collection in client.get_collections().collections)
        return (
            count == 1
            and not any("_sie" in point.payload for point in points)
            and f"{self.collection}--before" not in self.names()
        )


def is_close(stored: list[float] | None, vector: Any) -> bool:
    """Return True if a stored vector has the direction of another one. Qdrant stores vectors with length 1."""
    if stored is None or len(stored) != len(vector):
        return False
    left, right = np.array(stored), np.array(vector)
    return bool(left @ right / (np.linalg.norm(left) * np.linalg.norm(right)) > 0.9999)
