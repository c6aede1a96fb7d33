"""Live collections, with the same cases for each database: a second vector for each row while an application writes,
the switch, the way back, and the clean-up. The database servers are those of test_sinks.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import numpy as np
import pytest
import pytest_asyncio
from databases import with_extension
from live_application import Application, Points, Table, is_close
from postgres_server import PASSWORD, PostgresServer
from qdrant_server import QdrantServer

from sie_bulk_jobs.datasets.templates import ColumnFault, Template
from sie_bulk_jobs.sinks.live import LiveCollection, LiveRow, LiveSource, LiveState, Side, Vector
from sie_bulk_jobs.sinks.opening import opened_live
from sie_bulk_jobs.sinks.pgvector import PostgresDatabase
from sie_bulk_jobs.sinks.pgvector_live import PgvectorLive
from sie_bulk_jobs.sinks.sink import CollectionMismatch, CollectionMissing, Output, SparseRow
from sie_store.object_stores import AccessRefused, RetryPolicy, StoreError

QUICK = RetryPolicy(stall_s=60.0, tries=3, pause_s=0.05)
SECRET = "k3y-of-qdrant"
BODY = Template.parsed("{body}", "--text")
WIDTHS: dict[Side, int] = {"old": 16, "new": 24}
PRINTS: dict[Side, str] = {"old": "a" * 16, "new": "b" * 16}

pytestmark = [pytest.mark.xdist_group("sinks"), pytest.mark.timeout(300)]


def vector_of(text: str | None, side: Side, widths: dict[Side, int] = WIDTHS) -> list[float]:
    """Return the vector that the model of a side makes of a text."""
    seed = int.from_bytes(hashlib.sha256(f"{side} {text}".encode()).digest()[:8], "big")
    return [float(value) for value in np.random.default_rng(seed).standard_normal(widths[side], dtype=np.float32)]


def as_written(vector: list[float], output: Output) -> Vector:
    """Return the numbers as a vector of an output: sparse with all indices, multivector with one token."""
    numbers = np.array(vector, np.float32)
    if output == "sparse":
        return SparseRow.from_arrays(np.arange(len(vector)), numbers)
    return numbers[None, :] if output == "multivector" else numbers


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
    server = QdrantServer(tmp_path_factory.mktemp("qdrant"), key=SECRET)
    server.start()
    yield server
    server.kill()


# by name: the fixture of the engine, and the application over it
APPLICATIONS: dict[str, tuple[str, Callable[[Any, str], Application]]] = {
    "postgres": ("postgres", Table),
    "qdrant": ("qdrant", Points),
    "qdrant with sparse vectors": ("qdrant", functools.partial(Points, is_hybrid=True)),
    "sparse vectors of qdrant": ("qdrant", functools.partial(Points, output="sparse")),
    "multivectors of qdrant": ("qdrant", functools.partial(Points, output="multivector")),
    "sparse vectors of postgres": ("postgres", functools.partial(Table, output="sparse")),
}


DENSE = pytest.mark.parametrize("application", ["postgres", "qdrant"], indirect=True)  # where the output is the same


@pytest.fixture(params=APPLICATIONS)
def application(request: pytest.FixtureRequest) -> Iterator[Application]:
    engine, opened_application = APPLICATIONS[request.param]
    application = opened_application(request.getfixturevalue(engine), f"c-{uuid.uuid4().hex[:12]}")
    yield application
    application.close()


@pytest.fixture
def points(qdrant: QdrantServer) -> Iterator[Points]:
    points = Points(qdrant, f"c-{uuid.uuid4().hex[:12]}")
    yield points
    points.close()


def source(application: Application, **changes: Any) -> LiveSource:
    vector = "text" if isinstance(application, Points) and application.is_hybrid else ""
    options: dict[str, Any] = {"text": BODY, "fingerprints": PRINTS, "vector": vector, **changes}
    return LiveSource(application.collection, **options)


@dataclass
class Migrator:
    """A migration whose models are functions."""

    live: LiveCollection
    widths: dict[Side, int] = field(default_factory=lambda: dict(WIDTHS))
    embedded: int = 0
    gaps: int = 0
    output: Output = "dense"

    async def scan(self, side: Side) -> int:
        """Embed the pending rows and return how many were embedded."""
        self.embedded = self.gaps = 0
        async for page in self.live.pending(side):
            rows, texts, without = [], [], []
            for row in page.rows:
                try:
                    texts.append(BODY.text(row.columns))
                    rows.append(row)
                except ColumnFault:
                    without.append(row)
            await self.write(side, rows, texts)
            if without:
                await self.live.write(side, without, None)
            self.gaps += len(without)
        return self.embedded

    async def write(self, side: Side, rows: list[LiveRow], texts: list[str]) -> None:
        if rows:
            vectors = [as_written(vector_of(text, side, self.widths), self.output) for text in texts]
            await self.live.write(side, rows, vectors)
            self.embedded += len(rows)


@pytest_asyncio.fixture
async def migrator(application: Application) -> AsyncIterator[Migrator]:
    live = opened_live(application.url, "SIE_JOBS_SINKS", source(application), QUICK)
    yield Migrator(live, output=application.output)
    await live.close()


async def begun(application: Application, migrator: Migrator, count: int) -> None:
    """Create an index in use, and the place for new vectors."""
    await application.create(migrator.widths["old"])
    texts = {str(number): f"text {number}" for number in range(count)}
    await application.write({key: (text, vector_of(text, "old", migrator.widths)) for key, text in texts.items()})
    state = await migrator.live.open()
    width = 0 if isinstance(application, Points) and application.output == "sparse" else migrator.widths["old"]
    assert state == LiveState(count, width, "old", False, migrator.output)
    await migrator.live.begin(migrator.widths["new"])


async def test_each_row_gets_the_vector_of_its_present_text_while_an_application_writes(
    application: Application, migrator: Migrator
) -> None:
    await begun(application, migrator, 800)
    draw = random.Random(5)
    is_over = asyncio.Event()

    async def write() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            changed, new = str(draw.randrange(400)), str(10_000 + number)
            await application.change_text(changed, f"changed {number}")
            await application.write({new: (f"new {number}", vector_of(f"new {number}", "old"))})
            replaced = str(400 + draw.randrange(200))
            await application.write({replaced: (f"replaced {number}", vector_of(f"replaced {number}", "old"))})
            await application.delete(str(600 + number % 200))

    writer = asyncio.create_task(write())
    assert await migrator.scan("new") >= 600
    assert await migrator.scan("new") > 0, "what came during the first scan"
    is_over.set()
    await writer
    before = await application.stored_rows()
    await migrator.scan("new")
    assert await migrator.scan("new") == 0
    assert await application.stored_rows() == before, "nothing that searches see has changed"
    beside = await application.beside("new")
    assert beside.keys() == before.keys()
    for row_id, (text, vector) in beside.items():
        assert text == before[row_id][0]
        assert is_close(vector, vector_of(text, "new")), row_id


@pytest.mark.parametrize("widths", [{"old": 16, "new": 24}, {"old": 16, "new": 16}])
async def test_switch_and_way_back_keep_each_vector_that_still_stands_for_its_text(
    application: Application, migrator: Migrator, widths: dict[Side, int]
) -> None:
    """After the switch, rows that writers write are pending. The vectors that they write are of the old model where the
    widths are equal. After the way back, untouched rows have exactly their vectors from before, and the others have new
    vectors of the old model. After the second switch and the clean-up only new vectors are left.
    """
    migrator.widths = widths
    await begun(application, migrator, 300)
    original = await application.stored_rows()
    await migrator.scan("new")
    await migrator.live.switch("new")
    assert (await migrator.live.open()).in_use == "new"
    rows = await application.stored_rows()
    assert all(is_close(vector, vector_of(text, "new", widths)) for text, vector in rows.values())
    assert await migrator.scan("new") == 0

    late: Side = "old" if widths["old"] == widths["new"] else "new"
    await application.write({"1": ("text 1", vector_of("text 1", late, widths))})  # the same text
    await application.write({"2": ("late", vector_of("late", late, widths))})
    await application.write({"900": ("new", vector_of("new", "new", widths))})
    await application.change_text("3", "changed")
    await application.delete("4")
    assert 3 <= await migrator.scan("new") <= 4, "the first of them may have the very vector already"
    rows = await application.stored_rows()
    assert len(rows) == 300
    assert all(is_close(vector, vector_of(text, "new", widths)) for text, vector in rows.values())

    await application.write({"5": ("after", vector_of("after", "new", widths))})
    embedded = await migrator.scan("old")
    assert 4 <= embedded <= 5, "rows that were written, and no other"
    assert await migrator.scan("old") == 0
    assert {key: text for key, (text, _) in (await application.stored_rows()).items()} == {
        **{key: text for key, (text, _) in rows.items()},
        "5": "after",
    }, "the way back is prepared beside what is in use"
    await migrator.live.switch("old")
    back = await application.stored_rows()
    assert back.keys() == original.keys() - {"4"} | {"900"}
    for row_id, (text, vector) in back.items():
        if row_id in {"1", "2", "3", "5", "900"}:
            assert is_close(vector, vector_of(text, "old", widths)), row_id
        else:
            assert (text, vector) == original[row_id]
    assert await migrator.scan("old") == 0

    await application.change_text("6", "forward")
    await migrator.scan("new")
    assert await migrator.scan("new") == 0
    await migrator.live.switch("new")
    assert (await application.stored_rows())["6"][0] == "forward"
    await migrator.live.clean_up()
    assert await application.is_clean()
    assert (await migrator.live.open()).is_begun is False
    rows = await application.stored_rows()
    assert len(rows) == 300
    assert all(is_close(vector, vector_of(text, "new", widths)) for text, vector in rows.values())


@DENSE
async def test_writes_between_the_last_scan_and_the_switch_are_taken_over_unless_later_ones_follow(
    application: Application, migrator: Migrator
) -> None:
    """The application writes after the last scan, and again after the switch. The latest write of each row stays,
    deleted rows do not come back, and each vector is that of the row's text. The way back does the same.
    """
    await begun(application, migrator, 40)
    await migrator.scan("new")
    assert await migrator.scan("new") == 0
    first = {key: (f"first {key}", vector_of(f"first {key}", "old")) for key in ("1", "6", "7", "77", "79")}
    await application.write(first)
    await application.write({"78": (None, vector_of("image", "old"))})
    await application.change_text("5", "changed")
    await application.delete("3", "4")
    await migrator.live.switch("new")
    await application.write({key: (f"later {key}", vector_of(f"later {key}", "new")) for key in ("6", "79", "80", "4")})
    await application.delete("8")
    await migrator.scan("new")
    assert migrator.gaps == 1
    assert await migrator.scan("new") == 0
    stored_rows = await application.stored_rows()
    untouched = {str(number) for number in range(40)} - {"3", "8"}
    assert stored_rows.keys() == untouched | {"77", "78", "79", "80"}
    texts = {"1": "first 1", "7": "first 7", "77": "first 77", "5": "changed"}
    texts |= {key: f"later {key}" for key in ("6", "79", "80", "4")}
    for row_id, (text, vector) in stored_rows.items():
        if row_id != "78":
            assert text == texts.get(row_id, f"text {row_id}")
            assert is_close(vector, vector_of(text, "new")), row_id
    await application.delete("1", "77")
    await migrator.scan("new")
    assert not {"1", "77"} & (await application.stored_rows()).keys(), "what was taken over is not taken over again"

    await migrator.scan("old")
    assert await migrator.scan("old") == 0
    await application.write({"9": ("back", vector_of("back", "new")), "90": ("back", vector_of("back", "new"))})
    await application.delete("10")
    await migrator.live.switch("old")
    await application.write({"11": ("last", vector_of("last", "old"))})
    await migrator.scan("old")
    assert await migrator.scan("old") == 0
    back = await application.stored_rows()
    assert back.keys() == stored_rows.keys() - {"1", "77", "10"} | {"90"}
    # vectors that the application itself left beside another text, or beside no text
    own = {"78": "image", "5": "text 5"} if isinstance(application, Points) else {}
    for row_id, (text, vector) in back.items():
        if text is None and not own:
            assert vector is None, "nothing says that it stands for the row"
            continue
        assert is_close(vector, vector_of(own.get(row_id, text), "old")), row_id
    assert (back["9"][0], back["11"][0]) == ("back", "last")


@DENSE
async def test_a_row_in_use_that_is_replaced_between_reading_and_writing_has_the_vector_of_its_writer(
    application: Application, migrator: Migrator
) -> None:
    await begun(application, migrator, 10)
    await migrator.scan("new")
    await migrator.live.switch("new")
    await application.write({"2": ("late", vector_of("late", "new")), "3": ("late", vector_of("late", "new"))})
    pages = [page.rows async for page in migrator.live.pending("new")]
    rows = [row for page in pages for row in page]
    assert {row.id for row in rows} == {"2", "3"}
    await application.write({"2": ("latest", vector_of("latest", "new"))})
    await application.delete("3")
    await migrator.write("new", rows, ["late"] * len(rows))
    stored_rows = await application.stored_rows()
    assert "3" not in stored_rows
    assert stored_rows["2"][0] == "latest"
    assert is_close(stored_rows["2"][1], vector_of("latest", "new"))


@DENSE
async def test_a_late_vector_of_the_old_model_is_not_adopted_as_a_new_one_after_the_way_back(
    application: Application, migrator: Migrator
) -> None:
    """No scan follows the late write before the way back, as after a kill."""
    migrator.widths = {"old": 16, "new": 16}
    await begun(application, migrator, 10)
    await migrator.scan("new")
    await migrator.live.switch("new")
    await application.write({"1": ("text 1", vector_of("text 1", "old", migrator.widths))})
    await migrator.scan("old")
    assert await migrator.scan("old") == 0
    await migrator.live.switch("old")
    assert await migrator.scan("old") == 0
    assert await migrator.scan("new") == 1
    assert await migrator.scan("new") == 0
    await migrator.live.switch("new")
    for text, vector in (await application.stored_rows()).values():
        assert is_close(vector, vector_of(text, "new", migrator.widths)), text


@DENSE
async def test_a_migration_that_is_given_up_leaves_nothing(application: Application, migrator: Migrator) -> None:
    await begun(application, migrator, 50)
    original = await application.stored_rows()
    await migrator.scan("new")
    await migrator.live.clean_up()
    assert await application.is_clean()
    assert await application.stored_rows() == original
    assert (await migrator.live.open()).is_begun is False


@DENSE
async def test_another_process_goes_on_and_another_model_or_template_begins_again(
    application: Application, migrator: Migrator
) -> None:
    await begun(application, migrator, 100)
    await migrator.scan("new")
    again = Migrator(opened_live(application.url, "SINK", source(application), QUICK), output=application.output)
    assert (await again.live.open()).is_begun
    await again.live.begin(WIDTHS["new"])
    assert await again.scan("new") == 0
    longer = source(application, text=Template.parsed("about: {body}", "--text"))
    second_migrator = Migrator(opened_live(application.url, "SINK", longer, QUICK), output=application.output)
    await second_migrator.live.open()
    assert await second_migrator.scan("new") == 100
    for live in (again.live, second_migrator.live):
        await live.close()


async def test_a_secret_is_in_no_error(postgres: PostgresServer, points: Points) -> None:
    secret = "wr0ng-secret"
    for application, url in (
        (Table(postgres, points.collection), postgres.url(password=secret)),
        (points, points.url.replace(SECRET, secret)),
    ):
        live = opened_live(url, "SINK", source(application), QUICK)
        with pytest.raises(AccessRefused) as refused:
            await live.open()
        assert secret not in str(refused.value)
        assert PASSWORD not in str(refused.value)
        await live.close()


# ---- PostgreSQL


@pytest.fixture
def table(postgres: PostgresServer) -> Table:
    return Table(postgres, f"c-{uuid.uuid4().hex[:12]}")


def opened_table(table: Table, **changes: Any) -> PgvectorLive:
    live = opened_live(table.url, "SINK", source(table, **changes), QUICK)
    assert isinstance(live, PgvectorLive)
    return live


@pytest.mark.parametrize(
    ("columns", "changes", "why"),
    [
        ("number bigint primary key, body text", {}, "no column embedding of type vector, .*; no column has such"),
        ("number bigint primary key, body text, v vector(3)", {}, "Name one with --vector: v"),
        ("number bigint primary key, title text, embedding vector(3)", {}, "no column body, which --text names"),
        ("number bigint primary key, body text, embedding sparsevec", {}, r"no width.*TYPE sparsevec\(n\)"),
        ("number bigint, body text, embedding vector(3)", {}, "primary key or unique, and has no such column"),
        ("number bigint, body text, embedding vector(3)", {"id_column": "number"}, "or unique, and number is not"),
        ("number bigint unique, body text, embedding vector(3)", {}, "number of .* may be NULL.*SET NOT NULL"),
        (
            "id int primary key, number bigint unique, body text, embedding vector(3)",
            {"id_column": "number"},
            "number of .* may be NULL.*SET NOT NULL",
        ),
        (
            "number bigint primary key, body text, embedding vector(16), embedding_next int",
            {},
            "that no migration has created",
        ),
    ],
)
async def test_a_table_that_cannot_be_migrated_is_refused(
    table: Table, columns: str, changes: dict[str, Any], why: str
) -> None:
    await table.run(f'CREATE TABLE "{table.collection}" ({columns})')
    live = opened_table(table, **changes)

    async def begin() -> None:
        await live.open()
        await live.begin(24)

    with pytest.raises(CollectionMismatch, match=why):
        await begin()


async def test_vectors_of_another_model_are_never_taken_for_those_of_this_one(table: Table) -> None:
    migrator = Migrator(opened_table(table))
    await begun(table, migrator, 20)
    await migrator.scan("new")
    third = opened_table(table, fingerprints={**PRINTS, "new": "c" * 16})
    await third.open()
    with pytest.raises(CollectionMismatch, match="vectors of another model"):
        await third.begin(WIDTHS["new"])
    await third.clean_up()
    await third.begin(WIDTHS["new"])
    assert await Migrator(third).scan("new") == 20
    await third.switch("new")
    with pytest.raises(CollectionMismatch, match=r"belong to another migration.*DROP COLUMN \"embedding_before\""):
        await opened_table(table).open()


@pytest.mark.parametrize("kind", ["vector", "halfvec"])
async def test_indexes_are_built_as_the_old_ones_are_and_stay_through_the_switch(table: Table, kind: str) -> None:
    """An index that was left invalid is built again."""
    await table.run(
        f'CREATE TABLE "{table.collection}" (number bigint PRIMARY KEY, body text, embedding {kind}(16) NOT NULL)'
    )
    await table.run(
        f'CREATE INDEX ON "{table.collection}" USING hnsw (embedding {kind}_l2_ops) WITH (m = 8, ef_construction = 32)'
    )
    await table.write({str(number): (f"text {number}", vector_of(f"text {number}", "old")) for number in range(50)})
    migrator = Migrator(opened_table(table))
    await migrator.live.open()
    await migrator.live.begin(24)
    await migrator.scan("new")
    root = await asyncpg.connect(table.server.root_url)
    await migrator.live.build_indexes()
    await root.execute(
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid IN (SELECT indexrelid FROM pg_index JOIN pg_attribute "
        "ON attrelid = indrelid AND attnum = indkey[0] WHERE attname = 'embedding_next' "
        "AND indrelid = to_regclass($1))",
        f'"{table.collection}"',
    )
    await root.close()
    await migrator.live.build_indexes()
    await migrator.live.build_indexes()
    definitions = await table.run(
        "SELECT pg_get_indexdef(indexrelid) AS text FROM pg_index WHERE indrelid = to_regclass($1) AND indisvalid",
        f'"{table.collection}"',
    )
    built = [row["text"] for row in definitions if "embedding_next" in row["text"]]
    assert len(built) == 1
    assert f"{kind}_l2_ops) WITH (m='8', ef_construction='32')" in built[0]
    near = await migrator.live.nearest("new", np.array(vector_of("text 9", "new"), np.float32), 1)
    assert near == ["9"]
    await migrator.live.switch("new")
    reader = await asyncpg.connect(table.url)
    await reader.execute("SET enable_seqscan = off")
    plan = await reader.fetch(
        f"EXPLAIN SELECT number FROM \"{table.collection}\" ORDER BY embedding <-> '[{','.join('1' * 24)}]' LIMIT 1"
    )
    await reader.close()
    assert any("Order By: (embedding <->" in row["QUERY PLAN"] for row in plan), plan
    await migrator.live.clean_up()
    not_null = await table.run(
        "SELECT attnotnull FROM pg_attribute WHERE attrelid = to_regclass($1) AND attname = 'embedding'",
        f'"{table.collection}"',
    )
    assert not_null[0]["attnotnull"], "as it was before"


@pytest.mark.parametrize("step", ["begin", "switch", "clean_up"])
async def test_a_change_of_a_table_of_postgresql_whose_answer_is_lost_is_done(
    table: Table, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    once, lost = PostgresDatabase._once, [step]

    async def once_without_answer(database: PostgresDatabase, work: Any, *arguments: Any) -> Any:
        result = await once(database, work, *arguments)
        if getattr(work, "__name__", "") == "run" and step == running and lost:
            lost.clear()
            raise StoreError("PostgreSQL did not answer in time")
        return result

    monkeypatch.setattr(PostgresDatabase, "_once", once_without_answer)
    migrator = Migrator(opened_table(table))
    running = "begin"
    await begun(table, migrator, 20)
    assert await migrator.scan("new") == 20
    running = "switch"
    await migrator.live.switch("new")
    assert (await migrator.live.open()).in_use == "new"
    running = "clean_up"
    await migrator.live.clean_up()
    assert await table.is_clean()
    assert not lost


async def test_rows_that_a_writer_has_locked_are_written_by_a_later_scan(table: Table) -> None:
    migrator = Migrator(opened_table(table))
    await begun(table, migrator, 30)
    locker = await asyncpg.connect(table.url)
    await locker.execute(f'BEGIN; UPDATE "{table.collection}" SET price = 2 WHERE number IN (3, 4)')
    await migrator.scan("new")
    beside = await table.beside("new")
    assert {row_id for row_id, (_, vector) in beside.items() if vector is None} == {"3", "4"}
    await locker.execute("COMMIT")
    await locker.close()
    assert await migrator.scan("new") == 2


async def test_a_change_of_the_table_does_not_wait_behind_a_long_transaction(table: Table) -> None:
    """While a reader holds the table, the change gives up its wait for the lock. It succeeds when the reader ends."""
    migrator = Migrator(opened_live(table.url, "SINK", source(table), RetryPolicy(60.0, tries=30, pause_s=0.1)))
    await begun(table, migrator, 5)
    await migrator.scan("new")
    reader = await asyncpg.connect(table.url)
    await reader.execute(f'BEGIN; SELECT * FROM "{table.collection}"')
    switched = asyncio.create_task(migrator.live.switch("new"))
    watcher = await asyncpg.connect(table.server.root_url)
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'LOCK TABLE%'"
    for expected in (1, 0):
        async with asyncio.timeout(30):
            while await watcher.fetchval(waits) != expected:  # noqa: ASYNC110  the state of another process
                await asyncio.sleep(0.01)
    await reader.execute("COMMIT")
    await switched
    await reader.close()
    await watcher.close()
    assert (await migrator.live.open()).in_use == "new"


# ---- Qdrant


async def test_a_collection_without_an_alias_or_with_rests_of_a_migration_is_refused(points: Points) -> None:
    await points.create(16)
    for name, error, why in (
        (points.first, CollectionMismatch, "is a collection of Qdrant and not an alias"),
        ("nothing", CollectionMissing, "no alias nothing"),
    ):
        live = opened_live(points.url, "SINK", LiveSource(name, BODY, PRINTS), QUICK)
        with pytest.raises(error, match=why):
            await live.open()
        await live.close()
    migrator = Migrator(opened_live(points.url, "SINK", source(points), QUICK))
    await migrator.live.open()
    await migrator.live.begin(24)
    await migrator.live.switch("new")
    later = opened_live(points.url, "SINK", source(points, fingerprints={**PRINTS, "new": "c" * 16}), QUICK)
    with pytest.raises(CollectionMismatch, match="is not cleaned up"):
        await later.open()
    for live in (later, migrator.live):
        await live.close()


async def test_two_commands_at_once_do_not_write_over_what_is_in_use(points: Points) -> None:
    """A command that read a page before another command switched is refused before it writes."""
    first = Migrator(opened_live(points.url, "SINK", source(points), QUICK))
    await begun(points, first, 10)
    second = Migrator(opened_live(points.url, "SINK", source(points), QUICK))
    await second.live.open()
    pages = [page.rows async for page in second.live.pending("new")]
    await first.scan("new")
    await first.live.switch("new")
    await points.write({"1": ("after", vector_of("after", "new")), "99": ("new", vector_of("new", "new"))})
    before = await points.stored_rows()
    with pytest.raises(CollectionMismatch, match="another command has switched"):
        await second.write("new", list(pages[0]), ["x"] * len(pages[0]))
    with pytest.raises(CollectionMismatch, match="another command has switched"):
        await second.scan("new")
    assert await points.stored_rows() == before
    for migrator in (first, second):
        await migrator.live.close()
