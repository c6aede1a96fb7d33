"""Live table of PostgreSQL with pgvector. A migration of the column `embedding` uses these columns of the table:

    embedding           vectors in use
    embedding_next      new vectors before the switch        embedding_before    old vectors after the switch
    embedding_marker    digest of the row's text, the model, and the vector that was computed from this text

A row is pending if it has no vector, or if its marker differs from the digest of its present text, model and vector. So
the migration needs no clock, trigger or change log to notice the change of a row. To write vectors, it locks their
rows, but skips rows that another transaction has locked. Then it compares the text of each locked row with the text for
which the vector was computed.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sie_bulk_jobs.sinks.live import LiveRow, LiveSource, LiveState, ScannedPage, Side, Vector, opposite
from sie_bulk_jobs.sinks.pgvector import (
    COLUMNS_OF_TABLE,
    MAX_WIDTHS,
    SCHEMA_OF_EXTENSION,
    PostgresDatabase,
    copy_rows,
    quoted,
    vector_binary,
)
from sie_bulk_jobs.sinks.sink import (
    CollectionMismatch,
    CollectionMissing,
    CollectionRefused,
    Output,
    SinkUnsuitable,
    SparseRow,
    check_dims,
)
from sie_contracts.errors import UNDECODABLE

DEFAULT_VECTOR, PAYLOAD = "embedding", "payload"  # columns of a table that a job has created
NEXT, BEFORE, MARKER = "_next", "_before", "_marker"
MAX_NAME = 63  # largest number of bytes of a name in PostgreSQL
SCAN_ROWS = 2_000
LOCK_S = 3  # seconds for which ALTER TABLE waits for its lock; meanwhile new readers and writers wait too
INDEX_S = 24 * 3600.0  # time limit of one statement that builds or drops an index, in seconds
_TYPE = re.compile(r"(?:.*\.)?(vector|halfvec|sparsevec)(?:\((\d+)\))?")
_OPERATORS = {
    "vector_l2_ops": "<->",
    "vector_ip_ops": "<#>",
    "halfvec_l2_ops": "<->",
    "halfvec_ip_ops": "<#>",
    "sparsevec_l2_ops": "<->",
    "sparsevec_ip_ops": "<#>",
}
COSINE, INNER_PRODUCT = "<=>", "<#>"
INDEX_DIMS = {"vector": 2_000, "halfvec": 4_000}  # largest width of vectors in an hnsw or ivfflat index, by SQL type
_TABLE = """
SELECT c.relkind = 'r' AS is_table, pg_has_role(c.relowner, 'USAGE') AS is_owner
FROM pg_class c WHERE c.oid = to_regclass($1)
"""
_INDEXES = """
SELECT c.relname AS name, m.amname AS method, o.opcname AS operators, i.indisvalid AS is_valid,
       n.nspname AS schema, array_to_string(c.reloptions, ', ') AS options
FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_am m ON m.oid = c.relam
JOIN pg_opclass o ON o.oid = i.indclass[0] JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
WHERE i.indrelid = to_regclass($1) AND i.indnkeyatts = 1 AND i.indpred IS NULL AND m.amname IN ('hnsw', 'ivfflat')
      AND a.attname = $2
"""


@dataclass(frozen=True)
class _TableShape:
    """Columns of the table. `columns`: SQL types by column name."""

    extension: str  # name of the SQL schema that has the types and functions of pgvector
    vector: str  # name of the column of vectors in use
    kind: str  # type of the vectors: vector, halfvec or sparsevec
    id_column: str
    id_type: str
    columns: dict[str, str]
    in_use: Side
    comment: str  # comment of the marker column, see `_MarkerRecord`
    is_not_null: bool  # whether the column `vector` is NOT NULL
    operator: str  # SQL operator that computes a distance
    indexes: tuple[str, ...]  # names of the hnsw and ivfflat indexes of the column `vector`

    def column(self, side: Side) -> str:
        """Return the column with the vectors of a side (the old or the new model)."""
        if side == self.in_use:
            return self.vector
        return self.vector + (NEXT if side == "new" else BEFORE)

    def field(self, name: str) -> str:
        """Return the SQL expression of the column `name`. Without this column: of the field `name` in `payload`."""
        return f"t.{quoted(name)}" if name in self.columns else f"t.{quoted(PAYLOAD)} -> {_literal(name)}"

    @property
    def marker(self) -> str:
        return self.vector + MARKER

    @property
    def is_begun(self) -> bool:
        return self.marker in self.columns

    @property
    def type(self) -> str:
        """Return the SQL type of the vectors, qualified by its schema."""
        return f"{quoted(self.extension)}.{self.kind}"

    @property
    def copied_type(self) -> str:
        """Return the type in which vectors are sent: sparsevec or vector. The database converts vector to halfvec."""
        return "sparsevec" if self.output == "sparse" else "vector"

    @property
    def output(self) -> Output:
        return "sparse" if self.kind == "sparsevec" else "dense"

    def dims(self, side: Side) -> int:
        """Return the width that the column of a side declares; 0 if the column is missing or declares no width."""
        declared = _TYPE.fullmatch(self.columns.get(self.column(side), ""))
        return int(declared[2] or 0) if declared else 0


class _MarkerRecord(msgspec.Struct, frozen=True):
    """JSON in the SQL comment of the marker column. `new`: fingerprint of the new model. `not_null`: whether the column
    of vectors was NOT NULL before the migration.
    """

    new: str
    not_null: bool = False


class PgvectorLive:
    def __init__(self, database: PostgresDatabase, source: LiveSource) -> None:
        self._database = database
        self._source = source
        self._table = ".".join(quoted(part) for part in source.collection.split("."))
        self._shape: _TableShape | None = None

    async def open(self) -> LiveState:
        self._shape = shape = await self._database.transaction(self._read_shape)
        if shape.in_use == "new" and self._record().new != self._source.fingerprints["new"]:
            vector = shape.vector
            raise CollectionMismatch(
                f"the vectors in use of {self._source.collection} belong to another migration, or to an earlier "
                "version of the model. Run the command of that migration with --step clean-up; if its model is gone: "
                f"ALTER TABLE {self._table} DROP COLUMN {quoted(vector + BEFORE)}, DROP COLUMN {quoted(shape.marker)}"
            )
        column = quoted(shape.vector)
        # the column may declare no width, so the width of dense vectors is read from a row
        width = f"{quoted(shape.extension)}.vector_dims({column})" if shape.output == "dense" else "NULL::int"
        rows, dims = await self._database.transaction(
            lambda connection: connection.fetchrow(
                f"SELECT (SELECT count(*) FROM {self._table}), "  # noqa: S608  quoted
                f"(SELECT {width} FROM {self._table} WHERE {column} IS NOT NULL LIMIT 1)"
            )
        )
        return LiveState(rows, dims or shape.dims(shape.in_use), shape.in_use, shape.is_begun, shape.output)

    async def _read_shape(self, connection: Any) -> _TableShape:
        source = self._source
        extension = await connection.fetchval(SCHEMA_OF_EXTENSION)
        if extension is None:
            raise SinkUnsuitable(
                "the database has no extension vector, so it has no vectors: does the URL name the right database?"
            )
        table = await connection.fetchrow(_TABLE, self._table)
        if table is None:
            raise CollectionMissing(f"the database has no table {source.collection} in its search path")
        if not table["is_table"]:
            raise CollectionMismatch(f"{source.collection} is not a table, or it is partitioned: name another table")
        rows = await connection.fetch(COLUMNS_OF_TABLE, self._table)
        columns = {row["name"]: row["type"] for row in rows}
        vector = source.vector or DEFAULT_VECTOR
        if len(vector.encode()) + len(MARKER) > MAX_NAME:
            raise CollectionRefused(
                "the name of the vector column is too long, because a migration adds _marker: rename the column"
            )
        kind = _TYPE.fullmatch(columns.get(vector, ""))
        if kind is None:
            vectors = [name for name, type_name in columns.items() if _TYPE.fullmatch(type_name)]
            raise CollectionMismatch(
                f"the table {source.collection} has no column {vector} of type vector, halfvec or sparsevec"
                + (f". Name one with --vector: {', '.join(vectors)}" if vectors else "; no column has such a type")
            )
        if kind[1] == "sparsevec" and not kind[2]:
            raise CollectionMismatch(
                f"the column {vector} of {source.collection} is a sparsevec that declares no width, so no vector could "
                f"be written to it after the switch: ALTER TABLE {self._table} ALTER COLUMN {quoted(vector)} TYPE "
                "sparsevec(n), where n is the size of the model's vocabulary"
            )
        has_payload = columns.get(PAYLOAD) == "jsonb"
        missing = [name for name in source.text.columns if name not in columns and not has_payload]
        if missing:
            raise CollectionMismatch(
                f"the table {source.collection} has no column {missing[0]}, which --text names. It has the columns "
                f"{', '.join(name for name in columns if name != vector)}"
            )
        unique = [row["name"] for row in rows if row["is_unique"] and row["not_null"]]
        primary = [row["name"] for row in rows if row["is_primary"]]
        id_column = source.id_column or (primary or unique or [""])[0]
        nullable = [row["name"] for row in rows if row["is_unique"] and not row["not_null"]]
        if id_column in nullable or (not id_column and nullable):
            column = id_column or nullable[0]
            raise CollectionMismatch(
                f"the column {column} of {source.collection} is unique but may be NULL, so it does not identify each "
                f"row: ALTER TABLE {self._table} ALTER COLUMN {quoted(column)} SET NOT NULL, or name a column with --id"
            )
        if id_column not in unique:
            raise CollectionMismatch(
                f"the table {source.collection} needs a column that alone is its primary key or unique, and "
                f"{f'{id_column} is not' if id_column else 'has no such column'}. Add one, or name one with --id"
            )
        if not table["is_owner"]:
            raise SinkUnsuitable(
                f"the user of the URL does not own the table {source.collection}, and only an owner may add and rename "
                "columns: use the URL of the owner, or GRANT the owner's role to the user"
            )
        comment = next((row["comment"] for row in rows if row["name"] == vector + MARKER), None)
        is_not_null = next(row["not_null"] for row in rows if row["name"] == vector)
        in_use: Side = "new" if vector + BEFORE in columns else "old"
        indexes = await connection.fetch(_INDEXES, self._table, vector)
        # If no index determines the distance, dense vectors are compared by the cosine, and sparse vectors by the inner
        # product, because sparse models are trained with it.
        default = INNER_PRODUCT if kind[1] == "sparsevec" else COSINE
        operator = next((_OPERATORS.get(index["operators"], COSINE) for index in indexes), default)
        return _TableShape(
            extension,
            vector,
            kind[1],
            id_column,
            columns[id_column],
            columns,
            in_use,
            comment or "",
            is_not_null,
            operator,
            tuple(index["name"] for index in indexes),
        )

    async def begin(self, dims: int) -> None:
        shape = self._opened()
        check_dims(dims, MAX_WIDTHS[shape.output], "pgvector")
        # This check comes early, because `build_indexes` would fail only after all rows were embedded.
        if shape.in_use == "old" and shape.indexes and dims > (most := INDEX_DIMS.get(shape.kind, dims)):
            raise SinkUnsuitable(
                f"the new model has vectors of {dims} numbers, and the index {shape.indexes[0]} of the column "
                f"{shape.vector}, of type {shape.kind}, takes at most {most}: drop the index, or choose a model with "
                "fewer dimensions"
            )
        fingerprint = self._source.fingerprints["new"]
        if not shape.is_begun:
            if shape.vector + NEXT in shape.columns:
                raise CollectionMismatch(
                    f"the table {self._source.collection} has a column {shape.vector + NEXT} that no migration has "
                    "created: rename or drop it"
                )

            def begun(shape: _TableShape) -> Sequence[str]:
                record = msgspec.json.encode(_MarkerRecord(fingerprint, shape.is_not_null)).decode()
                return (
                    f"ALTER TABLE {self._table} ADD COLUMN {quoted(shape.column('new'))} {shape.type}({dims}), "
                    f"ADD COLUMN {quoted(shape.marker)} bytea",
                    f"COMMENT ON COLUMN {self._table}.{quoted(shape.marker)} IS {_literal(record)}",
                )

            await self._alter(lambda shape: () if shape.is_begun else begun(shape))
            shape = self._opened()
        column = shape.column("new")
        actual = (shape.columns.get(column, "").rpartition(".")[2]) or f"no column {column}"
        if actual != f"{shape.kind}({dims})" and not (shape.in_use == "new" and actual == shape.kind):
            raise CollectionMismatch(
                f"the column {column} of {self._source.collection} has the type {actual}, but this migration writes "
                f"{shape.kind}({dims}). Another migration added the column: run that one with --step clean-up, or drop "
                "the column"
            )
        if self._record().new != fingerprint:
            raise CollectionMismatch(
                f"the column {column} of {self._source.collection} has vectors of another model, or of this model "
                "before it changed: remove these vectors with --step clean-up first"
            )

    async def pending(self, side: Side) -> AsyncIterator[ScannedPage]:
        after: str | None = None
        while True:
            scanned, after, rows, same = await self._database.transaction(
                functools.partial(self._page, side=side, after=after)
            )
            if same:
                await self._database.transaction(functools.partial(self._adopt, side=side, ids=same))
            yield ScannedPage(scanned, rows)
            if scanned < SCAN_ROWS:
                return

    async def _page(
        self, connection: Any, side: Side, after: str | None
    ) -> tuple[int, str | None, list[LiveRow], list[str]]:
        """Read the rows after the id `after`. Returns (number of rows, last id, rows that need a new vector, ids of the
        rows that need only a new marker: their vector of this side was computed from their present text).
        """
        shape = self._opened()
        identity, column = f"t.{quoted(shape.id_column)}", f"t.{quoted(shape.column(side))}"
        key = f"$1::text::{shape.id_type}"
        span = f"{identity} > {key}" if after is not None else "$1::text IS NULL"
        ids = await connection.fetch(
            f"SELECT {identity}::text AS id FROM {self._table} t WHERE {span} ORDER BY {identity} LIMIT {SCAN_ROWS}",  # noqa: S608
            after,
        )
        if not ids:
            return 0, None, [], []
        last = ids[-1]["id"]
        same = (
            f"{column} IS NOT NULL AND t.{quoted(shape.marker)} = {self._digest(opposite(side))}"
            if shape.column(opposite(side)) in shape.columns
            else "false"
        )
        fields = ", ".join(f"{_literal(name)}, {shape.field(name)}" for name in self._source.text.columns)
        stale = await connection.fetch(
            f"SELECT {identity}::text AS id, {self._version()} AS version, "  # noqa: S608
            f"{same} AS is_same, jsonb_build_object({fields})::text AS columns "
            f"FROM {self._table} t WHERE {span} AND {identity} <= $2::text::{shape.id_type} AND "
            f"({column} IS NULL OR t.{quoted(shape.marker)} IS NULL OR t.{quoted(shape.marker)} NOT IN "
            f"({self._digest(side)}, sha256({self._digest(side)}))) "
            f"ORDER BY {identity}",
            after,
            last,
        )
        rows = [
            LiveRow(row["id"], msgspec.json.decode(row["columns"]), row["version"])
            for row in stale
            if not row["is_same"]
        ]
        return len(ids), last, rows, [row["id"] for row in stale if row["is_same"]]

    async def _adopt(self, connection: Any, side: Side, ids: list[str]) -> None:
        shape = self._opened()
        await connection.execute(
            f"UPDATE {self._table} t SET {quoted(shape.marker)} = {self._digest(side)} "  # noqa: S608
            f"WHERE t.{quoted(shape.id_column)} = ANY($1::text[]::{shape.id_type}[]) "
            f"AND t.{quoted(shape.column(side))} IS NOT NULL AND t.{quoted(shape.marker)} = "
            f"{self._digest(opposite(side))}",
            ids,
        )

    async def write(self, side: Side, rows: Sequence[LiveRow], vectors: Sequence[Vector] | None) -> None:
        shape = self._opened()
        if vectors is None:
            if side != shape.in_use:
                await self._database.transaction(functools.partial(self._cleared, side=side, rows=rows))
            return
        dims = shape.dims(side)
        encoded = await asyncio.to_thread(lambda: [vector_binary(vector, dims) for vector in vectors])
        records = [(row.id, vector, row.version) for row, vector in zip(rows, encoded, strict=True)]
        size = sum(len(row_id) + len(vector) + len(version) for row_id, vector, version in records)
        await self._database.transaction(functools.partial(self._written, side=side, records=records), size)

    async def _written(self, connection: Any, side: Side, records: Sequence[tuple[str, bytes, bytes]]) -> None:
        shape = self._opened()
        await copy_rows(connection, shape.extension, {"embedding": shape.copied_type, "version": "bytea"}, records)
        identity, vector = quoted(shape.id_column), f"fresh.embedding::{shape.type}"
        changes = [
            f"{quoted(shape.column(side))} = {vector}",
            f"{quoted(shape.marker)} = {self._fresh_marker(side, vector)}",
        ]
        away = shape.column(opposite(side))
        if side == shape.in_use and away in shape.columns:
            # Vectors of the side in use are written only to rows that a writer has changed. So the vector of the
            # opposite side belongs to an earlier text, and is removed.
            changes.append(f"{quoted(away)} = NULL")
        await connection.execute(
            f"WITH fresh AS (SELECT t.{identity} AS id, r.embedding FROM pg_temp.sie_rows r JOIN {self._table} t "  # noqa: S608
            f"ON t.{identity} = r.id::{shape.id_type} WHERE {self._version()} = r.version "
            # rows that another transaction has locked stay pending: a write that waits for a lock could deadlock
            f"FOR UPDATE OF t SKIP LOCKED) "
            f"UPDATE {self._table} t SET {', '.join(changes)} FROM fresh WHERE t.{identity} = fresh.id"
        )

    async def _cleared(self, connection: Any, side: Side, rows: Sequence[LiveRow]) -> None:
        shape = self._opened()
        column, marker = quoted(shape.column(side)), quoted(shape.marker)
        digest = self._fresh_marker(side, f"NULL::{shape.type}")
        await connection.execute(
            # the marker decides whether a scan for the opposite side keeps that side's vector, see `_fresh_marker`
            f"UPDATE {self._table} t SET {column} = NULL, {marker} = {digest} FROM "  # noqa: S608
            "unnest($1::text[], $2::bytea[]) AS r(id, version) "
            f"WHERE t.{quoted(shape.id_column)} = r.id::{shape.id_type} "
            f"AND {self._version()} = r.version "
            f"AND (t.{column} IS NOT NULL OR t.{marker} IS DISTINCT FROM {digest})",
            [row.id for row in rows],
            [row.version for row in rows],
        )

    async def sample(self, count: int) -> Sequence[LiveRow]:
        shape = self._opened()
        identity = f"t.{quoted(shape.id_column)}"
        fields = ", ".join(f"{_literal(name)}, {shape.field(name)}" for name in self._source.text.columns)
        rows = await self._database.transaction(
            lambda connection: connection.fetch(
                f"SELECT {identity}::text AS id, jsonb_build_object({fields})::text AS columns "  # noqa: S608
                f"FROM {self._table} t WHERE {identity} IN (SELECT {identity} FROM {self._table} t "
                f"WHERE t.{quoted(shape.vector)} IS NOT NULL ORDER BY random() LIMIT {count})"
            )
        )
        return [LiveRow(row["id"], msgspec.json.decode(row["columns"])) for row in rows]

    async def nearest(self, side: Side, vector: Vector, count: int) -> Sequence[str]:
        shape = self._opened()
        column = f"t.{quoted(shape.column(side))}"
        near = await self._database.transaction(
            lambda connection: connection.fetch(
                f"SELECT t.{quoted(shape.id_column)}::text AS id FROM {self._table} t WHERE {column} IS NOT NULL "  # noqa: S608
                f"ORDER BY {column} OPERATOR({quoted(shape.extension)}.{shape.operator}) $1::text::{shape.type} "
                f"LIMIT {count}",
                _text(vector, shape.dims(side)),
            )
        )
        return [row["id"] for row in near]

    async def build_indexes(self) -> None:
        shape = self._opened()
        old = await self._database.transaction(
            lambda connection: connection.fetch(_INDEXES, self._table, shape.column("old"))
        )
        for index in old:
            await self._database.alone(functools.partial(self._built, like=index), INDEX_S)

    async def _built(self, connection: Any, like: Any) -> None:
        """Build an index of the new vectors with the method and operators of `like`, an index of the old vectors, if
        the new vectors have no such index. First remove invalid indexes of failed builds. CONCURRENTLY lets writers
        continue.
        """
        column = self._opened().column("new")
        # Wait until no earlier build runs. If the connection of a build was lost, the server continues the build, which
        # has this lock. A second build at the same time would deadlock with it, or build the index twice.
        await connection.execute(f"BEGIN; LOCK TABLE {self._table} IN SHARE UPDATE EXCLUSIVE MODE; COMMIT")
        present = await connection.fetch(_INDEXES, self._table, column)
        for index in present:
            if not index["is_valid"]:
                name = f"{quoted(index['schema'])}.{quoted(index['name'])}"
                await connection.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
        kind = (like["method"], like["operators"])
        if kind in {(index["method"], index["operators"]) for index in present if index["is_valid"]}:
            return
        options = f" WITH ({like['options']})" if like["options"] else ""
        await connection.execute(
            f"CREATE INDEX CONCURRENTLY ON {self._table} USING {like['method']} "
            f"({quoted(column)} {quoted(self._opened().extension)}.{like['operators']}){options}"
        )

    async def switch(self, side: Side) -> None:
        if self._opened().in_use == side:
            return

        def switched(shape: _TableShape) -> Sequence[str]:
            away = quoted(shape.vector + (BEFORE if side == "new" else NEXT))
            return (
                f"ALTER TABLE {self._table} RENAME COLUMN {quoted(shape.vector)} TO {away}",
                f"ALTER TABLE {self._table} RENAME COLUMN {quoted(shape.column(side))} TO {quoted(shape.vector)}",
                # rows that a writer inserts after the switch have no vector in this column
                f"ALTER TABLE {self._table} ALTER COLUMN {away} DROP NOT NULL",
            )

        await self._alter(lambda shape: () if shape.in_use == side else switched(shape))
        await self.open()

    async def clean_up(self) -> None:
        shape = self._opened()
        if not shape.is_begun:
            return
        away = quoted(shape.column(opposite(shape.in_use)))
        statements = [
            f"ALTER TABLE {self._table} DROP COLUMN IF EXISTS {away}, DROP COLUMN {quoted(shape.marker)}",
        ]
        if self._record().not_null and not shape.is_not_null and not await self._has_gaps(shape):
            statements.append(f"ALTER TABLE {self._table} ALTER COLUMN {quoted(shape.vector)} SET NOT NULL")
        await self._alter(lambda shape: statements if shape.is_begun else ())
        await self.open()

    async def _has_gaps(self, shape: _TableShape) -> bool:
        """Return whether any row has no vector in the column of vectors in use."""
        gaps = f"SELECT EXISTS (SELECT FROM {self._table} WHERE {quoted(shape.vector)} IS NULL)"  # noqa: S608
        return bool(await self._database.transaction(lambda connection: connection.fetchval(gaps)))

    async def close(self) -> None:
        """Do nothing: the database has no open connection between calls."""

    def _opened(self) -> _TableShape:
        assert self._shape is not None, "open comes first"
        return self._shape

    def _record(self) -> _MarkerRecord:
        try:
            return msgspec.json.decode(self._opened().comment, type=_MarkerRecord)
        except UNDECODABLE:
            raise CollectionMismatch(
                f"no migration has written the comment of the column {self._opened().marker}: drop the column"
            ) from None

    async def _alter(self, statements: Callable[[_TableShape], Sequence[str]]) -> None:
        """Run statements that change the table, in one transaction, and read its columns again. `statements`: function
        that returns the statements for the present columns. If an earlier attempt, whose reply was lost, has already
        changed the table, the function returns no statement.
        """

        async def run(connection: Any) -> None:
            await connection.execute(f"SET LOCAL lock_timeout = '{LOCK_S}s'")
            # The columns are read under the lock: an earlier attempt may still run at the server and change them.
            await connection.execute(f"LOCK TABLE {self._table} IN ACCESS EXCLUSIVE MODE")
            for statement in statements(await self._read_shape(connection)):
                await connection.execute(statement)

        await self._database.transaction(run)
        self._shape = await self._database.transaction(self._read_shape)

    def _fresh_marker(self, side: Side, vector: str) -> str:
        """Return the SQL expression for the marker that is stored when `vector` of `side` is written to a row.

        A row that has the marker of the old side counts as current for both sides. After the switch, an old vector may
        be written to a row whose new vector is outdated. The expression then gives the SHA-256 of the old side's
        marker: a row with this value counts as current for the old side only.
        """
        shape, digest = self._opened(), self._digest(side, vector)
        if side == shape.in_use or side == "new":
            return digest
        valid = f"t.{quoted(shape.marker)} IN ({self._digest('new')}, {digest})"
        return f"CASE WHEN {valid} THEN {digest} ELSE sha256({digest}) END"

    def _digest(self, side: Side, vector: str = "") -> str:
        """Return the SQL expression for the marker of a row whose old or new vector (`side`) fits the row's present
        text. `vector`: SQL expression for this vector, by default the stored vector.
        """
        shape = self._opened()
        send = f"{quoted(shape.extension)}.{shape.kind}_send"
        return (
            f"sha256(convert_to({_literal(self._source.salt(side))}, 'UTF8') || {self._version()} || "
            f"coalesce({send}({vector or 't.' + quoted(shape.column(side))}), ''::bytea))"
        )

    def _version(self) -> str:
        """Return the SQL expression for the digest of the columns that the template names."""
        columns = ", ".join(map(self._opened().field, self._source.text.columns))
        return f"sha256(convert_to(jsonb_build_array({columns})::text, 'UTF8'))"


def _text(vector: Vector, dims: int) -> str:
    """Return a vector in pgvector's text form, in which the indices of a sparse vector begin at 1."""
    if not isinstance(vector, SparseRow):
        return str(vector.tolist())
    pairs = zip((vector.indices + 1).tolist(), vector.values.tolist(), strict=True)
    return "{" + ",".join(f"{place}:{value}" for place, value in pairs) + "}/" + str(dims)


def _literal(text: str) -> str:
    return "E'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"
