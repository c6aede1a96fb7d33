"""Live table of LanceDB. A migration of the column `vector` uses these columns of the table:

    vector                    vectors in use
    vector_next               new vectors before the switch     vector_before    old vectors after the switch
    vector_marker_1f0c9a2b    markers; the name ends with 8 hexadecimal digits of the new model's fingerprint

The marker of a row is a digest of the text and vectors that the row had when the marker was written. A row is pending
for a side (the old or the new model) if it has no vector of this side, or if its marker differs from the digest of its
present text and vectors. So every change of a text or a vector is noticed. A write skips a row whose stored text has
changed since the row was read.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import lancedb.index
import msgspec
import numpy as np
import pyarrow

from sie_contracts.errors import UNDECODABLE
from sie_store.object_stores import StoreError
from sie_store.sinks.lance import (
    BYTES_PER_S,
    ID,
    MAX_DIMS,
    PAYLOAD,
    VECTOR,
    LanceDatabase,
    opened_table,
    vectors_array,
)
from sie_store.sinks.live import SIDES, LiveRow, LiveSource, LiveState, ScannedPage, Side, Vector, opposite
from sie_store.sinks.sink import CollectionMismatch, check_dims, checked_name

T = TypeVar("T")
NEXT, BEFORE, MARKER = "_next", "_before", "_marker_"
SCAN_ROWS = 2_000
# An optimization puts written rows into the indexes of the table. It may write the whole table again, and earlier
# versions stay on the disk. So a write optimizes only if at least OPTIMIZE_ROWS rows, and at least the share
# OPTIMIZE_SHARE of all rows, were written since the last optimization. At the end of a scan and in `build_indexes`, one
# written row is enough for an optimization.
OPTIMIZE_ROWS, OPTIMIZE_SHARE = 50_000, 0.25
INDEX_S = 24 * 3600.0  # seconds that building or optimizing an index may take beyond the usual time limit
NO_PRUNING = datetime.timedelta(days=36_500)  # keeps all versions of the table: they belong to the application


@dataclass(frozen=True)
class _LanceShape:
    """Columns of the table. `columns`: Arrow fields by name. `texts`: columns from which the text of a row is made.
    `distance`: distance function of the index on `vector`; `cosine` if the column has no index.
    """

    vector: str
    id_column: str
    columns: Mapping[str, Any]
    texts: tuple[str, ...]
    marker: str
    distance: str

    @property
    def in_use(self) -> Side:
        return "new" if self.vector + BEFORE in self.columns else "old"

    @property
    def is_begun(self) -> bool:
        return self.marker in self.columns

    def column(self, side: Side) -> str:
        """Return the column with the vectors of a side (the old or the new model)."""
        if side == self.in_use:
            return self.vector
        return self.vector + (NEXT if side == "new" else BEFORE)


@dataclass(frozen=True)
class _LanceRow:
    """Stored row. `texts`: values of the columns from which its text is made. `vectors`: bytes of the vector, or None,
    by side (old or new model).
    """

    id: Any
    texts: tuple[Any, ...]
    vectors: Mapping[Side, bytes | None]
    marker: bytes | None


class LanceLive:
    def __init__(self, database: LanceDatabase, source: LiveSource) -> None:
        self._database = database
        self._source = source
        self._shape: _LanceShape | None = None
        self._unindexed = 0
        self._optimize_rows = OPTIMIZE_ROWS

    async def open(self) -> LiveState:
        checked_name(self._source.collection)
        shape, rows = await self._database.run(self._read)
        self._shape = shape
        self._optimize_rows = max(OPTIMIZE_ROWS, int(rows * OPTIMIZE_SHARE))
        if shape.in_use == "new" and shape.marker != self._own_marker(shape.vector):
            raise CollectionMismatch(
                f"the vectors in use of {self._source.collection} belong to another migration, or to an earlier "
                "version of the model. Run the command of that migration with --step clean-up; if its model is gone, "
                f"drop the columns {shape.vector + BEFORE} and {shape.marker}"
            )
        return LiveState(rows, shape.columns[shape.vector].type.list_size, shape.in_use, shape.is_begun)

    async def _read(self, connection: Any) -> tuple[_LanceShape, int]:
        """Read the columns and the number of rows. Raises CollectionMismatch for a table that cannot be migrated."""
        source = self._source
        table = await opened_table(connection, source.collection)
        columns = {field.name: field for field in await table.schema()}
        vector, id_column = source.vector or VECTOR, source.id_column or ID
        if not _is_vector(columns.get(vector)):
            vectors = [name for name, field in columns.items() if _is_vector(field)]
            raise CollectionMismatch(
                f"the table {source.collection} has no column {vector} with vectors"
                + (
                    f". Name one with --vector: {', '.join(vectors)}"
                    if vectors
                    else ", nor any other column with vectors"
                )
            )
        names = source.text.columns
        missing = [name for name in names if name not in columns]
        if missing and not _is_text(columns.get(PAYLOAD)):
            raise CollectionMismatch(f"the table {source.collection} has no column {missing[0]}, which --text names")
        texts = (*(name for name in names if name in columns), *([PAYLOAD] if missing else ()))
        if mixed := [name for name in texts if not _is_plain(columns[name]) or "`" in name]:
            raise CollectionMismatch(
                f"the column {mixed[0]} of {source.collection} has no texts, numbers or times, or has ` in its name; "
                "--text can use only texts, numbers and times without nanoseconds"
            )
        identity = columns.get(id_column)
        if not (_is_text(identity) or _is_integer(identity)) or "`" in id_column:
            raise CollectionMismatch(
                f"the table {source.collection} needs a column of integers or texts that identifies each row, and "
                f"{id_column} is no such column: name another column with --id"
            )
        if await table.count_rows(f"{_quoted(id_column)} IS NULL"):
            raise CollectionMismatch(
                f"the column {id_column} of {source.collection} is null in a row, so it does not identify each row: "
                "name another column with --id"
            )
        marker = next((name for name in columns if name.startswith(vector + MARKER)), self._own_marker(vector))
        distance = "cosine"
        for index in await table.list_indices():
            if index.columns == [vector]:
                distance = (await table.index_stats(index.name)).distance_type
        return _LanceShape(vector, id_column, columns, texts, marker, distance), await table.count_rows()

    def _own_marker(self, vector: str) -> str:
        return f"{vector}{MARKER}{self._source.fingerprints['new'][:8]}"

    async def begin(self, dims: int) -> None:
        shape = self._opened()
        check_dims(dims, MAX_DIMS, "LanceDB")
        column, marker = shape.column("new"), self._own_marker(shape.vector)
        type = pyarrow.list_(shape.columns[shape.vector].type.value_type, dims)
        if not shape.is_begun:
            if column in shape.columns:
                raise CollectionMismatch(
                    f"the table {self._source.collection} has a column {column} that no migration has created: rename "
                    "or drop it"
                )
            fields = [pyarrow.field(column, type), pyarrow.field(marker, pyarrow.binary())]
            await self._change_columns(
                {shape.vector, column, marker}, lambda table: table.add_columns(pyarrow.schema(fields))
            )
            await self.open()
        elif shape.marker != marker:
            raise CollectionMismatch(
                f"the column {column} of {self._source.collection} has vectors of another model, or of this model "
                "before it changed: remove these vectors with --step clean-up first"
            )
        elif not type.equals(shape.columns[column].type):
            raise CollectionMismatch(
                f"the column {column} of {self._source.collection} has the type {shape.columns[column].type}, but this "
                f"migration writes {type}. Another migration added the column: run that one with --step clean-up, or "
                "drop the column"
            )

    async def pending(self, side: Side) -> AsyncIterator[ScannedPage]:
        version: int = await self._table(lambda table: table.version())
        offset = 0
        while True:
            stored = await self._rows(version, offset)
            stale = [row for row in stored if not self._is_current(row, side)]
            yield ScannedPage(len(stored), [LiveRow(str(row.id), self._columns(row), stored=row) for row in stale])
            offset += SCAN_ROWS
            if len(stored) < SCAN_ROWS:
                break
        await self._optimize(1)

    async def _rows(self, version: int, offset: int) -> list[_LanceRow]:
        """Read up to SCAN_ROWS rows from one version of the table. Within a version, the order of the rows is fixed."""
        shape = self._opened()
        names = dict.fromkeys([shape.id_column, *shape.texts, *map(shape.column, SIDES), shape.marker])

        async def read(table: Any) -> Any:
            await table.checkout(version)
            return await table.query().select([*names]).offset(offset).limit(SCAN_ROWS).to_arrow()

        data = await self._table(read)
        ids, markers = data[shape.id_column].to_pylist(), data[shape.marker].to_pylist()
        texts = (
            zip(*(self._values(data, name) for name in shape.texts), strict=True) if shape.texts else [()] * len(ids)
        )
        old, new = (_vector_bytes(data[shape.column(side)].combine_chunks()) for side in SIDES)
        return [
            _LanceRow(row_id, text, {"old": old_bytes, "new": new_bytes}, marker)
            for row_id, text, old_bytes, new_bytes, marker in zip(ids, texts, old, new, markers, strict=True)
        ]

    def _values(self, data: Any, name: str) -> list[Any]:
        """Return the values of a column. Raises CollectionMismatch for a time that Python cannot represent."""
        try:
            values: list[Any] = data[name].to_pylist()
        except (ValueError, OverflowError):
            raise CollectionMismatch(
                f"the column {name} of {self._source.collection}, which --text names, has a time that "
                "Python cannot represent"
            ) from None
        return values

    def _columns(self, row: _LanceRow) -> dict[str, Any]:
        """Return the text columns of a row by name, and the fields of its payload if the template names any of them."""
        shape = self._opened()
        values = dict(zip(shape.texts, row.texts, strict=True))
        if all(name in values for name in self._source.text.columns):
            return values
        try:
            payload = msgspec.json.decode(values[PAYLOAD] or "{}")
        except UNDECODABLE:
            payload = None
        return {**(payload if isinstance(payload, dict) else {}), **values}

    def _is_current(self, row: _LanceRow, side: Side) -> bool:
        """Return whether a row has a vector of `side` (old or new model) that was computed from the row's text."""
        return row.vectors[side] is not None and row.marker in (self._digest(row, *SIDES), self._digest(row, side))

    def _digest(self, row: _LanceRow, *sides: Side) -> bytes:
        """Return the marker which states that the vectors of `sides` were computed from the text of the row. It states
        nothing about the vector of a side that is not in `sides`.
        """
        digest = hashlib.sha256(msgspec.json.encode(row.texts))
        for side in sides:
            vector = row.vectors[side]
            digest.update(f"\0{self._source.salt(side)}\0{side} {vector is not None}\0".encode())
            digest.update(vector or b"")
        return digest.digest()

    async def write(self, side: Side, rows: Sequence[LiveRow], vectors: Sequence[Vector] | None) -> None:
        shape = self._opened()
        if vectors is None and side == shape.in_use:
            return
        type = shape.columns[shape.column(side)].type
        array = pyarrow.nulls(len(rows), type) if vectors is None else vectors_array(np.array(vectors), type)
        written = [
            self._written(row.stored, side, vector) for row, vector in zip(rows, _vector_bytes(array), strict=True)
        ]
        fields = {
            shape.id_column: [row.id for row in written],
            **{name: [row.texts[place] for row in written] for place, name in enumerate(shape.texts)},
            shape.marker: [row.marker for row in written],
        }
        arrays = {name: pyarrow.array(values, shape.columns[name].type) for name, values in fields.items()}
        arrays[shape.column(side)] = array
        if side == shape.in_use:
            # Vectors of the side in use are written only to rows that a writer has changed. So the vectors of the
            # opposite side in these rows belong to earlier texts, and are removed.
            away = shape.column(opposite(side))
            arrays[away] = pyarrow.nulls(len(rows), shape.columns[away].type)
        if len(set(fields[shape.id_column])) < len(rows):
            raise CollectionMismatch(
                f"several rows of {self._source.collection} have the same {shape.id_column}: name another column with "
                "--id"
            )
        if changed := [place for place, row in enumerate(rows) if written[place] != row.stored]:
            schema = pyarrow.schema([shape.columns[name] for name in arrays])
            await self._merge(pyarrow.table([*arrays.values()], schema=schema).take(changed))

    async def _merge(self, data: Any) -> None:
        """Write the columns in `data`. Rows whose stored text differs from the text in `data` are skipped."""
        shape = self._opened()
        same = " AND ".join(
            f"(target.{name} = source.{name} OR (target.{name} IS NULL AND source.{name} IS NULL))"
            for name in map(_quoted, shape.texts)
        )

        async def merge(table: Any) -> None:
            # The library cannot use an index of the ids for a write of only some columns, so the index is off.
            builder = table.merge_insert(shape.id_column).use_index(False)
            # Without `on_bad_vectors`, the library refuses a column in which all vectors are null.
            await builder.when_matched_update_all(where=same or None).execute(data, on_bad_vectors="null")

        await self._table(merge, data.nbytes / BYTES_PER_S)
        self._unindexed += data.num_rows
        await self._optimize(self._optimize_rows)

    def _written(self, row: _LanceRow, side: Side, vector: bytes | None) -> _LanceRow:
        """Return `row` with `vector` for a side (old or new model), and with the marker for the changed vectors."""
        in_use = self._opened().in_use
        vectors: dict[Side, bytes | None] = {**row.vectors, side: vector}
        sides: tuple[Side, ...] = SIDES
        if side == in_use:
            vectors[opposite(side)] = None
        elif side == "old" and row.marker not in (self._digest(row, *SIDES), self._digest(row, "new")):
            # The present marker does not prove that the vector in use is from the new model: a writer may have computed
            # this vector with the old model. So the written marker covers only the vector of the old side.
            sides = ("old",)
        changed = _LanceRow(row.id, row.texts, vectors, None)
        return _LanceRow(row.id, row.texts, vectors, self._digest(changed, *sides))

    async def _optimize(self, rows: int) -> None:
        """Put written rows into the indexes if at least `rows` rows were written since the last optimization. An error
        is ignored, because searches also find rows that are in no index, but more slowly.
        """
        if self._unindexed >= rows:
            self._unindexed = 0
            with contextlib.suppress(StoreError):
                await self._table(lambda table: table.optimize(cleanup_older_than=NO_PRUNING), INDEX_S, once=True)

    async def sample(self, count: int) -> Sequence[LiveRow]:
        shape = self._opened()

        async def read(table: Any) -> Any:
            rows = await table.count_rows()
            offsets = random.sample(range(rows), min(count, rows))
            return await table.take_offsets(offsets).select([shape.id_column, *shape.texts]).to_list()

        rows = [
            _LanceRow(row[shape.id_column], tuple(row[name] for name in shape.texts), {}, None)
            for row in await self._table(read)
        ]
        return [LiveRow(str(row.id), self._columns(row)) for row in rows]

    async def nearest(self, side: Side, vector: Vector, count: int) -> Sequence[str]:
        shape = self._opened()

        async def read(table: Any) -> Any:
            query = table.query().nearest_to(vector).column(shape.column(side)).distance_type(shape.distance)
            return await query.limit(count).select([shape.id_column, "_distance"]).to_list()

        return [str(row[shape.id_column]) for row in await self._table(read)]

    async def build_indexes(self) -> None:
        shape = self._opened()
        column = shape.column("new")

        async def build(table: Any) -> None:
            indexes = await table.list_indices()
            if any(index.columns == [column] for index in indexes):
                return
            for index in (index for index in indexes if index.columns == [shape.column("old")]):
                config = getattr(lancedb.index, index.index_type)(distance_type=shape.distance)
                # a unique name, because `create_index` replaces an index of the same name
                await table.create_index(column, config=config, name=f"{shape.marker}_idx")

        await self._table(build, INDEX_S)
        await self._optimize(1)

    async def switch(self, side: Side) -> None:
        shape = self._opened()
        if shape.in_use == side:
            return
        away = shape.vector + (BEFORE if side == "new" else NEXT)
        await self._change_columns(
            {shape.vector, away, shape.marker},
            lambda table: table.alter_columns(
                # rows that a writer inserts after the switch have no vector in this column
                {"path": shape.vector, "rename": away, "nullable": True},
                {"path": shape.column(side), "rename": shape.vector},
            ),
        )
        await self.open()

    async def clean_up(self) -> None:
        shape = self._opened()
        if not shape.is_begun:
            return
        away = shape.column(opposite(shape.in_use))
        await self._change_columns({shape.vector}, lambda table: table.drop_columns([away, shape.marker]))
        await self.open()

    async def close(self) -> None:
        await self._database.close()

    def _opened(self) -> _LanceShape:
        assert self._shape is not None, "open comes first"
        return self._shape

    async def _table(self, work: Callable[[Any], Awaitable[T]], seconds: float = 0.0, *, once: bool = False) -> T:
        """Return the result of `work`, called with the newest version of the table. Raises CollectionMismatch if a
        concurrent command has changed the columns of vectors.
        """

        async def checked(connection: Any) -> T:
            table = await opened_table(connection, self._source.collection)
            self._check_columns(await self._own_columns(table))
            return await work(table)

        return await self._database.run(checked, seconds, once=once)

    async def _change_columns(self, after: set[str], change: Callable[[Any], Awaitable[Any]]) -> None:
        """Call `change`, which adds, renames or drops columns. `after`: names of the vector and marker columns that the
        table has after the call. Raises CollectionMismatch if another command has changed these columns.
        """
        is_repeat = False

        async def changed(connection: Any) -> None:
            nonlocal is_repeat
            table = await opened_table(connection, self._source.collection)
            names = await self._own_columns(table)
            # an earlier attempt, whose reply was lost, may have changed the columns
            if is_repeat and names == after:
                return
            is_repeat = True
            self._check_columns(names)
            await change(table)

        await self._database.run(changed)

    async def _own_columns(self, table: Any) -> set[str]:
        """Return the names of the vector columns and of the marker column that a table has."""
        return {field.name for field in await table.schema()} & self._migrated()

    def _migrated(self) -> set[str]:
        """Return the names of all columns that a migration of this table uses."""
        shape = self._opened()
        return {shape.vector, shape.marker, *(shape.vector + suffix for suffix in (NEXT, BEFORE))}

    def _check_columns(self, names: set[str]) -> None:
        """Raise CollectionMismatch if `names` differ from the vector and marker columns that `open` has read."""
        if names != self._opened().columns.keys() & self._migrated():
            raise CollectionMismatch(
                f"another command has switched {self._source.collection} meanwhile, or begun or cleaned up a "
                "migration: run one command at a time"
            )


def _is_vector(field: Any) -> bool:
    return (
        field is not None
        and pyarrow.types.is_fixed_size_list(field.type)
        and pyarrow.types.is_floating(field.type.value_type)
    )


def _is_text(field: Any) -> bool:
    return field is not None and (pyarrow.types.is_string(field.type) or pyarrow.types.is_large_string(field.type))


def _is_integer(field: Any) -> bool:
    return field is not None and pyarrow.types.is_integer(field.type)


def _is_plain(field: Any) -> bool:
    """Return whether a template can use the values of a column, and SQL can compare them."""
    type = field.type
    return (
        _is_text(field)
        or pyarrow.types.is_boolean(type)
        or pyarrow.types.is_integer(type)
        or pyarrow.types.is_floating(type)
        or pyarrow.types.is_decimal(type)
        # Times in nanoseconds are refused: Python drops the nanoseconds, so a write would find that the row's time
        # differs from the stored time, and would skip the row.
        or (pyarrow.types.is_temporal(type) and getattr(type, "unit", "") != "ns")
    )


def _vector_bytes(array: Any) -> list[bytes | None]:
    """Return the numbers of each vector as bytes; None for a null."""
    present = array.drop_null()
    rows = iter(present.flatten().to_numpy(zero_copy_only=False).reshape(len(present), array.type.list_size))
    return [next(rows).tobytes() if is_valid else None for is_valid in array.is_valid().to_pylist()]


def _quoted(name: str) -> str:
    return f"`{name}`"
