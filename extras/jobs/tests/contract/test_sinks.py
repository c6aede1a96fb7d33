"""Vector databases that jobs write to, with the same cases for each: PostgreSQL with pgvector, and Qdrant's engine
behind the routes of tests/qdrant_server.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import numpy as np
import pytest
import pytest_asyncio
from databases import Database, Postgres, Qdrant, with_extension
from postgres_server import PostgresServer
from qdrant_server import QdrantServer

from sie_bulk_jobs.sinks.opening import opened
from sie_bulk_jobs.sinks.pgvector import PgvectorSink
from sie_bulk_jobs.sinks.qdrant import QdrantSink, point_bodies
from sie_bulk_jobs.sinks.sink import (
    CollectionMismatch,
    CollectionMissing,
    CollectionRefused,
    RowsRefused,
    Sink,
    SinkRows,
    SinkUnsuitable,
    SparseRow,
    Widths,
)
from sie_store.object_stores import AccessRefused, RetryPolicy, StoreError

QUICK = RetryPolicy(stall_s=60.0, tries=2, pause_s=0.01)
LONG = RetryPolicy(stall_s=60.0, tries=60, pause_s=0.2)
SECRET = "k3y-of-qdrant"
DIMS = 16

pytestmark = [pytest.mark.xdist_group("sinks"), pytest.mark.timeout(300)]


def rows(first: int, count: int) -> SinkRows:
    """Return rows that are the same for the same numbers."""
    numbers = range(first, first + count)
    vectors = [np.random.default_rng(number).standard_normal(DIMS, dtype=np.float32) for number in numbers]
    ids = [f"s3://bucket/части/{number} 'Ω' 🦀" for number in numbers]
    text = "\"quoted\" 'text' \\ {}; DROP TABLE vectors; 日本語"
    return SinkRows(ids, np.array(vectors, np.float32), [{"number": number, "text": text} for number in numbers])


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    try:
        server.begin()
        asyncio.run(with_extension(server))
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="module")
def qdrant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QdrantServer]:
    server = QdrantServer(tmp_path_factory.mktemp("qdrant"))
    server.start()
    yield server
    server.kill()


DATABASES: dict[str, Callable[[Any], Database]] = {"postgres": Postgres, "qdrant": Qdrant}


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest) -> Database:
    """A database on the server that all tests of this file share."""
    return DATABASES[request.param](request.getfixturevalue(request.param))


@pytest_asyncio.fixture
async def sink(database: Database) -> AsyncIterator[Sink]:
    opened_sink = opened(database.url, "SIE_JOBS_SINKS", QUICK)
    yield opened_sink
    await opened_sink.close()


@pytest.fixture
def collection() -> str:
    return f"c-{uuid.uuid4().hex}"


async def has(database: Database, collection: str, expected: SinkRows) -> None:
    """Assert that a collection has exactly these rows, and that three of them are the nearest row of their vector."""
    stored_rows = await database.found(collection)
    assert stored_rows.keys() == set(expected.ids)
    for row_id, vector, payload in zip(expected.ids, expected.vectors, expected.payloads, strict=True):
        stored = np.array(stored_rows[row_id][0])
        assert np.allclose(stored / np.linalg.norm(stored), vector / np.linalg.norm(vector), atol=1e-5)
        assert stored_rows[row_id][1] == payload
    for number in (0, len(expected.ids) // 2, len(expected.ids) - 1):
        assert await database.nearest(collection, expected.vectors[number].tolist()) == expected.ids[number]


async def test_rows_are_written_once_however_often_they_are_sent(
    sink: Sink, database: Database, collection: str
) -> None:
    await sink.prepare(collection, {"dense": DIMS}, {"number": "integer", "a.b": "keyword"})
    for first in (0, 300, 150, 0):
        await sink.upsert(rows(first, 300))
    await has(database, collection, rows(0, 600))
    await sink.prepare(collection, {"dense": DIMS}, {"number": "integer"})
    await has(database, collection, rows(0, 600))


async def test_a_search_returns_the_nearest_rows_and_changes_nothing(
    sink: Sink, database: Database, collection: str
) -> None:
    stored = rows(0, 40)
    await sink.prepare(collection, {"dense": DIMS}, {})
    await sink.upsert(stored)
    query = stored.vectors[7]
    similarities = stored.vectors @ query / np.linalg.norm(stored.vectors, axis=1) / np.linalg.norm(query)
    order = np.argsort(-similarities)[:5]
    hits = await sink.search(collection, query, 5)
    assert [hit.id for hit in hits] == [stored.ids[number] for number in order]
    assert np.allclose([hit.score for hit in hits], similarities[order], atol=1e-5)
    assert [hit.payload for hit in hits] == [stored.payloads[number] for number in order]
    await has(database, collection, stored)
    # a sink that has prepared no collection can search
    reader = opened(database.url, "SIE_JOBS_SINKS", QUICK)
    try:
        assert [hit.id for hit in await reader.search(collection, query, 1)] == [stored.ids[7]]
        with pytest.raises(CollectionMismatch):
            await reader.search(collection, query[: DIMS - 1], 1)
        for _ in range(2):  # the first search does not create the collection
            with pytest.raises(CollectionMissing):
                await reader.search(f"{collection}-missing", query, 1)
        with pytest.raises(CollectionRefused):
            await reader.search(f'{collection}"; DROP TABLE x; --', query, 1)
    finally:
        await reader.close()


async def test_any_text_is_kept_as_it_is(sink: Sink, database: Database, collection: str) -> None:
    await sink.prepare(collection, {"dense": DIMS}, {})
    texts = [
        "",
        "'; DROP TABLE x; --",
        '"',
        "\\",
        "\\u0000",
        "a\tb\nc\r\\N\\.",
        "日本語",
        "🦀" * 50,
        "e\u0301",
        "\x7f\x01",
    ]
    sink_rows = SinkRows(
        [f"id {text}" for text in texts],
        rows(0, len(texts)).vectors,
        [{text: text, "nested": {"list": [text, 1.5, None, True]}} for text in texts],
    )
    await sink.upsert(sink_rows)
    await has(database, collection, sink_rows)


async def test_nul_is_kept_or_replaced_and_no_row_is_lost(sink: Sink, database: Database, collection: str) -> None:
    await sink.prepare(collection, {"dense": DIMS}, {})
    sink_rows = SinkRows(["a", "b"], rows(0, 2).vectors, [{"t": "x\0\0y\\\0z\\u0000"}, {"t": "b"}])
    await sink.upsert(sink_rows)
    replacement = "\ufffd" if isinstance(database, Postgres) else "\0"
    await has(
        database,
        collection,
        SinkRows(
            sink_rows.ids,
            sink_rows.vectors,
            [{"t": f"x{replacement}{replacement}y\\{replacement}z\\u0000"}, {"t": "b"}],
        ),
    )


@pytest.mark.parametrize(
    "columns",
    [
        "id text, embedding vector(16), payload jsonb",
        "id int primary key, embedding vector(16), payload jsonb",
        "id text",
    ],
)
async def test_a_table_of_another_shape_is_refused(postgres: PostgresServer, collection: str, columns: str) -> None:
    connection = await asyncpg.connect(postgres.url())
    await connection.execute(f'CREATE TABLE "{collection}" ({columns})')
    await connection.close()
    with pytest.raises(CollectionMismatch, match=collection):
        await opened(postgres.url(), "SINK", QUICK).prepare(collection, {"dense": DIMS}, {})


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a" * 64,
        'x"; DROP TABLE "y',
        "x; DROP TABLE y",
        "../other",
        "a/points",
        "a?wait=false",
        "a%2Fb",
        "ä",
        "x\n",
        "-x",
    ],
)
async def test_a_name_that_is_more_than_a_name_is_refused(sink: Sink, name: str) -> None:
    with pytest.raises(CollectionRefused) as refused:
        await sink.prepare(name, {"dense": DIMS}, {})
    assert not name.strip() or name not in str(refused.value)


async def test_rows_that_no_database_keeps_are_refused_without_their_contents(
    sink: Sink, database: Database, collection: str
) -> None:
    await sink.prepare(collection, {"dense": DIMS}, {})
    good = rows(0, 3)
    bad = good.vectors.copy()
    bad[1, 3] = np.nan
    for refused in (
        SinkRows(good.ids, bad, good.payloads),
        SinkRows(good.ids, good.vectors[:, :5], good.payloads),
        SinkRows(good.ids[:2], good.vectors, good.payloads),
        SinkRows(good.ids, good.vectors, [{"t": "private"}, {"t": "private\ud800"}, {}]),
        SinkRows(["a", "private\ud800", "c"], good.vectors, good.payloads),
        SinkRows(good.ids, good.vectors, [{}, {"private": object()}, {}]),
    ):
        with pytest.raises(RowsRefused) as error:
            await sink.upsert(refused)
        assert "private" not in str(error.value)
        assert error.value.__cause__ is None
    assert await database.found(collection) == {}


async def test_two_writers_at_once_create_one_collection_and_keep_each_row_once(
    database: Database, collection: str
) -> None:
    sinks = [opened(database.url, "SINK", LONG) for _ in range(4)]
    await asyncio.gather(*(sink.prepare(collection, {"dense": DIMS}, {}) for sink in sinks))
    await asyncio.gather(*(sink.upsert(rows(0, 200)) for sink in sinks for _ in range(2)))
    await asyncio.gather(*(sink.close() for sink in sinks))
    await has(database, collection, rows(0, 200))


async def test_a_database_that_is_killed_and_started_again_is_waited_for(database: Database, collection: str) -> None:
    """The server is killed while a writer writes. The writer retries until the server is back, and all rows are stored,
    including those that were answered before the kill.
    """
    sink = opened(database.url, "SINK", LONG)
    await sink.prepare(collection, {"dense": DIMS}, {})
    await sink.upsert(rows(0, 100))

    halfway = asyncio.Event()

    async def write() -> None:
        for call in range(1, 10):
            await sink.upsert(rows(call * 100, 100))
            if call == 4:
                halfway.set()

    writing = asyncio.create_task(write())
    await halfway.wait()
    await database.kill()
    impatient = opened(database.url, "SINK", QUICK)
    with pytest.raises(StoreError, match="cannot be reached") as refused:
        await impatient.prepare(collection, {"dense": DIMS}, {})
    assert type(refused.value) is StoreError
    await impatient.close()
    assert not writing.done(), writing
    await database.start()
    await writing
    await sink.close()
    await has(database, collection, rows(0, 1000))


async def test_a_server_that_never_answers_is_given_up_within_the_bound(
    postgres: PostgresServer, collection: str
) -> None:
    sink = PgvectorSink(postgres.url(), RetryPolicy(stall_s=1.0, tries=2, pause_s=0.01))
    await sink.prepare(collection, {"dense": DIMS}, {})
    locker = await asyncpg.connect(postgres.root_url)
    async with locker.transaction():
        await locker.execute(f'LOCK TABLE "{collection}" IN SHARE MODE')
        postgres.pause()
        try:
            async with asyncio.timeout(60):
                with pytest.raises(StoreError, match="did not reply within"):
                    await sink.upsert(rows(0, 10))
        finally:
            postgres.resume()
        async with asyncio.timeout(60):
            with pytest.raises(StoreError, match=r"did not reply within|QueryCanceled"):
                await sink.upsert(rows(0, 10))
    await locker.close()
    await sink.upsert(rows(0, 10))
    await has(Postgres(postgres), collection, rows(0, 10))


async def test_wrong_credentials_are_refused_at_once_and_not_repeated(
    postgres: PostgresServer, tmp_path: Path, collection: str
) -> None:
    server = QdrantServer(tmp_path, key=SECRET)
    server.start()
    try:
        for url in (
            postgres.url(password=SECRET),
            postgres.url("nobody-here", SECRET),
            f"qdrant://{SECRET}-not@127.0.0.1:{server.port}",
        ):
            sink = opened(url, "SINK", LONG)
            with pytest.raises(AccessRefused) as refused:
                await sink.prepare(collection, {"dense": DIMS}, {})
            assert SECRET not in str(refused.value)
            assert refused.value.__cause__ is None
            await sink.close()
        sink = opened(server.url, "SINK", QUICK)
        await sink.prepare(collection, {"dense": DIMS}, {})
        await sink.close()
    finally:
        server.kill()
    with pytest.raises(SinkUnsuitable, match="no such database"):
        await opened(postgres.url(database="nowhere"), "SINK", QUICK).prepare(collection, {"dense": DIMS}, {})


async def test_a_collection_that_was_removed_meanwhile_is_not_created_again(
    sink: Sink, database: Database, collection: str
) -> None:
    await sink.prepare(collection, {"dense": DIMS}, {})
    await database.remove(collection)
    with pytest.raises(CollectionMissing):
        await sink.upsert(rows(0, 3))


OUTPUTS: list[tuple[str, Widths]] = [
    ("qdrant", {"dense": DIMS, "sparse": 100, "multivector": 4}),
    ("qdrant", {"sparse": 100}),
    ("qdrant", {"dense": DIMS, "sparse": 100}),
    ("qdrant", {"multivector": 4}),
    ("postgres", {"dense": DIMS, "sparse": 100}),
    ("postgres", {"sparse": 100}),
]


def more_rows(widths: Widths) -> SinkRows:
    """Return three rows with vectors of some outputs. The multivector of the last row has two tokens, the others
    one.
    """
    plain = rows(0, 3)
    sparse = [SparseRow.from_arrays(np.array([90, 7, number]), np.array([0.5, 0.0, 2.0])) for number in range(3)]
    multivectors = [np.eye(4, dtype=np.float32)[: 1 + number // 2] for number in range(3)]
    return SinkRows(
        plain.ids,
        plain.vectors if "dense" in widths else np.empty((3, 0), np.float32),
        plain.payloads,
        sparse if "sparse" in widths else (),
        multivectors if "multivector" in widths else (),
    )


@pytest.mark.parametrize(("name", "widths"), OUTPUTS)
async def test_each_output_is_written_once_beside_the_others(
    request: pytest.FixtureRequest, collection: str, name: str, widths: Widths
) -> None:
    database = DATABASES[name](request.getfixturevalue(name))
    sink = opened(database.url, "SINK", QUICK)
    rows_of_two = more_rows(widths)
    for _ in range(2):
        await sink.prepare(collection, widths, {})
        await sink.upsert(rows_of_two)
    stored = await database.more_vectors(collection)
    assert stored.keys() == set(rows_of_two.ids)
    for number, row_id in enumerate(rows_of_two.ids):
        assert stored[row_id].keys() == widths.keys()
        if "sparse" in widths:
            assert stored[row_id]["sparse"] == {number: 2.0, 90: 0.5}
        if "multivector" in widths:
            assert stored[row_id]["multivector"] == rows_of_two.multivectors[number].tolist()
    if "dense" in widths:
        assert [hit.id for hit in await sink.search(collection, rows_of_two.vectors[1], 1)] == [rows_of_two.ids[1]]
    else:
        with pytest.raises(CollectionMismatch):
            await sink.search(collection, rows(0, 1).vectors[0], 1)
    with pytest.raises(CollectionMismatch):
        await sink.prepare(collection, {name: width + 1 for name, width in {"dense": 1, **widths}.items()}, {})
    await sink.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparse": ()}, "got 0 sparse vectors for 3 rows"),
        ({"multivectors": ()}, "got 0 multivectors for 3 rows"),
        ({"sparse": [SparseRow(np.array([100]), np.ones(1, np.float32))] * 3}, "row 0 .* wider than 100"),
        ({"sparse": [SparseRow(np.array([1]), np.array([np.inf], np.float32))] * 3}, "row 0 .* not finite"),
        ({"multivectors": [np.ones((1, 4), np.float32), np.ones((2, 5), np.float32)] * 2}, "got 4 multivectors"),
        ({"multivectors": [np.ones((1, 4), np.float32), *[np.ones((2, 5), np.float32)] * 2]}, r"row 1 .* \(2, 5\)"),
        ({"multivectors": [np.empty((0, 4), np.float32)] * 3}, r"row 0 .* \(0, 4\)"),
        ({"multivectors": [np.full((1, 4), np.nan, np.float32)] * 3}, "row 0 .* not finite"),
    ],
)
def test_sparse_vectors_and_multivectors_of_another_shape_are_refused(change: dict[str, Any], message: str) -> None:
    widths: Widths = {"dense": DIMS, "sparse": 100, "multivector": 4}
    assert more_rows(widths).latest(widths).ids == rows(0, 3).ids
    with pytest.raises(RowsRefused, match=message):
        dataclasses.replace(more_rows(widths), **change).latest(widths)


async def test_a_request_to_qdrant_is_bounded_in_bytes(qdrant: QdrantServer, collection: str) -> None:
    sink = QdrantSink(qdrant.url.replace("qdrant:", "http:"), "", QUICK, body_bytes=2000)
    await sink.prepare(collection, {"dense": DIMS}, {})
    await sink.upsert(rows(0, 50))
    await sink.close()
    await has(Qdrant(qdrant), collection, rows(0, 50))
    points = [{"id": number, "vector": [0.5] * number} for number in range(50)]
    bodies = [*point_bodies(points, 500)]
    assert 400 < max(map(len, bodies)) <= 500
    assert [point for body in bodies for point in msgspec.json.decode(body)["points"]] == points
