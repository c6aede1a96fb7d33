"""Live collection of Qdrant. A migration embeds its texts with a new model into a second collection, while searches and
writers use the first collection. Searches and writers name the collection in use by an alias, here `docs`:

    docs          ──► the collection in use
    docs--1f0c9a2b        the new collection: 8 hexadecimal digits of the new model's fingerprint
    docs--before  ──► the old collection, after the switch

The new collection has copies of the points of the old collection. A copy has the same id and payload, and the same
vectors except the migrated vector. The marker of a point is the field `_sie` of its payload. A point is pending if its
copy is missing, has another payload, or has a marker of another text or model. A point that a writer has replaced has
no marker.

    _sie: TEXT.PAYLOAD    TEXT     digest of the text and model of the vector; empty for a vector of the application
                          PAYLOAD  digest of the payload when both collections last had the same payload

So a point has not changed since it was copied if PAYLOAD equals the digest of its present payload. After the switch,
this comparison shows whether a point or its copy is newer. If a point without a copy has not changed, its copy was
deleted. If it has changed, or has no marker, the point is new.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec

from sie_bulk_jobs.sinks.live import LiveRow, LiveSource, LiveState, ScannedPage, Side, Vector, opposite
from sie_bulk_jobs.sinks.qdrant import (
    MAX_DIMS,
    AnswerTooLarge,
    QdrantConnection,
    json_vector,
    point_bodies,
    vector_settings,
)
from sie_bulk_jobs.sinks.sink import (
    CollectionMismatch,
    CollectionMissing,
    Output,
    SinkUnsuitable,
    check_dims,
    checked_name,
)

MARKER = "_sie"
# values of TEXT (first part of a marker): NO_VECTOR for a copy without a vector, CLAIM for a point while
# `_replace_vectors` changes it
NO_VECTOR, CLAIM = "none", "claim"
CONDITIONS_SINCE = (1, 16)  # older versions of Qdrant ignore `update_filter`, the condition of a write
SCAN_POINTS = 256  # points that are read at a time; halved if the reply is too large
COPIED_POINTS = 64  # points whose unchanged vectors are read at a time, to copy them; halved if the reply is too large
ANSWER_BYTES = 64 << 20  # largest number of bytes of a reply with points; a point alone has at most 32 MiB
# settings that are copied to the new collection; _CONFIGS: name in a collection's description -> name in a request
_PARAMS = ("shard_number", "replication_factor", "write_consistency_factor", "on_disk_payload")
_CONFIGS = {
    "hnsw_config": "hnsw_config",
    "optimizer_config": "optimizers_config",
    "quantization_config": "quantization_config",
}


class _PayloadIndex(msgspec.Struct, frozen=True):
    data_type: str
    params: dict[str, Any] | None = None


class _CollectionConfig(msgspec.Struct, frozen=True):
    params: dict[str, Any]
    hnsw_config: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None


class _CollectionInfo(msgspec.Struct, frozen=True):
    config: _CollectionConfig
    payload_schema: dict[str, _PayloadIndex] = {}


class _Point(msgspec.Struct, frozen=True):
    id: int | str
    payload: dict[str, Any] | None = None
    vector: Any = None


class _PointPage(msgspec.Struct, frozen=True):
    points: tuple[_Point, ...] = ()
    next_page_offset: int | str | None = None


class _PointCount(msgspec.Struct, frozen=True):
    count: int


class _QdrantAlias(msgspec.Struct, frozen=True):
    alias_name: str
    collection_name: str


class _AliasListing(msgspec.Struct, frozen=True):
    aliases: tuple[_QdrantAlias, ...] = ()


@dataclass(frozen=True)
class _CollectionPair:
    """Old and new collection of a migration. `vector`: name of the migrated vector, empty if the vector has no name.
    `params`: settings of this vector, empty if it is sparse. `more_vectors`: names of the vectors that are only copied.
    """

    names: Mapping[Side, str]
    in_use: Side
    is_begun: bool
    info: _CollectionInfo
    vector: str
    params: dict[str, Any]
    more_vectors: tuple[str, ...]


@dataclass(frozen=True)
class _LateWrite:
    """Point that a writer has changed in the collection not in use, after the point was copied. `marker`: marker of the
    point with the same id in the collection in use; empty if that collection lacks the point.
    """

    point: _Point
    marker: str


class QdrantLive:
    def __init__(self, server: QdrantConnection, source: LiveSource) -> None:
        self._server = server
        self._source = source
        self._alias = source.collection
        self._before = f"{source.collection}--before"
        self._layout: _CollectionPair | None = None
        self._copied_points = COPIED_POINTS

    async def open(self) -> LiveState:
        checked_name(self._alias)
        await self._server.check_version(CONDITIONS_SINCE, "a migration, which writes with update_filter,")
        aliases = await self._aliases()
        target = aliases.get(self._alias)
        if target is None:
            if await self._server.send("GET", _path(self._alias), missing=True) is None:
                raise CollectionMissing(f"Qdrant has no alias {self._alias}")
            raise CollectionMismatch(
                f"{self._alias} is a collection of Qdrant and not an alias, so searches cannot be switched. Create an "
                "alias for it (POST /collections/aliases), let searches and writers use the alias, and name it with "
                "--collection"
            )
        new = f"{self._alias}--{self._source.fingerprints['new'][:8]}"
        in_use: Side = "new" if target == new else "old"
        old = aliases.get(self._before, "") if in_use == "new" else target
        if in_use == "old" and self._before in aliases:
            raise CollectionMismatch(
                f"an earlier migration of {self._alias} is not cleaned up: the alias {self._before} still names the "
                f"collection {aliases[self._before]}. Remove the collection and the alias, or run the command of that "
                "migration with --step clean-up"
            )
        info = await self._server.read("GET", _path(target), _CollectionInfo)
        vector, params, more_vectors = self._vectors(info)
        if info.config.params.get("sharding_method") == "custom":
            raise CollectionMismatch(
                f"the collection {target} has custom sharding (shards by key), which a migration does not support"
            )
        if in_use == "new":
            is_begun = bool(old)  # the clean-up of a migration removes the old collection
        else:
            is_begun = await self._server.send("GET", _path(new), missing=True) is not None
        self._layout = _CollectionPair({"old": old, "new": new}, in_use, is_begun, info, vector, params, more_vectors)
        counted = await self._server.read("POST", _path(target, "/points/count"), _PointCount, {"exact": True})
        return LiveState(counted.count, params.get("size", 0), in_use, is_begun, _output_of(params))

    def _vectors(self, info: _CollectionInfo) -> tuple[str, dict[str, Any], tuple[str, ...]]:
        """Return the name and the parameters (empty for a sparse vector) of the vector to migrate, and the names of the
        other vectors.
        """
        named, sparse = vector_settings(info.config.params)
        sizes = {name: params.get("size") for name, params in named.items() if isinstance(params, dict)}
        # by default the only dense vector is migrated, even if there are sparse vectors too
        default = named if len(named) == 1 else {**named, **sparse}
        vector = self._source.vector or (next(iter(default)) if len(default) == 1 else "")
        if vector not in sparse and not isinstance(sizes.get(vector), int):
            raise CollectionMismatch(
                f"the collection {self._alias} has the vectors "
                f"{', '.join(name or '(no name)' for name in (*named, *sparse))}: choose one with --vector"
            )
        more_vectors = tuple(name for name in (*named, *sparse) if name != vector)
        return vector, {} if vector in sparse else named[vector], more_vectors

    async def begin(self, dims: int) -> None:
        layout = self._opened()
        name = layout.names["new"]
        if layout.params:
            check_dims(dims, MAX_DIMS, "Qdrant")
        if not layout.is_begun:
            config = layout.info.config
            vectors: Any = config.params.get("vectors") or {}
            if layout.params:
                params = {**layout.params, "size": dims}
                vectors = params if layout.vector == "" else {**vectors, layout.vector: params}
            settings = {
                "vectors": vectors,
                **{
                    key: config.params[key]
                    for key in ("sparse_vectors", *_PARAMS)
                    if config.params.get(key) is not None
                },
                **{key: getattr(config, own) for own, key in _CONFIGS.items() if getattr(config, own)},
            }
            await self._server.send("PUT", _path(name), settings, exists=True)
        for field, index in layout.info.payload_schema.items():
            body = {"field_name": field, "field_schema": index.params or index.data_type}
            await self._server.send("PUT", _path(name, "/index?wait=true"), body)
        created = await self._server.read("GET", _path(name), _CollectionInfo)
        _, params, _ = self._vectors(created)
        if params and params["size"] != dims:
            raise CollectionMismatch(
                f"the collection {name} has {params['size']} dimensions, but the vectors to write have {dims}: no "
                "migration to this model created the collection. Delete it"
            )
        await self.open()

    async def pending(self, side: Side) -> AsyncIterator[ScannedPage]:
        layout = self._opened()
        source, copies = layout.names[layout.in_use], layout.names[side]
        async for points in self._scroll(source):
            if side == layout.in_use:
                stored = {point.id: point for point in points}
            else:
                stored = await self._points(copies, [point.id for point in points])
                current = [point for point in points if self._is_current(side, point, stored.get(point.id))]
                await self._agree(source, [point for point in current if not _is_agreed(point)])
            rows = [
                LiveRow(str(point.id), _plain(point), stored=point)
                for point in points
                if not self._is_current(side, point, stored.get(point.id))
            ]
            yield ScannedPage(len(points), rows)
        if side != layout.in_use:
            await self._remove_deleted(source, copies)
        elif layout.is_begun:
            async for page in self._late_writes(layout.names[opposite(side)], source):
                yield page

    def _is_current(self, side: Side, point: _Point, copy: _Point | None) -> bool:
        """Return whether the copy of a point has the point's payload, and a vector of the text in this payload."""
        if copy is None or _plain(copy) != _plain(point):
            return False
        marker = _marker(copy)
        text = marker.partition(".")[0]
        if text == self._text_digest(side, point):
            return True
        # If the marker has no TEXT (its first part), the application wrote the copy's vector, not SIE. In the old
        # collection, this vector fits the payload in two cases. The copy's payload has not changed since both
        # collections had the same payload. Or the copy has no marker, and the old collection is not in use.
        return side == "old" and not text and (_is_agreed(copy) or (not marker and side != self._opened().in_use))

    async def _late_writes(self, away: str, source: str) -> AsyncIterator[ScannedPage]:
        """Yield the points of `away` (the collection not in use) if a writer has changed them after they were copied. A
        point is skipped if its copy in `source` (the collection in use) is newer. Points that were deleted from `away`
        are deleted from `source`.
        """
        async for points in self._scroll(away):
            changed = [point for point in points if not _is_agreed(point)]
            present = await self._points(source, [point.id for point in changed]) if changed else {}
            rows, settled = [], []
            for point in changed:
                copy = present.get(point.id)
                if copy is not None and (not _is_agreed(copy) or _plain(copy) == _plain(point)):
                    settled.append(point)
                else:
                    late = _LateWrite(point, "" if copy is None else _marker(copy))
                    rows.append(LiveRow(str(point.id), _plain(point), stored=late))
            await self._agree(away, settled)
            yield ScannedPage(0, rows)
        async for points in self._scroll(source):
            copies = {point.id: _marker(point) for point in points if _is_agreed(point)}
            present = await self._points(away, list(copies), with_payload=False) if copies else {}
            if deleted := [point_id for point_id in copies if point_id not in present]:
                unchanged = _with_marker(*(copies[point_id] for point_id in deleted), ids=deleted)
                await self._check_in_use()
                await self._server.send("POST", _path(source, "/points/delete?wait=true"), {"filter": unchanged})

    async def _agree(self, collection: str, points: Sequence[_Point]) -> None:
        """Set PAYLOAD (second part of a marker) of each point to the digest of the point's payload, so that the point
        counts as unchanged. The other collection must already have the same payload or a newer one.
        """
        operations = [
            {
                "set_payload": {
                    "payload": {MARKER: f"{_marker(point).partition('.')[0]}.{_payload_digest(point)}"},
                    "filter": _with_marker(*filter(None, [_marker(point)]), ids=[point.id]),
                }
            }
            for point in points
        ]
        if operations:
            await self._change(collection, operations)

    async def _change(self, collection: str, operations: Sequence[Mapping[str, Any]]) -> None:
        await self._server.send("POST", _path(collection, "/points/batch?wait=true"), {"operations": operations})

    async def _remove_deleted(self, source: str, copies: str) -> None:
        async for points in self._scroll(copies, with_payload=False):
            ids = [point.id for point in points]
            present = await self._points(source, ids, with_payload=False)
            if deleted := [point_id for point_id in ids if point_id not in present]:
                await self._check_in_use()
                await self._server.send("POST", _path(copies, "/points/delete?wait=true"), {"points": deleted})

    async def write(self, side: Side, rows: Sequence[LiveRow], vectors: Sequence[Vector] | None) -> None:
        layout = self._opened()
        pairs = [(row.stored, None if vectors is None else vectors[number]) for number, row in enumerate(rows)]
        if side != layout.in_use:
            await self._put(side, pairs)
            await self._agree(layout.names[layout.in_use], [point for point, _ in pairs])
            return
        late = [(write, vector) for write, vector in pairs if isinstance(write, _LateWrite)]
        if late:
            # the filter skips a copy whose marker differs, because the application has changed this copy since the scan
            unchanged = _with_marker(*(write.marker for write, _ in late))
            await self._put(side, [(write.point, vector) for write, vector in late], unchanged)
            await self._agree(layout.names[opposite(side)], [write.point for write, _ in late])
        own = [(point, vector) for point, vector in pairs if isinstance(point, _Point) and vector is not None]
        if own:
            await self._replace_vectors(own)

    async def _put(
        self,
        side: Side,
        points: Sequence[tuple[_Point, Vector | None]],
        update_filter: Mapping[str, Any] | None = None,
    ) -> None:
        """Write copies of points to the collection of a side (the old or the new model). `update_filter`: filter for
        the existing points that may be replaced; None if all may be replaced.
        """
        await self._check_in_use()
        condition = b',"update_filter":' + msgspec.json.encode(update_filter) + b"}"
        first = 0
        while first < len(points):
            # read the copied vectors for this batch only, because those of all points would need too much memory
            stored = await self._more_vectors(opposite(side), [point.id for point, _ in points[first:]])
            copied = points[first : first + len(stored)]
            bodies = point_bodies(
                self._copy(point, side, vector, more) for (point, vector), more in zip(copied, stored, strict=True)
            )
            # A thread encodes the bodies, because encoding takes long and would block the event loop.
            while body := await asyncio.to_thread(next, bodies, b""):
                content = body.removesuffix(b"}") + condition
                await self._server.send("PUT", self._points_path(side, "?wait=true"), content, completed=True)
            first += len(stored)

    async def _more_vectors(self, side: Side, ids: Sequence[int | str]) -> list[dict[str, Any]]:
        """Return the vectors that the migration copies unchanged: for each of the first points of `ids`, all vectors by
        name, except the migrated one. The result has as many points as one reply can have.
        """
        layout = self._opened()
        if not layout.more_vectors:
            return [{}] * len(ids)
        while True:
            batch = ids[: self._copied_points]
            try:
                points = await self._point_page(
                    layout.names[side], batch, with_payload=False, with_vector=layout.more_vectors
                )
            except AnswerTooLarge:
                if len(batch) == 1:
                    raise
                self._copied_points = len(batch) // 2
                continue
            vectors = [points[point_id].vector if point_id in points else None for point_id in batch]
            return [vector if isinstance(vector, dict) else {} for vector in vectors]

    def _copy(self, point: _Point, side: Side, vector: Vector | None, more_vectors: dict[str, Any]) -> dict[str, Any]:
        """Return the copy of a point for the collection `side`. `vector`: migrated vector; None for an empty text."""
        name = self._opened().vector
        content: Any = more_vectors
        payload = _plain(point)
        if vector is not None:
            written = json_vector(vector)
            content = {**content, name: written} if name or content else written
        text = NO_VECTOR if vector is None else self._text_digest(side, point)
        payload[MARKER] = f"{text}.{_payload_digest(point)}"
        return {"id": point.id, "vector": content, "payload": payload}

    async def _replace_vectors(self, points: Sequence[tuple[_Point, Vector]]) -> None:
        """Write vectors and markers to the collection in use. The first write sets the markers to a random text, the
        claim. Each later write changes only points that have the claim. A writer that replaces a point meanwhile
        removes the claim with the old payload, so the vector of the writer stays.
        """
        layout = self._opened()
        name, ids = layout.names[layout.in_use], [point.id for point, _ in points]
        claim = f"{CLAIM}.{secrets.token_hex(16)}"
        await self._change(name, [{"set_payload": {"payload": {MARKER: claim}, "filter": _with_marker(ids=ids)}}])
        claimed = await self._points(name, ids)
        for point, vector in points:
            present = claimed.get(point.id)
            if present is None or _marker(present) != claim or _plain(present) != _plain(point):
                continue
            content: Any = {layout.vector: json_vector(vector)} if layout.vector else json_vector(vector)
            unchanged = _with_marker(claim, ids=[point.id])
            marker = f"{self._text_digest(layout.in_use, point)}."
            operations: list[dict[str, Any]] = [
                {"update_vectors": {"points": [{"id": point.id, "vector": content}], "update_filter": unchanged}},
                {"set_payload": {"payload": {MARKER: marker}, "filter": unchanged}},
            ]
            try:
                await self._change(name, operations)
            except CollectionMissing:
                # The point was deleted meanwhile. If the collection was deleted, the next scan raises an error.
                continue

    async def sample(self, count: int) -> Sequence[LiveRow]:
        layout = self._opened()
        # payloads are read by `_points`, because the payloads of all points may be too large for one reply
        body = {"query": {"sample": "random"}, "limit": count, "with_payload": False}
        page = await self._server.read("POST", self._points_path(layout.in_use, "/query"), _PointPage, body)
        points = await self._points(layout.names[layout.in_use], [point.id for point in page.points])
        return [LiveRow(str(point.id), _plain(point)) for point in points.values()]

    async def nearest(self, side: Side, vector: Vector, count: int) -> Sequence[str]:
        name = self._opened().vector
        body = {
            "query": json_vector(vector),
            "limit": count,
            "with_payload": False,
            **({"using": name} if name else {}),
        }
        page = await self._server.read("POST", self._points_path(side, "/query"), _PointPage, body)
        return [str(point.id) for point in page.points]

    async def build_indexes(self) -> None:
        """Do nothing: Qdrant builds its indexes itself."""

    async def switch(self, side: Side) -> None:
        layout = self._opened()
        if layout.in_use == side:
            return
        actions: list[dict[str, Any]] = [
            {"delete_alias": {"alias_name": self._alias}},
            {"create_alias": {"alias_name": self._alias, "collection_name": layout.names[side]}},
            {"create_alias": {"alias_name": self._before, "collection_name": layout.names["old"]}}
            if side == "new"
            else {"delete_alias": {"alias_name": self._before}},
        ]
        await self._server.send("POST", "/collections/aliases", {"actions": actions})
        await self.open()

    async def clean_up(self) -> None:
        layout = self._opened()
        body = {"keys": [MARKER], "filter": {}}
        await self._server.send("POST", self._points_path(layout.in_use, "/payload/delete?wait=true"), body)
        if layout.is_begun:
            # Deleted last: if the clean-up is interrupted earlier, the next clean-up still finds this collection by its
            # name or its alias. Qdrant deletes the alias with the collection.
            await self._server.send("DELETE", _path(layout.names[opposite(layout.in_use)]), missing=True)

    async def close(self) -> None:
        await self._server.close()

    def _opened(self) -> _CollectionPair:
        assert self._layout is not None, "open comes first"
        return self._layout

    def _points_path(self, side: Side, suffix: str) -> str:
        return _path(self._opened().names[side], f"/points{suffix}")

    def _text_digest(self, side: Side, point: _Point) -> str:
        """Return the digest of the model, the template, and the fields of the point that the template names."""
        payload = point.payload or {}
        text = msgspec.json.encode([payload.get(name) for name in self._source.text.columns])
        return hashlib.sha256(self._source.salt(side).encode() + b"\0" + text).hexdigest()[:32]

    async def _aliases(self) -> dict[str, str]:
        """Return the names of collections by alias."""
        listed = await self._server.read("GET", "/aliases", _AliasListing)
        return {alias.alias_name: alias.collection_name for alias in listed.aliases}

    async def _check_in_use(self) -> None:
        """Raise CollectionMismatch if another command has switched the alias, because this command would then write its
        copies to the collection in use.
        """
        layout = self._opened()
        if (await self._aliases()).get(self._alias) != layout.names[layout.in_use]:
            raise CollectionMismatch(f"another command has switched {self._alias} meanwhile: run one command at a time")

    async def _scroll(self, collection: str, *, with_payload: bool = True) -> AsyncIterator[tuple[_Point, ...]]:
        """Yield all points, ordered by id. Raises SinkUnsuitable if a page does not begin after the page before it."""
        offset: int | str | None = None
        limit = SCAN_POINTS
        while True:
            body = {"limit": limit, "offset": offset, "with_payload": with_payload, "with_vector": False}
            try:
                page = await self._server.read("POST", _path(collection, "/points/scroll"), _PointPage, body)
            except AnswerTooLarge:
                if limit == 1:
                    raise
                limit //= 2
                continue
            if page.points:
                yield page.points
            before, offset = offset, page.next_page_offset
            if offset is None:
                return
            # integers come before UUIDs
            if before is not None and (isinstance(offset, str), offset) <= (isinstance(before, str), before):
                raise SinkUnsuitable("the server does not scroll as Qdrant does: its next offset is not a later id")

    async def _points(
        self, collection: str, ids: Sequence[int | str], *, with_payload: bool = True
    ) -> dict[int | str, _Point]:
        """Read points by id, in several requests if one reply would be too large. Missing points are left out."""
        points: dict[int | str, _Point] = {}
        first, limit = 0, len(ids)
        while first < len(ids):
            batch = ids[first : first + limit]
            try:
                points |= await self._point_page(collection, batch, with_payload=with_payload)
            except AnswerTooLarge:
                if len(batch) == 1:
                    raise
                limit = len(batch) // 2
                continue
            first += len(batch)
        return points

    async def _point_page(
        self,
        collection: str,
        ids: Sequence[int | str],
        *,
        with_payload: bool = True,
        with_vector: Sequence[str] = (),
    ) -> dict[int | str, _Point]:
        """Read points by id in one request. Missing points are left out. Raises AnswerTooLarge."""
        body = {"ids": list(ids), "with_payload": with_payload, "with_vector": list(with_vector) or False}
        points = await self._server.read("POST", _path(collection, "/points"), tuple[_Point, ...], body)
        return {point.id: point for point in points}


def _path(collection: str, suffix: str = "") -> str:
    return f"/collections/{quote(collection, safe='')}{suffix}"


def _output_of(params: Mapping[str, Any]) -> Output:
    if not params:
        return "sparse"
    return "multivector" if params.get("multivector_config") else "dense"


def _plain(point: _Point) -> dict[str, Any]:
    """Return the payload of a point without the marker."""
    return {name: value for name, value in (point.payload or {}).items() if name != MARKER}


def _marker(point: _Point) -> str:
    """Return the marker of a point, empty if the point has no marker."""
    marker = (point.payload or {}).get(MARKER)
    return marker if isinstance(marker, str) else ""


def _payload_digest(point: _Point) -> str:
    return hashlib.sha256(msgspec.json.encode(_plain(point), order="deterministic")).hexdigest()[:32]


def _is_agreed(point: _Point) -> bool:
    """Return whether the payload of a point is unchanged since both collections last had equal payloads for it."""
    return _marker(point).partition(".")[2] == _payload_digest(point)


def _with_marker(*markers: str, ids: Sequence[int | str] = ()) -> dict[str, Any]:
    """Return the filter for points that have one of `markers` and one of `ids`. Empty `markers` or `ids` accept all."""
    conditions: list[dict[str, Any]] = [{"has_id": list(ids)}] if ids else []
    if markers:
        conditions.append({"key": MARKER, "match": {"any": list(markers)}})
    return {"must": conditions}
