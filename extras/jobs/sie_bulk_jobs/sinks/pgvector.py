"""PostgreSQL with pgvector. The rows of a job are in the table `collection (id text primary key, embedding vector(d),
sparse sparsevec(n), payload jsonb)`. The table has only the vector columns that the job writes.

    rows ──binary COPY──► temporary table ──INSERT ... ON CONFLICT DO UPDATE──► table, all in one transaction

A table of pgvector has no distance function: each query and each index names one (`<=>` is the cosine distance). The
operator creates an index after a job, because updating the index for each row would be much slower.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import re
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import asyncpg
import numpy as np
from numpy.typing import NDArray

from sie_bulk_jobs.sinks.sink import (
    CollectionMismatch,
    CollectionMissing,
    Kind,
    NearRow,
    Output,
    RowsRefused,
    Sink,
    SinkRows,
    SinkUnsuitable,
    SparseRow,
    Widths,
    check_dims,
    checked_name,
    encoded,
    payload_object,
)
from sie_store.object_stores import AccessRefused, RetryPolicy, StoreError

T = TypeVar("T")
# SQLSTATE codes that occur if two writers create the same table or type at the same time
RACES = ("23505", "42P07", "42710")
MAX_DIMS = 16_000
MAX_WIDTHS: Widths = {"dense": MAX_DIMS, "sparse": 1_000_000_000}
VECTOR_TYPES = ("vector", "sparsevec")
COLUMNS: tuple[tuple[Output, str, str], ...] = (("dense", "embedding", "vector"), ("sparse", "sparse", "sparsevec"))
COPY_ROWS = 500
CONNECT_S = 10.0
# lowest rate at which a database must accept rows, in bytes per second; it determines the time limit of a write
BYTES_PER_S = 1 << 20
_STATE = re.compile(r"[0-9A-Z]{5}")
_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")  # the character NUL in JSON: \u0000 after an even number of backslashes
SCHEMA_OF_EXTENSION = """
SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace WHERE e.extname = 'vector'
"""
COLUMNS_OF_TABLE = """
SELECT a.attname AS name, format_type(a.atttypid, a.atttypmod) AS type, a.attnotnull AS not_null, n.nspname AS schema,
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisunique AND i.indimmediate
               AND i.indpred IS NULL AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum) AS is_unique,
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisprimary AND i.indnkeyatts = 1
               AND i.indkey[0] = a.attnum) AS is_primary,
       col_description(a.attrelid, a.attnum) AS comment
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped
"""

_SEARCH_WIDTHS = """
SELECT set_config(name, least(greatest(coalesce(nullif(current_setting(name, true), '')::int, usual), $1::int),
                              most)::text, true)
FROM (VALUES ('hnsw.ef_search', 40, 1000), ('ivfflat.probes', 1, 32768)) AS settings (name, usual, most)
"""


class PostgresDatabase:
    """Transactions in the database at a URL. Each transaction opens a new connection, so that a broken connection is
    never used again. This is cheap, because a transaction reads or writes thousands of rows.
    """

    def __init__(self, url: str, patience: RetryPolicy) -> None:
        self._url = url
        self._patience = patience

    async def transaction(self, work: Callable[[Any], Awaitable[T]], size: int = 0) -> T:
        """Return the result of `work` in one transaction, which is repeated if another attempt may help. `size`: bytes
        that the transaction transfers. Raises StoreError.
        """
        bound_s = self._patience.stall_s + size / BYTES_PER_S
        return await self._patience.repeated(functools.partial(self._once, work, bound_s, True))

    async def alone(self, work: Callable[[Any], Awaitable[T]], bound_s: float) -> T:
        """Return the result of `work`, whose statements PostgreSQL refuses in a transaction. `bound_s`: seconds that an
        attempt may take. `work` is called again if another attempt may help. Raises StoreError.
        """
        return await self._patience.repeated(functools.partial(self._once, work, bound_s, False))

    async def _once(self, work: Callable[[Any], Awaitable[T]], bound_s: float, is_transaction: bool) -> T:
        try:
            async with asyncio.timeout(bound_s), self._connection() as connection:
                if is_transaction:
                    await connection.execute("BEGIN")
                # Without a time limit of its own, the server would continue a statement after its client has
                # disconnected.
                local = "LOCAL " if is_transaction else ""
                await connection.execute(f"SET {local}statement_timeout = {int(bound_s * 1000)}")
                result = await work(connection)
                if is_transaction:
                    await connection.execute("COMMIT")
                return result
        except TimeoutError:
            raise StoreError(f"PostgreSQL did not reply within {bound_s:g} s") from None
        except asyncpg.PostgresError as error:
            raise _failure(error) from None
        except (asyncpg.exceptions.ClientConfigurationError, FileNotFoundError):
            # FileNotFoundError: a file that the URL names is missing
            raise SinkUnsuitable(
                "the URL of the database has options that cannot be used: correct the options after the ?; "
                "sslmode=verify-ca and sslmode=verify-full need a certificate file, which sslrootcert names or which "
                "is ~/.postgresql/root.crt"
            ) from None
        except (asyncpg.InterfaceError, asyncpg.InternalClientError, OSError) as error:
            raise StoreError(f"PostgreSQL cannot be reached ({type(error).__name__})") from None

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        # cached prepared statements would fail if a connection pooler drops them after a transaction
        connection = await asyncpg.connect(self._url, timeout=CONNECT_S, statement_cache_size=0)
        try:
            yield connection
            await connection.close()
        finally:
            # `terminate` closes the socket without waiting for the server; the server then rolls the transaction back
            connection.terminate()


class PgvectorSink(Sink):
    def __init__(self, url: str, patience: RetryPolicy) -> None:
        self._database = PostgresDatabase(url, patience)
        self._widths: Widths = {}
        self._table = ""  # quoted name of the table, with its schema
        self._extension = ""  # name of the SQL schema that has the types of pgvector

    async def prepare(self, collection: str, widths: Widths, kinds: Mapping[str, Kind]) -> None:
        """Create or check the table. `kinds` is unused: jsonb stores types, and the operator creates indexes."""
        checked_name(collection)
        for output, dims in widths.items():
            check_dims(dims, MAX_WIDTHS[output], "pgvector")
        self._extension, schema = await self._database.transaction(
            functools.partial(_prepared, collection=collection, columns=_vector_columns(widths))
        )
        self._table, self._widths = f"{quoted(schema)}.{quoted(collection)}", widths

    async def upsert(self, rows: SinkRows) -> None:
        assert self._table, "prepare comes first"
        latest = rows.latest(self._widths)
        records = await asyncio.to_thread(_records, latest, self._widths)
        if records:
            size = sum(map(len, itertools.chain.from_iterable(records)))
            await self._database.transaction(functools.partial(self._written, records=records), size)

    async def search(self, collection: str, vector: NDArray[np.float32], limit: int) -> list[NearRow]:
        search = functools.partial(_searched, collection=checked_name(collection), vector=vector, limit=limit)
        rows = await self._database.transaction(search)
        # a row whose vector is NULL or zero has no similarity: the database returns it last, and it is left out here
        near = (row for row in rows if row["score"] is not None and math.isfinite(row["score"]))
        return [NearRow(row["id"], row["score"], payload_object(row["payload"])) for row in near]

    async def close(self) -> None:
        """Do nothing: the sink has no open connection between calls."""

    async def _written(self, connection: Any, records: list[tuple[Any, ...]]) -> None:
        columns = {name: type.partition("(")[0] for name, type in _vector_columns(self._widths).items()}
        await copy_rows(connection, self._extension, {**columns, "payload": "jsonb"}, records)
        names = ", ".join([*columns, "payload"])
        changes = ", ".join(f"{name} = EXCLUDED.{name}" for name in [*columns, "payload"])
        # Rows are written in the order of ids, so that two writers lock the same rows in the same order and cannot
        # deadlock.
        await connection.execute(
            f"INSERT INTO {self._table} (id, {names}) "  # noqa: S608  quoted, and checked by prepare
            f"SELECT id, {names} FROM pg_temp.sie_rows ORDER BY id ON CONFLICT (id) DO UPDATE SET {changes}"
        )


async def copy_rows(
    connection: Any, extension: str, columns: Mapping[str, str], records: Sequence[tuple[Any, ...]]
) -> None:
    """Copy records (id, values of `columns`) into the temporary table `sie_rows` of this transaction. `columns`: SQL
    types by name; values of VECTOR_TYPES are bytes in pgvector's binary form.
    """
    fields = ["id text"]
    for name, type in columns.items():
        if type in VECTOR_TYPES:
            await connection.set_type_codec(type, schema=extension, encoder=bytes, decoder=bytes, format="binary")
        fields.append(f"{name} {quoted(extension)}.{type}" if type in VECTOR_TYPES else f"{name} {type}")
    await connection.execute(f"CREATE TEMPORARY TABLE sie_rows ({', '.join(fields)}) ON COMMIT DROP")
    for start in range(0, len(records), COPY_ROWS):
        await connection.copy_records_to_table(
            "sie_rows", schema_name="pg_temp", records=records[start : start + COPY_ROWS]
        )


def _vector_columns(widths: Widths) -> dict[str, str]:
    """Return the SQL types of the vector columns by column name."""
    return {name: f"{type}({widths[output]})" for output, name, type in COLUMNS if output in widths}


async def _prepared(connection: Any, collection: str, columns: Mapping[str, str]) -> tuple[str, str]:
    """Create the extension and the table if they do not exist, and check the table. `columns`: SQL types of the vector
    columns by name. Returns (schema of the extension, schema of the table).
    """
    extension = await connection.fetchval(SCHEMA_OF_EXTENSION)
    if extension is None:
        try:
            await connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        except asyncpg.InsufficientPrivilegeError:
            raise SinkUnsuitable(
                "the database has no extension vector, and this user may not create it: a superuser must run CREATE "
                "EXTENSION vector"
            ) from None
        except (asyncpg.UndefinedFileError, asyncpg.FeatureNotSupportedError, asyncpg.UndefinedObjectError):
            raise SinkUnsuitable("pgvector is not installed on the server of the database") from None
        extension = await connection.fetchval(SCHEMA_OF_EXTENSION)
    stored = await connection.fetch(COLUMNS_OF_TABLE, quoted(collection))
    if not stored:
        vectors = ", ".join(f"{name} {quoted(extension)}.{type} NOT NULL" for name, type in columns.items())
        try:
            await connection.execute(
                f"CREATE TABLE IF NOT EXISTS {quoted(collection)} "
                f"(id text PRIMARY KEY, {vectors}, payload jsonb NOT NULL)"
            )
        except asyncpg.UndefinedObjectError:
            raise SinkUnsuitable(
                f"the pgvector extension of the database is too old to store {', '.join(columns.values())}: sparse "
                "vectors need pgvector 0.7 or later"
            ) from None
        stored = await connection.fetch(COLUMNS_OF_TABLE, quoted(collection))
    types = _types(stored)
    for name, type in columns.items():
        if (actual := types.get(name, f"no column {name}")) != type:
            raise CollectionMismatch(f"the table {collection} has {actual}, expected the column {name} of type {type}")
    if types.get("id") != "text" or types.get("payload") != "jsonb":
        raise CollectionMismatch(f"the table {collection} lacks the columns id of type text and payload of type jsonb")
    if not any(column["name"] == "id" and column["is_unique"] for column in stored):
        raise CollectionMismatch(f"the column id of the table {collection} is neither a primary key nor unique")
    return extension, stored[0]["schema"]


async def _searched(connection: Any, collection: str, vector: NDArray[np.float32], limit: int) -> list[Any]:
    """Return id, score and payload of the nearest rows, in a transaction that cannot write."""
    await connection.execute("SET TRANSACTION READ ONLY")
    columns = await connection.fetch(COLUMNS_OF_TABLE, quoted(collection))
    if not columns:
        raise CollectionMissing("PostgreSQL has no such table")
    extension = await connection.fetchval(SCHEMA_OF_EXTENSION)
    kind = f"vector({len(vector)})"
    if _types(columns).get("embedding") != kind or extension is None:
        raise CollectionMismatch(f"the table {collection} has no column embedding of the type {kind}")
    await connection.set_type_codec("vector", schema=extension, encoder=bytes, decoder=bytes, format="binary")
    # Without larger limits, the search may return too few rows: an HNSW scan returns at most `hnsw.ef_search` rows, and
    # an IVFFlat scan reads only `ivfflat.probes` lists.
    await connection.execute(_SEARCH_WIDTHS, limit)
    distance = f"embedding OPERATOR({quoted(extension)}.<=>) $1::{quoted(extension)}.vector"
    rows: list[Any] = await connection.fetch(
        f"SELECT id, 1 - ({distance}) AS score, payload::text FROM {quoted(columns[0]['schema'])}."  # noqa: S608  quoted
        f"{quoted(collection)} ORDER BY {distance} LIMIT $2",
        binary(vector),
        limit,
    )
    return rows


def _types(columns: Sequence[Any]) -> dict[str, str]:
    """Return the types of columns by name, without the SQL schemas of the types."""
    return {column["name"]: column["type"].rpartition(".")[2] for column in columns}


def binary(vector: NDArray[np.float32]) -> bytes:
    """Return a vector in pgvector's binary form: its number of dimensions, two zero bytes, and its float32 numbers, all
    big-endian.
    """
    return struct.pack(">HH", len(vector), 0) + vector.astype(np.dtype(">f4")).tobytes()


def vector_binary(vector: NDArray[np.float32] | SparseRow, dims: int) -> bytes:
    """Return a vector in pgvector's binary form. A sparse vector has the number of dimensions, the number of values,
    four zero bytes, the int32 indices and the float32 values, all big-endian.
    """
    if not isinstance(vector, SparseRow):
        return binary(vector)
    head = struct.pack(">iii", dims, len(vector.indices), 0)
    return head + vector.indices.astype(np.dtype(">i4")).tobytes() + vector.values.astype(np.dtype(">f4")).tobytes()


def _records(rows: SinkRows, widths: Widths) -> list[tuple[Any, ...]]:
    """Return rows as records for binary COPY: id, vectors, payload. U+FFFD replaces the character NUL, which PostgreSQL
    cannot store in a payload. Raises RowsRefused.
    """
    encoded_rows = []
    for number, (row_id, payload) in enumerate(zip(rows.ids, rows.payloads, strict=True)):
        encoded(row_id, number)
        if "\0" in row_id:
            raise RowsRefused(f"row {number} has an id with the character NUL, which PostgreSQL cannot store")
        text = encoded(payload, number).decode()
        dense = (binary(rows.vectors[number]),) if "dense" in widths else ()
        sparse = (vector_binary(rows.sparse[number], widths["sparse"]),) if rows.sparse else ()
        text = _NUL.sub(r"\1\\ufffd", text) if "\\u0000" in text else text
        encoded_rows.append((row_id, *dense, *sparse, text))
    return encoded_rows


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _failure(error: asyncpg.PostgresError) -> StoreError:
    """Return the StoreError for an error of PostgreSQL. PostgreSQL's message is left out, because it quotes rows."""
    state = error.sqlstate if _STATE.fullmatch(error.sqlstate or "") else "no SQLSTATE"
    error_name = f"{type(error).__name__}, {state}"
    if state[:2] == "28" or state == "42501":
        return AccessRefused(f"PostgreSQL refuses this user ({error_name})")
    if state == "3D000":
        return SinkUnsuitable("PostgreSQL has no such database")
    if state in RACES:
        return StoreError(f"another writer has created the same table at the same time ({error_name})")
    if state in ("42P01", "3F000"):
        return CollectionMissing(
            f"PostgreSQL no longer has the table ({error_name}): the next start of the job creates it again"
        )
    if state[:2] == "42":
        return CollectionMismatch(f"the table was changed meanwhile ({error_name})")
    if state[:2] in ("22", "23", "54"):
        return RowsRefused(f"PostgreSQL refuses the rows ({error_name})")
    return StoreError(f"PostgreSQL reports an error ({error_name})")
