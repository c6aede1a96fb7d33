"""LanceDB: tables in a folder or in an object store, without a server. The rows of a job are in the table `collection`
with the columns `id`, `vector` and `payload` (JSON as text).

    rows ──merge_insert(id)──► a new version of the table, which has all of the rows or does not appear

`id` is the primary key of the table. So if two writers insert the same id at the same time, the writes conflict, and
LanceDB repeats one write as an update.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import lancedb
import numpy as np
import pyarrow
from numpy.typing import NDArray

from sie_store.object_stores import RetryPolicy, StoreError
from sie_store.sinks.sink import (
    CollectionMismatch,
    CollectionMissing,
    Kind,
    NearRow,
    Sink,
    SinkRows,
    Widths,
    check_dims,
    checked_name,
    encoded,
    payload_object,
)

T = TypeVar("T")
ID, VECTOR, PAYLOAD = "id", "vector", "payload"
MAX_DIMS = 65_536
STORAGE = {"allow_http": "true"}  # the endpoint in AWS_ENDPOINT_URL may begin with http://
# lowest rate at which the storage must accept rows, in bytes per second; it determines the time limit of a write
BYTES_PER_S = 1 << 20
_PRIMARY_KEY = {b"lance-schema:unenforced-primary-key": b"true"}


class LanceDatabase:
    """Calls to the database at an address: a folder, or a prefix in an object store."""

    def __init__(self, address: str, patience: RetryPolicy) -> None:
        self._address = address
        self._patience = patience
        self._connection: Any = None

    async def run(self, work: Callable[[Any], Awaitable[T]], seconds: float = 0.0, *, once: bool = False) -> T:
        """Return the result of `work`, called with a connection. Without `once`, `work` is called again if another
        attempt may help. `seconds`: time that an attempt may take in addition to the `stall_s` of the RetryPolicy.
        Raises StoreError.
        """
        attempt = functools.partial(self._once, work, self._patience.stall_s + seconds)
        return await (attempt() if once else self._patience.repeated(attempt))

    async def _once(self, work: Callable[[Any], Awaitable[T]], bound_s: float) -> T:
        try:
            async with asyncio.timeout(bound_s):
                if self._connection is None:
                    self._connection = await lancedb.connect_async(self._address, storage_options=STORAGE)
                return await work(self._connection)
        except StoreError:
            raise
        except TimeoutError:
            raise StoreError(f"the storage of LanceDB did not reply within {bound_s:g} s") from None
        except ValueError:
            raise CollectionMismatch(
                "LanceDB refuses the call: check the URL of the database, and that no other program changes the table"
            ) from None
        except Exception as error:  # noqa: BLE001  the library raises any type; its messages may quote rows
            raise StoreError(f"LanceDB reports an error ({type(error).__name__})") from None

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class LanceSink(Sink):
    def __init__(self, database: LanceDatabase) -> None:
        self._database = database
        self._collection = ""
        self._schema: Any = None

    async def prepare(self, collection: str, widths: Widths, kinds: Mapping[str, Kind]) -> None:
        """Create or check the table. `kinds` is unused: the payload is one text, so its fields have no indexes."""
        checked_name(collection)
        dims = widths["dense"]
        check_dims(dims, MAX_DIMS, "LanceDB")
        schema = _schema(dims)

        async def created(connection: Any) -> Any:
            try:
                table = await opened_table(connection, collection)
            except CollectionMissing:
                table = await connection.create_table(collection, schema=schema, exist_ok=True)
            return await table.schema()

        _check(await self._database.run(created), collection, dims)
        self._collection, self._schema = collection, schema

    async def upsert(self, rows: SinkRows) -> None:
        assert self._collection, "prepare comes first"
        data = await asyncio.to_thread(
            _table, rows.latest({"dense": self._schema.field(VECTOR).type.list_size}), self._schema
        )
        if not data.num_rows:
            return

        async def written(connection: Any) -> None:
            table = await opened_table(connection, self._collection)
            await table.merge_insert(ID).when_matched_update_all().when_not_matched_insert_all().execute(data)

        await self._database.run(written, data.nbytes / BYTES_PER_S)

    async def search(self, collection: str, vector: NDArray[np.float32], limit: int) -> list[NearRow]:
        checked_name(collection)

        async def nearest_rows(connection: Any) -> Any:
            table = await opened_table(connection, collection)
            _check(await table.schema(), collection, len(vector))
            near = table.query().nearest_to(vector).column(VECTOR).distance_type("cosine").limit(limit)
            return await near.select([ID, PAYLOAD, "_distance"]).to_list()

        rows = await self._database.run(nearest_rows)
        return [NearRow(row[ID], 1 - row["_distance"], payload_object(row[PAYLOAD])) for row in rows]

    async def close(self) -> None:
        await self._database.close()


async def opened_table(connection: Any, collection: str) -> Any:
    """Open the newest version of a table. Raises CollectionMissing."""
    try:
        return await connection.open_table(collection)
    except ValueError as error:
        if "was not found" not in str(error):
            raise
        raise CollectionMissing(f"LanceDB has no table {collection}") from None


def _schema(dims: int) -> Any:
    return pyarrow.schema(
        [
            pyarrow.field(ID, pyarrow.utf8(), nullable=False, metadata=_PRIMARY_KEY),
            pyarrow.field(VECTOR, pyarrow.list_(pyarrow.float32(), dims), nullable=False),
            pyarrow.field(PAYLOAD, pyarrow.utf8(), nullable=False),
        ]
    )


def _check(schema: Any, collection: str, dims: int) -> None:
    """Raise CollectionMismatch if a table lacks a column or the primary key that a sink creates."""
    expected = _schema(dims)
    columns = {field.name: field.type for field in schema}
    for field in expected:
        actual = columns.get(field.name)
        if actual is None or not actual.equals(field.type):
            shown = "no such column" if actual is None else actual
            raise CollectionMismatch(
                f"the column {field.name} of the table {collection}: the table has {shown}, but {field.type} is needed"
            )
    if (schema.field(ID).metadata or {}).items().isdisjoint(_PRIMARY_KEY.items()):
        raise CollectionMismatch(f"the column {ID} of the table {collection} is not its primary key")


def _table(rows: SinkRows, schema: Any) -> Any:
    """Return rows as a table of Arrow. Raises RowsRefused."""
    payloads = []
    for number, (row_id, payload) in enumerate(zip(rows.ids, rows.payloads, strict=True)):
        encoded(row_id, number)
        payloads.append(encoded(payload, number).decode())
    return pyarrow.table(
        [
            pyarrow.array(rows.ids, pyarrow.utf8()),
            vectors_array(rows.vectors, schema.field(VECTOR).type),
            pyarrow.array(payloads, pyarrow.utf8()),
        ],
        schema=schema,
    )


def vectors_array(vectors: NDArray[Any], type: Any) -> Any:
    """Return vectors [rows, dimensions] as an Arrow array of `type`, a list type of fixed size."""
    numbers = pyarrow.array(np.ascontiguousarray(vectors).ravel()).cast(type.value_type)
    return pyarrow.FixedSizeListArray.from_arrays(numbers, type=type)
